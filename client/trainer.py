"""Local training: E epochs of SGD from the round's global weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedreuse.client.batches import has_batch_norm, shuffled
from fedreuse.client.objective import objective
from fedreuse.client.settings import ClientPlan
from fedreuse.client.task import Task, augmentation
from fedreuse.proto.streams import Purpose, stream, stream_seed


@dataclass(frozen=True, slots=True)
class Trained:
    """steps: optimiser steps really taken (K_i); loss: mean objective over the last epoch's batches."""

    steps: int
    loss: float


def layout(plan: ClientPlan) -> torch.memory_format:
    return torch.channels_last if plan.train.memory_format == "channels_last" else torch.contiguous_format


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

    The optimiser starts fresh; the batch order comes from the `batch_order` stream, dropout from `dropout`,
    the task's augmentation from `augmentation`.
    """
    settings = plan.train
    model.train()
    extra = objective(plan.objective, model)
    optimiser = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad),
        lr=settings.learning_rate,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    amp = settings.amp and device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    join_single = has_batch_norm(model)
    seed_torch(plan.seed, Purpose.DROPOUT, client, round)
    augment = augmentation(task)
    steps = 0
    losses: list[Tensor] = []
    for epoch in range(settings.local_epochs):
        order = stream(plan.seed, Purpose.BATCH_ORDER, client=client, round=round, draw=epoch)
        changes = stream(plan.seed, Purpose.AUGMENTATION, client=client, round=round, draw=epoch)
        losses = []
        for batch in shuffled(
            data, settings.batch_size, order, join_single=join_single, device=device, layout=layout(plan)
        ):
            optimiser.zero_grad()
            with torch.autocast(device.type, enabled=amp):
                loss = extra.loss(task.loss(model, augment(batch, changes)))
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            before = scaler.get_scale()
            scaler.update()
            steps += scaler.get_scale() >= before  # a smaller scale means that the step was skipped
            losses.append(loss.detach())
    return Trained(steps, float(torch.stack(losses).mean()))


def seed_torch(seed: int, purpose: Purpose, client: int, round: int, draw: int = 0) -> None:
    """Point torch's global generator at a named stream."""
    torch.manual_seed(stream_seed(seed, purpose, client=client, round=round, draw=draw) % (1 << 63))
