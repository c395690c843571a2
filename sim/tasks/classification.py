"""Loss and metrics of tasks that tell classes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from fedreuse.client.batches import fetch
from fedreuse.client.errors import TaskError


class Classification:
    """Cross-entropy and accuracy, of one label an example or of several."""

    evaluation_batch = 1000
    """Examples evaluated at once. Float sums depend on it in their last digits."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy; batch: inputs and labels (b,).

        With labels (b, classes) each is a yes or no of its own: mean binary cross-entropy over examples and labels.
        """
        x, y = batch
        return _loss(model(x), y, "mean")

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        """Accuracy (0 to 1) and mean loss over `data`, in evaluation mode; modes are put back.

        Accuracy is the share of right labels. Where an example can have several, each counts, a probability above 0.5
        being a yes: the mean over labels of the accuracy of each, as MedMNIST's evaluator has it.
        """
        count = len(data)  # type: ignore[arg-type]
        if count == 0:
            raise TaskError("metrics of an empty data set")
        device = next(model.parameters()).device
        modes = {module: module.training for module in model.modules()}
        labels, correct, loss = 0, 0, 0.0
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, count, self.evaluation_batch):
                    at = np.arange(start, min(start + self.evaluation_batch, count))
                    x, y = fetch(data, at, device, torch.preserve_format)
                    logits = model(x)
                    guess = logits.argmax(1) if y.ndim == 1 else logits > 0
                    correct += int((guess == y).sum())
                    loss += float(_loss(logits, y, "sum"))
                    labels += y.numel()
        finally:
            for module, training in modes.items():
                module.training = training
        return {"accuracy": correct / labels, "loss": loss / labels}


def _loss(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    if y.ndim == 1:
        return functional.cross_entropy(logits, y, reduction=reduction)
    return functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction=reduction)
