"""Modelled bytes: the numerical fields a paper counts (DG paper, Eq. 9-16). Nothing here is measured.

A tensor is (d, b): d coordinates of b bytes. Integer buffers count like everything else, with their true
width, although they never travel.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor

REUSE_EVENT_BYTES = 16
"""The paper's fixed charge for one reused client (section 4.5)."""

INDEX_BYTES = 4
"""A coordinate index is an int32 in the pairs form."""


def kept(d: int, ratio: float) -> int:
    """k = min(d, max(1, floor(r d))), Eq. 9."""
    return min(d, max(1, floor(ratio * d)))


def dense(d: int, b: int) -> int:
    """Eq. 10."""
    return d * b


def pairs(k: int, b: int) -> int:
    """Eq. 11: k values with k int32 indices."""
    return k * (b + INDEX_BYTES)


def bitmap(d: int, k: int, b: int) -> int:
    """Eq. 12: k values and one bit per coordinate."""
    return k * b + (d + 7) // 8


def tensor_bytes(d: int, b: int, ratio: float) -> int:
    """The smallest of the three forms for one tensor."""
    k = kept(d, ratio)
    return min(dense(d, b), pairs(k, b), bitmap(d, k, b))


def update_bytes(tensors: Iterable[tuple[int, int]], ratio: float) -> int:
    """B_i: one fresh update over the whole state dict."""
    return sum(tensor_bytes(d, b, ratio) for d, b in tensors)


def dense_bytes(tensors: Iterable[tuple[int, int]]) -> int:
    """B_0: one dense state."""
    return sum(dense(d, b) for d, b in tensors)


def uplink_saving(uplink: int, selected: int, dense_state: int) -> float:
    """s = 1 - M / (m B_0), Eq. 15. `selected` may sum m over rounds; `uplink` is M over the same rounds."""
    return 1 - uplink / (selected * dense_state)


def symmetric_saving(both_directions: int, selected: int, dense_state: int) -> float:
    """s_sym = 1 - (down + M) / (2 m B_0), Eq. 16, where the model has down = m B_0."""
    return 1 - both_directions / (2 * selected * dense_state)
