"""Taking something from a body that is perhaps not in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.entropy import Reader
from fedreuse.proto.errors import ProtocolError


def refused(body: bytes, take: Callable[[Reader], object], text: str | None = None) -> None:
    """Taking something from this body fails as MALFORMED, in words that match."""
    with pytest.raises(ProtocolError, match=text) as caught:
        take(Reader(body, "test"))
    assert caught.value.code == pb.MALFORMED


def taken(body: bytes, take: Callable[[Reader], object]) -> Any:
    """What was taken, or None if that was refused as MALFORMED; any other exception is a failure."""
    try:
        return take(Reader(body, "test"))
    except ProtocolError as error:
        if error.code != pb.MALFORMED:
            raise
        return None
