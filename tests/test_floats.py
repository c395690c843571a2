"""Values bit for bit in every coding, and how many mantissa bits an update can have."""

import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import packed
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refused, taken

from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.floats import (
    BASED,
    FLOAT,
    PLANES,
    RAW,
    STEPS,
    Places,
    mantissa_bits,
    read_steps,
    read_values,
    write_steps,
    write_values,
)
from fedreuse.proto.masks import Grid

unhurried = settings(deadline=None)

DTYPES = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SHORT = ("float32", "float16", "bfloat16")
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
EXPONENT_BITS = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}


def of(patterns: list[int] | np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Floats with these bits."""
    return np.array(patterns, UNSIGNED[DTYPES[dtype].itemsize]).view(DTYPES[dtype])


def patterns(values: np.ndarray) -> list[int]:
    return values.view(UNSIGNED[values.dtype.itemsize]).tolist()


def special(dtype: str) -> list[int]:
    """Zeros, the smallest and the largest subnormal and normal numbers, infinities and NaNs, of both signs."""
    width = 8 * DTYPES[dtype].itemsize
    fraction = width - 1 - EXPONENT_BITS[dtype]
    infinity = (2 ** EXPONENT_BITS[dtype] - 1) << fraction
    half = [
        0,
        1,
        (1 << fraction) - 1,
        1 << fraction,
        infinity - 1,
        infinity,
        infinity + 1,
        (1 << width - 1) - 1,
    ]
    return half + [pattern | 1 << width - 1 for pattern in half]


def written(values: np.ndarray, base: np.ndarray | None = None, places: Places | None = None) -> bytes:
    out = Writer()
    coding = write_values(out, values, base, places)
    assert out.getvalue()[0] == coding
    return out.getvalue()


def read(
    body: bytes,
    count: int,
    dtype: str = "float32",
    base: np.ndarray | None = None,
    places: Places | None = None,
) -> np.ndarray:
    source = Reader(body, "test")
    values, coding = read_values(source, count, DTYPES[dtype], base, places)
    source.end()
    assert (values.dtype, coding) == (DTYPES[dtype], body[0])
    return values


def changed(new: np.ndarray, old: np.ndarray, places: Places | None = None) -> bytes:
    out = Writer()
    coding = write_steps(out, new, old, places)
    assert out.getvalue()[0] == coding
    return out.getvalue()


def read_change(body: bytes, old: np.ndarray, places: Places | None = None) -> np.ndarray:
    source = Reader(body, "test")
    values, coding = read_steps(source, old, places)
    source.end()
    assert (values.dtype, coding) == (old.dtype, body[0])
    return values


@st.composite
def placed(draw: st.DrawFn) -> tuple[Places, list[int], list[int], tuple[int, int]]:
    """Places in a grid; the coordinates, their groups, and the matrix's shape."""
    a, b = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.integers(0, a - 1), min_size=1, max_size=5))
    columns = draw(st.lists(st.integers(0, b - 1), min_size=1, max_size=5))
    line = st.lists(st.integers(0, 3), min_size=b, max_size=b)
    groups = draw(st.lists(line, min_size=a, max_size=a))
    size = len(rows) * len(columns)
    at = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=15)))
    own = [groups[rows[j // len(columns)]][columns[j % len(columns)]] for j in at]
    grid = Grid(*(np.array(part, np.uint8) for part in (rows, columns, groups)))
    return Places(np.array(at), grid), at, own, (len(rows), len(columns))


def bits_of(dtype: str) -> st.SearchStrategy[int]:
    width = 8 * DTYPES[dtype].itemsize
    return st.one_of(st.integers(0, 2**width - 1), st.sampled_from(special(dtype)))


# ---------------------------------------------------------------- raw and planes


def test_raw_values_by_hand() -> None:
    # 1.5 = 3fc00000, -0.0 = 80000000.
    body = bytes.fromhex("00 0000c03f 00000080")
    assert patterns(read(body, 2)) == [0x3FC00000, 0x80000000]
    assert written(of([0x3FC00000, 0x80000000])) == body


def test_planes_by_hand() -> None:
    # Rotated left by one: 1.0 = 3f800000 becomes 7f000000, -2.0 = c0000000 becomes 80000001.
    body = bytes.fromhex("01 04 0001 04 0000 04 0000 04 7f80")
    assert read(body, 2).tolist() == [1, -2]
    assert body == packed.planes([0x3F800000, 0xC0000000], 4)
    # float16 -2.0 = c000 becomes 8001; bfloat16 1.0 = 3f80 becomes 7f00.
    assert read(bytes.fromhex("01 02 01 02 80"), 1, "float16").tolist() == [-2]
    assert read(bytes.fromhex("01 02 00 02 7f"), 1, "bfloat16").tolist() == [1]
    # float64 -1.0 = bff0000000000000 becomes 7fe0000000000001.
    assert read(bytes.fromhex("01 0201 0200 0200 0200 0200 0200 02e0 027f"), 1, "float64").tolist() == [-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_similar_size_are_planes_in_any_dtype(dtype: str) -> None:
    values = (1 + np.random.default_rng(1).random(5000)).astype(DTYPES[dtype])
    body = written(values)
    assert body[0] == PLANES
    # Sign and exponent are all the same, and noise is stored: a byte less for every value.
    assert len(body) < 5000 * (DTYPES[dtype].itemsize - 1) + 1500
    assert patterns(read(body, 5000, dtype)) == patterns(values)
    noise = of(np.random.default_rng(1).integers(0, 2**16, 5000) * 0xFFFF, "float32")
    assert written(noise)[0] in (RAW, PLANES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_values_are_no_bytes(dtype: str) -> None:
    empty = np.empty(0, DTYPES[dtype])
    for base in (None, empty):
        assert written(empty, base) == b"\0"
        assert read(b"\0", 0, dtype, base).size == 0
    body = changed(empty, empty)
    assert len(body) <= 2
    assert read_change(body, empty).size == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_keep_every_bit(dtype: str) -> None:
    for copies in (1, 100):
        every = special(dtype) * copies
        assert patterns(read(written(of(every, dtype)), len(every), dtype)) == every
        old = of(every[::-1], dtype)
        assert patterns(read(written(of(every, dtype), old), len(every), dtype, old)) == every
        assert patterns(read_change(changed(of(every, dtype), old), old)) == every
        assert patterns(read(packed.planes(special(dtype), DTYPES[dtype].itemsize), 16, dtype)) == special(
            dtype
        )


@unhurried
@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), copies=st.sampled_from([1, 30]))
def test_any_bits_come_back_and_cost_at_most_a_byte_more(
    data: st.DataObject, dtype: str, copies: int
) -> None:
    numbers = data.draw(st.lists(st.tuples(bits_of(dtype), bits_of(dtype)), max_size=15)) * copies
    new, old = of([n for n, _ in numbers], dtype), of([o for _, o in numbers], dtype)
    for base in (None, old):
        body = written(new, base)
        assert patterns(read(body, len(new), dtype, base)) == patterns(new)
        assert len(body) <= 1 + new.nbytes


# ---------------------------------------------------------------- float and based


def test_float_by_hand() -> None:
    # 1.5: exponent 127, mantissa 0x400000. -0.75: exponent 126, the same mantissa. e0 = 126.
    # Symbols 2 (127 - 126) + 0 = 2 and 2 * 0 + 1 = 1; 23 bits: planes 00 00 and seven bits, the highest set in both.
    body = bytes.fromhex("02 7e 04 0201 0000 0000 000000000000 03")
    assert read(body, 2).tolist() == [1.5, -0.75]
    assert packed.floats([0x3FC00000, 0xBF400000], 126) == body
    # The lowest exponent need not occur.
    assert read(packed.floats([0x3FC00000], 100), 1).tolist() == [1.5]


def test_floats_under_a_grid_by_hand() -> None:
    # Rows 0 1, columns 0 0; the rows' groups are 1 and 0. At 0, 1 and 3: -1.0, -1.0, 1.5. Row 0 is flipped.
    # Group 0 holds 1.5, group 1 the others; e0 = 127, so that only signs are left.
    grid = Grid(np.array([0, 1], np.uint8), np.array([0, 0], np.uint8), np.array([[1], [0]], np.uint8))
    places = Places(np.array([0, 1, 3]), grid)
    body = bytes.fromhex("02 7f 02 01 02 00 04 0000" + "000000" * 2 + "00" * 6 + "04")
    assert read(body, 3, places=places).tolist() == [-1, -1, 1.5]


def real_updates(size: int, scale: float, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Updates of weights, and the weights: u = w' - w in float32."""
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 0.05, size).astype(np.float32)
    return (w + rng.normal(0, scale, size).astype(np.float32)) - w, w


@pytest.mark.parametrize("scale", [1e-2, 1e-4, 1e-6])
def test_updates_of_known_weights_leave_out_what_they_cannot_use(scale: float) -> None:
    u, w = real_updates(2000, scale)
    body = written(u, w)
    assert body[0] == BASED
    assert patterns(read(body, 2000, base=w)) == patterns(u)
    # log2(|w| / |u|) bits of each mantissa are missing.
    spared = np.maximum(np.log2(np.abs(w[u != 0] / u[u != 0])), 0).sum() / 8
    assert len(body) < 4 * 2000 - 0.8 * spared


def test_what_is_no_update_of_the_weights_is_coded_in_full() -> None:
    u, w = real_updates(2000, 1e-4)
    assert written(u, w)[0] == BASED
    spoiled = u.copy()
    # An odd number of the smallest units of u: no difference of two floats near w.
    at = int(np.argmax(np.abs(w) > 2**10 * np.abs(u)))
    spoiled[at : at + 1].view(np.uint32)[0] |= 1
    body = written(spoiled, w)
    assert body[0] == FLOAT
    assert patterns(read(body, 2000, base=w)) == patterns(spoiled)


def test_exponents_too_far_apart_for_a_byte_are_planes() -> None:
    # 128 apart: 2 * 128 + 1 would not be a byte. 127 apart is the most.
    wide = of([0x00800000 + (n % 2 << 23) * 128 for n in range(64)])
    narrow = of([0x00800000 + (n % 2 << 23) * 127 for n in range(64)])
    base = of([0x3F800000] * 64)
    assert written(wide, base)[0] == PLANES
    assert written(narrow, base)[0] in (FLOAT, BASED)
    for values in (wide, narrow):
        assert patterns(read(written(values, base), 64, base=base)) == patterns(values)


@unhurried
@given(data=st.data(), where=placed(), close=st.booleans())
def test_under_a_grid_values_are_the_bytes_that_plain_python_makes(
    data: st.DataObject, where: tuple[Places, list[int], list[int], tuple[int, int]], close: bool
) -> None:
    places, at, groups, shape = where
    strategy = st.integers(0x3F000000, 0x3FFFFFFF) if close else bits_of("float32")
    new = data.draw(st.lists(strategy, min_size=len(at), max_size=len(at)))
    exponents = [pattern >> 23 & 0xFF for pattern in new]
    lowest = min(exponents)
    if max(exponents) - lowest < 128:
        symbols = [2 * (e - lowest) + (pattern >> 31) for e, pattern in zip(exponents, new, strict=True)]
        coded = packed.grid_symbols(symbols, at, groups, *shape)
        coded += b"\0" * (len(places.counts) - max(groups) - 1)  # groups of the grid without values
        body = packed.floats(new, lowest, symbols=coded)
        assert patterns(read(body, len(at), places=places)) == new
        if len(body) < 4 * len(at):
            assert written(of(new), None, places) == body
    body = written(of(new), None, places)
    assert patterns(read(body, len(at), places=places)) == new
    assert len(body) <= 1 + 4 * len(at)
    old = data.draw(st.lists(bits_of("float32"), min_size=len(at), max_size=len(at)))
    body = written(of(new), of(old), places)
    assert patterns(read(body, len(at), base=of(old), places=places)) == new


# ---------------------------------------------------------------- mantissa bits


def unit(pattern: int) -> Fraction:
    """What the last place of a float32 is worth."""
    return Fraction(2) ** (max(pattern >> 23 & 0xFF, 1) - 150)


def value(pattern: int) -> Fraction:
    """A float32 exactly."""
    return Fraction(struct.unpack("<f", struct.pack("<I", pattern))[0])


def useful(exponent: int, negative: bool, w: int) -> int:
    """Mantissa bits above the smallest unit that w + u can have: the rule in fractions."""
    e_w = w >> 23 & 0xFF
    if exponent == 0 or e_w == 0 or e_w - exponent < 2:
        return 23
    least, below = Fraction(2) ** (exponent - 127), Fraction(2) ** (exponent - 126)
    smallest = unit(w)
    if negative != bool(w >> 31) and abs(value(w)) - below < Fraction(2) ** (e_w - 127):
        smallest /= 2  # |w'|, just above this difference, lies in the binade below
    bits = 0
    while bits < 23 and least / 2**bits > smallest:
        bits += 1
    return bits


def test_mantissa_bits_are_those_above_the_smallest_unit() -> None:
    mantissas = sorted(
        {m for n in range(24) for m in (2**n - 1, 2**n) if m < 2**23} | {5, 0x2AAAAA, 0x555555}
    )
    cases = [
        (e_w - g, negative, sign << 31 | e_w << 23 | m)
        for e_w in (0, 1, 26, 127, 254)
        for g in range(-2, 28)
        if 0 <= e_w - g <= 254
        for m in mantissas
        for negative, sign in ((False, 0), (True, 0), (False, 1))
    ]
    exponents, signs, w = zip(*cases, strict=True)
    found = mantissa_bits(np.array(exponents, np.uint8), np.array(signs), of(list(w)))
    expected = [useful(*case) for case in cases]
    assert found.tolist() == expected
    assert set(expected) == set(range(24))


def neighbours(w: int, seed: int) -> list[int]:
    """Floats around w, near and far, of both signs."""
    rng, at = np.random.default_rng(seed), packed.rank(w, 4)
    far = (2.0 ** rng.uniform(0, 31, 300)).astype(np.int64) * rng.choice([-1, 1], 300)
    ranks = {at + n for n in [*range(-40, 41), *far.tolist()]}
    return [
        pattern
        for r in ranks
        if 0 <= r < 2**32
        for pattern in [r - 2**31 if r >= 2**31 else 2**32 - 1 - r]
        if pattern >> 23 & 0xFF < 255
    ]


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("mantissa", [0, 1, 2, 3, 2**10 - 1, 2**10, 2**22, 2**23 - 1, 0x2AAAAA])
def test_no_difference_of_two_floats_uses_more(sign: int, mantissa: int) -> None:
    for exponent in (1, 2, 24, 127, 254):
        w = sign << 31 | exponent << 23 | mantissa
        near = neighbours(w, mantissa)
        # The differences are exact in double precision wherever anything is left out.
        exact = [value(n) - value(w) for n in near]
        u = np.array([float(difference) for difference in exact]).astype(np.float32)
        e_u, negative = (u.view(np.uint32) >> 23).astype(np.uint8), np.signbit(u)
        widths = mantissa_bits(e_u, negative, of([w] * len(u))).tolist()
        for difference, m, e in zip(u.tolist(), widths, e_u.tolist(), strict=True):
            if e < 255 and m < 23:
                assert (Fraction(difference) / Fraction(2) ** (e - 127) * 2**m).denominator == 1


def test_some_difference_uses_the_last_of_these_bits() -> None:
    # w = 1.0: down into the binade below by n halves of its unit, n odd, as far as n has 24 - g + 1 bits.
    w = 0x3F800000
    for g in range(2, 24):
        n = (1 << 24 - g) + 1
        u = -Fraction(n, 2**24)
        pattern = int(np.array([float(u)], np.float32).view(np.uint32)[0])
        (m,) = mantissa_bits(np.array([127 - g], np.uint8), np.array([True]), of([w]))
        assert (pattern >> 23 & 0xFF, int(m)) == (127 - g, 24 - g)
        assert (Fraction(n, 2 ** (24 - g)) * 2 ** (int(m) - 1)).denominator == 2


# ---------------------------------------------------------------- steps


def test_steps_by_hand() -> None:
    # 1.0 to the next float; 1.0 to the fifth below (101: length 3, bits 01); -0.0 to 0.0, one up; 0.0 to the smallest
    # negative number, two down (10: length 2, bit 0). Symbols 2, 7, 2, 5.
    old = of([0x3F800000, 0x3F800000, 0x80000000, 0x00000000])
    new = of([0x3F800001, 0x3F7FFFFB, 0x00000000, 0x80000001])
    # Width 1: bit 0 of 2. Width 2: bits 1, 0 of 5.
    body = bytes.fromhex("04 08 02070205 00 01 00")
    assert changed(new, old) == body
    assert patterns(read_change(body, old)) == patterns(new)
    assert packed.steps(patterns(new), patterns(old), 4) == body


@unhurried
@given(data=st.data(), dtype=st.sampled_from(SHORT), copies=st.sampled_from([1, 30]))
def test_steps_are_the_bytes_that_plain_python_makes(data: st.DataObject, dtype: str, copies: int) -> None:
    pairs = data.draw(st.lists(st.tuples(bits_of(dtype), bits_of(dtype)), max_size=15))
    pairs = [(n, o) for n, o in pairs if n != o] * copies
    new, old = [n for n, _ in pairs], [o for _, o in pairs]
    body = changed(of(new, dtype), of(old, dtype))
    if copies == 1:  # too few to be worth a frame
        assert body == packed.steps(new, old, DTYPES[dtype].itemsize)
    assert patterns(read_change(body, of(old, dtype))) == new


@pytest.mark.parametrize("dtype", SHORT)
def test_the_longest_steps(dtype: str) -> None:
    width = 8 * DTYPES[dtype].itemsize
    lowest, highest = 2**width - 1, 2 ** (width - 1) - 1
    new, old = [highest, lowest], [lowest, highest]
    body = changed(of(new, dtype), of(old, dtype))
    # 2^width - 1 steps either way: lengths of all bits.
    assert body[:4] == bytes([STEPS, 4, 2 * width, 2 * width + 1])
    assert patterns(read_change(body, of(old, dtype))) == new


def test_changes_of_float64_are_planes_or_raw() -> None:
    old = np.ones(3000)
    new = old + np.random.default_rng(1).integers(1, 200, 3000) * 2.0**-52
    body = changed(new, old)
    assert body[0] == PLANES
    assert len(body) < 3000 * 1.2
    assert patterns(read_change(body, old)) == patterns(new)
    assert changed(new[:2], old[:2])[0] == RAW
    assert patterns(read_change(changed(new[:2], old[:2]), old[:2])) == patterns(new[:2])


@unhurried
@given(data=st.data(), where=placed(), dtype=st.sampled_from(SHORT))
def test_steps_under_a_grid_are_the_bytes_that_plain_python_makes(
    data: st.DataObject, where: tuple[Places, list[int], list[int], tuple[int, int]], dtype: str
) -> None:
    places, at, groups, shape = where
    old = data.draw(st.lists(bits_of(dtype), min_size=len(at), max_size=len(at)))
    flips = data.draw(
        st.lists(st.integers(1, 2 ** (8 * DTYPES[dtype].itemsize) - 1), min_size=len(at), max_size=len(at))
    )
    new = [o ^ flip for o, flip in zip(old, flips, strict=True)]
    width = DTYPES[dtype].itemsize
    ways = [packed.rank(n, width) - packed.rank(o, width) for n, o in zip(new, old, strict=True)]
    symbols = [2 * abs(way).bit_length() + (way < 0) for way in ways]
    coded = packed.grid_symbols(symbols, at, groups, *shape)
    coded += b"\0" * (len(places.counts) - max(groups) - 1)
    body = packed.steps(new, old, width, coded)
    assert changed(of(new, dtype), of(old, dtype), places) == body
    assert patterns(read_change(body, of(old, dtype), places)) == new


# ---------------------------------------------------------------- hostile

OLD = of([0x3F800000, 0xC0000000])

VALUES: dict[str, tuple[str, str, str]] = {
    "raw values missing": ("00 0000c03f", "float32", "8 bytes are due"),
    "a plane missing": ("01 04 0001 04 0000 04 0000", "float32", "bytes are due"),
    "a plane too short": ("01 02 00 04 0000 04 0000 04 7f80", "float32", "1 bytes where 2 are due"),
    "steps where no change is due": ("04 04 0202", "float32", "value coding 4"),
    "an unknown coding": ("05 04 0202", "float32", "value coding 5"),
    "the highest coding": ("ff", "float32", "value coding 255"),
    "float of another dtype": (
        "02 7e 04 0201" + "00" * 20,
        "float16",
        "value coding 2 for 2 values of float16",
    ),
    "float of eight bytes": ("02 7e 04 0201" + "00" * 20, "float64", "value coding 2"),
    "based of another dtype": ("03 7e 04 0201" + "00" * 20, "bfloat16", "value coding 3"),
    "based without a base": ("03 7e 04 0201" + "00" * 20, "float32", "a base in a body that has none"),
    # e0 = 254: symbol 4 would be exponent 256.
    "an exponent beyond a byte": ("02 fe 04 0400" + "00" * 20, "float32", "an exponent above 255"),
    "symbols missing": ("02 7e", "float32", "1 bytes are due"),
    "mantissas missing": ("02 7e 04 0201 0000", "float32", "bytes are due"),
    "nothing": ("", "float32", "1 bytes are due"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_cannot_be_read_are_refused(case: str) -> None:
    body, dtype, text = VALUES[case]
    refused(bytes.fromhex(body), lambda source: read_values(source, 2, DTYPES[dtype], None, None), text)


CHANGES: dict[str, tuple[str, np.ndarray, str]] = {
    "a float coding": ("02 7e 04 0201" + "00" * 20, OLD, "value coding 2 for 2 changes"),
    "a based coding": ("03 7e 04 0201" + "00" * 20, OLD, "value coding 3"),
    "an unknown coding": ("05", OLD, "value coding 5"),
    "steps of float64": ("04 04 0202", OLD.astype(np.float64), "value coding 4 for 2 changes of float64"),
    "a step of 33 bits": ("04 04 4202" + "00" * 20, OLD, "a step of 33 bits"),
    "a step of 127 bits": ("04 04 feff" + "00" * 40, OLD, "a step of 127 bits"),
    "a step of 17 bits": ("04 04 2202" + "00" * 20, OLD.astype(np.float16), "a step of 17 bits"),
    "a step of nothing upwards": ("04 04 0002", OLD, "a step of nothing"),
    "a step of nothing downwards": ("04 04 0102", OLD, "a step of nothing"),
    # The highest pattern, one up; the lowest, one down.
    "beyond the highest": ("04 02 02", of([0x7FFFFFFF]), "beyond the largest float"),
    "beyond the lowest": ("04 02 03", of([0xFFFFFFFF]), "beyond the largest float"),
    "beyond the highest of 16 bits": ("04 02 02", of([0x7FFF], "float16"), "beyond the largest float"),
    "beyond the lowest of 16 bits": ("04 02 03", of([0xFFFF], "bfloat16"), "beyond the largest float"),
    # From 0.0, rank 2^31, up by 2^31.
    "once around": ("04 02 40" + "00" * 10, of([0]), "beyond the largest float"),
    "planes missing": ("01 04 0001", OLD, "bytes are due"),
    "nothing": ("", OLD, "1 bytes are due"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_that_cannot_be_applied_are_refused(case: str) -> None:
    body, old, text = CHANGES[case]
    refused(bytes.fromhex(body), lambda source: read_steps(source, old, None), text)


def made() -> list[tuple[bytes, bool, np.ndarray]]:
    """Bodies of every coding, whether they are changes, and their base."""
    u, w = real_updates(100, 1e-4)
    few = w[:20]
    return [
        (written(u, w), False, w),
        (packed.floats(patterns(few), 90), False, few),
        (written((1 + u).repeat(20)), False, w.repeat(20)),
        (b"\0" + few.tobytes(), False, few),
        (changed(w + u + np.float32(1e-3), w), True, w),
        (packed.planes(patterns(few), 4), True, few),
    ]


def take(body: bytes, change: bool, base: np.ndarray) -> np.ndarray | None:
    if change:
        return taken(body, lambda source: read_steps(source, base, None)[0])
    return taken(body, lambda source: read_values(source, len(base), base.dtype, base, None)[0])


def test_every_truncation_of_values_is_refused() -> None:
    codings = set()
    for body, change, base in made():
        codings.add(body[0])
        assert take(body, change, base) is not None
        for end in range(len(body)):
            assert take(body[:end], change, base) is None
    assert codings == {RAW, PLANES, FLOAT, BASED, STEPS}


@settings(deadline=None, max_examples=300)
@given(which=st.integers(0, 5), at=st.integers(0, 10**6), flip=st.integers(1, 255))
@example(which=0, at=1, flip=255)
def test_damaged_values_are_refused_or_as_many_as_are_due(which: int, at: int, flip: int) -> None:
    body, change, base = made()[which]
    damaged = bytearray(body)
    damaged[at % len(body)] ^= flip
    result = take(bytes(damaged), change, base)
    assert result is None or (result.dtype, result.size) == (base.dtype, base.size)
