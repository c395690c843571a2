"""The small batch-normalisation task of the twin test: answers come in another order at every run."""

from __future__ import annotations

import random
import time
from typing import Any

from support import Grid
from torch import Tensor, nn


class ShuffledGrid(Grid):
    """Grid, with a pause of random length in every loss; the numbers are the same."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(random.SystemRandom().uniform(0, 0.02))
        return super().loss(model, batch)
