"""The client's side of the conversation, sans-IO: messages in, work to do out; results in, frames out."""

from __future__ import annotations

from dataclasses import dataclass

from fedreuse.client.held import Held
from fedreuse.client.results import LocalUpdate, Score
from fedreuse.client.settings import ClientPlan
from fedreuse.client.shelf import Shelf
from fedreuse.proto import PROTOCOL_VERSION, codec, modelled
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel, Ledger
from fedreuse.proto.codec import Payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Outgoing, chunk_frames
from fedreuse.proto.ledger import Row
from fedreuse.proto.packing import State, as_state
from fedreuse.proto.schema import Schema
from fedreuse.proto.transfers import open_body, transfer_header

SOFTWARE = "fedreuse 0.1.0"


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The server let us in."""

    welcome: pb.Welcome


@dataclass(frozen=True, slots=True)
class DoScore:
    round: int


@dataclass(frozen=True, slots=True)
class DoTrain:
    round: int


@dataclass(frozen=True, slots=True)
class Closed:
    round: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """The server ended the session."""

    code: pb.Code
    detail: str


class StaleModelError(Exception):
    """What changed cannot be applied to the model held here; the next session will get a whole one."""


Action = Welcomed | DoScore | DoTrain | Closed | Stop


class ClientSession:
    """One connection's conversation. What must outlive a connection is handed over by `resume_from`."""

    def __init__(self, client: int, ledger: Ledger, shelf: Shelf | None = None) -> None:
        self.client = client
        self._shelf = shelf or Shelf()
        self._ledger = ledger
        self.channel = Channel("client", client, ledger, self._modelled)
        self.number: int | None = None
        self.run = ""
        self.rounds = 0
        self.heartbeat_seconds = 10.0
        self.open_round: int | None = None
        self.model: tuple[int, Payload] | None = None
        """The newest model received and its round; kept after its round has closed, for changes to come."""
        self._schema: Schema | None = None
        self.plan: ClientPlan | None = None
        self._previous: ClientSession | None = None

    def go_on(self, schema: Schema, plan: ClientPlan, *, received: int, sent: int) -> None:
        """Be where this session was, some time after its welcome, between two rounds."""
        self._schema, self.plan = schema, plan
        self.channel.learn_schema(schema)
        self.channel.go_on(received=received, sent=sent)

    # -- out

    def join(
        self,
        examples: int,
        held: Held,
        instance: int,
        previous: ClientSession | None = None,
        counters: pb.Counters | None = None,
    ) -> Outgoing:
        """The first message.

        `previous` is the session that broke, if any; it still waits for its fate. `counters` are its
        connection's, as last read.
        """
        message = pb.Join(
            protocol_version=PROTOCOL_VERSION,
            client=self.client,
            examples=examples,
            instance=instance,
            run=held.run,
            held_round=held.current,
            staged_round=held.staged,
            software=SOFTWARE,
            previous_counters=counters,
            reports_counters=True,
        )
        self._previous = previous
        if previous is not None and previous.number is not None:
            message.previous_session = previous.number
            message.previous_received = previous.channel.received
            self.open_round, self.model = previous.open_round, previous.model
        if self.model is not None:
            message.model_round = self.model[0]
        return self.channel.send("join", message)

    def score_reply(self, round: int, score: Score) -> Outgoing:
        message = pb.ScoreReply(round=round, score=score.value, signature_round=score.signature_round)
        return self.channel.send("score_reply", message)

    def update(self, round: int, local: LocalUpdate, *, garbage: bool = False) -> Outgoing:
        """The update; as `garbage` (a planned fault) its body does not match its checksum."""
        body = local.sealed.body
        if garbage:
            body = bytes([body[0] ^ 0xFF]) + bytes(body[1:])
        message = pb.SparseUpdate(
            round=round,
            transfer=transfer_header(self.schema, local.sealed),
            steps=local.steps,
            train_loss=local.train_loss,
        )
        chunks = chunk_frames("client", body)
        return self.channel.send("update", message, chunks=chunks, body=local.sealed.nbytes)

    def failed(self, round: int, code: pb.Code, detail: str) -> Outgoing:
        """Report that this client cannot do its part in a round."""
        return self.channel.send("abort", pb.Abort(code=code, detail=detail[:500], round=round))

    def heartbeat(self, counters: pb.Counters | None = None) -> Outgoing:
        return self.channel.send("heartbeat", pb.Heartbeat(), counters=counters)

    # -- in

    def feed(self, frame: bytes) -> list[Action]:
        """One frame from the server. Raises ProtocolError or StaleModelError if the session cannot go on."""
        whole = self.channel.feed(frame)
        if whole is None:
            return []
        incoming, row = whole
        self._ledger.write(row)
        return self._understand(incoming)

    def _understand(self, incoming: Incoming) -> list[Action]:
        message = incoming.message
        match incoming.kind:
            case "welcome":
                return [self._welcome(message)]
            case "model":
                self._receive_model(message, incoming.payload)
            case "score_request":
                return [DoScore(self._expect_model(message.round))]
            case "train_order":
                return [DoTrain(self._expect_model(message.round))]
            case "reuse_notice":
                charge = modelled.REUSE_EVENT_BYTES
                row = Row(message.round, self.client, "up", "reuse", modelled=charge)
                self._ledger.count(row)
                self._ledger.write(row)
            case "round_closed":
                if self.open_round == message.round:
                    self.open_round = None
                return [Closed(message.round, message.accepted)]
            case "abort":
                return [Stop(message.code, message.detail)]
        return []

    def _receive_model(self, message: pb.ModelBroadcast, received: Payload | None) -> None:
        assert received is not None
        tensors = self.schema.tensors
        codec.require(received.blocks, self.schema, lambda index: tensors[index].size, self.schema.travelling)
        transfer = message.transfer
        content = transfer.checksum if transfer.coding == pb.PLAIN else transfer.content
        try:
            payload = self._shelf.take(
                content, lambda: open_body(self.schema, transfer, received, self._base)
            )
        except ProtocolError as error:
            if transfer.coding != pb.CHANGE:
                raise
            self.open_round = self.model = None
            raise StaleModelError(str(error)) from None
        self.open_round, self.model = message.round, (message.round, payload)

    def _base(self, round: int) -> State | None:
        return as_state(self.model[1].body) if self.model is not None and self.model[0] == round else None

    def _welcome(self, message: pb.Welcome) -> Action:
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                pb.VERSION_MISMATCH,
                f"this client speaks protocol version {PROTOCOL_VERSION}, the server version "
                f"{message.protocol_version}",
            )
        self._schema = Schema.from_proto(message.schema)
        self.plan = ClientPlan.from_proto(message.plan)
        self.channel.learn_schema(self._schema)
        self.number, self.run, self.rounds = message.session, message.run, message.rounds
        self.heartbeat_seconds = max(0.05, message.heartbeat_seconds)
        if self._previous is not None:
            if self._previous.run != message.run:
                self.open_round = self.model = None
            known = message.previous_received if message.HasField("previous_received") else None
            self._previous.channel.settle(known)
            self._previous = None
        return Welcomed(message)

    @property
    def weights(self) -> Payload | None:
        """The model of the open round, if there is one."""
        return self.model[1] if self.model is not None and self.model[0] == self.open_round else None

    @property
    def schema(self) -> Schema:
        assert self._schema is not None
        return self._schema

    def _expect_model(self, round: int) -> int:
        if self.open_round != round:
            raise ProtocolError(pb.WRONG_ROUND, f"an order for round {round} without its model")
        return round

    def _modelled(self, kind: str, _round: int) -> int:
        if kind not in ("update", "model") or self._schema is None or self.plan is None:
            return 0
        tensors = [(t.size, t.width) for t in self._schema.tensors]
        if kind == "model":
            return modelled.dense_bytes(tensors)
        return modelled.update_bytes(tensors, self.plan.compressor.keep_ratio)
