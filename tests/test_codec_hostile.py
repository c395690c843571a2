"""Attacks on the decoder: each is refused with its code and a text that says where, and costs no memory."""

import tracemalloc
from collections.abc import Callable
from math import prod

import ml_dtypes
import numpy as np
import pytest
import xxhash
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto import codec
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import Schema, TensorSpec

unhurried = settings(deadline=None)

# A valid transfer, its bytes in full. Coordinates are little-endian uint32; 1.0 = 3f800000, bfloat16 3f80.
#
#   tensor          d   mode    k   bytes
#   fc.weight      20   PAIRS   2   coordinates 3, 19; values 1, 1       16
#   conv.weight    20   BITMAP  3   coordinates 0, 9, 19; values 1 x 3   15
#   fc.bias         9   DENSE   8   nine float16, the last one zero      18
#   bn.mean         2   DENSE   2   two bfloat16                          4
#   bn.count        1   DENSE   1   one int64                             8
SCHEMA = Schema(
    (
        TensorSpec("fc.weight", "float32", (4, 5), pb.PARAMETER),
        TensorSpec("conv.weight", "float32", (20,), pb.PARAMETER),
        TensorSpec("fc.bias", "float16", (9,), pb.PARAMETER),
        TensorSpec("bn.mean", "bfloat16", (2,), pb.FLOAT_BUFFER),
        TensorSpec("bn.count", "int64", (), pb.INTEGER_BUFFER),
    )
)
ONE, HALF_ONE, BRAIN_ONE = bytes.fromhex("0000803f"), bytes.fromhex("003c"), bytes.fromhex("803f")
PAIRS_AT, BITMAP_AT, BIAS_AT, MEAN_AT, COUNT_AT, END = 0, 16, 31, 49, 53, 61
BODY = b"".join(
    (
        bytes.fromhex("03000000 13000000") + 2 * ONE,
        bytes.fromhex("01 02 08") + 3 * ONE,
        8 * HALF_ONE + bytes(2),
        2 * BRAIN_ONE,
        bytes.fromhex("0700000000000000"),
    )
)


def header() -> pb.Transfer:
    rows = [
        (0, pb.PAIRS, 2, 16),
        (1, pb.BITMAP, 3, 15),
        (2, pb.DENSE, 8, 18),
        (3, pb.DENSE, 2, 4),
        (4, pb.DENSE, 1, 8),
    ]
    tensors = [pb.TensorHeader(index=i, mode=m, kept=k, format=pb.RAW, length=n) for i, m, k, n in rows]
    return pb.Transfer(
        schema_hash=SCHEMA.hash, tensors=tensors, length=END, checksum=xxhash.xxh3_64_intdigest(BODY)
    )


def receive(message: pb.Transfer, body: bytes) -> dict[int, np.ndarray]:
    payload = Payload(codec.check_layout(SCHEMA, message), body)
    codec.check_body(SCHEMA, payload, message.checksum)
    return codec.decode(SCHEMA, payload)


def changed_body(at: int, replacement: bytes) -> bytes:
    return BODY[:at] + replacement + BODY[at + len(replacement) :]


def test_the_transfer_under_attack_is_valid() -> None:
    decoded = receive(header(), BODY)
    assert np.flatnonzero(decoded[0]).tolist() == [3, 19]
    assert np.flatnonzero(decoded[1]).tolist() == [0, 9, 19]
    assert decoded[2].tolist() == [1] * 8 + [0]
    assert decoded[3].astype(np.float32).tolist() == [1, 1]
    assert decoded[4].tolist() == [7]


# ---------------------------------------------------------------- the header

HUGE = 2**63

Change = Callable[[pb.Transfer], None]


def to(n: int, **values: int) -> Change:
    def change(message: pb.Transfer) -> None:
        for field, value in values.items():
            setattr(message.tensors[n], field, value)

    return change


def whole(**values: int) -> Change:
    def change(message: pb.Transfer) -> None:
        for field, value in values.items():
            setattr(message, field, value)

    return change


def swap_first_two(message: pb.Transfer) -> None:
    first, second = pb.TensorHeader(), pb.TensorHeader()
    first.CopyFrom(message.tensors[0])
    second.CopyFrom(message.tensors[1])
    message.tensors[0].CopyFrom(second)
    message.tensors[1].CopyFrom(first)


def repeat_last(message: pb.Transfer) -> None:
    message.tensors.append(message.tensors[-1])
    message.length += message.tensors[-1].length


def drop_last(message: pb.Transfer) -> None:
    del message.tensors[-1]


HEADER_ATTACKS: dict[str, tuple[Change, pb.Code, str]] = {
    "another schema": (whole(schema_hash=SCHEMA.hash ^ 1), pb.SCHEMA_MISMATCH, "this run has"),
    "no schema": (whole(schema_hash=0), pb.SCHEMA_MISMATCH, "schema 0000000000000000"),
    "index behind the last": (to(4, index=5), pb.MALFORMED, "header 4 names tensor 5"),
    "index of 32 bits": (to(0, index=2**32 - 1), pb.MALFORMED, "header 0 names tensor 4294967295"),
    "indices descend": (swap_first_two, pb.MALFORMED, "header 1 names tensor 0"),
    "index twice": (repeat_last, pb.MALFORMED, "header 5 names tensor 4"),
    "mode missing": (to(0, mode=pb.MODE_UNSPECIFIED), pb.MALFORMED, "'fc.weight'.*mode 0"),
    "mode unknown": (to(1, mode=4), pb.MALFORMED, "'conv.weight'.*mode 4"),
    "mode negative": (to(1, mode=-1), pb.MALFORMED, "'conv.weight'.*mode -1"),
    "format missing": (to(2, format=pb.VALUE_FORMAT_UNSPECIFIED), pb.MALFORMED, "'fc.bias'.*format 0"),
    "format unknown": (to(3, format=2), pb.MALFORMED, "'bn.mean'.*format 2"),
    "k above d, pairs": (to(0, kept=21, length=21 * 8), pb.MALFORMED, "'fc.weight'.* 21 of 20"),
    "k above d, bitmap": (to(1, kept=21, length=21 * 4 + 3), pb.MALFORMED, "'conv.weight'.* 21 of 20"),
    "k above d, dense": (to(3, kept=3), pb.MALFORMED, "'bn.mean'.* 3 of 2"),
    "k of 64 bits": (to(0, kept=HUGE), pb.MALFORMED, f"'fc.weight'.* {HUGE} of 20"),
    # 2^61 pairs of 8 bytes are 2^64 bytes: 0 in 64-bit arithmetic.
    "k that overflows": (to(0, kept=2**61, length=0), pb.MALFORMED, f"'fc.weight'.* {2**61} of 20"),
    "length one more": (to(0, length=17), pb.MALFORMED, "'fc.weight'.* 17 bytes.* need 16"),
    "length one less": (to(1, length=14), pb.MALFORMED, "'conv.weight'.* 14 bytes.* need 15"),
    "length of k values, dense": (to(2, length=16), pb.MALFORMED, "'fc.bias'.* 16 bytes.* need 18"),
    "length zero": (to(4, length=0), pb.MALFORMED, "'bn.count'.* 0 bytes.* need 8"),
    "length of 64 bits": (to(4, length=HUGE), pb.MALFORMED, f"'bn.count'.* {HUGE} bytes.* need 8"),
    "total one more": (whole(length=END + 1), pb.MALFORMED, "body of 62 bytes declared, its tensors need 61"),
    "total one less": (whole(length=END - 1), pb.MALFORMED, "body of 60 bytes declared, its tensors need 61"),
    "total of 64 bits": (whole(length=HUGE), pb.MALFORMED, f"body of {HUGE} bytes"),
    "total without its tensors": (drop_last, pb.MALFORMED, "body of 61 bytes declared, its tensors need 53"),
    "lengths that cancel out": (
        lambda message: (to(0, length=15)(message), to(1, length=16)(message))[0],
        pb.MALFORMED,
        "'fc.weight'.* 15 bytes.* need 16",
    ),
}


@pytest.mark.parametrize("attack", HEADER_ATTACKS)
def test_a_header_that_contradicts_the_schema_is_refused(attack: str) -> None:
    change, code, text = HEADER_ATTACKS[attack]
    message = header()
    change(message)
    with pytest.raises(ProtocolError, match=text) as caught:
        codec.check_layout(SCHEMA, message)
    assert caught.value.code == code


def test_checking_a_header_reserves_nothing_however_large_the_tensors() -> None:
    # Two TiB declared, and truly so: the layout is in order, and no byte of it is reserved.
    d = 1 << 39
    schema = Schema((TensorSpec("embedding", "float32", (d,), pb.PARAMETER),))
    dense = pb.TensorHeader(index=0, mode=pb.DENSE, kept=d, format=pb.RAW, length=4 * d)
    honest = pb.Transfer(schema_hash=schema.hash, tensors=[dense], length=4 * d)
    liar = pb.Transfer(schema_hash=schema.hash, tensors=[dense], length=HUGE)
    tracemalloc.start()
    try:
        assert codec.check_layout(schema, honest) == (Block(0, pb.DENSE, d, 4 * d),)
        with pytest.raises(ProtocolError):
            codec.check_layout(schema, liar)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_pairs_for_a_tensor_beyond_32_bit_coordinates_are_refused() -> None:
    schema = Schema((TensorSpec("embedding", "float32", ((1 << 32) + 1,), pb.PARAMETER),))
    tensor = pb.TensorHeader(index=0, mode=pb.PAIRS, kept=1, format=pb.RAW, length=8)
    with pytest.raises(ProtocolError, match=r"'embedding'.*too large for mode PAIRS") as caught:
        codec.check_layout(schema, pb.Transfer(schema_hash=schema.hash, tensors=[tensor], length=8))
    assert caught.value.code == pb.MALFORMED


# ---------------------------------------------------------------- the body

NOT_FINITE_32 = {"NaN": "0000c07f", "signalling NaN": "0100807f", "Inf": "0000807f", "-Inf": "000080ff"}
NOT_FINITE_16 = {"NaN": "007e", "signalling NaN": "017c", "Inf": "007c", "-Inf": "00fc"}
NOT_FINITE_BRAIN = {"NaN": "c07f", "signalling NaN": "817f", "Inf": "807f", "-Inf": "80ff"}

COORDINATES = "coordinates of tensor 'fc.weight'"
BITS = "bitmap of tensor 'conv.weight'"

BODY_ATTACKS: dict[str, tuple[int, str, pb.Code, str]] = {
    "pairs descend": (PAIRS_AT, "13000000 03000000", pb.MALFORMED, COORDINATES),
    "pairs repeat": (PAIRS_AT, "03000000 03000000", pb.MALFORMED, COORDINATES),
    "pair out of range": (PAIRS_AT, "03000000 14000000", pb.MALFORMED, COORDINATES),
    "pair of 32 bits": (PAIRS_AT, "03000000 ffffffff", pb.MALFORMED, COORDINATES),
    "first pair out of range": (PAIRS_AT, "ffffffff 13000000", pb.MALFORMED, COORDINATES),
    "bitmap with one bit less": (BITMAP_AT, "01 00 08", pb.MALFORMED, f"{BITS} sets 2 bits, k is 3"),
    "bitmap with one bit more": (BITMAP_AT, "01 03 08", pb.MALFORMED, f"{BITS} sets 4 bits, k is 3"),
    "bitmap empty": (BITMAP_AT, "00 00 00", pb.MALFORMED, f"{BITS} sets 0 bits"),
    "bitmap full": (BITMAP_AT, "ff ff 0f", pb.MALFORMED, f"{BITS} sets 20 bits"),
    "padding bit set": (BITMAP_AT, "01 02 18", pb.MALFORMED, f"{BITS} sets bits past"),
    "padding bit instead of the last": (BITMAP_AT, "01 02 10", pb.MALFORMED, f"{BITS} sets bits past"),
    "highest padding bit": (BITMAP_AT, "01 02 80", pb.MALFORMED, f"{BITS} sets bits past"),
    "dense with more values than k": (BIAS_AT + 16, "003c", pb.MALFORMED, "'fc.bias'.* 9 .*k is 8"),
    **{
        f"{what} in pairs": (PAIRS_AT + 12, bits, pb.NOT_FINITE, "'fc.weight'")
        for what, bits in NOT_FINITE_32.items()
    },
    **{
        f"{what} in a bitmap": (BITMAP_AT + 3, bits, pb.NOT_FINITE, "'conv.weight'")
        for what, bits in NOT_FINITE_32.items()
    },
    **{
        f"{what} in dense float16": (BIAS_AT, bits, pb.NOT_FINITE, "'fc.bias'")
        for what, bits in NOT_FINITE_16.items()
    },
    **{
        f"{what} in dense bfloat16": (MEAN_AT + 2, bits, pb.NOT_FINITE, "'bn.mean'")
        for what, bits in NOT_FINITE_BRAIN.items()
    },
}


@pytest.mark.parametrize("attack", BODY_ATTACKS)
def test_a_body_with_a_true_checksum_is_still_not_trusted(attack: str) -> None:
    at, replacement, code, text = BODY_ATTACKS[attack]
    body = changed_body(at, bytes.fromhex(replacement))
    assert len(body) == END
    message = header()
    message.checksum = xxhash.xxh3_64_intdigest(body)
    with pytest.raises(ProtocolError, match=text) as caught:
        receive(message, body)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "bits", ["000000000000f87f", "010000000000f07f", "000000000000f07f", "000000000000f0ff"]
)
def test_float64_is_searched_too(bits: str) -> None:
    schema = Schema((TensorSpec("w", "float64", (2,), pb.PARAMETER),))
    body = bytes(8) + bytes.fromhex(bits)
    with pytest.raises(ProtocolError, match="'w'") as caught:
        codec.check_body(schema, Payload((Block(0, pb.DENSE, 2, 16),), body), xxhash.xxh3_64_intdigest(body))
    assert caught.value.code == pb.NOT_FINITE


def test_dense_zeros_of_either_sign_are_not_values() -> None:
    # fc.bias with k = 8: a -0.0 in the place that must be zero is still zero.
    body = changed_body(BIAS_AT + 16, bytes.fromhex("0080"))
    message = header()
    message.checksum = xxhash.xxh3_64_intdigest(body)
    assert receive(message, body)[2].tolist() == [1] * 8 + [0]


@pytest.mark.parametrize("bit", range(64))
def test_another_checksum_is_refused(bit: int) -> None:
    message = header()
    message.checksum ^= 1 << bit
    with pytest.raises(ProtocolError, match="body hashes to") as caught:
        receive(message, BODY)
    assert caught.value.code == pb.CHECKSUM


@unhurried
@given(at=st.integers(0, END - 1), flip=st.integers(1, 255))
def test_no_byte_of_a_body_can_change_unnoticed(at: int, flip: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        receive(header(), changed_body(at, bytes([BODY[at] ^ flip])))
    assert caught.value.code == pb.CHECKSUM


@pytest.mark.parametrize("body", [b"", BODY[:-1], BODY + b"\0", BODY[1:] + BODY[:1]])
def test_a_body_of_another_length_or_order_fails_its_checksum(body: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        receive(header(), body)
    assert caught.value.code == pb.CHECKSUM


# ---------------------------------------------------------------- everything at once


def outcome(message: pb.Transfer, body: bytes) -> dict[int, np.ndarray] | int:
    """What a receiver gets: arrays, or the code of the refusal. Any other exception is a failure."""
    try:
        return receive(message, body)
    except ProtocolError as refusal:
        return refusal.code


def within_bounds(decoded: dict[int, np.ndarray]) -> bool:
    numpy_dtypes = {"float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16, "int64": "<i8"}
    return all(
        values.shape == (prod(SCHEMA.tensors[i].shape),)
        and values.dtype == np.dtype(numpy_dtypes[SCHEMA.tensors[i].dtype])
        and bool(np.all(np.isfinite(values.astype(np.float64))))
        for i, values in decoded.items()
    )


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The serialized header with a few bytes overwritten, inserted or taken away."""
    data = bytearray(header().SerializeToString())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["overwrite", "insert", "delete"])):
            case "overwrite":
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data.insert(at, draw(st.integers(0, 255)))
            case _:
                del data[at]
    return bytes(data)


@settings(deadline=None, max_examples=300)
@given(data=mutated(), noise=st.binary(min_size=END, max_size=END), true_checksum=st.booleans())
def test_a_mutated_header_is_refused_or_decodes_within_bounds(
    data: bytes, noise: bytes, true_checksum: bool
) -> None:
    try:
        message = pb.Transfer.FromString(data)
    except DecodeError:
        return
    # Only a length that the layout check lets pass is ever filled.
    body = (BODY + noise * 20)[: min(message.length, 1000)]
    if true_checksum:
        message.checksum = xxhash.xxh3_64_intdigest(body)
    result = outcome(message, body)
    if isinstance(result, dict):
        assert len(body) == message.length
        assert within_bounds(result)
    else:
        assert result in (pb.MALFORMED, pb.SCHEMA_MISMATCH, pb.CHECKSUM, pb.NOT_FINITE)


@st.composite
def sincere_layouts(draw: st.DrawFn) -> tuple[Block, ...]:
    """Headers that pass the layout check: any tensors, any modes, any k."""
    blocks = []
    for index, (d, b) in enumerate([(20, 4), (20, 4), (9, 2), (2, 2), (1, 8)]):
        if draw(st.booleans()):
            k = draw(st.integers(0, d))
            mode, length = draw(
                st.sampled_from(
                    [(pb.DENSE, d * b), (pb.PAIRS, k * (b + 4)), (pb.BITMAP, k * b + (d + 7) // 8)]
                )
            )
            blocks.append(Block(index, mode, k, length))
    return tuple(blocks)


@settings(deadline=None, max_examples=300)
@given(blocks=sincere_layouts(), data=st.data())
def test_any_bytes_under_a_sincere_header_are_refused_or_decode_within_bounds(
    blocks: tuple[Block, ...], data: st.DataObject
) -> None:
    length = sum(block.length for block in blocks)
    body = data.draw(st.binary(min_size=length, max_size=length))
    tensors = [
        pb.TensorHeader(index=b.index, mode=b.mode, kept=b.kept, format=pb.RAW, length=b.length)
        for b in blocks
    ]
    message = pb.Transfer(
        schema_hash=SCHEMA.hash, tensors=tensors, length=length, checksum=xxhash.xxh3_64_intdigest(body)
    )
    assert codec.check_layout(SCHEMA, message) == blocks
    result = outcome(message, body)
    if isinstance(result, dict):
        assert within_bounds(result)
        for block in blocks:
            assert np.count_nonzero(result[block.index]) <= block.kept
    else:
        assert result in (pb.MALFORMED, pb.NOT_FINITE)
