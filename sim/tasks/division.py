"""The division of a task's examples: what each client trains on, what validates, what each client is tested on.

A task of any kind asks `divide` for one and then gathers its own images or characters at these positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedreuse.client.errors import TaskError
from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.partition import (
    Indices,
    Labels,
    PartitionError,
    PartitionSettings,
    largest_remainder,
    partition,
    partition_hash,
    split_validation,
    stratified_subset,
    validation_size,
)

if TYPE_CHECKING:
    from fedreuse.client.task import TaskContext

Owners = NDArray[Any]
"""Natural ids, shape (n,): the writer, speaker or user each example comes from."""


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
    own = None if owners is None else owners[used]
    parts = partition(labels[used], context.clients, settings, context.seed, own)
    by_owner = settings.kind == "natural"
    return Lists(
        labels[used],
        parts,
        used=used,
        seed=context.seed,
        own_validation=own_validation,
        test_labels=test_labels,
        owners=(own, test_owners) if by_owner and own is not None and test_owners is not None else None,
    )


class Division(ABC):
    """Who has which examples. All index arrays are int64 and ascending.

    used: the training examples in use, as positions in the whole training data. Positions of training examples
    that the methods give count within `used`: `data[division.used][division.train(3)]`.
    clients: how many there are.
    """

    used: Indices
    clients: int

    @abstractmethod
    def examples(self, client: int) -> Indices:
        """All training examples of a client, with those held out for validation. Raises TaskError."""

    @abstractmethod
    def labels(self, client: int) -> Labels:
        """The labels of these examples. Raises TaskError."""

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
    def hash(self) -> str:
        """SHA-256 (hexadecimal) of who has which examples of the whole training data."""

    def _check(self, client: int) -> None:
        if not 0 <= client < self.clients:
            raise TaskError(f"no client {client}: this task has clients 0 to {self.clients - 1}")


class Lists(Division):
    """A division in which every client's examples are listed.

    labels: (n,), of the training examples in use; parts: a client's positions among them.
    owners: natural ids of training and test examples, where clients are natural owners.

    Validation is cut client by client. A client's test examples are those of its owner; where clients are no
    natural owners, each label's test examples are dealt in the proportions in which clients hold the label's
    training examples (validation included): shuffled and cut by largest remainder, equal remainders in random
    order. Test examples of labels that no client holds belong to nobody.
    """

    def __init__(
        self,
        labels: Labels,
        parts: list[Indices],
        *,
        used: Indices,
        seed: int,
        own_validation: bool = False,
        test_labels: Labels | None = None,
        owners: tuple[Owners, Owners] | None = None,
    ) -> None:
        self.used, self.clients = used, len(parts)
        self._labels, self._parts, self._seed = labels, parts, seed
        self._own_validation = own_validation
        self._test_labels, self._owners = test_labels, owners

    def examples(self, client: int) -> Indices:
        self._check(client)
        return self._parts[client]

    def labels(self, client: int) -> Labels:
        return self._labels[self.examples(client)]

    def train(self, client: int) -> Indices:
        return self.examples(client) if self._own_validation else self._split(client)[0]

    def validation(self) -> Indices:
        """In ascending client order, and ascending within a client."""
        if self._own_validation:
            return np.empty(0, np.int64)
        return np.concatenate([self._split(client)[1] for client in range(self.clients)])

    def test(self, client: int) -> Indices:
        self._check(client)
        if self._owners is not None:
            own, of_test = self._owners
            return np.flatnonzero(of_test == own[self._parts[client][0]])
        return self._test_parts[client]

    def sizes(self) -> NDArray[np.int64]:
        held_out = (0 if self._own_validation else validation_size(len(part)) for part in self._parts)
        return np.array([len(p) - h for p, h in zip(self._parts, held_out, strict=True)], np.int64)

    def hash(self) -> str:
        return partition_hash(self.used[part] for part in self._parts)

    def _split(self, client: int) -> tuple[Indices, Indices]:
        return split_validation(self._labels, self.examples(client), client, self._seed)

    @cached_property
    def _test_parts(self) -> list[Indices]:
        if self._test_labels is None:
            raise PartitionError("this task has no labels of test examples, so they have no clients")
        generator = stream(self._seed, Purpose.TEST_PARTITION)
        holder = np.repeat(np.arange(self.clients), [len(part) for part in self._parts])
        held_labels = self._labels[np.concatenate(self._parts)]
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


def _used(labels: Labels, context: TaskContext) -> Indices:
    """Positions of the training examples in use."""
    limit = context.options.get("train_limit")
    if limit is None:
        return np.arange(len(labels))
    if not isinstance(limit, int):
        raise TaskError(f"train_limit is {limit!r}: it must be a whole number or null")
    return stratified_subset(labels, limit, context.seed)


def _settings(context: TaskContext) -> PartitionSettings:
    try:
        return PartitionSettings.model_validate(context.options.get("partition") or {})
    except ValidationError as error:
        raise TaskError(f"partition settings: {error}") from None
