"""Classification of small grey images, divided over clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedreuse.client.batches import fetch
from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.models import ShallowCNN
from fedreuse.sim.partition import (
    Indices,
    PartitionSettings,
    partition,
    partition_hash,
    refuse_single_example_clients,
    split_validation,
    stratified_subset,
    validation_size,
)

_EVALUATION_BATCH = 1000


class LabelledImages(NamedTuple):
    """images: (n, h, h) uint8; labels: (n,) uint8, 0 to classes - 1."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]


class ImageTask:
    """A `Task` on uint8 images: optional subset, partition, validation split, one ShallowCNN.

    Options: `train_limit` (a stratified subset of the training images is used), `partition`
    (`PartitionSettings`). Inputs are (n, 1, h, h) float32, normalised with the mean and standard deviation
    of the training images in use. Images stay uint8; every data set is converted when asked for.
    A subclass that overrides `model` must set what its model needs before calling this constructor.
    Raises TaskError, also for a partition that cannot be made.
    """

    def __init__(
        self, context: TaskContext, train: LabelledImages, test: LabelledImages, classes: int
    ) -> None:
        self.seed = context.seed
        self.classes = classes
        self._test = test
        self.used = _used(train.labels, context)
        self._train = _take(train, self.used)
        self.parts = partition(self._train.labels, context.clients, _settings(context), self.seed)
        sizes = [len(part) - validation_size(len(part)) for part in self.parts]
        if 1 in sizes:
            with torch.random.fork_rng(devices=[]):  # this model is only looked at
                refuse_single_example_clients(sizes, self.model())
        self.mean, self.std = _moments(self._train.images)

    def model(self) -> nn.Module:
        return ShallowCNN(1, self._train.images.shape[1], self.classes)

    def client_data(self, client: int) -> TensorDataset:
        """The training part of one client. Raises TaskError for an index out of range."""
        return self._tensors(self._train, self._split(client)[0])

    def validation(self) -> TensorDataset:
        """The validation parts of all clients, in ascending client order."""
        parts = [self._split(client)[1] for client in range(len(self.parts))]
        return self._tensors(self._train, np.concatenate(parts))

    def test(self) -> TensorDataset:
        return self._tensors(self._test, np.arange(len(self._test.labels)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy; batch: inputs (b, 1, h, h) and labels (b,)."""
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        """Accuracy (0 to 1) and mean cross-entropy over `data`, in evaluation mode; modes are put back."""
        count = len(data)  # type: ignore[arg-type]
        if count == 0:
            raise TaskError("metrics of an empty data set")
        device = next(model.parameters()).device
        modes = {module: module.training for module in model.modules()}
        correct, loss = 0, 0.0
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, count, _EVALUATION_BATCH):
                    at = np.arange(start, min(start + _EVALUATION_BATCH, count))
                    x, y = fetch(data, at, device, torch.preserve_format)
                    logits = model(x)
                    correct += int((logits.argmax(1) == y).sum())
                    loss += float(functional.cross_entropy(logits, y, reduction="sum"))
        finally:
            for module, training in modes.items():
                module.training = training
        return {"accuracy": correct / count, "loss": loss / count}

    def labels_by_client(self) -> list[NDArray[np.uint8]]:
        """Labels of all examples of each client, validation included."""
        return [self._train.labels[part] for part in self.parts]

    def partition_hash(self) -> str:
        """Hash of the clients' examples as indices into the whole training set."""
        return partition_hash(self.used[part] for part in self.parts)

    def _split(self, client: int) -> tuple[Indices, Indices]:
        if not 0 <= client < len(self.parts):
            raise TaskError(f"no client {client}: this task has clients 0 to {len(self.parts) - 1}")
        return split_validation(self._train.labels, self.parts[client], client, self.seed)

    def _tensors(self, source: LabelledImages, indices: Indices) -> TensorDataset:
        # 256 levels: one table, computed in float64 and rounded once.
        levels = ((np.arange(256) - self.mean) / self.std).astype(np.float32)
        x = torch.from_numpy(levels[source.images[indices]]).unsqueeze(1)
        return TensorDataset(x, torch.from_numpy(source.labels[indices].astype(np.int64)))


def _used(labels: NDArray[np.uint8], context: TaskContext) -> Indices:
    """Indices of the training images in use."""
    limit = context.options.get("train_limit")
    if limit is None:
        return np.arange(len(labels))
    if not isinstance(limit, int):
        raise TaskError(f"train_limit is {limit!r}: it must be a whole number or null")
    return stratified_subset(labels, limit, context.seed)


def _take(train: LabelledImages, used: Indices) -> LabelledImages:
    """The images in use; of a subset a copy, so that the others can be freed."""
    if len(used) == len(train.labels):
        return train
    return LabelledImages(train.images[used], train.labels[used])


def _settings(context: TaskContext) -> PartitionSettings:
    try:
        return PartitionSettings.model_validate(context.options.get("partition") or {})
    except ValidationError as error:
        raise TaskError(f"partition settings: {error}") from None


def _moments(images: NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and (population) standard deviation of all pixels, in levels 0 to 255; exact but for one rounding."""
    histogram = np.zeros(256, np.int64)
    for start in range(0, len(images), 1000):  # bincount makes an 8 byte integer of every pixel
        histogram += np.bincount(images[start : start + 1000].ravel(), minlength=256)
    pixels = [(level, int(count)) for level, count in enumerate(histogram)]
    n = sum(count for _, count in pixels)
    first = sum(level * count for level, count in pixels)
    second = sum(level**2 * count for level, count in pixels)
    variance = (n * second - first**2) / n**2
    if variance == 0:
        raise TaskError("all pixels of the training images are equal: the data are damaged")
    return first / n, cast(float, variance**0.5)
