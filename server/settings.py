"""How the gRPC service listens and how long it waits. All times in seconds."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat


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
