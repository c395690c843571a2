"""The tensor codec: what goes in comes out bit for bit, in the fewest bytes, and only finite."""

from math import ceil, prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto import codec
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.errors import ProtocolError
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
INTEGERS = tuple(name for name in NUMPY if name not in FLOATS)
MODES = (pb.DENSE, pb.PAIRS, pb.BITMAP)


def parameter(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, pb.PARAMETER)


def through_the_wire(schema: Schema, payload: Payload) -> dict[int, np.ndarray]:
    """Header and body to bytes and back through every check."""
    header = pb.Transfer.FromString(codec.transfer_header(schema, payload).SerializeToString())
    received = Payload(codec.check_layout(schema, header), bytearray(payload.body))
    codec.check_body(schema, received, header.checksum)
    assert received.blocks == payload.blocks
    assert header.length == len(payload.body) == payload.nbytes
    return codec.decode(schema, received)


def sparse(values: np.ndarray, k: int) -> np.ndarray:
    """Top-K by a full sort, the rest zero."""
    result = np.zeros(values.shape, values.dtype)
    if k >= len(values):
        return values
    for j in sorted(range(len(values)), key=lambda j: (-abs(float(values[j])), j))[:k]:
        result[j] = values[j]
    return result


def smallest_length(d: int, b: int, k: int) -> int:
    return min(d * b, k * (4 + b), ceil(d / 8) + k * b)


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", NUMPY)
def test_dense_round_trip_of_every_dtype(dtype: str) -> None:
    kind = pb.PARAMETER if dtype in FLOATS else pb.INTEGER_BUFFER
    schema = Schema((TensorSpec("w", dtype, (3, 4), kind),))
    values = np.array([0, 1, -1, 2, 100, -100, 3, 0, 5, -7, 11, 13]).astype(NUMPY[dtype])
    payload = codec.encode(schema, {0: values}, lambda _: 12)
    assert payload.blocks == (Block(0, pb.DENSE, 12, 12 * NUMPY[dtype].itemsize),)
    assert bytes(payload.body) == values.tobytes()
    decoded = through_the_wire(schema, payload)[0]
    assert decoded.dtype == NUMPY[dtype]
    assert decoded.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 1, 5, 8, 10, 11])
def test_every_mode_carries_the_same_values(dtype: str, mode: pb.Mode, k: int) -> None:
    spec = parameter("w", dtype, 11)
    values = np.array([0.5, -0.0, 3, -3, 0, 1, -8, 0.25, 3, 1, -1], NUMPY[dtype])
    chosen, data = codec.encode_tensor(spec, values, k, mode)
    width = NUMPY[dtype].itemsize
    assert chosen == mode
    assert len(data) == {pb.DENSE: 11 * width, pb.PAIRS: k * (4 + width), pb.BITMAP: 2 + k * width}[mode]
    decoded = through_the_wire(Schema((spec,)), Payload((Block(0, mode, k, len(data)),), data))[0]
    assert decoded.tobytes() == sparse(values, k).tobytes()


def test_the_bytes_of_the_three_modes_by_hand() -> None:
    # 1.5 = 3fc00000, -2 = c0000000; coordinates 2 and 9 of 10, bits 2 of byte 0 and 1 of byte 1.
    spec = parameter("w", "float32", 10)
    values = np.array([0.5, 0, 1.5, 0, 0, 0, -0.5, 0, 0, -2], "<f4")
    kept = bytes.fromhex("0000c03f 000000c0")
    assert codec.encode_tensor(spec, values, 2, pb.PAIRS)[1] == bytes.fromhex("02000000 09000000") + kept
    assert codec.encode_tensor(spec, values, 2, pb.BITMAP)[1] == bytes.fromhex("04 02") + kept
    assert codec.encode_tensor(spec, values, 2, pb.DENSE)[1] == bytes(8) + kept[:4] + bytes(24) + kept[4:]


def test_a_kept_minus_zero_keeps_its_sign_and_a_dropped_one_is_zero() -> None:
    spec = parameter("w", "float32", 3)
    minus_zero = bytes.fromhex("00000080")
    values = np.array([-0.0, -0.0, 1], "<f4")
    one = bytes.fromhex("0000803f")
    for mode in MODES:
        _, data = codec.encode_tensor(spec, values, 2, mode)
        payload = Payload((Block(0, mode, 2, len(data)),), data)
        assert through_the_wire(Schema((spec,)), payload)[0].tobytes() == minus_zero + bytes(4) + one


def test_scalars_and_empty_tensors() -> None:
    schema = Schema(
        (parameter("scalar", "float32"), parameter("empty", "float32", 0), parameter("flat", "float64", 3, 0))
    )
    arrays = {0: np.array([2.5], "<f4"), 1: np.empty(0, "<f4"), 2: np.empty(0, "<f8")}
    payload = codec.encode(schema, arrays, lambda index: min(1, schema.tensors[index].size))
    assert payload.blocks == (Block(0, pb.DENSE, 1, 4), Block(1, pb.DENSE, 0, 0), Block(2, pb.DENSE, 0, 0))
    assert bytes(payload.body) == bytes.fromhex("00002040")
    decoded = through_the_wire(schema, payload)
    assert {i: a.tolist() for i, a in decoded.items()} == {0: [2.5], 1: [], 2: []}


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_tensor_has_no_bytes_in_any_mode(mode: pb.Mode) -> None:
    spec = parameter("empty", "float32", 0)
    _, data = codec.encode_tensor(spec, np.empty(0, "<f4"), 0, mode)
    assert data == b""
    assert through_the_wire(Schema((spec,)), Payload((Block(0, mode, 0, 0),), b""))[0].size == 0


def test_values_may_come_from_strided_memory() -> None:
    spec = parameter("w", "float32", 4)
    every_other = np.array([1, 90, -4, 91, 3, 92, 2, 93], "<f4")[::2]
    for mode in MODES:
        _, data = codec.encode_tensor(spec, every_other, 2, mode)
        decoded = through_the_wire(Schema((spec,)), Payload((Block(0, mode, 2, len(data)),), data))[0]
        assert decoded.tolist() == [0, -4, 3, 0]
    assert codec.encode_tensor(spec, every_other, 4)[1] == np.array([1, -4, 3, 2], "<f4").tobytes()


def test_a_transposed_weight_travels_in_row_order() -> None:
    schema = Schema((parameter("w", "float32", 3, 2),))
    weight = np.array([[1, 2, 3], [4, 5, 6]], "<f4").T
    payload = codec.dense_payload(schema, schema.flatten({"w": weight}))
    assert through_the_wire(schema, payload)[0].tolist() == [1, 4, 2, 5, 3, 6]


def test_decoded_arrays_are_writable_and_own_their_memory() -> None:
    schema = Schema((parameter("a", "float32", 2), parameter("b", "float32", 64)))
    body = np.array([1, 2], "<f4").tobytes() + bytes.fromhex("07000000 0000803f")
    received = bytearray(body)
    decoded = codec.decode(schema, Payload((Block(0, pb.DENSE, 2, 8), Block(1, pb.PAIRS, 1, 8)), received))
    received[:] = bytes(len(received))
    assert decoded[0].tolist() == [1, 2]
    decoded[0] += 1
    decoded[1] += 1
    assert decoded[0].tolist() == [2, 3]
    assert decoded[1][7] == 2


def test_decode_block_gives_coordinates_or_none() -> None:
    spec = parameter("w", "float32", 10)
    value = bytes.fromhex("0000803f")
    at, values = codec.decode_block(spec, Block(0, pb.BITMAP, 2, 10), memoryview(b"\x80\x02" + 2 * value))
    assert at is not None
    assert at.tolist() == [7, 9]
    assert values.tolist() == [1, 1]
    at, values = codec.decode_block(spec, Block(0, pb.PAIRS, 1, 8), memoryview(b"\x09\0\0\0" + value))
    assert at is not None
    assert at.tolist() == [9]
    at, values = codec.decode_block(spec, Block(0, pb.DENSE, 10, 40), memoryview(10 * value))
    assert at is None
    assert values.tolist() == [1] * 10


@st.composite
def updates(draw: st.DrawFn) -> tuple[Schema, dict[int, np.ndarray], dict[int, int]]:
    """A random schema with random bits in its tensors, and k for each tensor that is sent."""
    specs = []
    for n in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(sorted(NUMPY)))
        kinds = [pb.PARAMETER, pb.FLOAT_BUFFER] if dtype in FLOATS else [pb.INTEGER_BUFFER]
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        specs.append(TensorSpec(f"t{n}", dtype, shape, draw(st.sampled_from(kinds))))
    schema = Schema.of(specs)
    seed = draw(st.integers(0, 2**32 - 1))
    few_values = draw(st.booleans())
    arrays, kept = {}, {}
    for index, spec in enumerate(schema.tensors):
        if draw(st.integers(0, 4)) == 0:
            continue
        d, dtype = prod(spec.shape), NUMPY[spec.dtype]
        values = np.frombuffer(
            np.random.default_rng([seed, index]).bytes(d * dtype.itemsize), dtype, d
        ).copy()
        if spec.dtype == "bool":
            values = np.frombuffer(values.tobytes(), np.uint8) > 127
        if spec.dtype in FLOATS:
            with np.errstate(invalid="ignore"):
                values[~np.isfinite(values)] = 0.5
            if few_values:
                values = np.sign(values)
        arrays[index] = values
        kept[index] = draw(st.integers(0, d)) if spec.dtype in FLOATS else d
    return schema, arrays, kept


@unhurried
@given(update=updates())
def test_round_trip_of_random_updates(update: tuple[Schema, dict[int, np.ndarray], dict[int, int]]) -> None:
    schema, arrays, kept = update
    payload = codec.encode(schema, arrays, kept.__getitem__)
    decoded = through_the_wire(schema, payload)
    assert list(decoded) == sorted(arrays)
    for block in payload.blocks:
        values, k = arrays[block.index], kept[block.index]
        assert block.kept == k
        assert block.length == smallest_length(values.size, values.itemsize, k)
        assert decoded[block.index].tobytes() == sparse(values, k).tobytes()


# ---------------------------------------------------------------- modes


@unhurried
@given(d=st.integers(0, 1 << 32), dtype=st.sampled_from(FLOATS), data=st.data())
def test_choose_mode_is_the_smallest_with_ties_dense_pairs_bitmap(
    d: int, dtype: str, data: st.DataObject
) -> None:
    k = data.draw(st.one_of(st.integers(0, d), st.integers(0, min(d, d // 32 + 1))))
    b = NUMPY[dtype].itemsize
    in_order = [(d * b, pb.DENSE), (k * (4 + b), pb.PAIRS), (k * b + -(-d // 8), pb.BITMAP)]
    smallest = min(size for size, _ in in_order)
    first = next(mode for size, mode in in_order if size == smallest)
    assert codec.choose_mode(parameter("w", dtype, d), k) == first


@pytest.mark.parametrize(
    ("dtype", "d", "k", "mode"),
    [
        ("float32", 1_000_000, 200_000, pb.BITMAP),  # 4,000,000 / 1,600,000 / 925,000
        ("float32", 1_000_000, 10_000, pb.PAIRS),  # 4,000,000 / 80,000 / 165,000
        ("float32", 1_000_000, 1_000_000, pb.DENSE),
        ("float32", 1, 1, pb.DENSE),  # 4 / 8 / 5
        ("float32", 8, 7, pb.BITMAP),  # 32 / 56 / 29
        ("float32", 2, 1, pb.BITMAP),  # 8 / 8 / 5
        ("float32", 32, 31, pb.DENSE),  # 128 / 248 / 128: dense before bitmap
        ("float32", 32, 1, pb.PAIRS),  # 128 / 8 / 8: pairs before bitmap
        ("float32", 33, 1, pb.PAIRS),  # 132 / 8 / 9
        ("float16", 3, 1, pb.BITMAP),  # 6 / 6 / 3
        ("float32", 0, 0, pb.DENSE),  # 0 / 0 / 0
        ("float32", 5, 0, pb.PAIRS),  # 20 / 0 / 1
    ],
)
def test_modes_by_hand(dtype: str, d: int, k: int, mode: pb.Mode) -> None:
    assert codec.choose_mode(parameter("w", dtype, d), k) == mode


def test_coordinates_beyond_32_bits_never_go_as_pairs() -> None:
    assert codec.choose_mode(parameter("w", "float32", 1 << 32), 1) == pb.PAIRS
    assert codec.choose_mode(parameter("w", "float32", (1 << 32) + 1), 1) == pb.BITMAP


def test_block_length_knows_only_the_modes_of_this_version() -> None:
    spec = parameter("w", "float32", 20)
    assert [codec.block_length(spec, mode, 3) for mode in MODES] == [80, 24, 15]
    assert codec.block_length(spec, 4, 3) is None
    assert codec.block_length(spec, pb.MODE_UNSPECIFIED, 3) is None


# ---------------------------------------------------------------- payloads


def three_kinds() -> Schema:
    return Schema(
        (
            parameter("w", "float32", 2),
            parameter("v", "float32", 1),
            TensorSpec("mean", "float32", (1,), pb.FLOAT_BUFFER),
            TensorSpec("count", "int64", (), pb.INTEGER_BUFFER),
        )
    )


def test_prefix_is_a_copy_of_the_leading_blocks() -> None:
    body = bytearray(b"aaaabbbbccccdddd")
    payload = Payload((Block(0, pb.DENSE, 2, 8), Block(1, pb.DENSE, 1, 4), Block(2, pb.DENSE, 1, 4)), body)
    head = payload.prefix(lambda index: index < 2)
    body[:] = bytes(16)
    assert head.blocks == payload.blocks[:2]
    assert head.body == b"aaaabbbbcccc"
    # Only what leads: a later block that would satisfy the rule is not reached.
    assert payload.prefix(lambda index: index != 1).blocks == payload.blocks[:1]
    assert payload.prefix(lambda _: True).nbytes == 16
    assert payload.prefix(lambda _: False) == Payload((), b"")


def test_dense_payload_is_a_view_of_what_travels() -> None:
    schema = three_kinds()
    flat = schema.flatten(
        {
            "w": np.array([1, 2], "<f4"),
            "v": np.array([3], "<f4"),
            "mean": np.array([4], "<f4"),
            "count": np.array(5, "<i8"),
        }
    )
    payload = codec.dense_payload(schema, flat)
    # The integer buffer stays at home: 16 of 24 bytes.
    assert payload.blocks == (Block(0, pb.DENSE, 2, 8), Block(1, pb.DENSE, 1, 4), Block(2, pb.DENSE, 1, 4))
    assert payload.nbytes == 16
    assert np.shares_memory(np.frombuffer(payload.body, np.uint8), flat)
    flat[2:4] = 0x40  # 1.0 = 3f800000 becomes 3.0 = 40400000
    assert through_the_wire(schema, payload)[0].tolist() == [3, 2]


def test_encode_sorts_by_index_and_leaves_out_what_is_not_given() -> None:
    schema = three_kinds()
    arrays = {2: np.array([4], "<f4"), 0: np.array([1, 2], "<f4")}
    payload = codec.encode(schema, arrays, lambda index: schema.tensors[index].size)
    assert [block.index for block in payload.blocks] == [0, 2]
    assert np.frombuffer(payload.body, "<f4").tolist() == [1, 2, 4]
    assert [bytes(data) for _, data in payload.located()] == [
        bytes(payload.body[:8]),
        bytes(payload.body[8:]),
    ]


def test_an_update_of_nothing() -> None:
    schema = three_kinds()
    payload = codec.encode(schema, {}, lambda _: 1)
    assert payload == Payload((), b"")
    assert through_the_wire(schema, payload) == {}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [1, 3])
def test_an_update_that_is_not_finite_is_never_encoded(dtype: str, bad: float, k: int) -> None:
    schema = Schema((parameter("conv.weight", dtype, 3),))
    with pytest.raises(ProtocolError, match=r"'conv\.weight'") as caught:
        codec.encode(schema, {0: np.array([1, bad, 2], NUMPY[dtype])}, lambda _: k)
    assert caught.value.code == pb.NOT_FINITE


# ---------------------------------------------------------------- what the plan asks for


def asked(blocks: list[Block]) -> None:
    """The plan: parameters 0 and 1 with one coordinate each, buffer 2 whole (one coordinate)."""
    codec.require(blocks, three_kinds(), lambda _: 1, (0, 1, 2))


def test_require_accepts_exactly_the_plan_in_any_mode() -> None:
    asked([Block(0, pb.BITMAP, 1, 5), Block(1, pb.PAIRS, 1, 8), Block(2, pb.DENSE, 1, 4)])


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([Block(0, pb.DENSE, 1, 8), Block(1, pb.DENSE, 1, 4)], "2 tensors, the plan says 3"),
        ([], "0 tensors, the plan says 3"),
        (
            [Block(0, pb.DENSE, 1, 8), Block(2, pb.DENSE, 1, 4)],
            "'mean' where 'v' was due",
        ),
        (
            [Block(0, pb.DENSE, 2, 8), Block(1, pb.DENSE, 1, 4), Block(2, pb.DENSE, 1, 4)],
            "'w' keeps 2 coordinates, the plan says 1",
        ),
        (
            [Block(0, pb.DENSE, 1, 8), Block(1, pb.DENSE, 1, 4), Block(2, pb.DENSE, 0, 4)],
            "'mean' keeps 0 coordinates, the plan says 1",
        ),
        (
            [Block(n, pb.DENSE, 1, 8) for n in range(4)],
            "4 tensors, the plan says 3",
        ),
    ],
)
def test_require_names_the_first_difference(blocks: list[Block], text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        asked(blocks)
    assert caught.value.code == pb.WRONG_CONTENT
