"""How a client connects, and what that takes."""

import asyncio

import grpc
import pytest

from fedreuse.proto import transport
from fedreuse.proto.meter import Reading, sender_row


async def test_a_slow_server_is_not_knocked_at_again_and_again() -> None:
    """An attempt has time for a slow network: a server that takes a second to say anything sees one connection."""
    seen = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=transport.CLIENT_OPTIONS) as channel:
        call = channel.stream_stream(transport.SESSION)()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.wait_for_connection(), 1.0)
        call.cancel()
    assert seen == 1
    server.close()


def test_a_connection_begins_with_a_syn_and_a_syn_ack() -> None:
    """The kernel counts the SYN as its socket's, the SYN-ACK as nobody's."""
    first, later = Reading(100, 0, 3, 1, 52, 1448), Reading(150, 0, 5, 2, 52, 1448)
    up, down = (sender_row(0, 7, way, False, first) for way in ("up", "down"))
    assert (up.segments, up.pure_acks, up.ip) == (3, 2, 100 + 3 * 52 + 8)
    assert (down.segments, down.pure_acks, down.ip) == (4, 3, 100 + 4 * 52 + 8)
    for way in ("up", "down"):
        row = sender_row(1, 7, way, False, later, first)
        assert (row.segments, row.pure_acks, row.ip) == (2, 1, 50 + 2 * 52)
