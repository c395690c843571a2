"""Planned faults: part of a run's configuration, played alike by every body of the federation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Phase = Literal["score", "train", "upload"]


class Fault(BaseModel):
    """Client `client` fails in `round` (counted from 1) when it comes to `phase`.

    phase: "score" on the request for a score, "train" on the order to train, "upload" when the training is
    done and its state staged. kind: "crash" (the process dies; what it kept on disk survives), "wipe" (its
    disk is lost, too), "stall" (it never answers in this round), "garbage" (phase upload only: a body that
    does not match its checksum), "error" (it reports that it failed). After a crash or wipe it is back in
    round `back` (default: the next one).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    round: int = Field(ge=1)
    client: int = Field(ge=0)
    phase: Phase = "train"
    kind: Literal["crash", "wipe", "stall", "garbage", "error"] = "crash"
    back: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Fault:
        if self.back is not None and (self.kind not in ("crash", "wipe") or self.back <= self.round):
            raise ValueError("back needs kind crash or wipe and must be later than round")
        if self.kind == "garbage" and self.phase != "upload":
            raise ValueError("kind garbage needs phase upload")
        return self

    @property
    def dies(self) -> bool:
        return self.kind in ("crash", "wipe")

    @property
    def returns(self) -> int:
        """The first round (from 1) in which the client is there again."""
        return self.back or self.round + 1


class FaultPlan:
    """Looks faults up. Rounds here count from 0, as everywhere in the code."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = tuple(faults)

    def at(self, round: int, client: int, phase: Phase) -> Fault | None:
        for fault in self._faults:
            if (fault.round - 1, fault.client, fault.phase) == (round, client, phase):
                return fault
        return None

    def deaths(self, round: int) -> list[Fault]:
        """Faults of a round after which the client is gone."""
        return [fault for fault in self._faults if fault.dies and fault.round - 1 == round]
