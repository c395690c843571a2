"""Index codings: which is chosen, their bytes by hand, any mask against the second decoder."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Bytes

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.masks import ALL, BITMAP, GAPS, GRID, Mask, matrix_shape, read_mask, write_mask
from fedreuse.proto.numbers import write_numbers

SIZES = (1, 7, 8, 9, 255, 256, 257, 4095, 4096, 2**16 + 1)
DENSITIES = (0.0, 1e-4, 0.02, 0.2, 0.5, 0.97, 1.0)


def written(mask: Mask, shape: tuple[int, int]) -> tuple[bytes, int]:
    out = Writer()
    coding, grid = write_mask(out, mask, shape)
    assert (grid is not None) == (coding == GRID)
    return out.getvalue(), coding


def check(mask: Mask, shape: tuple[int, int]) -> tuple[bytes, int]:
    """Both decoders read it back."""
    body, coding = written(mask, shape)
    kept = int(mask.sum())
    source = Reader(body, "here")
    found, name, _ = read_mask(source, kept, shape)
    source.end()
    assert name == coding == body[0]
    assert np.array_equal(found, mask)
    at, _, _ = reference.mask(Bytes(body), kept, *shape)
    assert at == np.flatnonzero(mask).tolist()
    return body, coding


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", DENSITIES)
def test_masks_come_back(size: int, density: float) -> None:
    mask = np.random.default_rng(size).random(size) < density
    body, coding = check(mask, (1, size))
    # Two to the entropy bounds every code; a bitmap costs an eighth of a byte a coordinate at most.
    assert len(body) <= -(-size // 8) + 5
    if mask.all():
        assert (coding, body) == (ALL, bytes([ALL]))


def test_an_empty_mask() -> None:
    body, coding = check(np.zeros(0, bool), (0, 0))
    assert (body, coding) == (b"\x00", ALL)


def test_a_bitmap_by_hand() -> None:
    mask = np.zeros(11, bool)
    mask[[0, 3, 9]] = True
    assert written(mask, (1, 11)) == (b"\x01\x04\x09\x02", BITMAP)


def test_gaps_by_hand() -> None:
    """5 and 300 of 1000: gaps 5 (3 bits, low 01) and 294 (9 bits, low 8 bits 0x26)."""
    mask = np.zeros(1000, bool)
    mask[[5, 300]] = True
    body, coding = written(mask, (1, 1000))
    assert coding == GAPS
    assert body == b"\x02\x04\x03\x09" + b"\x01\x00" + b"\x26"


def test_a_grid_where_rows_and_columns_differ() -> None:
    """Rows and columns of two densities each, in no order: cells of 0.01, 0.1 and 0.95."""
    random = np.random.default_rng(3)
    rows, columns = random.integers(0, 2, 200), random.integers(0, 2, 160)
    likely = np.array([0.01, 0.1, 0.95])[rows[:, None] + columns[None, :]]
    mask = (random.random(likely.shape) < likely).reshape(-1)
    body, coding = check(mask, likely.shape)
    assert coding == GRID
    entropy = -(likely * np.log2(likely) + (1 - likely) * np.log2(1 - likely)).sum() / 8
    assert len(body) > entropy
    assert len(body) < 0.8 * len(written(mask, (1, mask.size))[0])


def test_an_even_mask_needs_no_grid() -> None:
    mask = (np.random.default_rng(4).random((96, 80)) < 0.5).reshape(-1)
    assert check(mask, (96, 80))[1] == BITMAP


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 70), st.integers(60, 90), st.floats(0.01, 0.99))
def test_any_grid_comes_back(seed: int, rows: int, columns: int, density: float) -> None:
    random = np.random.default_rng(seed)
    likely = density * np.outer(random.random(rows), random.random(columns)) * 2
    check((random.random((rows, columns)) < likely).reshape(-1), (rows, columns))


def test_a_tensor_is_a_matrix_of_its_first_dimension() -> None:
    assert [matrix_shape(s) for s in ((), (5,), (3, 4), (2, 3, 4), (0, 7), (7, 0))] == [
        *((1, 1), (1, 5), (3, 4), (2, 12), (0, 0), (7, 0)),
    ]


@pytest.mark.parametrize(
    ("body", "kept", "shape", "words"),
    [
        (b"\x09", 1, (1, 8), "index coding 9"),
        (b"\x00", 3, (1, 8), "8 coordinates where 3 are due"),
        (b"\x01\x02\x07", 2, (1, 8), "3 coordinates where 2"),
        (b"\x01\x02\x83", 3, (1, 7), "past its last coordinate"),
        (b"\x02\x02\x04" + b"\x00\x01\x00", 1, (1, 8), "beyond the last coordinate"),  # one gap of 10
        (b"\x02\x04\x03\x03" + b"\x03\x00", 2, (1, 8), "beyond the last coordinate"),  # 5, then 5 more
        (b"\x03\x01\x01" + b"\x04\x00\x00" + b"\x04\x00\x00" + b"\x02\x10" + b"\x02\x01", 1, (2, 2), "range"),
        (b"\x03\x01\x01" + b"\x04\x00\x01" + b"\x04\x00\x00" + b"\x02\x00" + b"\x02\x01", 1, (2, 2), "range"),
        (b"\x03\x00\x00" + b"\x04\x00\x00" + b"\x04\x00\x00" + b"\x00", 1, (2, 2), "range"),
    ],
)
def test_a_false_mask_is_refused(body: bytes, kept: int, shape: tuple[int, int], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_mask(Reader(body, "here"), kept, shape)


def test_gaps_cannot_overflow() -> None:
    """Gaps of 2^63 and more would wrap around."""
    out = Writer()
    out.raw(b"\x02")
    write_numbers(out, np.array([1, 2**64 - 2, 1], np.uint64))
    with pytest.raises(ProtocolError, match="beyond the last"):
        read_mask(Reader(out.getvalue(), "here"), 3, (1, 100))
