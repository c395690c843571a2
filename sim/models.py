"""Small models of the built-in tasks."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class ShallowCNN(nn.Module):
    """Two 3x3 convolutions (32 and 64 channels), each with ReLU and 2x2 max-pooling; one hidden layer of 128.

    Input (n, channels, size, size) float32, output (n, classes) logits.
    421,642 parameters for 28x28 grey images of 10 classes.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        if size < 4:
            raise ValueError(f"images of {size}x{size} pixels are too small to be pooled twice")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(x).flatten(1)))
