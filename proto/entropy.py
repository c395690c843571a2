"""Byte streams inside packed bodies: stored as they are or as a zstd frame (RFC 8878), whichever is shorter.

A stream of n bytes is a varint `2 * length + method` (0 stored, 1 zstd), then `length` bytes. The reader always
knows n beforehand, and a frame must declare it, so nothing is decompressed beyond the size it must have.

Most streams here are symbols without repeated strings, for which zstd's Huffman codes are all that helps. The
writer asks for just those by settings under which zstd hardly finds a match; any zstd decoder reads the result.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError

Bytes = NDArray[np.uint8]

STORED, ZSTD = 0, 1
_HOPELESS = 7.96
"""Bits a byte: a stream of this entropy gains less than a code costs."""
_SHORTEST = 16
"""Bytes below which a frame's header costs more than any code gains."""
_SAMPLE = 1 << 12


class Writer:
    """Collects the parts of a body."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self.nbytes = 0

    def raw(self, data: bytes | Bytes) -> None:
        part = data if isinstance(data, bytes) else np.ascontiguousarray(data).data
        self._parts.append(part)
        self.nbytes += len(data)

    def varint(self, value: int) -> None:
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self.raw(bytes(out))

    def stream(self, data: Bytes, *, repeats: bool = False) -> None:
        """The shortest form of `data`; matches are looked for where strings may occur again (`repeats`)."""
        packed = _compressed(data, repeats)
        if packed is not None and len(packed) < data.size:
            self.varint(len(packed) << 1 | ZSTD)
            self.raw(packed)
        else:
            self.varint(data.size << 1 | STORED)
            self.raw(data)

    def extend(self, other: Writer) -> None:
        self._parts += other._parts
        self.nbytes += other.nbytes

    def getvalue(self) -> bytes:
        return b"".join(self._parts)


class _Compressors(threading.local):
    """zstd's contexts are costly to make and belong to one thread each."""

    def __init__(self) -> None:
        symbols = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            min_match=7,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
        )
        self.symbols = zstandard.ZstdCompressor(compression_params=symbols)
        self.strings = zstandard.ZstdCompressor(level=3, write_content_size=True, write_checksum=False)
        self.back = zstandard.ZstdDecompressor()


_zstd = _Compressors()


def _compressed(data: Bytes, repeats: bool) -> bytes | None:
    """A zstd frame; None where it could not be shorter."""
    if data.size < _SHORTEST or (data.size > 8 * _SAMPLE and _entropy(data) > _HOPELESS):
        return None
    return (_zstd.strings if repeats else _zstd.symbols).compress(data.data)


def _entropy(data: Bytes) -> float:
    """Bits a byte of an evenly spread sample; only used to leave out what cannot succeed."""
    sample = data[:: data.size // _SAMPLE]
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / sample.size
    plain = -float((shares * np.log2(shares)).sum())
    # A small sample looks less random than it is; the correction is Miller's (1955).
    return plain + (len(shares) - 1) / (2 * sample.size * math.log(2))


class Reader:
    """Takes a body apart; every read is checked against what is left. Raises ProtocolError MALFORMED."""

    def __init__(self, body: bytes | bytearray | memoryview, where: str) -> None:
        self._view = memoryview(body).cast("B")
        self._at = 0
        self.where = where
        """What is being read, for error messages."""

    @property
    def position(self) -> int:
        return self._at

    def fail(self, what: str) -> ProtocolError:
        return ProtocolError(pb.MALFORMED, f"{self.where}, byte {self._at} of {len(self._view)}: {what}")

    def raw(self, count: int) -> Bytes:
        if count > len(self._view) - self._at:
            raise self.fail(f"{count} bytes are due, {len(self._view) - self._at} are left")
        start, self._at = self._at, self._at + count
        return np.frombuffer(self._view[start : self._at], np.uint8)

    def byte(self) -> int:
        return int(self.raw(1)[0])

    def varint(self, limit: int) -> int:
        """An unsigned number of at most `limit`."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if value > limit:
                raise self.fail(f"a number above {limit}")
            if byte < 0x80:
                return value
            shift += 7
            if shift == 63:
                raise self.fail("a varint of more than nine bytes")

    def stream(self, size: int) -> Bytes:
        """A stream that must come to `size` bytes; no longer stream than that is accepted."""
        head = self.varint(size << 1 | 1)
        length = head >> 1
        data = self.raw(length)
        if head & 1 == ZSTD:
            return self._unzstd(data, size)
        if length != size:
            raise self.fail(f"a stored stream of {length} bytes where {size} are due")
        return data

    def _unzstd(self, data: Bytes, size: int) -> Bytes:
        try:
            parameters = zstandard.get_frame_parameters(data[:32].tobytes())
            if parameters.content_size != size or parameters.window_size > max(size, 1 << 17):
                raise self.fail(f"a zstd frame that does not declare {size} bytes")
            out = _zstd.back.decompress(
                data.data, max_output_size=size, read_across_frames=False, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise self.fail(f"a damaged zstd frame ({error})") from None
        if len(out) != size:
            raise self.fail(f"a zstd frame of {len(out)} bytes where {size} are due")
        return np.frombuffer(out, np.uint8)

    def end(self) -> None:
        """Demand that everything was read."""
        if self._at != len(self._view):
            raise self.fail(f"{len(self._view) - self._at} bytes too many")
