"""Integers as bit lengths and low bits: planes by hand, any values against Python's own integers."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference import Bytes

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.numbers import (
    bit_lengths,
    read_low_bits,
    read_numbers,
    with_leading_one,
    write_low_bits,
    write_numbers,
)

BIG = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.sampled_from([2**53, 2**53 - 1, 2**32]))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_bit_lengths_around_every_power_of_two(dtype: type) -> None:
    width = np.dtype(dtype).itemsize * 8
    numbers = sorted({max(0, min(2**width - 1, 2**k + d)) for k in range(width + 1) for d in (-1, 0, 1)})
    found = bit_lengths(np.array(numbers, dtype))
    assert found.tolist() == [n.bit_length() for n in numbers]


def test_planes_by_hand() -> None:
    """Widths 10, 3, 10, 0: first the width 3, one bit a value, then the width 10 as a byte plane and two bit planes."""
    values = np.array([0b1100000001, 0b101, 0b0111111110, 0b1], np.uint32)
    out = Writer()
    write_low_bits(out, values, np.array([10, 3, 10, 0], np.uint8))
    assert out.getvalue() == bytes([1, 0, 1, 0b00000001, 0b11111110, 0b11, 0b01])


def test_only_low_bits_are_stored() -> None:
    out = Writer()
    write_low_bits(out, np.array([0xFFFF], np.uint32), np.array([4], np.uint8))
    back = read_low_bits(Reader(out.getvalue(), ""), np.array([4], np.uint8), np.dtype(np.uint32))
    assert back.tolist() == [0xF]


@given(BIG, st.data())
def test_low_bits_of_any_widths_come_back(numbers: list[int], data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.integers(0, 64), min_size=len(numbers), max_size=len(numbers)))
    bits, values = np.array(widths, np.uint8), np.array(numbers, np.uint64)
    out = Writer()
    write_low_bits(out, values, bits)
    expected = [n & ((1 << m) - 1) for n, m in zip(numbers, widths, strict=True)]
    source = Reader(out.getvalue(), "")
    assert read_low_bits(source, bits, np.dtype(np.uint64)).tolist() == expected
    source.end()
    assert reference.low_bits(Bytes(out.getvalue()), widths) == expected


@given(BIG)
def test_numbers_come_back(numbers: list[int]) -> None:
    out = Writer()
    write_numbers(out, np.array(numbers, np.uint64))
    source = Reader(out.getvalue(), "")
    assert read_numbers(source, len(numbers)).tolist() == numbers
    source.end()
    assert reference.numbers(Bytes(out.getvalue()), len(numbers)) == numbers


def test_a_number_of_too_many_bits_is_refused() -> None:
    with pytest.raises(ProtocolError, match="65 bits"):
        read_numbers(Reader(b"\x02\x41" + bytes(9), "here"), 1)


def test_truncated_numbers_are_refused() -> None:
    out = Writer()
    write_numbers(out, np.array([300, 5, 70000], np.uint64))
    for cut in range(len(out.getvalue())):
        with pytest.raises(ProtocolError):
            read_numbers(Reader(out.getvalue()[:cut], "here"), 3)


def test_leading_ones() -> None:
    lengths = np.array([0, 1, 4, 64], np.uint8)
    low = np.array([0, 0, 0b010, 5], np.uint64)
    assert with_leading_one(low, lengths).tolist() == [0, 1, 0b1010, 2**63 + 5]
