"""Byte streams in packed bodies: what is written is read, in few bytes, and a lie about a size costs nothing."""

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import varint
from refusals import refused, taken

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.errors import ProtocolError

unhurried = settings(deadline=None)

# A zstd frame by hand (RFC 8878): magic; descriptor 20 (single segment, one byte of content size); size 20; a block
# header of size << 3 | type << 1 | last, type 0 raw or 1 one repeated byte; the block.
MAGIC = bytes.fromhex("28b52ffd")
TWENTY = bytes(range(20))
SEVENS = MAGIC + bytes.fromhex("20 14 a3 00 00 07")
MIXED = MAGIC + bytes.fromhex("20 3c 40 00 00 0001020304050607 a3 01 00 ff")  # 0 to 7, then 52 times 255
RAW = MAGIC + bytes.fromhex("20 14 a1 00 00") + TWENTY  # longer than what it holds


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def streamed(data: bytes, *, repeats: bool = False) -> bytes:
    out = Writer()
    out.stream(array(data), repeats=repeats)
    assert out.nbytes == len(out.getvalue())
    return out.getvalue()


def read(body: bytes, size: int) -> bytes:
    source = Reader(body, "test")
    data = source.stream(size)
    source.end()
    return data.tobytes()


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("body", "content"),
    [
        ("00", b""),
        ("02 61", b"a"),
        # 20 bytes stored: 2 * 20 = 40 = 0x28.
        ("28" + TWENTY.hex(), TWENTY),
        # 64 bytes stored: 2 * 64 = 128 takes two bytes, 80 01.
        ("80 01" + "07" * 64, b"\x07" * 64),
        # 10 bytes of frame: 2 * 10 + 1 = 21 = 0x15; 21 bytes: 43 = 0x2b.
        ("15" + SEVENS.hex(), b"\x07" * 20),
        ("2b" + MIXED.hex(), bytes(range(8)) + b"\xff" * 52),
    ],
)
def test_streams_made_by_hand_are_read(body: str, content: bytes) -> None:
    assert read(bytes.fromhex(body), len(content)) == content


@pytest.mark.parametrize("level", [1, 19])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_frame_of_any_encoder_is_read(level: int, checksum: bool) -> None:
    content = b"abracadabra" * 500
    frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(content)
    assert read(varint(2 * len(frame) + 1) + frame, len(content)) == content


@pytest.mark.parametrize("repeats", [False, True])
def test_what_is_written_is_a_frame_that_any_decoder_reads(repeats: bool) -> None:
    content = np.random.default_rng(1).binomial(6, 0.5, 5000).astype(np.uint8).tobytes()
    body = streamed(content, repeats=repeats)
    frame = body[2:]
    assert body[:2] == varint(2 * len(frame) + 1)
    assert zstandard.get_frame_parameters(frame).content_size == 5000
    assert zstandard.ZstdDecompressor().decompress(frame) == content


@pytest.mark.parametrize("content", [b"", b"a", b"a" * 15, TWENTY, np.random.default_rng(1).bytes(100_000)])
def test_what_cannot_be_shortened_is_stored(content: bytes) -> None:
    assert streamed(content) == varint(2 * len(content)) + content


@unhurried
@given(
    alphabet=st.integers(1, 256),
    size=st.one_of(st.integers(0, 300), st.integers(30_000, 40_000)),
    seed=st.integers(0, 2**32 - 1),
    repeats=st.booleans(),
)
@example(alphabet=250, size=40_000, seed=1, repeats=False)
def test_streams_come_back_and_are_never_longer_than_stored(
    alphabet: int, size: int, seed: int, repeats: bool
) -> None:
    content = np.random.default_rng(seed).integers(0, alphabet, size).astype(np.uint8).tobytes()
    body = streamed(content, repeats=repeats)
    assert read(body, size) == content
    assert len(body) <= len(varint(2 * size)) + size


def test_symbols_come_close_to_their_entropy() -> None:
    # Binomial(6, 1/2) has 2.333 bits a symbol; Huffman's code for it 2.375 (1/64: 6 and 5, 6/64: 4 and 3 bits ...).
    symbols = np.random.default_rng(2).binomial(6, 0.5, 1 << 17).astype(np.uint8).tobytes()
    assert 2.30 / 8 < len(streamed(symbols)) / len(symbols) < 2.45 / 8


def test_repeated_strings_are_found_where_they_are_looked_for() -> None:
    noise = np.random.default_rng(3).integers(0, 128, 500).astype(np.uint8).tobytes()
    assert len(streamed(noise * 40, repeats=True)) < 2 * len(noise)


# ---------------------------------------------------------------- varints


@given(value=st.integers(0, 2**63 - 1))
@example(value=127)
@example(value=128)
@example(value=2**63 - 1)
def test_varints_are_groups_of_seven_bits(value: int) -> None:
    out = Writer()
    out.varint(value)
    assert out.getvalue() == varint(value)
    assert Reader(varint(value), "test").varint(value) == value


@pytest.mark.parametrize("value", [1, 127, 128, 300, 2**32, 2**63 - 1])
def test_a_number_above_its_limit_is_refused(value: int) -> None:
    refused(varint(value), lambda source: source.varint(value - 1), f"a number above {value - 1}")


def test_a_varint_has_nine_bytes_at_most() -> None:
    assert Reader(b"\x80" * 8 + b"\0", "test").varint(5) == 0
    refused(b"\x80" * 9 + b"\0", lambda source: source.varint(5), "more than nine bytes")
    refused(b"\x80" * 1000, lambda source: source.varint(5), "more than nine bytes")


# ---------------------------------------------------------------- hostile


@pytest.mark.parametrize(
    ("body", "size"), [(streamed(TWENTY), 20), (b"\x15" + SEVENS, 20), (b"\x2b" + MIXED, 60)]
)
def test_every_truncation_is_refused(body: bytes, size: int) -> None:
    for end in range(len(body)):
        refused(body[:end], lambda source: source.stream(size), "bytes are due")


def test_whatever_follows_is_too_much() -> None:
    source = Reader(streamed(TWENTY) + b"xy", "tensor 3")
    source.stream(20)
    with pytest.raises(ProtocolError, match="tensor 3, byte 21 of 23: 2 bytes too many") as caught:
        source.end()
    assert caught.value.code == pb.MALFORMED


FRAMES: dict[str, tuple[bytes, str]] = {
    "declares one byte less": (MAGIC + bytes.fromhex("20 13 9b 00 00 07"), "does not declare 20"),
    "declares one byte more": (MAGIC + bytes.fromhex("20 15 ab 00 00 07"), "does not declare 20"),
    # Descriptor 00: no content size, but a window (1 KiB).
    "declares nothing": (MAGIC + bytes.fromhex("00 00 a3 00 00 07"), "does not declare 20"),
    # Descriptor e0: eight bytes of content size, 2^40.
    "declares a terabyte": (MAGIC + bytes.fromhex("e0 0000000000010000 a3 00 00 07"), "does not declare 20"),
    "holds more than it declares": (MAGIC + bytes.fromhex("20 14 43 01 00 07"), "damaged"),
    "holds less than it declares": (MAGIC + bytes.fromhex("20 14 53 00 00 07"), "damaged"),
    # Descriptor c0: no single segment; window descriptor a8 asks for 2^31 bytes; eight bytes of content size.
    "asks for a large window": (
        MAGIC + bytes.fromhex("c0 a8 1400000000000000 a3 00 00 07"),
        "does not declare 20",
    ),
    # Block type 3 is reserved.
    "has a block of an unknown type": (MAGIC + bytes.fromhex("20 14 a7 00 00 07"), "damaged"),
    "has another magic": (b"\x29" + SEVENS[1:], "damaged"),
    "is followed by something": (SEVENS + b"x", "damaged"),
    "is followed by a frame": (SEVENS + SEVENS, "damaged"),
    "ends early": (SEVENS[:-1], "damaged"),
    "is empty": (b"", "damaged"),
    # A skippable frame gives its length, 20, in the same place, and holds no content.
    "is to be skipped": (bytes.fromhex("502a4d18 14000000") + TWENTY[:12], "damaged"),
    "needs a dictionary": (MAGIC + bytes.fromhex("21 05 14 a3 00 00 07"), "damaged"),
}


@pytest.mark.parametrize("case", FRAMES)
def test_a_frame_that_is_not_exactly_the_stream_is_refused(case: str) -> None:
    frame, text = FRAMES[case]
    refused(varint(2 * len(frame) + 1) + frame, lambda source: source.stream(20), text)


@pytest.mark.parametrize("stored", [19, 21])
def test_a_stored_stream_of_another_length_is_refused(stored: int) -> None:
    # 21 stored bytes need a head of 42, above the 2 * 20 + 1 that any stream of 20 bytes may have.
    text = "a number above 41" if stored > 20 else "a stored stream of 19 bytes where 20 are due"
    refused(varint(2 * stored) + bytes(stored), lambda source: source.stream(20), text)


def test_a_frame_longer_than_the_stream_is_not_even_looked_at() -> None:
    refused(varint(2 * 29 + 1) + RAW, lambda source: source.stream(20), "a number above 41")


def test_an_empty_stream_has_no_frame() -> None:
    assert zstandard.ZstdDecompressor().decompress(MAGIC + bytes.fromhex("20 00 01 00 00")) == b""
    refused(b"\x13" + MAGIC + bytes.fromhex("20 00 01 00 00"), lambda source: source.stream(0), "above 1")
    refused(b"\x01", lambda source: source.stream(0), "damaged")


def test_a_bomb_is_refused_before_anything_of_its_size_exists() -> None:
    # 64 MiB of zeros in 512 blocks of 128 KiB, honestly declared in four bytes (descriptor a0): 2 KiB of frame.
    size = 1 << 26
    block, last = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little"), ((1 << 17) << 3 | 3).to_bytes(3, "little")
    frame = MAGIC + b"\xa0" + size.to_bytes(4, "little") + (block + b"\0") * 511 + last + b"\0"
    assert len(zstandard.ZstdDecompressor().decompress(frame)) == size
    lying = frame[:5] + (4000).to_bytes(4, "little") + frame[9:]
    tracemalloc.start()
    try:
        for bomb in (frame, lying):
            with pytest.raises(ProtocolError):
                Reader(varint(2 * len(bomb) + 1) + bomb, "test").stream(4000)
        with pytest.raises(ProtocolError):
            Reader(varint(2 * 1000) + bytes(1000), "test").stream(
                1 << 50
            )  # a stored stream, and not all here
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16


@settings(deadline=None, max_examples=300)
@given(body=st.binary(max_size=60), size=st.integers(0, 60))
def test_any_bytes_are_refused_or_give_the_size_that_is_due(body: bytes, size: int) -> None:
    data = taken(body, lambda source: source.stream(size))
    assert data is None or data.size == size


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_damaged_frame_is_refused_or_gives_the_size_that_is_due(at: int, flip: int) -> None:
    content = np.random.default_rng(4).binomial(6, 0.5, 3000).astype(np.uint8).tobytes()
    body = bytearray(streamed(content))
    body[at % len(body)] ^= flip
    data = taken(bytes(body), lambda source: source.stream(3000))
    assert data is None or data.size == 3000
