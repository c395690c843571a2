"""Paired statistics over seeds: intervals, equivalence by two one-sided tests, Holm's correction.

The rules are scipy's and statsmodels'; here they only get their names and their limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEWEST_SEEDS = 5
"""With fewer seeds figures are shown, but nothing is claimed."""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Spread:
    """`n` values, their mean and sample standard deviation (None for a single value)."""

    n: int
    mean: float
    sd: float | None


@dataclass(frozen=True)
class Paired:
    """Differences, method less control, one per seed; everything in the unit of the values.

    `interval` is the two-sided t-interval at the level `confidence`. `inner` is the one at 2 confidence - 1 and
    `p` the p-value of the two one-sided tests against `margin`, so that p < 1 - confidence exactly where `inner`
    lies inside (-margin, margin). What needs two differences is None for one.
    """

    differences: tuple[float, ...]
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    inner: tuple[float, float] | None
    p: float | None
    margin: float
    confidence: float


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no values to take a mean of")
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(len(values), float(np.mean(values)), sd)


def paired(method: Sequence[float], control: Sequence[float], margin: float, confidence: float) -> Paired:
    """Compare values of the same seeds, in the same order. Raises ValueError for unequal numbers."""
    differences = np.subtract(method, control)
    whole = spread(differences.tolist())
    interval = inner = p = None
    if whole.sd is not None:
        interval = _interval(differences, confidence)
        inner = _interval(differences, 2 * confidence - 1)
        p = _equivalence(differences, margin)
    return Paired(tuple(differences.tolist()), whole.mean, whole.sd, interval, inner, p, margin, confidence)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family of tests (Holm, 1979), in the given order."""
    from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(p_values, method="holm")[1]] if p_values else []


def half_width(n: int, confidence: float) -> float:
    """Half of a two-sided t-interval over `n` seeds, in sample standard deviations; n = 5 at 95 %: 1.24."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, n - 1)) / math.sqrt(n)


def seeds_needed(sd: float, margin: float, confidence: float) -> int | None:
    """The fewest seeds with which equivalence could be shown at this spread if there were no difference at all.

    At that number the inner interval around 0 just fits into the margin. None if even 1000 seeds are too few.
    """
    fits = (n for n in range(2, MOST_SEEDS + 1) if sd * half_width(n, 2 * confidence - 1) < margin)
    return next(fits, None)


def _interval(differences: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    from scipy.stats import ttest_1samp

    if np.ptp(differences) == 0:  # no spread, and nothing a t-distribution could say about it
        return float(differences[0]), float(differences[0])
    low, high = ttest_1samp(differences, 0).confidence_interval(confidence)
    return float(low), float(high)


def _equivalence(differences: NDArray[np.float64], margin: float) -> float:
    """The larger p-value of the two one-sided t-tests (Schuirmann, 1987)."""
    from statsmodels.stats.weightstats import DescrStatsW

    if np.ptp(differences) == 0:
        return 0.0 if abs(differences[0]) < margin else 1.0
    return float(DescrStatsW(differences).ttost_mean(-margin, margin)[0])
