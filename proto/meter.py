"""What the kernel counted on this process's own TCP connections: `getsockopt(TCP_INFO)`, no root needed.

gRPC's sockets are ordinary descriptors of the process; they are found through /proc/self/fd by their addresses.
The counters die with the connection, so they are read now and then, and a ledger row holds what was added since.

Two identities, which tests check against other meters: HTTP/2 or TLS bytes that crossed the socket are
`sent - retransmitted`; IP bytes are `sent + header * segments`, and 8 more for the SYN, whose options are longer.
The segments are the socket's and, on the side that was called, one more: its SYN-ACK went out before the socket was
there. What no counter tells of is missing: SACK options (2 to 3 % of a direction's bytes where 1 % of what comes
back is lost, nothing without loss), SYNs sent again, and what follows a connection's last reading.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import sys
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.ledger import CONNECTION, Direction, Row

Address = tuple[str, int]
"""IP address and port; IPv4 also where the socket is IPv6."""

SYN_EXTRA = 8
_TCP_HEADER, _TIMESTAMPS = 20, 12
# struct tcp_info of linux/tcp.h: offsets of the fields that are read, and the size that has them all.
_MSS, _NOTSENT, _BYTES_RECEIVED, _SEGS_OUT, _DATA_SEGS_OUT, _BYTES_SENT, _BYTES_RETRANS = (
    *(16, 144, 128, 136, 156, 200, 208),
)
_NEEDED = 216
_FIN_CAME = frozenset({6, 8, 9, 11})
"""States (TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING) in which bytes_received has the peer's FIN as one byte more."""
_TOP = 1 << 50
"""No counter of an honest peer gets here: 100 Gbit/s for a day."""
_HEADERS = frozenset({0, 52, 72})
"""IP, TCP and timestamps, for IPv4 and IPv6; 0 if not known."""


class UnobservableError(Exception):
    """A connection whose counters cannot be read; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One connection's counters since it began; see `pb.Counters`.

    `received` and `unsent` (bytes that still wait in the socket) are known on the reader's own side only.
    """

    sent: int
    retransmitted: int
    segments: int
    data_segments: int
    header: int
    mss: int
    received: int = 0
    unsent: int = 0

    @property
    def once(self) -> int:
        """Bytes that crossed the socket, each counted once."""
        return self.sent - self.retransmitted

    def to_proto(self) -> pb.Counters:
        return pb.Counters(**{name: getattr(self, name) for name in _SHARED})

    @staticmethod
    def from_proto(counters: pb.Counters) -> Reading:
        return Reading(*(getattr(counters, name) for name in _SHARED))

    def follows(self, before: Reading) -> bool:
        """True if a connection that stood at `before` can stand here later."""
        grown = all(getattr(before, n) <= getattr(self, n) < _TOP for n in _SHARED[:4])
        whole = self.retransmitted <= self.sent and self.data_segments <= self.segments
        return grown and whole and self.header in _HEADERS


_SHARED = tuple(field.name for field in fields(Reading))[:6]
NOTHING = Reading(0, 0, 0, 0, 0, 0)


class Meter:
    """Reads connections of this process by the address of their client: its `local` end or its `remote` one.

    Only one is asked for, as both ends may be in this process; the server's address belongs to many connections.
    """

    def __init__(self, client: Literal["local", "remote"]) -> None:
        self._local = client == "local"
        self._known: dict[Address, _Place] = {}

    def read(self, end: Address) -> Reading:
        """The counters of the connection of the client at `end`. Raises UnobservableError."""
        found = self._look(end)
        if found is None:
            self._scan()
            found = self._look(end)
        if found is None:
            raise UnobservableError("this process has no such TCP connection")
        return found

    def _look(self, end: Address) -> Reading | None:
        place = self._known.get(end)
        return None if place is None else _read(place, self._local)

    def _scan(self) -> None:
        folder = Path("/proc/self/fd")
        try:
            descriptors = [int(path.name) for path in folder.iterdir()]
        except OSError:
            raise UnobservableError("no /proc/self/fd: TCP_INFO is read on Linux only") from None
        places = [_place(descriptor, self._local) for descriptor in descriptors]
        self._known = {_address(*place.client[:2]): place for place in places if place is not None}


@dataclass(frozen=True, slots=True)
class _Place:
    """A TCP connection among this process's descriptors: its client's end as the kernel names it, and the bytes
    of headers its packets have, 0 on loopback."""

    descriptor: int
    family: int
    client: tuple[Any, ...]
    header: int


def _place(descriptor: int, local: bool) -> _Place | None:
    """None for any other descriptor."""
    try:
        handle = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if handle.type != socket.SOCK_STREAM or handle.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        ours, theirs = handle.getsockname(), handle.getpeername()
        family = handle.family
    except OSError:
        return None  # listening, or closed in this moment
    finally:
        handle.detach()
    peer = _ip(_address(*theirs[:2])[0])
    header = 0 if peer.is_loopback else (20 if peer.version == 4 else 40) + _TCP_HEADER + _TIMESTAMPS
    return _Place(descriptor, family, ours if local else theirs, header)


def _read(place: _Place, local: bool) -> Reading | None:
    """None if the descriptor is no longer this connection's. Raises UnobservableError."""
    try:
        # With all of its kind named, this asks the kernel for nothing.
        handle = socket.socket(place.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=place.descriptor)
    except OSError:
        return None
    try:
        end = handle.getsockname if local else handle.getpeername
        if end() != place.client:
            return None
        raw = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        # gRPC closes its sockets in threads of its own; by now the number may be another connection's.
        if end() != place.client:
            return None
    except AttributeError:
        raise UnobservableError("this system has no TCP_INFO") from None
    except OSError:
        return None
    finally:
        handle.detach()
    if len(raw) < _NEEDED:
        raise UnobservableError(
            f"this kernel's TCP_INFO has {len(raw)} bytes and no bytes_sent; Linux 4.19 does"
        )
    return Reading(
        sent=_u64(raw, _BYTES_SENT),
        retransmitted=_u64(raw, _BYTES_RETRANS),
        segments=_u32(raw, _SEGS_OUT),
        data_segments=_u32(raw, _DATA_SEGS_OUT),
        header=place.header if raw[5] & 1 else 0,  # with timestamps
        mss=_u32(raw, _MSS),
        received=_u64(raw, _BYTES_RECEIVED) - (raw[0] in _FIN_CAME),
        unsent=_u32(raw, _NOTSENT),
    )


def _u32(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 4], sys.byteorder)


def _u64(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], sys.byteorder)


def _address(host: str, port: int) -> Address:
    return _plain(host), port


@lru_cache(maxsize=4096)
def _plain(host: str) -> str:
    ip = _ip(host.partition("%")[0])
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return str(mapped or ip)


@lru_cache(maxsize=4096)
def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parsing an address takes longer than asking the kernel for its counters."""
    return ipaddress.ip_address(host)


def parse_peer(peer: str) -> Address | None:
    """The address in gRPC's name of a peer, e.g. ipv4:10.0.0.1:5000 or ipv6:%5B::1%5D:5000; None if not TCP."""
    found = re.fullmatch(r"ipv[46]:\[?([^\]]*)\]?:(\d+)", unquote(peer))
    try:
        return _address(found[1], int(found[2])) if found else None
    except ValueError:
        return None


def format_address(address: Address | None) -> str:
    """As `Welcome.address` has it."""
    return "" if address is None else f"{address[0]}:{address[1]}"


def read_address(text: str) -> Address | None:
    host, separator, port = text.rpartition(":")
    try:
        return _address(host, int(port)) if separator else None
    except ValueError:
        return None


# ---------------------------------------------------------------- rows


def sender_row(
    round: int, client: int, way: Direction, encrypted: bool, now: Reading, before: Reading = NOTHING
) -> Row:
    """What a connection's sender added between two readings, every layer from the sender's own counters."""
    row = Row(round, client, way, CONNECTION)
    first = before.segments == 0
    syn_ack = int(first and way == "down")
    setattr(row, "tls" if encrypted else "http2", now.once - before.once)
    row.tcp_payload = now.sent - before.sent
    row.tcp_retransmitted = now.retransmitted - before.retransmitted
    row.segments = now.segments - before.segments + syn_ack
    row.pure_acks = row.segments - (now.data_segments - before.data_segments)
    row.how = "TCP_INFO of the sender"
    if now.header:
        row.ip = row.tcp_payload + now.header * row.segments + SYN_EXTRA * first
    else:
        row.how += "; ip: absent, loopback or no TCP timestamps"
    return row


def receiver_row(
    round: int, client: int, way: Direction, encrypted: bool, now: Reading, before: Reading, why: str
) -> Row:
    """What arrived between two readings, where the sender's counters are not known."""
    row = Row(round, client, way, CONNECTION)
    setattr(row, "tls" if encrypted else "http2", now.received - before.received)
    row.how = f"TCP_INFO of the receiver; tcp, segments, ip: absent, {why}"
    return row


def unobserved_row(round: int, client: int, way: Direction, why: str) -> Row:
    """A connection of which nothing is known below gRPC."""
    return Row(round, client, way, CONNECTION, how=f"absent, {why}")
