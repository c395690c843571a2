"""Mini-batches in a named random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate


class WholeBatches(Dataset[Any]):
    """A map-style data set that makes a batch at once, faster than item by item."""

    def batch(self, indices: NDArray[np.int64]) -> list[Tensor]:
        """What its items at `indices` hold, stacked."""
        raise NotImplementedError


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def split(order: NDArray[np.int64], size: int, join_single: bool) -> list[NDArray[np.int64]]:
    """Cut an order into batches of `size`; the last may be shorter.

    With `join_single` a last batch of one example joins the batch before it, since batch normalisation
    cannot train on one example.
    """
    cuts = list(range(size, len(order), size))
    if join_single and cuts and len(order) - cuts[-1] == 1:
        cuts.pop()
    return np.split(order, cuts)


def fetch(
    data: Dataset[Any], indices: NDArray[np.int64], device: torch.device, layout: torch.memory_format
) -> Any:
    """The examples at `indices` as one batch on `device`; image tensors (n, c, h, w) in `layout`."""
    if isinstance(data, TensorDataset):
        at = torch.from_numpy(indices)
        batch: Any = [tensor[at] for tensor in data.tensors]
    elif isinstance(data, WholeBatches):
        batch = data.batch(indices)
    else:
        batch = default_collate([data[int(i)] for i in indices])
    return _place(batch, device, layout)


def shuffled(
    data: Dataset[Any],
    size: int,
    generator: np.random.Generator,
    *,
    join_single: bool,
    device: torch.device,
    layout: torch.memory_format,
) -> Iterator[Any]:
    """One pass over `data` in the generator's order."""
    order = generator.permutation(len(data))  # type: ignore[arg-type]
    for indices in split(order, size, join_single):
        yield fetch(data, indices, device, layout)


def _place(value: Any, device: torch.device, layout: torch.memory_format) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, memory_format=layout) if value.dim() == 4 else value.to(device)
    if isinstance(value, dict):
        return {key: _place(item, device, layout) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place(item, device, layout) for item in value]
    return value
