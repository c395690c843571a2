"""Randomness has names: one root seed, one stream per purpose, client, round and draw.

A stream's seed is SHA-256 of its name, so the number of draws made elsewhere never shifts it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import numpy as np


class Purpose(StrEnum):
    INIT = "init"
    PARTITION = "partition"
    VALIDATION = "validation"
    SUBSET = "subset"
    TEST_PARTITION = "test_partition"
    SELECTION = "selection"
    BATCH_ORDER = "batch_order"
    AUGMENTATION = "augmentation"
    PROXY_GATE = "proxy_gate"
    PROXY_REFRESH = "proxy_refresh"
    DROPOUT = "dropout"
    QUANTISER = "quantiser"
    PRIVACY = "privacy"
    FAULTS = "faults"


def stream_seed(root: int, purpose: Purpose, *, client: int = -1, round: int = -1, draw: int = 0) -> int:
    """Seed of a named stream: 256 bits. -1 stands for 'no particular client' or 'no particular round'."""
    name = f"fedreuse/{root}/{purpose}/{client}/{round}/{draw}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "little")


def stream(
    root: int, purpose: Purpose, *, client: int = -1, round: int = -1, draw: int = 0
) -> np.random.Generator:
    """The numpy generator of a named stream."""
    return np.random.Generator(
        np.random.PCG64(stream_seed(root, purpose, client=client, round=round, draw=draw))
    )


def cohort(root: int, round: int, total: int, per_round: int) -> tuple[int, ...]:
    """The clients selected in a round: ascending, without replacement, a pure function of its arguments."""
    chosen = stream(root, Purpose.SELECTION, round=round).choice(
        total, per_round, replace=False, shuffle=False
    )
    return tuple(sorted(int(i) for i in chosen))
