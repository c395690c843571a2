"""How evenly a global model serves the clients: accuracies on the test examples that stand for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedreuse.sim.testset import ClientTest

FEWEST_EXAMPLES = 10
"""A client with fewer test examples says too little about its accuracy to count here."""


@dataclass(frozen=True)
class Fairness:
    """Over `clients` clients with at least 10 test examples each, every client counting alike; accuracies 0 to 1.

    `variance` and `std` are those of the whole group (divided by the number of clients); `worst_tenth` is the mean
    of the worst 10 %, rounded up to whole clients; `jain` is (Σa)² / (N Σa²), 1 where all are equal and 1/N where
    one client has everything, None where all are 0.
    """

    clients: int
    mean: float
    variance: float
    std: float
    min: float
    max: float
    worst_tenth: float
    jain: float | None


def fairness(found: Sequence[ClientTest]) -> Fairness | None:
    """None if no client has enough test examples."""
    accuracies = np.sort([client.accuracy for client in found if client.examples >= FEWEST_EXAMPLES])
    n = len(accuracies)
    if not n:
        return None
    squares = float((accuracies**2).sum())
    return Fairness(
        clients=n,
        mean=float(accuracies.mean()),
        variance=float(accuracies.var()),
        std=float(accuracies.std()),
        min=float(accuracies[0]),
        max=float(accuracies[-1]),
        worst_tenth=float(accuracies[: math.ceil(n / 10)].mean()),
        jain=float(accuracies.sum()) ** 2 / (n * squares) if squares else None,
    )
