"""Partitions, validation splits and subsets: who holds which examples."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.partition import (
    PartitionError,
    PartitionSettings,
    partition,
    partition_hash,
    refuse_single_example_clients,
    split_validation,
    stratified_subset,
    validation_size,
)

IID = PartitionSettings(kind="iid")
SEEDS = st.integers(0, 2**63 - 1)


def parts_of(labels, clients, settings, seed, owners=None) -> list[np.ndarray]:
    return partition(labels, clients, settings, seed, owners).parts


def labels_of(*counts: int) -> np.ndarray:
    """counts[k] examples of label k, mixed by a fixed stride so that no label is contiguous."""
    y = np.repeat(np.arange(len(counts)), counts)
    return y[np.argsort(np.arange(len(y)) * 7919 % 1009, kind="stable")]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, PartitionSettings, int]:
    """Partitions that are reached without many redraws: 20 examples or more a client, minimum 2 to 5."""
    clients = draw(st.integers(1, 8))
    counts = draw(
        st.lists(st.integers(1, 120), min_size=1, max_size=6).filter(lambda c: sum(c) >= 20 * clients)
    )
    settings = PartitionSettings(
        kind=draw(st.sampled_from(["iid", "dirichlet"])),
        alpha=draw(st.sampled_from([0.5, 1.0, 10.0])),
        minimum_size=draw(st.integers(2, 5)),
    )
    return labels_of(*counts), clients, settings, draw(SEEDS)


# Partition


@given(cases())
def test_a_partition_is_disjoint_covering_sorted_and_respects_the_minimum(case) -> None:
    labels, clients, settings, seed = case
    parts = parts_of(labels, clients, settings, seed)
    assert len(parts) == clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert min(len(part) for part in parts) >= settings.minimum_size


@given(cases())
def test_a_client_with_its_fair_share_gets_nothing_of_the_later_labels(case) -> None:
    labels, clients, settings, seed = case
    parts = parts_of(labels, clients, settings.model_copy(update={"kind": "dirichlet"}), seed)
    held = np.zeros(clients, int)
    for label in np.unique(labels):
        got = np.array([(labels[part] == label).sum() for part in parts])
        assert (got[held * clients >= len(labels)] == 0).all()
        held += got


@given(cases())
def test_a_partition_depends_on_its_arguments_only(case) -> None:
    first = parts_of(*case)
    labels, clients, _, seed = case
    np.random.default_rng(0).random(5)
    torch.rand(3)
    stream(seed, Purpose.PARTITION).random(11)
    split_validation(labels, np.arange(len(labels)), 0, seed)
    again = parts_of(*case)
    assert clients == len(again)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_seeds_make_different_partitions() -> None:
    labels = labels_of(100, 100, 100)
    hashes = {partition_hash(parts_of(labels, 5, PartitionSettings(), seed)) for seed in range(20)}
    assert len(hashes) == 20


def test_iid_sizes_differ_by_one_at_most() -> None:
    parts = parts_of(labels_of(6, 5), 3, IID, 1)  # 11 over 3: 4 + 4 + 3
    assert [len(part) for part in parts] == [4, 4, 3]


def test_iid_is_shuffled() -> None:
    parts = parts_of(np.repeat([0, 1], 500), 2, IID, 3)
    # Label 0 in the first half: hypergeometric, mean 250, standard deviation 500/(2 sqrt(999)) = 7.9.
    own = int((parts[0] < 500).sum())
    assert abs(own - 250) < 5 * 7.9


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    # One label, two clients: the first client's share is Beta(α, α), of mean 1/2 and variance 1/(4(2α + 1)).
    # α = 2: variance 1/20. Over 400 draws its estimate has a standard error below 0.05 sqrt(2/400) = 0.0035.
    settings = PartitionSettings(alpha=2, minimum_size=2)
    shares = [len(parts_of(np.zeros(10_000, int), 2, settings, seed)[0]) / 10_000 for seed in range(400)]
    assert np.mean(shares) == pytest.approx(0.5, abs=4 * (1 / 20 / 400) ** 0.5)
    assert np.var(shares) == pytest.approx(1 / 20, abs=4 * 0.0035)


def test_a_large_alpha_divides_every_label_evenly() -> None:
    # The share of a client has standard deviation sqrt((1/4)(3/4)/(4α + 1)) = 2e-5 of 400 examples.
    labels = labels_of(400, 400)
    for part in parts_of(labels, 4, PartitionSettings(alpha=1e8), 5):
        # The first label leaves every client below its fair share of 200, so the second is divided likewise.
        assert np.abs(np.bincount(labels[part]) - 100).max() <= 1


def test_a_small_alpha_gives_clients_few_labels() -> None:
    def labels_held(alpha: float) -> float:
        labels = labels_of(*[200] * 10)
        parts = parts_of(labels, 10, PartitionSettings(alpha=alpha, minimum_size=2), 11)
        return float(np.mean([len(np.unique(labels[part])) for part in parts]))

    assert labels_held(0.05) < 5 < 9 < labels_held(100)


@pytest.mark.parametrize(("examples", "minimum"), [(120, 10), (119, 2)])
def test_the_default_minimum_is_10_from_60_examples_a_client_on(examples: int, minimum: int) -> None:
    # Without balance step (one label) a Beta(0.1, 0.1) share is below 10/120 in about 40 % of the draws on
    # each side: over 60 seeds sizes from 2 to 9 are met unless they are redrawn.
    settings = PartitionSettings(alpha=0.1)
    sizes = [len(p) for seed in range(60) for p in parts_of(np.zeros(examples, int), 2, settings, seed)]
    assert minimum <= min(sizes) < minimum + 8


def test_too_many_redraws_end_in_an_error_that_names_the_largest_minimum() -> None:
    # One label, 100 examples, 10 clients, α = 0.01: nine clients out of ten get next to nothing.
    with pytest.raises(
        PartitionError, match=r"after 1000 redraws.* held \d+ examples at best, 5 are asked"
    ) as info:
        parts_of(np.zeros(100, int), 10, PartitionSettings(alpha=0.01, minimum_size=5), 1)
    assert "raise partition.alpha or use fewer clients" in str(info.value)


def test_an_alpha_so_small_that_shares_underflow_is_an_error_not_a_nan() -> None:
    with pytest.raises(PartitionError, match="1000 redraws"):
        parts_of(labels_of(*[10] * 6), 12, PartitionSettings(alpha=1e-8), 1)


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_minimum_that_cannot_be_met_is_refused_at_once(kind) -> None:
    with pytest.raises(PartitionError, match="29 examples cannot give each of 3 clients at least 10"):
        parts_of(np.zeros(29, int), 3, PartitionSettings(kind=kind, minimum_size=10), 1)


@pytest.mark.parametrize(("examples", "clients"), [(0, 1), (10, 0), (10, -1)])
def test_nothing_to_divide_is_refused(examples: int, clients: int) -> None:
    with pytest.raises(PartitionError, match="cannot be divided"):
        parts_of(np.zeros(examples, int), clients, IID, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "shard"},
        {"alpha": 0},
        {"alpha": float("inf")},
        {"minimum_size": 1},
        {"gamma": 1},
        {"similarity": 1},
    ],
)
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(ValidationError):
        PartitionSettings.model_validate(settings)


def test_settings_are_read_without_torch() -> None:
    code = "import sys, fedreuse.sim.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Hash


def test_the_hash_covers_sizes_and_indices() -> None:
    packed = struct.pack("<6q", 2, 0, 3, 2, 1, 2)
    parts = [np.array([0, 3]), np.array([1, 2])]
    assert partition_hash(parts) == hashlib.sha256(packed).hexdigest()
    assert partition_hash(parts[::-1]) != partition_hash(parts)
    assert partition_hash([np.array([0, 3, 1]), np.array([2])]) != partition_hash(parts)


# Validation split


@pytest.mark.parametrize(
    ("examples", "validation"),
    [(2, 1), (5, 1), (14, 1), (15, 2), (16, 2), (25, 2), (26, 3), (35, 4), (100, 10), (1437, 144)],
)
def test_a_tenth_rounded_half_to_even_at_least_one(examples: int, validation: int) -> None:
    assert validation_size(examples) == validation
    train, held_out = split_validation(np.zeros(examples, int), np.arange(examples), 0, 1)
    assert (len(train), len(held_out)) == (examples - validation, validation)


@pytest.mark.parametrize(
    ("counts", "validation"),
    [
        # 40 examples, 4 for validation; tenths 1.5 1.5 1.0: the tie goes to the lower label.
        ((15, 15, 10), (2, 1, 1)),
        # 31 examples, 3 for validation; tenths 0.3 1.3 1.5: the largest remainder is label 2's.
        ((3, 13, 15), (0, 1, 2)),
        # Tenths 0.3 and 1.3 have equal remainders, though not as binary fractions. 16 examples: 2.
        ((3, 13), (1, 1)),
        # 4 examples, at least 1: remainders 0.1 0.2 0.1.
        ((1, 2, 1), (0, 1, 0)),
    ],
)
def test_validation_is_stratified_by_largest_remainder(counts, validation) -> None:
    labels = labels_of(*counts)
    train, held_out = split_validation(labels, np.arange(len(labels)), 4, 9)
    assert tuple(np.bincount(labels[held_out], minlength=len(counts))) == validation
    assert tuple(np.bincount(labels[train], minlength=len(counts))) == tuple(np.subtract(counts, validation))


@given(
    labels=st.lists(st.integers(0, 4), min_size=2, max_size=200).map(np.array),
    share=st.sampled_from([0.001, 0.1, 0.29, 0.5, 0.999]),
    seed=SEEDS,
)
def test_a_split_is_a_partition_of_the_client_with_both_sides_filled(labels, share, seed) -> None:
    indices = np.arange(len(labels))
    train, held_out = split_validation(labels, indices, 3, seed, share)
    assert sorted([*train, *held_out]) == indices.tolist()
    assert len(train) >= 1
    assert len(held_out) >= 1
    for label in np.unique(labels):
        of_all, of_validation = (labels == label).sum(), (labels[held_out] == label).sum()
        assert abs(of_validation - share * of_all) < 1 + 1e-9


def test_a_split_is_keyed_by_client_and_blind_to_the_order_of_indices() -> None:
    labels, indices = np.zeros(200, int), np.arange(0, 200, 2)
    first = split_validation(labels, indices, 5, 1)[1]
    assert np.array_equal(first, split_validation(labels, indices[::-1], 5, 1)[1])
    assert not np.array_equal(first, split_validation(labels, indices, 6, 1)[1])
    assert not np.array_equal(first, split_validation(labels, indices, 5, 2)[1])
    assert set(first) <= set(indices)


def test_a_client_with_one_example_cannot_be_split() -> None:
    with pytest.raises(PartitionError, match=r"client 7 holds 1 .*partition.minimum_size"):
        split_validation(np.zeros(9, int), np.array([4]), 7, 1)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(PartitionError, match="not between 0 and 1"):
        split_validation(np.zeros(9, int), np.arange(9), 0, 1, share)


# Subset


@pytest.mark.parametrize(
    ("counts", "limit", "quotas"),
    [
        ((50, 30, 20), 10, (5, 3, 2)),
        ((50, 30, 20), 11, (6, 3, 2)),  # 5.5 3.3 2.2
        ((10, 10, 10), 4, (2, 1, 1)),  # 1.33 each: the lower label
        ((99, 1), 1, (1, 0)),
        ((3, 4), 7, (3, 4)),
    ],
)
def test_a_subset_keeps_the_label_proportions(counts, limit, quotas) -> None:
    labels = labels_of(*counts)
    subset = stratified_subset(labels, limit, 1)
    assert subset.dtype == np.int64
    assert (np.diff(subset) > 0).all()
    assert tuple(np.bincount(labels[subset], minlength=len(counts))) == quotas


def test_a_subset_is_random_and_named_by_its_seed() -> None:
    labels = np.zeros(100, int)
    assert np.array_equal(stratified_subset(labels, 50, 1), stratified_subset(labels, 50, 1))
    assert not np.array_equal(stratified_subset(labels, 50, 1), stratified_subset(labels, 50, 2))


@pytest.mark.parametrize("limit", [0, -1, 11])
def test_a_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(PartitionError, match="from 1 to 10"):
        stratified_subset(np.zeros(10, int), limit, 1)


# Batch normalisation


def test_batch_normalisation_refuses_clients_with_one_training_example() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2)))
    with pytest.raises(PartitionError, match=r"of client 1, 3: raise partition.minimum_size to 3"):
        refuse_single_example_clients([1, 3], model)
    refuse_single_example_clients([], model)


def test_other_models_accept_them() -> None:
    refuse_single_example_clients([0, 1], nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2)))
