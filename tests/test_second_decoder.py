"""Packed bodies read by a second decoder (`reference`), written by the rules of proto/README.md."""

from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedreuse.proto import codec
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload
from fedreuse.proto.packing import Coded, pack, pack_change, sections, unpack, unpack_change
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec

FLOATS = ("float32", "float16", "bfloat16", "float64")
SHAPES = ((), (1,), (10,), (3, 5), (4, 0), (64, 80), (4097,), (16, 4, 90), (70, 70))


def schema_of(*tensors: tuple[str, tuple[int, ...]], kind: pb.TensorKind = PARAMETER) -> Schema:
    return Schema(tuple(TensorSpec(f"t{n}", dtype, shape, kind) for n, (dtype, shape) in enumerate(tensors)))


def model(schema: Schema, random: np.random.Generator) -> NDArray[np.uint8]:
    arrays = {t.name: np.array(random.normal(0, 0.1, t.shape)).astype(t.numpy_dtype) for t in schema.tensors}
    return np.asarray(schema.flatten(arrays))


def moved(
    schema: Schema, flat: NDArray[np.uint8], random: np.random.Generator, share: float
) -> NDArray[np.uint8]:
    """The same model with a share of its coordinates a little off."""
    new = flat.copy()
    for view in schema.views(new):
        noise = random.normal(0, 1e-3, view.size) * (random.random(view.size) < share)
        view[:] = (view.astype(np.float64) + noise).astype(view.dtype)
    return new


def update(
    schema: Schema, old: NDArray[np.uint8], new: NDArray[np.uint8], ratio: float, mode: Any = None
) -> Payload:
    blocks, parts = [], []
    for index in schema.travelling:
        spec = schema.tensors[index]
        delta = (schema.views(new)[index] - schema.views(old)[index]).astype(spec.numpy_dtype)
        kept = int(np.ceil(ratio * spec.size))
        chosen, data = codec.encode_tensor(spec, delta, kept, mode)
        blocks.append(codec.Block(index, chosen, kept, len(data)))
        parts.append(bytes(data))
    return Payload(tuple(blocks), b"".join(parts))


def second_reading(
    schema: Schema, body: bytes, members: list[int], old: NDArray[np.uint8] | None, *, change: bool
) -> dict[int, dict[int, int]]:
    """Bit patterns by tensor and coordinate, by the document's rules alone."""
    groups: dict[Any, list[int]] = {}
    for index in members:
        spec = schema.tensors[index]
        groups.setdefault(index if spec.size >= 4096 else (spec.dtype, spec.kind), []).append(index)
    source, found = reference.Bytes(body), {}
    for tensors in groups.values():
        specs = [schema.tensors[i] for i in tensors]
        width, size = specs[0].width, sum(s.size for s in specs)
        own = specs[0].size >= 4096
        rows = specs[0].shape[0] if own and len(specs[0].shape) > 1 else 1
        was = None
        if old is not None:
            was = [p for i in tensors for p in reference.patterns(schema.views(old)[i].tobytes(), width)]
        at, values, _ = reference.section(source, rows, size // rows if rows else 0, width, was, change)
        places = [(i, j) for i, s in zip(tensors, specs, strict=True) for j in range(s.size)]
        for j, value in zip(at, values, strict=True):
            tensor, coordinate = places[j]
            found.setdefault(tensor, {})[coordinate] = value
    assert source.at == len(body)
    return found


def contents(schema: Schema, payload: Payload) -> dict[int, dict[int, int]]:
    """The same from a payload as it is; zeros of a dense block with fewer values than coordinates do not count."""
    found = {}
    for block, data in payload.located():
        spec = schema.tensors[block.index]
        at, values = codec.decode_block(spec, block, data)
        words = reference.patterns(values.tobytes(), spec.width)
        where = range(spec.size) if at is None else at.tolist()
        keep = block.kept == spec.size or at is not None
        pairs = {j: word for j, word in zip(where, words, strict=True) if keep or word}
        if pairs:
            found[block.index] = pairs
    return found


tensors = st.lists(st.tuples(st.sampled_from(FLOATS), st.sampled_from(SHAPES)), min_size=1, max_size=5)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(tensors, st.integers(0, 2**32 - 1), st.sampled_from([0.001, 0.2, 0.7, 1.0]), st.booleans())
def test_any_update_comes_back(
    kinds: list[tuple[str, tuple[int, ...]]], seed: int, ratio: float, against: bool
) -> None:
    random = np.random.default_rng(seed)
    schema = schema_of(*kinds)
    old = model(schema, random)
    payload = update(schema, old, moved(schema, old, random, 0.9), ratio)
    base = old if against else None
    packed = pack(schema, payload, base)
    coded: list[Coded] = []
    back = unpack(schema, payload.blocks, packed.body, base, coded)
    assert bytes(back.body) == bytes(payload.body)
    assert tuple(coded) == packed.sections
    assert sum(c.index_bytes + c.value_bytes for c in coded) == packed.nbytes
    members = [block.index for block in payload.blocks]
    assert second_reading(schema, packed.body, members, base, change=False) == contents(schema, payload)


@quick
@given(tensors, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.05, 0.4, 1.0]))
def test_any_change_of_a_model_comes_back(
    kinds: list[tuple[str, tuple[int, ...]]], seed: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    schema = schema_of(*kinds)
    old = model(schema, random)
    new = moved(schema, old, random, share)
    packed = pack_change(schema, new, old)
    dense = codec.dense_payload(schema, new)
    back = unpack_change(schema, dense.blocks, packed.body, old)
    assert bytes(back.body) == bytes(dense.body)
    found = second_reading(schema, packed.body, list(schema.travelling), old, change=True)
    before, after = (contents(schema, codec.dense_payload(schema, flat)) for flat in (old, new))
    assert {i: before.get(i, {}) | found.get(i, {}) for i in before} == after
    assert sum(map(len, found.values())) == sum(
        before[i][j] != after[i][j] for i in before for j in before[i]
    )


@pytest.mark.parametrize("mode", [pb.DENSE, pb.PAIRS, pb.BITMAP])
def test_every_mode_of_the_model_comes_back(mode: pb.Mode) -> None:
    random = np.random.default_rng(7)
    schema = schema_of(("float32", (50, 90)), ("float32", (10,)), ("float16", (33,)))
    old = model(schema, random)
    payload = update(schema, old, moved(schema, old, random, 0.9), 0.3, mode)
    assert {block.mode for block in payload.blocks} == {mode}
    packed = pack(schema, payload, old)
    assert bytes(unpack(schema, payload.blocks, packed.body, old).body) == bytes(payload.body)
    assert len(packed.body) < payload.nbytes


def test_long_tensors_are_cut_into_whole_rows() -> None:
    tall, flat = schema_of(("float32", (5000, 300))), schema_of(("float32", (2, 1_500_000)))
    assert [s.shape for s in sections(tall, [0])] == [(3495, 300), (1505, 300)]
    assert [s.shape for s in sections(flat, [0])] == [(1, 1 << 20), (1, 1 << 20), (1, 902_848)]
    random = np.random.default_rng(9)
    for schema in (tall, flat):
        old = model(schema, random)
        new = moved(schema, old, random, 0.1)
        packed = pack_change(schema, new, old)
        back = unpack_change(schema, codec.dense_payload(schema, new).blocks, packed.body, old)
        assert bytes(back.body) == new.tobytes()
        payload = update(schema, old, new, 0.2)
        body = pack(schema, payload, old).body
        assert bytes(unpack(schema, payload.blocks, body, old).body) == bytes(payload.body)


def test_bit_patterns_survive_that_numbers_would_not() -> None:
    """Signed zeros and subnormal numbers; a zero that became a negative zero is a change."""
    schema = schema_of(("float32", (8,)))
    old = np.array([0.0, -0.0, 1e-40, -1e-40, 0.0, 1, 2, 3], np.float32)
    new = np.array([-0.0, -0.0, 1e-45, 1e-40, 0.0, 1, 2, -3], np.float32)
    packed = pack_change(schema, new.view(np.uint8), old.view(np.uint8))
    assert packed.sections[0].stored == 4
    blocks = codec.dense_payload(schema, new.view(np.uint8)).blocks
    assert bytes(unpack_change(schema, blocks, packed.body, old.view(np.uint8)).body) == new.tobytes()
