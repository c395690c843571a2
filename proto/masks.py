"""Which k of d coordinates are meant: the index codings of packed bodies.

ALL: every coordinate; no bytes.
BITMAP: a stream of ceil(d / 8) bytes, coordinate j at bit j % 8 of byte j / 8, unused bits zero.
GAPS: `numbers` of how many coordinates are skipped before each chosen one.
GRID: a bitmap whose bits are sorted by how likely they are. The coordinates form a matrix; every row and every
column belongs to a class of similar density, and every cell (row class, column class) to one of at most 16
groups. Byte A and byte B, the numbers of classes; streams of the rows' classes, the columns' classes and the
A * B cells' groups; then a bitmap stream for each group up to the highest: its cells in order, each cell's
coordinates row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.entropy import Bytes, Reader, Writer
from fedreuse.proto.numbers import read_numbers, write_numbers

ALL, BITMAP, GAPS, GRID = 0, 1, 2, 3
NAMES = ("all", "bitmap", "gaps", "grid")
CLASSES, GROUPS = 16, 8
"""What the writer uses; the reader takes up to 255 classes and 16 groups."""
MAX_GROUPS = 16
SMALLEST_GRID = 4096
"""Coordinates below which a grid's side information costs more than it gains; the writer does not try."""
_SPARSE = 1 / 12
"""Density above which gaps never win against a bitmap; the writer does not try."""

Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Grid:
    """Classes of rows and columns, and the group of every cell, shape (A, B)."""

    rows: Bytes
    columns: Bytes
    groups: Bytes

    def of(self, at: Indices) -> Bytes:
        """The group of each coordinate."""
        every = self.groups[:, self.columns][self.rows]
        return np.take(every.reshape(-1), at)

    def spans(self) -> list[tuple[int, slice, slice]]:
        """Group, rows and columns of every cell that is not empty, in the matrix sorted by classes."""
        high, wide = (
            np.r_[0, np.cumsum(np.bincount(classes, minlength=count))]
            for classes, count in zip((self.rows, self.columns), self.groups.shape, strict=True)
        )
        # Most of 255 x 255 classes are empty in a small matrix, and a hostile body names as many.
        rows, columns = np.flatnonzero(np.diff(high)).tolist(), np.flatnonzero(np.diff(wide)).tolist()
        return [
            (int(self.groups[a, b]), slice(high[a], high[a + 1]), slice(wide[b], wide[b + 1]))
            for a in rows
            for b in columns
        ]

    def order(self) -> tuple[Indices, Indices]:
        """Rows and columns sorted by class."""
        return np.argsort(self.rows, kind="stable"), np.argsort(self.columns, kind="stable")


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor: its first dimension and all the others."""
    rows = shape[0] if len(shape) > 1 else 1
    size = int(np.prod(shape, dtype=np.int64))
    return rows, size // rows if rows else 0


def write_mask(out: Writer, mask: Mask, shape: tuple[int, int]) -> tuple[int, Grid | None]:
    """Write the shortest coding of a mask over a matrix of `shape`, its name first."""
    if mask.all():
        out.raw(bytes([ALL]))
        return ALL, None
    grid = _find_grid(mask.reshape(shape)) if mask.size >= SMALLEST_GRID and min(shape) > 1 else None
    # Where rows and columns are sorted anyway, repeated strings are not worth their search.
    tries: list[tuple[int, Writer]] = [(BITMAP, _bitmap(mask, repeats=grid is None))]
    if np.count_nonzero(mask) < _SPARSE * mask.size:
        tries.append((GAPS, _gaps(mask)))
    if grid is not None:
        tries.append((GRID, _gridded(mask.reshape(shape), grid)))
    coding, best = min(tries, key=lambda item: item[1].nbytes)
    out.raw(bytes([coding]))
    out.extend(best)
    return coding, grid if coding == GRID else None


def read_mask(source: Reader, kept: int, shape: tuple[int, int]) -> tuple[Mask, int, Grid | None]:
    """The mask of exactly `kept` coordinates that comes next, and its coding. Raises ProtocolError."""
    size, coding, grid = shape[0] * shape[1], source.byte(), None
    match coding:
        case 0:
            mask = np.ones(size, bool)
        case 1:
            mask = _unpack(source, size)
        case 2:
            mask = _read_gaps(source, kept, size)
        case 3:
            mask, grid = _read_grid(source, shape)
        case _:
            raise source.fail(f"index coding {coding}, known: 0 to 3")
    if (count := int(np.count_nonzero(mask))) != kept:
        raise source.fail(f"{count} coordinates where {kept} are due")
    return mask, coding, grid


# ---------------------------------------------------------------- bitmap and gaps


def _bitmap(mask: Mask, *, repeats: bool) -> Writer:
    out = Writer()
    out.stream(np.packbits(mask, bitorder="little"), repeats=repeats)
    return out


def _unpack(source: Reader, size: int) -> Mask:
    packed = source.stream((size + 7) // 8)
    if size % 8 and int(packed[-1]) >> (size % 8):
        raise source.fail("a bitmap with bits past its last coordinate")
    return np.unpackbits(packed, count=size, bitorder="little").view(bool)


def _gaps(mask: Mask) -> Writer:
    out, at = Writer(), np.flatnonzero(mask)
    write_numbers(out, (np.diff(at, prepend=-1) - 1).astype(np.uint64))
    return out


def _read_gaps(source: Reader, kept: int, size: int) -> Mask:
    gaps = read_numbers(source, kept)
    if gaps.max(initial=0) >= size:
        raise source.fail("a gap beyond the last coordinate")
    at = np.cumsum(gaps + np.uint64(1)) - np.uint64(1)  # below size^2: no overflow as sizes stay below 2^32
    if kept and (int(at[-1]) >= size or not bool(np.all(at[1:] > at[:-1]))):
        raise source.fail("gaps beyond the last coordinate")
    mask = np.zeros(size, bool)
    mask[at] = True
    return mask


# ---------------------------------------------------------------- grid


def _find_grid(matrix: Mask) -> Grid:
    counted = matrix.view(np.uint8)
    rows, columns = _classes(_count(counted, 1)), _classes(_count(counted, 0))
    row_order, column_order = np.argsort(rows, kind="stable"), np.argsort(columns, kind="stable")
    by_rows, starts = counted[row_order], [*_starts(rows).tolist(), len(rows)]
    by_class = np.stack([_count(by_rows[a:b], 0) for a, b in pairwise(starts)])[:, column_order]
    ones = np.add.reduceat(by_class, _starts(columns), axis=1)
    area = np.outer(np.bincount(rows), np.bincount(columns))
    return Grid(rows, columns, _groups(ones / area, area))


def _count(ones: Bytes, axis: int) -> NDArray[np.uint32]:
    """Ones along an axis; 16-bit sums are several times faster where they suffice."""
    narrow = ones.shape[axis] <= np.iinfo(np.uint16).max
    counts: NDArray[np.uint32] = ones.sum(axis, dtype=np.uint16 if narrow else np.uint32).astype(np.uint32)
    return counts


def _starts(classes: Bytes) -> Indices:
    ends = np.cumsum(np.bincount(classes))
    return ends - np.bincount(classes)


def _classes(counts: NDArray[np.uint32]) -> Bytes:
    """Classes of about equal numbers, by rank."""
    classes = np.empty(counts.size, np.uint8)
    classes[np.argsort(counts, kind="stable")] = (
        np.arange(counts.size) * min(CLASSES, counts.size) // counts.size
    )
    return classes


def _groups(density: NDArray[np.float64], area: NDArray[np.int64]) -> Bytes:
    """Cells of similar density together: equal steps of log odds over the range that occurs."""
    odds = np.log2((density * area + 0.5) / ((1 - density) * area + 0.5))
    low, high = odds.min(), odds.max()
    if high - low < 1e-9:
        return np.zeros(density.shape, np.uint8)
    steps = np.minimum(((odds - low) / (high - low) * GROUPS).astype(np.uint8), GROUPS - 1)
    return np.unique(steps, return_inverse=True)[1].reshape(density.shape).astype(np.uint8)


def _gridded(matrix: Mask, grid: Grid) -> Writer:
    out = Writer()
    out.raw(bytes(grid.groups.shape))
    for side in (grid.rows, grid.columns, grid.groups.reshape(-1)):
        out.stream(side, repeats=True)
    rows, columns = grid.order()
    sorted_ = np.take(matrix[rows], columns, axis=1)
    parts: list[list[Mask]] = [[] for _ in range(int(grid.groups.max()) + 1)]
    for group, high, wide in grid.spans():
        parts[group].append(sorted_[high, wide].reshape(-1))
    for part in parts:
        out.stream(np.packbits(np.concatenate(part), bitorder="little"))
    return out


def _read_grid(source: Reader, shape: tuple[int, int]) -> tuple[Mask, Grid]:
    a, b = source.byte(), source.byte()
    rows, columns = source.stream(shape[0]), source.stream(shape[1])
    groups = source.stream(a * b)
    if (
        not groups.size
        or rows.max(initial=0) >= a
        or columns.max(initial=0) >= b
        or groups.max() >= MAX_GROUPS
    ):
        raise source.fail("a grid whose classes or groups are out of range")
    grid = Grid(rows, columns, groups.reshape(a, b))
    spans = grid.spans()
    area = [0] * (int(groups.max()) + 1)
    for group, high, wide in spans:
        area[group] += (high.stop - high.start) * (wide.stop - wide.start)
    bits = [_unpack(source, size) for size in area]
    sorted_, taken = np.empty(shape, bool), [0] * len(area)
    for group, high, wide in spans:
        cell = (int(high.stop - high.start), int(wide.stop - wide.start))
        end = taken[group] + cell[0] * cell[1]
        sorted_[high, wide] = bits[group][taken[group] : end].reshape(cell)
        taken[group] = end
    row_order, column_order = grid.order()
    back_rows, back_columns = np.argsort(row_order), np.argsort(column_order)
    return np.take(sorted_[back_rows], back_columns, axis=1).reshape(-1), grid
