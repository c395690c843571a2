"""CIFAR-10 and CIFAR-100 in their usual federated setting: ResNet-18, random crops and mirror images."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.augment import crop_and_flip
from fedreuse.sim.tasks.cifar_files import CIFAR10, CIFAR100, Layout, load
from fedreuse.sim.tasks.images import ImageTask

PADDING = 4


class Cifar10(ImageTask):
    """Small colour photographs, 32x32 (Krizhevsky, 2009): 50,000 images to train on, 10,000 to test on.

    Training batches are cropped from images padded with 4 black pixels, and mirrored (DG paper, section 5.1), unless
    option `augment` is false.
    """

    default_model = "resnet18"
    own_options = ("augment",)
    source: ClassVar[Layout] = CIFAR10
    evaluation_batch = 250  # 65 MB for each tensor of 64 channels

    def __init__(self, context: TaskContext) -> None:
        self._augmented = context.options.get("augment", True)
        if not isinstance(self._augmented, bool):
            raise TaskError(f"task.options.augment is {self._augmented!r}: it must be true or false")
        super().__init__(context, *load(context.data, self.source), classes=self.source.classes)

    def augment(self, batch: Any, generator: np.random.Generator) -> Any:
        """Crop and mirror the inputs of a training batch; the labels stay."""
        if not self._augmented:
            return batch
        x, y = batch
        return [crop_and_flip(x, generator, PADDING, torch.from_numpy(self.levels[0])), y]


class Cifar100(Cifar10):
    """As CIFAR-10, of 100 classes (the fine labels): 500 images of each to train on, 100 to test on."""

    source = CIFAR100
