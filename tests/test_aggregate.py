"""The aggregate and the server step against hand-worked numbers, plain numpy and torch (DG paper, Eq. 7-8)."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload, encode_tensor
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.server.aggregate import StepSettings, Term, state_is_finite, step, weights

unhurried = settings(deadline=None)

NUMPY = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
TILE = 1 << 16

Numbers = Sequence[float] | np.ndarray


def vector(dtype: str, values: Numbers) -> np.ndarray:
    return np.asarray(values).astype(NUMPY[dtype])


def parameters(dtype: str, *sizes: int) -> Schema:
    return Schema(tuple(TensorSpec(f"w{n}", dtype, (d,), PARAMETER) for n, d in enumerate(sizes)))


def state(schema: Schema, *tensors: Numbers) -> np.ndarray:
    """A flat state from the tensors' numbers."""
    parts = [vector(spec.dtype, t).tobytes() for spec, t in zip(schema.tensors, tensors, strict=True)]
    return np.frombuffer(b"".join(parts), np.uint8).copy()


def tensors(schema: Schema, flat: np.ndarray) -> list[list[float]]:
    """The numbers of a flat state, read byte by byte."""
    raw, at, found = flat.tobytes(), 0, []
    for spec in schema.tensors:
        found.append(np.frombuffer(raw, NUMPY[spec.dtype], spec.size, at).astype(np.float64).tolist())
        at += spec.nbytes
    return found


def term(
    schema: Schema,
    client: int,
    examples: int,
    deltas: Mapping[int, Numbers],
    *,
    factor: float = 1.0,
    fresh: bool = True,
    mode: pb.Mode = pb.DENSE,
) -> Term:
    """One client's deltas by tensor index, all non-zero coordinates kept."""
    blocks, body = [], b""
    for index, values in deltas.items():
        spec = schema.tensors[index]
        array = vector(spec.dtype, values)
        kept = spec.size if mode == pb.DENSE else int(np.count_nonzero(array))
        _, data = encode_tensor(spec, array, kept, mode)
        blocks.append(Block(index, mode, kept, len(data)))
        body += data
    return Term(client, examples, factor, Payload(tuple(blocks), body), fresh)


# ---------------------------------------------------------------- by hand


def test_fresh_and_reused_updates_by_hand() -> None:
    # n = 1 and 3, so q = 1/4 and 3/4; the second update is old and scaled by 1/2.
    #   1/4 * ( 1,  2) = (0.25,  0.5)
    #   3/4 * 1/2 * ( 4, -8) = (1.5, -3)
    #   (10, 20) + (1.75, -2.5) = (11.75, 17.5)
    schema = parameters("float32", 2)
    terms = [
        term(schema, 3, 1, {0: [1, 2]}),
        term(schema, 8, 3, {0: [4, -8]}, factor=0.5, fresh=False),
    ]
    assert weights(terms) == [0.25, 0.75]
    assert tensors(schema, step(schema, state(schema, [10, 20]), terms, 1.0)) == [[11.75, 17.5]]


def test_the_server_learning_rate_scales_the_aggregate() -> None:
    # As above: (10, 20) + 2 * (1.75, -2.5) = (13.5, 15); + 0.5 * = (10.875, 18.75).
    schema = parameters("float32", 2)
    terms = [term(schema, 3, 1, {0: [1, 2]}), term(schema, 8, 3, {0: [4, -8]}, factor=0.5)]
    assert tensors(schema, step(schema, state(schema, [10, 20]), terms, 2.0)) == [[13.5, 15.0]]
    assert tensors(schema, step(schema, state(schema, [10, 20]), terms, 0.5)) == [[10.875, 18.75]]


def test_one_client_alone_moves_the_model_by_its_own_update() -> None:
    schema = parameters("float32", 3)
    new = step(schema, state(schema, [1, 2, 3]), [term(schema, 5, 17, {0: [0.5, 0, -3]})], 1.0)
    assert tensors(schema, new) == [[1.5, 2.0, 0.0]]


def test_one_reused_client_alone_is_still_decayed() -> None:
    # Decay acts on the delta and not on the weight: q = 1, but only half of the update counts.
    schema = parameters("float32", 1)
    terms = [term(schema, 5, 17, {0: [4]}, factor=0.5, fresh=False)]
    assert tensors(schema, step(schema, state(schema, [1]), terms, 1.0)) == [[3.0]]


def test_weights_are_shares_of_the_terms() -> None:
    schema = parameters("float32", 1)
    terms = [term(schema, c, n, {0: [1]}) for c, n in enumerate([5, 3, 8])]
    assert weights(terms) == [5 / 16, 3 / 16, 8 / 16]
    assert weights(terms[:2]) == [5 / 8, 3 / 8]


@unhurried
@given(examples=st.lists(st.integers(1, 10**12), min_size=1, max_size=20))
def test_weights_sum_to_one(examples: list[int]) -> None:
    schema = parameters("float32", 0)
    found = weights([term(schema, c, n, {0: []}) for c, n in enumerate(examples)])
    assert sum(found) == pytest.approx(1, abs=1e-12)
    assert found == [float(Fraction(n, sum(examples))) for n in examples]


def test_the_old_state_is_left_alone() -> None:
    schema = parameters("float32", 2)
    before = state(schema, [1, 2])
    step(schema, before, [term(schema, 0, 1, {0: [1, 1]})], 1.0)
    assert tensors(schema, before) == [[1.0, 2.0]]


# ---------------------------------------------------------------- kinds of tensors

BATCH_NORM = Schema(
    (
        TensorSpec("weight", "float32", (2,), PARAMETER),
        TensorSpec("mean", "float32", (2,), FLOAT_BUFFER),
        TensorSpec("seen", "int64", (), INTEGER_BUFFER),
    )
)


def test_float_buffers_average_the_fresh_clients_alone() -> None:
    # n = 1, 4, 3; the second is reused.
    #   weight: q = 1/8, 4/8, 3/8, the second scaled by 1/2: 8/8 + 4/4 + 16 * 3/8 = 1 + 1 + 6 = 8
    #   mean:   q = 1/4, 3/4:                               8/4 + 4 * 3/4 = 2 + 3 = 5
    terms = [
        term(BATCH_NORM, 0, 1, {0: [8, 0], 1: [8, 0]}),
        term(BATCH_NORM, 1, 4, {0: [4, 0]}, factor=0.5, fresh=False),
        term(BATCH_NORM, 2, 3, {0: [16, 0], 1: [4, 0]}),
    ]
    new = step(BATCH_NORM, state(BATCH_NORM, [100, 1], [10, 1], [7]), terms, 1.0)
    assert tensors(BATCH_NORM, new) == [[108.0, 1.0], [15.0, 1.0], [7.0]]


def test_float_buffers_stay_when_nobody_is_fresh() -> None:
    terms = [term(BATCH_NORM, 1, 4, {0: [4, 2]}, factor=0.5, fresh=False)]
    new = step(BATCH_NORM, state(BATCH_NORM, [1, 1], [10, 20], [7]), terms, 1.0)
    assert tensors(BATCH_NORM, new) == [[3.0, 2.0], [10.0, 20.0], [7.0]]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_integer_buffers_stay(dtype: str) -> None:
    schema = Schema(
        (TensorSpec("w", "float32", (1,), PARAMETER), TensorSpec("n", dtype, (2,), INTEGER_BUFFER))
    )
    new = step(schema, state(schema, [0], [1, 0]), [term(schema, 0, 1, {0: [1]})], 1.0)
    assert tensors(schema, new) == [[1.0], [1.0, 0.0]]


def test_scalars_and_empty_tensors() -> None:
    schema = Schema(
        (TensorSpec("scalar", "float32", (), PARAMETER), TensorSpec("empty", "float32", (0, 3), PARAMETER))
    )
    terms = [term(schema, 0, 1, {0: [2], 1: []}), term(schema, 1, 1, {0: [4], 1: []})]
    assert tensors(schema, step(schema, state(schema, [1], []), terms, 1.0)) == [[4.0], []]


# ---------------------------------------------------------------- widths


def test_float64_is_summed_in_float64() -> None:
    # 1 + 2^-40: float32 has 24 bits and would lose it.
    schema = parameters("float64", 1)
    terms = [term(schema, 0, 1, {0: [2.0**-40]}), term(schema, 1, 1, {0: [2.0**-40]})]
    assert tensors(schema, step(schema, state(schema, [1]), terms, 1.0)) == [[1 + 2.0**-40]]


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 7), ("float16", 10)])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: str, bits: int) -> None:
    # Numbers from 1 to 2 are u = 2^-bits apart. Two clients of equal weight with delta u add u/2 each: summed
    # first, 1 + u; rounded after each, 1 + u/2 is a tie that goes back to the even 1.
    u = 2.0**-bits
    schema = parameters(dtype, 1)
    terms = [term(schema, c, 1, {0: [u]}) for c in (0, 1)]
    assert tensors(schema, step(schema, state(schema, [1]), terms, 1.0)) == [[1 + u]]


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 7), ("float16", 10)])
def test_half_precision_rounds_to_nearest_even(dtype: str, bits: int) -> None:
    #   1 + u/2 lies between 1 and 1 + u: even is 1.          1 + u + u/2: even is 1 + 2u.
    #   1 + 3/4 u is nearer to 1 + u.                          -1 - u/4 is nearer to -1.
    u = 2.0**-bits
    schema = parameters(dtype, 4)
    delta = [u / 2, u / 2, 0.75 * u, -u / 4]
    new = step(schema, state(schema, [1, 1 + u, 1, -1]), [term(schema, 0, 1, {0: delta})], 1.0)
    assert tensors(schema, new) == [[1, 1 + 2 * u, 1 + u, -1]]


def test_tensors_of_any_width_lie_back_to_back() -> None:
    # Three float16 numbers end at byte 6, so that the float32 and float64 tensors are not aligned.
    schema = Schema(
        (
            TensorSpec("a", "float16", (3,), PARAMETER),
            TensorSpec("b", "float32", (1,), PARAMETER),
            TensorSpec("c", "float64", (2,), PARAMETER),
            TensorSpec("d", "bfloat16", (1,), PARAMETER),
        )
    )
    terms = [term(schema, 0, 1, {0: [1, 2, 3], 1: [4], 2: [5, 6], 3: [8]})]
    new = step(schema, state(schema, [1, 1, 1], [1], [1, 1], [1]), terms, 1.0)
    assert tensors(schema, new) == [[2, 3, 4], [5], [6, 7], [9]]


# ---------------------------------------------------------------- bit for bit


def straight_sum(
    dtype: str, before: np.ndarray, clients: Sequence[tuple[int, float, np.ndarray]], rate: float
) -> np.ndarray:
    """Eq. 8 over (n_i, factor, dense delta) in the order given, one float32 (or 64) operation at a time."""
    wide = np.float64 if dtype == "float64" else np.float32
    total = np.zeros(before.size, wide)
    examples = sum(n for n, _, _ in clients)
    for n, factor, delta in clients:
        total = total + delta.astype(wide) * wide(n / examples * factor)
    return (before.astype(wide) + total * wide(rate)).astype(before.dtype)


def some(generator: np.random.Generator, dtype: str, size: int, density: float = 1.0) -> np.ndarray:
    """Numbers of very different magnitudes, so that the order of a sum shows in its last bits."""
    values = generator.standard_normal(size) * 10.0 ** generator.integers(-3, 3, size)
    return vector(dtype, np.where(generator.random(size) < density, values, 0.0))


def test_float32_sums_depend_on_the_order_so_the_order_is_fixed() -> None:
    # 1 + 2^-24 is 1 in float32, 2^-24 + 2^-24 + 1 is not. Four clients, q = 1/4 each:
    # ((2^-24 + 2^-24) + 1) - 1 = 2^-23, but ((1 + 2^-24) + 2^-24) - 1 = 0.
    schema = parameters("float32", 1)
    small, one = 4 * 2.0**-24, 4.0
    ascending = [term(schema, c, 1, {0: [x]}) for c, x in enumerate([small, small, one, -one])]
    other_way = [term(schema, c, 1, {0: [x]}) for c, x in enumerate([one, small, small, -one])]
    assert tensors(schema, step(schema, state(schema, [0]), ascending, 1.0)) == [[2.0**-23]]
    assert tensors(schema, step(schema, state(schema, [0]), other_way, 1.0)) == [[0.0]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@unhurried
@given(
    size=st.integers(1, 70),
    modes=st.lists(st.sampled_from([pb.DENSE, pb.PAIRS, pb.BITMAP]), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 32),
)
def test_any_mix_of_modes_equals_the_plain_sum(
    dtype: str, size: int, modes: list[pb.Mode], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    schema = parameters(dtype, size)
    before = some(generator, dtype, size)
    clients = [
        (
            int(generator.integers(1, 500)),
            float(generator.choice([1.0, 0.7279635, 0.7279635**3])),
            some(generator, dtype, size, 1.0 if mode == pb.DENSE else 0.3),
        )
        for mode in modes
    ]
    terms = [
        term(schema, c, n, {0: delta}, factor=factor, mode=mode)
        for c, ((n, factor, delta), mode) in enumerate(zip(clients, modes, strict=True))
    ]
    rate = float(generator.choice([1.0, 0.3]))
    new = step(schema, state(schema, before), terms, rate)
    assert new.tobytes() == straight_sum(dtype, before, clients, rate).tobytes()


@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 5])
@pytest.mark.parametrize("mode", [pb.DENSE, pb.BITMAP])
def test_a_large_tensor_equals_the_plain_sum(size: int, mode: pb.Mode) -> None:
    # All dense is summed tile by tile; the last client's mode takes the other path.
    generator = np.random.default_rng(size)
    schema = parameters("float32", 3, size)
    before = [some(generator, "float32", d) for d in (3, size)]
    clients = [(n, f, some(generator, "float32", size)) for n, f in [(7, 1.0), (30, 0.53), (4, 1.0)]]
    small = [some(generator, "float32", 3) for _ in clients]
    terms = [
        term(schema, c, n, {0: s, 1: delta}, factor=f, mode=mode if c == 2 else pb.DENSE)
        for c, (s, (n, f, delta)) in enumerate(zip(small, clients, strict=True))
    ]
    new = step(schema, state(schema, *before), terms, 1.0)
    beside = [(n, f, s) for s, (n, f, _) in zip(small, clients, strict=True)]
    expected = [
        straight_sum("float32", before[0], beside, 1.0),
        straight_sum("float32", before[1], clients, 1.0),
    ]
    assert new.tobytes() == b"".join(part.tobytes() for part in expected)


def test_averaging_updates_is_averaging_models() -> None:
    """With a server learning rate of 1 and fresh dense updates, w + sum q_i (w_i - w) = sum q_i w_i."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(4, 3), (4,), (2, 4)]
    examples = [13, 200, 51]
    before = [torch.randn(shape, generator=generator) for shape in shapes]
    models = [[w + 0.1 * torch.randn(w.shape, generator=generator) for w in before] for _ in examples]
    schema = Schema(tuple(TensorSpec(f"w{n}", "float32", s, PARAMETER) for n, s in enumerate(shapes)))
    terms = [
        term(
            schema,
            c,
            n,
            {i: (w - old).flatten().numpy() for i, (w, old) in enumerate(zip(model, before, strict=True))},
        )
        for c, (n, model) in enumerate(zip(examples, models, strict=True))
    ]
    new = step(schema, state(schema, *(w.flatten().numpy() for w in before)), terms, 1.0)
    share = torch.tensor(examples) / sum(examples)
    for i, found in enumerate(tensors(schema, new)):
        stacked = torch.stack([model[i] for model in models])
        expected = torch.tensordot(share, stacked, dims=1).flatten()
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float32), expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- overflow and settings


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_state_with_nan_or_infinity_is_found(dtype: str, bad: float) -> None:
    schema = Schema(
        (
            TensorSpec("w", dtype, (2,), PARAMETER),
            TensorSpec("b", dtype, (2,), FLOAT_BUFFER),
            TensorSpec("n", "int64", (1,), INTEGER_BUFFER),
        )
    )
    # All bits set: an integer is always finite.
    assert state_is_finite(schema, state(schema, [1, 2], [3, 4], [-1]))
    assert not state_is_finite(schema, state(schema, [1, bad], [3, 4], [-1]))
    assert not state_is_finite(schema, state(schema, [1, 2], [bad, 4], [-1]))


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 3e38), ("float16", 6e4), ("bfloat16", 3e38)])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_finite_updates_can_overflow_the_state(dtype: str, largest: float) -> None:
    schema = parameters(dtype, 1)
    new = step(schema, state(schema, [largest]), [term(schema, 0, 1, {0: [largest]})], 1.0)
    assert not state_is_finite(schema, new)


@pytest.mark.parametrize(("key", "value"), [("learning_rate", 0), ("learning_rate", -1), ("lr", 1)])
def test_impossible_settings_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValidationError) as caught:
        StepSettings(**{key: value})
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]
