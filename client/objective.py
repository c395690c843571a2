"""Local objectives: what is added to the task's loss at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from fedreuse.client.settings import ObjectiveSettings


class Objective(Protocol):
    """Built once per local training, at the round's global weights."""

    def loss(self, task_loss: Tensor, at: Sequence[Tensor] | None = None) -> Tensor:
        """at: the trainable parameters, in the model's order, where they are not the model's own."""


class Plain:
    """F_i(w)."""

    def loss(self, task_loss: Tensor, at: Sequence[Tensor] | None = None) -> Tensor:
        return task_loss


class Proximal:
    """F_i(w) + mu/2 ||w - w_t||^2 over the trainable parameters (DG paper, Eq. 5)."""

    def __init__(self, parameters: Sequence[nn.Parameter], mu: float) -> None:
        self._mu = mu
        self._parameters = parameters
        self._starts = [p.detach().clone() for p in parameters]

    def loss(self, task_loss: Tensor, at: Sequence[Tensor] | None = None) -> Tensor:
        pairs = zip(self._parameters if at is None else at, self._starts, strict=True)
        # The squared norm itself: the derivative of a norm at 0, where every round starts, is undefined.
        distance = sum((((p - start) ** 2).sum() for p, start in pairs), task_loss.new_zeros(()))
        return task_loss + 0.5 * self._mu * distance


def objective(settings: ObjectiveSettings, model: nn.Module) -> Objective:
    """The objective of one local training; the model holds w_t now."""
    if settings.kind == "plain" or settings.mu == 0:
        return Plain()
    return Proximal([p for p in model.parameters() if p.requires_grad], settings.mu)
