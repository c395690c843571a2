"""CIFAR-10 in its usual federated setting: ResNet-18, random crops and mirror images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.models import RESNET_STEMS, resnet18
from fedreuse.sim.tasks.augment import crop_and_flip
from fedreuse.sim.tasks.cifar_files import CIFAR10, Layout, load
from fedreuse.sim.tasks.images import ImageTask

PADDING = 4


class Cifar10(ImageTask):
    """Small colour photographs, 32x32 (Krizhevsky, 2009): 50,000 images to train on, 10,000 to test on.

    Option `stem`: how ResNet-18 begins, "imagenet" (default: torchvision's own) or "cifar"; see `resnet18`.
    Training batches are cropped from images padded with 4 black pixels, and mirrored (DG paper, section 5.1).
    """

    layout: Layout = CIFAR10
    evaluation_batch = 250  # 65 MB for each tensor of 64 channels

    def __init__(self, context: TaskContext) -> None:
        self.stem = context.options.get("stem", "imagenet")
        if self.stem not in RESNET_STEMS:
            raise TaskError(f"task.options.stem is {self.stem!r}; known: {', '.join(RESNET_STEMS)}")
        super().__init__(context, *load(context.data, self.layout), classes=self.layout.classes)

    def model(self) -> nn.Module:
        return resnet18(self.classes, self.stem)

    def augment(self, batch: Any, generator: np.random.Generator) -> Any:
        """Crop and mirror the inputs of a training batch; the labels stay."""
        x, y = batch
        return [crop_and_flip(x, generator, PADDING, torch.from_numpy(self.levels[0])), y]
