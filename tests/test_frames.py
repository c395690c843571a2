"""Whole messages to frames and back: protobuf's own bytes, exact sizes, and nothing a peer can break."""

import tracemalloc
from typing import Any

import pytest
import xxhash
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import frames
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Receiver, Side, Sizes
from fedreuse.proto.schema import MAX_TENSORS, Schema, TensorSpec

MIB = 1 << 20
ENVELOPE: dict[str, Any] = {"client": pb.ClientMessage, "server": pb.ServerMessage}
BIG: dict[str, tuple[str, Any]] = {
    "client": ("update", pb.SparseUpdate),
    "server": ("model", pb.ModelBroadcast),
}

unhurried = settings(deadline=None)
both_sides = pytest.mark.parametrize("side", ["client", "server"])
body_sizes = pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 3 * MIB + MIB // 2])


def schema_of(size: int) -> Schema:
    """One tensor of `size` bytes, so that a body may have any length."""
    return Schema((TensorSpec("w", "uint8", (size,), pb.INTEGER_BUFFER),))


def some_bytes(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


def big_message(side: Side, body: bytes, round: int = 3) -> Any:
    tensor = pb.TensorHeader(index=0, mode=pb.DENSE, kept=len(body), format=pb.RAW, length=len(body))
    transfer = pb.Transfer(
        schema_hash=schema_of(len(body)).hash,
        tensors=[tensor],
        length=len(body),
        checksum=xxhash.xxh3_64_intdigest(body),
    )
    return BIG[side][1](round=round, transfer=transfer)


def header_frame(side: Side, body: bytes) -> bytes:
    frame: bytes = ENVELOPE[side](**{BIG[side][0]: big_message(side, body)}, received=7).SerializeToString()
    return frame


def chunk(side: Side, offset: int, data: bytes) -> bytes:
    """A chunk envelope as protobuf writes it."""
    frame: bytes = ENVELOPE[side](chunk=pb.Chunk(offset=offset, data=data)).SerializeToString()
    return frame


def heartbeat(side: Side) -> bytes:
    frame: bytes = ENVELOPE[side](heartbeat=pb.Heartbeat(), received=7).SerializeToString()
    return frame


def feed_all(receiver: Receiver, sequence: list[bytes]) -> list[Incoming]:
    return [whole for frame in sequence if (whole := receiver.feed(frame)) is not None]


def refuses(receiver: Receiver, frame: bytes, text: str | None = None) -> pb.Code:
    with pytest.raises(ProtocolError, match=text) as caught:
        receiver.feed(frame)
    return caught.value.code


# ---------------------------------------------------------------- writing


@both_sides
@body_sizes
def test_chunks_are_the_bytes_protobuf_would_write(side: Side, size: int) -> None:
    body = some_bytes(size)
    expected = [chunk(side, at, body[at : at + MIB]) for at in range(0, size, MIB)]
    assert len(expected) == -(-size // MIB)
    assert frames.chunk_frames(side, body) == expected
    assert frames.chunk_frames(side, memoryview(bytearray(body))) == expected


@both_sides
@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**20, 2**31, 2**35 - 1, 2**63])
@pytest.mark.parametrize("size", [1, 120, 121, 122, 127, 128, 16_383, 16_384])
def test_chunk_envelopes_at_every_varint_width(side: Side, offset: int, size: int) -> None:
    data = some_bytes(size)
    assert frames._chunk_frame(side, offset, memoryview(data)) == chunk(side, offset, data)


@both_sides
def test_an_empty_body_has_no_chunks(side: Side) -> None:
    assert frames.chunk_frames(side, b"") == []


@both_sides
@body_sizes
def test_sizes_are_the_serialized_bytes_and_five_per_frame(side: Side, size: int) -> None:
    body = some_bytes(size)
    kind, _ = BIG[side]
    message = big_message(side, body)
    sent = frames.outgoing(
        side, kind, message, received=7, chunks=frames.chunk_frames(side, body), body=len(body)
    )
    written = [
        header_frame(side, body),
        *(chunk(side, at, body[at : at + MIB]) for at in range(0, size, MIB)),
    ]
    assert sent.kind == kind
    assert list(sent.frames) == written
    message_bytes = sum(len(frame) for frame in written)
    assert sent.sizes == Sizes(size, message_bytes, message_bytes + 5 * len(written))


def test_a_small_message_by_hand() -> None:
    # ClientMessage: field 2 (tag 12), length 7: round 3 (08 03), score 1.0 (15, 3f800000 little-endian);
    # field 15, fixed32 (tag 7d): 2. In all 2 + 7 + 5 = 14 bytes, with gRPC's prefix 19.
    sent = frames.outgoing("client", "score_reply", pb.ScoreReply(round=3, score=1.0), received=2)
    assert sent.frames == (bytes.fromhex("1207 0803 150000803f 7d02000000"),)
    assert sent.sizes == Sizes(0, 14, 19)


def test_the_count_of_received_messages_is_written_even_if_zero() -> None:
    sent = frames.outgoing("server", "heartbeat", pb.Heartbeat())
    assert sent.frames == (bytes.fromhex("4200 7d00000000"),)


def test_the_largest_header_fits_into_one_frame() -> None:
    largest = pb.TensorHeader(
        index=MAX_TENSORS - 1, mode=pb.BITMAP, kept=1 << 40, format=pb.RAW, length=(1 << 43) + (1 << 37)
    )
    assert MAX_TENSORS * (2 + largest.ByteSize()) + 1024 < frames.MAX_FRAME_BYTES


# ---------------------------------------------------------------- reading


@both_sides
@body_sizes
def test_frame_by_frame_the_message_comes_back(side: Side, size: int) -> None:
    body = some_bytes(size)
    kind, _ = BIG[side]
    message = big_message(side, body)
    sent = frames.outgoing(
        side, kind, message, received=7, chunks=frames.chunk_frames(side, body), body=len(body)
    )
    receiver = Receiver(side, schema_of(size))
    for frame in sent.frames[:-1]:
        assert receiver.feed(frame) is None
        assert receiver.received == 0
    whole = receiver.feed(sent.frames[-1])
    assert whole is not None
    assert (whole.kind, whole.message, whole.received, whole.refusal) == (kind, message, 7, None)
    assert whole.payload is not None
    assert bytes(whole.payload.body) == body
    assert whole.sizes == sent.sizes
    assert receiver.received == 1


@both_sides
def test_a_message_without_a_body_is_whole_at_once(side: Side) -> None:
    kind, message_type = BIG[side]
    schema = schema_of(5)
    message = message_type(round=1, transfer=pb.Transfer(schema_hash=schema.hash))
    frame = ENVELOPE[side](**{kind: message}).SerializeToString()
    receiver = Receiver(side, schema)
    whole = receiver.feed(frame)
    assert whole is not None
    assert whole.payload is not None
    assert (whole.payload.blocks, bytes(whole.payload.body)) == ((), b"")
    assert whole.sizes == Sizes(0, len(frame), len(frame) + 5)
    assert receiver.feed(heartbeat(side)) is not None


def test_a_sender_that_says_nothing_of_what_it_received_is_not_one_that_received_nothing() -> None:
    receiver = Receiver("client", None)
    silent = receiver.feed(pb.ClientMessage(heartbeat=pb.Heartbeat()).SerializeToString())
    none = receiver.feed(pb.ClientMessage(heartbeat=pb.Heartbeat(), received=0).SerializeToString())
    assert silent is not None
    assert silent.received is None
    assert none is not None
    assert none.received == 0


@both_sides
def test_received_counts_whole_messages(side: Side) -> None:
    body = some_bytes(2 * MIB)
    receiver = Receiver(side, schema_of(len(body)))
    counts = []
    for frame in [
        heartbeat(side),
        header_frame(side, body),
        *frames.chunk_frames(side, body),
        heartbeat(side),
    ]:
        receiver.feed(frame)
        counts.append(receiver.received)
    assert counts == [1, 1, 1, 2, 3]


@both_sides
def test_heartbeats_between_chunks_do_not_disturb(side: Side) -> None:
    body = some_bytes(2 * MIB + 1)
    first, second, third = frames.chunk_frames(side, body)
    beat = heartbeat(side)
    receiver = Receiver(side, schema_of(len(body)))
    wholes = feed_all(
        receiver, [header_frame(side, body), beat, first, beat, beat, second, beat, third, beat]
    )
    assert [w.kind for w in wholes] == ["heartbeat"] * 4 + [BIG[side][0], "heartbeat"]
    assert wholes[4].payload is not None
    assert bytes(wholes[4].payload.body) == body
    # The heartbeats' bytes are their own, not the update's.
    assert wholes[4].sizes.message == sum(map(len, (header_frame(side, body), first, second, third)))
    assert wholes[4].sizes.grpc == wholes[4].sizes.message + 4 * 5


@both_sides
def test_chunks_may_be_of_any_size_up_to_the_limit(side: Side) -> None:
    body = some_bytes(10)
    receiver = Receiver(side, schema_of(10))
    (whole,) = feed_all(
        receiver,
        [
            header_frame(side, body),
            chunk(side, 0, body[:1]),
            chunk(side, 1, body[1:9]),
            chunk(side, 9, body[9:]),
        ],
    )
    assert whole.payload is not None
    assert bytes(whole.payload.body) == body


# ---------------------------------------------------------------- other encodings of the same thing


def varint(value: int) -> bytes:
    out = []
    while value > 127:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number * 8 + 2) + varint(len(content)) + content


UNKNOWN = [varint(1000 * 8) + b"\x05", field(2000, b"from the future"), varint(3000 * 8 + 1) + bytes(8)]


def same_chunk(side: Side, data: bytes) -> dict[str, bytes]:
    """The first chunk of a body in encodings that no encoder of ours writes."""
    number = {"client": 4, "server": 3}[side]
    content = field(2, data)
    return {
        "offset written out": field(number, b"\x08\x00" + content),
        "offset in a long varint": field(number, b"\x08\x80\x80\x00" + content),
        "data before offset": field(number, content + b"\x08\x00"),
        "data twice, the last one counts": field(number, field(2, b"\xff" * 3) + content),
        "offset twice, the last one counts": field(number, b"\x08\x09\x08\x00" + content),
        "in two halves that merge": field(number, b"\x08\x00") + field(number, content),
        "length in a long varint": varint(number * 8 + 2) + bytes([len(content) + 128, 0]) + content,
        "with the count of received messages": field(number, content) + bytes.fromhex("7d07000000"),
        "with an unknown field outside": field(number, content) + UNKNOWN[0],
        "with an unknown field inside": field(number, content + UNKNOWN[1]),
        "with an unknown field in front": UNKNOWN[2] + field(number, content),
    }


@both_sides
@pytest.mark.parametrize("encoding", same_chunk("client", b""))
def test_every_encoding_protobuf_allows_is_accepted(side: Side, encoding: str) -> None:
    body = some_bytes(12)
    frame = same_chunk(side, body[:10])[encoding]
    receiver = Receiver(side, schema_of(12))
    assert feed_all(receiver, [header_frame(side, body), frame]) == []
    whole = receiver.feed(chunk(side, 10, body[10:]))
    assert whole is not None
    assert whole.payload is not None
    assert bytes(whole.payload.body) == body
    assert whole.sizes.message == len(header_frame(side, body)) + len(frame) + len(chunk(side, 10, body[10:]))


@both_sides
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_fields_are_ignored_and_counted(side: Side, unknown: bytes) -> None:
    body = some_bytes(5)
    receiver = Receiver(side, schema_of(5))
    beat = receiver.feed(heartbeat(side) + unknown)
    assert beat is not None
    assert (beat.kind, beat.received) == ("heartbeat", 7)
    assert beat.sizes.message == len(heartbeat(side)) + len(unknown)
    (whole,) = feed_all(receiver, [header_frame(side, body) + unknown, chunk(side, 0, body)])
    assert whole.payload is not None
    assert bytes(whole.payload.body) == body


# ---------------------------------------------------------------- what breaks a stream


@pytest.fixture
def midway() -> Receiver:
    """A client's update of ten bytes of which four have arrived."""
    receiver = Receiver("client", schema_of(10))
    assert feed_all(receiver, [header_frame("client", some_bytes(10)), chunk("client", 0, b"\0\1\2\3")]) == []
    return receiver


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (0, b"\0\1\2\3"),  # again
        (3, b"\3"),  # overlap
        (5, b"\5"),  # gap
        (4, b"\4\5\6\7\x08\x09\x0a"),  # one too many
        (10, b"\x0a"),  # behind the end
        (2**64 - 1, b"\4"),
        (2**63, b"\4"),
    ],
)
def test_a_chunk_out_of_place_breaks_the_stream(midway: Receiver, offset: int, data: bytes) -> None:
    code = refuses(midway, chunk("client", offset, data), "of the update body; 4 of 10 bytes are here")
    assert code == pb.MALFORMED


def test_a_chunk_of_more_than_one_mebibyte_is_too_large() -> None:
    body = some_bytes(2 * MIB)
    for frame in (chunk("client", 0, body[: MIB + 1]), chunk("client", 0, body[: MIB + 1]) + UNKNOWN[0]):
        receiver = Receiver("client", schema_of(len(body)))
        receiver.feed(header_frame("client", body))
        assert refuses(receiver, frame, "1048577 bytes") == pb.TOO_LARGE


@pytest.mark.parametrize(
    "frame", [chunk("client", 4, b""), bytes.fromhex("2200"), bytes.fromhex("2204 0804 1200")]
)
def test_an_empty_chunk_is_malformed(midway: Receiver, frame: bytes) -> None:
    # Else a peer could keep a transfer open for ever without sending a byte of it.
    assert refuses(midway, frame, "chunk of 0 bytes") == pb.MALFORMED


@both_sides
def test_a_chunk_needs_a_header(side: Side) -> None:
    assert refuses(Receiver(side, schema_of(1)), chunk(side, 0, b"\0"), "without a header") == pb.MALFORMED
    # Also after a body is complete.
    receiver = Receiver(side, schema_of(1))
    assert len(feed_all(receiver, [header_frame(side, b"\0"), chunk(side, 0, b"\0")])) == 1
    assert refuses(receiver, chunk(side, 1, b"\0"), "without a header") == pb.MALFORMED


def test_a_header_inside_a_body_is_malformed(midway: Receiver) -> None:
    code = refuses(midway, header_frame("client", some_bytes(10)), "update header inside the body of update")
    assert code == pb.MALFORMED


def test_a_header_before_the_schema_is_known() -> None:
    assert refuses(Receiver("client", None), header_frame("client", b"\0"), "update") == pb.NOT_JOINED


def test_a_header_that_contradicts_the_schema_never_reaches_admission() -> None:
    def admit(kind: str, header: Any) -> None:
        pytest.fail(f"{kind} {header} admitted")

    assert (
        refuses(Receiver("client", schema_of(2), admit), header_frame("client", b"\0")) == pb.SCHEMA_MISMATCH
    )
    # A header without its transfer speaks of schema 0.
    bare = pb.ClientMessage(update=pb.SparseUpdate(round=1)).SerializeToString()
    assert refuses(Receiver("client", schema_of(1), admit), bare) == pb.SCHEMA_MISMATCH


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        pb.ClientMessage(received=3).SerializeToString(),
        UNKNOWN[1],
        field(1006, b""),
    ],
)
def test_an_envelope_without_a_known_body_is_malformed(frame: bytes) -> None:
    assert refuses(Receiver("client", None), frame, "without a body this version knows") == pb.MALFORMED


@both_sides
@pytest.mark.parametrize(
    "frame",
    [
        b"\xff",
        b"\x00",
        b"\x0a",
        b"\x0a\x05abc",  # shorter than it says
        b"\x0b",  # a group that never ends
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 1000,
        # The software's name in Join is not UTF-8, the run's name in Welcome neither.
        field(1, field(11, b"\xff\xfe") + field(2, b"\xff\xfe")),
    ],
)
def test_garbage_is_malformed(side: Side, frame: bytes) -> None:
    assert refuses(Receiver(side, schema_of(1)), frame) == pb.MALFORMED


@both_sides
@pytest.mark.parametrize("count", [1, 5, 9, 10, 11, MIB])
@pytest.mark.parametrize("where", ["chunk", "offset", "data"])
@pytest.mark.parametrize("byte", [b"\x80", b"\xff"])
@pytest.mark.timeout(30)  # a reader without an end to its varints takes minutes for the longest
def test_endless_varints_are_refused(side: Side, count: int, where: str, byte: bytes) -> None:
    endless = byte * count
    tag = varint({"client": 4, "server": 3}[side] * 8 + 2)
    frame = {
        "chunk": tag + endless,
        "offset": tag + varint(1 + count) + b"\x08" + endless,
        "data": tag + varint(1 + count) + b"\x12" + endless,
    }[where]
    receiver = Receiver(side, schema_of(10))
    receiver.feed(header_frame(side, some_bytes(10)))
    assert refuses(receiver, frame) == pb.MALFORMED


@both_sides
@pytest.mark.parametrize("length", [2**31, 2**32 + 3, 2**63, 2**64 - 1])
def test_lengths_beyond_the_frame_are_refused(side: Side, length: int) -> None:
    tag = varint({"client": 4, "server": 3}[side] * 8 + 2)
    inner = b"\x12" + varint(length) + b"abc"
    for frame in (tag + varint(length) + b"\x12\x03abc", tag + varint(len(inner)) + inner):
        receiver = Receiver(side, schema_of(10))
        receiver.feed(header_frame(side, some_bytes(10)))
        assert refuses(receiver, frame) == pb.MALFORMED


# ---------------------------------------------------------------- refused bodies


def turn_away(kind: str, header: Any) -> None:
    raise ProtocolError(pb.WRONG_ROUND, f"{kind} of round {header.round}")


@both_sides
def test_a_refused_body_is_counted_thrown_away_and_the_stream_goes_on(side: Side) -> None:
    body = some_bytes(MIB + 1)
    sequence = [header_frame(side, body), *frames.chunk_frames(side, body)]
    receiver = Receiver(side, schema_of(len(body)), turn_away)
    assert feed_all(receiver, sequence[:-1]) == []
    whole = receiver.feed(sequence[-1])
    assert whole is not None
    assert whole.payload is None
    assert whole.refusal is not None
    assert str(whole.refusal) == f"WRONG_ROUND: {BIG[side][0]} of round 3"
    message_bytes = sum(map(len, sequence))
    assert whole.sizes == Sizes(MIB + 1, message_bytes, message_bytes + 3 * 5)
    assert receiver.received == 1
    after = receiver.feed(heartbeat(side))
    assert after is not None
    assert (after.kind, after.refusal) == ("heartbeat", None)


def test_a_refused_body_must_still_be_in_order() -> None:
    receiver = Receiver("client", schema_of(10), turn_away)
    receiver.feed(header_frame("client", some_bytes(10)))
    assert refuses(receiver, chunk("client", 1, b"\1")) == pb.MALFORMED


def test_admission_sees_each_header_once_and_only_the_refused_one_is_discarded() -> None:
    seen: list[tuple[str, int]] = []

    def admit(kind: str, header: Any) -> None:
        seen.append((kind, header.round))
        if len(seen) == 2:
            raise ProtocolError(pb.DUPLICATE, "twice")

    receiver = Receiver("client", schema_of(3), admit)
    wholes = feed_all(receiver, [header_frame("client", b"abc"), chunk("client", 0, b"abc")] * 3)
    assert seen == [("update", 3)] * 3
    assert [whole.payload is None for whole in wholes] == [False, True, False]
    assert [whole.refusal.code if whole.refusal else None for whole in wholes] == [None, pb.DUPLICATE, None]


def peak_of(receiver: Receiver, sequence: list[bytes]) -> int:
    tracemalloc.start()
    try:
        feed_all(receiver, sequence)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_refused_body_takes_no_memory() -> None:
    body = some_bytes(3 * MIB + MIB // 2)
    sequence = [header_frame("client", body), *frames.chunk_frames("client", body)]
    assert peak_of(Receiver("client", schema_of(len(body)), turn_away), sequence) < MIB // 8
    # The same body, admitted, is held once, with one chunk on its way into it.
    assert (
        len(body) <= peak_of(Receiver("client", schema_of(len(body))), sequence) < len(body) + MIB + MIB // 8
    )


def test_a_refused_body_may_be_larger_than_any_memory() -> None:
    size = 1 << 40
    schema = schema_of(size)
    tensor = pb.TensorHeader(index=0, mode=pb.DENSE, kept=size, format=pb.RAW, length=size)
    transfer = pb.Transfer(schema_hash=schema.hash, tensors=[tensor], length=size)
    header = pb.ClientMessage(update=pb.SparseUpdate(transfer=transfer)).SerializeToString()
    assert peak_of(Receiver("client", schema, turn_away), [header, chunk("client", 0, b"abc")]) < MIB // 8


# ---------------------------------------------------------------- fuzz


@unhurried
@given(frame=st.binary(max_size=200), side=st.sampled_from(["client", "server"]), started=st.booleans())
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes, side: Side, started: bool) -> None:
    receiver = Receiver(side, schema_of(10))
    if started:
        receiver.feed(header_frame(side, some_bytes(10)))
    try:
        whole = receiver.feed(frame)
    except ProtocolError:
        return
    assert whole is None or whole.kind in ENVELOPE[side].DESCRIPTOR.fields_by_name


@st.composite
def mutated_chunks(draw: st.DrawFn) -> bytes:
    data = bytearray(
        chunk("client", draw(st.sampled_from([0, 1, 300])), draw(st.binary(min_size=1, max_size=12)))
    )
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, min(8, len(data) - 1)))
        if draw(st.booleans()):
            data[at] = draw(st.integers(0, 255))
        else:
            data.insert(at, draw(st.integers(0, 255)))
    return bytes(data)


@settings(deadline=None, max_examples=300)
@given(frame=mutated_chunks())
def test_the_fast_reader_agrees_with_protobuf_on_damaged_chunks(frame: bytes) -> None:
    receiver = Receiver("client", schema_of(10))
    receiver.feed(header_frame("client", some_bytes(10)))
    try:
        envelope = pb.ClientMessage.FromString(frame)
    except DecodeError:
        assert refuses(receiver, frame) == pb.MALFORMED
        return
    if envelope.WhichOneof("body") != "chunk":
        return
    data = envelope.chunk.data
    if envelope.chunk.offset != 0 or not 1 <= len(data) <= 10:
        assert refuses(receiver, frame) == pb.MALFORMED
        return
    whole = receiver.feed(frame)
    if len(data) < 10:
        assert whole is None
        whole = receiver.feed(chunk("client", len(data), bytes(10 - len(data))))
    assert whole is not None
    assert whole.payload is not None
    assert bytes(whole.payload.body) == data + bytes(10 - len(data))
