"""How a client connects."""

import asyncio

import grpc
import pytest

from fedreuse.proto import transport


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
