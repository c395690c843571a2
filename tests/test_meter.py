"""Counters of connections: how rows are made of them, when there are none, and clients that make them up."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import ctypes
import os
import socket
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from counting_proxy import CountingProxy
from test_agent import Rows, Stub
from wire import RawClient, serving

from fedreuse.client.agent import Agent
from fedreuse.client.metering import ConnectionMeter as ClientMeter
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import meter as meters
from fedreuse.proto import transport
from fedreuse.proto.frames import outgoing
from fedreuse.proto.ledger import Row
from fedreuse.proto.meter import (
    Meter,
    Reading,
    UnobservableError,
    format_address,
    parse_peer,
    read_address,
    receiver_row,
    sender_row,
)
from fedreuse.server import service, sessions
from fedreuse.server.metering import ConnectionMeter as ServerMeter

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch):
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 0.5)


# ---------------------------------------------------------------- rows


def test_a_row_holds_what_the_sender_added_since_the_last_reading():
    """Figures of a transfer that lost two segments of 1448 bytes; IPv4 with timestamps."""
    before = Reading(sent=2_000, retransmitted=0, segments=7, data_segments=3, header=52, mss=1448)
    now = Reading(sent=16_480, retransmitted=2_896, segments=21, data_segments=13, header=52, mss=1448)
    row = sender_row(4, 7, "up", False, now, before)
    assert (row.round, row.client, row.direction, row.kind) == (4, 7, "up", "connection")
    assert (row.http2, row.tls) == (11_584, None)  # 16480 - 2896 - 2000
    assert (row.tcp_payload, row.tcp_retransmitted) == (14_480, 2_896)
    assert (row.segments, row.pure_acks) == (14, 4)  # 21 - 7; (21 - 13) - (7 - 3)
    assert row.ip == 14_480 + 14 * 52
    assert (row.modelled, row.payload, row.message, row.grpc) == (None,) * 4
    assert row.how == "TCP_INFO of the sender"


def test_a_first_row_has_the_longer_header_of_the_syn_and_tls_its_own_column():
    """20 + 20 + 12 bytes a segment over IPv4, 40 + 20 + 12 over IPv6; 8 more in the SYN.

    The socket that answers does not count its SYN-ACK, the sixth.
    """
    for header in (52, 72):
        row = sender_row(0, 0, "down", True, Reading(300, 0, 5, 2, header, 1448))
        assert (row.segments, row.ip) == (6, 300 + 6 * header + 8)
        assert (row.tls, row.http2) == (300, None)


def test_without_a_header_length_there_are_no_ip_bytes_and_the_row_says_why():
    row = sender_row(0, 0, "up", False, Reading(300, 0, 5, 2, 0, 65_483))
    assert (row.ip, row.tcp_payload) == (None, 300)
    assert row.how.endswith("ip: absent, loopback or no TCP timestamps")


def test_a_receiver_knows_what_arrived_and_nothing_else():
    before = Reading(0, 0, 3, 1, 52, 1448, received=100)
    row = receiver_row(1, 2, "up", False, Reading(9, 0, 4, 2, 52, 1448, received=350), before, "no reports")
    assert row.http2 == 250
    assert (row.tls, row.tcp_payload, row.tcp_retransmitted, row.segments, row.pure_acks, row.ip) == (
        None,
    ) * 6
    assert row.how.endswith("absent, no reports")


def test_what_only_the_reader_knows_does_not_travel():
    there = Reading(1, 2, 3, 4, 52, 6, received=7, unsent=8)
    assert Reading.from_proto(pb.Counters.FromString(there.to_proto().SerializeToString())) == Reading(
        1, 2, 3, 4, 52, 6
    )


# ---------------------------------------------------------------- addresses

PEERS = {
    "ipv4:10.0.0.1:5000": ("10.0.0.1", 5000),
    "ipv6:%5B::1%5D:5000": ("::1", 5000),
    "ipv6:[2001:db8::7]:443": ("2001:db8::7", 443),
    "ipv6:%5B2001:0db8:0:0:0:0:0:7%5D:443": ("2001:db8::7", 443),
    "ipv6:%5B::ffff:10.0.0.1%5D:5000": ("10.0.0.1", 5000),
    "ipv6:%5Bfe80::1%25eth0%5D:5000": ("fe80::1", 5000),
    "unix:/tmp/socket": None,
    "unix:": None,
    "ipv4:10.0.0.1": None,
    "ipv4:10.0.0.256:5000": None,
    "ipv4:name.example:5000": None,
    "ipv4:10.0.0.1:port": None,
    "": None,
}


@pytest.mark.parametrize("peer", PEERS)
def test_the_name_of_a_peer(peer):
    address = parse_peer(peer)
    assert address == PEERS[peer]
    assert read_address(format_address(address)) == address


@pytest.mark.parametrize("text", ["nonsense", "::", "10.0.0.1:", "a:b:c", ":80", "256.0.0.1:80"])
def test_what_a_server_says_of_an_address_is_not_believed_blindly(text):
    assert read_address(text) is None


# ---------------------------------------------------------------- real sockets


@contextlib.contextmanager
def pair(host: str = HOST) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((host, 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()[:2]) as client:
            server, _ = listening.accept()
            with server:
                yield client, server


def take(sock: socket.socket, count: int) -> None:
    while count:
        count -= len(sock.recv(count))


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_both_ends_of_one_process_count_for_themselves(host):
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.bind((host, 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    with pair(host) as (client, server):
        client.sendall(b"x" * 70_001)
        take(server, 70_001)
        server.sendall(b"y" * 313)
        take(client, 313)
        end = client.getsockname()[:2]
        ours, theirs = Meter("local").read(end), Meter("remote").read(end)
        assert (ours.once, ours.received) == (70_001, 313)
        assert (theirs.once, theirs.received) == (313, 70_001)
        assert ours.header == theirs.header == 0  # what the wire would carry cannot be told on loopback
        assert 0 < ours.data_segments < ours.segments
        for wrong in (Meter("local").read, Meter("remote").read):
            with pytest.raises(UnobservableError, match="no such TCP connection"):
                wrong((end[0], 1))


def test_a_closing_peer_adds_no_byte():
    """Its FIN takes a sequence number, and the kernel counts that among the received bytes."""
    with pair() as (client, server):
        server.sendall(b"z" * 1_000)
        server.shutdown(socket.SHUT_WR)
        take(client, 1_000)
        assert client.recv(1) == b""
        assert Meter("local").read(client.getsockname()).received == 1_000
        assert Meter("remote").read(client.getsockname()).once == 1_000


def test_other_descriptors_are_passed_over_and_reused_ones_noticed():
    listening, udp, unix = (
        socket.create_server((HOST, 0)),
        socket.socket(type=socket.SOCK_DGRAM),
        socket.socketpair(),
    )
    meter = Meter("local")
    try:
        with pair() as (client, server):
            client.sendall(b"abc")
            take(server, 3)
            assert meter.read(client.getsockname()).once == 3
            old = client.getsockname()
        with pair() as (client, server):
            with pytest.raises(UnobservableError, match="no such TCP connection"):
                meter.read(old)
            client.sendall(b"abcde")
            take(server, 5)
            assert meter.read(client.getsockname()).once == 5
    finally:
        for sock in (listening, udp, *unix):
            sock.close()


@pytest.mark.parametrize("moment", range(1, 3))
def test_a_connection_may_close_while_it_is_read(monkeypatch, moment):
    """gRPC closes its sockets in threads of its own, at any moment."""
    calls = 0

    class Vanishing(socket.socket):
        def getsockname(self):
            nonlocal calls
            calls += 1
            if calls >= moment:
                raise OSError(9, "Bad file descriptor")
            return super().getsockname()

    meter = Meter("local")
    with pair() as (client, _):
        meter.read(client.getsockname())
        known = {name: getattr(socket, name) for name in dir(socket)} | {"socket": Vanishing}
        monkeypatch.setattr(meters, "socket", types.SimpleNamespace(**known))
        with pytest.raises(UnobservableError, match="no such TCP connection"):
            meter.read(client.getsockname())
    assert calls >= moment


def test_a_descriptor_that_became_another_connection_while_it_was_read_is_not_taken_for_the_old_one(
    monkeypatch,
):
    with pair() as (client, _), pair() as (other, far):
        other.sendall(b"x" * 999)
        take(far, 999)
        meter, end = Meter("local"), client.getsockname()
        meter.read(end)

        class Exchanged(socket.socket):
            """Between the first look and the counters the descriptor becomes the other connection's."""

            def getsockopt(self, *what):
                os.dup2(other.fileno(), self.fileno())
                return super().getsockopt(*what)

        known = {name: getattr(socket, name) for name in dir(socket)} | {"socket": Exchanged}
        with monkeypatch.context() as patch:
            patch.setattr(meters, "socket", types.SimpleNamespace(**known))
            with pytest.raises(UnobservableError, match="no such TCP connection"):
                meter.read(end)


# ---------------------------------------------------------------- systems that cannot tell


class TcpInfo(ctypes.Structure):
    """struct tcp_info as linux/tcp.h declares it, up to what this needs; the compiler's own alignment."""

    _fields_ = [
        *((name, ctypes.c_uint8) for name in ("state", "ca_state", "retransmits", "probes", "backoff", "options")),
        ("wscale", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        *((name, ctypes.c_uint32) for name in ("rto", "ato", "snd_mss", "rcv_mss")),
        *((name, ctypes.c_uint32) for name in ("unacked", "sacked", "lost", "retrans", "fackets")),
        *((name, ctypes.c_uint32) for name in ("data_sent", "ack_sent", "data_recv", "ack_recv")),
        *((name, ctypes.c_uint32) for name in ("pmtu", "rcv_ssthresh", "rtt", "rttvar", "snd_ssthresh")),
        *((name, ctypes.c_uint32) for name in ("snd_cwnd", "advmss", "reordering", "rcv_rtt", "rcv_space")),
        ("total_retrans", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("pacing", "max_pacing", "bytes_acked", "bytes_received")),
        *((name, ctypes.c_uint32) for name in ("segs_out", "segs_in", "notsent_bytes", "min_rtt")),
        *((name, ctypes.c_uint32) for name in ("data_segs_in", "data_segs_out")),
        *((name, ctypes.c_uint64) for name in ("delivery_rate", "busy", "rwnd_limited", "sndbuf_limited")),
        *((name, ctypes.c_uint32) for name in ("delivered", "delivered_ce")),
        *((name, ctypes.c_uint64) for name in ("bytes_sent", "bytes_retrans")),
        *((name, ctypes.c_uint32) for name in ("dsack_dups", "reord_seen")),
    ]  # fmt: skip


ESTABLISHED, TIMESTAMPS = 1, 1


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that answers TCP_INFO with the given bytes on connections between the given addresses."""

    def answers(raw: bytes, local: str = "10.0.0.1", remote: str = "10.0.0.2") -> Reading:
        class Handle:
            type = socket.SOCK_STREAM
            family = socket.AF_INET6 if ":" in local else socket.AF_INET

            def __init__(self, *_, fileno: int) -> None: ...

            def getsockname(self):
                return local, 5000

            def getpeername(self):
                return remote, 6000

            def getsockopt(self, *_):
                return raw

            def detach(self) -> None: ...

        names = {
            name: getattr(socket, name) for name in ("SOCK_STREAM", "AF_INET", "AF_INET6", "IPPROTO_TCP")
        }
        monkeypatch.setattr(meters, "socket", types.SimpleNamespace(socket=Handle, TCP_INFO=11, **names))
        return Meter("local").read((local.removeprefix("::ffff:"), 5000))

    return answers


COUNTED = TcpInfo(
    state=ESTABLISHED, options=TIMESTAMPS, snd_mss=1448, bytes_received=11, segs_out=12, data_segs_out=13,
    bytes_sent=1 << 40, bytes_retrans=15, notsent_bytes=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("local", "remote", "header"), [("10.0.0.1", "10.0.0.2", 52), ("2001:db8::1", "2001:db8::2", 72)]
)
def test_counters_stand_where_the_kernel_puts_them(kernel, local, remote, header):
    assert kernel(bytes(COUNTED), local, remote) == Reading(
        1 << 40, 15, 12, 13, header, 1448, received=11, unsent=16
    )


def test_an_ipv4_connection_of_an_ipv6_socket_is_found_by_its_ipv4_address(kernel):
    assert kernel(bytes(COUNTED), "::ffff:10.0.0.1", "::ffff:10.0.0.2").header == 52


@pytest.mark.parametrize("length", [104, 192, 200, 208, 215])
def test_an_older_kernel_is_named_as_the_reason(kernel, length):
    """Linux 4.18 and older answer with fewer bytes; half a counter is none."""
    with pytest.raises(UnobservableError, match=rf"TCP_INFO has {length} bytes.*Linux 4\.19"):
        kernel(bytes(COUNTED)[:length])


def test_a_newer_kernel_may_say_more(kernel):
    assert kernel(bytes(COUNTED) + b"\xff" * 40).sent == 1 << 40


def test_without_timestamps_the_header_is_not_guessed(kernel):
    plain = TcpInfo.from_buffer_copy(bytes(COUNTED))
    plain.options = 0
    assert kernel(bytes(plain)).header == 0


def no_proc(monkeypatch):
    monkeypatch.setattr(meters, "Path", lambda _: Path("/no-such-folder"))
    return "no /proc/self/fd: TCP_INFO is read on Linux only"


def no_option(monkeypatch):
    known = {name: getattr(socket, name) for name in dir(socket) if name != "TCP_INFO"}
    monkeypatch.setattr(meters, "socket", types.SimpleNamespace(**known))
    return "this system has no TCP_INFO"


@pytest.mark.parametrize("system", [no_proc, no_option])
async def test_a_system_that_cannot_tell_changes_nothing_but_the_rows(tmp_path, monkeypatch, system):
    """One row per direction with the reason at each end, no figure below gRPC, and no commit that waits for one."""
    why, ledger = system(monkeypatch), Rows()
    monkeypatch.setattr(service, "REPORT_SECONDS", 60)
    async with serving(tmp_path, clients=1, rounds=2) as running:
        await asyncio.wait_for(agent(running.address, Stub(), ledger).run(), 20)
        assert await running.task is True
        assert running.federation.books.totals.total("up", "http2") is None
        assert running.federation.books.totals.total("down", "segments") is None
    theirs = connections(tmp_path)
    assert sorted((row["direction"], row["how"]) for row in theirs) == [
        ("down", f"absent, {why}"),
        ("up", f"absent, {why}; at the client: {why}"),
    ]
    assert {row[name] for row in theirs for name in ("http2", "tls", "tcp_payload", "segments", "ip")} == {""}
    own = [(row.direction, row.how) for row in ledger.rows if row.kind == "connection"]
    assert sorted(own) == [("down", f"absent, {why}"), ("up", f"absent, {why}")]


async def test_on_loopback_ip_bytes_are_absent_and_not_zero(tmp_path):
    async with serving(tmp_path, clients=1, rounds=1) as running:
        await asyncio.wait_for(agent(running.address, Stub()).run(), 20)
        assert await running.task is True
        assert running.federation.books.totals.total("up", "ip") is None
    senders = [row for row in connections(tmp_path) if row["segments"]]
    assert {row["direction"] for row in senders} == {"up", "down"}
    assert {row["ip"] for row in senders} == {""}
    assert all("ip: absent, loopback" in row["how"] for row in senders)


def agent(address: str, stub: Stub, ledger: Rows | None = None) -> Agent:
    return Agent(address, stub, ledger or Rows(), ThreadPoolExecutor(1))  # type: ignore[arg-type]


def connections(folder: Path, client: int = 0) -> list[dict[str, str]]:
    with (folder / "bytes.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    return [row for row in rows if row["kind"] == "connection" and row["client"] == str(client)]


# ---------------------------------------------------------------- each end's bookkeeping


class Kernel:
    """A meter that gives what it is told, one reading after the other; None: the connection is gone."""

    def __init__(self, *readings: Reading | None) -> None:
        self._readings = list(readings)

    def read(self, end: object) -> Reading:
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if reading is None:
            raise UnobservableError("gone")
        return reading


class Books(Rows):
    def record(self, row) -> None:
        self.rows.append(row)


def at(sent: int, segments: int, received: int = 0, retransmitted: int = 0) -> Reading:
    return Reading(sent, retransmitted, segments, 0, 0, 1448, received)


def http2(books: Rows, way: str) -> list[int | None]:
    return [row.http2 for row in books.rows if row.direction == way]


def test_the_client_enters_differences_and_keeps_what_it_knew_when_the_connection_is_gone():
    books = Books()
    meter = ClientMeter(
        books, Kernel(at(100, 2, 30), at(100, 2, 30), at(150, 3, 90), None), 0, (HOST, 1), encrypted=False
    )  # type: ignore[arg-type]
    assert meter.last is None
    told = [meter.read(0), meter.read(0), meter.read(0), meter.read()]
    assert (http2(books, "up"), http2(books, "down")) == ([100, 50], [30, 60])
    assert [counters.sent for counters in told] == [100, 100, 150, 0]
    assert told[-1].absent == "gone"
    assert meter.last is not None
    assert meter.last.sent == 150


def test_a_client_that_never_sees_its_connection_says_so_once():
    books = Books()
    meter = ClientMeter(books, Kernel(None), 0, None, encrypted=False)  # type: ignore[arg-type]
    for _ in range(3):
        assert meter.read().absent == "the server did not see a TCP address of this client"
    assert [(row.direction, row.http2) for row in books.rows] == [("up", None), ("down", None)]
    assert meter.last is None
    assert meter.once() == 0
    assert asyncio.run(meter.drained(10, 0)) is False


def served(books: Books, *readings: Reading | None, reports: bool = True) -> ServerMeter:
    return ServerMeter(books, Kernel(*readings), 0, (HOST, 1), encrypted=False, reports=reports)  # type: ignore[arg-type]


def test_the_server_enters_what_it_sent_and_what_the_client_says():
    books = Books()
    meter = served(books, at(500, 5, 1_000), at(500, 5, 1_000), at(900, 9, 1_000))
    meter.read(0)
    meter.report(at(700, 7).to_proto(), 0)
    meter.read(0)
    assert (http2(books, "down"), http2(books, "up")) == ([500, 400], [700])


def test_of_a_client_that_does_not_report_there_is_what_arrived():
    books = Books()
    meter = served(books, at(10, 1, 300), at(10, 1, 450), reports=False)
    meter.read(0)
    meter.read(0)
    assert http2(books, "up") == [300, 150]
    meter.report(at(450, 7).to_proto(), 0)  # and what it says all the same is not counted beside that
    assert http2(books, "up") == [300, 150]


def test_what_a_client_never_reported_counts_as_what_arrived():
    """It reported 300 of the 5,000 bytes that came from it and died: no sum of its segments and packets is whole."""
    books = Books()
    meter = served(books, at(10, 1, 300), at(10, 1, 300), at(20, 2, 5_000))
    meter.read(0)
    meter.report(at(300, 7).to_proto(), 0)
    meter.read(0)
    meter.abandon()
    meter.abandon()
    assert http2(books, "up") == [300, 4_700]
    last = books.rows[-1]
    assert (last.segments, last.ip) == (None, None)
    assert "the client went without its last report" in last.how


def test_a_client_that_reported_everything_leaves_nothing_to_add():
    books = Books()
    meter = served(books, at(10, 1, 300))
    meter.read(0)
    meter.report(at(300, 7).to_proto(), 0)
    meter.abandon()
    assert http2(books, "up") == [300]


IMPOSSIBLE = {
    "fewer bytes than before": {"sent": 599},
    "fewer segments than before": {"segments": 5},
    "more than any counter": {"sent": 1 << 51},
    "minus one": {"sent": (1 << 64) - 1, "retransmitted": (1 << 64) - 1},
    "more again than at all": {"retransmitted": 701},
    "more segments with data than segments": {"data_segments": 8},
    "more segments than any counter": {"segments": (1 << 63)},
    "a header of no protocol": {"header": (1 << 32) - 1},
    "more than arrived": {"sent": 1_001},
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_counters_are_not_believed_and_what_arrived_stands_instead(case):
    """600 bytes were reported, 1000 have arrived: 400 more are entered, whatever the client says now."""
    books = Books()
    meter = served(books, at(10, 1, 1_000))
    meter.report(at(600, 6).to_proto(), 0)
    claimed = pb.Counters(**({"sent": 700, "segments": 7, "mss": 1448} | IMPOSSIBLE[case]))
    meter.report(claimed, 1)
    assert http2(books, "up") == [600]
    assert (meter.reports, meter.due) == (False, False)
    meter.read(1)
    meter.report(at(900, 9).to_proto(), 1)  # nor is anything else that it says later
    assert http2(books, "up") == [600, 400]
    assert books.rows[-1].how.endswith("absent, the client's counters cannot be right")


def test_a_client_that_cannot_tell_is_asked_no_more():
    books = Books()
    meter = served(books, at(10, 1, 1_000))
    meter.report(at(600, 6).to_proto(), 0)
    meter.report(pb.Counters(absent="no\x1b[2J such\nthing" + "!" * 500), 0)
    meter.read(0)
    assert http2(books, "up") == [600, 400]
    (how,) = [row.how for row in books.rows[1:] if row.direction == "up"]
    assert "at the client: no[2J suchthing!!!" in how
    assert how.isprintable()
    assert len(how) < 300


# ---------------------------------------------------------------- liars among honest clients


LIES = {
    "huge": pb.Counters(sent=(1 << 50) - 1, segments=(1 << 50) - 1, header=52),
    "minus one": pb.Counters(**{name: (1 << 64) - 1 for name in ("sent", "retransmitted", "segments")}),
    "segments without end": pb.Counters(retransmitted=1, sent=1, segments=(1 << 50) - 1, header=72),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_liar_harms_nobody(tmp_path, lie):
    """Its bytes are those that arrived, as a proxy counts them; the honest client's rows and the status are right."""
    async with (
        serving(tmp_path, clients=2, rounds=2) as running,
        CountingProxy(running.address, disguise=False) as proxy,
        RawClient(proxy.address) as liar,
    ):
        assert isinstance(await liar.join(0, reports_counters=True), pb.Welcome)
        ledger = Rows()
        honest = asyncio.create_task(agent(running.address, Stub(1), ledger).run())
        for counters in (LIES[lie], pb.Counters(sent=5, segments=1), LIES[lie]):
            out = outgoing("client", "heartbeat", pb.Heartbeat(), received=1, counters=counters)
            await liar.raw(out.frames[0])
        async with grpc.aio.insecure_channel(running.address) as channel:
            reply = await channel.unary_unary(transport.STATUS)(b"")
            assert pb.StatusReply.FromString(reply).connected >= 1
        await liar.work()
        await asyncio.wait_for(honest, 20)
        assert await running.task is True
        await proxy.quiet()
    (connection,) = proxy.connections
    uplink = [row for row in connections(tmp_path, 0) if row["direction"] == "up"]
    connection.up.tail(sum(int(row["http2"]) for row in uplink))
    assert "the client's counters cannot be right" in uplink[-1]["how"]
    theirs = [row for row in connections(tmp_path, 1) if row["direction"] == "up"]
    own = [row for row in ledger.rows if row.kind == "connection" and row.direction == "up"]
    assert {row["how"] for row in theirs} == {row.how for row in own}
    reported = sum(int(row["http2"]) for row in theirs)
    assert 0 < reported <= sum(row.http2 for row in own)


async def test_sums_too_large_for_a_status_do_not_break_it(tmp_path):
    async with serving(tmp_path) as running:
        running.federation.books.record(Row(0, 0, "up", "connection", ip=1 << 70))
        async with grpc.aio.insecure_channel(running.address) as channel:
            reply = pb.StatusReply.FromString(await channel.unary_unary(transport.STATUS)(b""))
    assert [(t.layer, t.bytes) for t in reply.bytes if t.direction == "up"] == [("ip", (1 << 64) - 1)]
