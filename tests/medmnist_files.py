"""Small files with MedMNIST's keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COUNTS = {"train": 40, "val": 12, "test": 10}


def arrays(size: int = 28, colour: bool = False, classes: int = 3, **counts: int) -> dict[str, np.ndarray]:
    """Images of noise; the labels of each part are 0, 1, ... again and again, shape (n, 1)."""
    rng = np.random.default_rng(5)
    found = {}
    for part, count in {**COUNTS, **counts}.items():
        if count:
            shape = (count, size, size, 3) if colour else (count, size, size)
            found[f"{part}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
            found[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % classes)[:, None]
    return found


def write(path: Path, content: dict[str, np.ndarray] | None = None, **how: int) -> Path:
    """Packed, as MedMNIST's are."""
    np.savez_compressed(path, **(arrays(**how) if content is None else content))
    return path
