"""Bytes below gRPC as both ledgers have them, against a proxy that counted the same connections.

The ledgers hold what was read up to a connection's last reading. What came after it, the tail, is in no row: on the
uplink the last heartbeat, which carries that reading, and otherwise nothing that carries a message. So the ledgers'
sum must end where one of the proxy's frames or records ends, and the frames after it must be of that kind.
"""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import Certificates
from counting_proxy import Connection, CountingProxy, Unit, Way
from federates import Rows, client, read_rows, server, total

WAYS = ("up", "down")


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


@asynccontextmanager
async def federation(
    folder: Path, *, tls: dict | None = None, pause: int | None = None, disguise: bool = True, **how
):
    """A server, a proxy, and a process with the clients; it is over when the block has ended."""
    total = how.get("clients", 1)
    async with (
        server(folder / "server", **how) as serving,
        CountingProxy(await serving.hear("address"), disguise=disguise) as proxy,
        client(proxy.address, folder, *range(total), tls=tls, pause=pause) as taking,
    ):
        yield proxy, taking
        await taking.hear("done")
        await serving.hear("done")
        await proxy.quiet()


def ledgers(folder: Path, number: int = 0) -> tuple[Rows, Rows]:
    """The server's rows of a client, and the client's own."""
    served = [row for row in read_rows(folder / "server" / "bytes.csv") if row["client"] == str(number)]
    return served, read_rows(folder / f"client-{number}.csv")


def names(units: list[Unit]) -> Counter[str]:
    """Units by name; DATA without content only ends a stream."""
    return Counter(
        f"{unit.name}{' (empty)' if unit.name == 'DATA' and not unit.length else ''}" for unit in units
    )


def messages(units: list[Unit]) -> list[int]:
    """What the DATA frames among them carry."""
    return [unit.length for unit in units if unit.name == "DATA" and unit.length]


def assert_frames_add_up(way: Way) -> None:
    """Preface, 9 bytes a frame and their contents are the bytes that passed; nothing is left over."""
    assert way.whole
    assert not way.tls
    frames = [unit for unit in way.units if unit.name != "preface"]
    preface = 24 * (len(way.units) - len(frames))
    assert preface + sum(9 + unit.length for unit in frames) == way.total


def last_heartbeat(rows: Rows) -> int:
    """What the client's last one took in gRPC bytes."""
    return [int(row["grpc"]) for row in rows if row["kind"] == "heartbeat" and row["direction"] == "up"][-1]


def assert_both_ledgers_agree_with(connection: Connection, server_rows: Rows, client_rows: Rows) -> None:
    """Everything that is known of one connection that ended with a goodbye."""
    for way in WAYS:
        counted: Way = getattr(connection, way)
        assert_frames_add_up(counted)
        # DATA frames carry gRPC's messages with their prefixes and nothing else.
        assert counted.data == total(server_rows, way, "grpc") == total(client_rows, way, "grpc")
        assert [row["tls"] for row in (*server_rows, *client_rows) if row["tls"]] == []
    last = last_heartbeat(server_rows)
    # The server knows of the uplink what the last heartbeat says; that one, then, is missing, and no other.
    assert messages(connection.up.tail(total(server_rows, "up", "http2"))) == [last]
    # Its own counters it reads again after its last message, and so does the client if the connection still lives.
    assert messages(connection.down.tail(total(server_rows, "down", "http2"))) == []
    assert messages(connection.up.tail(total(client_rows, "up", "http2"))) in ([], [last])
    assert messages(connection.down.tail(total(client_rows, "down", "http2"))) == []


async def test_frames_add_up_to_what_both_ledgers_say(tmp_path):
    async with federation(tmp_path, rounds=3) as (proxy, _):
        pass
    (connection,) = proxy.connections
    assert names(connection.up.units)["preface"] == 1
    assert names(connection.down.units)["preface"] == 0
    served, own = ledgers(tmp_path)
    assert_both_ledgers_agree_with(connection, served, own)
    for rows, way in ((served, "down"), (served, "up"), (own, "up")):
        again = total(rows, way, "tcp_retransmitted")
        assert total(rows, way, "tcp_payload") - again == total(rows, way, "http2")


async def test_over_tls_records_add_up_to_what_both_ledgers_say(tmp_path):
    made = Certificates(tmp_path / "pem")
    settings = {"tls": made.server().model_dump(mode="json")}
    trust = made.client().model_dump(mode="json")
    async with federation(tmp_path, rounds=2, settings=settings, tls=trust) as (proxy, _):
        pass
    (connection,) = proxy.connections
    served, own = ledgers(tmp_path)
    for way in WAYS:
        counted: Way = getattr(connection, way)
        assert counted.whole
        assert counted.tls
        assert sum(5 + unit.length for unit in counted.units) == counted.total
        assert names(counted.units)["handshake"] > 0
        assert total(served, way, "grpc") == total(own, way, "grpc") < counted.total
        for rows in (served, own):
            assert [row["http2"] for row in rows if row["http2"]] == []
            # Whole records are missing, and they are too small for a model or an update.
            tail = counted.tail(total(rows, way, "tls"))
            assert sum(unit.length for unit in tail) < 300
            assert set(names(tail)) <= {"application data", "alert"}


@pytest.mark.skipif(not ipv6(), reason="this machine has no IPv6 loopback address")
async def test_over_ipv6(tmp_path):
    async with federation(tmp_path, settings={"host": "[::1]"}) as (proxy, _):
        pass
    (connection,) = proxy.connections
    assert_both_ledgers_agree_with(connection, *ledgers(tmp_path))


async def test_two_clients_of_one_process_are_kept_apart(tmp_path):
    async with federation(tmp_path, clients=2, rounds=3) as (proxy, _):
        pass
    one, other = proxy.connections
    joins = {}
    for number in range(2):
        (join,) = [row for row in ledgers(tmp_path, number)[1] if row["kind"] == "join"]
        joins[int(join["grpc"])] = number
    assert len(joins) == 2, "the two cannot be told apart by their first messages"
    first = [joins[messages(connection.up.units)[0]] for connection in (one, other)]
    assert sorted(first) == [0, 1]
    for number, connection in zip(first, (one, other), strict=True):
        assert_both_ledgers_agree_with(connection, *ledgers(tmp_path, number))


def before_and_after_joining_again(rows: Rows) -> tuple[Rows, Rows]:
    """Rows of the first connection and of the second: the last thing entered of one precedes the next join."""
    joins = [at for at, row in enumerate(rows) if row["kind"] == "join"]
    assert len(joins) == 2
    return rows[: joins[1]], rows[joins[1] :]


async def test_after_a_reconnect_both_connections_are_in_the_sums(tmp_path):
    settings = {"rejoin_grace": 15}
    async with federation(tmp_path, rounds=3, pause=1, settings=settings) as (proxy, taking):
        assert await taking.hear("training") == 1
        await proxy.quiet()
        proxy.cut()
        await proxy.connected(2)
        taking.go_on()
    first, second = proxy.connections
    served, own = ledgers(tmp_path)
    early, late = before_and_after_joining_again(served)
    early_own, late_own = before_and_after_joining_again(own)
    for way in WAYS:
        both: tuple[Way, Way] = getattr(first, way), getattr(second, way)
        for counted in both:
            assert_frames_add_up(counted)
        assert sum(counted.data for counted in both) == total(served, way, "grpc") == total(own, way, "grpc")
        assert total(early, way, "http2") + total(late, way, "http2") == total(served, way, "http2")
        # A window update and a ping may have left the client just before the cut, and the proxy never read them.
        # A FIN that is followed by a reset before the next reading counts as one byte more: the state that tells of it
        # is gone.
        unread = 13 + 17 if way == "up" else 1
        assert 0 < total(early_own, way, "http2") <= both[0].total + unread
        # The second connection counts from its own beginning.
        last = last_heartbeat(served)
        assert messages(both[1].tail(total(late, way, "http2"))) == ([last] if way == "up" else [])
        assert messages(both[1].tail(total(late_own, way, "http2"))) in ([], [last])
    # At the cut the kernel forgets, and what had been read until then stands: of the uplink all but the heartbeat
    # that carried the reading, or all if there was time for one more.
    missing = messages(first.up.tail(total(early, "up", "http2")))
    assert missing in ([], [last_heartbeat(early)])
    first.down.tail(total(early, "down", "http2"))


async def test_where_addresses_are_translated_the_uplink_is_what_arrived(tmp_path):
    """The server sees the proxy's address, by which the client cannot find its connection."""
    async with federation(tmp_path, disguise=False) as (proxy, _):
        pass
    (connection,) = proxy.connections
    served, own = ledgers(tmp_path)
    for way in WAYS:
        assert messages(getattr(connection, way).tail(total(served, way, "http2"))) == []
    uplink = [row for row in served if row["kind"] == "connection" and row["direction"] == "up"]
    assert {row["segments"] for row in uplink} == {""}
    assert all("at the client: this process has no such TCP connection" in row["how"] for row in uplink)
    assert {row["http2"] for row in own} == {""}
    assert [row["direction"] for row in own if "no such TCP connection" in row["how"]] == ["up", "down"]
