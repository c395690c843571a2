"""Top-K by magnitude: exactly k, ties to the lower index, for every float width (DG paper, Eq. 9)."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto.topk import is_finite, keep_largest, magnitude_bits

FLOATS = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
# Bits of the exponent and of the mantissa.
LAYOUT = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}

unhurried = settings(deadline=None)
every_float = pytest.mark.parametrize("name", FLOATS)


def from_bits(name: str, bits: list[int]) -> np.ndarray:
    dtype = FLOATS[name]
    return np.array(bits, f"<u{dtype.itemsize}").view(dtype)


def special(name: str) -> dict[str, int]:
    """Bit patterns of a format, from its layout alone; without sign."""
    exponent, mantissa = LAYOUT[name]
    infinity = ((1 << exponent) - 1) << mantissa
    return {
        "zero": 0,
        "smallest denormal": 1,
        "largest denormal": (1 << mantissa) - 1,
        "smallest normal": 1 << mantissa,
        "one": ((1 << (exponent - 1)) - 1) << mantissa,
        "largest": infinity - 1,
        "infinity": infinity,
        "signalling nan": infinity + 1,
        "quiet nan": infinity + (1 << (mantissa - 1)),
        "full nan": infinity + (1 << mantissa) - 1,
    }


def sign_bit(name: str) -> int:
    return 1 << sum(LAYOUT[name])


@st.composite
def finite_arrays(draw: st.DrawFn) -> np.ndarray:
    """Random finite values of a random format; half of them from so few that ties are certain."""
    name = draw(st.sampled_from(sorted(FLOATS)))
    limit = special(name)["infinity"] - 1
    pool = sorted(bits for key, bits in special(name).items() if bits <= limit)
    magnitudes = draw(
        st.sampled_from([st.sampled_from(pool[:4]), st.sampled_from(pool), st.integers(0, limit)])
    )
    signs = st.sampled_from([0, sign_bit(name)])
    values = draw(st.lists(st.tuples(magnitudes, signs), max_size=60))
    return from_bits(name, [magnitude | sign for magnitude, sign in values])


def slow_top_k(values: np.ndarray, k: int) -> set[int]:
    order = sorted(range(len(values)), key=lambda j: (-abs(float(values[j])), j))
    return set(order[:k])


def kept(values: np.ndarray, k: int) -> list[int]:
    return np.flatnonzero(keep_largest(values, k)).tolist()


@unhurried
@given(values=finite_arrays(), data=st.data())
def test_agrees_with_a_full_sort(values: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(values) + 2))
    mask = keep_largest(values, k)
    assert mask.dtype == bool
    assert mask.shape == values.shape
    assert set(np.flatnonzero(mask).tolist()) == slow_top_k(values, k)


@unhurried
@given(values=finite_arrays(), data=st.data())
def test_exactly_k_and_nothing_dropped_is_larger_than_anything_kept(
    values: np.ndarray, data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(values)))
    mask = keep_largest(values, k)
    assert int(mask.sum()) == k
    magnitude = np.abs(values.astype(np.float64))
    if 0 < k < len(values):
        assert magnitude[mask].min() >= magnitude[~mask].max()


@every_float
def test_by_magnitude_not_by_value(name: str) -> None:
    values = np.array([0.5, -3.0, 2.0, -0.25, 1.0], FLOATS[name])
    assert kept(values, 1) == [1]
    assert kept(values, 2) == [1, 2]
    assert kept(values, 3) == [1, 2, 4]
    assert kept(values, 4) == [0, 1, 2, 4]


@every_float
def test_ties_go_to_the_lower_index(name: str) -> None:
    values = np.array([1.0, 2.0, -1.0, 1.0, -2.0, 1.0], FLOATS[name])
    assert kept(values, 1) == [1]
    assert kept(values, 3) == [0, 1, 4]
    assert kept(values, 4) == [0, 1, 2, 4]
    assert kept(values, 5) == [0, 1, 2, 3, 4]
    assert kept(np.full(1000, -0.125, FLOATS[name]), 7) == list(range(7))


@every_float
def test_minus_zero_ties_with_zero(name: str) -> None:
    assert kept(np.array([0.0, -0.0, 0.0, -0.0], FLOATS[name]), 2) == [0, 1]
    assert kept(np.array([-0.0, 0.0, -0.0], FLOATS[name]), 1) == [0]


@every_float
def test_denormals_are_numbers_with_an_order(name: str) -> None:
    bits, sign = special(name), sign_bit(name)
    values = from_bits(
        name, [0, bits["smallest denormal"], sign | bits["largest denormal"], bits["smallest normal"], sign]
    )
    assert kept(values, 1) == [3]
    assert kept(values, 2) == [2, 3]
    assert kept(values, 3) == [1, 2, 3]
    assert kept(values, 4) == [0, 1, 2, 3]


@every_float
def test_neighbouring_magnitudes_are_told_apart(name: str) -> None:
    one = special(name)["one"]
    assert kept(from_bits(name, [one, one + 1, one - 1]), 1) == [1]
    assert kept(from_bits(name, [one - 1, one, one - 1]), 1) == [1]


@every_float
def test_none_all_and_empty(name: str) -> None:
    values = np.array([1.0, 0.0, 2.0], FLOATS[name])
    assert kept(values, 0) == []
    assert kept(values, 3) == kept(values, 99) == [0, 1, 2]
    assert kept(values[:0], 0) == kept(values[:0], 1) == []


@every_float
def test_input_is_left_alone(name: str) -> None:
    values = np.array([3.0, -1.0, 2.0, -1.0], FLOATS[name])
    before = values.tobytes()
    keep_largest(values, 2)
    assert values.tobytes() == before


@every_float
def test_magnitude_bits_drop_the_sign_alone(name: str) -> None:
    one, sign = special(name)["one"], sign_bit(name)
    values = from_bits(name, [one, one | sign, sign, 0])
    assert magnitude_bits(values).tolist() == [one, one, 0, 0]


@every_float
@pytest.mark.parametrize("what", ["infinity", "signalling nan", "quiet nan", "full nan"])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("at", [0, 5, 10])
def test_nan_and_infinity_are_found_wherever_they_are(name: str, what: str, negative: bool, at: int) -> None:
    bits = [special(name)["one"]] * 11
    bits[at] = special(name)[what] | (sign_bit(name) if negative else 0)
    assert not is_finite(from_bits(name, bits))


@every_float
def test_everything_below_infinity_is_finite(name: str) -> None:
    largest = special(name)["largest"]
    pool = [bits for bits in special(name).values() if bits <= largest]
    assert is_finite(from_bits(name, pool + [bits | sign_bit(name) for bits in pool]))
    assert is_finite(from_bits(name, []))


@pytest.mark.parametrize("dtype", ["<i8", "<i4", "<i2", "i1", "u1", "bool"])
def test_integers_are_always_finite(dtype: str) -> None:
    assert is_finite(np.frombuffer(b"\xff" * 16, dtype))
    assert is_finite(np.frombuffer(b"\x00" * 16, dtype))
