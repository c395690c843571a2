"""The in-process body of a federation: virtual clients, the same brain, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from fedreuse.client.held import HeldStore
from fedreuse.client.results import Learned, LocalUpdate, Score, failure
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import HARMLESS, ProtocolError
from fedreuse.proto.faults import Fault, FaultPlan, Phase
from fedreuse.server.federation import Federation
from fedreuse.server.outcome import Closing
from fedreuse.server.round import AskScore, Command, Reuse, SendModel, State, Train
from fedreuse.sim.links import Link
from fedreuse.sim.pool import Pool

_FAULT_CODES = {
    "crash": (pb.ABSENT, "the connection broke (planned fault)"),
    "wipe": (pb.ABSENT, "the connection broke (planned fault)"),
    "stall": (pb.TIMEOUT, "no answer before the deadline (planned fault)"),
    "error": (pb.CLIENT_FAILED, "planned fault"),
}


class Engine:
    """Runs rounds until the federation is finished. Clients join when they are first selected.

    `order` may reorder work that is ready at the same moment; results must not depend on it.
    """

    def __init__(
        self,
        federation: Federation,
        pool: Pool,
        held: HeldStore,
        link: Link,
        faults: Iterable[Fault] = (),
        *,
        order: Callable[[list[Future[Any]]], list[Future[Any]]] = lambda ready: ready,
    ) -> None:
        self._federation, self._pool, self._held, self._link = federation, pool, held, link
        planned = tuple(faults)
        self._faults, self._order = FaultPlan(planned), order
        self._deaths = [fault for fault in planned if fault.dies]
        self._joined: set[int] = set()
        self._work: dict[Future[Any], tuple[int, str]] = {}

    def run(self, committed: Callable[[dict[str, Any]], None] = lambda _row: None) -> None:
        """All remaining rounds; `committed` is called with each new row of rounds.csv."""
        if self._federation.finished:
            return
        self._wipe()
        while not self._federation.finished:
            self._round()
            committed(self._federation.latest)
        self._link.finish()

    def _away(self, round: int) -> set[int]:
        """Who died in an earlier round and is not back yet; by plan, whether or not the phase ever came."""
        return {fault.client for fault in self._deaths if fault.round - 1 < round < fault.returns - 1}

    def _wipe(self) -> None:
        """Forget the disks lost in the last committed round; not before, and again if a kill came between."""
        for client in self._federation.state.notes.get("wiped", ()):
            self._held.forget(client)

    def _join(self, client: int) -> None:
        if client in self._joined:
            return
        examples, held = self._pool.submit("look", client).result()
        confirmed = self._link.join(client, examples, held)
        self._held.settle(client, self._federation.state.run, confirmed)
        self._joined.add(client)

    def _round(self) -> None:
        federation, number = self._federation, self._federation.next_round
        away = self._away(number)
        federation.state.notes.pop("wiped", None)
        with self._held.together():
            for client in federation.cohort(number):
                if client not in away:
                    self._join(client)
        self._link.open_round(number)
        with self._held.together():  # what this process's clients stage must last only from the commit on
            self._carry_out(federation.open_round(away))
            while self._work:
                self._pool.settle()
                done, _ = wait(self._work, return_when=FIRST_COMPLETED)
                for future in self._order(sorted(done, key=lambda f: self._work[f])):
                    self._carry_out(self._result(self._work.pop(future)[0], future))
        closings = federation.commit()
        with self._held.together():
            for closing in closings:
                self._close(closing)
        self._wipe()

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            client = command.client
            if self._given_up(client):
                continue
            if isinstance(command, SendModel):
                self._link.send_model(client)
                continue
            self._link.order(client, command)
            if isinstance(command, Reuse):
                continue
            phase = self._phase(command)
            fault = self._faults.at(self._federation.next_round, client, phase)
            if fault is not None:
                self._carry_out(self._play(fault))
            else:
                run = self._federation.state.run
                method = self._link.training if phase == "train" else phase
                future = self._pool.submit(method, run, client, self._federation.next_round)
                self._work[future] = client, phase

    def _given_up(self, client: int) -> bool:
        """True once a client failed in this round; what it was asked for before is moot."""
        round = self._federation.round
        return round is not None and round.seats[client].state is State.FAULT

    @staticmethod
    def _phase(command: AskScore | Train) -> Phase:
        return "score" if isinstance(command, AskScore) else "train"

    def _result(self, client: int, future: Future[Any]) -> list[Command]:
        """What a finished piece of work means for the round."""
        federation = self._federation
        try:
            result: Score | Learned | LocalUpdate = future.result()
        except Exception as error:
            if not isinstance(error, ProtocolError):
                raise  # a bug in the task or in us, not a client's misfortune
            code, detail = failure(error)
            self._link.failed(client, code, detail)
            return federation.fail(client, code, detail)
        if isinstance(result, Score):
            try:
                return federation.score(client, self._link.score(client, result))
            except ProtocolError as error:
                return [] if error.code in HARMLESS else federation.fail(client, error.code, error.detail)
        fault = self._faults.at(federation.next_round, client, "upload")
        if fault is not None and fault.kind != "garbage":
            return self._play(fault)
        try:
            message, payload, row = self._link.update(client, result, garbage=fault is not None)
            federation.accept(client, message, payload, row)
        except ProtocolError as error:
            return federation.fail(client, error.code, error.detail)
        return []

    def _play(self, fault: Fault) -> list[Command]:
        if fault.dies:
            self._link.drop(fault.client)
            self._joined.discard(fault.client)
            if fault.kind == "wipe":
                self._federation.state.notes.setdefault("wiped", []).append(fault.client)
        code, detail = _FAULT_CODES[fault.kind]
        if fault.kind == "error":
            self._link.failed(fault.client, code, detail)
        return self._federation.fail(fault.client, code, detail)

    def _close(self, closing: Closing) -> None:
        self._link.close(closing)
        held = self._held.versions(closing.client)
        if held.staged is not None and closing.client in self._joined:
            confirmed = closing.round if closing.accepted else held.current
            self._held.settle(closing.client, self._federation.state.run, confirmed)
