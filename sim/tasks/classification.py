"""Loss and metrics of tasks that tell classes apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from fedreuse.client.batches import fetch
from fedreuse.client.errors import TaskError
from fedreuse.client.task import Outcomes
from fedreuse.sim.partition import Indices
from fedreuse.sim.tasks.division import Division


class Classification:
    """Cross-entropy and accuracy, of one label an example or of several."""

    division: Division

    evaluation_batch = 1000
    """Examples evaluated at once. Float sums depend on it in their last digits."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy; batch: inputs and labels (b,).

        With labels (b, classes) each is a yes or no of its own: mean binary cross-entropy over examples and labels.
        """
        x, y = batch
        return _loss(model(x), y, "mean")

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """The losses (b,) whose mean `loss` is."""
        x, y = batch
        losses = _loss(model(x), y, "none")
        return losses if y.ndim == 1 else losses.mean(1)

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        """Accuracy (0 to 1) and mean loss over `data`, in evaluation mode; modes are put back.

        Accuracy is the share of right labels. Where an example can have several, each counts, a probability above 0.5
        being a yes: the mean over labels of the accuracy of each, as MedMNIST's evaluator has it.
        """
        labels, correct, loss = 0, 0, 0.0
        for logits, y in self._logits(model, data):
            correct += int(_right(logits, y).sum())
            loss += float(_loss(logits, y, "sum"))
            labels += y.numel()
        return {"accuracy": correct / labels, "loss": loss / labels}

    def outcomes(self, model: nn.Module, data: Dataset[Any]) -> Outcomes:
        """The same example by example; of several labels the share that is right, and their mean loss."""
        correct, loss = [], []
        for logits, y in self._logits(model, data):
            right, losses = _right(logits, y), _loss(logits, y, "none")
            correct.append(right if y.ndim == 1 else right.float().mean(1))
            loss.append(losses if y.ndim == 1 else losses.mean(1))
        return Outcomes(torch.cat(correct).cpu().numpy(), torch.cat(loss).cpu().numpy())

    def test_positions(self, client: int) -> Indices:
        """The test examples that stand for a client's own: the division's, see there."""
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
