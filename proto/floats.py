"""Float values, bit for bit: the value codings of packed bodies.

RAW: the values as they are, little-endian.
PLANES: the bit pattern rotated left by one, so that the sign is the lowest bit; then a stream for each byte plane,
lowest first. The highest plane is the exponent, alone.
FLOAT (float32): `symbols` 2 (exponent - lowest exponent) + sign, after one byte that holds the lowest exponent;
then the mantissas' upper m bits as `low_bits`. m is 23.
BASED (float32): FLOAT, but m says how many mantissa bits an update of a known weight can use: see `mantissa_bits`.
STEPS (16 and 32 bit floats): how many representable numbers lie between a known value and the new one: `symbols`
2 * bit length + sign, then `low_bits` below the leading one.

`symbols` are one stream, or with a GRID mask a stream of one bit per row (its values' signs are flipped) and then
a stream for each group of coordinates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.entropy import Bytes, Reader, Writer
from fedreuse.proto.masks import Grid, Indices
from fedreuse.proto.numbers import (
    Integers,
    below_leading_one,
    bit_lengths,
    read_low_bits,
    with_leading_one,
    write_low_bits,
)
from fedreuse.proto.schema import Array

RAW, PLANES, FLOAT, BASED, STEPS = 0, 1, 2, 3, 4
NAMES = ("raw", "planes", "float", "based", "steps")
MANTISSA = 23
ONE = np.uint8(1)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Places:
    """Where values stand in their matrix; only needed with a grid.

    `at`: their coordinates, ascending, shape (k,).
    """

    def __init__(self, at: Indices, grid: Grid) -> None:
        rows, columns = len(grid.rows), len(grid.columns)
        self.ends = np.searchsorted(at, np.arange(rows + 1) * columns)
        """Where the values of each row begin, and k."""
        groups = grid.of(at)
        self.order = np.argsort(groups, kind="stable")
        """Sorts values by their groups."""
        self.counts = np.bincount(groups, minlength=int(grid.groups.max()) + 1)

    def by_row(self, flips: Bytes) -> Bytes:
        """What belongs to a row, repeated for each of its values."""
        return np.repeat(flips, np.diff(self.ends))


def unsigned(values: Array) -> Integers:
    """The values' bit patterns, a view."""
    bits: Integers = values.view(_UNSIGNED[values.dtype.itemsize])
    return bits


# ---------------------------------------------------------------- choosing


def write_values(out: Writer, values: Array, base: Array | None, places: Places | None) -> int:
    """Write the shortest coding of values whose weights before the update are `base` (if known), its name first."""
    if values.dtype == np.float32 and values.size and (base is not None or places is not None):
        coding, best = _float(unsigned(values), base, places)
    else:
        coding, best = PLANES, _planes(values)
    if best is None:
        coding, best = PLANES, _planes(values)
    if best.nbytes >= values.nbytes:
        coding, best = RAW, Writer()
        best.raw(values.view(np.uint8))
    out.raw(bytes([coding]))
    out.extend(best)
    return coding


def read_values(
    source: Reader, count: int, dtype: np.dtype[Any], base: Array | None, places: Places | None
) -> tuple[Array, int]:
    """The `count` values that come next, and their coding. Raises ProtocolError."""
    coding = source.byte()
    if coding == RAW:
        return source.raw(count * dtype.itemsize).view(dtype), coding
    if coding == PLANES:
        return _read_planes(source, count, dtype), coding
    if coding not in (FLOAT, BASED) or dtype != np.float32:
        raise source.fail(f"value coding {coding} for {count} values of {dtype}")
    if coding == BASED and base is None:
        raise source.fail("values against a base in a body that has none")
    return _read_float(source, count, base if coding == BASED else None, places), coding


# ---------------------------------------------------------------- planes


def _planes(values: Array) -> Writer:
    out, bits, width = Writer(), unsigned(values), values.dtype.itemsize
    rotated = (bits << bits.dtype.type(1)) | (bits >> bits.dtype.type(8 * width - 1))
    planes = rotated.view(np.uint8).reshape(-1, width)
    for plane in range(width):
        out.stream(np.ascontiguousarray(planes[:, plane]))
    return out


def _read_planes(source: Reader, count: int, dtype: np.dtype[Any]) -> Array:
    planes = np.empty((count, dtype.itemsize), np.uint8)
    for plane in range(dtype.itemsize):
        planes[:, plane] = source.stream(count)
    rotated: Integers = planes.reshape(-1).view(_UNSIGNED[dtype.itemsize])
    one, rest = rotated.dtype.type(1), rotated.dtype.type(8 * dtype.itemsize - 1)
    return ((rotated >> one) | (rotated << rest)).view(dtype)


# ---------------------------------------------------------------- symbols


def _write_symbols(out: Writer, symbols: Bytes, places: Places | None) -> None:
    if places is None:
        out.stream(symbols)
        return
    negative = np.diff(np.r_[0, np.cumsum(symbols & ONE, dtype=np.int64)][places.ends])
    flips = (2 * negative > np.diff(places.ends)).view(np.uint8)
    out.stream(np.packbits(flips, bitorder="little"))
    sorted_, start = np.take(symbols ^ places.by_row(flips), places.order), 0
    for count in places.counts.tolist():
        out.stream(sorted_[start : start + count])
        start += count


def read_symbols(source: Reader, count: int, places: Places | None) -> Bytes:
    """The `count` symbols that come next."""
    if places is None:
        return source.stream(count)
    rows = len(places.ends) - 1
    flips = np.unpackbits(source.stream((rows + 7) // 8), count=rows, bitorder="little")
    symbols = np.empty(count, np.uint8)
    parts = [source.stream(size) for size in places.counts.tolist()]
    symbols[places.order] = np.concatenate(parts)
    symbols ^= places.by_row(flips)
    return symbols


# ---------------------------------------------------------------- float and based


def mantissa_bits(exponent: NDArray[np.uint8], negative: NDArray[np.bool_], base: Array) -> Bytes:
    """How many upper mantissa bits a float32 update u can use, for base weights w (shape (k,)).

    The new weight w' = w + u is a float32, so u = w' - w is a multiple of the smaller of the two weights' units
    in the last place. With E the biased exponents, w's unit is 2^(E_w - 150):
    u's sign is w's: |w'| >= |w|, so u has E_u - E_w + 23 bits at most;
    signs differ and |u| < |w| / 2: |w'| may lie one binade below w's and the unit be half as large: one bit more,
    unless |w| - 2^(E_u - 126) stays in w's binade, or u is below w's unit altogether;
    otherwise (also for subnormal u or w) nothing is known: 23.
    An encoder checks that the lower bits are zero and uses FLOAT if they are not.
    """
    w = base.view(np.uint32)
    e_w = (w >> np.uint32(MANTISSA)).astype(np.uint8)
    behind = e_w.astype(np.int16) - exponent + np.int16(256)
    lower = (w & np.uint32(0x7FFFFF)) < np.take(_REACH, behind)
    lower &= negative != (w >> np.uint32(31)).astype(bool)
    used = np.take(_BITS, behind)
    used += lower
    unknown = (exponent == 0) | (e_w == 0)
    if unknown.any():
        used[unknown] = MANTISSA
    return used


def _tables() -> tuple[Bytes, NDArray[np.uint32]]:
    """By E_w - E_u + 256: the bits used in w's own binade, and |u|'s bound in units of w's last place."""
    behind = np.arange(512) - 256
    bits = np.where(behind < 2, MANTISSA, np.clip(MANTISSA - behind, 0, MANTISSA)).astype(np.uint8)
    # Where there cannot be one bit more the bound is 0: no mantissa lies below that.
    reach = np.where((behind < 2) | (behind > 23), 0, 1 << np.clip(24 - behind, 0, 22)).astype(np.uint32)
    return bits, reach


_BITS, _REACH = _tables()


def _float(bits: Integers, base: Array | None, places: Places | None) -> tuple[int, Writer | None]:
    exponent = (bits >> 23).astype(np.uint8)
    lowest = int(exponent.min())
    if int(exponent.max()) - lowest > 127:
        return FLOAT, None
    out, negative, mantissa = Writer(), bits >> np.uint32(31), bits & np.uint32(0x7FFFFF)
    coding, used = FLOAT, np.full(bits.size, MANTISSA, np.uint8)
    if base is not None:
        based = mantissa_bits(exponent, negative.astype(bool), base)
        if not np.any(mantissa & ((np.uint32(1) << (MANTISSA - based).astype(np.uint32)) - np.uint32(1))):
            coding, used = BASED, based
    symbols = ((exponent - np.uint8(lowest)) << ONE) | negative.astype(np.uint8)
    upper = mantissa >> (np.uint8(MANTISSA) - used).astype(np.uint32)
    out.raw(bytes([lowest]))
    _write_symbols(out, symbols, places)
    write_low_bits(out, upper, used)
    return coding, out


def _read_float(source: Reader, count: int, base: Array | None, places: Places | None) -> Array:
    lowest = source.byte()
    symbols = read_symbols(source, count, places)
    if lowest + (int(symbols.max(initial=0)) >> 1) > 255:
        raise source.fail("an exponent above 255")
    exponent = (symbols >> ONE) + np.uint8(lowest)
    negative = symbols & ONE
    used = np.full(count, MANTISSA, np.uint8)
    if base is not None:
        used = mantissa_bits(exponent, negative.view(bool), base)
    mantissa = read_low_bits(source, used, np.dtype(np.uint32)) << (MANTISSA - used).astype(np.uint32)
    bits = (negative.astype(np.uint32) << 31) | (exponent.astype(np.uint32) << 23) | mantissa
    return bits.view(np.float32)


# ---------------------------------------------------------------- steps


def _ranks(values: Array) -> NDArray[np.uint32]:
    """Bit patterns as unsigned numbers in the order of the floats; -0 comes just before 0."""
    bits = unsigned(values)
    top = bits.dtype.type(8 * bits.dtype.itemsize - 1)
    ranks: NDArray[np.uint32] = (bits ^ ((0 - (bits >> top)) | (bits.dtype.type(1) << top))).astype(
        np.uint32, copy=False
    )
    return ranks


def _from_ranks(ranks: NDArray[np.uint32], dtype: np.dtype[Any]) -> Array:
    bits = ranks.astype(_UNSIGNED[dtype.itemsize], copy=False)
    top = bits.dtype.type(8 * dtype.itemsize - 1)
    values: Array = (bits ^ (((bits >> top) - 1) | (bits.dtype.type(1) << top))).view(dtype)
    return values


def write_steps(out: Writer, new: Array, old: Array, places: Places | None) -> int:
    """Write how `new` differs from `old`, both of shape (k,), the coding's name first."""
    if new.dtype.itemsize > 4:
        return write_values(out, new, None, None)
    after, before = _ranks(new), _ranks(old)
    down = after < before
    size = np.where(down, before - after, after - before)
    lengths = bit_lengths(size)
    out.raw(bytes([STEPS]))
    symbols = (lengths << ONE) | down.view(np.uint8)
    _write_symbols(out, symbols, places)
    write_low_bits(out, size, below_leading_one(lengths))
    return STEPS


def read_steps(source: Reader, old: Array, places: Places | None) -> tuple[Array, int]:
    """The new values, and their coding. Raises ProtocolError."""
    coding, dtype = source.byte(), old.dtype
    if coding == RAW:
        return source.raw(old.size * dtype.itemsize).view(dtype), coding
    if coding == PLANES:
        return _read_planes(source, old.size, dtype), coding
    width = 8 * dtype.itemsize
    if coding != STEPS or width > 32:
        raise source.fail(f"value coding {coding} for {old.size} changes of {dtype}")
    symbols = read_symbols(source, old.size, places)
    lengths = symbols >> ONE
    if lengths.max(initial=0) > width:
        raise source.fail(f"a step of {lengths.max()} bits")
    low = read_low_bits(source, below_leading_one(lengths), np.dtype(np.uint32))
    size = with_leading_one(low, lengths)
    before, down = _ranks(old), (symbols & ONE).astype(np.uint32)
    after = before + ((size ^ (0 - down)) + down)  # two's complement: +size or -size
    stuck = np.where(down, after >= before, after <= before)
    if stuck.any() or (width < 32 and np.any(after >> np.uint32(width))):
        raise source.fail("a step of nothing, or beyond the largest float")
    return _from_ranks(after, dtype), coding
