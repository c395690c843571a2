"""The connected clients of a federation: who is let in, what they say, and what becomes of it.

Everything that touches the federation holds `brain`, so that a commit in a thread meets nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor

import grpc

from fedreuse.proto import PROTOCOL_VERSION, transport
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import NO_ROUND, Channel, Tap
from fedreuse.proto.codec import Payload
from fedreuse.proto.errors import HARMLESS, SESSION_CODES_FROM, ProtocolError, code_name
from fedreuse.proto.faults import Fault, FaultPlan
from fedreuse.proto.frames import Incoming
from fedreuse.proto.ledger import Row
from fedreuse.proto.meter import Meter, format_address, parse_peer
from fedreuse.server.federation import Federation
from fedreuse.server.messages import Broadcast, held_versions, order, welcome
from fedreuse.server.metering import ConnectionMeter
from fedreuse.server.peer import Peer
from fedreuse.server.round import AskScore, Command, SendModel, State, Train
from fedreuse.server.settings import ServerSettings
from fedreuse.server.tasks import Tasks, in_thread
from fedreuse.server.versions import Release

log = logging.getLogger("fedreuse.server")

FAREWELL_SECONDS = 5.0


class Sessions:
    """All streams of one federation. `phase` is what the server is doing, in a word."""

    def __init__(
        self,
        federation: Federation,
        plan: pb.ClientPlan,
        settings: ServerSettings,
        faults: Iterable[Fault] = (),
        tap: Tap | None = None,
    ) -> None:
        self._federation, self._plan, self._settings = federation, plan, settings
        self.faults, self._tap = FaultPlan(faults), tap
        self.brain = asyncio.Lock()
        self.peers: dict[int, Peer] = {}
        self.grace: dict[int, asyncio.TimerHandle] = {}
        """Clients whose connection broke, until their time to come back is over."""
        self.broken: dict[int, Peer] = {}
        """The last session of each client that is not here, whose sent messages still wait for their fate."""
        self.tasks = Tasks()
        self.stopping = asyncio.Event()
        self.phase = "joining"
        self._broadcasts: dict[int | None, asyncio.Task[Broadcast]] = {}
        self._meter = Meter("remote")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="verify")
        self._sealing = ThreadPoolExecutor(1, thread_name_prefix="seal")

    def close(self) -> None:
        """After the last stream has ended."""
        for timer in self.grace.values():
            timer.cancel()
        self._threads.shutdown()
        self._sealing.shutdown(cancel_futures=True)
        for peer in list(self.peers.values()):
            self.left(peer)
        if self.phase == "finished":
            for peer in self.broken.values():
                if peer.client in self.grace:  # it went before the end
                    peer.meter.abandon()
                peer.channel.settle(None)
            self._federation.books.settle_all_left_over()

    async def farewell(self, code: pb.Code) -> None:
        """Tell everybody that it is over, and wait a little for them to go."""
        for peer in list(self.peers.values()):
            peer.end(code)
        await self.tasks.until(lambda: not self.peers, FAREWELL_SECONDS)

    # ------------------------------------------------------------ rounds

    def new_round(self) -> None:
        """Models made for the last round are not needed any more."""
        self._broadcasts = {}

    def dispatch(self, commands: list[Command]) -> None:
        for command in commands:
            peer = self.peers.get(command.client)
            if peer is None:
                continue  # within its grace; told when it comes back
            if isinstance(command, SendModel):
                self._post_model(peer)
            else:
                peer.post(*order(self._federation.next_round, command))
        self.tasks.notify()

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
        sealed = await in_thread(self._sealing, release.sealed, base)
        return Broadcast.of(self._federation.schema, release.round, sealed)

    def away(self, client: int) -> bool:
        """True while a planned crash keeps a client away.

        It may come back between the rounds before the one in which it is expected, not in the middle of an
        earlier one: what it hears then would depend on chance.
        """
        open_round = self._federation.round
        number = open_round.number if open_round else self._federation.next_round
        deaths = (f for past in range(number + bool(open_round)) for f in self.faults.deaths(past))
        return any(f.client == client and f.returns - 1 > number for f in deaths)

    # ------------------------------------------------------------ meters

    def read_meters(self, clients: Iterable[int], round: int = NO_ROUND) -> None:
        """Enter what the connections of these clients carried since they were last read."""
        for client in clients:
            if peer := self.peers.get(client):
                peer.meter.read(round)

    def all_reported(self) -> bool:
        """True once every client that uploaded has said what that took."""
        round = self._federation.round
        return round is None or not any(c in self.peers and self.peers[c].meter.due for c in round.seats)

    def note_missing(self) -> None:
        """The open round is committed without the reports that are due: it has no sums of what they would say."""
        self._federation.books.lacks("up")

    def _round_of(self, client: int) -> int:
        """The open round if the client takes part in it."""
        round = self._federation.round
        return round.number if round and client in round.seats else NO_ROUND

    # ------------------------------------------------------------ one client's stream

    async def session(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """The handler of one stream: join, then read, write and beat until it ends."""
        channel = Channel("server", -1, self._federation.books, lambda _kind, _round: 0, tap=self._tap)
        peer: Peer | None = None
        try:
            peer = await self._join(channel, frames, context.peer())
            reader = asyncio.create_task(self._read(peer, frames))
            writer = asyncio.create_task(peer.write(context.write))
            beats = asyncio.create_task(peer.beat(self._settings.heartbeat))
            watch = asyncio.create_task(self._watch(peer))
            over = asyncio.create_task(peer.ended.wait())
            tasks = {reader, writer, watch, over}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                peer.meter.read(self._round_of(peer.client))  # while the connection still lives
                if writer.done() and not reader.done():
                    await asyncio.wait(  # its last heartbeat
                        {reader, over}, timeout=FAREWELL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
            finally:
                peer.meter.read(self._round_of(peer.client))
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
            try:
                await context.write(out.frames[0])
            finally:
                channel.settle(channel.sent)
        finally:
            if peer is not None:
                self.left(peer)

    async def _join(self, channel: Channel, frames: AsyncIterator[bytes], address: str) -> Peer:
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
            return await self._admit(join, channel, address)
        except ProtocolError:
            row.status = "refused"
            raise
        finally:
            self._federation.books.write(row)

    async def _admit(self, join: pb.Join, channel: Channel, address: str) -> Peer:
        if join.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                pb.VERSION_MISMATCH,
                f"this server speaks protocol version {PROTOCOL_VERSION}, the client version "
                f"{join.protocol_version} ({join.software[:100] or 'unnamed software'})",
            )
        await self._make_room(join)
        async with self.brain:
            return self._let_in(join, channel, address)

    async def _make_room(self, join: pb.Join) -> None:
        """End the older session of the same client, if it is the same process or silent."""
        old = self.peers.get(join.client)
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
        await self.tasks.until(lambda: self.peers.get(join.client) is not old, FAREWELL_SECONDS)

    def _let_in(self, join: pb.Join, channel: Channel, address: str) -> Peer:
        federation, client = self._federation, join.client
        if self.stopping.is_set():
            raise ProtocolError(pb.STOPPING, "the server is stopping")
        if federation.finished:
            raise ProtocolError(pb.FINISHED, "all rounds are done")
        if self.away(client):
            raise ProtocolError(pb.AWAY, f"client {client} is to stay away for now (planned fault)")
        if client in self.peers:
            raise ProtocolError(pb.ALREADY_CONNECTED, f"client {client} joined in the same moment")
        confirmed = federation.join(client, join.examples, join.run, *held_versions(join))
        channel.admit_with(
            federation.schema,
            lambda _kind, header: federation.admit(client, header),
            lambda kind, number: federation.books.modelled_bytes(kind, client, number),
        )
        channel.session = secrets.randbits(63)
        end = parse_peer(address)
        meter = ConnectionMeter(
            federation.books,
            self._meter,
            client,
            end,
            encrypted=self._settings.tls is not None,
            reports=join.reports_counters,
        )
        peer = Peer(client, join.instance, channel.session, channel, meter)
        received = self._settle_previous(join)
        if timer := self.grace.pop(client, None):
            timer.cancel()
        self.peers[client] = peer
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
                address=format_address(end),
            ),
        )
        if join.run == federation.state.run and join.HasField("model_round"):
            peer.holds = join.model_round
        self._catch_up(peer)
        self.tasks.notify()
        return peer

    def _settle_previous(self, join: pb.Join) -> int | None:
        """What became of the messages of the client's broken session; how many it sent us there."""
        old = self.broken.pop(join.client, None)
        if old is None:
            self._federation.books.settle_left_over(
                join.client, join.previous_session, join.previous_received
            )
            return None
        known, channel = old.session == join.previous_session, old.channel
        if known and join.HasField("previous_counters"):
            old.meter.report(join.previous_counters)
        else:
            old.meter.abandon()
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

    def left(self, peer: Peer) -> None:
        """A session ended; the client may come back within its grace."""
        client = peer.client
        if self.peers.get(client) is not peer:
            return
        del self.peers[client]
        self.broken[client] = peer
        if self.phase in ("joining", "running"):
            self._federation.event("left", client=client)
            loop = asyncio.get_running_loop()
            self.grace[client] = loop.call_later(
                self._settings.rejoin_grace, self.tasks.spawn, self._give_up, client
            )
        self.tasks.notify()

    async def _give_up(self, client: int) -> None:
        async with self.brain:
            if self.grace.pop(client, None) is not None:
                if (old := self.broken.get(client)) is not None:
                    old.meter.abandon()
                detail = f"connection lost, not back within {self._settings.rejoin_grace:g} s"
                self.dispatch(self._federation.fail(client, pb.ABSENT, detail))

    async def _watch(self, peer: Peer) -> None:
        """Returns when a peer has been silent for too long."""
        limit = self._settings.heartbeat * transport.PATIENCE
        # While a commit holds the brain, messages wait in the stream unread: that is not the client's silence.
        while (silence := time.monotonic() - peer.heard) < limit or self.brain.locked() or peer.busy:
            await asyncio.sleep(max(limit - silence, 0.1))
        log.warning("client %d: silent for %.1f s", peer.client, silence)

    async def _broke_the_rules(
        self, peer: Peer, error: ProtocolError, context: grpc.aio.ServicerContext
    ) -> None:
        """A stream that cannot be followed any more: say why, give the client up for this round."""
        log.warning("client %d: %s", peer.client, error)
        async with self.brain:
            self._federation.event(
                "refused", client=peer.client, code=code_name(error.code), detail=error.detail
            )
            self.dispatch(self._federation.fail(peer.client, error.code, error.detail))
        out = peer.channel.send("abort", pb.Abort(code=error.code, detail=error.detail[:500]))
        # A peer that reads nothing may have left a write half done, and gRPC allows no other then.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await context.write(out.frames[0])

    # ------------------------------------------------------------ messages

    async def _read(self, peer: Peer, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            peer.heard = time.monotonic()
            whole = peer.channel.feed(frame)
            if whole is None:
                continue
            if (counters := whole[0].counters) is not None:
                round = self._round_of(peer.client)
                peer.meter.report(counters, peer.closed if round == NO_ROUND else round)
                peer.closed = NO_ROUND
                self.tasks.notify()
            await self._understand(peer, *whole)

    async def _understand(self, peer: Peer, incoming: Incoming, row: Row) -> None:
        """Carry out or refuse one whole message."""
        try:
            if incoming.refusal is not None:
                raise incoming.refusal
            match incoming.kind:
                case "score_reply":
                    async with self.brain:
                        self.dispatch(self._federation.score(peer.client, incoming.message))
                case "update":
                    peer.meter.due = peer.meter.reports
                    payload = await self._verified(peer, incoming)
                    async with self.brain:
                        self._federation.accept(peer.client, incoming.message, payload, row)
                        self.tasks.notify()
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

    async def _verified(self, peer: Peer, incoming: Incoming) -> Payload:
        """The payload of an update, after it waited for its turn. Raises ProtocolError."""
        peer.busy = True
        try:
            payload: Payload = await in_thread(
                self._threads, self._federation.verify, incoming.message, incoming.payload
            )
            return payload
        finally:
            peer.busy, peer.heard = False, time.monotonic()

    async def _refuse(self, peer: Peer, kind: str, error: ProtocolError) -> None:
        log.warning("client %d: %s refused: %s", peer.client, kind, error)
        peer.post("abort", pb.Abort(code=error.code, detail=error.detail[:500]))
        async with self.brain:
            self._federation.event(
                "refused", client=peer.client, kind=kind, code=code_name(error.code), detail=error.detail
            )
            if error.code not in HARMLESS:
                self.dispatch(self._federation.fail(peer.client, error.code, error.detail))

    async def _reported(self, peer: Peer, message: pb.Abort) -> None:
        """A client says that it cannot do its part."""
        log.warning("client %d reports %s: %s", peer.client, code_name(message.code), message.detail[:500])
        async with self.brain:
            if message.HasField("round") and message.round == self._federation.next_round:
                commands = self._federation.fail(peer.client, pb.CLIENT_FAILED, message.detail[:500])
                self.dispatch(commands)
