"""The gRPC body of a federation: `grpc.aio`, one stream per client, an event loop that never computes.

Decoding, checking, summing and evaluating run in threads. Everything that touches the federation holds
`_brain`, so that a commit in a thread meets nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedreuse.proto import PROTOCOL_VERSION, transport
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel, Tap
from fedreuse.proto.errors import HARMLESS, SESSION_CODES_FROM, ProtocolError, code_name
from fedreuse.proto.faults import Fault, FaultPlan
from fedreuse.proto.frames import Incoming
from fedreuse.proto.ledger import LAYERS, Row
from fedreuse.server.federation import Federation
from fedreuse.server.messages import Broadcast, closed, held_versions, order, welcome
from fedreuse.server.peer import Peer
from fedreuse.server.round import AskScore, Command, SendModel, State, Train
from fedreuse.server.settings import ServerSettings
from fedreuse.server.versions import Release

log = logging.getLogger("fedreuse.server")

FAREWELL_SECONDS = 5.0


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
        self._federation, self._plan, self._settings, self._tap = federation, plan, settings, tap
        self._faults, self._committed = FaultPlan(faults), committed
        self._brain = asyncio.Lock()
        self._peers: dict[int, Peer] = {}
        self._grace: dict[int, asyncio.TimerHandle] = {}
        self._broken: dict[int, tuple[int, Channel]] = {}
        self._broadcasts: dict[int | None, asyncio.Task[Broadcast]] = {}
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._phase = "joining"
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="verify")
        self._commit_thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ life

    async def serve(self, listening: Callable[[str], None] = lambda _address: None) -> bool:
        """Listen and run all remaining rounds; True if the federation finished, False if it was stopped.

        `listening` is called with HOST:PORT. Raises OSError if the port cannot be had.
        """
        server = grpc.aio.server(options=transport.SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self._handlers(),))
        wanted = f"{self._settings.host}:{self._settings.port}"
        try:
            port = server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {wanted}: {error}; is another server running there?") from None
        await server.start()
        listening(f"{self._settings.host}:{port}")
        rounds = asyncio.create_task(self._rounds())
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({rounds, stop}, return_when=asyncio.FIRST_COMPLETED)
            if rounds.done():
                await rounds
            finished = self._federation.finished
            self._phase = "finished" if finished else "stopped"
            await self._farewell(pb.FINISHED if finished else pb.STOPPING)
            return finished
        except BaseException:
            self._phase = "failed"
            await self._farewell(pb.STOPPING)
            raise
        finally:
            for task in (rounds, stop, *self._tasks):
                task.cancel()
            for timer in self._grace.values():
                timer.cancel()
            await asyncio.gather(rounds, stop, return_exceptions=True)
            await server.stop(1.0)
            self._threads.shutdown()
            self._commit_thread.shutdown()
            self._sealing.shutdown(cancel_futures=True)
            for peer in list(self._peers.values()):
                self._left(peer)
            if self._phase == "finished":
                for _, channel in self._broken.values():
                    channel.settle(None)
                self._federation.books.settle_all_left_over()
            self._federation.flush()

    def stop(self) -> None:
        """Stop at the next opportunity; the last committed round stands."""
        self._stopping.set()

    async def _farewell(self, code: pb.Code) -> None:
        for peer in list(self._peers.values()):
            peer.end(code)
        await self._until(lambda: not self._peers, FAREWELL_SECONDS)

    def _handlers(self) -> grpc.GenericRpcHandler:
        # Raw bytes in and out: what is counted is exactly what gRPC carries.
        return grpc.method_handlers_generic_handler(
            transport.SERVICE,
            {
                "Session": grpc.stream_stream_rpc_method_handler(self._session),
                "Status": grpc.unary_unary_rpc_method_handler(self._status),
            },
        )

    # ------------------------------------------------------------ rounds

    async def _rounds(self) -> None:
        federation, settings = self._federation, self._settings
        await self._until(lambda: len(self._peers) >= federation.settings.total, settings.join_deadline)
        self._phase = "running"
        while not federation.finished and not self._stopping.is_set():
            await self._await_returns()
            await self._await_somebody()
            await self._open_round()
            if federation.round is None:
                return  # stopped
            if not await self._until(self._round_complete, settings.round_deadline):
                async with self._brain:
                    if self._stopping.is_set():
                        return
                    log.warning("round %d: deadline", federation.next_round + 1)
                    self._dispatch(federation.deadline())
            await self._close_round()

    async def _await_returns(self) -> None:
        """Clients whose planned absence ends now get the time to come back."""
        number = self._federation.next_round
        due = {
            f.client for past in range(number) for f in self._faults.deaths(past) if f.returns - 1 == number
        }
        await self._until(lambda: due <= self._peers.keys(), self._settings.join_deadline)

    async def _await_somebody(self) -> None:
        """A round nobody could take part in is not spent before a round's time has passed."""
        federation = self._federation
        due = {c for c in federation.cohort(federation.next_round) if not self._away(c)}
        if due and not due & (self._peers.keys() | self._grace.keys()):
            log.warning("round %d: none of the selected clients is here; waiting", federation.next_round + 1)
            await self._until(
                lambda: bool(due & self._peers.keys()) or self._stopping.is_set(),
                self._settings.round_deadline,
            )

    async def _open_round(self) -> None:
        federation = self._federation
        async with self._brain:
            if self._stopping.is_set():
                return
            number = federation.next_round
            self._broadcasts = {}
            present = self._peers.keys() | self._grace.keys()
            absent = [c for c in federation.cohort(number) if c not in present or self._away(c)]
            self._dispatch(federation.open_round(absent))

    async def _close_round(self) -> None:
        async with self._brain:
            if self._stopping.is_set():
                return  # the round will be run again
            closings = await self._in_thread(self._commit_thread, self._federation.commit)
            self._broadcasts = {}
            for closing in closings:
                if peer := self._peers.get(closing.client):
                    peer.post("round_closed", closed(closing))
        self._committed(self._federation.latest)

    def _round_complete(self) -> bool:
        return self._federation.round is not None and self._federation.round.complete

    def _away(self, client: int) -> bool:
        """True while a planned crash keeps a client away.

        It may come back between the rounds before the one in which it is expected, not in the middle of an
        earlier one: what it hears then would depend on chance.
        """
        open_round = self._federation.round
        number = open_round.number if open_round else self._federation.next_round
        deaths = (f for past in range(number + bool(open_round)) for f in self._faults.deaths(past))
        return any(f.client == client and f.returns - 1 > number for f in deaths)

    def _dispatch(self, commands: list[Command]) -> None:
        for command in commands:
            peer = self._peers.get(command.client)
            if peer is None:
                continue  # within its grace; told when it comes back
            if isinstance(command, SendModel):
                self._post_model(peer)
            else:
                peer.post(*order(self._federation.next_round, command))
        self._notify()

    def _post_model(self, peer: Peer) -> None:
        release = self._federation.versions.current
        base = release.base(peer.holds)
        if base not in self._broadcasts:
            self._broadcasts[base] = asyncio.create_task(self._broadcast(release, base))
        peer.post_model(release.round, self._broadcasts[base])
        self._broadcasts[base].add_done_callback(lambda task: self._compose(release, task))

    def _compose(self, release: Release, task: asyncio.Task[Broadcast]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._federation.sent(release, task.result().sealed)

    async def _broadcast(self, release: Release, base: int | None) -> Broadcast:
        sealed = await self._in_thread(self._sealing, release.sealed, base)
        return Broadcast.of(self._federation.schema, release.round, sealed)

    # ------------------------------------------------------------ one client's stream

    async def _session(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """The handler of one stream: join, then read, write and beat until it ends."""
        channel = Channel("server", -1, self._federation.books, lambda _kind, _round: 0, tap=self._tap)
        peer: Peer | None = None
        try:
            peer = await self._join(channel, frames)
            reader = asyncio.create_task(self._read(peer, frames))
            writer = asyncio.create_task(peer.write(context.write))
            beats = asyncio.create_task(peer.beat(self._settings.heartbeat))
            watch = asyncio.create_task(self._watch(peer))
            over = asyncio.create_task(peer.ended.wait())
            tasks = {reader, writer, watch, over}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if writer.done() and not reader.done():
                    await asyncio.wait({reader, over}, timeout=FAREWELL_SECONDS)  # its last heartbeat
            finally:
                for task in (*tasks, beats):
                    task.cancel()
                await asyncio.gather(*tasks, beats, return_exceptions=True)
            error = reader.exception() if reader.done() and not reader.cancelled() else None
            if isinstance(error, ProtocolError):
                await self._broke_the_rules(peer, error, context)
            elif error is not None:
                log.error("client %d: its session failed", peer.client, exc_info=error)
        except ProtocolError as error:
            log.warning("refused %s: %s", context.peer(), error)
            out = channel.send("abort", pb.Abort(code=error.code, detail=error.detail[:500]))
            await context.write(out.frames[0])
            channel.settle(channel.sent)
        finally:
            if peer is not None:
                self._left(peer)

    async def _join(self, channel: Channel, frames: AsyncIterator[bytes]) -> Peer:
        """The first message. Raises ProtocolError if the client cannot be let in."""
        try:
            async with asyncio.timeout(self._settings.heartbeat * transport.PATIENCE):
                frame = await anext(frames)
        except (TimeoutError, StopAsyncIteration):
            raise ProtocolError(pb.NOT_JOINED, "no Join came") from None
        whole = channel.feed(frame)
        if whole is None or whole[0].kind != "join":
            raise ProtocolError(pb.NOT_JOINED, "the first message must be a Join")
        incoming, row = whole
        join: pb.Join = incoming.message
        row.client = channel.client = join.client
        try:
            return await self._admit(join, channel)
        except ProtocolError:
            row.status = "refused"
            raise
        finally:
            self._federation.books.write(row)

    async def _admit(self, join: pb.Join, channel: Channel) -> Peer:
        if join.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                pb.VERSION_MISMATCH,
                f"this server speaks protocol version {PROTOCOL_VERSION}, the client version "
                f"{join.protocol_version} ({join.software[:100] or 'unnamed software'})",
            )
        await self._make_room(join)
        async with self._brain:
            return self._let_in(join, channel)

    async def _make_room(self, join: pb.Join) -> None:
        """End the older session of the same client, if it is the same process or silent."""
        old = self._peers.get(join.client)
        if old is None:
            return
        silence = time.monotonic() - old.heard
        same = join.HasField("instance") and old.instance == join.instance
        if not same and silence < 2 * self._settings.heartbeat:
            raise ProtocolError(
                pb.ALREADY_CONNECTED,
                f"client {join.client} has another live session, heard {silence:.1f} s ago; does one identity "
                "run twice?",
            )
        old.ended.set()
        await self._until(lambda: self._peers.get(join.client) is not old, FAREWELL_SECONDS)

    def _let_in(self, join: pb.Join, channel: Channel) -> Peer:
        federation, client = self._federation, join.client
        if self._stopping.is_set():
            raise ProtocolError(pb.STOPPING, "the server is stopping")
        if federation.finished:
            raise ProtocolError(pb.FINISHED, "all rounds are done")
        if self._away(client):
            raise ProtocolError(pb.AWAY, f"client {client} is to stay away for now (planned fault)")
        if client in self._peers:
            raise ProtocolError(pb.ALREADY_CONNECTED, f"client {client} joined in the same moment")
        confirmed = federation.join(client, join.examples, join.run, *held_versions(join))
        channel.admit_with(
            federation.schema,
            lambda _kind, header: federation.admit(client, header),
            lambda kind, number: federation.books.modelled_bytes(kind, client, number),
        )
        channel.session = secrets.randbits(63)
        peer = Peer(client, join.instance, channel.session, channel)
        received = self._settle_previous(join)
        if timer := self._grace.pop(client, None):
            timer.cancel()
        self._peers[client] = peer
        federation.event(
            "joined",
            client=client,
            examples=join.examples,
            confirmed_round=None if confirmed is None else confirmed + 1,
        )
        peer.post(
            "welcome",
            welcome(
                federation,
                self._plan,
                peer.session,
                confirmed,
                heartbeat=self._settings.heartbeat,
                previous_received=received,
                pending=self._pending(client),
            ),
        )
        if join.run == federation.state.run and join.HasField("model_round"):
            peer.holds = join.model_round
        self._catch_up(peer)
        self._notify()
        return peer

    def _settle_previous(self, join: pb.Join) -> int | None:
        """What became of the messages of the client's broken session; how many it sent us there."""
        session, channel = self._broken.pop(join.client, (None, None))
        if channel is None:
            self._federation.books.settle_left_over(
                join.client, join.previous_session, join.previous_received
            )
            return None
        known = session == join.previous_session
        received = join.previous_received if known and join.HasField("previous_received") else None
        try:
            channel.settle(received)
        except ProtocolError:
            channel.settle(None)
            raise
        return channel.received if known else None

    def _pending(self, client: int) -> int | None:
        """The open round, if this client's update is due in it or has arrived."""
        round = self._federation.round
        seat = round.seats.get(client) if round else None
        return round.number if round and seat and seat.state in (State.TRAINING, State.FRESH) else None

    def _catch_up(self, peer: Peer) -> None:
        """Tell a client that came back in the middle of a round what is still expected of it."""
        round = self._federation.round
        seat = round.seats.get(peer.client) if round else None
        if (
            round is None
            or seat is None
            or seat.state not in (State.SCORING, State.UNDECIDED, State.TRAINING)
        ):
            return
        if peer.holds != round.number:
            self._post_model(peer)
        if seat.state is State.SCORING:
            peer.post(*order(round.number, AskScore(peer.client)))
        elif seat.state is State.TRAINING:
            peer.post(*order(round.number, Train(peer.client, seat.cause)))

    def _left(self, peer: Peer) -> None:
        """A session ended; the client may come back within its grace."""
        client = peer.client
        if self._peers.get(client) is not peer:
            return
        del self._peers[client]
        self._broken[client] = peer.session, peer.channel
        if self._phase in ("joining", "running"):
            self._federation.event("left", client=client)
            loop = asyncio.get_running_loop()
            self._grace[client] = loop.call_later(
                self._settings.rejoin_grace, self._spawn, self._give_up, client
            )
        self._notify()

    async def _give_up(self, client: int) -> None:
        async with self._brain:
            if self._grace.pop(client, None) is not None:
                detail = f"connection lost, not back within {self._settings.rejoin_grace:g} s"
                self._dispatch(self._federation.fail(client, pb.ABSENT, detail))

    async def _watch(self, peer: Peer) -> None:
        """Returns when a peer has been silent for too long."""
        limit = self._settings.heartbeat * transport.PATIENCE
        # While a commit holds the brain, messages wait in the stream unread: that is not the client's silence.
        while (silence := time.monotonic() - peer.heard) < limit or self._brain.locked():
            await asyncio.sleep(max(limit - silence, 0.1))
        log.warning("client %d: silent for %.1f s", peer.client, silence)

    async def _broke_the_rules(
        self, peer: Peer, error: ProtocolError, context: grpc.aio.ServicerContext
    ) -> None:
        """A stream that cannot be followed any more: say why, give the client up for this round."""
        log.warning("client %d: %s", peer.client, error)
        out = peer.channel.send("abort", pb.Abort(code=error.code, detail=error.detail[:500]))
        await context.write(out.frames[0])
        async with self._brain:
            self._federation.event(
                "refused", client=peer.client, code=code_name(error.code), detail=error.detail
            )
            self._dispatch(self._federation.fail(peer.client, error.code, error.detail))

    # ------------------------------------------------------------ messages

    async def _read(self, peer: Peer, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            peer.heard = time.monotonic()
            whole = peer.channel.feed(frame)
            if whole is not None:
                await self._understand(peer, *whole)

    async def _understand(self, peer: Peer, incoming: Incoming, row: Row) -> None:
        """Carry out or refuse one whole message."""
        try:
            if incoming.refusal is not None:
                raise incoming.refusal
            match incoming.kind:
                case "score_reply":
                    async with self._brain:
                        self._dispatch(self._federation.score(peer.client, incoming.message))
                case "update":
                    payload = await self._in_thread(
                        self._threads, self._federation.verify, incoming.message, incoming.payload
                    )
                    async with self._brain:
                        self._federation.accept(peer.client, incoming.message, payload, row)
                        self._notify()
                case "abort":
                    await self._reported(peer, incoming.message)
                case "join":
                    raise ProtocolError(pb.NOT_JOINED, f"client {peer.client} joined twice in one session")
        except ProtocolError as error:
            row.status = "refused"
            if error.code >= SESSION_CODES_FROM:
                raise
            await self._refuse(peer, incoming.kind, error)
        finally:
            self._federation.books.write(row)

    async def _refuse(self, peer: Peer, kind: str, error: ProtocolError) -> None:
        log.warning("client %d: %s refused: %s", peer.client, kind, error)
        peer.post("abort", pb.Abort(code=error.code, detail=error.detail[:500]))
        async with self._brain:
            self._federation.event(
                "refused", client=peer.client, kind=kind, code=code_name(error.code), detail=error.detail
            )
            if error.code not in HARMLESS:
                self._dispatch(self._federation.fail(peer.client, error.code, error.detail))

    async def _reported(self, peer: Peer, message: pb.Abort) -> None:
        """A client says that it cannot do its part."""
        log.warning("client %d reports %s: %s", peer.client, code_name(message.code), message.detail[:500])
        async with self._brain:
            if message.HasField("round") and message.round == self._federation.next_round:
                commands = self._federation.fail(peer.client, pb.CLIENT_FAILED, message.detail[:500])
                self._dispatch(commands)

    # ------------------------------------------------------------ status

    async def _status(self, request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        try:
            pb.StatusRequest.FromString(request)
        except DecodeError:
            log.warning("an unreadable StatusRequest")
        federation = self._federation
        totals = [
            pb.ByteTotal(direction=way, layer=layer, bytes=value)
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
            connected=len(self._peers),
            phase=self._phase,
            latest=json.dumps(federation.latest) if federation.latest else "",
            bytes=totals,
        )
        return reply.SerializeToString()

    # ------------------------------------------------------------ small helpers

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition that `_notify` announces; False if time ran out first."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return condition()
        return True

    def _notify(self) -> None:
        self._spawn(self._announce)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, call: Callable[..., Awaitable[None]], *args: Any) -> None:
        async def run() -> None:
            await call(*args)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
