"""The division of a task's examples: what each client trains on, what validates, what each client is tested on.

A task of any kind asks `divide` for one and then gathers its own images or characters at these positions.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedreuse.client.errors import TaskError
from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.partition import (
    Indices,
    Labels,
    Owners,
    Partition,
    PartitionError,
    PartitionSettings,
    cut_validation,
    labels_hash,
    largest_remainder,
    partition,
    partition_hash,
    read_partition,
    split_validation,
    stratified_subset,
    validation_size,
    write_partition,
)

if TYPE_CHECKING:
    from fedreuse.client.task import TaskContext


def divide(
    labels: Labels,
    context: TaskContext,
    *,
    owners: Owners | None = None,
    own_validation: bool = False,
    test_labels: Labels | None = None,
    test_owners: Owners | None = None,
) -> Division:
    """Divide training examples over the context's clients by its options `train_limit` and `partition`.

    labels: (n,), of the whole training data; owners: their natural ids, which partition.kind natural needs.
    own_validation: the task has a validation set of its own, so nothing is cut from the clients' examples.
    test_labels, test_owners: of the test set; without labels `Division.test` cannot be asked.
    Raises TaskError, also for a partition that cannot be made.
    """
    settings = _settings(context)
    used = _used(labels, context)
    rule = {
        "kind": settings.kind,
        **settings.options(),
        "seed": context.seed,
        "clients": context.clients,
        "examples": len(labels),
        "labels_sha256": labels_hash(labels),
    }
    there = Examples(labels[used], used, context.seed, own_validation, test_labels, rule)
    if settings.kind == "resample":
        return Resampled(there, context.clients, settings.size)
    own = None if owners is None else owners[used]
    if context.partition is None:
        drawn = partition(there.labels, context.clients, settings, context.seed, own)
    else:
        drawn = Partition(
            _within(used, read_partition(context.partition, labels, context.clients), context.partition)
        )
    if settings.kind == "natural" and own is not None and test_owners is not None:
        return Lists(there, drawn, owners=(own, test_owners))
    return Lists(there, drawn)


@dataclass(frozen=True)
class Examples:
    """What there is to divide, and how.

    labels: (n,), of the training examples in use; used: their positions in the whole training data.
    own_validation: whether the task has a validation set beside them; test_labels: of the test set, if known.
    rule: how they are divided, to be saved with the result.
    """

    labels: Labels
    used: Indices
    seed: int
    own_validation: bool
    test_labels: Labels | None
    rule: Mapping[str, Any]


class Division(ABC):
    """Who has which examples. All index arrays are int64 and ascending.

    used: the training examples in use, as positions in the whole training data. Positions of training examples
    that the methods give count within `used`: `data[division.used][division.train(3)]`.
    clients: how many there are.
    remarks: what somebody who reads results should know, e.g. which examples nobody holds; redraws: how often
    shares were drawn again since a client held too little.
    """

    remarks: tuple[str, ...] = ()
    redraws = 0

    def __init__(self, there: Examples, clients: int) -> None:
        self.used, self.clients = there.used, clients
        self._there = there

    @abstractmethod
    def examples(self, client: int) -> Indices:
        """All training examples of a client, with those held out for validation. Raises TaskError."""

    def labels(self, client: int) -> Labels:
        """The labels of these examples. Raises TaskError."""
        return self._there.labels[self.examples(client)]

    @abstractmethod
    def train(self, client: int) -> Indices:
        """What a client trains on. Raises TaskError for an index out of range."""

    @abstractmethod
    def validation(self) -> Indices:
        """What was cut from the training data for validation; empty where the task has a set of its own."""

    @abstractmethod
    def test(self, client: int) -> Indices:
        """Positions in the test set of one client's test examples, for metrics by client only.

        Raises TaskError for an index out of range.
        """

    @abstractmethod
    def sizes(self) -> NDArray[np.int64]:
        """Numbers of examples that clients train on, shape (clients,)."""

    @abstractmethod
    def single(self) -> Sequence[int]:
        """The clients that have one example only to train on."""

    @abstractmethod
    def hash(self) -> str:
        """SHA-256 (hexadecimal) of who has which examples of the whole training data."""

    @property
    def _test_labels(self) -> Labels:
        if self._there.test_labels is None:
            raise PartitionError("this task has no labels of test examples, so they have no clients")
        return self._there.test_labels

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write it to a file that `TaskContext.partition` may name."""

    def rule(self) -> dict[str, Any]:
        """How the examples were divided, with hashes of the result and of the labels; saved beside index lists."""
        return {**self._there.rule, "sha256": self.hash(), "redraws": self.redraws, "remarks": self.remarks}

    def _check(self, client: int) -> None:
        if not 0 <= client < self.clients:
            raise TaskError(f"no client {client}: this task has clients 0 to {self.clients - 1}")


class Lists(Division):
    """A division in which every client's examples are listed.

    drawn: each client's positions among the training examples in use.
    owners: natural ids of training and test examples, where clients are natural owners.

    Validation is cut client by client. A client's test examples are those of its owner; where clients are no
    natural owners, each label's test examples are dealt in the proportions in which clients hold the label's
    training examples (validation included): shuffled and cut by largest remainder, equal remainders in random
    order. Test examples of labels that no client holds belong to nobody.
    """

    def __init__(
        self, there: Examples, drawn: Partition, owners: tuple[Owners, Owners] | None = None
    ) -> None:
        super().__init__(there, len(drawn.parts))
        self._parts, self.redraws, self.remarks = drawn
        self._owners = owners

    def examples(self, client: int) -> Indices:
        self._check(client)
        return self._parts[client]

    def train(self, client: int) -> Indices:
        return self.examples(client) if self._there.own_validation else self._split(client)[0]

    def validation(self) -> Indices:
        """In ascending client order, and ascending within a client."""
        if self._there.own_validation:
            return np.empty(0, np.int64)
        return np.concatenate([self._split(client)[1] for client in range(self.clients)])

    def test(self, client: int) -> Indices:
        self._check(client)
        if self._owners is not None:
            own, of_test = self._owners
            return np.flatnonzero(of_test == own[self._parts[client][0]])
        return self._test_parts[client]

    def sizes(self) -> NDArray[np.int64]:
        held_out = (0 if self._there.own_validation else validation_size(len(part)) for part in self._parts)
        return np.array([len(p) - h for p, h in zip(self._parts, held_out, strict=True)], np.int64)

    def single(self) -> Sequence[int]:
        return [int(client) for client in np.flatnonzero(self.sizes() == 1)]

    def hash(self) -> str:
        return partition_hash(self._whole())

    def save(self, path: Path) -> None:
        write_partition(path, self.rule(), self._whole())

    def _whole(self) -> list[Indices]:
        """Positions in the whole training data."""
        return [self.used[part] for part in self._parts]

    def _split(self, client: int) -> tuple[Indices, Indices]:
        return split_validation(self._there.labels, self.examples(client), client, self._there.seed)

    @cached_property
    def _test_parts(self) -> list[Indices]:
        generator = stream(self._there.seed, Purpose.TEST_PARTITION)
        holder = np.repeat(np.arange(self.clients), [len(part) for part in self._parts])
        held_labels = self._there.labels[np.concatenate(self._parts)]
        shares: list[list[Indices]] = [[] for _ in self._parts]
        for label in np.unique(self._test_labels):
            own = generator.permutation(np.flatnonzero(self._test_labels == label))
            held = np.bincount(holder[held_labels == label], minlength=self.clients)
            # In random order, or equal remainders would always favour the first clients.
            clients = generator.permutation(np.flatnonzero(held))
            if not len(clients):
                continue
            total = int(held.sum())
            quotas = largest_remainder([Fraction(len(own) * int(held[c]), total) for c in clients], len(own))
            cut = np.split(own, np.cumsum(quotas)[:-1])
            for client, share in zip(clients, cut, strict=True):
                shares[client].append(share)
        nobody = np.empty(0, np.int64)
        return [np.sort(np.concatenate([nobody, *share])) for share in shares]


class Resampled(Division):
    """For benchmarks only: every client draws `size` examples, with replacement, when it is first needed.

    No study can learn from it, since clients share examples and are all alike; but any number of clients costs
    nothing to begin with. A stratified tenth of the training examples is cut for validation before; clients draw
    from the rest, each from its own stream, and their test examples likewise from the test set.
    """

    def __init__(self, there: Examples, clients: int, size: int) -> None:
        super().__init__(there, clients)
        self._size = size
        if there.own_validation:
            self._pool, self._held_out = np.arange(len(there.labels)), np.empty(0, np.int64)
        else:
            self._pool, self._held_out = cut_validation(there.labels, there.seed)

    def examples(self, client: int) -> Indices:
        """Ascending; examples drawn twice stand there twice."""
        return self._pool[self._draw(client, Purpose.PARTITION, len(self._pool))]

    def train(self, client: int) -> Indices:
        return self.examples(client)

    def validation(self) -> Indices:
        return self._held_out

    def test(self, client: int) -> Indices:
        return self._draw(client, Purpose.TEST_PARTITION, len(self._test_labels))

    def sizes(self) -> NDArray[np.int64]:
        return np.full(self.clients, self._size)

    def single(self) -> Sequence[int]:
        return range(self.clients if self._size == 1 else 0)

    def hash(self) -> str:
        """Of the rule: its numbers, and the positions in the whole training data that clients draw from."""
        rule = f"fedreuse/resample/{self._there.seed}/{self.clients}/{self._size}/"
        return hashlib.sha256(rule.encode() + self.used[self._pool].astype("<i8").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        write_partition(path, self.rule())

    def _draw(self, client: int, purpose: Purpose, count: int) -> Indices:
        self._check(client)
        return np.sort(stream(self._there.seed, purpose, client=client).integers(count, size=self._size))


def _used(labels: Labels, context: TaskContext) -> Indices:
    """Positions of the training examples in use."""
    limit = context.options.get("train_limit")
    if limit is None:
        return np.arange(len(labels))
    if not isinstance(limit, int):
        raise TaskError(f"train_limit is {limit!r}: it must be a whole number or null")
    return stratified_subset(labels, limit, context.seed)


def _within(used: Indices, parts: list[Indices], path: Path) -> list[Indices]:
    """Positions within `used` of parts of the whole training data, which were read from a file."""
    found = [np.searchsorted(used, part) for part in parts]
    if any(
        (used[np.minimum(at, len(used) - 1)] != part).any() for at, part in zip(found, parts, strict=True)
    ):
        raise PartitionError(f"{path} divides examples that task.train_limit {len(used)} leaves out")
    return found


def _settings(context: TaskContext) -> PartitionSettings:
    try:
        return PartitionSettings.model_validate(context.options.get("partition") or {})
    except ValidationError as error:
        raise TaskError(f"partition settings: {error}") from None
