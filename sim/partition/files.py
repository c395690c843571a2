"""Partitions as files, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from fedreuse.sim.partition.settings import Indices


def partition_hash(parts: Iterable[Indices]) -> str:
    """SHA-256 (hexadecimal) of a partition: per client its size, then its indices, little-endian int64."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.array([len(part), *part], "<i8").tobytes())
    return digest.hexdigest()
