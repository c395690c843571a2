"""Randomness has names: a stream depends on its name alone, and so does a cohort."""

import hashlib
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto.streams import Purpose, cohort, stream, stream_seed

unhurried = settings(deadline=None)


def digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "little")


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (stream_seed(101, Purpose.INIT), "fedreuse/101/init/-1/-1/0"),
        (stream_seed(101, Purpose.PARTITION), "fedreuse/101/partition/-1/-1/0"),
        (stream_seed(202, Purpose.SELECTION, round=0), "fedreuse/202/selection/-1/0/0"),
        (stream_seed(303, Purpose.BATCH_ORDER, client=3, round=7), "fedreuse/303/batch_order/3/7/0"),
        (stream_seed(0, Purpose.PROXY_GATE, client=0, round=12, draw=2), "fedreuse/0/proxy_gate/0/12/2"),
        (stream_seed(2**64 - 1, Purpose.DROPOUT, client=49), "fedreuse/18446744073709551615/dropout/49/-1/0"),
    ],
)
def test_a_seed_is_sha256_of_its_name(seed: int, name: str) -> None:
    assert seed == digest(name)


def test_the_purposes_are_part_of_the_contract() -> None:
    # A renamed purpose would silently change every run made with it.
    assert [str(purpose) for purpose in Purpose] == [
        "init",
        "partition",
        "validation",
        "subset",
        "test_partition",
        "selection",
        "batch_order",
        "augmentation",
        "proxy_gate",
        "proxy_refresh",
        "dropout",
        "quantiser",
        "privacy",
        "faults",
    ]


def test_a_stream_is_pcg64_from_its_seed() -> None:
    expected = np.random.Generator(np.random.PCG64(digest("fedreuse/101/augmentation/4/2/0")))
    drawn = stream(101, Purpose.AUGMENTATION, client=4, round=2)
    assert drawn.integers(0, 2**63, 20).tolist() == expected.integers(0, 2**63, 20).tolist()


def test_every_name_has_a_seed_of_its_own() -> None:
    seeds = [
        stream_seed(root, purpose, client=client, round=round, draw=draw)
        for root, purpose, client, round, draw in product(
            (1, 11), Purpose, (-1, 0, 1, 11), (-1, 0, 1, 11), (0, 1)
        )
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 14 * 4 * 4 * 2


def test_draws_made_elsewhere_do_not_shift_a_stream() -> None:
    alone = {client: stream(7, Purpose.BATCH_ORDER, client=client).random(6).tolist() for client in range(4)}
    streams = {client: stream(7, Purpose.BATCH_ORDER, client=client) for client in reversed(range(4))}
    mixed: dict[int, list[float]] = {client: [] for client in range(4)}
    for step in range(6):
        for client in range(4) if step % 2 else (2, 0, 3, 1):
            np.random.default_rng(step).random(step)
            stream(7, Purpose.DROPOUT, client=client).random(step)
            mixed[client].append(streams[client].random())
    assert mixed == alone


# ---------------------------------------------------------------- cohorts


@unhurried
@given(
    root=st.integers(0, 2**64 - 1),
    round=st.integers(0, 10_000),
    total=st.integers(1, 300),
    data=st.data(),
)
def test_a_cohort_is_ascending_unique_in_range_and_always_the_same(
    root: int, round: int, total: int, data: st.DataObject
) -> None:
    m = data.draw(st.integers(1, total))
    chosen = cohort(root, round, total, m)
    assert len(chosen) == m
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= set(range(total))
    assert all(type(client) is int for client in chosen)
    cohort(root + 1, round + 1, total, m)
    np.random.default_rng(0).random()
    assert cohort(root, round, total, m) == chosen


@pytest.mark.parametrize("total", [1, 2, 50])
def test_everyone_is_selected_if_all_are_asked_for(total: int) -> None:
    assert cohort(101, 4, total, total) == tuple(range(total))


def test_more_clients_than_there_are_cannot_be_selected() -> None:
    with pytest.raises(ValueError, match="larger"):
        cohort(101, 0, 5, 6)


def test_seeds_and_rounds_give_different_cohorts() -> None:
    # 600 draws out of C(50, 10) = 10,272,278,170: two alike would be a fault, not chance.
    cohorts = [cohort(seed, round, 50, 10) for seed in (101, 202, 303) for round in range(200)]
    assert len(set(cohorts)) == 600


def test_every_client_is_selected_equally_often() -> None:
    # R = 2000 rounds of m = 10 out of N = 50. A count has mean R m/N = 400, variance R (m/N)(1 - m/N) = 320;
    # the counts add up to R m, so (N - 1)/N * sum (count - 400)^2 / 320 is chi-square with N - 1 = 49
    # degrees of freedom: between 23.98 and 85.35 in 99.8 % of all seeds. Too even would be as wrong.
    counts = np.zeros(50)
    for round in range(2000):
        counts[list(cohort(101, round, 50, 10))] += 1
    assert counts.sum() == 20_000
    statistic = 49 / 50 * float(((counts - 400) ** 2).sum()) / 320
    assert 23.98 < statistic < 85.35


def test_neighbours_are_selected_together_no_more_often_than_strangers() -> None:
    # A cohort of m = 10 out of N = 50 has (m - 1) m / N = 1.8 neighbouring pairs on average, with variance
    # m (m-1) (N-m) (N-m+1) / (N^2 (N-1)) = 1.205: over 2000 rounds 3600 with a standard deviation of 49.
    together = 0
    for round in range(2000):
        chosen = cohort(202, round, 50, 10)
        together += sum(b - a == 1 for a, b in pairwise(chosen))
    assert abs(together - 3600) < 3 * 49
