"""Partitions as files, and their hash.

`partition.npz` of a run folder holds `rule`, a JSON object: how the examples were divided, and SHA-256 of the result
and of the training labels. Unless that is a rule for each client by itself (`resample`), there are `sizes`, shape
(clients,), and `indices`: the positions in the whole training data of the first client's examples, then of the
second's, and so on.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedreuse.sim.partition.settings import Indices, Labels, PartitionError


def partition_hash(parts: Iterable[Indices]) -> str:
    """SHA-256 (hexadecimal) of a partition: per client its size, then its indices, little-endian int64."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.concatenate([[len(part)], part]).astype("<i8").tobytes())
    return digest.hexdigest()


def labels_hash(labels: Labels) -> str:
    """SHA-256 (hexadecimal) of labels in their order, as little-endian int64."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def write_partition(path: Path, rule: Mapping[str, Any], parts: Sequence[Indices] | None = None) -> None:
    """Write a file of a few bytes an example; the same partition gives the same bytes."""
    arrays = {"rule": np.array(json.dumps(rule))}
    if parts is not None:
        arrays["sizes"] = np.array([len(part) for part in parts], np.uint32)
        arrays["indices"] = np.concatenate(parts).astype(np.uint32)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_partition(path: Path, labels: Labels, clients: int) -> list[Indices]:
    """Each client's examples, as positions in the whole training data with these labels.

    Raises PartitionError if the file cannot be read, is damaged, or belongs to other data or clients.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            rule = json.loads(str(arrays["rule"]))
            sizes, indices = (arrays[name].astype(np.int64) for name in ("sizes", "indices"))
            _check(sizes, indices, len(labels))
            made_for = str(rule["labels_sha256"])
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise PartitionError(
            f"{path} is damaged: {error}; restore it from a copy, or start another run"
        ) from None
    if made_for != (found := labels_hash(labels)):
        raise PartitionError(
            f"{path} divides other data: its training labels had SHA-256 {made_for}, those of the task have {found}; "
            "restore the data, or start another run"
        )
    if len(sizes) != clients:
        raise PartitionError(f"{path} divides examples over {len(sizes)} clients, not {clients}")
    return np.split(indices, np.cumsum(sizes)[:-1])


def _check(sizes: Indices, indices: Indices, count: int) -> None:
    if sizes.ndim != 1 or indices.ndim != 1 or len(sizes) == 0 or sizes.min() < 1:
        raise ValueError(f"sizes and indices of shapes {sizes.shape} and {indices.shape}, or an empty client")
    if sizes.sum() != len(indices):
        raise ValueError(f"sizes of {sizes.sum()} examples in all, but {len(indices)} indices")
    if indices.min() < 0 or indices.max() >= count or len(np.unique(indices)) != len(indices):
        raise ValueError(f"indices that are not different numbers from 0 to {count - 1}")
