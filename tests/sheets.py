"""Seven small sheets of images in CIFAR-10's form, written one image after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from fedreuse.sim.tasks.cifar_files import Layout

SMALL = Layout(train=50, test=20, classes=10, rows=2, columns=5)
"""Seven sheets of ten images; of each class five images to train on and two to test on."""


def pictures() -> np.ndarray:
    """70 images of noise, each of its own."""
    return np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)


def labels() -> np.ndarray:
    return np.arange(70, dtype=np.uint8) % 10


def write_sheet(path: Path, images: np.ndarray) -> None:
    """Ten images, five beside each other, pasted one by one."""
    sheet = Image.new("RGB", (160, 64))
    for i, image in enumerate(images):
        sheet.paste(Image.fromarray(image), (32 * (i % 5), 32 * (i // 5)))
    sheet.save(path, lossless=True, method=0)


def write_sheets(data: Path) -> Path:
    """Sheets and labels in `data`/cifar10; returns `data`."""
    folder = data / "cifar10"
    folder.mkdir(parents=True)
    for number in range(7):
        name = f"train_{number:02}.webp" if number < 5 else f"test_{number - 5:02}.webp"
        write_sheet(folder / name, pictures()[10 * number : 10 * number + 10])
    np.savez(folder / "labels.npz", train_labels=labels()[:50, None], test_labels=labels()[50:, None])
    return data
