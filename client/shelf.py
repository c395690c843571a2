"""The global models that the clients of one process hold between rounds, each kept once however many hold it."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from fedreuse.proto.codec import Payload


class Shelf:
    """Models by the checksum of their content. One disappears when the last client has let go of it."""

    def __init__(self) -> None:
        self._models: WeakValueDictionary[int, Payload] = WeakValueDictionary()

    def take(self, content: int, make: Callable[[], Payload]) -> Payload:
        """The model with this content; `make` verifies and makes it if nobody here has it yet."""
        model = self._models.get(content)
        if model is None:
            model = self._models[content] = make()
        return model
