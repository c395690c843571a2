"""What a federation does in its rounds, and how the gRPC service listens and waits. All times in seconds."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from fedreuse.server.aggregate import StepSettings
from fedreuse.server.gate import GateSettings
from fedreuse.server.memory import MemorySettings
from fedreuse.server.outcome import ARCHIVAL_COLUMNS, ROUND_COLUMNS


class FederationSettings(BaseModel):
    """What the server side of a run needs to know. Rounds are counted, clients are indices below `total`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, ge=0, lt=1 << 63)
    rounds: int = Field(90, ge=1, le=1_000_000)
    total: int = Field(50, ge=1, le=1_000_000_000)
    per_round: int = Field(10, ge=1)
    minimum: int = Field(1, ge=1, description="contributions below which a round has no effect")
    keep_ratio: FiniteFloat = Field(1.0, gt=0, le=1)
    pack: bool = True
    history: int = Field(16, ge=0, le=10_000)
    gate: GateSettings = GateSettings()
    memory: MemorySettings = MemorySettings()
    step: StepSettings = StepSettings()
    evaluate_every: int = Field(5, ge=1)
    patience: int | None = Field(None, ge=1, description="evaluations without a better validation accuracy")
    archival: bool = Field(
        False, description="rounds.csv has test accuracies, and each row says that it is so"
    )

    @model_validator(mode="after")
    def _consistent(self) -> FederationSettings:
        if self.per_round > self.total:
            raise ValueError(f"{self.per_round} clients per round of {self.total} in total")
        if self.minimum > self.per_round:
            raise ValueError(f"{self.minimum} contributions wanted of {self.per_round} clients per round")
        if self.gate.kind != "none" and self.memory.kind == "none":
            raise ValueError(f"gate {self.gate.kind!r} decides on reuse, so memory.kind must not be 'none'")
        return self

    @property
    def round_columns(self) -> tuple[str, ...]:
        """Of rounds.csv."""
        return ROUND_COLUMNS + ARCHIVAL_COLUMNS if self.archival else ROUND_COLUMNS


class TlsSettings(BaseModel):
    """PEM files. With `client_ca` only clients with a certificate signed by it are let in.

    `ca` is what clients started by `launch` or with --run trust; by default the certificate itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    certificate: Path
    key: Path
    ca: Path | None = None
    client_ca: Path | None = None


class ServerSettings(BaseModel):
    """`minimum` contributions make a round count; every wait is derived from the numbers here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(0, ge=0, le=65535, description="0 picks a free port")
    join_deadline: FiniteFloat = Field(300, gt=0, description="round 1 starts then, whoever has joined")
    round_deadline: FiniteFloat = Field(600, gt=0, description="a round closes then, whoever has answered")
    rejoin_grace: FiniteFloat = Field(10, ge=0, description="a lost connection may come back within")
    heartbeat: FiniteFloat = Field(
        10, gt=0, description="between heartbeats; three missed ones are a lost peer"
    )
    minimum: int = Field(1, ge=1, description="contributions below which a round has no effect")
    tls: TlsSettings | None = Field(
        None, description="certificate, key, ca and client_ca, PEM files; null: no TLS"
    )
