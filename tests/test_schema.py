"""The schema: order by kind, one hash over a text anyone can write, and nothing unchecked from a peer."""

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import MAX_ELEMENTS, MAX_TENSORS, Schema, TensorSpec

unhurried = settings(deadline=None)

WIDTHS = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
P, F, I = pb.PARAMETER, pb.FLOAT_BUFFER, pb.INTEGER_BUFFER  # noqa: E741

# A convolution with batch normalisation, in the order in which a model lists its state.
CONV = TensorSpec("conv.weight", "float32", (8, 1, 3, 3), P)
SCALE = TensorSpec("bn.weight", "float32", (8,), P)
MEAN = TensorSpec("bn.running_mean", "float32", (8,), F)
COUNT = TensorSpec("bn.num_batches_tracked", "int64", (), I)
HEAD = TensorSpec("fc.weight", "bfloat16", (10, 8), P)


def message(*tensors: pb.TensorSpec, hash: int = 0) -> pb.Schema:
    return pb.Schema(tensors=tensors, hash=hash)


def tensor(
    name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (2,), kind: int = P
) -> pb.TensorSpec:
    return pb.TensorSpec(name=name, dtype=dtype, shape=shape, kind=kind)  # type: ignore[arg-type]


# ---------------------------------------------------------------- order and sizes


def test_parameters_come_first_then_float_buffers_then_integer_buffers() -> None:
    schema = Schema.of([CONV, COUNT, SCALE, MEAN, HEAD])
    assert schema.tensors == (CONV, SCALE, HEAD, MEAN, COUNT)
    assert schema.indices == {
        "conv.weight": 0,
        "bn.weight": 1,
        "fc.weight": 2,
        "bn.running_mean": 3,
        "bn.num_batches_tracked": 4,
    }
    assert schema.of_kind(P) == (0, 1, 2)
    assert schema.of_kind(I) == (4,)
    assert schema.of_kind(P, I) == (0, 1, 2, 4)
    assert schema.travelling == (0, 1, 2, 3)
    assert len(schema) == 5


def test_offsets_are_running_sums_of_bytes() -> None:
    # 72 x 4 = 288; 8 x 4 = 32; 80 x 2 = 160; 8 x 4 = 32; 1 x 8 = 8.
    assert Schema((CONV, SCALE, HEAD, MEAN, COUNT)).offsets == (0, 288, 320, 480, 512, 520)
    assert Schema(()).offsets == (0,)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS.items())
def test_widths(dtype: str, width: int) -> None:
    spec = TensorSpec("w", dtype, (3, 5), P)
    assert (spec.size, spec.width, spec.nbytes) == (15, width, 15 * width)
    assert spec.is_float == (dtype in FLOATS)


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((2, 3, 4), 24)])
def test_sizes_of_scalars_and_empty_tensors(shape: tuple[int, ...], size: int) -> None:
    assert TensorSpec("w", "float32", shape, P).size == size


# ---------------------------------------------------------------- the hash


def test_the_hash_is_xxh3_of_the_canonical_text() -> None:
    text = (
        "conv.weight\tfloat32\t8x1x3x3\t1\n"
        "fc.weight\tbfloat16\t10x8\t1\n"
        "bn.running_mean\tfloat32\t8\t2\n"
        "bn.num_batches_tracked\tint64\t\t3\n"
    )
    assert Schema((CONV, HEAD, MEAN, COUNT)).hash == xxhash.xxh3_64_intdigest(text.encode())
    assert Schema(()).hash == xxhash.xxh3_64_intdigest(b"")
    umlaut = TensorSpec("schätzer.gewicht", "float64", (0, 2), P)
    assert Schema((umlaut,)).hash == xxhash.xxh3_64_intdigest("schätzer.gewicht\tfloat64\t0x2\t1\n".encode())


@pytest.mark.parametrize(
    "other",
    [
        (TensorSpec("conv.weights", "float32", (8, 1, 3, 3), P), SCALE),
        (TensorSpec("conv.weight", "float16", (8, 1, 3, 3), P), SCALE),
        (TensorSpec("conv.weight", "float32", (8, 3, 1, 3), P), SCALE),
        (TensorSpec("conv.weight", "float32", (8, 9), P), SCALE),
        (CONV, TensorSpec("bn.weight", "float32", (8,), F)),
        (SCALE, CONV),
        (CONV,),
        (CONV, SCALE, HEAD),
    ],
)
def test_every_difference_changes_the_hash_and_has_a_sentence(other: tuple[TensorSpec, ...]) -> None:
    assert Schema(other).hash != Schema((CONV, SCALE)).hash
    assert Schema((CONV, SCALE)).difference(Schema(other)) is not None


def test_difference_names_the_first_tensor_that_differs() -> None:
    here = Schema((CONV, SCALE))
    there = Schema((CONV, TensorSpec("bn.weight", "float16", (8,), P)))
    assert here.difference(there) == (
        r"tensor 'bn.weight\tfloat32\t8\t1' here, 'bn.weight\tfloat16\t8\t1' there"
    )
    assert here.difference(Schema((CONV,))) == "2 tensors here, 1 there"
    assert Schema(()).difference(here) == "0 tensors here, 2 there"
    assert here.difference(Schema.of([CONV, SCALE])) is None


# ---------------------------------------------------------------- from a peer


def test_a_schema_survives_the_wire() -> None:
    specs = [TensorSpec(f"t.{dtype}", dtype, (2, 3), P if dtype in FLOATS else I) for dtype in WIDTHS]
    schema = Schema.of([*specs, MEAN, COUNT, TensorSpec("empty", "float32", (0, 7), P)])
    sent = pb.Schema.FromString(schema.to_proto().SerializeToString())
    assert Schema.from_proto(sent) == schema
    assert sent.hash == schema.hash


def test_the_message_says_what_the_schema_says() -> None:
    assert Schema((CONV, COUNT)).to_proto() == message(
        tensor("conv.weight", "float32", (8, 1, 3, 3), P),
        tensor("bn.num_batches_tracked", "int64", (), I),
        hash=xxhash.xxh3_64_intdigest(
            b"conv.weight\tfloat32\t8x1x3x3\t1\nbn.num_batches_tracked\tint64\t\t3\n"
        ),
    )


REFUSED: dict[str, tuple[pb.Schema, str]] = {
    "name twice": (message(tensor("w"), tensor("v"), tensor("w")), "'w'.*appears twice"),
    "name twice in two kinds": (message(tensor("w"), tensor("w", kind=F)), "'w'.*appears twice"),
    "no name": (message(tensor("")), "'' .*unusable name"),
    "tab in a name": (message(tensor("w\tfloat32")), "unusable name"),
    "line feed in a name": (message(tensor("w\n")), "unusable name"),
    "no dtype": (message(tensor(dtype="")), "'w'.*dtype ''"),
    "unknown dtype": (message(tensor(dtype="complex64")), "'w'.*dtype 'complex64', known: .*bfloat16"),
    "numpy's other names": (message(tensor(dtype="<f4")), "'w'.*dtype '<f4'"),
    "big-endian dtype": (message(tensor(dtype=">f4")), "'w'.*dtype '>f4'"),
    "object dtype": (message(tensor(dtype="object")), "'w'.*dtype 'object'"),
    "no kind": (message(tensor(kind=0)), "'w'.*unknown kind 0"),
    "unknown kind": (message(tensor(kind=4)), "'w'.*unknown kind 4"),
    "negative kind": (message(tensor(kind=-1)), "'w'.*unknown kind -1"),
    "integer parameter": (message(tensor(dtype="int64")), "'w'.*int64 cannot be of kind PARAMETER"),
    "bool float buffer": (message(tensor(dtype="bool", kind=F)), "'w'.*bool cannot be of kind FLOAT_BUFFER"),
    "float integer buffer": (message(tensor(kind=I)), "'w'.*float32 cannot be of kind INTEGER_BUFFER"),
    "bfloat16 integer buffer": (message(tensor(dtype="bfloat16", kind=I)), "'w'.*bfloat16 cannot be of kind"),
    "buffer before parameter": (message(tensor("m", kind=F), tensor("w")), "'w'.*later kind"),
    "integers before floats": (message(tensor("n", "int8", kind=I), tensor("m", kind=F)), "'m'.*later kind"),
    "too many elements": (message(tensor(shape=(MAX_ELEMENTS + 1,))), "'w'.*shape"),
    "too many elements in two sides": (message(tensor(shape=(1 << 21, 1 << 20))), "'w'.*shape"),
    # 2^32 x 2^32 elements are 0 in 64-bit arithmetic.
    "elements that overflow": (message(tensor(shape=(1 << 32, 1 << 32))), "'w'.*shape"),
    "side of 64 bits": (message(tensor(shape=(2**64 - 1,))), "'w'.*shape"),
    "more sides than an array can have": (message(tensor(shape=(1,) * 65)), "'w'.*65 dimensions"),
    # Multiplied out this would take minutes.
    "very many long sides": (message(tensor(shape=(2**63,) * 200_000)), "'w'.*200000 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_makes_no_sense_is_refused(case: str) -> None:
    sent, text = REFUSED[case]
    with pytest.raises(ProtocolError, match=text) as caught:
        Schema.from_proto(sent)
    assert caught.value.code == pb.MALFORMED
    assert len(caught.value.detail) < 2000


def test_a_schema_of_too_many_tensors_is_refused_by_their_number() -> None:
    sent = pb.Schema(tensors=[pb.TensorSpec()] * (MAX_TENSORS + 1))
    with pytest.raises(ProtocolError, match="100001 tensors, limit 100000") as caught:
        Schema.from_proto(sent)
    assert caught.value.code == pb.MALFORMED


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_a_schema_with_another_hash_is_refused(bit: int) -> None:
    sent = Schema((CONV,)).to_proto()
    sent.hash ^= 1 << bit
    with pytest.raises(ProtocolError, match=f"the message says {sent.hash:016x}") as caught:
        Schema.from_proto(sent)
    assert caught.value.code == pb.SCHEMA_MISMATCH


def test_the_limits_themselves_are_allowed() -> None:
    text = f"w\tfloat32\t{MAX_ELEMENTS}\t1\n"
    sent = message(tensor(shape=(MAX_ELEMENTS,)), hash=xxhash.xxh3_64_intdigest(text.encode()))
    assert Schema.from_proto(sent).tensors[0].nbytes == 4 << 40
    deep = Schema((TensorSpec("w", "float32", (1,) * 64, P),))
    assert Schema.from_proto(deep.to_proto()) == deep


# ---------------------------------------------------------------- one flat state


def small_state() -> tuple[Schema, dict[str, np.ndarray]]:
    """Odd sizes on purpose: the float32 tensor starts at byte 2, the int64 tensor at byte 15."""
    schema = Schema(
        (
            TensorSpec("b", "bfloat16", (1,), P),
            TensorSpec("w", "float32", (1, 3), P),
            TensorSpec("mask", "bool", (1,), I),
            TensorSpec("n", "int64", (), I),
        )
    )
    arrays = {
        "n": np.array(-2, "<i8"),
        "w": np.array([[1, -2, 0.5]], "<f4"),
        "b": np.array([1], ml_dtypes.bfloat16),
        "mask": np.array([True]),
    }
    return schema, arrays


def test_the_flat_state_is_the_tensors_back_to_back() -> None:
    schema, arrays = small_state()
    flat = schema.flatten(arrays)
    assert flat.dtype == np.uint8
    assert flat.tobytes() == bytes.fromhex("803f 0000803f 000000c0 0000003f 01 feffffffffffffff")


def test_views_look_into_the_flat_state() -> None:
    schema, arrays = small_state()
    flat = schema.flatten(arrays)
    views = schema.views(flat)
    assert [view.tolist() for view in views] == [[1], [1, -2, 0.5], [True], [-2]]
    assert [view.ndim for view in views] == [1, 1, 1, 1]
    views[1][2] = 1.0
    views[3][0] = 3
    assert flat.tobytes() == bytes.fromhex("803f 0000803f 000000c0 0000803f 01 0300000000000000")


def test_flatten_copies() -> None:
    schema, arrays = small_state()
    flat = schema.flatten(arrays)
    arrays["w"][:] = 9
    assert schema.views(flat)[1].tolist() == [1, -2, 0.5]


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("w", None, "tensor 'w' is missing"),
        ("n", None, "tensor 'n' is missing"),
        ("w", np.zeros(3, "<f4"), r"tensor 'w' is float32\[3\], the schema says float32\[1, 3\]"),
        ("w", np.zeros((3, 1), "<f4"), r"tensor 'w' is float32\[3, 1\]"),
        ("w", np.zeros((1, 3), "<f8"), r"tensor 'w' is float64\[1, 3\]"),
        ("w", np.zeros((1, 3), ">f4"), r"tensor 'w' is >f4\[1, 3\]"),
        ("b", np.zeros(1, "<f2"), r"tensor 'b' is float16\[1\], the schema says bfloat16\[1\]"),
        ("n", np.zeros(1, "<i8"), r"tensor 'n' is int64\[1\], the schema says int64\[\]"),
        ("n", np.array(1, "<i4"), r"tensor 'n' is int32\[\]"),
    ],
)
def test_flatten_names_what_does_not_fit(name: str, array: np.ndarray | None, text: str) -> None:
    schema, arrays = small_state()
    arrays.pop(name)
    if array is not None:
        arrays[name] = array
    with pytest.raises(ProtocolError, match=text) as caught:
        schema.flatten(arrays)
    assert caught.value.code == pb.SCHEMA_MISMATCH


@st.composite
def states(draw: st.DrawFn) -> tuple[Schema, dict[str, np.ndarray]]:
    specs, arrays = [], {}
    for n in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        kind = draw(st.sampled_from([P, F])) if dtype in FLOATS else I
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        spec = TensorSpec(f"t{n}", dtype, shape, kind)
        raw = draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
        if dtype == "bool":
            raw = bytes(byte & 1 for byte in raw)
        numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        specs.append(spec)
        arrays[spec.name] = np.frombuffer(raw, numpy_dtype).reshape(shape)
    return Schema.of(specs), arrays


@unhurried
@given(state=states())
def test_flatten_and_views_are_inverse(state: tuple[Schema, dict[str, np.ndarray]]) -> None:
    schema, arrays = state
    flat = schema.flatten(arrays)
    assert flat.tobytes() == b"".join(arrays[spec.name].tobytes() for spec in schema.tensors)
    for spec, view in zip(schema.tensors, schema.views(flat), strict=True):
        assert view.reshape(spec.shape).tobytes() == arrays[spec.name].tobytes()
        assert view.dtype == arrays[spec.name].dtype
