"""Models of the built-in tasks."""

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


RESNET_STEMS = ("imagenet", "cifar")


def resnet18(classes: int, stem: str = "imagenet") -> nn.Module:
    """torchvision's ResNet-18 (He et al., 2016) for colour images; its head is `fc`.

    stem "imagenet": torchvision's own, a 7x7 convolution of stride 2 and max-pooling, meant for 224x224 pixels;
    11,181,642 parameters for 10 classes. "cifar": one 3x3 convolution of stride 1 and no pooling, as He et al.
    begin their CIFAR networks; 11,173,962 parameters and thirteen times the work on 32x32 pixels.
    """
    from torchvision import models  # 1 s and 170 MB, not spent on the other models

    model = cast(nn.Module, models.resnet18(num_classes=classes))
    if stem == "cifar":
        first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
        model.conv1, model.maxpool = first, nn.Identity()
    elif stem != "imagenet":
        raise ValueError(f"stem {stem!r}; known: {', '.join(RESNET_STEMS)}")
    return model
