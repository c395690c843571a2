"""The gRPC body of a client: one connection, reconnects, heartbeats; computing happens in a thread.

One process may run several agents; they share one computing thread, so that every training has the same
single thread to itself that the simulator gives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from fedreuse.client.errors import AgentError
from fedreuse.client.metering import ConnectionMeter
from fedreuse.client.results import LocalUpdate, Score, failure
from fedreuse.client.session import (
    Action,
    ClientSession,
    Closed,
    DoScore,
    DoTrain,
    StaleModelError,
    Stop,
    Welcomed,
)
from fedreuse.client.shelf import Shelf
from fedreuse.client.tls import ClientTls, client_credentials, hint
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import transport
from fedreuse.proto.channel import Ledger
from fedreuse.proto.errors import SESSION_CODES_FROM, ProtocolError, code_name
from fedreuse.proto.faults import Fault, FaultPlan, Phase
from fedreuse.proto.frames import Outgoing
from fedreuse.proto.meter import Meter, read_address

if TYPE_CHECKING:
    from fedreuse.client.participant import Participant  # it needs torch, talking does not

log = logging.getLogger("fedreuse.client")

_TRY_AGAIN = frozenset({pb.STOPPING, pb.ALREADY_CONNECTED, pb.SILENT, pb.AWAY})
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
FAREWELL_SECONDS = 5.0
WORTH_TELLING = 256
"""Bytes sent since the last report that make a message of their own when a round closes."""


class _ConnectionLostError(Exception):
    """The session ended without a goodbye; worth another try."""


class _Died(Exception):
    """A planned fault: this client is dead now."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.kind)
        self.fault = fault


class Agent:
    """One client of a federation at `address` (HOST:PORT).

    `expected` are the seed and the number of clients with which this client's data was divided, if it was;
    `compute` runs the training; `give_up` is how many seconds without a server are too many; agents of one
    process share a `shelf` and a `meter`. Raises TlsError.
    """

    def __init__(
        self,
        address: str,
        participant: Participant,
        ledger: Ledger,
        compute: ThreadPoolExecutor,
        faults: Iterable[Fault] = (),
        give_up: float = 300.0,
        expected: tuple[int, int] | None = None,
        shelf: Shelf | None = None,
        meter: Meter | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._address, self._participant, self._ledger = address, participant, ledger
        self._compute, self._faults, self._give_up = compute, FaultPlan(faults), give_up
        self._instance = secrets.randbits(64)
        self._previous: ClientSession | None = None
        self._work: dict[tuple[Phase, int], asyncio.Task[Any]] = {}
        self._waits = 0
        self._welcomed = self._told_to_wait = False
        self._run = ""
        self._expected = expected
        self._shelf, self._meter = shelf or Shelf(), meter or Meter("local")
        self._credentials = client_credentials(tls)
        self._counters: pb.Counters | None = None

    @property
    def client(self) -> int:
        return self._participant.client

    async def run(self) -> None:
        """Take part until the server has finished. Raises AgentError if that is impossible."""
        try:
            await self._stay_connected()
        finally:
            if self._previous is not None:
                self._previous.channel.settle(None)

    async def _stay_connected(self) -> None:
        alone_since = time.monotonic()
        while True:
            self._welcomed = self._told_to_wait = False
            try:
                await self._one_session()
                return
            except _Died as death:
                self._die(death.fault)
                reason = "planned fault"
            except _ConnectionLostError as lost:
                reason = str(lost)
                log.info("client %d: not connected: %s", self.client, reason)
                if self._waits == 2 and (advice := hint(reason, self._credentials is not None)):
                    log.warning("client %d: %s", self.client, advice)
            if self._welcomed or self._told_to_wait:
                alone_since = time.monotonic()
            if self._welcomed:
                self._waits = 0
            alone = time.monotonic() - alone_since
            if alone > self._give_up:
                advice = hint(reason, self._credentials is not None)
                raise AgentError(
                    f"client {self.client}: no federation at {self._address} for {alone:.0f} s ({reason}); "
                    + (advice or "is the server running, and is the address right?")
                )
            await asyncio.sleep(self._wait())

    def _wait(self) -> float:
        """Exponential back-off with jitter, so that a restarted server is not stormed."""
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0**self._waits)
        self._waits = min(self._waits + 1, 10)
        return longest * random.uniform(0.5, 1.0)

    # ------------------------------------------------------------ one session

    async def _one_session(self) -> None:
        """From connecting to the server's FINISHED."""
        session = ClientSession(self.client, self._ledger, self._shelf)
        async with self._open_channel() as channel:
            call = channel.stream_stream(transport.SESSION)()
            connection = _Connection(call, session)
            participant = self._participant
            try:
                await call.wait_for_connection()
                join = session.join(
                    participant.examples,
                    participant.versions,
                    self._instance,
                    self._previous,
                    self._counters,
                )
                await connection.put(join)
                await self._converse(connection)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise _ConnectionLostError(_reason(error)) from None
            finally:
                if connection.meter is not None:
                    connection.meter.read()
                    self._counters = connection.meter.last
                call.cancel()
                if self._welcomed:
                    self._previous = session
                else:
                    session.channel.settle(None)

    def _open_channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=transport.CLIENT_OPTIONS)
        return grpc.aio.secure_channel(self._address, self._credentials, options=transport.CLIENT_OPTIONS)

    async def _converse(self, connection: _Connection) -> None:
        tasks = {asyncio.create_task(self._read(connection)), asyncio.create_task(connection.watch())}
        beats = asyncio.create_task(connection.beat())
        try:
            done, _ = await asyncio.wait({*tasks, connection.failure}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            connection.failure.cancel()
            rest = (*tasks, beats, *connection.senders)
            for task in rest:
                task.cancel()
            await asyncio.gather(connection.failure, *rest, return_exceptions=True)

    async def _read(self, connection: _Connection) -> None:
        """Follow the server until it says FINISHED."""
        while (frame := await connection.call.read()) is not grpc.aio.EOF:
            connection.heard = time.monotonic()
            try:
                actions = connection.session.feed(frame)
            except StaleModelError as error:
                raise _ConnectionLostError(f"a change of the model does not fit: {error}") from None
            except ProtocolError as error:
                raise AgentError(f"client {self.client}: the server broke the protocol: {error}") from None
            for action in actions:
                if self._act(connection, action):
                    await connection.report_all()
                    connection.session.channel.settle(connection.session.channel.sent)
                    await connection.hang_up()
                    return
                if isinstance(action, Closed):
                    await connection.report(action.round)
        raise _ConnectionLostError("the server closed the stream")

    def _act(self, connection: _Connection, action: Action) -> bool:
        """Carry out what the server asked; True if this was the end."""
        match action:
            case Welcomed(welcome):
                self._enter(connection, welcome)
            case DoScore(round):
                connection.spawn(self._deliver_score(connection, round))
            case DoTrain(round):
                connection.spawn(self._deliver_update(connection, round))
            case Closed(round, accepted):
                self._work = {key: task for key, task in self._work.items() if key[1] > round}
                self._participant.closed(round, accepted)
                log.info(
                    "client %d: round %d closed, %s", self.client, round + 1, "accepted" if accepted else "-"
                )
            case Stop(code, detail):
                return self._stop(code, detail)
        return False

    def _enter(self, connection: _Connection, welcome: pb.Welcome) -> None:
        session = connection.session
        assert session.plan is not None
        connection.meter = ConnectionMeter(
            self._ledger,
            self._meter,
            self.client,
            read_address(welcome.address),
            encrypted=self._credentials is not None,
        )
        confirmed = welcome.confirmed_round if welcome.HasField("confirmed_round") else None
        pending = welcome.pending_round if welcome.HasField("pending_round") else None
        # Work of another run, or of a round that a restarted server opens anew, counts for nothing.
        keep = pending if session.run == self._run else None
        self._work = {key: task for key, task in self._work.items() if key[1] == keep}
        self._run = session.run
        try:
            self._participant.welcome(session.run, session.schema, session.plan, confirmed, pending)
        except ProtocolError as error:
            raise AgentError(f"client {self.client}: {error}") from None
        theirs = session.plan.seed, welcome.clients
        if self._expected is not None and self._expected != theirs:
            raise AgentError(
                f"client {self.client}: configured with seed={self._expected[0]} "
                f"clients.total={self._expected[1]}, the run has seed={theirs[0]} clients.total={theirs[1]}; "
                "the data would be divided in another way, so use the run's"
            )
        self._welcomed = True
        log.info("client %d: joined run %s", self.client, session.run)

    def _stop(self, code: pb.Code, detail: str) -> bool:
        if code == pb.FINISHED:
            return True
        if code < SESSION_CODES_FROM:
            log.warning(
                "client %d: the server refused a message: %s: %s", self.client, code_name(code), detail
            )
            return False
        if code in _TRY_AGAIN:
            self._told_to_wait = True
            raise _ConnectionLostError(f"{code_name(code)}: {detail}")
        raise AgentError(f"client {self.client}: the server refuses this client: {code_name(code)}: {detail}")

    # ------------------------------------------------------------ work

    async def _deliver_score(self, connection: _Connection, round: int) -> None:
        session = connection.session
        if fault := self._faults.at(round, self.client, "score"):
            await self._play(connection, fault)
            return
        score = await self._result(connection, "score", round)
        if isinstance(score, Score) and session.open_round == round:
            await connection.put(session.score_reply(round, score))

    async def _deliver_update(self, connection: _Connection, round: int) -> None:
        session = connection.session
        if fault := self._faults.at(round, self.client, "train"):
            await self._play(connection, fault)
            return
        update = await self._result(connection, "train", round)
        fault = self._faults.at(round, self.client, "upload")
        if fault is not None and fault.kind != "garbage":
            await self._play(connection, fault)
            return
        if isinstance(update, LocalUpdate) and session.open_round == round:
            await connection.upload(session.update(round, update, garbage=fault is not None))

    async def _result(self, connection: _Connection, phase: Phase, round: int) -> Score | LocalUpdate | None:
        """The result of a piece of work, done once per round even if it is asked for again."""
        key = phase, round
        if key not in self._work:
            weights = connection.session.weights
            assert weights is not None
            call = self._participant.score if phase == "score" else self._participant.train
            running = asyncio.get_running_loop().run_in_executor(self._compute, call, round, weights)
            self._work[key] = asyncio.ensure_future(_wrap(running))
        try:
            # Shielded: a broken connection must not throw away an hour of training.
            result: Score | LocalUpdate = await asyncio.shield(self._work[key])
        except Exception as error:
            code, detail = failure(error)
            log.error(
                "client %d: %s in round %d failed: %s", self.client, phase, round + 1, detail, exc_info=error
            )
            await connection.put(connection.session.failed(round, code, detail))
            return None
        return result

    # ------------------------------------------------------------ planned faults

    async def _play(self, connection: _Connection, fault: Fault) -> None:
        if fault.dies:
            connection.fail(_Died(fault))
        elif fault.kind == "error":
            failed = connection.session.failed(fault.round - 1, pb.CLIENT_FAILED, "planned fault")
            await connection.put(failed)

    def _die(self, fault: Fault) -> None:
        """Forget what a dead process forgets."""
        self._work.clear()
        if self._previous is not None:
            self._previous.channel.settle(None)
            self._previous = None
        self._instance = secrets.randbits(64)
        if fault.kind == "wipe":
            self._participant.forget()


async def _wrap(future: asyncio.Future[Any]) -> Any:
    return await future


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


class _Connection:
    """One stream: serialized writes, heartbeats, silence."""

    def __init__(self, call: Any, session: ClientSession) -> None:
        self.call, self.session = call, session
        self.heard = time.monotonic()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.senders: set[asyncio.Task[None]] = set()
        self.meter: ConnectionMeter | None = None
        """Once the server has said which connection this is."""
        self._writing = asyncio.Lock()
        self._over = False
        self._told: int | None = 0
        """Bytes sent, as the server last heard; None once it heard that they are not known."""

    async def put(self, out: Outgoing) -> None:
        """Write one message; heartbeats never get between its frames. Nothing is written after `hang_up`."""
        async with self._writing:
            if self._over:
                return
            for frame in out.frames:
                await self.call.write(frame)

    async def upload(self, out: Outgoing) -> None:
        """Write an update; once it has left the machine, say what that took, or once that nobody can say."""
        before = self.meter.once() if self.meter is not None else 0
        await self.put(out)
        if self.meter is None:
            return
        known = await self.meter.drained(out.sizes.grpc, before)
        if known or self._told is not None:
            await self.report_all()

    async def report(self, round: int) -> None:
        """A round is over: say what it took, unless that is so little that a later message may say it as well."""
        counters = self.counters(round)
        if counters is not None and counters.sent - (self._told or 0) > WORTH_TELLING:
            await self._tell(counters)

    async def report_all(self) -> None:
        """A heartbeat with whatever is new."""
        await self._tell(self.counters())

    async def _tell(self, counters: pb.Counters | None) -> None:
        self._told = None if counters is None or counters.absent else counters.sent
        await self.put(self.session.heartbeat(counters))

    def counters(self, round: int | None = None) -> pb.Counters | None:
        """What this connection carried so far, for the server's ledger; new in the given or the open round."""
        number = self.session.open_round if round is None else round
        return None if self.meter is None else self.meter.read(number)

    async def hang_up(self) -> None:
        """Close after the server has read everything: cancelling a call throws away what is on its way."""
        async with self._writing:
            self._over = True
            await self.call.done_writing()
        # Everything is said; how the stream ends does not matter any more.
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while await self.call.read() is not grpc.aio.EOF:
                    pass

    def spawn(self, work: Any) -> None:
        """Run a delivery beside the reader; its failure ends the session."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self.senders.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.senders.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(self.session.heartbeat_seconds)
            try:
                await self.report_all()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                self.fail(error)
                return

    async def watch(self) -> None:
        """Raises once the server has been silent for too long."""
        while True:
            limit = self.session.heartbeat_seconds * transport.PATIENCE
            silence = time.monotonic() - self.heard
            if silence >= limit:
                raise _ConnectionLostError(f"the server was silent for {silence:.1f} s")
            await asyncio.sleep(limit - silence)
