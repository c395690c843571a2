"""Validation splits and subsets, stratified by label, from named streams.

All index arrays are int64 and ascending.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.partition.settings import Indices, Labels, PartitionError

if TYPE_CHECKING:  # a server's configuration needs no torch
    from torch import nn

VALIDATION_SHARE = 0.1


def validation_size(examples: int, share: float = VALIDATION_SHARE) -> int:
    """Validation examples cut from a client's `examples`: the share, rounded half to even, at least 1."""
    return max(1, round(examples * _exact(share)))


def split_validation(
    labels: Labels, indices: Indices, client: int, seed: int, share: float = VALIDATION_SHARE
) -> tuple[Indices, Indices]:
    """Split a client's examples into (train, validation), stratified by label.

    labels: shape (n,), of the whole data set; indices: the client's examples.
    Both parts hold at least one example. Raises PartitionError for a client with fewer than two.
    """
    if not 0 < share < 1:
        raise PartitionError(f"validation share {share:g} is not between 0 and 1")
    if len(indices) < 2:
        raise PartitionError(
            f"client {client} holds {len(indices)} examples, too few to train and validate on: "
            "raise partition.minimum_size to 2 or more"
        )
    own = np.sort(indices)
    return _split(labels, own, stream(seed, Purpose.VALIDATION, client=client), share)


def cut_validation(labels: Labels, seed: int, share: float = VALIDATION_SHARE) -> tuple[Indices, Indices]:
    """Split all examples into (train, validation) before there are clients, stratified by label.

    labels: shape (n,). Raises PartitionError for fewer than two examples.
    """
    if len(labels) < 2:
        raise PartitionError(f"{len(labels)} examples are too few to train and validate on")
    return _split(labels, np.arange(len(labels)), stream(seed, Purpose.VALIDATION), share)


def _split(
    labels: Labels, own: Indices, generator: np.random.Generator, share: float
) -> tuple[Indices, Indices]:
    """(train, validation) of the examples `own`, at least one each."""
    size = min(validation_size(len(own), share), len(own) - 1)
    chosen = _stratified(labels[own], _exact(share), size, generator)
    return np.delete(own, chosen), own[chosen]


def stratified_subset(labels: Labels, limit: int, seed: int) -> Indices:
    """`limit` of the n examples, with the label proportions of all. Raises PartitionError unless 1 <= limit <= n."""
    if not 1 <= limit <= len(labels):
        raise PartitionError(
            f"a subset of {limit} examples cannot be drawn from {len(labels)}: "
            f"the limit is a number from 1 to {len(labels)}"
        )
    return _stratified(labels, Fraction(limit, len(labels)), limit, stream(seed, Purpose.SUBSET))


def _stratified(labels: Labels, share: Fraction, size: int, generator: np.random.Generator) -> Indices:
    """Positions of `size` random examples: of each label its share, by largest remainder."""
    values, counts = np.unique(labels, return_counts=True)
    quotas = largest_remainder([int(count) * share for count in counts], size)
    drawn = [
        generator.permutation(np.flatnonzero(labels == value))[:quota]
        for value, quota in zip(values, quotas, strict=True)
    ]
    return np.sort(np.concatenate(drawn))


def largest_remainder(exact: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers near `exact` that sum to `total`; of equal remainders the first is rounded up."""
    quotas = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: quotas[k] - exact[k])  # stable
    for k in by_remainder[: total - sum(quotas)]:
        quotas[k] += 1
    return quotas


def _exact(share: float) -> Fraction:
    """The decimal number as written: 0.1 is a tenth, so that equal remainders are seen to be equal."""
    return Fraction(str(share))


def refuse_single_example_clients(single: Sequence[int], model: nn.Module) -> None:
    """Raise PartitionError if a model with batch normalisation meets a client with one training example.

    single: the clients that have one. A batch of one has no variance.
    """
    from fedreuse.client.batches import has_batch_norm

    if single and has_batch_norm(model):
        named = ", ".join(map(str, single[:10])) + (", ..." if len(single) > 10 else "")
        raise PartitionError(
            f"the model has batch normalisation, which cannot train on the single training example of "
            f"client {named}: raise partition.minimum_size to 3 or more"
        )
