"""The default task: 1,797 handwritten digits of 8x8 pixels that come with scikit-learn, no download.

Source: UCI "Optical Recognition of Handwritten Digits" (Alpaydin & Kaynak, 1998), its test part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedreuse.client.task import TaskContext
from fedreuse.sim.partition import stratified_subset
from fedreuse.sim.tasks.images import ImageTask, LabelledImages

TEST_SIZE = 360
_TEST_ROOT = -1
"""Root of the test set's stream: every seed has the same test set. No run's seed is negative."""


class Digits(ImageTask):
    """Digits 0 to 9, pixel levels 0 to 16: 1,437 images to train on, 360 (35 to 37 a digit) to test on."""

    terms = "comes with scikit-learn"

    @staticmethod
    def at_hand(_data: Path) -> bool:
        return True

    def __init__(self, context: TaskContext) -> None:
        flat, digits = load_digits(return_X_y=True)
        images = flat.reshape(-1, 8, 8).astype(np.uint8)
        labels = digits.astype(np.uint8)
        test = stratified_subset(labels, TEST_SIZE, _TEST_ROOT)
        train = np.setdiff1d(np.arange(len(labels)), test)
        super().__init__(
            context,
            train=LabelledImages(images[train], labels[train]),
            test=LabelledImages(images[test], labels[test]),
            classes=10,
        )
