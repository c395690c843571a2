"""What a client's work yields. Apart from the participant, so that talking needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.transfers import Sealed


@dataclass(frozen=True, slots=True)
class Score:
    """D, and the round of the signature it was compared with (None: the client holds none, D is 1)."""

    value: float
    signature_round: int | None


@dataclass(frozen=True, slots=True)
class Learned:
    """What a local training of `steps` optimiser steps yields, its Top-K taken, not coded for a wire."""

    payload: Payload
    steps: int
    train_loss: float


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """The update of a local training of `steps` optimiser steps, ready to travel."""

    sealed: Sealed
    steps: int
    train_loss: float


def failure(error: Exception) -> tuple[pb.Code, str]:
    """How a client reports its own failure to the server."""
    if isinstance(error, ProtocolError):
        return error.code, error.detail
    return pb.CLIENT_FAILED, f"{type(error).__name__}: {error}"
