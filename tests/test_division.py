"""The division of a task's examples: training, validation and test positions of every client."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.partition import PartitionError, validation_size
from fedreuse.sim.tasks.digits import Digits
from fedreuse.sim.tasks.division import Division, divide

IID = {"kind": "iid"}
NATURAL = {"kind": "natural"}


def context(clients: int, seed: int = 1, **options: object) -> TaskContext:
    return TaskContext(seed, clients, Path("no-such-folder"), options)


def mixed(*counts: int) -> np.ndarray:
    """counts[k] examples of label k, mixed by a fixed stride."""
    y = np.repeat(np.arange(len(counts)), counts)
    return y[np.argsort(np.arange(len(y)) * 7919 % 1009, kind="stable")]


def clients(division: Division) -> range:
    return range(division.clients)


def test_the_digits_of_seed_101_are_divided_as_ever() -> None:
    # Recorded in environment.json of runs made before divisions had a file of their own.
    digest = "d559467d7065b81100f1e3dd177661f93cf1f3b45cbc7d88f5497b458529b7ea"
    assert Digits(TaskContext(101, 50, Path())).division.hash() == digest


# Training and validation


@given(
    counts=st.lists(st.integers(4, 40), min_size=1, max_size=4),
    number=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
)
def test_training_and_validation_are_the_clients_examples_each_once(counts, number, seed) -> None:
    labels = mixed(*counts)
    if len(labels) < 2 * number:
        return
    d = divide(labels, context(number, seed, partition=IID))
    held_out = set(d.validation().tolist())
    for client in clients(d):
        assert set(d.examples(client)) == set(d.train(client)) | (held_out & set(d.examples(client)))
        assert not held_out & set(d.train(client))
        assert d.sizes()[client] == len(d.train(client))
        assert len(d.examples(client)) - len(d.train(client)) == validation_size(len(d.examples(client)))
        assert d.labels(client).tolist() == labels[d.examples(client)].tolist()
    assert sorted(np.concatenate([d.examples(c) for c in clients(d)])) == list(range(len(labels)))


def test_a_task_with_its_own_validation_set_keeps_its_training_examples() -> None:
    d = divide(mixed(30, 10), context(4, partition=IID), own_validation=True)
    assert d.sizes().tolist() == [10, 10, 10, 10]
    assert d.validation().tolist() == []
    assert sorted(np.concatenate([d.train(c) for c in clients(d)])) == list(range(40))


def test_positions_count_within_the_subset_in_use() -> None:
    labels = mixed(60, 40)
    d = divide(labels, context(3, partition=IID, train_limit=10))
    assert np.bincount(labels[d.used]).tolist() == [6, 4]
    assert sorted(np.concatenate([d.examples(c) for c in clients(d)])) == list(range(10))
    assert d.labels(2).tolist() == labels[d.used][d.examples(2)].tolist()


@pytest.mark.parametrize("client", [-1, 3])
@pytest.mark.parametrize("what", ["examples", "labels", "train", "test"])
def test_a_client_out_of_range_is_refused(what, client) -> None:
    d = divide(mixed(9), context(3, partition=IID), test_labels=mixed(9))
    with pytest.raises(TaskError, match=rf"no client {client}: this task has clients 0 to 2"):
        getattr(d, what)(client)


# Natural owners


def test_a_client_is_one_owner_in_the_order_of_ids() -> None:
    owners = np.array(["mercutio", "juliet", "mercutio", "juliet", "romeo", "romeo", "romeo"])
    d = divide(np.zeros(7, int), context(3, partition=NATURAL), owners=owners)
    assert [d.examples(c).tolist() for c in clients(d)] == [[1, 3], [0, 2], [4, 5, 6]]


def test_of_more_owners_than_clients_a_random_selection_takes_part() -> None:
    owners = np.repeat(np.arange(10), 3)
    chosen = set()
    for seed in range(40):
        d = divide(np.zeros(30, int), context(4, seed, partition=NATURAL), owners=owners)
        ids = [set(owners[d.examples(c)]) for c in clients(d)]
        assert all(len(i) == 1 for i in ids)
        assert [len(d.examples(c)) for c in clients(d)] == [3] * 4
        flat = [i.pop() for i in ids]
        assert flat == sorted(set(flat))
        chosen.add(tuple(flat))
    assert len(chosen) > 30  # of 210 selections
    assert set().union(*chosen) == set(range(10))


def test_owners_with_too_few_examples_take_no_part() -> None:
    owners = np.repeat(["a", "b", "c", "d"], [5, 1, 4, 6])
    settings = {"kind": "natural", "minimum_size": 5}
    d = divide(np.zeros(16, int), context(2, partition=settings), owners=owners)
    assert [owners[d.examples(c)][0] for c in clients(d)] == ["a", "d"]
    with pytest.raises(
        PartitionError, match=r"2 of 4 natural owners hold at least 5 .* too few for 3 .* clients.total to 2"
    ):
        divide(np.zeros(16, int), context(3, partition=settings), owners=owners)
    # By default one to train on and one to validate on.
    with pytest.raises(PartitionError, match="3 of 4 natural owners hold at least 2"):
        divide(np.zeros(16, int), context(4, partition=NATURAL), owners=owners)


def test_natural_owners_are_needed_for_a_natural_partition() -> None:
    with pytest.raises(PartitionError, match=r"natural: .* no natural owners; choose another kind"):
        divide(np.zeros(16, int), context(2, partition=NATURAL))


def test_owners_of_a_subset_are_those_of_its_examples() -> None:
    owners, labels = np.repeat([7, 8], 50), mixed(50, 50)
    d = divide(labels, context(2, partition=NATURAL, train_limit=40), owners=owners)
    assert [set(owners[d.used][d.examples(c)]) for c in clients(d)] == [{7}, {8}]


# Test examples


def test_test_examples_of_a_natural_client_are_its_owners() -> None:
    owners = np.array(["b", "b", "a", "a", "c", "c"])
    of_test = np.array(["c", "a", "z", "a", "b"])
    labels = np.zeros(6, int)
    d = divide(
        labels, context(3, partition=NATURAL), owners=owners, test_labels=labels[:5], test_owners=of_test
    )
    assert [d.test(c).tolist() for c in clients(d)] == [[1, 3], [4], [0]]


def test_test_examples_are_dealt_in_the_proportions_of_the_labels_held() -> None:
    # Clients "a" and "b" hold 6 and 2 examples of label 0, 1 and 3 of label 1. Of 8 test examples with label 0
    # they get 6 and 2; of 6 with label 1 exactly 1.5 and 4.5: one of the two is rounded up at random.
    labels = np.array([0] * 6 + [1] + [0] * 2 + [1] * 3)
    owners = np.array(["a"] * 7 + ["b"] * 5)
    test_labels = mixed(8, 6, 5)  # nobody holds label 2
    up = set()
    for seed in range(20):
        d = divide(labels, context(2, seed, partition=NATURAL), owners=owners, test_labels=test_labels)
        parts = [d.test(c) for c in clients(d)]
        assert all((np.diff(p) > 0).all() for p in parts)
        assert not set(parts[0]) & set(parts[1])
        counts = [np.bincount(test_labels[p], minlength=3).tolist() for p in parts]
        assert [c[0] for c in counts] == [6, 2]
        assert counts[0][1] + counts[1][1] == 6
        assert [c[2] for c in counts] == [0, 0]
        up.add(counts[0][1])
    assert up == {1, 2}


def test_dealing_test_examples_favours_nobody() -> None:
    # 10 clients with equal shares and one test example of each of 40 labels: 4 each on average; were equal
    # remainders rounded up in the order of clients, the first would get all 40.
    labels = np.tile(np.arange(40), 10)
    d = divide(
        labels, context(10, partition=NATURAL), owners=np.repeat(np.arange(10), 40), test_labels=np.arange(40)
    )
    sizes = [len(d.test(c)) for c in clients(d)]
    assert sum(sizes) == 40
    assert max(sizes) < 14  # binomial(40, 1/10): mean 4, standard deviation 1.9


def test_test_examples_depend_on_nothing_but_the_arguments() -> None:
    first, again = (divide(mixed(50, 30), context(4), test_labels=mixed(20, 20)) for _ in range(2))
    again.validation()
    assert [first.test(c).tolist() for c in range(4)] == [again.test(c).tolist() for c in reversed(range(4))][
        ::-1
    ]
    other = divide(mixed(50, 30), context(4, seed=2), test_labels=mixed(20, 20))
    assert [first.test(c).tolist() for c in range(4)] != [other.test(c).tolist() for c in range(4)]


def test_without_test_labels_there_are_no_test_examples_of_clients() -> None:
    d = divide(mixed(50, 30), context(4))
    with pytest.raises(TaskError, match="no labels of test examples"):
        d.test(0)


# Resampling, for benchmarks


def test_resampled_clients_draw_from_what_validation_leaves() -> None:
    labels = mixed(60, 40)
    d = divide(labels, context(50, partition={"kind": "resample", "size": 30}), test_labels=mixed(7, 5))
    held_out = d.validation()
    assert np.bincount(labels[held_out]).tolist() == [6, 4]
    drawn = [d.examples(c) for c in clients(d)]
    assert {len(part) for part in drawn} == {30}
    assert all((np.diff(part) >= 0).all() for part in drawn)
    # 1,500 draws from the 90 others: all are met, each 16.7 times on average.
    times = np.bincount(np.concatenate(drawn), minlength=100)
    assert set(np.flatnonzero(times == 0)) == set(held_out)
    assert times.max() < 40  # Poisson of mean 16.7: beyond five deviations
    assert any(len(np.unique(part)) < 30 for part in drawn)  # with replacement
    assert all(np.array_equal(d.train(c), drawn[c]) for c in clients(d))
    assert d.labels(3).tolist() == labels[drawn[3]].tolist()
    assert d.sizes().tolist() == [30] * 50
    tested = np.concatenate([d.test(c) for c in clients(d)])
    assert (len(tested), set(tested)) == (1500, set(range(12)))


def test_a_resampled_client_is_its_own_stream() -> None:
    settings = {"kind": "resample"}
    few, many = (divide(mixed(60, 40), context(n, partition=settings)) for n in (5, 100_000))
    assert [len(few.train(c)) for c in clients(few)] == [20] * 5
    for client in (4, 0, 2):
        assert few.train(client).tolist() == many.train(client).tolist() == few.train(client).tolist()
    assert few.train(0).tolist() != few.train(1).tolist()


def test_the_hash_of_a_resampling_is_of_its_rule() -> None:
    labels = mixed(60, 40)

    def digest(number: int = 9, seed: int = 1, size: int = 20, limit: int | None = None) -> str:
        settings = {"kind": "resample", "size": size}
        return divide(labels, context(number, seed, partition=settings, train_limit=limit)).hash()

    assert digest() == digest()
    assert len({digest(), digest(number=8), digest(seed=2), digest(size=21), digest(limit=50)}) == 5


def test_a_hundred_thousand_clients_cost_what_ten_do() -> None:
    def cost(number: int) -> int:
        tracemalloc.start()
        d = divide(mixed(60, 40), context(number, partition={"kind": "resample"}), test_labels=mixed(9))
        d.hash()
        d.train(number - 1)
        d.test(number - 1)
        assert not d.single()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    cost(10)
    assert cost(100_000_000) < cost(10) + 10_000


def test_one_resampled_example_is_no_training_for_batch_normalisation() -> None:
    d = divide(mixed(60, 40), context(3, partition={"kind": "resample", "size": 1}))
    assert list(d.single()) == [0, 1, 2]


def test_resampling_with_a_validation_set_beside_cuts_nothing() -> None:
    d = divide(mixed(3), context(40, partition={"kind": "resample"}), own_validation=True)
    assert d.validation().tolist() == []
    assert set(np.concatenate([d.train(c) for c in clients(d)])) == {0, 1, 2}


def test_one_example_cannot_be_cut() -> None:
    with pytest.raises(PartitionError, match="1 examples are too few to train and validate on"):
        divide(mixed(1), context(3, partition={"kind": "resample"}))
