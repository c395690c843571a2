"""Who holds which examples: partitions over clients, validation splits and subsets, all from named streams.

Rules and sources: IID and Dirichlet partitions with the balance step of NIID-Bench (Li et al., 2022).
All index arrays are int64 and ascending.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedreuse.client.errors import TaskError
from fedreuse.proto.streams import Purpose, stream

if TYPE_CHECKING:  # configurations need the settings below, and a server's configuration no torch
    from torch import nn

Indices = NDArray[np.int64]
Labels = NDArray[np.integer[Any]]

VALIDATION_SHARE = 0.1
MAXIMUM_REDRAWS = 1000

logger = logging.getLogger(__name__)


class PartitionError(TaskError):
    """Examples that cannot be divided as asked; the text says why and what to change."""


class PartitionSettings(BaseModel):
    """How training examples are divided over clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["iid", "dirichlet", "natural", "resample"] = "dirichlet"
    alpha: FiniteFloat = Field(
        0.5, gt=0, allow_inf_nan=False, description="Dirichlet concentration; small: few labels per client"
    )
    minimum_size: int | None = Field(
        None,
        ge=2,  # one example to train on and one to validate on
        description="least examples of a client, before the validation split; "
        "null: 10 when clients hold 60 or more on average, else 2",
    )
    size: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="examples a client draws, with replacement; only of resample, which is for benchmarks",
    )


def partition(
    labels: Labels,
    clients: int,
    settings: PartitionSettings,
    seed: int,
    owners: NDArray[Any] | None = None,
) -> list[Indices]:
    """Divide examples over clients: disjoint index arrays, one per client.

    labels: shape (n,), any integers; seed: root of the named streams; owners: shape (n,), natural ids.
    All kinds but natural cover everything.
    Dirichlet: for each label in ascending order v ~ Dir(α·1_N), v_j = 0 for clients that already hold at
    least n/N examples, and the label's shuffled examples are cut at the cumulative sums of v. All v are
    redrawn while the smallest client is below the minimum; the shuffles do not change any size and are
    therefore drawn once, at the end.
    Natural: a client is one owner with at least the minimum of examples (2 by default); of more owners than
    clients a random selection takes part, in ascending order of ids.
    Raises PartitionError if the minimum cannot be, or is not, reached.
    """
    count = len(labels)
    generator = stream(seed, Purpose.PARTITION)
    if settings.kind == "natural":
        return _natural(generator, owners, clients, settings.minimum_size or 2)
    if clients < 1 or count < 1:
        raise PartitionError(f"{count} examples cannot be divided over {clients} clients")
    minimum = settings.minimum_size
    if minimum is None:
        minimum = 10 if count >= 60 * clients else 2
    if count < minimum * clients:
        raise PartitionError(
            f"{count} examples cannot give each of {clients} clients at least {minimum}: "
            "use fewer clients, more examples or a smaller partition.minimum_size"
        )
    if settings.kind == "iid":
        return [np.sort(part) for part in np.array_split(generator.permutation(count), clients)]
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    counts = _balanced_counts(generator, [len(m) for m in members], clients, settings.alpha, minimum)
    shares = [
        np.split(generator.permutation(own), np.cumsum(row)[:-1])
        for own, row in zip(members, counts, strict=True)
    ]
    return [np.sort(np.concatenate(part)) for part in zip(*shares, strict=True)]


def _natural(
    generator: np.random.Generator, owners: NDArray[Any] | None, clients: int, minimum: int
) -> list[Indices]:
    if owners is None:
        raise PartitionError(
            "partition.kind natural: this task's examples have no natural owners; choose another kind"
        )
    _, inverse, counts = np.unique(owners, return_inverse=True, return_counts=True)
    large = np.flatnonzero(counts >= minimum)
    if len(large) < clients:
        raise PartitionError(
            f"partition.kind natural: {len(large)} of {len(counts)} natural owners hold at least {minimum} "
            f"examples, too few for {clients} clients: lower clients.total to {len(large)} or less"
        )
    chosen = np.sort(generator.choice(large, clients, replace=False))
    by_owner = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return [by_owner[owner] for owner in chosen]


def _balanced_counts(
    generator: np.random.Generator, sizes: Sequence[int], clients: int, alpha: float, minimum: int
) -> NDArray[np.int64]:
    """Examples per label and client, shape (labels, clients), every client with at least `minimum`."""
    largest = 0
    for redraws in range(1 + MAXIMUM_REDRAWS):
        counts = _draw_counts(generator, sizes, clients, alpha)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= minimum:
            logger.info("Dirichlet partition over %d clients after %d redraws", clients, redraws)
            return counts
        largest = max(largest, smallest)
    smaller = f"lower partition.minimum_size to {largest}, " if largest >= 2 else ""
    raise PartitionError(
        f"Dirichlet partition with alpha {alpha:g} over {clients} clients: after {MAXIMUM_REDRAWS} redraws "
        f"the smallest client held {largest} examples at best, {minimum} are asked for; "
        f"{smaller}raise partition.alpha or use fewer clients"
    )


def _draw_counts(
    generator: np.random.Generator, sizes: Sequence[int], clients: int, alpha: float
) -> NDArray[np.int64]:
    """One draw of all labels' shares. A draw in which no share is left is all zeros."""
    counts = np.zeros((len(sizes), clients), np.int64)
    total = sum(sizes)
    for k, size in enumerate(sizes):
        v = generator.dirichlet(np.full(clients, alpha))
        v[counts.sum(axis=0) * clients >= total] = 0
        cumulative = np.cumsum(v)
        if not cumulative[-1] > 0:  # a small alpha underflows: only full clients had a share
            return np.zeros_like(counts)
        # Dividing after the sum makes the last bound exactly 1, so that a full client gets nothing by rounding.
        bounds = np.floor(cumulative / cumulative[-1] * size).astype(np.int64)
        counts[k] = np.diff(bounds, prepend=0)
    return counts


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


def partition_hash(parts: Iterable[Indices]) -> str:
    """SHA-256 (hexadecimal) of a partition: per client its size, then its indices, little-endian int64."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.array([len(part), *part], "<i8").tobytes())
    return digest.hexdigest()


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
