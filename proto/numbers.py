"""Unsigned integers as a coded bit length and uncoded low bits.

`low_bits` stores the lowest m_i bits of value i, where both sides know every m_i: for m = 1, 2, ... the values with
m_i = m, in order, as planes: floor(m / 8) whole bytes, the lowest first, then the m mod 8 bits above them, the
lowest first. A byte plane is a byte a value, a bit plane a bit a value, packed least significant bit first and
padded to a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.entropy import Bytes, Reader, Writer

Integers = NDArray[np.unsignedinteger[Any]]


def bit_lengths(values: Integers) -> Bytes:
    """Bits that each value needs: 0 for 0, else floor(log2) + 1."""
    # A float64 holds integers up to 2^53 exactly, so its exponent is their bit length.
    high = (values >> np.asarray(32, values.dtype)) if values.dtype.itemsize == 8 else None
    lengths = np.frexp((values if high is None else values & 0xFFFFFFFF).astype(np.float64))[1]
    if high is not None:
        upper = np.frexp(high.astype(np.float64))[1]
        lengths = np.where(upper > 0, upper + 32, lengths)
    return lengths.astype(np.uint8)


def write_low_bits(out: Writer, values: Integers, bits: Bytes) -> None:
    """`bits[i]` low bits of `values[i]`; whatever is above them is not looked at."""
    order, runs = _runs(bits)
    width = values.dtype.itemsize
    sorted_ = np.take(values, order).view(np.uint8).reshape(-1, width)
    for m, start, end in runs:
        run = sorted_[start:end]
        for plane in range(m // 8):
            out.raw(run[:, plane])
        top = run[:, m // 8] if m % 8 else run[:, 0]
        for bit in range(m % 8):
            out.raw(np.packbits(top & np.uint8(1 << bit), bitorder="little"))


def read_low_bits(source: Reader, bits: Bytes, dtype: np.dtype[Any]) -> Integers:
    """The values that `write_low_bits` stored, as `dtype`."""
    order, runs = _runs(bits)
    sorted_ = np.zeros((bits.size, dtype.itemsize), np.uint8)
    for m, start, end in runs:
        count = end - start
        for plane in range(m // 8):
            sorted_[start:end, plane] = source.raw(count)
        top = np.zeros(count, np.uint8)
        for bit in range(m % 8):
            top |= np.unpackbits(source.raw((count + 7) // 8), count=count, bitorder="little") << np.uint8(
                bit
            )
        if m % 8:
            sorted_[start:end, m // 8] = top
    values = np.empty(bits.size, dtype)
    values[order] = sorted_.reshape(-1).view(dtype)
    return values


def _runs(bits: Bytes) -> tuple[NDArray[np.intp], list[tuple[int, int, int]]]:
    """Positions sorted by m, and every m > 0 that occurs with its range there."""
    ends = np.cumsum(np.bincount(bits)).tolist()
    starts = [0, *ends]
    runs = [(m, starts[m], end) for m, end in enumerate(ends) if m and end > starts[m]]
    return np.argsort(bits, kind="stable"), runs


def write_numbers(out: Writer, values: Integers) -> None:
    """Any unsigned integers: a stream of bit lengths, then all bits below the leading one."""
    lengths = bit_lengths(values)
    out.stream(lengths)
    write_low_bits(out, values, below_leading_one(lengths))


def read_numbers(source: Reader, count: int) -> NDArray[np.uint64]:
    """What `write_numbers` wrote; `count` numbers below 2^64."""
    lengths = source.stream(count)
    if lengths.max(initial=0) > 64:
        raise source.fail(f"a number of {lengths.max()} bits")
    low = read_low_bits(source, below_leading_one(lengths), np.dtype(np.uint64))
    numbers: NDArray[np.uint64] = with_leading_one(low, lengths)
    return numbers


def below_leading_one(lengths: Bytes) -> Bytes:
    """Bits below the leading one of numbers of these bit lengths."""
    below: Bytes = lengths - (lengths > 0)
    return below


def with_leading_one(low: Integers, lengths: Bytes) -> Any:
    """Numbers of the given bit lengths from the bits below their leading one."""
    one = np.asarray(1, low.dtype)
    return np.where(lengths > 0, low | (one << below_leading_one(lengths).astype(low.dtype)), low)
