"""The small batch-normalisation tasks of the twin test: answers come in another order at every run."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from support import Grid
from torch import Tensor, nn

from fedreuse.sim.tasks.augment import crop_and_flip


class ShuffledGrid(Grid):
    """Grid, with a pause of random length in every loss; the numbers are the same."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(random.SystemRandom().uniform(0, 0.02))
        return super().loss(model, batch)


class AugmentedGrid(ShuffledGrid):
    """ShuffledGrid, its training pictures cropped and mirrored at random."""

    def augment(self, batch: Any, generator: np.random.Generator) -> Any:
        x, y = batch
        return [crop_and_flip(x, generator, 1, torch.zeros(1)), y]
