"""Value codings: bit for bit, by hand, against the second decoder; and the rule of usable mantissa bits by fractions."""

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import Bytes

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.floats import (
    BASED,
    FLOAT,
    PLANES,
    RAW,
    STEPS,
    mantissa_bits,
    read_steps,
    read_values,
    unsigned,
    write_steps,
    write_values,
)

FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
SPECIAL = [0x00000000, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFFC00001]


def float32(words: list[int]) -> NDArray[np.float32]:
    return np.array(words, np.uint32).view(np.float32)


def again(values: NDArray[Any], base: NDArray[Any] | None = None) -> tuple[bytes, int]:
    """Written, and read by both decoders."""
    out = Writer()
    coding = write_values(out, values, base, None)
    source = Reader(out.getvalue(), "here")
    back, name = read_values(source, values.size, values.dtype, base, None)
    source.end()
    assert name == coding == out.getvalue()[0]
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()
    width = values.dtype.itemsize
    old = None if base is None else reference.patterns(base.tobytes(), width)
    found, _ = reference.values(
        Bytes(out.getvalue()), list(range(values.size)), width, old, None, change=False
    )
    assert found == reference.patterns(values.tobytes(), width)
    return out.getvalue(), coding


def stepped(new: NDArray[Any], old: NDArray[Any]) -> tuple[bytes, int]:
    out = Writer()
    coding = write_steps(out, new, old, None)
    source = Reader(out.getvalue(), "here")
    back, name = read_steps(source, old, None)
    source.end()
    assert name == coding
    assert back.tobytes() == new.tobytes()
    width = new.dtype.itemsize
    found, _ = reference.values(
        Bytes(out.getvalue()),
        list(range(new.size)),
        width,
        reference.patterns(old.tobytes(), width),
        None,
        change=True,
    )
    assert found == reference.patterns(new.tobytes(), width)
    return out.getvalue(), coding


# ---------------------------------------------------------------- any values


@given(WORDS)
def test_any_float32_comes_back(words: list[int]) -> None:
    again(float32(words))


@given(WORDS, st.integers(0, 2**32 - 1))
def test_any_float32_comes_back_against_any_base(words: list[int], seed: int) -> None:
    base = float32(np.random.default_rng(seed).integers(0, 2**32, len(words)).tolist())
    again(float32(words), base)
    changed = base.copy()
    changed[: len(words)] = float32(words)
    keep = unsigned(changed) != unsigned(base)
    if keep.any():
        stepped(changed[keep], base[keep])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_type_comes_back(dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(5)
    values = random.normal(0, 0.01, 5000).astype(dtype)
    body, coding = again(values)
    assert coding == PLANES
    assert len(body) < values.nbytes  # at least the exponents gain
    noise = np.frombuffer(random.bytes(64 * dtype.itemsize), dtype)
    assert again(noise)[1] == RAW
    new = (values.astype(np.float64) + random.normal(0, 1e-4, 5000)).astype(dtype)
    moved = unsigned(new) != unsigned(values)
    assert stepped(new[moved], values[moved])[1] == (STEPS if dtype.itemsize < 8 else PLANES)


def test_integers_come_back() -> None:
    for dtype in (np.int16, np.int32, np.int64):
        assert again(np.arange(-300, 900).astype(dtype))[1] == PLANES


def test_special_values_come_back() -> None:
    values = float32(SPECIAL)
    again(values)
    again(values, np.roll(values, 1))
    stepped(values, np.roll(values, 1))


def test_nothing_comes_back() -> None:
    assert again(np.zeros(0, np.float32)) == (b"\x00", RAW)


# ---------------------------------------------------------------- by hand


def test_steps_by_hand() -> None:
    """One up from 1; two down (away from zero) from -2; from -0 to 0 and one on: two steps up."""
    old = float32([0x3F800000, 0xC0000000, 0x80000000])
    new = float32([0x3F800001, 0xC0000002, 0x00000001])
    body, _ = stepped(new, old)
    # symbols 2 L + down: 2, 2 * 2 + 1, 4; below the leading ones of "10" and "10": a plane of two zeros
    assert body == bytes([STEPS, 6, 2, 5, 4, 0])


def test_based_by_hand() -> None:
    """1 + 2^-20 and 1 - 2^-22 as updates of 1: E is 127 for the weight, 107 and 105 for the updates."""
    base = float32([0x3F800000] * 8)
    values = np.array([2**-20] * 4 + [-(2**-22)] * 4, np.float32)
    body, coding = again(values, base)
    assert coding == BASED
    # Lowest exponent 105, symbols 4 and 1. Mantissa bits: 23 - 20 = 3 for the first ones; for the others
    # 23 - 22 = 1 and one more, as 1 - 2^-22 lies in the binade below, where the unit is half as large. All of them
    # are zero: two planes for the second four values, then three for the first four.
    assert body == bytes([BASED, 105, 16, 4, 4, 4, 4, 1, 1, 1, 1, 0, 0, 0, 0, 0])


# ---------------------------------------------------------------- the rule of usable bits

WEIGHTS = st.floats(-4, 4, width=32).filter(lambda w: abs(w) > 1e-30)


def used_bits(update: float) -> int:
    """Upper mantissa bits of a float32 that are not all zero below."""
    mantissa = int(np.float32(update).view(np.uint32)) & 0x7FFFFF
    return 23 if mantissa & 1 else max(0, 23 - ((mantissa & -mantissa).bit_length() - 1)) if mantissa else 0


def rule(update: NDArray[np.float32], weight: NDArray[np.float32]) -> int:
    bits = update.view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(np.uint8)
    return int(mantissa_bits(exponent, (bits >> np.uint32(31)).astype(bool), weight)[0])


@settings(max_examples=500)
@given(WEIGHTS, st.integers(-(2**25), 2**25), st.sampled_from([1, 0.5, 2**-20, 1e-7]))
def test_what_an_exact_update_uses_is_never_more_than_the_rule_says(
    w: float, steps: int, scale: float
) -> None:
    """u = w' - w, exact in float32: both are multiples of the smaller of their units."""
    weight = np.array([w], np.float32)
    new = np.float32(Fraction(float(weight[0])) + Fraction(steps) * Fraction(scale) * Fraction(2) ** -24)
    exact = Fraction(float(new)) - Fraction(float(weight[0]))
    update = np.array([float(exact)], np.float32)
    if Fraction(float(update[0])) != exact or exact == 0 or abs(float(update[0])) < 1e-37:
        return  # not an update of this kind
    assert used_bits(float(update[0])) <= rule(update, weight)


def test_the_rule_by_fractions() -> None:
    """All new weights near 1 and 1.5 whose update has a given exponent: the most bits that occur are the rule's."""
    for pattern in (0x3F800000, 0x3F800003, 0x3FC00000):
        weight = float32([pattern])
        most: dict[tuple[int, bool], int] = {}
        for step in [s for s in range(-600, 601) if s]:
            new = float32([pattern + step])
            exact = Fraction(float(new[0])) - Fraction(float(weight[0]))
            update = np.array([float(exact)], np.float32)
            key = int(update.view(np.uint32)[0] >> 23 & 0xFF), bool(update[0] < 0)
            most[key] = max(most.get(key, 0), used_bits(float(update[0])))
            assert used_bits(float(update[0])) <= rule(update, weight)
        for (exponent, negative), bits in most.items():
            sample = float32([exponent << 23 | negative << 31])
            if 2.0 ** (exponent - 126) < 300 * 2.0**-23:  # every update of this exponent was tried
                assert bits == rule(sample, weight), (hex(pattern), exponent, negative)


def test_values_that_are_no_updates_fall_back() -> None:
    base = np.ones(100, np.float32)
    values = np.random.default_rng(2).normal(0, 1e-6, 100).astype(np.float32)  # finer than 1's grid
    assert again(values, base)[1] in (FLOAT, RAW, PLANES)


def test_a_base_gains_what_the_grid_says() -> None:
    random = np.random.default_rng(6)
    weight = random.normal(0, 0.1, 20_000).astype(np.float32)
    new = (weight + random.normal(0, 1e-4, 20_000)).astype(np.float32)
    update = (new - weight).astype(np.float32)
    body, coding = again(update, weight)
    assert coding == BASED
    plain, _ = again(update)
    assert len(body) < 0.9 * len(plain)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "count", "dtype", "words"),
    [
        (b"\x07", 1, np.float32, "value coding 7"),
        (b"\x04\x02\x00", 1, np.float32, "value coding 4"),  # steps where there is no old model
        (b"\x02\x00", 1, np.float16, "value coding 2"),
        (b"\x03\x00", 1, np.float32, "has none"),
        (b"\x00abc", 1, np.float32, "4 bytes are due"),
        (b"\x02\xfe\x02\x04", 1, np.float32, "an exponent above 255"),
    ],
)
def test_false_values_are_refused(body: bytes, count: int, dtype: type, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_values(Reader(body, "here"), count, np.dtype(dtype), None, None)


@pytest.mark.parametrize(
    ("body", "old", "words"),
    [
        (b"\x04\x02\x01", np.float32(1), "a step of nothing"),  # zero steps, downwards
        (b"\x04\x02\x02", float32([0x7FFFFFFF])[0], "beyond the largest"),
        (b"\x04\x02\x03", float32([0xFFFFFFFF])[0], "beyond the largest"),
        (b"\x04\x02\x44", np.float32(1), "a step of 34 bits"),
        (b"\x04\x02\x24", np.float16(1), "a step of 18 bits"),
        (b"\x02\x00", np.float32(1), "value coding 2"),
        (b"\x04\x02\x02", np.float64(1), "value coding 4"),
    ],
)
def test_false_steps_are_refused(body: bytes, old: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_steps(Reader(body, "here"), np.array([old]), None)


@given(st.integers(0, 2**32 - 1))
def test_a_truncated_body_is_refused(seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.normal(0, 0.1, 50).astype(np.float32)
    update = ((weight + np.float32(1e-3)).astype(np.float32) - weight).astype(np.float32)
    out = Writer()
    write_values(out, update, weight, None)
    body = out.getvalue()
    for cut in range(len(body)):
        with pytest.raises(ProtocolError):
            read_values(Reader(body[:cut], "here"), 50, np.dtype(np.float32), weight, None)
