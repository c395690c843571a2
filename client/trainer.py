"""Local training: E epochs of SGD from the round's global weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedreuse.client.batches import has_batch_norm, shuffled
from fedreuse.client.objective import objective
from fedreuse.client.settings import ClientPlan, TrainSettings
from fedreuse.client.task import Task, augmentation
from fedreuse.proto.streams import Purpose, stream, stream_seed


@dataclass(frozen=True, slots=True)
class Trained:
    """steps: optimiser steps really taken (K_i); loss: mean objective over the last epoch's batches."""

    steps: int
    loss: float


class Sgd:
    """SGD with momentum and weight decay, as torch.optim.SGD in the same order of operations and bits.

    That class imports torch's compiler (1 s, 200 MB) and costs more per step than small models' own updates.
    `param_groups` is what a gradient scaler looks at.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: TrainSettings) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._parameters, self._settings = list(parameters), settings
        self._velocities: dict[int, Tensor] = {}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """v <- m v + (g + d w), w <- w - lr v; v begins as the first g + d w. Gradients are overwritten."""
        settings = self._settings
        for n, parameter in enumerate(self._parameters):
            change = parameter.grad
            if change is None:
                continue
            if settings.weight_decay:
                change.add_(parameter, alpha=settings.weight_decay)
            if settings.momentum:
                velocity = self._velocities.get(n)
                if velocity is None:
                    change = self._velocities[n] = change.clone()
                else:
                    change = velocity.mul_(settings.momentum).add_(change)
            parameter.add_(change, alpha=-settings.learning_rate)


def layout(plan: ClientPlan) -> torch.memory_format:
    return torch.channels_last if plan.train.memory_format == "channels_last" else torch.contiguous_format


def batches(
    task: Task,
    data: Dataset[Any],
    plan: ClientPlan,
    client: int,
    round: int,
    device: torch.device,
    *,
    join_single: bool,
) -> Iterator[tuple[bool, Any]]:
    """What a local training sees: whether it is the last epoch's, and a batch, augmented.

    Orders come from the `batch_order` stream, the task's augmentation from `augmentation`.
    """
    settings = plan.train
    augment = augmentation(task)
    for epoch in range(settings.local_epochs):
        order = stream(plan.seed, Purpose.BATCH_ORDER, client=client, round=round, draw=epoch)
        changes = stream(plan.seed, Purpose.AUGMENTATION, client=client, round=round, draw=epoch)
        for batch in shuffled(
            data, settings.batch_size, order, join_single=join_single, device=device, layout=layout(plan)
        ):
            yield epoch + 1 == settings.local_epochs, augment(batch, changes)


def train(
    task: Task,
    model: nn.Module,
    data: Dataset[Any],
    plan: ClientPlan,
    client: int,
    round: int,
    device: torch.device,
) -> Trained:
    """Train `model` in place; a pure function of its weights, the data, the plan, client and round.

    The optimiser starts fresh; see `batches` for what is drawn, dropout comes from the `dropout` stream.
    """
    settings = plan.train
    model.train()
    extra = objective(plan.objective, model)
    optimiser = Sgd([p for p in model.parameters() if p.requires_grad], settings)
    amp = settings.amp and device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    seed_torch(plan.seed, Purpose.DROPOUT, client, round)
    steps = 0
    losses: list[Tensor] = []
    for last, batch in batches(task, data, plan, client, round, device, join_single=has_batch_norm(model)):
        optimiser.zero_grad()
        with torch.autocast(device.type, enabled=amp):
            loss = extra.loss(task.loss(model, batch))
        scaler.scale(loss).backward()
        scaler.step(optimiser)  # type: ignore[arg-type]  # it calls step() and looks at param_groups
        before = scaler.get_scale()
        scaler.update()
        steps += scaler.get_scale() >= before  # a smaller scale means that the step was skipped
        if last:
            losses.append(loss.detach())
    return Trained(steps, float(torch.stack(losses).mean()))


def seed_torch(seed: int, purpose: Purpose, client: int, round: int, draw: int = 0) -> None:
    """Point torch's global generators at a named stream.

    As `torch.manual_seed`, which also formats the call stack for every kind of accelerator that is not there.
    """
    number = stream_seed(seed, purpose, client=client, round=round, draw=draw) % (1 << 63)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
