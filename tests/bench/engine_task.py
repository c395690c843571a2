"""The simulation benchmark's work: clients of equal size, every example trained on, nothing evaluated on the way.

The same images and number of steps as in the hand-written loop's `task.py`: digits of 8x8 pixels made 28x28 by
repeating pixels, or MNIST; inputs from 0 to 1; tested on the images trained on (digits) or the test set (MNIST).
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.images import ImageSet, ImageTask, LabelledImages
from fedreuse.sim.tasks.mnist import MNIST_SOURCE, load

SIDE = 28


class _Whole(ImageTask):
    """No example is kept for validation."""

    brightest: int

    def __init__(self, context: TaskContext, train: LabelledImages, test: LabelledImages) -> None:
        super().__init__(context, train, test, classes=10)
        self.levels = (np.arange(256) / self.brightest).astype(np.float32)

    def client_data(self, client: int) -> ImageSet:
        return ImageSet(self._train, self.division.examples(client), self.levels)

    def validation(self) -> None:  # type: ignore[override]
        return None


class Digits(_Whole):
    """1,797 images: 17 or 18 for each of 100 clients."""

    brightest = 16

    def __init__(self, context: TaskContext) -> None:
        flat, digits = load_digits(return_X_y=True)
        at = np.arange(SIDE) * 8 // SIDE
        images = flat.reshape(-1, 8, 8).astype(np.uint8)[:, at][:, :, at]
        whole = LabelledImages(images, digits.astype(np.uint8))
        super().__init__(context, whole, whole)


class MNIST(_Whole):
    """60,000 images: 600 for each of 100 clients."""

    brightest = 255

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context, *load(MNIST_SOURCE, context.data))
