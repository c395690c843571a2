"""Integers as bit lengths and low bits: every width, by hand and against plain Python."""

import numpy as np
import packed
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import stored
from refusals import refused, taken

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.numbers import bit_lengths, read_low_bits, read_numbers, write_low_bits, write_numbers

unhurried = settings(deadline=None)

DTYPES = (np.uint16, np.uint32, np.uint64)


def lows(values: list[int], widths: list[int], dtype: type = np.uint32) -> bytes:
    out = Writer()
    write_low_bits(out, np.array(values, dtype), np.array(widths, np.uint8))
    return out.getvalue()


def numbers(values: list[int]) -> bytes:
    out = Writer()
    write_numbers(out, np.array(values, np.uint64))
    return out.getvalue()


# ---------------------------------------------------------------- bit lengths


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_lengths_around_every_power_of_two(dtype: type) -> None:
    width = 8 * np.dtype(dtype).itemsize
    values = [0, 1, 2**width - 1] + [2**n + d for n in range(1, width) for d in (-1, 0, 1)]
    assert bit_lengths(np.array(values, dtype)).tolist() == [value.bit_length() for value in values]


def test_no_numbers_have_no_lengths() -> None:
    assert bit_lengths(np.empty(0, np.uint64)).tolist() == []


# ---------------------------------------------------------------- low bits


@pytest.mark.parametrize(
    ("values", "widths", "body"),
    [
        # Nothing at all, and values of which no bit is kept.
        ([], [], ""),
        ([5, 7], [0, 0], ""),
        # Width 3: planes of the bits 1, 2, 4 of 5 = 101, 3 = 011 and 6 = 110, the first value lowest.
        ([5, 3, 6], [3, 3, 3], "03 06 05"),
        # Nine values of one bit take two bytes: bits 0, 2, 8.
        ([1, 0, 1, 0, 0, 0, 0, 0, 1], [1] * 9, "05 01"),
        # Width 8: one byte a value. Width 16: the lower bytes of all, then the upper.
        ([0xAB, 0xCD], [8, 8], "ab cd"),
        ([0x1234, 0x5678], [16, 16], "34 78 12 56"),
        # Width 10: a byte plane and two bit planes. 0x2ab = 10 10101011, 0x155 = 01 01010101.
        ([0x2AB, 0x155], [10, 10], "ab 55 02 01"),
        # Narrow values first, whatever their order: widths 8, 2, 8, 2. 3 = 11 and 1 = 01: planes 11 and 01.
        ([0x11, 3, 0x22, 1], [8, 2, 8, 2], "03 01 11 22"),
        # What is above the width is not looked at.
        ([0xFFFFFFFF, 0xFFFFFFF4], [2, 2], "01 01"),
    ],
)
def test_low_bits_by_hand(values: list[int], widths: list[int], body: str) -> None:
    assert lows(values, widths) == bytes.fromhex(body)
    source = Reader(bytes.fromhex(body), "test")
    back = read_low_bits(source, np.array(widths, np.uint8), np.dtype(np.uint32))
    source.end()
    assert back.tolist() == [value & (1 << width) - 1 for value, width in zip(values, widths, strict=True)]


@st.composite
def low_bits(draw: st.DrawFn) -> tuple[type, list[int], list[int]]:
    """Values of any bits, each with a width up to the whole."""
    dtype = draw(st.sampled_from(DTYPES))
    full = 8 * np.dtype(dtype).itemsize
    pairs = draw(st.lists(st.tuples(st.integers(0, 2**full - 1), st.integers(0, full)), max_size=40))
    return dtype, [value for value, _ in pairs], [width for _, width in pairs]


@unhurried
@given(case=low_bits())
@example(case=(np.uint64, [2**64 - 1], [64]))
@example(case=(np.uint16, [2**16 - 1, 1], [16, 16]))
def test_low_bits_are_the_planes_that_plain_python_makes(case: tuple[type, list[int], list[int]]) -> None:
    dtype, values, widths = case
    body = lows(values, widths, dtype)
    assert body == packed.low_bits(values, widths)
    back = read_low_bits(Reader(body, "test"), np.array(widths, np.uint8), np.dtype(dtype))
    assert back.dtype == dtype
    assert back.tolist() == [value & (1 << width) - 1 for value, width in zip(values, widths, strict=True)]
    for end in range(len(body)):
        refused(
            body[:end],
            lambda source: read_low_bits(source, np.array(widths, np.uint8), np.dtype(dtype)),
            "bytes are due",
        )


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("values", "body"),
    [
        ([], "00"),
        # Lengths 0, 1, 2, 2, 9. Of 2 = 10 and 3 = 11 one bit each: 10. Of 0x1ab the byte below its leading one.
        ([0, 1, 2, 3, 0x1AB], "0a 00 01 02 02 09 02 ab"),
        # 2^63 + 1 has length 64 = 0x40 and 63 bits below: seven bytes and seven bits.
        ([2**63 + 1], "02 40 01 000000000000 00000000000000"),
    ],
)
def test_numbers_by_hand(values: list[int], body: str) -> None:
    assert numbers(values) == bytes.fromhex(body)
    assert read_numbers(Reader(bytes.fromhex(body), "test"), len(values)).tolist() == values


@unhurried
@given(
    values=st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1)), max_size=15),
    copies=st.sampled_from([1, 40]),
)
def test_numbers_come_back(values: list[int], copies: int) -> None:
    every = values * copies
    body = numbers(every)
    if copies == 1:  # too few to be worth a frame: every byte is known
        assert body == packed.numbers(values)
    source = Reader(body, "test")
    assert read_numbers(source, len(every)).tolist() == every
    source.end()


def test_numbers_whose_lengths_are_compressed_are_read() -> None:
    values = list(range(1000))
    lengths = [value.bit_length() for value in values]
    body = packed.zipped(lengths) + packed.low_bits(values, [max(length - 1, 0) for length in lengths])
    assert read_numbers(Reader(body, "test"), 1000).tolist() == values


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    assert read_numbers(Reader(stored([64]) + bytes(14), "test"), 1).tolist() == [2**63]
    refused(stored([65]) + bytes(20), lambda source: read_numbers(source, 1), "a number of 65 bits")
    refused(stored([0, 255]) + bytes(40), lambda source: read_numbers(source, 2), "a number of 255 bits")


def test_another_count_of_numbers_is_refused() -> None:
    body = numbers([1, 2, 3])
    for count in (2, 4):
        refused(body, lambda source, count=count: read_numbers(source, count))


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=60), count=st.integers(0, 20))
def test_any_bytes_are_refused_or_give_as_many_numbers_as_are_due(body: bytes, count: int) -> None:
    values = taken(body, lambda source: read_numbers(source, count))
    assert values is None or (values.dtype, values.size) == (np.uint64, count)
