"""One round as a sans-IO state machine: events in, commands out.

It opens no socket, reads no clock and draws no random number; a gRPC service, a simulator and a replay
drive the same object. Decisions depend on what was said, never on the order in which it arrived. (A client
that fails after its score and before the last one is the exception: when it was lost is part of what happened.)

    selected client
      absent ................................ FAULT
      no gate, no cache, or cache too old .... TRAINING -> FRESH
      otherwise, gate "score" ................ SCORING -> TRAINING (D >= tau) or UNDECIDED
      otherwise, gate "age" .................. UNDECIDED
    once nobody is SCORING: the quota promotes UNDECIDED clients to TRAINING, the rest are REUSED
    a failure while SCORING, UNDECIDED or TRAINING .. FAULT
    once nobody is SCORING, UNDECIDED or TRAINING ... the round is complete

A client in FAULT contributes its cached update if the cache's age allows it, otherwise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError, code_name
from fedreuse.server.gate import GateSettings, promotion_order
from fedreuse.server.memory import MemorySettings

U = TypeVar("U")


class State(Enum):
    SCORING = "scoring"
    UNDECIDED = "undecided"
    TRAINING = "training"
    FRESH = "fresh"
    REUSED = "reused"
    FAULT = "fault"


PENDING = frozenset({State.SCORING, State.UNDECIDED, State.TRAINING})


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SendModel:
    client: int


@dataclass(frozen=True, slots=True)
class AskScore:
    client: int


@dataclass(frozen=True, slots=True)
class Train:
    client: int
    cause: pb.Cause


@dataclass(frozen=True, slots=True)
class Reuse:
    """The cached update of `source_round` stands in, scaled by `factor`."""

    client: int
    source_round: int
    age: int
    factor: float


Command = SendModel | AskScore | Train | Reuse


# ---------------------------------------------------------------- the machine


@dataclass(slots=True)
class Seat(Generic[U]):
    """What the round knows of one selected client."""

    state: State
    cache_round: int | None
    cause: pb.Cause = pb.CAUSE_UNSPECIFIED
    score: float | None = None
    update: U | None = None
    fault: pb.Code = pb.CODE_UNSPECIFIED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Contribution(Generic[U]):
    """What enters the aggregate for one client: a fresh update, or its cached one scaled by `factor`."""

    client: int
    update: U | None
    factor: float = 1.0


@dataclass
class Round(Generic[U]):
    """Round `number` (from 0) over `cohort`, the selected clients in ascending order.

    `caches` gives the round of each selected client's valid cached update, where it has one; `absent` are
    the selected clients that are not connected. `U` is whatever an update is to the caller.
    """

    number: int
    cohort: Sequence[int]
    gate: GateSettings
    memory: MemorySettings
    caches: Mapping[int, int]
    absent: frozenset[int] = frozenset()
    minimum: int = 1
    seats: dict[int, Seat[U]] = field(init=False, default_factory=dict)

    @property
    def threshold(self) -> float:
        return self.gate.threshold(self.number)

    def age(self, client: int) -> int | None:
        """a_i = t - r_i."""
        at = self.seats[client].cache_round
        return None if at is None else self.number - at

    # -- events

    def start(self) -> list[Command]:
        """Open the round."""
        commands: list[Command] = []
        for client in self.cohort:
            seat = self.seats[client] = Seat[U](State.UNDECIDED, self.caches.get(client))
            if client in self.absent:
                self._fault(seat, pb.ABSENT, "not connected when the round began")
                continue
            commands.append(SendModel(client))
            commands += self._first_decision(client, seat)
        return commands + self._apply_quota()

    def score(self, client: int, round: int, value: float, signature_round: int | None) -> list[Command]:
        """A client's discrepancy D, compared with the signature of `signature_round`.

        Raises ProtocolError if it was not asked for or makes no sense; the state is then unchanged.
        """
        seat = self._expect(client, round)
        asked_for_study = seat.cause == pb.AGE and self.gate.kind == "score" and self.gate.score_all
        if seat.score is not None:
            raise ProtocolError(pb.DUPLICATE, f"client {client} already sent its score of round {round}")
        if seat.state is not State.SCORING and not asked_for_study:
            raise ProtocolError(pb.UNEXPECTED, f"client {client} was not asked for a score in round {round}")
        if not (math.isfinite(value) and 0 <= value <= 2):
            raise ProtocolError(pb.NOT_FINITE, f"client {client} sent score {value}; D lies in [0, 2]")
        if asked_for_study:
            seat.score = value if signature_round == seat.cache_round else None
            return []
        if signature_round != seat.cache_round:
            # Its state and our cache do not belong together: cacheless, with nothing to fall back on.
            seat.cache_round = None
            return [self._train(client, seat, pb.CACHELESS), *self._apply_quota()]
        seat.score = value
        if value >= self.threshold:
            return [self._train(client, seat, pb.THRESHOLD), *self._apply_quota()]
        seat.state = State.UNDECIDED
        return self._apply_quota()

    def update(self, client: int, round: int, update: U) -> None:
        """A client's verified update. Raises ProtocolError, without effect, if it may not send one now."""
        self.may_update(client, round)
        seat = self.seats[client]
        seat.state, seat.update = State.FRESH, update

    def may_update(self, client: int, round: int) -> None:
        """Raise ProtocolError unless this client is due to send its update of this round."""
        seat = self._expect(client, round)
        if seat.state is State.FRESH:
            raise ProtocolError(pb.DUPLICATE, f"client {client} already sent its update of round {round}")
        if seat.state is not State.TRAINING:
            raise ProtocolError(pb.UNEXPECTED, f"client {client} was not told to train in round {round}")

    def fail(self, client: int, code: pb.Code, detail: str) -> list[Command]:
        """A pending client cannot or may not go on; its cached update stands in where its age allows."""
        seat = self.seats.get(client)
        if seat is None or seat.state not in PENDING:
            return []
        self._fault(seat, code, detail)
        return self._apply_quota()

    def deadline(self) -> list[Command]:
        """Time is up: who still owes a score or an update is given up; who only waited is reused.

        The quota promotes nobody any more: there is no time left to train.
        """
        for seat in self.seats.values():
            if seat.state in (State.SCORING, State.TRAINING):
                self._fault(seat, pb.TIMEOUT, f"no answer before the deadline ({seat.state.value})")
        undecided = [client for client, seat in self.seats.items() if seat.state is State.UNDECIDED]
        return [self._reuse(client, self.seats[client]) for client in undecided]

    # -- outcome

    @property
    def complete(self) -> bool:
        return all(seat.state not in PENDING for seat in self.seats.values())

    def contributions(self) -> list[Contribution[U]]:
        """What is aggregated, in ascending client order; empty if below the minimum (the round is void)."""
        found = [c for client in self.cohort if (c := self._contribution(client)) is not None]
        return found if len(found) >= self.minimum else []

    def pending(self) -> list[int]:
        return [client for client, seat in self.seats.items() if seat.state in PENDING]

    # -- rules

    def _first_decision(self, client: int, seat: Seat[U]) -> Iterable[Command]:
        age = self.age(client)
        if self.gate.kind == "none":
            return [self._train(client, seat, pb.ALWAYS)]
        if age is None:
            return [self._train(client, seat, pb.CACHELESS)]
        if not self.memory.usable(age):
            ask = [AskScore(client)] if self.gate.kind == "score" and self.gate.score_all else []
            return [*ask, self._train(client, seat, pb.AGE)]
        if self.gate.kind == "score":
            seat.state = State.SCORING
            return [AskScore(client)]
        return []

    def _apply_quota(self) -> list[Command]:
        """Once all scores are known: promote up to the quota, let the rest be reused."""
        if any(seat.state is State.SCORING for seat in self.seats.values()):
            return []
        undecided = {c: s for c, s in self.seats.items() if s.state is State.UNDECIDED}
        # Everybody who was told to train counts as active, also one that failed since.
        active = sum(seat.cause != pb.CAUSE_UNSPECIFIED for seat in self.seats.values())
        missing = max(0, self.gate.minimum_fresh(len(self.cohort)) - active)
        order = promotion_order((c, s.score or 0.0, s.cache_round or 0) for c, s in undecided.items())
        commands: list[Command] = [self._train(c, undecided[c], pb.QUOTA) for c in order[:missing]]
        return commands + [self._reuse(c, undecided[c]) for c in sorted(order[missing:])]

    def _train(self, client: int, seat: Seat[U], cause: pb.Cause) -> Train:
        seat.state, seat.cause = State.TRAINING, cause
        return Train(client, cause)

    def _reuse(self, client: int, seat: Seat[U]) -> Reuse:
        seat.state = State.REUSED
        assert seat.cache_round is not None
        age = self.number - seat.cache_round
        return Reuse(client, seat.cache_round, age, self.memory.factor(age))

    def _fault(self, seat: Seat[U], code: pb.Code, detail: str) -> None:
        seat.state, seat.fault, seat.detail = State.FAULT, code, detail

    def _contribution(self, client: int) -> Contribution[U] | None:
        seat = self.seats[client]
        if seat.state is State.FRESH:
            return Contribution(client, seat.update)
        age = self.age(client)
        if self.memory.kind == "none" or age is None or not self.memory.usable(age):
            return None
        return Contribution(client, None, self.memory.factor(age))

    def _expect(self, client: int, round: int) -> Seat[U]:
        seat = self.seats.get(client)
        if round != self.number:
            code = pb.LATE if round < self.number else pb.WRONG_ROUND
            raise ProtocolError(code, f"client {client} speaks of round {round}, this is round {self.number}")
        if seat is None:
            raise ProtocolError(pb.UNEXPECTED, f"client {client} was not selected in round {round}")
        if seat.state is State.FAULT:
            raise ProtocolError(
                pb.LATE,
                f"client {client} was given up in round {round}: {code_name(seat.fault)}, {seat.detail}",
            )
        return seat
