"""The aggregator's whole brain between the network (or a simulator) and the disk.

`Federation` owns the roster, the current round, the global state, the cached updates, the ledger and the
run store. It does no network I/O and knows no clock except for labels in the event log; a body (gRPC
service, simulator) feeds it what clients said and carries out the commands it returns.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import modelled
from fedreuse.proto.codec import Payload, require
from fedreuse.proto.errors import ProtocolError, code_name
from fedreuse.proto.ledger import COLUMNS, Row
from fedreuse.proto.packing import Coded
from fedreuse.proto.schema import PARAMETER, Schema
from fedreuse.proto.streams import cohort
from fedreuse.proto.transfers import Sealed, composition, open_body
from fedreuse.server.aggregate import Term, state_is_finite, step
from fedreuse.server.books import PART_COLUMNS, Books
from fedreuse.server.memory import CachedUpdate
from fedreuse.server.outcome import ROUND_COLUMNS, Closing, Update, Void, finite, round_row
from fedreuse.server.round import Command, Contribution, Reuse, Round, Seat, State, Train
from fedreuse.server.settings import FederationSettings
from fedreuse.server.store import RunState, RunStore
from fedreuse.server.versions import Release, Versions

T = TypeVar("T")


class Evaluator(Protocol):
    """Optional plug-in beside the server. Arrays are the full state by tensor name."""

    def validate(self, arrays: Mapping[str, NDArray[np.generic]]) -> Mapping[str, float]: ...


class Federation:
    """See the module. Not thread-safe: a body calls it from one place at a time."""

    def __init__(
        self,
        settings: FederationSettings,
        schema: Schema,
        store: RunStore,
        state: RunState,
        evaluator: Evaluator | None = None,
    ) -> None:
        if state.schema_hash != schema.hash:
            raise ProtocolError(
                pb.SCHEMA_MISMATCH, f"run {state.run} was started with another model (schema hash differs)"
            )
        self.settings, self.schema, self.state = settings, schema, state
        self.round: Round[Update] | None = None
        self.latest: dict[str, Any] = {}
        self._store, self._evaluator = store, evaluator
        tensors = [(t.size, t.width) for t in schema.tensors]
        self.dense_bytes = modelled.dense_bytes(tensors)
        self.update_bytes = modelled.update_bytes(tensors, settings.keep_ratio)
        self.books = Books(self.dense_bytes, self.update_bytes, state.committed, state.notes)
        self._parameters = frozenset(schema.of_kind(PARAMETER))
        self.versions = Versions(schema, settings.history, pack=settings.pack)
        for number, flat in (*sorted(state.past.items()), (state.committed, state.flat)):
            self.versions.add(number, flat)
        state.past.clear()
        # Filled by the body while a commit in another thread empties it.
        self._events: deque[Mapping[str, Any]] = deque()
        self._half_done = False
        self._opened = time.monotonic()

    # ------------------------------------------------------------ roster

    def join(
        self, client: int, examples: int, run: str = "", held: int | None = None, staged: int | None = None
    ) -> int | None:
        """Register a client; the round of its valid cached update, if there is one.

        `held` and `staged` are the rounds of the state the client keeps for run `run`. Where they do not
        match the cached update, the cached update is dropped too: a cache is valid only if both sides hold
        their part. Raises ProtocolError for an impossible identity.
        """
        if not 0 <= client < self.settings.total:
            raise ProtocolError(
                pb.UNKNOWN_CLIENT,
                f"client {client}; this federation has clients 0 to {self.settings.total - 1}",
            )
        if examples < 1:
            raise ProtocolError(pb.EXAMPLES_CHANGED, f"client {client} has no training examples")
        known = self.state.examples.setdefault(client, examples)
        if known != examples:
            raise ProtocolError(
                pb.EXAMPLES_CHANGED,
                f"client {client} joined with {known} examples before, now with {examples}",
            )
        cached = self.state.caches.round_of(client)
        if cached is None:
            return None
        if self.settings.gate.kind == "score" and (run != self.state.run or cached not in (held, staged)):
            self._drop_cache(
                client, f"the client holds round {_shown(held)}, the cached update is of {cached + 1}"
            )
            return None
        return cached

    def _drop_cache(self, client: int, why: str) -> None:
        self.state.caches.pop(client, None)
        self.event("cache_dropped", client=client, why=why)

    # ------------------------------------------------------------ rounds

    @property
    def next_round(self) -> int:
        return self.state.committed

    @property
    def finished(self) -> bool:
        return self.state.committed >= self.settings.rounds or bool(self.state.notes.get("stopped_early"))

    def cohort(self, round: int) -> tuple[int, ...]:
        return cohort(self.settings.seed, round, self.settings.total, self.settings.per_round)

    def open_round(self, absent: Iterable[int] = ()) -> list[Command]:
        """Begin the next round; selected clients that never joined count as absent, too."""
        selected = self.cohort(self.next_round)
        missing = frozenset(absent) | {c for c in selected if c not in self.state.examples}
        caches = {c: at for c in selected if (at := self.state.caches.round_of(c)) is not None}
        self.round = Round(
            self.next_round,
            selected,
            self.settings.gate,
            self.settings.memory,
            caches,
            frozenset(missing & set(selected)),
            self.settings.minimum,
        )
        self._opened = time.monotonic()
        self.books.open_round(self.next_round)
        self.event("round_opened", cohort=list(selected), threshold=self.round.threshold)
        return self._noted(self.round.start())

    def score(self, client: int, message: pb.ScoreReply) -> list[Command]:
        """A client's score; see `Round.score`."""
        signature = message.signature_round if message.HasField("signature_round") else None
        commands = self._current(client, message.round).score(client, message.round, message.score, signature)
        self.event("score", client=client, score=message.score, signature_round=_shown(signature))
        return self._noted(commands)

    def admit(self, client: int, message: pb.SparseUpdate) -> None:
        """Raise ProtocolError unless this client may send this update now and its layout is the plan's."""
        self._current(client, message.round).may_update(client, message.round)
        if message.transfer.coding == pb.CHANGE:
            raise ProtocolError(pb.WRONG_CONTENT, "an update is no change of a model")
        if message.transfer.HasField("base") and message.transfer.base != message.round:
            raise ProtocolError(
                pb.UNKNOWN_BASE,
                f"an update of round {message.round} coded against the model of round {message.transfer.base}",
            )
        require(message.transfer.tensors, self.schema, self.kept, self.schema.travelling)

    def kept(self, index: int) -> int:
        """Coordinates of a tensor that an update keeps: Top-K for parameters, all of a float buffer."""
        spec = self.schema.tensors[index]
        if spec.kind != PARAMETER:
            return spec.size
        return modelled.kept(spec.size, self.settings.keep_ratio)

    def verify(self, message: pb.SparseUpdate, received: Payload) -> Payload:
        """The expensive half of admission, safe to run in another thread: the payload in a received body.

        Raises ProtocolError.
        """
        coded: list[Coded] = []
        payload = open_body(self.schema, message.transfer, received, self.versions.get, coded)
        self.books.compose(message.round, "up", composition(self.schema, payload.blocks, coded))
        return payload

    def sent(self, release: Release, sealed: Sealed) -> None:
        """A model goes out to one client: note what its body is made of."""
        parts = composition(self.schema, sealed.blocks, sealed.sections)
        self.books.compose(release.round, "down", parts)

    def accept(self, client: int, message: pb.SparseUpdate, payload: Payload, row: Row) -> None:
        """A verified update enters the round and its row is charged. Raises ProtocolError if it is too late."""
        update = Update(payload, message.steps, message.train_loss)
        self._current(client, message.round).update(client, message.round, update)
        self.books.charge(row)
        self.event("update", client=client, steps=message.steps, train_loss=finite(message.train_loss))

    def fail(self, client: int, code: pb.Code, detail: str) -> list[Command]:
        """A selected client cannot go on."""
        if self.round is None:
            return []
        return self._noted(self.round.fail(client, code, detail))

    def deadline(self) -> list[Command]:
        return [] if self.round is None else self._noted(self.round.deadline())

    def _current(self, client: int, number: int) -> Round[Update]:
        current = self.round  # a commit in its thread may close it at any moment
        if current is None:
            code = pb.LATE if number < self.next_round else pb.UNEXPECTED
            raise ProtocolError(code, f"client {client} speaks of round {number}; no round is open")
        return current

    def _noted(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Train):
                self.event("train", client=command.client, cause=pb.Cause.Name(command.cause).lower())
            elif isinstance(command, Reuse):
                self.event(
                    "reuse", client=command.client, source_round=command.source_round + 1, age=command.age
                )
        return commands

    # ------------------------------------------------------------ the commit

    def commit(self) -> list[Closing]:
        """Aggregate the complete round, remember, evaluate and make everything durable.

        Expensive; safe to run in another thread as long as nothing else calls the federation meanwhile.
        """
        round = self.round
        assert round is not None
        assert round.complete
        self._half_done = True
        contributions = round.contributions()
        flat, void = self._aggregate(contributions)
        stood_in = frozenset(c.client for c in contributions if c.update is None and not void)
        closings = [self._close(round, client, seat, void, stood_in) for client, seat in round.seats.items()]
        self.state.flat = flat
        sums = self.books.round_sums()
        self.state.committed += 1
        self.versions.add(self.state.committed, flat)
        self.books.open_round(self.state.committed)
        self.event("committed")
        self.round = None
        metrics = self._validate()
        seconds = time.monotonic() - self._opened
        columns = self.settings.round_columns
        row = round_row(columns, round, self.state.examples, void, stood_in, metrics, sums, seconds)
        self._note_best(metrics)
        self._flush(row)
        self._half_done = False
        self.latest = row
        return closings

    def _aggregate(
        self, contributions: Sequence[Contribution[Update]]
    ) -> tuple[NDArray[np.uint8], Void | None]:
        """The next state and, if the round has no effect, why."""
        if not contributions:
            few = f"fewer than {self.settings.minimum} contributions"
            return self.state.flat, Void(pb.TOO_FEW_CONTRIBUTIONS, few)
        terms = [
            Term(
                c.client,
                self.state.examples[c.client],
                c.factor,
                self._payload(c),
                fresh=c.update is not None,
            )
            for c in contributions
        ]
        flat = step(self.schema, self.state.flat, terms, self.settings.step.learning_rate)
        if not state_is_finite(self.schema, flat):
            return self.state.flat, Void(pb.OVERFLOW, "the aggregate overflowed to NaN or Inf")
        return flat, None

    def _payload(self, contribution: Contribution[Update]) -> Payload:
        """The fresh update, or the cached one that stands in.

        That is the one of the last commit: a client that came back with an empty disk since has lost its cache, but
        not what was decided.
        """
        if contribution.update is not None:
            return contribution.update.payload
        cached = self.state.caches.stored(contribution.client)
        assert cached is not None
        return cached.payload

    def _close(
        self,
        round: Round[Update],
        client: int,
        seat: Seat[Update],
        void: Void | None,
        stood_in: frozenset[int],
    ) -> Closing:
        if seat.cache_round is None and client in self.state.caches:
            self._drop_cache(client, "the client's signature did not belong to the cached update")
        if seat.state is State.REUSED:
            self.books.record(Row(round.number, client, "up", "reuse", modelled=modelled.REUSE_EVENT_BYTES))
            detail = void.why if void else "the cached update was used"
            return Closing(client, round.number, accepted=False, detail=detail)
        if seat.state is State.FRESH and seat.update is not None:
            if void:
                return Closing(client, round.number, False, void.code, void.why)
            if self.settings.memory.kind != "none":
                payload = seat.update.payload.prefix(self._parameters.__contains__)
                self.state.caches[client] = CachedUpdate(round.number, payload)
            return Closing(client, round.number, accepted=True)
        self.books.record(Row(round.number, client, "up", "fault", "fault", modelled=0))
        if self.books.first_charge(client):
            self.books.record(Row(round.number, client, "down", "model", "fault", modelled=self.dense_bytes))
        code, bridged = code_name(seat.fault), client in stood_in
        self.event("fault", client=client, code=code, detail=seat.detail, bridged=bridged)
        return Closing(client, round.number, False, seat.fault, seat.detail)

    def _validate(self) -> dict[str, float]:
        number, last = self.state.committed, self.state.committed >= self.settings.rounds
        due = number == 1 or number % self.settings.evaluate_every == 0 or last
        if self._evaluator is None or not due:
            return {}
        return dict(self._evaluator.validate(self.arrays()))

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Early stopping on validation accuracy."""
        if self.settings.patience is None or "accuracy" not in metrics:
            return
        notes = self.state.notes
        if metrics["accuracy"] > notes.get("best", -1.0):
            notes.update(best=metrics["accuracy"], best_round=self.state.committed, since_best=0)
        else:
            notes["since_best"] = notes.get("since_best", 0) + 1
            notes["stopped_early"] = notes["since_best"] >= self.settings.patience

    def _flush(self, row: Mapping[str, Any] | None = None) -> None:
        """With a row a round's commit, without one the end of this process."""
        rounds = [list(row.values())] if row else []
        lines, notes = self.books.drain(last=row is None)
        self.state.notes.update(notes)
        self._store.commit(
            self.state,
            rows={"bytes.csv": lines, "rounds.csv": rounds, "tensors.csv": self.books.drain_parts()},
            events=_drained(self._events),
            history=self.settings.history,
        )

    def flush(self) -> None:
        """Make rows and events that came after the last commit durable.

        What a broken-off round moved stays counted, but its convention's charges go: the round will be run
        again, and charged then.
        """
        if self._half_done:
            return  # a commit failed in the middle: what the disk holds is right, what memory holds is not
        self.books.waive()
        if self.books.open or self._events:
            self._flush()

    def close(self) -> None:
        """Let go of the run folder."""
        self._store.close()

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The global state by name, in its shapes; views."""
        views = self.schema.views(self.state.flat)
        return {t.name: v.reshape(t.shape) for t, v in zip(self.schema.tensors, views, strict=True)}

    def event(self, type: str, **fields: Any) -> None:
        """Append to events.jsonl with the next commit; the round is the open or coming one, from 1."""
        current = self.round  # as in `_current`
        number = current.number if current else self.next_round
        self._events.append({"time": round(time.time(), 3), "round": number + 1, "type": type, **fields})


def new_state(run: str, schema: Schema, flat: NDArray[np.uint8]) -> RunState:
    """The state of a run before its first round."""
    return RunState(run=run, schema_hash=schema.hash, committed=0, flat=flat)


TABLE_HEADERS = {"rounds.csv": ROUND_COLUMNS, "bytes.csv": COLUMNS, "tensors.csv": PART_COLUMNS}


def _drained(queue: deque[T]) -> list[T]:
    """Everything in a queue that other threads may be filling."""
    return [queue.popleft() for _ in range(len(queue))]


def _shown(round: int | None) -> int | None:
    return None if round is None else round + 1
