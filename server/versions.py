"""Past global models, so that a client that holds one is sent only what changed since."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock

from fedreuse.proto.codec import Payload, dense_payload
from fedreuse.proto.packing import State
from fedreuse.proto.schema import Schema
from fedreuse.proto.transfers import Sealed, plain, seal, seal_change

WORTH_A_CHECK = 0.7
"""A change longer than this share of the dense model is compared with the packed model."""


class Release:
    """The model of one round, in the forms in which it travels; each is made once. Safe to use from threads."""

    def __init__(self, schema: Schema, round: int, models: Mapping[int, State], *, pack: bool) -> None:
        self.round = round
        self.payload: Payload = dense_payload(schema, models[round])
        """Dense; a view of the state."""
        self._schema, self._models, self._pack = schema, models, pack
        self._sealed: dict[int | None, Sealed] = {}
        self._lock = Lock()

    def base(self, holds: int | None) -> int | None:
        """The model that a client's body is coded against, if it holds the model of round `holds`."""
        return holds if self._pack and holds in self._models and holds != self.round else None

    def sealed(self, base: int | None) -> Sealed:
        """The model against `base`, one that `base()` gave; falls back to the whole where that is shorter."""
        with self._lock:
            if base not in self._sealed:
                self._sealed[base] = self._seal(base)
            return self._sealed[base]

    def _seal(self, base: int | None) -> Sealed:
        if not self._pack:
            return plain(self.payload)
        if base is None:
            return seal(self._schema, self.payload)
        old, new = self._models[base], self._models[self.round]
        change = seal_change(self._schema, self.payload, new, (base, old))
        if change is not None and change.nbytes < WORTH_A_CHECK * self.payload.nbytes:
            return change
        whole = self._sealed.get(None) or seal(self._schema, self.payload)
        self._sealed[None] = whole
        return whole if change is None or whole.nbytes <= change.nbytes else change


class Versions:
    """The model of the coming or open round, `current`, and up to `history` older ones, by round.

    With `pack` models travel without redundancy, as a whole or as a change; otherwise as they are.
    """

    current: Release

    def __init__(self, schema: Schema, history: int, *, pack: bool) -> None:
        self._schema, self._history, self._pack = schema, history, pack
        self._models: dict[int, State] = {}

    def add(self, round: int, flat: State) -> None:
        """`flat` is the model of `round`, the newest; what became too old is forgotten."""
        known = {n: old for n, old in self._models.items() if round - self._history <= n < round}
        self._models = known | {round: flat}
        self.current = Release(self._schema, round, self._models, pack=self._pack)

    def get(self, round: int) -> State | None:
        return self._models.get(round)
