"""Packed bodies as a whole: what is unpacked is what was packed, sections are where they belong, lies are refused."""

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import packed
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import bits, stored

from fedreuse.proto import codec, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.floats import BASED
from fedreuse.proto.masks import GAPS, GRID
from fedreuse.proto.packing import pack, pack_change, unpack, unpack_change
from fedreuse.proto.schema import Schema, TensorSpec

unhurried = settings(deadline=None)

NUMPY = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
FLOATS = ("float64", "float32", "float16", "bfloat16")


def parameter(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, pb.PARAMETER)


def buffer(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, pb.FLOAT_BUFFER)


def state(schema: Schema, seed: int, *, finite: bool = False) -> np.ndarray:
    """Random bits, or weights that one can train, for every tensor."""
    rng = np.random.default_rng(seed)
    if not finite:
        return np.frombuffer(rng.bytes(schema.offsets[-1]), np.uint8).copy()
    parts = [rng.normal(0, 0.05, t.size).astype(NUMPY[t.dtype]).view(np.uint8) for t in schema.tensors]
    return np.concatenate([*parts, np.empty(0, np.uint8)])


def dense_blocks(schema: Schema) -> tuple[Block, ...]:
    return tuple(
        Block(i, pb.DENSE, t.size, t.size * NUMPY[t.dtype].itemsize)
        for i, t in enumerate(schema.tensors)
        if t.dtype in FLOATS
    )


def travelling(schema: Schema, flat: np.ndarray) -> bytes:
    return flat[: sum(block.length for block in dense_blocks(schema))].tobytes()


def tensor_payload(
    index: int, spec: TensorSpec, mode: pb.Mode, k: int, rng: np.random.Generator
) -> tuple[Block, bytes]:
    """One tensor of random bits with k random coordinates, in a given mode, made with numpy alone."""
    d, dtype = spec.size, NUMPY[spec.dtype]
    at = np.sort(rng.permutation(d)[:k])
    values = rng.integers(0, 256, (k, dtype.itemsize)).astype(np.uint8)
    if mode == pb.DENSE:
        whole = np.zeros((d, dtype.itemsize), np.uint8)
        whole[at] = values
        data = whole.tobytes()
    elif mode == pb.PAIRS:
        data = at.astype("<u4").tobytes() + values.tobytes()
    else:
        data = np.packbits(np.isin(np.arange(d), at), bitorder="little").tobytes() + values.tobytes()
    return Block(index, mode, k, len(data)), data


def refusal(call: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value


# ---------------------------------------------------------------- round trips


@st.composite
def schemas(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(NUMPY)) -> Schema:
    """Many small tensors, some of no dimension or no elements, and now and then one with a section of its own."""
    specs = []
    for n in range(draw(st.integers(1, 8))):
        dtype = draw(st.sampled_from(dtypes))
        large = draw(st.integers(0, 9)) == 0
        shapes = (
            st.sampled_from([(4095,), (4096,), (64, 64), (5, 7, 150)])
            if large
            else st.lists(st.integers(0, 6), max_size=3).map(tuple)
        )
        kind = (
            draw(st.sampled_from([pb.PARAMETER, pb.FLOAT_BUFFER])) if dtype in FLOATS else pb.INTEGER_BUFFER
        )
        specs.append(TensorSpec(f"t{n}", dtype, draw(shapes), kind))
    return Schema.of(specs)


@st.composite
def updates(draw: st.DrawFn) -> tuple[Schema, Payload, np.ndarray]:
    """A payload of random bits in any modes, and a base."""
    schema, seed = draw(schemas()), draw(st.integers(0, 2**32 - 1))
    blocks, body = [], b""
    for index, spec in enumerate(schema.tensors):
        if draw(st.integers(0, 4)) == 0:
            continue
        mode = draw(st.sampled_from([pb.DENSE, pb.PAIRS, pb.BITMAP]))
        k = draw(st.one_of(st.integers(0, spec.size), st.just(spec.size)))
        block, data = tensor_payload(index, spec, mode, k, np.random.default_rng([seed, index]))
        blocks.append(block)
        body += data
    return schema, Payload(tuple(blocks), body), state(schema, seed + 1)


@unhurried
@given(update=updates())
def test_any_payload_comes_back_bit_for_bit(update: tuple[Schema, Payload, np.ndarray]) -> None:
    schema, payload, base = update
    for known in (None, base):
        body = pack(schema, payload, known)
        back = unpack(schema, payload.blocks, body.body, known)
        assert back.blocks == payload.blocks
        assert bytes(back.body) == bytes(payload.body)


@unhurried
@given(schema=schemas(), seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0, 0.01, 0.3, 1]))
def test_any_change_of_a_model_comes_back_bit_for_bit(schema: Schema, seed: int, share: float) -> None:
    old, other = state(schema, seed), state(schema, seed + 1)
    new = np.where(np.random.default_rng(seed).random(old.size) < share, other, old)
    body = pack_change(schema, new, old)
    back = unpack_change(schema, dense_blocks(schema), body.body, old)
    assert back.blocks == dense_blocks(schema)
    assert bytes(back.body) == travelling(schema, new)


@unhurried
@given(schema=schemas(FLOATS), seed=st.integers(0, 2**32 - 1), ratio=st.sampled_from([0.01, 0.2, 0.9, 1.0]))
def test_updates_of_a_trained_model_come_back(schema: Schema, seed: int, ratio: float) -> None:
    """As a client makes them: differences of two models, the largest kept."""
    old, new = state(schema, seed, finite=True), state(schema, seed + 1, finite=True)
    arrays = {}
    for i, (a, b) in enumerate(zip(schema.views(old), schema.views(new), strict=True)):
        arrays[i] = (b - a).astype(a.dtype)
    payload = codec.encode(schema, arrays, lambda i: int(ratio * arrays[i].size))
    sealed = transfers.seal(schema, payload, (7, old))
    header = pb.Transfer.FromString(transfers.transfer_header(schema, sealed).SerializeToString())
    received = Payload(codec.check_layout(schema, header), bytes(sealed.body))
    back = transfers.open_body(schema, header, received, {7: old}.get)
    assert back.blocks == payload.blocks
    assert bytes(back.body) == bytes(payload.body)
    assert sealed.nbytes <= payload.nbytes


LONG = Schema(
    (
        parameter("rows", "float16", 1030, 1024),  # 1024 rows, then 6
        parameter("bias", "float32", 10),
        parameter("line", "bfloat16", (1 << 20) + 3),
    )
)


def test_tensors_of_more_than_a_million_coordinates_come_back() -> None:
    old = state(LONG, 1, finite=True)
    new = old.copy()
    views = LONG.views(new)
    rng = np.random.default_rng(2)
    for view in views:
        at = rng.choice(view.size, view.size // 100 + 1, replace=False)
        view[at] *= 2
    views[0][0] = views[0][-1] = views[2][-1] = 77  # the first and the last coordinates of sections
    body = pack_change(LONG, new, old)
    assert [s.tensors for s in body.sections] == [(0,), (0,), (1,), (2,), (2,)]
    assert bytes(unpack_change(LONG, dense_blocks(LONG), body.body, old).body) == new.tobytes()
    assert body.nbytes < new.nbytes / 30
    blocks, parts = [], []
    for index, mode in enumerate((pb.BITMAP, pb.DENSE, pb.PAIRS)):
        spec = LONG.tensors[index]
        block, data = tensor_payload(index, spec, mode, spec.size // 200 + 1, rng)
        blocks.append(block)
        parts.append(data)
    payload = Payload(tuple(blocks), b"".join(parts))
    for base in (None, old):
        body = pack(LONG, payload, base)
        assert [s.tensors for s in body.sections] == [(0,), (0,), (1,), (2,), (2,)]
        assert bytes(unpack(LONG, payload.blocks, body.body, base).body) == payload.body


# ---------------------------------------------------------------- sections


def shapes(*specs: TensorSpec) -> list[tuple[tuple[int, ...], int, tuple[int, int]]]:
    """Tensors, first coordinate and shape of every section."""
    schema = Schema.of(specs)
    every = packing.sections(schema, range(len(specs)))
    return [(section.tensors, section.offset, section.shape) for section in every]


def test_small_tensors_of_a_dtype_and_kind_share_a_section() -> None:
    assert shapes(
        parameter("a", "float32", 10),
        parameter("b", "float32", 64, 64),
        parameter("c", "float16", 3),
        parameter("d", "float32"),
        parameter("e", "float32", 0),
        parameter("f", "float32", 4095),
        parameter("g", "float16", 5, 5),
        buffer("h", "float32", 4),
    ) == [
        ((0, 3, 4, 5), 0, (1, 10 + 1 + 0 + 4095)),
        ((1,), 0, (64, 64)),
        ((2, 6), 0, (1, 28)),
        ((7,), 0, (1, 4)),
    ]


def test_a_section_starts_where_its_first_tensor_stands() -> None:
    assert [s[0] for s in shapes(parameter("a", "float32", 4096), parameter("b", "float32", 4))] == [
        (0,),
        (1,),
    ]
    assert shapes(parameter("a", "float32", 0), parameter("b", "float32", 3, 0)) == [((0, 1), 0, (1, 0))]
    assert shapes(parameter("kernel", "float32", 8, 4, 16, 16)) == [((0,), 0, (8, 1024))]


MILLION = 1 << 20


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1024, 1024), [(0, (1024, 1024))]),
        # 1025 rows do not fit, and 1024 do.
        ((1025, 1024), [(0, (1024, 1024)), (MILLION, (1, 1024))]),
        # floor(2^20 / 3000) = 349 rows of 3000.
        ((700, 3000), [(0, (349, 3000)), (1_047_000, (349, 3000)), (2_094_000, (2, 3000))]),
        ((2, MILLION), [(0, (1, MILLION)), (MILLION, (1, MILLION))]),
        # A row that does not fit: pieces that look at no row.
        ((2, MILLION + 1), [(0, (1, MILLION)), (MILLION, (1, MILLION)), (2 * MILLION, (1, 2))]),
        ((MILLION + 1,), [(0, (1, MILLION)), (MILLION, (1, 1))]),
    ],
)
def test_long_tensors_are_cut_into_whole_rows(
    shape: tuple[int, ...], expected: list[tuple[int, tuple[int, int]]]
) -> None:
    assert shapes(parameter("w", "float32", *shape)) == [((0,), offset, part) for offset, part in expected]


def test_many_small_tensors_are_cut_too() -> None:
    # 300 times 4000 coordinates: more than 2^20, end to end.
    found = shapes(*(parameter(f"b{n}", "float32", 4000) for n in range(300)))
    assert [(offset, shape) for _, offset, shape in found] == [
        (0, (1, MILLION)),
        (MILLION, (1, 1_200_000 - MILLION)),
    ]


# ---------------------------------------------------------------- the format

SMALL = Schema(
    (parameter("weight", "float32", 3, 4), parameter("gain", "float16", 2), parameter("bias", "float32", 4))
)
ONE, TWO = 0x3F800000, 0x40000000


def test_the_sections_of_an_update_by_hand() -> None:
    # weight keeps coordinates 1 and 9 as a bitmap, bias (its section's coordinates 12 to 15) all four, gain both.
    payload = Payload(
        (Block(0, pb.BITMAP, 2, 10), Block(1, pb.DENSE, 2, 4), Block(2, pb.DENSE, 4, 16)),
        bits([0, 1] + [0] * 7 + [1, 0, 0])
        + np.array([1, 2], "<f4").tobytes()
        + np.array([1, -1], "<f2").tobytes()
        + np.array([3, 4, 5, 6], "<f4").tobytes(),
    )
    # 6 of 16 coordinates: a bitmap, bits 1, 9, 12 to 15; six raw values. Then both of gain: ALL, raw.
    expected = bytes.fromhex("06 01 04 02 f2 00") + np.array([1, 2, 3, 4, 5, 6], "<f4").tobytes()
    expected += bytes.fromhex("02 00 00 003c 00bc")
    body = pack(SMALL, payload)
    assert body.body == expected
    assert bytes(unpack(SMALL, payload.blocks, expected).body) == payload.body
    # t and mask, values with their name: 5 and 25 bytes, 2 and 5.
    assert [
        (s.tensors, s.stored, s.index_coding, s.value_coding, s.index_bytes, s.value_bytes)
        for s in body.sections
    ] == [((0, 2), 6, 1, 0, 5, 25), ((1,), 2, 0, 0, 2, 5)]


def test_values_that_are_zero_are_not_stored_in_a_dense_update_of_fewer() -> None:
    # bias keeps 3 of 4: 0.0 is left out, -0.0 is not; 2 of 4 coordinates are stored, bits 1 and 3.
    schema = Schema((parameter("bias", "float32", 4),))
    payload = Payload((Block(0, pb.DENSE, 3, 16),), np.array([0, -0.0, 0, 5], "<f4").tobytes())
    body = pack(schema, payload).body
    assert body == bytes.fromhex("02 01 02 0a 00 00000080 0000a040")
    assert bytes(unpack(schema, payload.blocks, body).body) == payload.body


def test_a_change_by_hand() -> None:
    old = np.zeros(72, np.uint8)
    new = old.copy()
    schema = Schema((parameter("weight", "float32", 3, 4), parameter("gain", "float64", 3)))
    # weight: coordinate 5 from 0.0 one up (symbol 2). gain: coordinate 1 becomes 1.0, raw, as a double has no steps.
    new[20] = 1
    new[48 + 8 : 48 + 16] = np.frombuffer(np.array([1.0], "<f8").tobytes(), np.uint8)
    # One of twelve is no less than a twelfth: bitmaps, bit 5 of twelve and bit 1 of three.
    expected = bytes.fromhex("01 01 04 2000 04 02 02  01 01 02 02 00 000000000000f03f")
    assert pack_change(schema, new, old).body == expected
    assert bytes(unpack_change(schema, dense_blocks(schema), expected, old).body) == new.tobytes()


def test_an_unchanged_model_takes_five_bytes_a_section() -> None:
    # None stored; no gaps; no steps.
    old = state(SMALL, 1)
    assert pack_change(SMALL, old, old).body == bytes.fromhex("00 02 00 04 00") * 2


def test_integers_do_not_travel_in_a_change() -> None:
    schema = Schema.of([parameter("w", "float32", 2), TensorSpec("n", "int64", (), pb.INTEGER_BUFFER)])
    old = np.zeros(16, np.uint8)
    new = np.full(16, 1, np.uint8)
    body = pack_change(schema, new, old)
    assert bytes(unpack_change(schema, dense_blocks(schema), body.body, old).body) == bytes([1] * 8)


def hundred_by_fifty(seed: int = 1) -> tuple[Schema, np.ndarray, np.ndarray]:
    """A layer whose rows and columns differ, its weights, and those weights after training the lively ones."""
    schema = Schema((parameter("w", "float32", 100, 50), parameter("b", "float32", 100)))
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 0.05, (100, 50)).astype(np.float32)
    lively = rng.choice([0.01, 0.5, 1], (100, 1)) * rng.choice([0.02, 1], 50)
    moved = rng.random((100, 50)) < lively
    b = rng.normal(0, 0.05, 100).astype(np.float32)
    w2, b2 = (x + rng.normal(0, 1e-4, x.shape).astype(np.float32) for x in (w, b))
    return schema, schema.flatten({"w": w, "b": b}), schema.flatten({"w": np.where(moved, w2, w), "b": b2})


def test_a_layer_with_quiet_rows_is_a_grid_both_ways() -> None:
    schema, old, new = hundred_by_fifty()
    change = pack_change(schema, new, old)
    assert change.sections[0].index_coding == GRID
    w, w2 = (schema.views(flat)[0] for flat in (old, new))
    changed = np.count_nonzero(w != w2)
    payload = codec.encode(schema, {0: w2 - w, 1: np.ones(100, np.float32)}, lambda i: [changed, 100][i])
    update = pack(schema, payload, old)
    assert (update.sections[0].index_coding, update.sections[0].value_coding) == (GRID, BASED)
    assert bytes(unpack(schema, payload.blocks, update.body, old).body) == bytes(payload.body)
    assert bytes(unpack_change(schema, dense_blocks(schema), change.body, old).body) == new.tobytes()


# ---------------------------------------------------------------- sizes


def test_a_bias_of_ten_costs_its_values_and_next_to_nothing_more() -> None:
    def size(biases: int) -> int:
        schema = Schema(
            (parameter("w", "float32", 64, 64), *(parameter(f"b{n}", "float32", 10) for n in range(biases)))
        )
        rng = np.random.default_rng(3)
        arrays = {i: rng.normal(size=t.size).astype(np.float32) for i, t in enumerate(schema.tensors)}
        return pack(schema, codec.encode(schema, arrays, lambda i: schema.tensors[i].size)).nbytes

    # t, ALL, a name: three bytes once; t is a byte longer from 128 coordinates on.
    assert size(1) - size(0) <= 3 + 40
    assert size(9) - size(1) <= 8 * 40
    assert size(20) - size(1) <= 19 * 40 + 1


def test_a_small_tensor_that_keeps_one_value_costs_six_bytes() -> None:
    # 40 tensors of 10 that keep one value each: 4 bytes for it and 10 bits of bitmap.
    schema = Schema(tuple(parameter(f"b{n}", "float32", 10) for n in range(40)))
    rng = np.random.default_rng(4)
    arrays = {i: rng.normal(size=10).astype(np.float32) for i in range(40)}
    payload = codec.encode(schema, arrays, lambda _: 1)
    assert pack(schema, payload).nbytes <= 40 * 4 + 400 // 8 + 6
    assert payload.nbytes == 40 * (4 + 2)


def test_a_packed_body_that_is_not_shorter_travels_plain() -> None:
    schema = Schema((parameter("w", "float32", 3),))
    payload = codec.dense_payload(schema, np.arange(12, dtype=np.uint8))
    # 3 bytes more than 12; a change of all three as well.
    assert pack(schema, payload).nbytes == 15
    sealed = transfers.seal(schema, payload, (3, np.zeros(12, np.uint8)))
    assert (sealed.coding, sealed.base, bytes(sealed.body)) == (pb.PLAIN, None, bytes(range(12)))
    assert transfers.transfer_header(schema, sealed) == codec.transfer_header(schema, payload)
    new = np.frombuffer(np.random.default_rng(1).bytes(12), np.uint8)
    assert transfers.seal_change(schema, payload, new, (3, np.zeros(12, np.uint8))) is None


# ---------------------------------------------------------------- hostile


def sealed_both_ways() -> Iterator[tuple[Schema, pb.Transfer, bytes, bytes, np.ndarray]]:
    """Header, body, payload and base of an update and of a change, with every coding in them."""
    schema, old, new = hundred_by_fifty()
    views = list(zip(schema.views(old), schema.views(new), strict=True))
    payload = codec.encode(schema, {i: b - a for i, (a, b) in enumerate(views)}, lambda i: [900, 10][i])
    dense = codec.dense_payload(schema, new)
    change = transfers.seal_change(schema, dense, new, (5, old))
    assert change is not None
    for sealed, source in ((transfers.seal(schema, payload, (5, old)), payload), (change, dense)):
        assert sealed.coding != pb.PLAIN
        header = transfers.transfer_header(schema, sealed)
        yield schema, header, bytes(sealed.body), bytes(source.body), old


SEALED = list(sealed_both_ways())


def opened(header: pb.Transfer, body: bytes, base: np.ndarray, schema: Schema) -> bytes | ProtocolError:
    """The payload, or why it was refused, for a sender whose checksum of the body is true."""
    header = pb.Transfer.FromString(header.SerializeToString())
    header.length, header.checksum = len(body), xxhash.xxh3_64_intdigest(body)
    try:
        received = Payload(codec.check_layout(schema, header), body)
        return bytes(transfers.open_body(schema, header, received, {5: base}.get).body)
    except ProtocolError as error:
        return error


@pytest.mark.parametrize("which", [0, 1])
def test_every_truncation_is_refused(which: int) -> None:
    schema, header, body, payload, base = SEALED[which]
    assert opened(header, body, base, schema) == payload
    for end in {*range(200), *range(200, len(body), 11), len(body) - 1}:
        result = opened(header, body[:end], base, schema)
        assert isinstance(result, ProtocolError)
        assert result.code == pb.MALFORMED
    result = opened(header, body + b"\0", base, schema)
    assert isinstance(result, ProtocolError)
    assert result.detail.endswith("1 bytes too many")


@settings(deadline=None, max_examples=400)
@given(
    which=st.integers(0, 1),
    at=st.one_of(st.integers(0, 400), st.integers(0, 10**6)),
    flip=st.integers(1, 255),
)
@example(which=0, at=0, flip=1)
def test_a_damaged_body_never_gives_another_payload(which: int, at: int, flip: int) -> None:
    schema, header, body, payload, base = SEALED[which]
    damaged = bytearray(body)
    damaged[at % len(body)] ^= flip
    result = opened(header, bytes(damaged), base, schema)
    if isinstance(result, ProtocolError):
        assert result.code in (pb.MALFORMED, pb.CHECKSUM)
    else:
        assert result == payload


@pytest.mark.parametrize("which", [0, 1])
def test_another_base_never_gives_another_payload(which: int) -> None:
    schema, header, body, _, base = SEALED[which]
    other = base.copy()
    schema.views(other)[0][:] *= np.float32(1.5)
    result = opened(header, body, other, schema)
    assert isinstance(result, ProtocolError)
    assert result.code in (pb.MALFORMED, pb.CHECKSUM)


@pytest.mark.parametrize("which", [0, 1])
def test_a_base_that_is_not_here_is_unknown(which: int) -> None:
    schema, header, body, _, _ = SEALED[which]
    received = Payload(codec.check_layout(schema, header), body)
    error = refusal(lambda: transfers.open_body(schema, header, received, lambda _: None))
    assert error.code == pb.UNKNOWN_BASE
    assert "round 5" in error.detail


def test_a_change_without_a_base_is_refused() -> None:
    schema, header, body, _, base = SEALED[1]
    header = pb.Transfer.FromString(header.SerializeToString())
    header.ClearField("base")
    received = Payload(codec.check_layout(schema, header), body)
    error = refusal(lambda: transfers.open_body(schema, header, received, {0: base, 5: base}.get))
    assert (error.code, "no base" in error.detail) == (pb.MALFORMED, True)


def test_a_body_that_does_not_match_its_checksum_is_not_looked_at() -> None:
    schema, header, body, _, base = SEALED[0]
    # Read as a body it would be malformed.
    received = Payload(codec.check_layout(schema, header), b"\xff" * len(body))
    error = refusal(lambda: transfers.open_body(schema, header, received, {5: base}.get))
    assert error.code == pb.CHECKSUM
    assert f"the header says {header.checksum:016x}" in error.detail


CHANGED_LAYOUTS: dict[str, list[tuple[int, pb.Mode, int]]] = {
    "no tensors": [],
    "a tensor missing": [(0, pb.DENSE, 5000)],
    "pairs": [(0, pb.PAIRS, 5000), (1, pb.DENSE, 100)],
    "few pairs": [(0, pb.PAIRS, 3), (1, pb.DENSE, 100)],
    "a bitmap": [(0, pb.DENSE, 5000), (1, pb.BITMAP, 100)],
    "dense, but not all": [(0, pb.DENSE, 4999), (1, pb.DENSE, 100)],
}


@pytest.mark.parametrize("case", CHANGED_LAYOUTS)
def test_a_change_of_anything_but_a_dense_model_is_refused(case: str) -> None:
    schema, header, body, _, base = SEALED[1]
    header = pb.Transfer.FromString(header.SerializeToString())
    del header.tensors[:]
    for index, mode, kept in CHANGED_LAYOUTS[case]:
        header.tensors.append(pb.TensorHeader(index=index, mode=mode, kept=kept, format=pb.RAW))
    header.length = 0
    received = Payload(codec.check_layout(schema, header), body)
    error = refusal(lambda: transfers.open_body(schema, header, received, {5: base}.get))
    assert (error.code, "dense" in error.detail) == (pb.MALFORMED, True)


BIAS = Schema((parameter("w", "float32", 4), parameter("b", "float32", 4)))
EIGHT = b"\0" + np.arange(1, 9, dtype="<f4").tobytes()

BODIES: dict[str, tuple[str, str]] = {
    "nothing": ("", "byte 0 of 0: 1 bytes are due"),
    "more than the section has": ("09 00", "a number above 8"),
    "fewer than the mask has": ("07 00", "8 coordinates where 7 are due"),
    # Eight values; but w keeps two, b four.
    "too many of a tensor": ("08 00" + EIGHT.hex(), "4 coordinates of tensor 'w', its header keeps 2"),
    # Six stored, bits 0 to 5: four of w, two of b.
    "in the wrong tensor": (
        "06 01 02 3f 00" + "0000803f" * 6,
        "4 coordinates of tensor 'w', its header keeps 2",
    ),
    # Five stored: bits 0, 4 to 7.
    "too few of a tensor": (
        "05 01 02 f1 00" + "0000803f" * 5,
        "1 coordinates of tensor 'w', its header keeps 2",
    ),
    "something after the last section": ("06 01 02 f3 00" + "0000803f" * 6 + "00", "1 bytes too many"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_contradicts_its_header_is_refused(case: str) -> None:
    body, text = BODIES[case]
    blocks = (Block(0, pb.BITMAP, 2, 9), Block(1, pb.DENSE, 4, 16))
    error = refusal(lambda: unpack(BIAS, blocks, bytes.fromhex(body)))
    assert error.code == pb.MALFORMED
    assert text in error.detail


def test_a_dense_tensor_of_fewer_may_hold_even_fewer_but_not_more() -> None:
    schema = Schema((parameter("w", "float32", 4),))
    blocks = (Block(0, pb.DENSE, 2, 16),)
    values = bytes.fromhex("00 0000803f")
    assert bytes(unpack(schema, blocks, b"\x01\x01\x02\x08" + values).body) == bytes(12) + values[1:]
    three = b"\x03\x01\x02\x0e\x00" + 3 * values[1:]
    assert "keeps 2" in refusal(lambda: unpack(schema, blocks, three)).detail


def test_a_step_beyond_the_largest_float_is_refused_and_so_is_the_way_to_infinity() -> None:
    schema = Schema((parameter("w", "float16", 1),))
    # 65504 = 7bff; one up is infinity: the payload's values are checked like everybody's.
    old = np.frombuffer(bytes.fromhex("ff7b"), np.uint8)
    body = bytes.fromhex("01 00 04 02 02")
    payload = unpack_change(schema, dense_blocks(schema), body, old)
    assert bytes(payload.body).hex() == "007c"
    content = xxhash.xxh3_64_intdigest(bytes(payload.body))
    header = pb.Transfer(
        schema_hash=schema.hash,
        tensors=[pb.TensorHeader(index=0, mode=pb.DENSE, kept=1, format=pb.RAW)],
        length=5,
        checksum=xxhash.xxh3_64_intdigest(body),
        coding=pb.CHANGE,
        base=0,
        content=content,
    )
    received = Payload(dense_blocks(schema), body)
    error = refusal(lambda: transfers.open_body(schema, header, received, {0: old}.get))
    assert error.code == pb.NOT_FINITE


def peak(call: Any) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_the_model_however_few_bytes_come() -> None:
    # Four million values in four sections, each a few bytes: everything stored, all planes zero; and then nothing.
    schema = Schema((parameter("w", "float32", 4, MILLION),))
    old = np.zeros(16 * MILLION, np.uint8)
    zeros = packed.zipped(bytes(MILLION))
    section = packed.varint(MILLION) + b"\0" + b"\1" + 4 * zeros
    assert len(section) < 1000
    blocks = dense_blocks(schema)
    assert peak(lambda: unpack(schema, blocks, 4 * section + b"\0")) < 4 * old.size + 50 * MILLION
    ups = packed.varint(MILLION) + b"\0" + b"\4" + packed.zipped(b"\2" * MILLION)
    assert peak(lambda: unpack_change(schema, blocks, 4 * ups + b"\0", old)) < 2 * old.size + 50 * MILLION
    gaps = packed.varint(MILLION) + bytes([GAPS]) + packed.zipped(b"\1" * MILLION)
    assert peak(lambda: unpack_change(schema, blocks, gaps, old)) < 2 * old.size + 64 * MILLION


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=60), data=st.data())
def test_any_bytes_are_refused_or_decode_within_bounds(body: bytes, data: st.DataObject) -> None:
    blocks = []
    for index, (d, b) in enumerate([(12, 4), (2, 2), (4, 4)]):
        k = data.draw(st.integers(0, d))
        mode, length = data.draw(
            st.sampled_from([(pb.DENSE, d * b), (pb.PAIRS, k * (b + 4)), (pb.BITMAP, k * b + (d + 7) // 8)])
        )
        blocks.append(Block(index, mode, k, length))
    base = state(SMALL, 1)
    for call, total in (
        (lambda: unpack(SMALL, tuple(blocks), body, base), sum(block.length for block in blocks)),
        (lambda: unpack_change(SMALL, dense_blocks(SMALL), body, base), 68),
    ):
        try:
            payload = call()
        except ProtocolError as error:
            if error.code != pb.MALFORMED:
                raise
        else:
            assert payload.nbytes == total


def test_stored_streams_of_any_length_are_read_as_well_as_frames() -> None:
    """A reader takes what any writer may choose: the same section three times, each in other codings."""
    schema = Schema((parameter("w", "float32", 64, 64),))
    flags = [j % 3 == 0 for j in range(4096)]
    at = [j for j, flag in enumerate(flags) if flag]
    words = [ONE + 77 * j for j in at]
    payload = Payload(
        (Block(0, pb.BITMAP, len(at), 512 + 4 * len(at)),), bits(flags) + np.array(words, "<u4").tobytes()
    )
    t = packed.varint(len(at))
    rows = [flags[64 * r : 64 * r + 64] for r in range(64)]
    classes = [r % 3 for r in range(64)]
    groups = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    grouped = [groups[classes[j // 64]][classes[j % 64]] for j in at]
    lowest = ONE >> 23
    signs = [2 * ((word >> 23) - lowest) for word in words]
    symbols = packed.grid_symbols(signs, at, grouped, 64, 64)
    # The groups above the highest that occurs have no values.
    symbols += b"\0" * (2 - max(grouped))
    for body in (
        t + b"\1" + stored(bits(flags)) + b"\0" + np.array(words, "<u4").tobytes(),
        t + b"\2" + packed.numbers([at[0], *(b - a - 1 for a, b in pairwise(at))]) + packed.planes(words, 4),
        t
        + b"\3"
        + packed.grid(rows, classes, classes, groups)
        + packed.floats(words, lowest, symbols=symbols),
        t + b"\1" + packed.zipped(bits(flags)) + packed.floats(words, lowest),
    ):
        assert bytes(unpack(schema, payload.blocks, body).body) == payload.body
