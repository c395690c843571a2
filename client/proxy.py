"""The stochastic proxy: the gradient of the model's head at the round's global weights (DG paper, 4.1, 4.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset

from fedreuse.client.batches import has_batch_norm, shuffled
from fedreuse.client.errors import TaskError
from fedreuse.client.settings import ClientPlan, ProxySettings
from fedreuse.client.task import Task, augmentation
from fedreuse.client.trainer import layout, seed_torch
from fedreuse.proto.streams import Purpose, stream

Signature = NDArray[np.float32]
EPSILON = 1e-12


def head_parameters(model: nn.Module, settings: ProxySettings) -> list[nn.Parameter]:
    """The trainable parameters whose name contains one of `settings.head`. Raises TaskError without any."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [p for name, p in trainable.items() if any(part in name for part in settings.head)]
    if not found:
        names = list(trainable)
        raise TaskError(
            f"no parameter name contains {' or '.join(map(repr, settings.head))}, so there is no head gradient to "
            f"compare; set proxy.head to part of one of: {', '.join(names)}"
        )
    return found


def head_gradient(
    task: Task,
    model: nn.Module,
    data: Dataset[Any],
    plan: ClientPlan,
    purpose: Purpose,
    client: int,
    round: int,
    device: torch.device,
) -> Signature:
    """Summed head gradient over up to `proxy.batches` shuffled batches, flattened, float32.

    Batches are augmented as in training (DG paper, section 8.2). A pure function of (weights, data, stream,
    draw): the proxy's own stream gives its order, then its augmentation. The model is in train mode, so
    running statistics move: the caller reloads the model afterwards.
    """
    settings = plan.proxy
    assert settings is not None
    head = head_parameters(model, settings)
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.train()
    seed_torch(plan.seed, purpose, client, round)
    augment = augmentation(task)
    draws = stream(plan.seed, purpose, client=client, round=round)
    batches = shuffled(
        data,
        settings.batch_size,
        draws,
        join_single=has_batch_norm(model),
        device=device,
        layout=layout(plan),
    )
    for p in trainable:
        p.requires_grad_(False)  # nothing below the head needs a gradient
        p.grad = None
    try:
        for p in head:
            p.requires_grad_(True)
        for _, batch in zip(range(settings.batches), batches, strict=False):
            task.loss(model, augment(batch, draws)).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in head]
    finally:
        for p in trainable:
            p.requires_grad_(True)
            p.grad = None
    flat = torch.cat([g.detach().float().reshape(-1) for g in gradients])
    signature: Signature = flat.cpu().numpy()
    return signature


def discrepancy(proxy: Signature, signature: Signature) -> float:
    """D = 1 - clip(<z, h> / (||z|| ||h|| + 1e-12), -1, 1), Eq. 2, rounded to the float32 that travels."""
    z, h = proxy.astype(np.float64), signature.astype(np.float64)
    # Sums by numpy's own pairwise loop, not BLAS: the same bits for any number of threads.
    norms = np.sqrt((z * z).sum()) * np.sqrt((h * h).sum())
    return float(np.float32(1 - np.clip((z * h).sum() / (norms + EPSILON), -1, 1)))


def refreshed(old: Signature | None, refresh: Signature, keep: float) -> Signature:
    """h <- keep * h + (1 - keep) * z_ref, or z_ref if there is none (Eq. 6)."""
    if old is None:
        return refresh
    result: Signature = np.float32(keep) * old + np.float32(1 - keep) * refresh
    return result
