"""Past models on the server: how long they stay, and in which of its forms a model travels to whom."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload, check_layout
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.proto.transfers import Sealed, open_body, transfer_header
from fedreuse.server import versions
from fedreuse.server.versions import Versions

SCHEMA = Schema.of(
    [
        TensorSpec("weight", "float32", (40, 30), PARAMETER),
        TensorSpec("mean", "float32", (30,), FLOAT_BUFFER),
        TensorSpec("steps", "int64", (), INTEGER_BUFFER),
    ]
)
DENSE = 4 * (1200 + 30)


def model(seed: int) -> np.ndarray:
    """Weights of no particular order."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 0.05, (40, 30)).astype(np.float32)
    return SCHEMA.flatten({"weight": weight, "mean": weight[0], "steps": np.array(seed)})


def trained(flat: np.ndarray, seed: int, coordinates: int = 200) -> np.ndarray:
    """The same weights but for a few that moved a little."""
    rng, new = np.random.default_rng(seed), flat.copy()
    weight = SCHEMA.views(new)[0]
    weight[rng.choice(1200, coordinates, replace=False)] *= np.float32(1.001)
    return new


def travelling(flat: np.ndarray) -> bytes:
    return flat[:DENSE].tobytes()


def received(sealed: Sealed, known: dict[int, np.ndarray]) -> bytes:
    """What a client makes of it that holds these models."""
    header = pb.Transfer.FromString(transfer_header(SCHEMA, sealed).SerializeToString())
    body = Payload(check_layout(SCHEMA, header), bytes(sealed.body))
    return bytes(open_body(SCHEMA, header, body, known.get).body)


def filled(rounds: int, history: int, *, pack: bool = True) -> tuple[Versions, list[np.ndarray]]:
    models = [model(1)]
    for n in range(1, rounds):
        models.append(trained(models[-1], n))
    known = Versions(SCHEMA, history, pack=pack)
    for n, flat in enumerate(models):
        known.add(n, flat)
    return known, models


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize("history", [0, 1, 3, 100])
def test_as_many_past_models_stay_as_history_says(history: int) -> None:
    known, models = filled(6, history)
    for n in range(-1, 8):
        there = 0 <= n <= 5 and 5 - n <= history
        assert known.get(n) is (models[n] if there else None)
    assert known.current.round == 5


def test_a_gap_in_the_past_is_not_filled() -> None:
    known = Versions(SCHEMA, 2, pack=True)
    for n in (3, 7, 8):
        known.add(n, model(n))
    assert [n for n in range(10) if known.get(n) is not None] == [7, 8]


def test_a_release_keeps_its_bases_when_the_next_round_begins() -> None:
    known, models = filled(3, 1)
    release = known.current
    known.add(3, trained(models[2], 9))
    assert known.get(1) is None
    assert received(release.sealed(1), {1: models[1]}) == travelling(models[2])


# ---------------------------------------------------------------- the base


def test_the_base_is_the_model_that_a_client_holds_and_the_server_too() -> None:
    known, _ = filled(6, 3)
    assert [known.current.base(n) for n in range(7)] == [None, None, 2, 3, 4, None, None]
    assert known.current.base(None) is None


def test_nothing_is_coded_against_a_base_where_nothing_is_packed() -> None:
    known, models = filled(4, 3, pack=False)
    assert [known.current.base(n) for n in (None, 0, 1, 2, 3)] == [None] * 5
    sealed = known.current.sealed(None)
    assert (sealed.coding, sealed.base, bytes(sealed.body)) == (pb.PLAIN, None, travelling(models[3]))


# ---------------------------------------------------------------- the form


@pytest.mark.parametrize("base", [0, 1, 2])
def test_a_client_that_holds_a_model_gets_what_changed(base: int) -> None:
    known, models = filled(4, 3)
    sealed = known.current.sealed(base)
    assert (sealed.coding, sealed.base) == (pb.CHANGE, base)
    assert received(sealed, {base: models[base]}) == travelling(models[3])
    # 200 coordinates a round, each by a factor of 1.001, that is 8,388 to 16,777 units: 14 bits and a place.
    assert sealed.nbytes < (3 - base) * 200 * 3 + 200


def test_a_client_that_holds_nothing_gets_the_whole_packed() -> None:
    known, models = filled(4, 3)
    sealed = known.current.sealed(None)
    assert (sealed.coding, sealed.base) == (pb.PACKED, None)
    assert received(sealed, {}) == travelling(models[3])
    # Sign and exponent take 3 to 4 bits of 9.
    assert sealed.nbytes < 0.9 * DENSE


def test_a_model_that_is_another_altogether_travels_whole() -> None:
    known, models = filled(2, 3)
    known.add(2, model(77))
    sealed = known.current.sealed(1)
    assert (sealed.coding, sealed.base) == (pb.PACKED, None)
    assert sealed is known.current.sealed(None)
    assert received(sealed, {1: models[1]}) == travelling(model(77))


def test_a_change_that_is_not_shorter_than_the_packed_model_is_not_sent() -> None:
    # All zeros pack to almost nothing; the change to that is every weight there was.
    known, _ = filled(2, 3)
    known.add(2, np.zeros(SCHEMA.offsets[-1], np.uint8))
    sealed = known.current.sealed(1)
    assert (sealed.coding, sealed.nbytes < 200) == (pb.PACKED, True)
    assert received(sealed, {}) == bytes(DENSE)


def test_random_bits_travel_plain() -> None:
    known = Versions(SCHEMA, 3, pack=True)
    noise = np.frombuffer(np.random.default_rng(1).bytes(SCHEMA.offsets[-1]), np.uint8)
    known.add(0, noise)
    sealed = known.current.sealed(None)
    assert (sealed.coding, bytes(sealed.body)) == (pb.PLAIN, noise[:DENSE].tobytes())


def test_a_model_that_did_not_change_takes_a_few_bytes() -> None:
    known, models = filled(2, 3)
    known.add(2, models[1])
    sealed = known.current.sealed(1)
    assert (sealed.coding, sealed.nbytes) == (pb.CHANGE, 10)
    assert received(sealed, {1: models[1]}) == travelling(models[1])


def test_every_form_is_made_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("seal", "seal_change"):
        real = getattr(versions, name)

        def counted(*args: object, name: str = name, real: object = real) -> object:
            made.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(versions, name, counted)
    known, _ = filled(4, 3)
    with ThreadPoolExecutor(4) as pool:
        forms = list(pool.map(known.current.sealed, [2, None, 1, 2, None, 1, 2, None] * 3))
    assert sorted(made) == ["seal", "seal_change", "seal_change"]
    assert len({id(form) for form in forms}) == 3
