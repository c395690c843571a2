"""Which selected clients must train afresh and whose cached update can be used again (DG paper, Eq. 2-4)."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, exp
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat


class GateSettings(BaseModel):
    """The gate's constants; the defaults are the DG paper's.

    kind: "none" trains everybody, "score" asks clients for their proxy discrepancy D, "age" looks at the
    cache's age alone (D = 0 for everybody).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "score", "age"] = "none"
    tau_start: FiniteFloat = Field(0.9116988, ge=0, le=2, description="τ0, threshold in round 0")
    tau_min: FiniteFloat = Field(
        0.8134931, ge=0, le=2, description="τmin, the threshold never falls below it"
    )
    gamma: FiniteFloat = Field(0.01, ge=0, description="γ, decay of the threshold per round")
    quota: FiniteFloat = Field(0.30, ge=0, le=1, description="q, minimum share of fresh clients")
    score_all: bool = Field(False, description="score age-forced clients too (for studies)")

    def threshold(self, round: int) -> float:
        """τ_t = max(τmin, τ0 e^(-γ t)), Eq. 3; t counts from 0."""
        return max(self.tau_min, self.tau_start * exp(-self.gamma * round))

    def minimum_fresh(self, selected: int) -> int:
        """ceil(q m): the quota. The tiny margin keeps 0.28 * 25 = 7.000000000000001 at 7."""
        return ceil(self.quota * selected - 1e-9)


def promotion_order(candidates: Iterable[tuple[int, float, int]]) -> list[int]:
    """Clients in the order in which the quota promotes them.

    Candidates are (client, score D, round of the cached update): largest D first, then the oldest cache,
    then the lower index.
    """
    ordered = sorted(candidates, key=lambda c: (-c[1], c[2], c[0]))
    return [client for client, _, _ in ordered]
