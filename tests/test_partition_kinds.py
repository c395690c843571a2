"""Kinds of partitions: what each rule gives to whom, by hand and by independent formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.config import ConfigError, load_config
from fedreuse.sim.partition import Partition, PartitionError, PartitionSettings, partition

SEEDS = st.integers(0, 2**63 - 1)


def mixed(*counts: int) -> np.ndarray:
    """counts[k] examples of label k, mixed by a fixed stride."""
    y = np.repeat(np.arange(len(counts)), counts)
    return y[np.argsort(np.arange(len(y)) * 7919 % 1009, kind="stable")]


def divided(labels: np.ndarray, clients: int, kind: str, seed: int = 1, /, **options: object) -> Partition:
    return partition(labels, clients, PartitionSettings(kind=kind, minimum_size=2, **options), seed)


def table(labels: np.ndarray, result: Partition) -> np.ndarray:
    """Examples by client and label."""
    kinds = labels.max() + 1
    return np.array([np.bincount(labels[part], minlength=kinds) for part in result.parts])


def left_out(labels: np.ndarray, result: Partition) -> list[int]:
    return sorted(set(range(len(labels))) - set(np.concatenate(result.parts).tolist()))


# Every kind


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["iid", "iid-balanced", "half-iid", "dirichlet", "lq", "shards", "quantity"]),
    counts=st.lists(st.integers(40, 90), min_size=3, max_size=6),
    clients=st.integers(1, 7),
    each=st.integers(1, 3),
    seed=SEEDS,
)
def test_parts_are_disjoint_ascending_above_the_minimum_and_depend_on_the_seed(
    kind, counts, clients, each, seed
) -> None:
    labels = mixed(*counts)
    result = divided(labels, clients, kind, seed, labels=each, alpha=2)
    everything = np.concatenate(result.parts)
    assert len(result.parts) == clients
    assert len(set(everything.tolist())) == len(everything)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in result.parts)
    assert min(len(part) for part in result.parts) >= 2
    # What is left out is said.
    assert bool(left_out(labels, result)) == any("left out" in remark for remark in result.remarks)
    again = divided(labels, clients, kind, seed, labels=each, alpha=2)
    assert all(np.array_equal(a, b) for a, b in zip(result.parts, again.parts, strict=True))
    if clients > 1 and not (kind == "lq" and clients <= 2):
        other = divided(labels, clients, kind, seed ^ 1, labels=each, alpha=2)
        assert any(not np.array_equal(a, b) for a, b in zip(result.parts, other.parts, strict=True))


# IID


def test_iid_is_a_permutation_cut_evenly() -> None:
    labels = mixed(9, 8)
    expected = np.array_split(stream(5, Purpose.PARTITION).permutation(17), 4)
    for part, due in zip(divided(labels, 4, "iid", 5).parts, expected, strict=True):
        assert part.tolist() == sorted(due.tolist())


def test_balanced_iid_deals_label_after_label() -> None:
    # 5 of label 0 go to clients 0 1 2 0 1, then 4 of label 1 to 2 0 1 2.
    labels = mixed(5, 4)
    assert table(labels, divided(labels, 3, "iid-balanced")).tolist() == [[2, 1], [2, 1], [1, 2]]


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=5), clients=st.integers(1, 6), seed=SEEDS)
def test_balanced_iid_differs_by_one_at_most(counts, clients, seed) -> None:
    labels = mixed(*counts)
    if len(labels) < 2 * clients:
        return
    held = table(labels, divided(labels, clients, "iid-balanced", seed))
    assert (np.ptp(held, axis=0) <= 1).all()
    assert np.ptp(held.sum(axis=1)) <= 1
    assert held.sum(axis=0).tolist() == counts


# Half IID


@pytest.mark.parametrize(("similarity", "alike"), [(0.5, 42), (0.25, 21), (0.3, 25)])  # 0.3 · 84 = 25.2
def test_half_iid_with_one_label_a_client(similarity, alike) -> None:
    # Four labels, four clients, C = 1: who gets what is known but for the one permutation.
    labels = mixed(20, 22, 21, 21)
    shuffled = stream(7, Purpose.PARTITION).permutation(84)
    iid, rest = np.array_split(shuffled[:alike], 4), shuffled[alike:]
    result = divided(labels, 4, "half-iid", 7, labels=1, similarity=similarity)
    for client, part in enumerate(result.parts):
        due = [*iid[client], *(i for i in rest if labels[i] == client)]
        assert part.tolist() == sorted(due)


def test_half_iid_with_all_labels_is_iid_label_by_label() -> None:
    # Two labels of which every client holds both: each part is cut in two, so sizes differ by 1 + 2 at most.
    labels = mixed(60, 50)
    held = table(labels, divided(labels, 2, "half-iid"))
    assert held.sum() == 110
    assert np.ptp(held.sum(axis=1)) <= 3


def test_half_iid_clients_have_two_labels_of_their_own() -> None:
    labels = mixed(*[500] * 10)
    held = table(labels, divided(labels, 10, "half-iid", 3))
    assert held.sum(axis=0).tolist() == [500] * 10
    # 250 examples a client are IID, 25 a label: binomial, standard deviation below 5. A label's other 250 are
    # shared by its holders, two on average and hardly ever more than five: 50 or more each.
    clearly = held > 25 + 4 * 5
    assert (clearly.sum(axis=1) == 2).all()
    assert all(clearly[client, client] for client in range(10))


# Label quantity


def test_one_label_a_client_by_hand() -> None:
    # Clients 0 and 3 share label 0, 1 and 4 share label 1, client 2 has label 2 alone.
    labels = mixed(10, 7, 5)
    result = divided(labels, 5, "lq", labels=1)
    assert table(labels, result).tolist() == [[5, 0, 0], [0, 4, 0], [0, 0, 5], [5, 0, 0], [0, 3, 0]]
    assert result.remarks == (
        "5 clients are no multiple of 3 labels, so labels are shared by 1 or 2 clients and sizes differ",
    )


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(60, 120), min_size=3, max_size=7),
    clients=st.integers(1, 12),
    each=st.integers(1, 3),
    seed=SEEDS,
)
def test_a_client_holds_exactly_c_labels_its_own_among_them(counts, clients, each, seed) -> None:
    labels = mixed(*counts)
    result = divided(labels, clients, "lq", seed, labels=each)
    held = table(labels, result)
    assert ((held > 0).sum(axis=1) == each).all()
    assert all(held[i, i % len(counts)] > 0 for i in range(clients))
    for k, count in enumerate(counts):
        shares = held[:, k][held[:, k] > 0]
        assert shares.sum() == (count if len(shares) else 0)
        assert np.ptp(shares) <= 1 if len(shares) else True
    unheld = sum(count for k, count in enumerate(counts) if not held[:, k].any())
    assert len(left_out(labels, result)) == unheld


def test_the_other_labels_are_drawn_evenly() -> None:
    # One client under 400 seeds, five labels: label 0 always, each other one 100 times, deviation 8.7.
    labels = mixed(*[10] * 5)
    seen = sum((table(labels, divided(labels, 1, "lq", seed))[0] > 0).astype(int) for seed in range(400))
    assert seen[0] == 400
    assert np.abs(seen[1:] - 100).max() < 4 * 8.7


def test_labels_that_nobody_holds_are_left_out_and_named() -> None:
    labels = mixed(10, 11, 12, 13)
    result = divided(labels, 2, "lq", labels=1)
    assert [len(part) for part in result.parts] == [10, 11]
    assert result.remarks[0] == "no client holds label 2, 3, and 25 examples are left out"


def test_a_label_with_fewer_examples_than_holders_is_refused() -> None:
    # Label 1 has 2 examples and would be held by clients 1, 3 and 5.
    with pytest.raises(
        PartitionError,
        match=r"with 1 of 2 labels a client over 6 clients: the smallest client would hold 0 examples, "
        r"2 are asked for; use fewer clients .*label 1 has 2 examples",
    ):
        divided(mixed(40, 2), 6, "lq", labels=1)


def test_one_example_of_one_label_is_below_the_minimum() -> None:
    # Three clients share the five examples of label 1: 2, 2 and 1.
    with pytest.raises(
        PartitionError, match="the smallest client would hold 1 examples, 2 are asked for; use"
    ):
        divided(mixed(40, 5), 6, "lq", labels=1)


def test_unlucky_labels_are_redrawn_until_everybody_has_the_minimum() -> None:
    # Labels 1 and 2 have 24 examples: a client that shares both with three others holds 12, with less company more.
    labels = mixed(300, 24, 24)
    results = [
        partition(labels, 6, PartitionSettings(kind="lq", labels=2, minimum_size=14), seed)
        for seed in range(30)
    ]
    assert min(len(part) for r in results for part in r.parts) >= 14
    assert max(r.redraws for r in results) > 0


def test_more_labels_than_there_are_are_refused() -> None:
    for kind in ("lq", "half-iid"):
        with pytest.raises(
            PartitionError,
            match=r"cannot hold 3 different labels, the examples have 2; lower partition.labels",
        ):
            divided(mixed(40, 40), 4, kind, labels=3)


# Shards


def test_shards_are_pieces_of_the_examples_sorted_by_label() -> None:
    labels = mixed(7, 5)
    in_order = sorted(range(12), key=lambda i: (labels[i], i))
    pieces = [set(in_order[at : at + 3]) for at in range(0, 12, 3)]
    dealt = set()
    for seed in range(30):
        result = divided(labels, 2, "shards", seed)
        own = [[n for n, piece in enumerate(pieces) if piece <= set(part.tolist())] for part in result.parts]
        assert [len(o) for o in own] == [2, 2]
        assert sorted(own[0] + own[1]) == [0, 1, 2, 3]
        assert result.remarks == ()
        dealt.add(tuple(own[0]))
    assert len(dealt) == 6  # each of the pairs of four


def test_what_fills_no_shard_is_left_out_at_random() -> None:
    labels = mixed(20, 23)  # 43 = 4 · 10 + 3
    gone = []
    for seed in range(200):
        result = divided(labels, 2, "shards", seed)
        assert [len(part) for part in result.parts] == [20, 20]
        assert result.remarks == ("3 examples are left out: they fill none of 4 shards of 10",)
        gone += left_out(labels, result)
    # 600 left out, 23/43 of them of label 1 on average: 321, standard deviation 12.
    assert abs(sum(int(labels[i]) for i in gone) - 321) < 4 * 12.2


def test_shards_too_small_are_refused() -> None:
    with pytest.raises(
        PartitionError,
        match=r"32 examples make 24 shards of 1, so each of 8 clients holds 3 examples, 4 are asked for; "
        r"lower partition.labels",
    ):
        partition(np.zeros(32, int), 8, PartitionSettings(kind="shards", labels=3, minimum_size=4), 1)
    with pytest.raises(PartitionError, match=r"25 examples make 32 shards of 0"):
        divided(np.zeros(25, int), 8, "shards", labels=4)


# Quantity skew


def test_sizes_have_the_moments_of_the_distribution() -> None:
    # Two clients: the first share is Beta(β, β), of mean 1/2 and variance 1/(4(2β + 1)); β = 2: 1/20.
    shares = [
        len(divided(np.zeros(10_000, int), 2, "quantity", seed, beta=2).parts[0]) / 10_000
        for seed in range(400)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=4 * (1 / 20 / 400) ** 0.5)
    assert np.var(shares) == pytest.approx(1 / 20, abs=4 * 0.0035)


def test_labels_do_not_matter_for_quantities() -> None:
    one = divided(mixed(50, 50), 4, "quantity", 3)
    other = divided(mixed(90, 10), 4, "quantity", 3)
    assert all(np.array_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def test_unequal_sizes_are_redrawn_above_the_minimum_or_refused() -> None:
    fine = partition(np.zeros(600, int), 10, PartitionSettings(kind="quantity"), 1)  # 60 a client: minimum 10
    assert min(map(len, fine.parts)) >= 10
    assert fine.redraws > 0
    for beta in (0.01, 1e-300):  # the second underflows
        with pytest.raises(
            PartitionError,
            match=r"quantity partition with beta .* over 10 clients: after 1000 redraws .* raise partition.beta",
        ):
            partition(np.zeros(100, int), 10, PartitionSettings(kind="quantity", beta=beta), 1)


# Redraws and errors in common


@pytest.mark.parametrize("kind", ["iid", "iid-balanced", "half-iid", "dirichlet", "lq", "shards", "quantity"])
def test_more_clients_than_examples_are_refused(kind) -> None:
    with pytest.raises(
        PartitionError, match="5 examples cannot give each of 6 clients at least 2: use fewer clients or more"
    ):
        partition(mixed(3, 2), 6, PartitionSettings(kind=kind), 1)


def test_redraws_are_counted() -> None:
    # One label, two clients: the smaller share of a Beta(1, 1) draw is below 40 % in four of five draws.
    draws = [
        partition(np.zeros(100, int), 2, PartitionSettings(alpha=1, minimum_size=40), seed).redraws
        for seed in range(400)
    ]
    assert np.mean(draws) == pytest.approx(4, abs=4 * (20 / 400) ** 0.5)  # geometric: variance 0.8 / 0.2²


# Short forms


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("iid", {"kind": "iid"}),
        ("iid-balanced", {"kind": "iid-balanced"}),
        ("half-iid", {"kind": "half-iid", "similarity": 0.5}),
        ("half-iid-0.25", {"kind": "half-iid", "similarity": 0.25}),
        ("dirichlet-0.1", {"kind": "dirichlet", "alpha": 0.1}),
        ("dirichlet-1e-2", {"kind": "dirichlet", "alpha": 0.01}),
        ("lq-3", {"kind": "lq", "labels": 3}),
        ("shards-4", {"kind": "shards", "labels": 4}),
        ("quantity-0.5", {"kind": "quantity", "beta": 0.5}),
        ("resample-7", {"kind": "resample", "size": 7}),
    ],
)
def test_a_kind_and_its_number_in_one_word(text, due) -> None:
    for found in (
        PartitionSettings.model_validate(text),
        load_config(None, [f"partition={text}"]).partition,
        load_config(None, ["partition=lq-1", f"partition={text}"]).partition,
    ):
        assert {key: getattr(found, key) for key in due} == due


def test_a_short_form_and_further_options_go_together() -> None:
    found = load_config(None, ["partition=lq-2", "partition.minimum_size=5"]).partition
    assert (found.kind, found.labels, found.minimum_size) == ("lq", 2, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lq2", "partition.kind: Input should be 'iid', .*'resample', got 'lq2'"),
        ("lq-two", "partition.labels: .*integer.* got 'two'"),
        ("lq-0", "partition.labels: .*greater than or equal to 1"),
        ("dirichlet-nan", "partition.alpha: .*finite"),
        ("dirichlet--1", "partition.alpha: .*greater than 0"),
        ("half-iid-1", "partition.similarity: .*less than 1"),
        ("[3]", "partition: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_short_form_is_a_sentence(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"partition={text}"])
