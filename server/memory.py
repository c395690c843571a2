"""Old updates the server keeps: encoded as they came, decoded when used, scaled by their age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedreuse.proto.codec import Payload


class MemorySettings(BaseModel):
    """kind: "none" keeps nothing; "reuse" keeps each client's last accepted update (DG paper, Eq. 7)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "reuse"] = "none"
    max_age: int = Field(
        4, ge=1, description="S, age in rounds at which a cached update is not used any more"
    )
    decay: FiniteFloat = Field(0.7279635, gt=0, le=1, description="ρ, factor per round of age")

    def factor(self, age: int) -> float:
        """ρ^a, Eq. 7."""
        return self.decay**age

    def usable(self, age: int) -> bool:
        """A cached update counts only while a < S (Eq. 4 and 17)."""
        return age < self.max_age


@dataclass(frozen=True, slots=True)
class CachedUpdate:
    """The parameter part of a client's update of `round`."""

    round: int
    payload: Payload
