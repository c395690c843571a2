"""The gRPC body of a federation: `grpc.aio`, one stream per client, an event loop that never computes.

Decoding, checking, summing and evaluating run in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedreuse.proto import PROTOCOL_VERSION, transport
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Tap
from fedreuse.proto.faults import Fault
from fedreuse.proto.ledger import LAYERS
from fedreuse.server.federation import Federation
from fedreuse.server.messages import closed
from fedreuse.server.sessions import Sessions
from fedreuse.server.settings import ServerSettings
from fedreuse.server.tasks import in_thread
from fedreuse.server.tls import server_credentials

log = logging.getLogger("fedreuse.server")

REPORT_SECONDS = 0.1
"""How long a commit waits for what clients count after their uploads; on the usual network a few milliseconds."""
MAX_TOTAL = (1 << 64) - 1
"""The largest sum a StatusReply can hold; only clients that make counters up get there."""


class Service:
    """Serves one federation from its first join to its end. `committed` hears of every new round."""

    def __init__(
        self,
        federation: Federation,
        plan: pb.ClientPlan,
        settings: ServerSettings,
        faults: Iterable[Fault] = (),
        committed: Callable[[dict[str, Any]], None] = lambda _row: None,
        tap: Tap | None = None,
    ) -> None:
        self._federation, self._settings, self._committed = federation, settings, committed
        self._sessions = Sessions(federation, plan, settings, faults, tap)
        self._commit_thread = ThreadPoolExecutor(1, thread_name_prefix="commit")

    # ------------------------------------------------------------ life

    async def serve(self, listening: Callable[[str], None] = lambda _address: None) -> bool:
        """Listen and run all remaining rounds; True if the federation finished, False if it was stopped.

        `listening` is called with HOST:PORT. Raises OSError if the port cannot be had.
        """
        server = grpc.aio.server(options=transport.SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._handlers(),))
        wanted = f"{self._settings.host}:{self._settings.port}"
        try:
            credentials = server_credentials(self._settings.tls)
            if credentials is None:
                port = server.add_insecure_port(wanted)
            else:
                port = server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {wanted}: {error}; is another server running there?") from None
        await server.start()
        listening(f"{self._settings.host}:{port}")
        rounds = asyncio.create_task(self._rounds())
        stop = asyncio.create_task(self._sessions.stopping.wait())
        try:
            await asyncio.wait({rounds, stop}, return_when=asyncio.FIRST_COMPLETED)
            if rounds.done():
                await rounds
            finished = self._federation.finished
            self._sessions.phase = "finished" if finished else "stopped"
            await self._sessions.farewell(pb.FINISHED if finished else pb.STOPPING)
            return finished
        except BaseException:
            self._sessions.phase = "failed"
            await self._sessions.farewell(pb.STOPPING)
            raise
        finally:
            for task in (rounds, stop):
                task.cancel()
            self._sessions.tasks.cancel()
            await asyncio.gather(rounds, stop, return_exceptions=True)
            await server.stop(1.0)
            self._commit_thread.shutdown()
            self._sessions.close()
            self._federation.flush()

    def stop(self) -> None:
        """Stop at the next opportunity; the last committed round stands."""
        self._sessions.stopping.set()

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Raw bytes in and out: what is counted is exactly what gRPC carries.
        return grpc.method_handlers_generic_handler(
            transport.SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(self._sessions.session),
                "Status": grpc.unary_unary_rpc_method_handler(self._status),
            },
        )

    # ------------------------------------------------------------ rounds

    async def _rounds(self) -> None:
        federation, settings = self._federation, self._settings
        await self._sessions.tasks.until(
            lambda: len(self._sessions.peers) >= federation.settings.total, settings.join_deadline
        )
        self._sessions.phase = "running"
        while not federation.finished and not self._sessions.stopping.is_set():
            await self._await_returns()
            await self._await_somebody()
            await self._open_round()
            if federation.round is None:
                return  # stopped
            if not await self._sessions.tasks.until(self._round_complete, settings.round_deadline):
                async with self._sessions.brain:
                    if self._sessions.stopping.is_set():
                        return
                    log.warning("round %d: deadline", federation.next_round + 1)
                    self._sessions.dispatch(federation.deadline())
            if not await self._sessions.tasks.until(self._sessions.all_reported, REPORT_SECONDS):
                self._sessions.note_missing()
            await self._close_round()

    async def _await_returns(self) -> None:
        """Clients whose planned absence ends now get the time to come back."""
        number = self._federation.next_round
        due = {
            f.client
            for past in range(number)
            for f in self._sessions.faults.deaths(past)
            if f.returns - 1 == number
        }
        await self._sessions.tasks.until(
            lambda: due <= self._sessions.peers.keys(), self._settings.join_deadline
        )

    async def _await_somebody(self) -> None:
        """A round nobody could take part in is not spent before a round's time has passed."""
        federation = self._federation
        due = {c for c in federation.cohort(federation.next_round) if not self._sessions.away(c)}
        if due and not due & (self._sessions.peers.keys() | self._sessions.grace.keys()):
            log.warning("round %d: none of the selected clients is here; waiting", federation.next_round + 1)
            await self._sessions.tasks.until(
                lambda: bool(due & self._sessions.peers.keys()) or self._sessions.stopping.is_set(),
                self._settings.round_deadline,
            )

    async def _open_round(self) -> None:
        federation = self._federation
        async with self._sessions.brain:
            if self._sessions.stopping.is_set():
                return
            number = federation.next_round
            self._sessions.new_round()
            present = self._sessions.peers.keys() | self._sessions.grace.keys()
            absent = [c for c in federation.cohort(number) if c not in present or self._sessions.away(c)]
            self._sessions.read_meters(federation.cohort(number))
            self._sessions.dispatch(federation.open_round(absent))

    async def _close_round(self) -> None:
        async with self._sessions.brain:
            if self._sessions.stopping.is_set():
                return  # the round will be run again
            number = self._federation.next_round
            self._sessions.read_meters(self._federation.cohort(number), number)
            closings = await in_thread(self._commit_thread, self._federation.commit)
            self._sessions.new_round()
            for closing in closings:
                if peer := self._sessions.peers.get(closing.client):
                    peer.post("round_closed", closed(closing))
                    peer.closed = closing.round
        self._committed(self._federation.latest)

    def _round_complete(self) -> bool:
        return self._federation.round is not None and self._federation.round.complete

    # ------------------------------------------------------------ status

    async def _status(self, request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        try:
            pb.StatusRequest.FromString(request)
        except DecodeError:
            log.warning("an unreadable StatusRequest")
        federation = self._federation
        totals = [
            pb.ByteTotal(direction=way, layer=layer, bytes=min(value, MAX_TOTAL))
            for way in ("up", "down")
            for layer, value in federation.books.layers(way).items()
            if value is not None and layer in LAYERS
        ]
        reply = pb.StatusReply(
            protocol_version=PROTOCOL_VERSION,
            run=federation.state.run,
            committed=federation.next_round,
            rounds=federation.settings.rounds,
            joined=len(federation.state.examples),
            connected=len(self._sessions.peers),
            phase=self._sessions.phase,
            latest=json.dumps(federation.latest) if federation.latest else "",
            bytes=totals,
        )
        return reply.SerializeToString()
