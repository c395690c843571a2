"""Which coordinates are meant: every coding by hand, the shortest chosen, and nothing believed."""

import tracemalloc
from typing import Any

import numpy as np
import packed
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import bits, stored
from refusals import refused, taken

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.masks import ALL, BITMAP, GAPS, GRID, Grid, matrix_shape, read_mask, write_mask

unhurried = settings(deadline=None)


def written(mask: np.ndarray) -> tuple[bytes, int, Grid | None]:
    """A matrix's mask, and its coding."""
    out = Writer()
    coding, grid = write_mask(out, mask.reshape(-1), mask.shape)
    assert out.getvalue()[0] == coding
    assert (grid is not None) == (coding == GRID)
    return out.getvalue(), coding, grid


def read(body: bytes, kept: int, shape: tuple[int, int]) -> np.ndarray:
    source = Reader(body, "test")
    mask, coding, _ = read_mask(source, kept, shape)
    source.end()
    assert coding == body[0]
    assert mask.dtype == bool
    return mask.reshape(shape)


def scattered(rows: int, columns: int, density: float, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, columns)) < density


def striped(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """Rows and columns of very different densities, in no order."""
    rng = np.random.default_rng(seed)
    odds = rng.choice([-4.0, 0.0, 4.0], rows)[:, None] + rng.choice([-4.0, 0.0, 4.0], columns)
    return rng.random((rows, columns)) < 1 / (1 + np.exp(-odds))


# ---------------------------------------------------------------- the format

SEVEN = [1, 0, 0, 1, 1, 0, 0]  # 0011001 from the highest: 19
HAND: dict[str, tuple[str, tuple[int, int], list[int]]] = {
    "everything": ("00", (1, 5), [1] * 5),
    "everything of nothing": ("00", (1, 0), []),
    "no bytes of bitmap": ("01 00", (3, 0), []),
    "a bitmap of less than a byte": ("01 02 19", (1, 7), SEVEN),
    "a bitmap of two bytes": ("01 04 81 01", (3, 3), [1, 0, 0, 0, 0, 0, 0, 1, 1]),
    "an empty bitmap": ("01 04 00 00", (2, 6), [0] * 12),
    # Skipped before each: 0, 2, 0; lengths 0, 2, 0, and the bit 0 below the one of "10".
    "gaps": ("02 06 00 02 00 00", (1, 7), SEVEN),
    "no gaps": ("02 00", (1, 7), [0] * 7),
    "gaps up to the last coordinate": ("02 02 02 01", (2, 2), [0, 0, 0, 1]),
    # One class, one group: a bitmap. Rows 0 0, columns 0 0 0, group 0; bits 0, 4.
    "a grid of one class": ("03 01 01 04 0000 06 000000 02 00 02 11", (2, 3), [1, 0, 0, 0, 1, 0]),
    # Rows 1 0, columns 0 1 0; cells (0,0) and (1,1) in group 1, (0,1) and (1,0) in group 0. In order of the cells
    # group 0 holds row 1 column 1; row 0 columns 0, 2. Group 1 holds row 1 columns 0, 2; row 0 column 1.
    #   matrix   1 0 1     group 0: 1 1 1 = 07
    #            0 1 1     group 1: 0 1 0 = 02
    "a grid of four cells": (
        "03 02 02 04 0100 06 000100 08 01000001 02 07 02 02",
        (2, 3),
        [1, 0, 1, 0, 1, 1],
    ),
    # Classes without members and a group without cells (0) have no bits, but the group has its stream.
    "a grid with unused classes": ("03 03 02 04 0202 02 01 0c 000000000001 00 02 03", (2, 1), [1, 1]),
}


@pytest.mark.parametrize("case", HAND)
def test_masks_made_by_hand_are_read(case: str) -> None:
    body, shape, flags = HAND[case]
    assert read(bytes.fromhex(body), sum(flags), shape).reshape(-1).tolist() == flags


@st.composite
def grids(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int], list[list[int]]]:
    a, b = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(0, a - 1), min_size=1, max_size=8))
    columns = draw(st.lists(st.integers(0, b - 1), min_size=1, max_size=8))
    line = st.lists(st.integers(0, 15), min_size=b, max_size=b)
    groups = draw(st.lists(line, min_size=a, max_size=a))
    return scattered(len(rows), len(columns), 0.5, draw(st.integers(0, 999))), rows, columns, groups


@unhurried
@given(case=grids())
def test_grids_of_any_classes_are_read(case: Any) -> None:
    matrix, rows, columns, groups = case
    body = bytes([GRID]) + packed.grid(matrix.tolist(), rows, columns, groups)
    assert np.array_equal(read(body, int(matrix.sum()), matrix.shape), matrix)


def test_a_grid_of_the_most_classes_and_groups_is_read() -> None:
    matrix = scattered(255, 255, 0.5)
    groups = [[(a + b) % 16 for b in range(255)] for a in range(255)]
    body = bytes([GRID]) + packed.grid(matrix.tolist(), range(255), range(254, -1, -1), groups)
    assert np.array_equal(read(body, int(matrix.sum()), matrix.shape), matrix)


def test_a_grid_knows_the_group_of_each_coordinate() -> None:
    grid = Grid(*(np.array(x, np.uint8) for x in ([1, 0], [0, 1, 0], [[4, 5], [6, 7]])))
    # Row 0 is of class 1, row 1 of class 0: 6 7 6, then 4 5 4.
    assert grid.of(np.arange(6)).tolist() == [6, 7, 6, 4, 5, 4]
    assert grid.of(np.array([1, 5])).tolist() == [7, 4]


# ---------------------------------------------------------------- what is chosen


def test_everything_and_nothing_at_all_take_one_byte() -> None:
    for shape in ((1, 0), (0, 3), (1, 1), (1, 7), (300, 300)):
        assert written(np.ones(shape, bool)) == (bytes([ALL]), ALL, None)


def test_a_few_coordinates_are_gaps() -> None:
    at = [3, 4, 1000, 65_536]
    mask = np.zeros((1, 65_537), bool)
    mask[0, at] = True
    # 3, 0, 995, 64535 skipped.
    assert written(mask) == (bytes([GAPS]) + packed.numbers([3, 0, 995, 64_535]), GAPS, None)


def test_half_of_all_coordinates_without_any_order_are_a_bitmap() -> None:
    for shape in ((1, 1000), (20, 50), (100, 100)):
        mask = scattered(*shape, 0.5)
        assert written(mask) == (bytes([BITMAP]) + stored(bits(mask.reshape(-1))), BITMAP, None)


def test_gaps_are_never_longer_than_the_bitmap_they_replace() -> None:
    # One of two: the gap 0 is a length, 00; the bitmap is one byte as well, and comes first.
    assert written(np.array([[True, False]]))[0] == bytes.fromhex("01 02 01")


def test_rows_and_columns_of_different_density_are_a_grid() -> None:
    mask = striped(120, 80)
    body, coding, grid = written(mask)
    assert coding == GRID
    assert grid is not None
    # No code can be much shorter than the entropy of every coordinate's own odds; a bitmap takes 1200 bytes.
    rng = np.random.default_rng(1)
    odds = rng.choice([-4.0, 0.0, 4.0], 120)[:, None] + rng.choice([-4.0, 0.0, 4.0], 80)
    p = 1 / (1 + np.exp(-odds))
    entropy = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)).sum() / 8
    assert 0.9 * entropy < len(body) < 0.95 * len(packed.zipped(bits(mask.reshape(-1).tolist())))


def test_a_written_grid_is_what_the_format_says() -> None:
    mask = striped(120, 80)
    body, _, grid = written(mask)
    assert grid is not None
    rows, columns, groups = (part.tolist() for part in (grid.rows, grid.columns, grid.groups))
    a, b = len(groups), len(groups[0])
    assert body[:3] == bytes([GRID, a, b])
    source = Reader(body[3:], "test")
    assert source.stream(120).tolist() == rows
    assert source.stream(80).tolist() == columns
    assert source.stream(a * b).tolist() == [group for line in groups for group in line]
    for part in packed.grid_parts(mask.tolist(), rows, columns, groups):
        assert source.stream((len(part) + 7) // 8).tobytes() == bits(part)
    source.end()


def test_a_row_of_one_kind_and_a_column_of_one_kind_need_no_grid() -> None:
    for shape in ((1, 9600), (9600, 1)):
        assert written(striped(120, 80).reshape(shape))[1] in (BITMAP, GAPS)


# ---------------------------------------------------------------- round trips

SHAPES = [
    (1, 0),
    (0, 7),
    (1, 1),
    (1, 255),
    (1, 256),
    (1, 257),
    (5, 51),
    (16, 16),
    (257, 1),
    (64, 64),
    (1, 65_537),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0, 1e-4, 0.02, 0.2, 0.5, 0.98, 1])
def test_random_masks_come_back_in_no_more_than_a_bitmap(shape: tuple[int, int], density: float) -> None:
    mask = scattered(*shape, density)
    body, _, _ = written(mask)
    assert np.array_equal(read(body, int(mask.sum()), shape), mask)
    assert len(body) <= 1 + len(stored(bytes((mask.size + 7) // 8)))


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(2, 90), columns=st.integers(2, 90), seed=st.integers(0, 2**32 - 1))
@example(rows=2, columns=4000, seed=1)
@example(rows=4000, columns=2, seed=1)
@example(rows=70_000, columns=2, seed=1)  # more rows than 16 bits count
@example(rows=2, columns=70_000, seed=1)
def test_striped_masks_come_back(rows: int, columns: int, seed: int) -> None:
    mask = striped(rows, columns, seed)
    body, _, _ = written(mask)
    assert np.array_equal(read(body, int(mask.sum()), mask.shape), mask)


def test_a_tensor_is_a_matrix_of_its_first_dimension_and_the_rest() -> None:
    shapes = {(): (1, 1), (5,): (1, 5), (5, 7): (5, 7), (5, 7, 2, 3): (5, 42), (0, 3): (0, 0), (3, 0): (3, 0)}
    assert {shape: matrix_shape(shape) for shape in shapes} == shapes


# ---------------------------------------------------------------- hostile

HOSTILE: dict[str, tuple[str, tuple[int, int], int, str]] = {
    "everything, but fewer are due": ("00", (1, 5), 4, "5 coordinates where 4 are due"),
    "a bitmap of more": ("01 02 19", (1, 7), 2, "3 coordinates where 2 are due"),
    "a bitmap of fewer": ("01 02 19", (1, 7), 4, "3 coordinates where 4 are due"),
    "a bitmap past its end": ("01 02 99", (1, 7), 4, "past its last coordinate"),
    "a bitmap too short": ("01 02 19", (1, 9), 3, "1 bytes where 2 are due"),
    "a bitmap too long": ("01 04 19 00", (1, 7), 3, "a number above 3"),
    # Two coordinates: gaps of 6 (length 3, bits 10) and 0 end at coordinate 7, the eighth of seven.
    "gaps past the end": ("02 04 03 00 00 01", (1, 7), 2, "gaps beyond"),
    "a gap past the end": ("02 02 03 01 01", (1, 7), 1, "a gap beyond"),
    # 2^64 - 1, 0: the sum would come round to 0.
    "a gap that overflows": ("02 04 40 00 ffffffffffffff 01010101010101", (1, 7), 2, "a gap beyond"),
    "a gap of 65 bits": ("02 02 41" + "00" * 20, (1, 7), 1, "a number of 65 bits"),
    "a grid without row classes": ("03 00 01 04 0000 06 000000 00", (2, 3), 1, "classes or groups"),
    "a grid without column classes": ("03 01 00 04 0000 06 000000 00", (2, 3), 1, "classes or groups"),
    "a row of an unknown class": ("03 01 01 04 0001 06 000000 02 00 02 11", (2, 3), 2, "classes or groups"),
    "a column of an unknown class": (
        "03 01 01 04 0000 06 000001 02 00 02 11",
        (2, 3),
        2,
        "classes or groups",
    ),
    "a group of an unknown number": (
        "03 01 01 04 0000 06 000000 02 10" + "0000" * 17,
        (2, 3),
        0,
        "or groups",
    ),
    "a group's bits past its end": ("03 01 01 04 0000 06 000000 02 00 02 51", (2, 3), 3, "past its last"),
    "a grid of more": ("03 01 01 04 0000 06 000000 02 00 02 13", (2, 3), 2, "3 coordinates where 2"),
    "an unknown coding": ("04 00", (1, 5), 5, "index coding 4"),
    "the highest coding": ("ff", (1, 5), 5, "index coding 255"),
    "nothing": ("", (1, 5), 5, "1 bytes are due, 0 are left"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_mask_that_is_not_the_one_due_is_refused(case: str) -> None:
    body, shape, kept, text = HOSTILE[case]
    refused(bytes.fromhex(body), lambda source: read_mask(source, kept, shape), text)


MADE = [scattered(1, 5000, 0.01), scattered(8, 40, 0.5), striped(80, 60)]


@pytest.mark.parametrize("mask", MADE)
def test_every_truncation_is_refused(mask: np.ndarray) -> None:
    body, _, _ = written(mask)
    for end in range(len(body)):
        refused(body[:end], lambda source: read_mask(source, int(mask.sum()), mask.shape))


@settings(deadline=None, max_examples=300)
@given(which=st.sampled_from(range(3)), at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_damaged_mask_is_refused_or_has_as_many_coordinates_as_are_due(
    which: int, at: int, flip: int
) -> None:
    mask = MADE[which]
    body, kept = bytearray(written(mask)[0]), int(mask.sum())
    body[at % len(body)] ^= flip
    result = taken(bytes(body), lambda source: read_mask(source, kept, mask.shape)[0])
    assert result is None or (result.size, int(result.sum())) == (mask.size, kept)


@settings(deadline=None, max_examples=300)
@given(
    coding=st.integers(0, 4),
    body=st.binary(max_size=50),
    rows=st.integers(0, 5),
    columns=st.integers(0, 9),
    kept=st.integers(0, 45),
)
def test_any_bytes_are_refused_or_give_as_many_coordinates_as_are_due(
    coding: int, body: bytes, rows: int, columns: int, kept: int
) -> None:
    shape = (rows, columns)
    mask = taken(bytes([coding]) + body, lambda source: read_mask(source, kept, shape)[0])
    assert mask is None or (mask.size, int(mask.sum())) == (rows * columns, kept)


def test_a_mask_costs_no_more_than_a_small_multiple_of_what_it_covers() -> None:
    size = 1 << 20
    # A million gaps of 1 in a frame of a few bytes: the last coordinates lie far behind the end.
    bomb = bytes([GAPS]) + packed.zipped(b"\x01" * size)
    assert len(bomb) < 200
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="gaps beyond"):
            read_mask(Reader(bomb, "test"), size, (1, size))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * size
