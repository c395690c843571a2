"""Top-K by magnitude, exactly: k coordinates of largest |value|, ties to the lower index (DG paper, Eq. 9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.schema import Array

_UINT = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
}


def magnitude_bits(values: Array) -> NDArray[np.unsignedinteger]:
    """Float bit patterns without the sign: unsigned integers in the order of the magnitudes."""
    unsigned = _UINT[values.dtype.itemsize]
    bits: NDArray[np.unsignedinteger] = values.view(unsigned) & unsigned(
        (1 << (8 * values.dtype.itemsize - 1)) - 1
    )
    return bits


def is_finite(values: Array) -> bool:
    """True if no float is NaN or infinite; integers are always finite."""
    limit = _INFINITY.get(values.dtype.name)
    if limit is None or values.size == 0:
        return True
    if values.dtype.name in ("float32", "float64"):
        # NaN propagates through min and max, infinities are one of them: two passes, nothing allocated.
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
    return int(magnitude_bits(values).max()) < limit


def keep_largest(values: Array, k: int) -> NDArray[np.bool_]:
    """Mask of the k kept coordinates of a one-dimensional float array; exactly k entries are True."""
    d = values.size
    if k >= d:
        return np.ones(d, bool)
    if k == 0:
        return np.zeros(d, bool)
    bits = magnitude_bits(values)
    threshold = _kth_largest(bits, k)
    mask: NDArray[np.bool_] = bits > threshold
    ties = np.flatnonzero(bits == threshold)[: k - int(np.count_nonzero(mask))]
    mask[ties] = True
    return mask


_SAMPLE = 1 << 14


def _kth_largest(bits: NDArray[np.unsignedinteger], k: int) -> np.unsignedinteger:
    """The k-th largest element, exactly; 0 < k < d.

    A sample brackets it, and only what lies in the bracket is partitioned. Should the sample mislead (the
    bracket does not hold the k-th), everything is.
    """
    d = bits.size
    if 4 * _SAMPLE <= d < 1 << 32:
        # Steps of the golden section meet rows and columns of any matrix evenly.
        spread = (np.arange(_SAMPLE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
        sample = np.sort(np.take(bits, spread * np.uint64(d) >> np.uint64(32)))
        n = sample.size
        place, margin = n - 1 - int(k * n / d), 3 * int((k / d * (1 - k / d) * n) ** 0.5) + 2
        low, high = sample[max(place - margin, 0)], sample[min(place + margin, n - 1)]
        above = bits > high
        inside = np.take(bits, np.flatnonzero((bits >= low) & ~above))
        rank = k - int(np.count_nonzero(above))
        if 0 < rank <= inside.size:
            return np.partition(inside, inside.size - rank)[inside.size - rank]  # type: ignore[no-any-return]
    return np.partition(bits, d - k)[d - k]  # type: ignore[no-any-return]
