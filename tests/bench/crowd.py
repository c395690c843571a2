"""A task for any number of clients: each draws its 20 examples from its own stream when they are first needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedreuse.client.task import TaskContext
from fedreuse.proto.streams import Purpose, stream_seed

EXAMPLES, FEATURES, HIDDEN, CLASSES = 20, 64, 32, 10


class Crowd:
    """Points around ten centres that all clients share; 2,410 parameters."""

    def __init__(self, context: TaskContext) -> None:
        self._seed = context.seed
        self._centres = torch.randn(CLASSES, FEATURES, generator=self._random(-2))

    def model(self) -> nn.Module:
        parts = OrderedDict(
            body=nn.Linear(FEATURES, HIDDEN), relu=nn.ReLU(), classifier=nn.Linear(HIDDEN, CLASSES)
        )
        return nn.Sequential(parts)

    def client_data(self, client: int) -> TensorDataset:
        return self._points(client, EXAMPLES)

    def validation(self) -> TensorDataset:
        return self._points(-3, 500)

    def test(self) -> TensorDataset:
        return self._points(-4, 500)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        assert isinstance(data, TensorDataset)
        x, y = data.tensors
        return {"accuracy": float((model(x).argmax(1) == y).float().mean())}

    def _points(self, name: int, count: int) -> TensorDataset:
        random = self._random(name)
        y = torch.randint(0, CLASSES, (count,), generator=random)
        return TensorDataset(self._centres[y] + torch.randn(count, FEATURES, generator=random), y)

    def _random(self, name: int) -> torch.Generator:
        seed = stream_seed(self._seed, Purpose.PARTITION, client=name) % (1 << 63)
        return torch.Generator().manual_seed(seed)
