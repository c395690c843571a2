"""What both contenders move: the same two models in float32, and a small change that differs by client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

MODELS = ("small", "large")
CLIENTS = 10
_STATISTICS = ("running_mean", "running_var")


def is_buffer(name: str) -> bool:
    """True for the running statistics of a batch normalisation."""
    return name.endswith(_STATISTICS)


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Tensors of a CNN with 421,642 parameters, or of a ResNet-18 with 10 classes (11,181,642 weights)."""
    return dict(_cnn() if model == "small" else _resnet18())


def arrays(model: str) -> dict[str, NDArray[np.float32]]:
    """Noise of the size of real weights: as hard to compress."""
    rng = np.random.default_rng(2026)
    return {
        name: 0.05 * rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes(model).items()
    }


def change(client: int) -> np.float32:
    """What a client adds to every element; no two clients send the same bytes."""
    return np.float32(1e-3 + 1e-8 * client)


def _dense(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _cnn() -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, inputs, outputs in (("conv1", 1, 32), ("conv2", 32, 64)):
        yield f"{name}.weight", (outputs, inputs, 3, 3)
        yield f"{name}.bias", (outputs,)
    yield from _dense("fc1", 64 * 7 * 7, 128)
    yield from _dense("fc2", 128, 10)


def _normalised(
    conv: str, norm: str, inputs: int, outputs: int, kernel: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{conv}.weight", (outputs, inputs, kernel, kernel)
    for part in ("weight", "bias", *_STATISTICS):
        yield f"{norm}.{part}", (outputs,)


def _resnet18() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _normalised("conv1", "bn1", 3, 64, 7)
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            at = f"layer{stage}.{block}"
            yield from _normalised(f"{at}.conv1", f"{at}.bn1", inputs, width, 3)
            yield from _normalised(f"{at}.conv2", f"{at}.bn2", width, width, 3)
            if inputs != width:
                yield from _normalised(f"{at}.downsample.0", f"{at}.downsample.1", inputs, width, 1)
            inputs = width
    yield from _dense("fc", 512, 10)
