"""Models as changes over the wire: who gets what changed since which round, and what heals if it does not fit."""

from __future__ import annotations

import asyncio
import csv
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import wire
from support import Ledger
from test_agent import Stub
from wire import QUICK, SCHEMA, NotebookLedger, RawClient, serving

from fedreuse.client import session
from fedreuse.client.agent import Agent
from fedreuse.client.held import Held
from fedreuse.client.session import ClientSession, DoTrain, StaleModelError
from fedreuse.client.settings import ClientPlan
from fedreuse.client.shelf import Shelf
from fedreuse.proto import PROTOCOL_VERSION, codec, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import chunk_frames
from fedreuse.proto.schema import FLOAT_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.server import sessions

DENSE = 4 * (20 + 5)
START = {
    "weight": np.arange(20, dtype=np.float32).reshape(4, 5) + np.float32(0.1),
    "mean": np.full(5, 0.3, np.float32),
    "steps": np.array(7),
}


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 0.5)


class Follower:
    """A raw client that keeps every model it was ever sent and opens the next against them."""

    def __init__(self, client: RawClient, models: dict[int, np.ndarray] | None = None) -> None:
        self.client = client
        self.models = {} if models is None else models
        self.forms: list[tuple[int, int, int | None]] = []
        """Round, coding and base of each."""

    async def model(self, running: Any) -> np.ndarray:
        """The next model, compared with the server's own."""
        incoming = await self.client.hear("model")
        round, header = incoming.message.round, incoming.message.transfer
        payload = transfers.open_body(SCHEMA, header, incoming.payload, self.models.get)
        self.forms.append((round, header.coding, header.base if header.HasField("base") else None))
        assert bytes(payload.body) == running.federation.versions.get(round)[:DENSE].tobytes()
        self.models[round] = np.frombuffer(bytes(payload.body), np.uint8)
        return self.models[round]

    async def work(self, running: Any, rounds: int) -> None:
        """Take part in some rounds, with another update each."""
        for _ in range(rounds):
            await self.model(running)
            order = await self.client.hear("train_order")
            await self.client.update(order.message.round, value=0.01 * (order.message.round + 1))
            await self.client.hear("round_closed")


async def join(follower: Follower, index: int, **fields: Any) -> pb.Welcome:
    welcome = await follower.client.join(index, **fields)
    assert isinstance(welcome, pb.Welcome)
    return welcome


# ---------------------------------------------------------------- the usual way


async def test_a_client_that_stays_gets_the_first_model_whole_and_then_what_changed(tmp_path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=4, zeros=START) as running,
        running.client() as client,
    ):
        follower = Follower(client)
        await join(follower, 0)
        await follower.work(running, 4)
    assert follower.forms[0][1:] in ((pb.PLAIN, None), (pb.PACKED, None))
    assert follower.forms[1:] == [(n, pb.CHANGE, n - 1) for n in (1, 2, 3)]
    # Four of 20 weights (equal values: the first four) and five means moved, all others are the same.
    same = follower.models[3][16:80]
    assert same.tobytes() == START["weight"].tobytes()[16:]
    with (tmp_path / "bytes.csv").open(newline="") as handle:
        how = [row["how"] for row in csv.DictReader(handle) if row["kind"] == "model"]
    assert how[0] in ("plain", "packed")
    assert how[1:] == [f"change since the model of round {n}" for n in (1, 2, 3)]  # files count from 1


async def test_what_is_not_packed_travels_plain_and_whole(tmp_path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=3, zeros=START, pack=False) as running,
        running.client() as client,
    ):
        follower = Follower(client)
        await join(follower, 0)
        await follower.work(running, 3)
    assert follower.forms == [(n, pb.PLAIN, None) for n in range(3)]


async def test_without_history_every_model_is_whole(tmp_path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=3, zeros=START, history=0) as running,
        running.client() as client,
    ):
        follower = Follower(client)
        await join(follower, 0)
        await follower.work(running, 3)
    assert [base for _, _, base in follower.forms] == [None] * 3
    assert pb.CHANGE not in {coding for _, coding, _ in follower.forms}


async def test_a_round_without_effect_changes_nothing_and_costs_next_to_nothing(tmp_path) -> None:
    settings = QUICK.model_copy(update={"round_deadline": 0.3})
    async with (
        serving(tmp_path, clients=1, rounds=2, zeros=START, minimum=1, settings=settings) as running,
        running.client() as client,
    ):
        follower = Follower(client)
        await join(follower, 0)
        first = await follower.model(running)
        await client.hear("round_closed")  # it never answered
        incoming = await client.hear("model")
        # Two sections of five bytes: none stored, no gaps, no steps.
        assert bytes(incoming.payload.body) == bytes.fromhex("00 02 00 04 00") * 2
        base = incoming.message.transfer.base
        assert (incoming.message.transfer.coding, base) == (pb.CHANGE, 0)
        payload = transfers.open_body(
            SCHEMA, incoming.message.transfer, incoming.payload, follower.models.get
        )
        assert bytes(payload.body) == first.tobytes()


# ---------------------------------------------------------------- coming back


@pytest.mark.parametrize(
    ("history", "form"),
    [(4, (pb.CHANGE, 0)), (16, (pb.CHANGE, 0)), (3, None), (1, None)],
)
async def test_a_client_that_was_away_gets_a_change_only_if_its_model_is_still_known(
    tmp_path, history: int, form: tuple[int, int] | None
) -> None:
    """It leaves after round 0 and is back for round 4: four rounds behind."""
    settings = QUICK.model_copy(update={"rejoin_grace": 0.0})
    async with (
        serving(tmp_path, clients=2, rounds=6, zeros=START, settings=settings, history=history) as running,
        running.client() as steady,
    ):
        stays, leaves = Follower(steady), Follower(running.client())
        await join(stays, 0)
        welcome = await join(leaves, 1)
        await asyncio.gather(stays.work(running, 1), leaves.work(running, 1))
        await leaves.client.close()
        await stays.work(running, 2)
        await stays.model(running)  # round 3 is open, and the other is not in it
        await steady.hear("train_order")
        async with running.client() as again:
            back = Follower(again, leaves.models)
            await join(back, 1, run=welcome.run, model_round=0)
            await steady.update(3, value=0.5)
            await steady.hear("round_closed")
            await asyncio.gather(stays.work(running, 2), back.work(running, 2))
    round, *first = back.forms[0]
    assert round == 4
    assert tuple(first) == form if form else (first[0] != pb.CHANGE and first[1] is None)
    assert back.forms[1] == (5, pb.CHANGE, 4)
    assert stays.forms[1:] == [(n, pb.CHANGE, n - 1) for n in range(1, 6)]


CLAIMS: dict[str, tuple[dict[str, int], tuple[int, int | None] | None]] = {
    "the model before": ({"model_round": 1}, (pb.CHANGE, 1)),
    "an older one": ({"model_round": 0}, (pb.CHANGE, 0)),
    "the open round's": ({"model_round": 2}, None),
    "nothing": ({}, (pb.PLAIN, None)),
    "a model that is not yet": ({"model_round": 3}, (pb.PLAIN, None)),
    "a model that can never be": ({"model_round": 2**32 - 1}, (pb.PLAIN, None)),
}


@pytest.mark.parametrize("claim", CLAIMS)
async def test_after_a_reconnect_the_change_starts_from_what_the_client_says_it_holds(
    tmp_path, claim: str
) -> None:
    fields, form = CLAIMS[claim]
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=3, zeros=START, settings=settings) as running:
        first = Follower(running.client())
        welcome = await join(first, 0)
        await first.work(running, 2)
        await first.client.hear("model")  # round 2 is open; this copy is lost
        await first.client.close()
        async with running.client() as again:
            second = Follower(again, first.models)
            await join(second, 0, run=welcome.run, previous_session=welcome.session, **fields)
            if form is None:
                assert (await again.hear()).kind == "train_order"
            else:
                await second.model(running)
                coding, base = second.forms[0][1:]
                # These weights may also be sent whole in packed form.
                assert (coding if coding == pb.CHANGE else pb.PLAIN, base) == form
                await again.hear("train_order")
            await second.client.update(2)
            await again.hear("round_closed")
    assert running.federation.latest["fresh"] == 1


async def test_what_is_held_of_another_run_is_no_base(tmp_path) -> None:
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=2, zeros=START, settings=settings) as running:
        first = Follower(running.client())
        await join(first, 0)
        await first.work(running, 1)
        await first.client.hear("train_order")
        await first.client.close()
        async with running.client() as again:
            second = Follower(again)
            await join(second, 0, run="f" * 16, model_round=0)
            await second.model(running)
    assert second.forms[0][2] is None


async def test_a_restarted_server_still_knows_the_models_before(tmp_path) -> None:
    models: dict[int, np.ndarray] = {}
    async with serving(tmp_path, clients=1, rounds=6, zeros=START, history=2) as running:
        first = Follower(running.client(), models)
        welcome = await join(first, 0)
        await first.work(running, 4)
        await first.client.close()
    for claim, base in ((2, 2), (1, None)):
        async with serving(tmp_path, clients=1, rounds=6, history=2) as running:
            committed = running.federation.next_round
            assert committed == 4
            async with running.client() as client:
                follower = Follower(client, dict(models))
                await join(follower, 0, run=welcome.run, model_round=claim)
                await follower.model(running)
        assert follower.forms[0][2] == base


# ---------------------------------------------------------------- updates against a base

LAYER = Schema.of(
    [TensorSpec("weight", "float32", (40, 30), PARAMETER), TensorSpec("mean", "float32", (30,), FLOAT_BUFFER)]
)
RNG = np.random.default_rng(1)
LAYER_START = {
    "weight": RNG.normal(0, 0.05, (40, 30)).astype(np.float32),
    "mean": RNG.normal(0, 0.05, 30).astype(np.float32),
}


@pytest.fixture
def a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is worth packing."""
    monkeypatch.setattr(wire, "SCHEMA", LAYER)


def layer_update(round: int, flat: np.ndarray, *, pack: bool = True) -> tuple[pb.SparseUpdate, bytes]:
    """The update after every weight has grown by a thousandth, 240 of 1200 kept."""
    arrays = {i: w * np.float32(1.001) - w for i, w in enumerate(LAYER.views(flat))}
    payload = codec.encode(LAYER, arrays, [240, 30].__getitem__)
    sealed = transfers.seal(LAYER, payload, (round, flat)) if pack else transfers.plain(payload)
    assert sealed.coding == (pb.PACKED if pack else pb.PLAIN)
    transfer = transfers.transfer_header(LAYER, sealed)
    return pb.SparseUpdate(round=round, transfer=transfer, steps=1, train_loss=0.5), bytes(sealed.body)


@pytest.mark.usefixtures("a_layer")
async def test_an_update_against_the_rounds_model_counts_like_a_plain_one(tmp_path) -> None:
    finals, sizes = [], []
    for pack in (False, True):
        folder = tmp_path / str(pack)
        async with (
            serving(folder, clients=1, rounds=3, zeros=LAYER_START) as running,
            running.client() as client,
        ):
            await client.join(0)
            for round in range(3):
                assert (await client.hear("train_order")).message.round == round
                message, body = layer_update(round, running.federation.versions.get(round), pack=pack)
                await client.say("update", message, body)
                assert (await client.hear("round_closed")).message.accepted
                sizes.append(len(body))
            finals.append(running.federation.state.flat.tobytes())
    assert finals[0] == finals[1]
    assert finals[0] != LAYER.flatten(LAYER_START).tobytes()
    # A thousandth spares ten mantissa bits of 32; plain are 150 bytes of bitmap, 240 and 30 values.
    assert sizes[:3] == [150 + 4 * 270] * 3
    assert max(sizes[3:]) < 0.8 * sizes[0]


REFUSED: dict[str, tuple[dict[str, int], int]] = {
    "an older model": ({"base": 0}, pb.UNKNOWN_BASE),
    "a model to come": ({"base": 2}, pb.UNKNOWN_BASE),
    "a change": ({"coding": pb.CHANGE}, pb.WRONG_CONTENT),
    "another content": ({"content": 1}, pb.CHECKSUM),
    "another body": ({"checksum": 1}, pb.CHECKSUM),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("a_layer")
async def test_an_update_against_anything_else_is_refused_and_gives_up_its_seat(tmp_path, case: str) -> None:
    spoil, code = REFUSED[case]
    async with (
        serving(tmp_path, clients=1, rounds=3, zeros=LAYER_START) as running,
        running.client() as client,
    ):
        await client.join(0)
        for round in range(2):
            await client.hear("train_order")
            message, body = layer_update(round, running.federation.versions.get(round))
            if round == 1:
                for name, value in spoil.items():
                    setattr(message.transfer, name, value)
            await client.say("update", message, body)
            if round == 1:
                assert (await client.hear("abort")).message.code == code
            closed = (await client.hear("round_closed")).message
        assert (closed.round, closed.accepted, closed.code) == (1, False, code)
        # The session goes on; nothing was added to the model.
        assert (await client.hear("train_order")).message.round == 2
        first, second, third = (running.federation.versions.get(n).tobytes() for n in range(3))
        assert first != second == third


@pytest.mark.usefixtures("a_layer")
async def test_an_update_packed_against_no_base_is_accepted(tmp_path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=1, zeros=LAYER_START) as running,
        running.client() as client,
    ):
        await client.join(0)
        await client.hear("train_order")
        arrays = {0: np.full(1200, 0.5, np.float32), 1: np.full(30, 0.25, np.float32)}
        payload = codec.encode(LAYER, arrays, [240, 30].__getitem__)
        sealed = transfers.seal(LAYER, payload)
        assert (sealed.coding, sealed.base) == (pb.PACKED, None)
        transfer = transfers.transfer_header(LAYER, sealed)
        await client.say("update", pb.SparseUpdate(round=0, transfer=transfer, steps=1), bytes(sealed.body))
        assert (await client.hear("round_closed")).message.accepted
        weight = running.federation.arrays()["weight"].reshape(-1)
        expected = LAYER_START["weight"].reshape(-1) + np.where(np.arange(1200) < 240, 0.5, 0).astype(
            np.float32
        )
        assert weight.tolist() == expected.tolist()


# ---------------------------------------------------------------- healing


async def test_a_client_whose_model_is_another_asks_for_a_whole_one_and_goes_on(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2's change meets a base with one other bit."""
    real, spoiled = ClientSession._base, []

    def base(self: ClientSession, round: int) -> np.ndarray | None:
        model = real(self, round)
        if round == 1 and not spoiled:
            spoiled.append(round)
            model = model.copy()
            model[40] ^= 1
        return model

    monkeypatch.setattr(ClientSession, "_base", base)
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=4, zeros=START, settings=settings) as running:
        stub, ledger = Stub(), Ledger()
        agent = Agent(running.address, stub, ledger, ThreadPoolExecutor(1))  # type: ignore[arg-type]
        await asyncio.wait_for(agent.run(), 20)
        assert await running.task is True
        # 1.0 is added to the first four weights in each of four rounds.
        expected = START["weight"].reshape(-1).copy()
        for _ in range(4):
            expected[:4] += 1
        assert running.federation.arrays()["weight"].reshape(-1).tolist() == expected.tolist()
    assert spoiled == [1]
    assert stub.accepted == [0, 1, 2, 3]
    # Round 2's model went over the wire twice, and every other once.
    assert [row.round for row in ledger.written if row.kind == "model"] == [0, 1, 2, 2, 3]
    assert len(running.events(tmp_path, "joined")) == 2
    assert running.events(tmp_path, "fault") == []


async def test_clients_of_one_process_make_each_model_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, opened = session.open_body, []

    def counted(*args: Any) -> Any:
        opened.append(args[1].content or args[1].checksum)
        return real(*args)

    monkeypatch.setattr(session, "open_body", counted)
    async with serving(tmp_path, clients=2, rounds=3, zeros=START) as running:
        stubs, shelf = [Stub(0), Stub(1)], Shelf()
        agents = [
            Agent(running.address, stub, NotebookLedger(), ThreadPoolExecutor(1), shelf=shelf)  # type: ignore[arg-type]
            for stub in stubs
        ]
        await asyncio.wait_for(asyncio.gather(*(agent.run() for agent in agents)), 20)
        assert await running.task is True
    assert [stub.accepted for stub in stubs] == [[0, 1, 2]] * 2
    assert len(opened) == len(set(opened)) == 3


# ---------------------------------------------------------------- the client's session alone


class Told:
    """A client's session that is told models by hand."""

    def __init__(self) -> None:
        self.session = ClientSession(0, Ledger())
        self._server = Channel("server", 0, Ledger(), lambda _kind, _round: 0, SCHEMA)

    def tell(self, kind: str, message: Any, body: bytes = b"") -> list[Any]:
        out = self._server.send(kind, message, chunks=chunk_frames("server", body), body=len(body))
        return [action for frame in out.frames for action in self.session.feed(frame)]

    def welcome(self) -> None:
        plan = ClientPlan(seed=1).to_proto()
        welcome = pb.Welcome(
            protocol_version=PROTOCOL_VERSION, run="cafe", session=7, schema=SCHEMA.to_proto(), plan=plan
        )
        self.tell("welcome", welcome)

    def model(self, round: int, sealed: transfers.Sealed, **changes: Any) -> list[Any]:
        transfer = transfers.transfer_header(SCHEMA, sealed)
        for name, value in changes.items():
            setattr(transfer, name, value)
        return self.tell("model", pb.ModelBroadcast(round=round, transfer=transfer), bytes(sealed.body))


def flat_of(value: float) -> np.ndarray:
    weight = START["weight"].copy()
    weight[0, 0] = value
    return SCHEMA.flatten(START | {"weight": weight})


def change(new: float, old: float, base: int) -> transfers.Sealed:
    flat = flat_of(new)
    sealed = transfers.seal_change(SCHEMA, codec.dense_payload(SCHEMA, flat), flat, (base, flat_of(old)))
    assert sealed is not None
    return sealed


@pytest.fixture
def told() -> Told:
    """A session that was welcomed and holds the model of round 4, closed."""
    told = Told()
    told.session.join(10, Held(), instance=5)
    told.welcome()
    told.model(4, transfers.plain(codec.dense_payload(SCHEMA, flat_of(1))))
    told.tell("round_closed", pb.RoundClosed(round=4, accepted=True))
    return told


def test_a_change_is_applied_to_the_model_of_a_closed_round(told: Told) -> None:
    assert told.session.weights is None
    told.model(6, change(2, 1, base=4))
    assert told.session.weights is not None
    assert bytes(told.session.weights.body) == flat_of(2)[:DENSE].tobytes()
    assert told.tell("train_order", pb.TrainOrder(round=6)) == [DoTrain(6)]
    # And the next to that one.
    told.model(7, change(3, 2, base=6))
    assert told.session.model is not None
    assert told.session.model[0] == 7
    assert bytes(told.session.model[1].body) == flat_of(3)[:DENSE].tobytes()


@pytest.mark.parametrize(
    ("sealed", "changes", "why"),
    [
        (change(2, 1, base=3), {}, "UNKNOWN_BASE.*round 3"),
        (change(2, 5, base=4), {}, "CHECKSUM|MALFORMED"),
        (change(2, 1, base=4), {"content": 1}, "CHECKSUM"),
        (change(2, 1, base=4), {"checksum": 1}, "CHECKSUM"),
    ],
)
def test_a_change_that_does_not_fit_makes_the_client_forget_its_model(
    told: Told, sealed: transfers.Sealed, changes: dict[str, int], why: str
) -> None:
    with pytest.raises(StaleModelError, match=why):
        told.model(6, sealed, **changes)
    assert (told.session.model, told.session.weights) == (None, None)
    out = ClientSession(0, Ledger()).join(10, Held(), instance=5, previous=told.session)
    join = pb.ClientMessage.FromString(out.frames[0]).join
    assert (join.previous_session, join.HasField("model_round")) == (7, False)


def test_a_whole_model_that_is_damaged_is_the_servers_fault(told: Told) -> None:
    # All zeros pack to less than plain.
    payload = codec.dense_payload(SCHEMA, np.zeros(SCHEMA.offsets[-1], np.uint8))
    sealed = transfers.seal(SCHEMA, payload)
    assert sealed.coding == pb.PACKED
    with pytest.raises(ProtocolError, match="CHECKSUM"):
        told.model(6, sealed, content=1)
    assert told.session.model is not None
    assert told.session.model[0] == 4


def test_the_next_join_says_which_model_is_held(told: Told) -> None:
    out = ClientSession(0, Ledger()).join(10, Held(), instance=5, previous=told.session)
    join = pb.ClientMessage.FromString(out.frames[0]).join
    assert (join.previous_session, join.model_round) == (7, 4)
