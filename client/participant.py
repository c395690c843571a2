"""One client's part in a federation, without any network: score, train, remember.

The agent (over gRPC) and the simulator drive the same object.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedreuse.client.held import Held, HeldStore
from fedreuse.client.proxy import Signature, discrepancy, head_gradient, refreshed
from fedreuse.client.results import Learned, LocalUpdate, Score
from fedreuse.client.settings import ClientPlan
from fedreuse.client.task import Task
from fedreuse.client.trainer import Trained, train
from fedreuse.client.workbench import Workbench
from fedreuse.proto import modelled
from fedreuse.proto.codec import Payload, encode
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.packing import as_state
from fedreuse.proto.schema import PARAMETER, Schema
from fedreuse.proto.streams import Purpose
from fedreuse.proto.transfers import plain, seal

SIGNATURE = "signature"


class Participant:
    """Client `client` of a task. `examples` is n_i."""

    def __init__(self, client: int, task: Task, bench: Workbench, held: HeldStore) -> None:
        self.client = client
        self._task, self._bench, self._held = task, bench, held
        self._data = task.client_data(client)
        self.examples = len(self._data)  # type: ignore[arg-type]

    @property
    def versions(self) -> Held:
        return self._held.versions(self.client)

    def welcome(
        self, run: str, schema: Schema, plan: ClientPlan, confirmed: int | None, pending: int | None = None
    ) -> None:
        """Enter run `run`; the server holds this client's update of round `confirmed`.

        `pending` is the open round if an update of this client is due in it or has arrived.
        """
        self.enter(run, schema, plan)
        self._held.settle(self.client, run, confirmed, pending)

    def enter(self, run: str, schema: Schema, plan: ClientPlan) -> None:
        """Get ready to work for a run, leaving held state as it is."""
        self._run, self._schema, self._plan = run, schema, plan
        self._bench.prepare(schema, plan)

    def score(self, round: int, weights: Payload) -> Score:
        """The proxy discrepancy at the round's global weights."""
        held = self._held.versions(self.client)
        tensors = self._held.current(self.client)
        if tensors is None or held.run != self._run or self._plan.proxy is None:
            return Score(1.0, None)
        proxy = self._proxy(Purpose.PROXY_GATE, round, weights)
        return Score(discrepancy(proxy, tensors[SIGNATURE]), held.current)

    def train(self, round: int, weights: Payload) -> LocalUpdate:
        """As `learn`, and code the update for the wire."""
        return self.coded(self.learn(round, weights), round, weights)

    def coded(self, learned: Learned, round: int, weights: Payload) -> LocalUpdate:
        """What was learned from the round's weights, coded for the wire."""
        base = round, as_state(weights.body)
        sealed = seal(self._schema, learned.payload, base) if self._plan.pack else plain(learned.payload)
        return LocalUpdate(sealed, learned.steps, learned.train_loss)

    def learn(self, round: int, weights: Payload) -> Learned:
        """Train, compress, and stage the new signature. Raises ProtocolError NOT_FINITE if it diverged."""
        self._bench.load(weights)
        trained = train(
            self._task, self._bench.model, self._data, self._plan, self.client, round, self._bench.device
        )
        return self._conclude(trained, round, weights)

    def _conclude(self, trained: Trained, round: int, weights: Payload) -> Learned:
        """Compress what the model has become, and stage the new signature."""
        payload = encode(self._schema, self._bench.delta(weights), self._kept)
        if self._plan.proxy is not None:
            refresh = self._proxy(Purpose.PROXY_REFRESH, round, weights)
            tensors = self._held.current(self.client)
            old = tensors[SIGNATURE] if tensors is not None else None
            signature = refreshed(old, refresh, self._plan.proxy.keep)
            self._held.stage(self.client, self._run, round, {SIGNATURE: signature})
        return Learned(payload, trained.steps, trained.loss)

    @staticmethod
    def learn_together(
        participants: Sequence[Participant], round: int, weights: Payload
    ) -> list[Learned | ProtocolError]:
        """As `learn` for each of several that share a model, within float tolerance: what it returns or raises."""
        from fedreuse.client.together import train_together  # torch.func, not loaded by those who do without

        first = participants[0]
        bench = first._bench
        bench.load(weights)
        work = [(each.client, each._data) for each in participants]
        results: list[Learned | ProtocolError] = []
        found = train_together(first._task, bench.model, first._plan, round, bench.device, work)
        for each, (trained, parameters) in zip(participants, found, strict=True):
            bench.put(parameters)
            try:
                results.append(each._conclude(trained, round, weights))
            except ProtocolError as error:
                results.append(error)
        return results

    def closed(self, round: int, accepted: bool) -> None:
        """The server closed `round`; `accepted` says whether this client's fresh update counted."""
        held = self._held.versions(self.client)
        if held.staged is not None:
            self._held.settle(self.client, self._run, round if accepted else held.current)

    def forget(self) -> None:
        """Lose all held state, as a client whose disk is gone."""
        self._held.forget(self.client)

    def _proxy(self, purpose: Purpose, round: int, weights: Payload) -> Signature:
        self._bench.load(weights)
        return head_gradient(
            self._task,
            self._bench.model,
            self._data,
            self._plan,
            purpose,
            self.client,
            round,
            self._bench.device,
        )

    def _kept(self, index: int) -> int:
        spec = self._schema.tensors[index]
        if spec.kind != PARAMETER:
            return spec.size
        return modelled.kept(spec.size, self._plan.compressor.keep_ratio)
