"""Faults that cross the wire, each with the protocol's machine-readable code."""

from __future__ import annotations

from fedreuse.proto import federation_pb2 as pb

SESSION_CODES_FROM = 100
"""Codes from here on end a session; smaller ones concern one message or one round."""


HARMLESS = frozenset({pb.UNEXPECTED, pb.DUPLICATE, pb.LATE, pb.WRONG_ROUND})
"""Refusals that say nothing about the sender's ability to go on with the round."""


class ProtocolError(Exception):
    """Something from a peer that cannot be accepted.

    `code` is a `pb.Code`; the text says what was wrong, where, and what was expected.
    """

    def __init__(self, code: pb.Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail

    def __reduce__(self) -> tuple[type[ProtocolError], tuple[pb.Code, str]]:
        # It crosses process boundaries, and Exception would hand on the detail alone.
        return ProtocolError, (self.code, self.detail)

    def __str__(self) -> str:
        return f"{code_name(self.code)}: {self.detail}"


def code_name(code: int) -> str:
    """Name of a code; a number this version does not know is shown as a number."""
    return pb.Code.Name(code) if code in pb.Code.values() else f"code {code}"
