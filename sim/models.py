"""Models of the built-in tasks, and which of them takes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from fedreuse.client.errors import TaskError

# ReLU follows the pooling: the outputs and gradients of the usual order, bit for bit, and a quarter of its work.


class ShallowCNN(nn.Module):
    """Two 3x3 convolutions (32 and 64 channels), each with 2x2 max-pooling and ReLU; one hidden layer of 128.

    Input (n, channels, size, size) float32, output (n, classes) logits.
    421,642 parameters for 28x28 grey images of 10 classes.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        if size < 4:
            raise ValueError(f"images of {size}x{size} pixels are too small to be pooled twice")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (size // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(x).flatten(1)))


class LeNet5(nn.Module):
    """LeCun et al. (1998), Fig. 2, with ReLU and max-pooling: convolutions of 6 and 16, layers of 120 and 84.

    Input (n, channels, size, size) float32, output (n, classes) logits. The original takes 32x32; smaller images get
    2 pixels of zeros on each side, which makes 28x28 the same.
    61,706 parameters for 28x28 grey images of 10 classes, 62,006 for 32x32 colour images.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        padding = 2 if size < 32 else 0
        last = ((size + 2 * padding - 4) // 2 - 4) // 2
        if last < 1:
            raise ValueError(f"images of {size}x{size} pixels are too small for two 5x5 convolutions")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * last**2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(x).flatten(1)))


class CharGRU(nn.Module):
    """The next character after a context: embedding of 8, two GRU layers of 256 (LEAF's sizes; there an LSTM).

    Input (n, length) int64, below `classes`; output (n, classes) logits of the character that follows.
    616,265 parameters for 65 characters. Source: Caldas et al. (2018); McMahan et al. (2017), section 3.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.gru = nn.GRU(8, 256, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(x))
        return cast(Tensor, self.classifier(states[:, -1]))


RESNET_STEMS = ("imagenet", "cifar")
GROUPS = 32


def resnet18(
    classes: int,
    stem: str = "imagenet",
    channels: int = 3,
    norm: Callable[[int], nn.Module] | None = None,
) -> nn.Module:
    """torchvision's ResNet-18 (He et al., 2016); its head is `fc`.

    stem "imagenet": torchvision's own, a 7x7 convolution of stride 2 and max-pooling, meant for 224x224 pixels;
    11,181,642 parameters for 10 classes. "cifar": one 3x3 convolution of stride 1 and no pooling, as He et al.
    begin their CIFAR networks; 11,173,962 parameters and thirteen times the work on 32x32 pixels.
    channels: of the images; with other than 3 the first convolution is made anew. norm: makes the normalisation of
    so many channels; default batch normalisation.
    """
    from torchvision import models  # 1 s and 170 MB, not spent on the other models

    model = cast(nn.Module, models.resnet18(num_classes=classes, norm_layer=norm))
    if stem not in RESNET_STEMS:
        raise ValueError(f"stem {stem!r}; known: {', '.join(RESNET_STEMS)}")
    if stem == "imagenet" and channels == 3:
        return model
    if stem == "cifar":
        first = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        first = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's
    model.conv1 = first
    return model


def group_norm(channels: int) -> nn.Module:
    """32 groups (Wu & He, 2018), or a group a channel where there are fewer."""
    return nn.GroupNorm(min(GROUPS, channels), channels)


# ---------------------------------------------------------------- choosing one


@dataclass(frozen=True, slots=True)
class Images:
    """Square images as inputs: (n, channels, size, size)."""

    channels: int
    size: int

    def __str__(self) -> str:
        return (
            f"images of {self.size}x{self.size} pixels in {self.channels} channel{'s'[: self.channels > 1]}"
        )


@dataclass(frozen=True, slots=True)
class Characters:
    """Texts of `length` characters as inputs: (n, length) indices."""

    length: int

    def __str__(self) -> str:
        return f"texts of {self.length} characters"


Inputs = Images | Characters


@dataclass(frozen=True)
class ModelKind:
    """smallest: it takes images of at least so many pixels a side, or, if None, texts; options: names and values."""

    make: Callable[..., nn.Module]
    smallest: int | None
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def can_take(self, inputs: Inputs) -> bool:
        if isinstance(inputs, Images):
            return self.smallest is not None and inputs.size >= self.smallest
        return self.smallest is None

    @property
    def takes(self) -> str:
        if self.smallest is None:
            return "texts"
        return f"images of {self.smallest}x{self.smallest} pixels or more"


_STEM = {"stem": RESNET_STEMS}

MODELS = {
    "cnn": ModelKind(lambda i, n: ShallowCNN(i.channels, i.size, n), smallest=4),
    "lenet5": ModelKind(lambda i, n: LeNet5(i.channels, i.size, n), smallest=12),
    "resnet18": ModelKind(
        lambda i, n, stem="imagenet": resnet18(n, stem, i.channels), smallest=4, options=_STEM
    ),
    "resnet18-gn": ModelKind(
        lambda i, n, stem="imagenet": resnet18(n, stem, i.channels, group_norm), smallest=4, options=_STEM
    ),
    "gru": ModelKind(lambda _i, n: CharGRU(n), smallest=None),
}
"""By the name that `task.model` has. resnet18-gn has no statistics that depend on who is in a batch, which is why
federated learning likes it (Hsieh et al., 2020; Reddi et al., 2021)."""


@dataclass(frozen=True)
class Chosen:
    """A model that fits a task; called, it makes a fresh one."""

    name: str
    inputs: Inputs
    outputs: int
    options: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        return MODELS[self.name].make(self.inputs, self.outputs, **self.options)


FRAME = ("model", "train_limit", "partition")
"""Of a task's options, those that are keys of the configuration and not below `task.options`."""


def choose(
    given: Mapping[str, Any], default: str, inputs: Inputs, outputs: int, own: Sequence[str] = ()
) -> Chosen:
    """What makes models for these inputs, with `outputs` logits: by `given["model"]`, else the default.

    given: a task's options; all but `FRAME` and the task's `own` belong to the model. Raises TaskError, with what
    would do instead.
    """
    name = given.get("model") or default
    fitting = [known for known, kind in MODELS.items() if kind.can_take(inputs)]
    if name not in MODELS:
        raise TaskError(f"no model called {name!r}; task.model is one of {', '.join(fitting)} for this task")
    kind = MODELS[name]
    if name not in fitting:
        raise TaskError(
            f"task.model {name!r} takes {kind.takes}, and this task has {inputs}; "
            f"task.model can be one of: {', '.join(fitting) or 'none of those built in'}"
        )
    options = {key: value for key, value in given.items() if key not in (*FRAME, *own)}
    for key, value in options.items():
        if key not in kind.options:
            having = [known for known in fitting if key in MODELS[known].options]
            known = ", ".join([*own, *kind.options]) or "none"
            raise TaskError(
                f"task.options.{key} is of the models {', '.join(having)}, not of {name}"
                if having
                else f"task.options.{key} is unknown; this task with model {name} has options: {known}"
            )
        if value not in kind.options[key]:
            raise TaskError(f"task.options.{key} is {value!r}; known: {', '.join(kind.options[key])}")
    return Chosen(name, inputs, outputs, options)
