"""Who holds what: examples by client and label under a configuration's partition, and figures about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError
from fedreuse.client.task import Task
from fedreuse.sim.config import RunConfig
from fedreuse.sim.tasks.division import Division, Resampled

MOST_DRAWN = 1000
"""Of resampled clients, who are all alike, as many are looked at."""

QUARTILES = ("minimum", "lower quartile", "median", "upper quartile", "maximum")


@dataclass(frozen=True)
class Holdings:
    """counts: examples, validation included, by client and label, shape (clients looked at, labels), ascending.

    values: the labels, shape (labels,); clients: how many there are, all of them looked at unless resampled.
    rule: how they were divided, see `Division.rule`; used: training examples in use; validation: held out.
    """

    task: str
    partition: str
    seed: int
    clients: int
    values: NDArray[np.int64]
    counts: NDArray[np.int64]
    rule: dict[str, Any]
    used: int
    validation: int
    resampled: bool

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Examples of each client."""
        return np.asarray(self.counts.sum(axis=1))

    @property
    def labels(self) -> NDArray[np.int64]:
        """Different labels of each client."""
        return np.asarray((self.counts > 0).sum(axis=1))

    @property
    def entropy(self) -> NDArray[np.float64]:
        """Entropy of each client's labels in bits: 0 with one label, log2 K with K equal ones."""
        shares = self.counts / self.sizes[:, None]
        logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
        return np.asarray(-(shares * logs).sum(axis=1) + 0.0)

    def figures(self) -> dict[str, dict[str, float]]:
        """Quartiles over clients of examples, labels and entropy."""
        found = {"examples": self.sizes, "labels": self.labels, "entropy": self.entropy}
        return {
            name: dict(zip(QUARTILES, np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist(), strict=True))
            for name, values in found.items()
        }

    def notes(self) -> list[str]:
        """What somebody who looks at the figures should know."""
        notes = list(self.rule["remarks"])
        if self.resampled:
            notes.append("clients share examples and are all alike: for benchmarks, never for results")
        if len(self.counts) < self.clients:
            notes.append(f"the figures are of the first {len(self.counts):,} of {self.clients:,} clients")
        return notes

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "rule": self.rule,
            "used": self.used,
            "validation": self.validation,
            "notes": self.notes(),
            "figures": self.figures(),
            "labels": self.values.tolist(),
            "counts": self.counts.tolist(),
        }


def look(config: RunConfig, task: Task) -> Holdings:
    """The holdings under a task's division. Raises TaskError for a task that does not divide its examples."""
    division = getattr(task, "division", None)
    if not isinstance(division, Division):
        raise TaskError(
            f"task {config.task.name} gives clients their examples itself; partition does not apply to it"
        )
    validation: Any = task.validation()
    resampled = isinstance(division, Resampled)
    looked = min(division.clients, MOST_DRAWN) if resampled else division.clients
    values, counts = _count(looked, division.labels)
    return Holdings(
        task=config.task.name,
        partition=config.partition.title(),
        seed=config.seed,
        clients=division.clients,
        values=values,
        counts=counts,
        rule=division.rule(),
        used=len(division.used),
        validation=0 if validation is None else len(validation),
        resampled=resampled,
    )


def _count(
    clients: int, labels: Callable[[int], NDArray[np.integer[Any]]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels, ascending, and how many of each a client has, shape (clients, labels)."""
    own = [labels(client) for client in range(clients)]
    holder = np.repeat(np.arange(clients), [len(there) for there in own])
    values, which = np.unique(np.concatenate(own), return_inverse=True)
    counts = np.bincount(holder * len(values) + which, minlength=clients * len(values))
    return values.astype(np.int64), counts.reshape(clients, len(values))
