"""Classification of images, grey or coloured, divided over clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from fedreuse.client.batches import WholeBatches, fetch
from fedreuse.client.errors import TaskError
from fedreuse.client.task import Outcomes, TaskContext
from fedreuse.sim.models import Images, choose
from fedreuse.sim.partition import Indices, refuse_single_example_clients
from fedreuse.sim.tasks.division import divide


class LabelledImages(NamedTuple):
    """images: (n, h, h) or (n, h, h, 3) uint8.

    labels: (n,), 0 to classes - 1, of an unsigned type; or (n, classes) zeros and ones, where an image can have
    several labels at once, or none.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.unsignedinteger[Any]]


class ImageSet(WholeBatches):
    """Some images of a source. They stay uint8 and become inputs when a batch is asked for.

    levels: float32, (256,) or (256, 3): the input that stands for each level, in each channel.
    An item is an input (1 or 3, h, h) float32 and a label, int64, or labels (classes,), int64.
    """

    def __init__(self, source: LabelledImages, indices: Indices, levels: NDArray[np.float32]) -> None:
        self._source, self._indices, self._levels = source, indices, levels

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batch(np.array([index]))
        return x[0], y[0]

    def batch(self, indices: NDArray[np.int64]) -> list[Tensor]:
        """Inputs (b, 1 or 3, h, h) and labels (b,) or (b, classes)."""
        at = self._indices[indices]
        labels = torch.from_numpy(self._source.labels[at].astype(np.int64))
        pixels = self._source.images[at]
        if pixels.ndim == 3:
            return [torch.from_numpy(self._levels[pixels]).unsqueeze(1), labels]
        x = np.empty((len(pixels), 3, *pixels.shape[1:3]), np.float32)
        for channel in range(3):
            x[:, channel] = self._levels[pixels[..., channel], channel]
        return [torch.from_numpy(x), labels]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All inputs and all labels, as of a `TensorDataset`."""
        x, y = self.batch(np.arange(len(self)))
        return x, y


class ImageTask:
    """A `Task` on uint8 images: optional subset, partition, validation split, a model by name.

    Options: `train_limit` (a stratified subset of the training images is used), `partition`
    (`PartitionSettings`), `model` (one of `sim.models.MODELS`) and the model's own; `division` says who has which
    images. Where images can have several labels, partitions and subsets that go by label go by the first one an
    image has, with a class more for those that have none. `validation`: the data set's own validation
    images, if it has some; else they are cut from the clients' images. Inputs are (n, 1 or 3, h, h) float32, each
    channel normalised with its mean and standard deviation over the training images in use. `mean` and `std` are
    in levels 0 to 255: numbers for grey images, shape (3,) for coloured ones. `levels`: the inputs that stand for
    them, see `ImageSet`.
    A subclass that overrides `model` must set what its model needs before calling this constructor.
    Raises TaskError, also for a partition that cannot be made.
    """

    default_model: ClassVar[str] = "cnn"
    own_options: ClassVar[tuple[str, ...]] = ()
    """Of `task.options`, beside those of the model."""

    evaluation_batch = 1000
    """Examples evaluated at once, of larger images than 28x28 fewer. Float sums depend on it in their last digits."""

    def __init__(
        self,
        context: TaskContext,
        train: LabelledImages,
        test: LabelledImages,
        classes: int,
        validation: LabelledImages | None = None,
    ) -> None:
        self.seed = context.seed
        self.classes = classes
        self._test, self._own_validation = test, validation
        size, channels = train.images.shape[1], 1 if train.images.ndim == 3 else 3
        self.evaluation_batch = min(self.evaluation_batch, max(1, 1000 * 28**2 // size**2))
        self.chosen = choose(
            context.options, self.default_model, Images(channels, size), classes, self.own_options
        )
        self.division = divide(
            _first_label(train.labels),
            context,
            own_validation=validation is not None,
            test_labels=_first_label(test.labels),
        )
        self._train = _take(train, self.division.used)
        if single := self.division.single():
            with torch.random.fork_rng(devices=[]):  # this model is only looked at
                refuse_single_example_clients(single, self.model())
        self.mean: float | NDArray[np.float64]
        self.std: float | NDArray[np.float64]
        self.mean, self.std = _moments_by_channel(self._train.images)
        # 256 levels: one table, computed in float64 and rounded once.
        grid = np.arange(256) if self._train.images.ndim == 3 else np.arange(256)[:, None]
        self.levels: NDArray[np.float32] = ((grid - self.mean) / self.std).astype(np.float32)

    def model(self) -> nn.Module:
        return self.chosen()

    def client_data(self, client: int) -> ImageSet:
        """The training part of one client. Raises TaskError for an index out of range."""
        return ImageSet(self._train, self.division.train(client), self.levels)

    def validation(self) -> ImageSet:
        """The data set's own validation images, or those cut from the clients', in ascending client order."""
        own = self._own_validation
        if own is not None:
            return ImageSet(own, np.arange(len(own.labels)), self.levels)
        return ImageSet(self._train, self.division.validation(), self.levels)

    def test(self) -> ImageSet:
        return ImageSet(self._test, np.arange(len(self._test.labels)), self.levels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy; batch: inputs (b, 1 or 3, h, h) and labels (b,).

        With labels (b, classes) each is a yes or no of its own: mean binary cross-entropy over images and labels.
        """
        x, y = batch
        return _loss(model(x), y, "mean")

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        """Accuracy (0 to 1) and mean loss over `data`, in evaluation mode; modes are put back.

        Accuracy is the share of right labels. Where an image can have several, each counts, a probability above 0.5
        being a yes: the mean over labels of the accuracy of each, as MedMNIST's evaluator has it.
        """
        labels, correct, loss = 0, 0, 0.0
        for logits, y in self._logits(model, data):
            correct += int(_right(logits, y).sum())
            loss += float(_loss(logits, y, "sum"))
            labels += y.numel()
        return {"accuracy": correct / labels, "loss": loss / labels}

    def outcomes(self, model: nn.Module, data: Dataset[Any]) -> Outcomes:
        """The same image by image; of several labels the share that is right, and their mean loss."""
        correct, loss = [], []
        for logits, y in self._logits(model, data):
            right, losses = _right(logits, y), _loss(logits, y, "none")
            correct.append(right if y.ndim == 1 else right.float().mean(1))
            loss.append(losses if y.ndim == 1 else losses.mean(1))
        return Outcomes(torch.cat(correct).cpu().numpy(), torch.cat(loss).cpu().numpy())

    def test_positions(self, client: int) -> Indices:
        """The test images that stand for a client's own: the division's, see there."""
        return self.division.test(client)

    def _logits(self, model: nn.Module, data: Dataset[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Outputs and labels over `data`, batch by batch, in evaluation mode; modes are put back."""
        count = len(data)  # type: ignore[arg-type]
        if count == 0:
            raise TaskError("metrics of an empty data set")
        device = next(model.parameters()).device
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, count, self.evaluation_batch):
                    at = np.arange(start, min(start + self.evaluation_batch, count))
                    x, y = fetch(data, at, device, torch.preserve_format)
                    yield model(x), y
        finally:
            for module, training in modes.items():
                module.training = training


def _right(logits: Tensor, y: Tensor) -> Tensor:
    """Whether each label is right; bool, in the shape of the labels."""
    return (logits.argmax(1) if y.ndim == 1 else logits > 0) == y


def _loss(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    if y.ndim == 1:
        return functional.cross_entropy(logits, y, reduction=reduction)
    return functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction=reduction)


def _first_label(labels: NDArray[np.unsignedinteger[Any]]) -> NDArray[np.integer[Any]]:
    """(n,): labels as they are, or of zeros and ones (n, l) the first one, l where there is none."""
    if labels.ndim == 1:
        return labels
    first: NDArray[np.int64] = np.where(labels.any(axis=1), labels.argmax(axis=1), labels.shape[1])
    return first


def _take(train: LabelledImages, used: Indices) -> LabelledImages:
    """The images in use; of a subset a copy, so that the others can be freed."""
    if len(used) == len(train.labels):
        return train
    return LabelledImages(train.images[used], train.labels[used])


def _moments_by_channel(
    images: NDArray[np.uint8],
) -> tuple[float, float] | tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`_moments` of grey images; of coloured ones an array each, shape (3,)."""
    if images.ndim == 3:
        return _moments(images)
    channels = [_moments(images[..., channel]) for channel in range(3)]
    return np.array([mean for mean, _ in channels]), np.array([std for _, std in channels])


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
