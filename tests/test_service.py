"""The gRPC service among strangers: every refusal has a code, and nobody else notices."""

from __future__ import annotations

import asyncio
import csv

import grpc
import numpy as np
import pytest
import wire
from wire import QUICK, RawClient, make_update, serving

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import transport
from fedreuse.proto.codec import encode, transfer_header
from fedreuse.proto.faults import Fault
from fedreuse.proto.frames import chunk_frames
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
from fedreuse.server import peer, sessions


async def honest(running, indices, **kwargs):
    """Honest clients working in the background."""
    clients = [running.client() for _ in indices]
    for client, index in zip(clients, indices, strict=True):
        assert isinstance(await client.join(index), pb.Welcome)
    return [asyncio.create_task(client.work(**kwargs)) for client in clients]


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch):
    """Some clients here never answer the last message; do not wait five seconds for each."""
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 0.5)


def rows(folder, **match):
    with (folder / "bytes.csv").open() as handle:
        return [r for r in csv.DictReader(handle) if all(r[k] == v for k, v in match.items())]


async def test_three_honest_clients_finish(tmp_path):
    async with serving(tmp_path, rounds=3) as running:
        heard = await asyncio.gather(*await honest(running, range(3)))
        assert await running.task is True
        # Each update keeps k = max(1, floor(0.2 * 20)) = 4 of 20 equal values: the first four by index.
        weight = running.federation.arrays()["weight"].reshape(-1)
        assert weight.tolist() == [3.0] * 4 + [0.0] * 16
        assert running.federation.arrays()["mean"].tolist() == [3.0] * 5
        assert running.federation.arrays()["steps"] == 7
    round_kinds = ["model", "train_order", "round_closed"]
    assert heard == [round_kinds * 3 + ["abort"]] * 3
    # Every message that was sent arrived: nothing is lost, and the last acknowledgement says so.
    assert rows(tmp_path, status="lost") == []
    assert len(rows(tmp_path, kind="update")) == 9


# ---------------------------------------------------------------- joining

JOINS = {
    "another protocol version": (
        {"client": 0, "protocol_version": 7},
        pb.VERSION_MISMATCH,
        ["version 2", "version 7"],
    ),
    "an index past the last": ({"client": 3}, pb.UNKNOWN_CLIENT, ["client 3", "0 to 2"]),
    "no examples": ({"client": 0, "examples": 0}, pb.EXAMPLES_CHANGED, ["no training examples"]),
}


@pytest.mark.parametrize("case", JOINS)
async def test_a_join_that_cannot_be_let_in(tmp_path, case):
    fields, code, words = JOINS[case]
    async with serving(tmp_path) as running, running.client() as client:
        answer = await client.join(**fields)
        assert isinstance(answer, pb.Abort)
        assert answer.code == code
        assert all(word in answer.detail for word in words)
        with pytest.raises(EOFError):
            await client.hear()
        assert running.federation.state.examples == {}


async def test_another_number_of_examples_for_the_same_client(tmp_path):
    async with serving(tmp_path) as running:
        async with running.client() as first:
            await first.join(0, examples=10)
        async with running.client() as second:
            answer = await second.join(0, examples=11)
            assert (answer.code, "10" in answer.detail, "11" in answer.detail) == (
                pb.EXAMPLES_CHANGED,
                True,
                True,
            )


async def test_one_identity_twice(tmp_path):
    async with serving(tmp_path) as running, running.client() as first, running.client() as second:
        assert isinstance(await first.join(0, instance=1), pb.Welcome)
        answer = await second.join(0, instance=2)
        assert answer.code == pb.ALREADY_CONNECTED
        # The same process, coming back over a new connection, takes over at once.
        async with running.client() as third:
            assert isinstance(await third.join(0, instance=1), pb.Welcome)


FIRST_WORDS = {
    "garbage": b"\xff\xff\xff\xff",
    "nothing": b"",
    "a score": pb.ClientMessage(score_reply=pb.ScoreReply()).SerializeToString(),
    "a chunk": pb.ClientMessage(chunk=pb.Chunk(data=b"x")).SerializeToString(),
    "an update": pb.ClientMessage(update=make_update(0)[0]).SerializeToString(),
}


@pytest.mark.parametrize("case", FIRST_WORDS)
async def test_a_first_message_that_is_no_join(tmp_path, case):
    async with serving(tmp_path) as running, running.client() as client:
        await client.raw(FIRST_WORDS[case])
        answer = await client.hear("abort")
        assert answer.message.code in (pb.NOT_JOINED, pb.MALFORMED)
        with pytest.raises(EOFError):
            await client.hear()


async def test_a_client_that_connects_and_says_nothing_is_closed(tmp_path):
    settings = QUICK.model_copy(update={"heartbeat": 0.1})
    async with serving(tmp_path, settings=settings) as running, running.client() as client:
        assert (await client.hear("abort")).message.code == pb.NOT_JOINED


# ---------------------------------------------------------------- in a round

SPOILED = {
    "checksum": ({"checksum": 1}, pb.CHECKSUM),
    "schema": ({"schema_hash": 1}, pb.SCHEMA_MISMATCH),
    "not a number": ({"body": None}, pb.NOT_FINITE),
    "a longer body": ({"length": 10_000}, pb.MALFORMED),
}


@pytest.mark.parametrize("case", SPOILED)
async def test_a_spoiled_update_costs_only_its_sender(tmp_path, case):
    changes, code = SPOILED[case]
    async with serving(tmp_path, rounds=1) as running, running.client() as bad:
        await bad.join(0)
        others = await honest(running, (1, 2))
        await bad.hear("train_order")
        if "body" in changes:
            message, body = make_update(0, value=1.0)
            body = body[:-4] + b"\x00\x00\xc0\x7f"  # the last value becomes NaN
            from fedreuse.proto.codec import checksum

            message.transfer.checksum = checksum(body)
            await bad.say("update", message, body)
        else:
            await bad.update(0, **changes)
        assert (await bad.hear("abort")).message.code in (code, pb.FINISHED)
        await asyncio.gather(*others)
        assert await running.task is True
        assert running.federation.latest["fresh"] == 2
        assert running.federation.latest["fault"] == 1
    faults = running.events(tmp_path, "fault")
    assert [(f["client"], f["code"]) for f in faults] == [(0, pb.Code.Name(code))]


async def test_unasked_messages_change_nothing(tmp_path):
    async with serving(tmp_path, rounds=1) as running, running.client() as odd:
        await odd.join(0)
        await odd.update(0)  # before the round began
        assert (await odd.hear("abort")).message.code == pb.UNEXPECTED
        others = await honest(running, (1, 2))
        await odd.hear("train_order")
        await odd.say("score_reply", pb.ScoreReply(round=0, score=0.5))
        assert (await odd.hear("abort")).message.code == pb.UNEXPECTED
        await odd.update(4)
        assert (await odd.hear("abort")).message.code == pb.WRONG_ROUND
        await odd.update(0)
        await asyncio.gather(odd.work(), *others)
        assert running.federation.latest["fresh"] == 3
    refused = rows(tmp_path, status="refused")
    assert sorted(r["kind"] for r in refused) == ["score_reply", "update", "update"]
    # A refused body is counted in full: 1 + ... bytes really came.
    assert {int(r["payload"]) for r in refused if r["kind"] == "update"} == {len(make_update(0)[1])}


async def test_a_second_update_is_a_duplicate(tmp_path):
    async with serving(tmp_path, rounds=1) as running, running.client() as eager:
        await eager.join(0)
        slow = [running.client() for _ in range(2)]
        for index, client in enumerate(slow):
            await client.join(index + 1)
        await eager.hear("train_order")
        await eager.update(0, value=1.0)
        await eager.update(0, value=100.0)
        assert (await eager.hear("abort")).message.code == pb.DUPLICATE
        await asyncio.gather(eager.work(), *(client.work() for client in slow))
        assert running.federation.arrays()["weight"].max() == 1.0


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -0.5, 2.5])
async def test_an_impossible_score(tmp_path, score):
    async with serving(tmp_path, rounds=2, gate="score") as running, running.client() as bad:
        await bad.join(0)
        others = await honest(running, (1, 2))
        await bad.hear("train_order")
        await bad.update(0)
        await bad.hear("score_request")
        await bad.say("score_reply", pb.ScoreReply(round=1, score=score, signature_round=0))
        assert (await bad.hear("abort")).message.code == pb.NOT_FINITE
        await asyncio.gather(*others)
        assert await running.task is True
        # Its cached update of round 1 is one round old and stands in.
        assert (running.federation.latest["fault"], running.federation.latest["bridged"]) == (1, 1)


async def test_a_signature_of_another_round_makes_a_client_cacheless(tmp_path):
    async with serving(tmp_path, rounds=2, gate="score") as running, running.client() as forgetful:
        await forgetful.join(0)
        others = await honest(running, (1, 2))
        await forgetful.hear("train_order")
        await forgetful.update(0)
        await forgetful.hear("score_request")
        await forgetful.say("score_reply", pb.ScoreReply(round=1, score=1.0))
        assert (await forgetful.hear("train_order")).message.cause == pb.CACHELESS
        await forgetful.update(1)
        await asyncio.gather(forgetful.work(), *others)


# ---------------------------------------------------------------- vanishing


async def test_a_client_that_vanishes_does_not_stop_the_round(tmp_path):
    async with serving(tmp_path, rounds=2) as running:
        gone = running.client()
        await gone.join(0)
        others = await honest(running, (1, 2))
        await gone.hear("train_order")
        await gone.close()
        await asyncio.gather(*others)
        assert await running.task is True
    assert [f["code"] for f in running.events(tmp_path, "fault")] == ["ABSENT", "ABSENT"]
    # What it was sent and never confirmed is lost: the closing of nothing, but the order to train.
    lost = rows(tmp_path, client="0", status="lost")
    assert {r["kind"] for r in lost} <= {"train_order", "model", "welcome", "heartbeat"}
    assert any(r["kind"] == "train_order" for r in lost)


async def test_half_an_upload_is_no_update(tmp_path):
    async with serving(tmp_path, rounds=1) as running:
        gone = running.client()
        await gone.join(0)
        others = await honest(running, (1, 2))
        await gone.hear("train_order")
        message, _ = make_update(0)
        await gone.say("update", message)  # the header; the body never comes
        await gone.close()
        await asyncio.gather(*others)
        assert running.federation.latest["fresh"] == 2


async def test_a_client_that_comes_back_within_its_grace_goes_on(tmp_path):
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, rounds=1, settings=settings) as running:
        first = running.client()
        welcome = await first.join(0)
        others = await honest(running, (1, 2))
        await first.hear("train_order")
        await first.close()
        async with running.client() as second:
            # It still holds the model of round 0 and got three messages: welcome, model, train_order.
            again = await second.join(
                0, run=welcome.run, model_round=0, previous_session=welcome.session, previous_received=3
            )
            assert isinstance(again, pb.Welcome)
            assert again.previous_received == 1  # its first Join
            assert (await second.hear()).kind == "train_order"  # no second model
            await second.update(0)
            await asyncio.gather(second.work(), *others)
        assert running.federation.latest["fresh"] == 3
    assert rows(tmp_path, client="0", status="lost") == []


async def test_the_deadline_fires_by_itself(tmp_path):
    settings = QUICK.model_copy(update={"round_deadline": 0.5})
    async with serving(tmp_path, rounds=1, settings=settings) as running, running.client() as silent:
        await silent.join(0)
        others = await honest(running, (1, 2))
        await silent.hear("train_order")
        closed = await silent.hear("round_closed")
        assert (closed.message.accepted, closed.message.code) == (False, pb.TIMEOUT)
        await asyncio.gather(*others)
        assert running.federation.latest["fresh"] == 2


async def test_an_update_after_the_deadline_is_late(tmp_path):
    settings = QUICK.model_copy(update={"round_deadline": 0.5})
    async with serving(tmp_path, rounds=2, settings=settings) as running, running.client() as slow:
        await slow.join(0)
        others = await honest(running, (1, 2))
        await slow.hear("round_closed")
        await slow.update(0)
        assert (await slow.hear("abort")).message.code == pb.LATE
        await asyncio.gather(slow.work(), *others)


async def test_a_silent_connection_is_given_up(tmp_path):
    settings = QUICK.model_copy(update={"heartbeat": 0.2, "rejoin_grace": 0.0})
    async with serving(tmp_path, rounds=1, clients=1, settings=settings) as running, running.client() as mute:
        await mute.join(0)
        await mute.hear("train_order")
        assert await asyncio.wait_for(running.task, 5) is True  # 3 x 0.2 s, then the round closes
    assert running.federation.latest["fault"] == 1


async def test_round_one_starts_at_the_join_deadline(tmp_path):
    settings = QUICK.model_copy(update={"join_deadline": 0.5})
    async with serving(tmp_path, rounds=1, settings=settings) as running:
        await asyncio.gather(*await honest(running, (0, 2)))
        assert await running.task is True
        assert running.federation.latest["fresh"] == 2
    assert [f["client"] for f in running.events(tmp_path, "fault")] == [1]


async def test_too_few_contributions_leave_the_model_alone(tmp_path):
    async with serving(
        tmp_path, rounds=1, minimum=3, settings=QUICK.model_copy(update={"round_deadline": 0.5})
    ) as running:
        async with running.client() as silent:
            await silent.join(0)
            others = await honest(running, (1, 2))
            await asyncio.gather(*others)
        assert running.federation.arrays()["weight"].max() == 0
        assert "fewer than 3" in running.federation.latest["void"]


async def test_a_client_reports_its_own_failure(tmp_path):
    async with serving(tmp_path, rounds=1) as running, running.client() as ill:
        await ill.join(0)
        others = await honest(running, (1, 2))
        await ill.hear("train_order")
        await ill.say("abort", pb.Abort(code=pb.CLIENT_FAILED, detail="RuntimeError: out of memory", round=0))
        await asyncio.gather(ill.work(), *others)
    fault = running.events(tmp_path, "fault")[0]
    assert (fault["code"], fault["detail"]) == ("CLIENT_FAILED", "RuntimeError: out of memory")


async def test_a_planned_absence_is_enforced(tmp_path):
    faults = (Fault(round=1, client=0, kind="crash", back=3),)
    async with serving(tmp_path, rounds=3, faults=faults) as running:
        first = running.client()
        await first.join(0)
        others = await honest(running, (1, 2))
        await first.hear("train_order")
        await first.close()
        answers = []
        while True:
            client: RawClient = running.client()
            answer = await client.join(0)
            if isinstance(answer, pb.Welcome):
                break
            answers.append(answer.code)
            await client.close()
            await asyncio.sleep(0.05)
        await asyncio.gather(client.work(), *others)
        await client.close()
        assert set(answers) == {pb.AWAY}
    assert [(f["round"], f["client"]) for f in running.events(tmp_path, "fault")] == [(1, 0), (2, 0)]


# ---------------------------------------------------------------- the rest


async def test_status(tmp_path):
    async with serving(tmp_path, rounds=2) as running, running.client() as client:
        await client.join(1)
        async with grpc.aio.insecure_channel(running.address) as channel:
            ask = channel.unary_unary(transport.STATUS)
            reply = pb.StatusReply.FromString(await ask(b""))
            assert (reply.phase, reply.joined, reply.connected) == ("joining", 1, 1)
            assert (reply.committed, reply.rounds, reply.run) == (0, 2, "0123456789abcdef")
            assert pb.StatusReply.FromString(await ask(b"\xff\xff")).rounds == 2


async def test_a_taken_port_is_a_clear_error(tmp_path):
    async with serving(tmp_path / "a") as running:
        port = int(running.address.rpartition(":")[2])
        settings = QUICK.model_copy(update={"port": port})
        with pytest.raises(OSError, match=f"{port}.*another server"):
            async with serving(tmp_path / "b", settings=settings):
                pass


async def test_a_stopped_server_says_so_and_goes_on_later(tmp_path):
    async with serving(tmp_path, rounds=4) as running:
        clients = [running.client() for _ in range(3)]
        for index, client in enumerate(clients):
            await client.join(index)
        heard = [asyncio.create_task(client.work(until=2)) for client in clients]
        await asyncio.gather(*heard)
        running.service.stop()
        codes = [(await client.hear("abort")).message.code for client in clients]
        assert codes == [pb.STOPPING] * 3
        for client in clients:
            await client.close()
        assert await running.task is False
    committed = running.federation.next_round
    assert committed >= 2
    async with serving(tmp_path, rounds=4) as running:
        assert running.federation.next_round == committed
        await asyncio.gather(*await honest(running, range(3)))
        assert await running.task is True
        assert running.federation.arrays()["weight"].max() == 4.0


@pytest.mark.parametrize(("received", "status"), [(3, "ok"), (2, "lost"), (None, "lost")])
async def test_messages_of_a_broken_off_round_are_settled_after_a_restart(tmp_path, received, status):
    """Charged once: the round is run again. Whether the order to train arrived, the next Join tells."""
    async with serving(tmp_path, clients=1, rounds=1) as running, running.client() as client:
        session = (await client.join(0)).session
        await client.hear("train_order")
    async with serving(tmp_path, clients=1, rounds=1) as running, running.client() as client:
        before = {} if received is None else {"previous_session": session, "previous_received": received}
        await client.join(0, **before)
        await client.work()
        assert await running.task is True
    # welcome, model, train_order: the third message of the first session.
    orders = [row["status"] for row in rows(tmp_path, kind="train_order")]
    assert sorted(orders) == sorted([status, "ok"])
    models = rows(tmp_path, kind="model")
    assert len(models) == 2
    assert sum(int(row["modelled"] or 0) for row in models) == running.federation.dense_bytes
    assert running.federation.books.totals.total("down", "modelled") == running.federation.dense_bytes
    sent = sum(int(row["grpc"] or 0) for row in rows(tmp_path, direction="down"))
    assert running.federation.books.totals.total("down", "grpc") == sent


async def test_a_model_of_a_hundred_megabytes_goes_through_with_default_settings(tmp_path, monkeypatch):
    """25,600,000 float32 parameters, the size of a ResNet-50: 98 chunks each way, no message limit met."""
    schema = Schema.of([TensorSpec("weight", "float32", (25_600_000,), PARAMETER)])
    monkeypatch.setattr(wire, "SCHEMA", schema)
    monkeypatch.setattr(wire, "RATIO", 1.0)
    zeros = {"weight": np.zeros(25_600_000, np.float32)}
    async with (
        serving(tmp_path, clients=1, rounds=1, zeros=zeros, pack=False) as running,
        running.client() as client,
    ):
        await client.join(0)
        model = await client.hear("model")
        assert model.sizes.payload == 102_400_000
        assert model.sizes.grpc - model.sizes.message == 5 * (1 + 98)  # 97.66 MiB in chunks of one
        await client.hear("train_order")
        payload = encode(schema, {0: np.ones(25_600_000, np.float32)}, lambda _: 25_600_000)
        message = pb.SparseUpdate(round=0, transfer=transfer_header(schema, payload), steps=1)
        await client.say("update", message, bytes(payload.body))
        await client.work()
        assert running.federation.arrays()["weight"].sum() == 25_600_000


async def test_what_a_client_holds_of_another_run_counts_for_nothing(tmp_path):
    """A model of the same round number, but of another run, is not taken for this run's."""
    async with serving(tmp_path, clients=1, rounds=1) as running, running.client() as client:
        await client.join(0, run="f" * 16, model_round=0)
        heard = await client.work()
        assert heard[0] == "model"


async def test_a_stop_in_the_middle_of_a_round_spends_no_round(tmp_path):
    async with serving(tmp_path, clients=3, rounds=50) as running:
        clients = [running.client() for _ in range(3)]
        for index, client in enumerate(clients):
            await client.join(index)
        for client in clients:
            await client.hear("train_order")
        running.service.stop()
        for client in clients:  # all answer during the farewell, and nobody leaves
            await client.update(0)
        assert await running.task is False
        assert running.federation.next_round == 0
        for client in clients:
            await client.close()


async def test_rounds_wait_for_somebody_to_take_part(tmp_path):
    settings = QUICK.model_copy(update={"join_deadline": 0.2, "rejoin_grace": 0.1})
    async with serving(tmp_path, clients=1, rounds=5, settings=settings) as running:
        await asyncio.sleep(1.0)
        assert running.federation.next_round == 0
        async with running.client() as client:
            await client.join(0)
            await client.work()
        assert [f for f in running.events(tmp_path, "fault")] == []


async def test_duplicates_and_refused_updates_are_charged_nothing(tmp_path):
    async with serving(tmp_path, clients=1, rounds=1) as running, running.client() as client:
        await client.join(0)
        await client.update(0)  # unasked
        await client.hear("train_order")
        await client.update(7)
        await client.update(0)
        await client.update(0)
        await client.work()
        assert running.federation.books.totals.total("up", "modelled") == running.federation.update_bytes


async def test_a_confirmation_that_cannot_be_loses_no_row(tmp_path):
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=1, settings=settings) as running:
        async with running.client() as first:
            session = (await first.join(0)).session
            await first.hear("train_order")
        await asyncio.sleep(0.1)
        async with running.client() as liar:
            answer = await liar.join(0, previous_session=session, previous_received=99)
            assert answer.code == pb.MALFORMED
        async with running.client() as client:
            await client.join(0)
            await client.work()
        assert await running.task is True
        counted = running.federation.books.totals.total("down", "grpc")
    assert sum(int(row["grpc"] or 0) for row in rows(tmp_path, direction="down")) == counted


async def test_a_client_that_never_confirms_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "MAX_UNCONFIRMED", 5)

    async def work_in_silence(client: RawClient) -> None:
        while True:
            incoming = await client.hear()
            if incoming.kind == "train_order":
                message, body = make_update(incoming.message.round)
                await client.raw(pb.ClientMessage(update=message).SerializeToString())
                for frame in chunk_frames("client", body):
                    await client.raw(frame)

    async with serving(tmp_path, clients=1, rounds=50) as running, running.client() as mute:
        await mute.join(0)
        with pytest.raises((EOFError, asyncio.InvalidStateError, grpc.RpcError)):
            await work_in_silence(mute)
        assert running.federation.next_round < 50
