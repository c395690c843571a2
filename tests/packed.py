"""The parts of packed bodies written a second time, from the protocol's description alone, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zstandard


def varint(value: int) -> bytes:
    """Groups of seven bits, low group first, the highest bit set in all but the last."""
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def stored(data: bytes | Sequence[int]) -> bytes:
    """A stream as it is."""
    return varint(2 * len(data)) + bytes(data)


def zipped(data: bytes | Sequence[int]) -> bytes:
    """A stream as a frame, at a level that our own writer does not use."""
    frame = zstandard.ZstdCompressor(level=9).compress(bytes(data))
    return varint(2 * len(frame) + 1) + frame


def bits(flags: Sequence[int | bool]) -> bytes:
    """A bit each, lowest first, padded with zeros to bytes."""
    data = bytearray((len(flags) + 7) // 8)
    for j, flag in enumerate(flags):
        data[j // 8] |= int(flag) << j % 8
    return bytes(data)


def low_bits(values: Sequence[int], widths: Sequence[int]) -> bytes:
    """For every width: byte planes, then bit planes, lowest first."""
    out = b""
    for m in range(1, max(widths, default=0) + 1):
        run = [value for value, width in zip(values, widths, strict=True) if width == m]
        for plane in range(m // 8):
            out += bytes(value >> 8 * plane & 0xFF for value in run)
        for bit in range(m // 8 * 8, m):
            out += bits([value >> bit & 1 for value in run])
    return out


def numbers(values: Sequence[int]) -> bytes:
    lengths = [value.bit_length() for value in values]
    return stored(lengths) + low_bits(values, [max(length - 1, 0) for length in lengths])


def grid_parts(
    matrix: Sequence[Sequence[Any]],
    rows: Sequence[int],
    columns: Sequence[int],
    groups: Sequence[Sequence[int]],
) -> list[list[Any]]:
    """The elements of a matrix by group: cell after cell, each cell row by row."""
    parts: list[list[Any]] = [[] for _ in range(max(map(max, groups)) + 1)]
    for a, line in enumerate(groups):
        mine = [row for row, own in zip(matrix, rows, strict=True) if own == a]
        for b, group in enumerate(line):
            places = [c for c, own in enumerate(columns) if own == b]
            parts[group] += [row[c] for row in mine for c in places]
    return parts


def grid(
    matrix: Sequence[Sequence[Any]],
    rows: Sequence[int],
    columns: Sequence[int],
    groups: Sequence[Sequence[int]],
) -> bytes:
    """A mask over a matrix, without the byte that names its coding."""
    out = bytes([len(groups), len(groups[0])])
    for side in (rows, columns, [group for line in groups for group in line]):
        out += stored(side)
    return out + b"".join(stored(bits(part)) for part in grid_parts(matrix, rows, columns, groups))


def planes(patterns: Sequence[int], width: int) -> bytes:
    """Value coding 1: `width` bytes a value, rotated left by one bit, plane by plane."""
    top = 8 * width - 1
    rotated = [pattern << 1 & (1 << 8 * width) - 1 | pattern >> top for pattern in patterns]
    return b"\x01" + b"".join(stored([value >> 8 * n & 0xFF for value in rotated]) for n in range(width))


def floats(
    patterns: Sequence[int], lowest: int, widths: Sequence[int] | None = None, symbols: bytes | None = None
) -> bytes:
    """Value coding 2, or with `widths` 3, of float32; `symbols` if they are not to be one stream."""
    signs = [2 * ((p >> 23 & 0xFF) - lowest) + (p >> 31) for p in patterns]
    coding = 2 if widths is None else 3
    widths = [23] * len(patterns) if widths is None else widths
    upper = [(p & 0x7FFFFF) >> 23 - m for p, m in zip(patterns, widths, strict=True)]
    body = stored(signs) if symbols is None else symbols
    return bytes([coding, lowest]) + body + low_bits(upper, widths)


def rank(pattern: int, width: int) -> int:
    """Where a float stands among all floats of as many bytes, from the lowest (a NaN) on."""
    top = 1 << 8 * width - 1
    return 2 * top - 1 - pattern if pattern & top else pattern + top


def steps(new: Sequence[int], old: Sequence[int], width: int, symbols: bytes | None = None) -> bytes:
    """Value coding 4; `symbols` if they are not to be one stream."""
    ways = [rank(a, width) - rank(b, width) for a, b in zip(new, old, strict=True)]
    signs = [2 * abs(way).bit_length() + (way < 0) for way in ways]
    body = stored(signs) if symbols is None else symbols
    return b"\x04" + body + low_bits([abs(way) for way in ways], [abs(way).bit_length() - 1 for way in ways])


def grid_symbols(
    symbols: Sequence[int], at: Sequence[int], groups: Sequence[int], rows: int, columns: int
) -> bytes:
    """Symbols under a grid; `groups` has the group of each, and every group up to the highest of the grid."""
    mine = [[s for s, j in zip(symbols, at, strict=True) if j // columns == row] for row in range(rows)]
    flips = [2 * sum(s & 1 for s in row) > len(row) for row in mine]
    flat = [symbol ^ flips[j // columns] for symbol, j in zip(symbols, at, strict=True)]
    parts = [[s for s, own in zip(flat, groups, strict=True) if own == g] for g in range(max(groups) + 1)]
    return stored(bits(flips)) + b"".join(stored(part) for part in parts)
