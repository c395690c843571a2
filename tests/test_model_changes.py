"""Models travel as what changed since the one a client holds, if the server still has that; otherwise whole."""

import asyncio
import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from wire import QUICK, SCHEMA, RawClient, Running, make_update, serving

from fedreuse.proto import codec, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload
from fedreuse.proto.frames import Incoming
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
from fedreuse.server.versions import Versions

BIG = Schema((TensorSpec("w", "float32", (60, 50), PARAMETER),))


def models(count: int, share: float = 0.2) -> list[NDArray[np.uint8]]:
    """Each a little off the one before, in a share of its coordinates."""
    random = np.random.default_rng(1)
    found = [random.normal(0, 0.1, 3000).astype(np.float32)]
    for _ in range(count - 1):
        step = random.normal(0, 1e-3, 3000) * (random.random(3000) < share)
        found.append((found[-1] + step).astype(np.float32))
    return [model.view(np.uint8) for model in found]


def versions(history: int, every: list[NDArray[np.uint8]], *, pack: bool = True) -> Versions:
    known = Versions(BIG, history, pack=pack)
    for number, model in enumerate(every):
        known.add(number, model)
    return known


def opened(sealed: transfers.Sealed, held: dict[int, Any]) -> bytes:
    header = transfers.transfer_header(BIG, sealed)
    blocks = codec.check_layout(BIG, header)
    return bytes(transfers.open_body(BIG, header, Payload(blocks, sealed.body), held.get).body)


# ---------------------------------------------------------------- the versions that a server keeps


def test_a_model_that_is_known_is_a_base() -> None:
    every = models(5)
    release = versions(3, every).current
    assert release.round == 4
    assert [release.base(n) for n in range(6)] == [None, 1, 2, 3, None, None]
    assert release.base(None) is None
    for base in (1, 2, 3):
        sealed = release.sealed(base)
        assert (sealed.coding, sealed.base) == (pb.CHANGE, base)
        assert opened(sealed, {base: every[base]}) == every[4].tobytes()
    assert release.sealed(3) is release.sealed(3)


def test_the_further_behind_the_dearer_and_never_dearer_than_the_whole() -> None:
    release = versions(10, models(11)).current
    sizes = [release.sealed(base).nbytes for base in range(9, -1, -1)]
    whole = release.sealed(None)
    assert sizes[0] < 0.5 * whole.nbytes
    assert sizes == sorted(sizes)
    assert max(sizes) <= whole.nbytes < 12_000


def test_a_base_that_has_nothing_in_common_gains_nothing() -> None:
    random = np.random.default_rng(2)
    noise = [random.normal(0, 10.0 ** (8 * n), 3000).astype(np.float32).view(np.uint8) for n in (-1, 1)]
    release = versions(3, noise).current
    assert release.sealed(0).coding == pb.PACKED
    assert opened(release.sealed(0), {}) == noise[1].tobytes()


def test_without_packing_models_travel_as_they_are() -> None:
    every = models(3)
    release = versions(3, every, pack=False).current
    assert release.base(1) is None
    assert release.sealed(None).coding == pb.PLAIN
    assert opened(release.sealed(None), {}) == every[2].tobytes()


def test_only_so_many_are_kept() -> None:
    every = models(30)
    known = versions(4, every)
    assert [n for n in range(31) if known.get(n) is not None] == [25, 26, 27, 28, 29]


# ---------------------------------------------------------------- on the wire


def received(incoming: Incoming, held: dict[int, bytes]) -> bytes:
    """The model in a message, from what the client holds."""
    transfer = incoming.message.transfer
    assert incoming.payload is not None
    flats = {n: np.frombuffer(model, np.uint8) for n, model in held.items()}
    return bytes(transfers.open_body(SCHEMA, transfer, incoming.payload, flats.get).body)


def global_model(running: Running) -> bytes:
    return bytes(codec.dense_payload(SCHEMA, running.federation.state.flat).body)


def spread(values: Any) -> dict[str, NDArray[Any]]:
    """A model whose bytes can be packed."""
    return {
        "weight": np.full((4, 5), values, np.float32),
        "mean": np.full(5, values, np.float32),
        "steps": np.array(7),
    }


async def one_round(client: RawClient, held: dict[int, bytes]) -> pb.Transfer:
    """What a model's header said; the client trains and sees its round closed."""
    incoming = await client.hear("model")
    held[incoming.message.round] = received(incoming, held)
    await client.hear("train_order")
    await client.update(incoming.message.round)
    await client.hear("round_closed")
    transfer: pb.Transfer = incoming.message.transfer
    return transfer


async def test_round_after_round_only_changes_are_sent(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=3, zeros=spread(0.1)) as running,
        running.client() as client,
    ):
        await client.join(0)
        held: dict[int, bytes] = {}
        heads = []
        for number in range(3):
            start = global_model(running)
            heads.append(await one_round(client, held))
            assert held[number] == start
    assert [head.HasField("base") for head in heads] == [False, True, True]
    assert [head.coding for head in heads[1:]] == [pb.CHANGE, pb.CHANGE]
    assert [head.base for head in heads[1:]] == [0, 1]
    with (tmp_path / "bytes.csv").open(newline="") as handle:
        payloads = [int(r["payload"]) for r in csv.DictReader(handle) if r["kind"] == "model"]
    assert payloads == [head.length for head in heads]


async def test_a_client_that_comes_back_says_what_it_holds(tmp_path: Path) -> None:
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=3, zeros=spread(0.1), settings=settings) as running:
        held: dict[int, bytes] = {}
        async with running.client() as first:
            welcome = await first.join(0)
            assert isinstance(welcome, pb.Welcome)
            await one_round(first, held)
        async with running.client() as second:
            again = await second.join(0, run=welcome.run, model_round=0)
            assert isinstance(again, pb.Welcome)
            head = await one_round(second, held)
            assert (head.coding, head.base) == (pb.CHANGE, 0)
        async with running.client() as third:  # it has forgotten everything
            await third.join(0, run=welcome.run)
            head = await one_round(third, {})
            assert not head.HasField("base")


@pytest.mark.parametrize("claim", [1, 77, 2**31], ids=["coming", "never", "far"])
async def test_a_model_that_cannot_be_held_is_no_base(tmp_path: Path, claim: int) -> None:
    settings = QUICK.model_copy(update={"rejoin_grace": 10.0})
    async with serving(tmp_path, clients=1, rounds=2, zeros=spread(0.1), settings=settings) as running:
        async with running.client() as first:
            welcome = await first.join(0)
            assert isinstance(welcome, pb.Welcome)
            await first.hear("model")
        async with running.client() as second:
            await second.join(0, run=welcome.run, model_round=claim)
            head = await one_round(second, {})
            assert not head.HasField("base")


async def test_a_model_of_another_run_is_no_base(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=1, zeros=spread(0.1)) as running,
        running.client() as client,
    ):
        await client.join(0, run="ffffffffffffffff", model_round=0)
        head = await one_round(client, {})
        assert not head.HasField("base")


SMALL = 2.0**-24
"""As an update of 0.1 it has three mantissa bits at most, so that even this little body gains by packing."""


async def sealed_update(client: RawClient, coding: pb.Coding, base: int | None) -> pb.RoundClosed:
    """An update of round 0 packed against the model of 0.1, in the form of one's choice, and the server's answer."""
    message, body = make_update(0, SMALL)
    payload = Payload(codec.check_layout(SCHEMA, message.transfer), body)
    packed = packing.pack(SCHEMA, payload, SCHEMA.flatten(spread(0.1)))
    assert len(packed.body) < len(body)
    sealed = transfers.Sealed(
        payload.blocks, packed.body, coding, base, codec.checksum(body), packed.sections
    )
    message.transfer.CopyFrom(transfers.transfer_header(SCHEMA, sealed))
    await client.say("update", message, packed.body)
    closed: pb.RoundClosed = (await client.hear("round_closed")).message
    return closed


@pytest.mark.parametrize(
    ("coding", "base", "code", "words"),
    [
        (pb.PACKED, 9, pb.UNKNOWN_BASE, "against the model of round 9"),
        (pb.CHANGE, None, pb.WRONG_CONTENT, "change"),
        (pb.CHANGE, 0, pb.WRONG_CONTENT, "change"),
    ],
)
async def test_an_update_in_a_form_that_cannot_be_costs_only_its_sender(
    tmp_path: Path, coding: pb.Coding, base: int | None, code: pb.Code, words: str
) -> None:
    async with serving(tmp_path, clients=2, rounds=1, zeros=spread(0.1)) as running:
        async with running.client() as good, running.client() as bad:
            await asyncio.gather(good.join(0), bad.join(1))
            await bad.hear("train_order")
            honest = asyncio.create_task(good.work())
            closed = await sealed_update(bad, coding, base)
            assert (closed.accepted, closed.code) == (False, code), closed.detail
            assert words in closed.detail
            await honest
        assert running.federation.latest["fresh"] == 1


async def test_an_update_against_the_model_of_its_round_counts(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, clients=1, rounds=1, zeros=spread(0.1)) as running,
        running.client() as client,
    ):
        await client.join(0)
        await client.hear("train_order")
        assert (await sealed_update(client, pb.PACKED, 0)).accepted
    weight = np.frombuffer(global_model(running), np.float32)[:20]
    assert np.count_nonzero(weight == np.float32(0.1) + np.float32(SMALL)) == 4  # a fifth of twenty
