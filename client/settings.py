"""The client's parts and their constants; a run's plan travels from the server to every client."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainSettings(_Part):
    """Local SGD; the defaults are the DG paper's protocol (section 5.2)."""

    local_epochs: int = Field(3, ge=1, le=10_000, description="E")
    batch_size: int = Field(128, ge=1, le=1 << 20)
    learning_rate: FiniteFloat = Field(0.05, gt=0, description="ηc")
    momentum: FiniteFloat = Field(0.9, ge=0, lt=1)
    weight_decay: FiniteFloat = Field(1e-4, ge=0)
    memory_format: Literal["contiguous", "channels_last"] = "channels_last"
    amp: bool = Field(False, description="mixed precision on CUDA devices")


class ObjectiveSettings(_Part):
    """kind "plain": F_i(w); "proximal": F_i(w) + mu/2 ||w - w_t||^2 (DG paper, Eq. 5)."""

    kind: Literal["plain", "proximal"] = "plain"
    mu: FiniteFloat = Field(0.0, ge=0)


class CompressorSettings(_Part):
    """kind "dense" sends the whole delta, "topk" the share `ratio` of each tensor (DG paper, Eq. 9)."""

    kind: Literal["dense", "topk"] = "dense"
    ratio: FiniteFloat = Field(0.2, gt=0, le=1, description="r")

    @property
    def keep_ratio(self) -> float:
        return 1.0 if self.kind == "dense" else self.ratio


class ProxySettings(_Part):
    """The head-gradient signature (DG paper, sections 4.1 and 4.3)."""

    batches: int = Field(5, ge=1, le=10_000)
    batch_size: int = Field(64, ge=1, le=1 << 20)
    keep: FiniteFloat = Field(0.9, ge=0, lt=1, description="signature = keep * old + (1 - keep) * refresh")
    head: tuple[str, ...] = Field(("classifier", "fc"), min_length=1)


class ClientPlan(_Part):
    """Everything all clients of a run do alike.

    `proxy` is None if the method scores nobody; with `pack` updates travel without redundancy.
    """

    seed: int = Field(ge=0, lt=1 << 63)
    train: TrainSettings = TrainSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    compressor: CompressorSettings = CompressorSettings()
    proxy: ProxySettings | None = None
    pack: bool = True

    def to_proto(self) -> pb.ClientPlan:
        plan = pb.ClientPlan(
            seed=self.seed,
            local_epochs=self.train.local_epochs,
            batch_size=self.train.batch_size,
            learning_rate=self.train.learning_rate,
            momentum=self.train.momentum,
            weight_decay=self.train.weight_decay,
            proximal_mu=self.objective.mu if self.objective.kind == "proximal" else 0.0,
            keep_ratio=self.compressor.keep_ratio,
            memory_format=self.train.memory_format,
            amp=self.train.amp,
            pack=self.pack,
        )
        if self.proxy is not None:
            plan.proxy.CopyFrom(
                pb.ProxyPlan(
                    batches=self.proxy.batches,
                    batch_size=self.proxy.batch_size,
                    keep=self.proxy.keep,
                    head=self.proxy.head,
                )
            )
        return plan

    @staticmethod
    def from_proto(plan: pb.ClientPlan) -> ClientPlan:
        """A checked plan from the server. Raises ProtocolError naming the first bad field."""
        try:
            return ClientPlan.model_validate(
                {
                    "seed": plan.seed,
                    "train": {
                        "local_epochs": plan.local_epochs,
                        "batch_size": plan.batch_size,
                        "learning_rate": plan.learning_rate,
                        "momentum": plan.momentum,
                        "weight_decay": plan.weight_decay,
                        "memory_format": plan.memory_format,
                        "amp": plan.amp,
                    },
                    "objective": {
                        "kind": "proximal" if plan.proximal_mu else "plain",
                        "mu": plan.proximal_mu,
                    },
                    "compressor": {"kind": "topk", "ratio": plan.keep_ratio},
                    "pack": plan.pack,
                    "proxy": {
                        "batches": plan.proxy.batches,
                        "batch_size": plan.proxy.batch_size,
                        "keep": plan.proxy.keep,
                        "head": tuple(plan.proxy.head),
                    }
                    if plan.HasField("proxy")
                    else None,
                }
            )
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProtocolError(
                pb.MALFORMED, f"the server's plan has a bad {where}: {first['msg']}"
            ) from None
