"""How soon a run reaches a validation accuracy, and what that took."""

from __future__ import annotations

from collections.abc import Sequence

STAYS = 3
"""Evaluations in a row that must reach the target, the first of them included."""


def reached(evaluations: Sequence[tuple[int, float]], target: float) -> int | None:
    """The first evaluated round whose accuracy is at least `target` and stays so for 3 evaluations.

    `evaluations`: rounds and accuracies in order. None if that never happens: the run is censored, also where its
    last one or two evaluations reach the target, since nobody knows whether they would have stayed.
    """
    for n in range(len(evaluations) - STAYS + 1):
        if all(accuracy >= target for _, accuracy in evaluations[n : n + STAYS]):
            return evaluations[n][0]
    return None
