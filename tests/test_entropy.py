"""Streams of packed bodies: their bytes by hand, and what a reader must refuse."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from reference import Bytes

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError


def written(data: bytes, *, repeats: bool = False) -> bytes:
    out = Writer()
    out.stream(np.frombuffer(data, np.uint8), repeats=repeats)
    assert out.nbytes == len(out.getvalue())
    return out.getvalue()


def refused(body: bytes, size: int) -> str:
    with pytest.raises(ProtocolError) as caught:
        Reader(body, "here").stream(size)
    assert caught.value.code == pb.MALFORMED
    assert caught.value.detail.startswith("here, byte ")
    return caught.value.detail


def test_a_short_stream_is_stored_after_twice_its_length() -> None:
    assert written(b"abc") == b"\x06abc"
    assert written(b"") == b"\x00"
    noise = np.random.default_rng(1).bytes(200)
    assert written(noise) == b"\x90\x03" + noise  # 400 = 3 * 128 + 16


def test_a_compressible_stream_is_a_frame_that_any_zstd_reads() -> None:
    data = bytes([1, 2, 1, 1, 1, 2, 1, 1] * 500)
    body = written(data)
    head = Bytes(body)
    length, method = divmod(head.varint(), 2)
    assert method == 1
    assert length == len(body) - head.at < 600  # two symbols, one bit each
    frame = body[head.at :]
    assert zstandard.get_frame_parameters(frame).content_size == 4000
    assert zstandard.ZstdDecompressor().decompress(frame) == data


@given(st.binary(max_size=300) | st.builds(bytes, st.lists(st.integers(0, 3), max_size=5000)), st.booleans())
def test_every_stream_comes_back_and_never_grows(data: bytes, repeats: bool) -> None:
    body = written(data, repeats=repeats)
    source = Reader(body, "here")
    assert source.stream(len(data)).tobytes() == data
    source.end()
    assert len(body) <= len(data) + 3
    assert bytes(Bytes(body).stream(len(data))) == data


@given(st.integers(0, 2**63 - 1))
def test_varints_are_those_of_protobuf(value: int) -> None:
    out = Writer()
    out.varint(value)
    assert Bytes(out.getvalue()).varint() == value
    assert len(out.getvalue()) == max(1, -(-value.bit_length() // 7))
    assert Reader(out.getvalue(), "").varint(value) == value


def test_a_varint_is_bounded() -> None:
    for body, limit, words in (
        (b"\x05", 4, "above 4"),
        (b"\xff" * 12, 2**70, "more than nine"),
        (b"\x80", 1000, "due"),
    ):
        with pytest.raises(ProtocolError, match=words):
            Reader(body, "here").varint(limit)


def test_a_stream_of_another_size_is_refused() -> None:
    assert "stored stream of 3 bytes where 4" in refused(b"\x06abc", 4)
    assert "above" in refused(b"\x0aabcde", 3)
    assert "are left" in refused(b"\x06ab", 3)


def test_a_frame_must_declare_the_size_and_keep_to_it() -> None:
    data = b"ab" * 5000

    def frame(content: bytes, **options: bool) -> bytes:
        packed = zstandard.ZstdCompressor(**options).compress(content)  # type: ignore[arg-type]
        out = Writer()
        out.varint(len(packed) << 1 | 1)
        return out.getvalue() + packed

    assert Reader(frame(data), "here").stream(len(data)).tobytes() == data
    assert "does not declare 9999 bytes" in refused(frame(data), 9999)
    assert "does not declare 10000 bytes" in refused(frame(data, write_content_size=False), 10000)
    body = bytearray(frame(data))
    for cut in range(3, len(body)):
        refused(bytes(body[:cut]), len(data))
    assert refused(b"\x15" + b"\x00" * 10, 100)  # no zstd at all
    packed = zstandard.ZstdCompressor().compress(data)
    assert refused(bytes([2 * (len(packed) + 1) + 1]) + packed + b"x", len(data))


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    out = Writer()
    out.varint(len(bomb) << 1 | 1)
    body = out.getvalue() + bomb
    tracemalloc.start()
    refused(body, 1 << 16)
    assert tracemalloc.get_traced_memory()[1] < 1 << 17
    tracemalloc.stop()


def test_what_is_left_over_is_refused() -> None:
    source = Reader(b"\x06abcd", "here")
    source.stream(3)
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        source.end()
