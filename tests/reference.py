"""A second decoder of packed bodies, slow and plain: bit by bit in Python integers, by the rules of proto/README.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import zstandard

LOW, ONE_OWN, LONGEST = 23, 4096, 1 << 20


class Bytes:
    """What is left of a body."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        assert len(part) == count
        self.at += count
        return part

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte % 128) << shift
            if byte < 128:
                return value
            shift += 7

    def stream(self, size: int) -> list[int]:
        head = self.varint()
        data = self.take(head // 2)
        if head % 2:
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        assert len(data) == size
        return list(data)


def bits_of(data: list[int], count: int) -> list[int]:
    """The first bits, the lowest of each byte first; those past them are zero."""
    bits = [byte >> k & 1 for byte in data for k in range(8)]
    assert len(data) == -(-count // 8)
    assert not any(bits[count:])
    return bits[:count]


def low_bits(source: Bytes, widths: list[int]) -> list[int]:
    values = [0] * len(widths)
    for m in range(1, max(widths, default=0) + 1):
        members = [i for i, width in enumerate(widths) if width == m]
        if not members:
            continue
        for plane in range(m // 8):
            for i, byte in zip(members, source.take(len(members)), strict=True):
                values[i] |= byte << (8 * plane)
        for bit in range(m % 8):
            packed = list(source.take(-(-len(members) // 8)))
            for i, one in zip(members, bits_of(packed, len(members)), strict=True):
                values[i] |= one << (8 * (m // 8) + bit)
    return values


def numbers(source: Bytes, count: int) -> list[int]:
    lengths = source.stream(count)
    low = low_bits(source, [max(0, n - 1) for n in lengths])
    return [part | (1 << (n - 1)) if n else 0 for n, part in zip(lengths, low, strict=True)]


@dataclass
class Groups:
    """With GRID: each coordinate's group, and the number of rows."""

    of: list[int]
    rows: int
    columns: int


def mask(source: Bytes, kept: int, rows: int, columns: int) -> tuple[list[int], Groups | None, int]:
    """Chosen coordinates, ascending; groups if there are any; the coding."""
    size = rows * columns
    (coding,) = source.take(1)
    if coding == 0:
        return list(range(size)), None, coding
    if coding == 1:
        bits = bits_of(source.stream(-(-size // 8)), size)
        return [j for j in range(size) if bits[j]], None, coding
    if coding == 2:
        at, found = -1, []
        for gap in numbers(source, kept):
            at += gap + 1
            found.append(at)
        return found, None, coding
    assert coding == 3
    a, b = source.take(2)
    row_class, column_class = source.stream(rows), source.stream(columns)
    cells = source.stream(a * b)
    areas: dict[int, list[int]] = {}
    for row_kind in range(a):
        for column_kind in range(b):
            members = areas.setdefault(cells[row_kind * b + column_kind], [])
            members += [
                r * columns + c
                for r in range(rows)
                if row_class[r] == row_kind
                for c in range(columns)
                if column_class[c] == column_kind
            ]
    chosen = []
    for group in range(max(cells) + 1):
        members = areas.get(group, [])
        bits = bits_of(source.stream(-(-len(members) // 8)), len(members))
        chosen += [j for j, one in zip(members, bits, strict=True) if one]
    every = [cells[row_class[r] * b + column_class[c]] for r in range(rows) for c in range(columns)]
    return sorted(chosen), Groups(every, rows, columns), coding


def symbols(source: Bytes, at: list[int], groups: Groups | None) -> list[int]:
    if groups is None:
        return source.stream(len(at))
    flips = bits_of(source.stream(-(-groups.rows // 8)), groups.rows)
    result = [0] * len(at)
    for group in range(max(groups.of) + 1):
        members = [i for i, j in enumerate(at) if groups.of[j] == group]
        for i, symbol in zip(members, source.stream(len(members)), strict=True):
            result[i] = symbol ^ flips[at[i] // groups.columns]
    return result


def usable(u_exponent: int, u_negative: int, w: int) -> int:
    """Mantissa bits of an update of the weight with the pattern w, by the grid that w + u must lie on."""
    e_w, w_negative, w_mantissa = w >> 23 & 255, w >> 31, w & 0x7FFFFF
    if u_exponent == 0 or e_w == 0:
        return LOW
    behind = e_w - u_exponent
    if u_negative == w_negative:
        return LOW if behind < 2 else max(0, LOW - behind)
    if behind < 2:
        return LOW
    bits = max(0, LOW - behind)
    # |w| - 2^(E_u - 126) leaves w's binade if the mantissa is below 2^(24 - behind) units.
    return bits + (behind <= 23 and w_mantissa < 1 << min(22, 24 - behind))


def values(
    source: Bytes, at: list[int], width: int, old: list[int] | None, groups: Groups | None, change: bool
) -> tuple[list[int], int]:
    """The bit patterns that come next, and their coding; `old` has the patterns at the same coordinates."""
    (coding,) = source.take(1)
    count = len(at)
    if coding == 0:
        data = source.take(count * width)
        return [int.from_bytes(data[i * width : (i + 1) * width], "little") for i in range(count)], coding
    if coding == 1:
        planes = [source.stream(count) for _ in range(width)]
        rotated = [sum(plane[i] << (8 * k) for k, plane in enumerate(planes)) for i in range(count)]
        return [r >> 1 | (r & 1) << (8 * width - 1) for r in rotated], coding
    if coding in (2, 3):
        (lowest,) = source.take(1)
        found = symbols(source, at, groups)
        exponents, signs = [s // 2 + lowest for s in found], [s % 2 for s in found]
        used = [LOW] * count
        if coding == 3:
            assert old is not None
            used = [usable(e, s, w) for e, s, w in zip(exponents, signs, old, strict=True)]
        upper = low_bits(source, used)
        return [
            s << 31 | e << 23 | m << (LOW - u)
            for s, e, m, u in zip(signs, exponents, upper, used, strict=True)
        ], coding
    assert coding == 4
    assert change
    assert old is not None
    found = symbols(source, at, groups)
    lengths = [s // 2 for s in found]
    low = low_bits(source, [max(0, n - 1) for n in lengths])
    top = 1 << (8 * width - 1)
    result = []
    for symbol, n, part, before in zip(found, lengths, low, old, strict=True):
        # Floats in order: the negative ones, from the largest pattern down, and then the positive.
        rank = 2 * top - 1 - before if before & top else before + top
        rank += (-1 if symbol % 2 else 1) * (part | (1 << (n - 1)) if n else 0)
        result.append(rank - top if rank & top else 2 * top - 1 - rank)
    return result, coding


def section(
    source: Bytes, rows: int, columns: int, width: int, old: list[int] | None, change: bool
) -> tuple[list[int], list[int], tuple[int, int]]:
    """Coordinates, their bit patterns, and both codings. `old` has the patterns of the whole section."""
    kept = source.varint()
    at, groups, index_coding = mask(source, kept, rows, columns)
    assert len(at) == kept
    before = None if old is None else [old[j] for j in at]
    found, value_coding = values(source, at, width, before, groups, change)
    return at, found, (index_coding, value_coding)


def patterns(data: bytes, width: int) -> list[int]:
    """Little-endian bit patterns."""
    return [x for (x,) in struct.iter_unpack({1: "<B", 2: "<H", 4: "<I", 8: "<Q"}[width], data)]
