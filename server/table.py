"""What a run knows of each client, by its index: changes wait in memory, everything else lies on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

from fedreuse.server.disk import Disk, Writer

T = TypeVar("T")
R = TypeVar("R")


class Table(MutableMapping[int, T]):
    """Reads through to table `name` of a disk, once there is one; holds what was changed since the last commit.

    `pack` and `unpack` turn a value into bytes and back. What a round costs does not depend on how many clients
    the table has.
    """

    def __init__(self, name: bytes, pack: Callable[[T], bytes], unpack: Callable[[memoryview], T]) -> None:
        self.name = name
        self._pack, self._unpack = pack, unpack
        self._changed: dict[int, T | None] = {}
        self._disk: Disk | None = None
        self._count = 0

    def attach(self, disk: Disk) -> None:
        """What the disk has counts from now on."""
        self._disk = disk
        self._count += disk.count(self.name)

    def stored(self, client: int) -> T | None:
        """The value as the last commit left it."""
        return self._look(client, self._unpack)

    def write(self, writer: Writer) -> None:
        """Add all changes to a commit."""
        for client, value in self._changed.items():
            if value is None:
                writer.delete(self.name, client)
            else:
                writer.put(self.name, client, self._pack(value))

    def written(self) -> None:
        """The commit stands."""
        self._changed.clear()

    def __getitem__(self, client: int) -> T:
        value = self._changed[client] if client in self._changed else self.stored(client)
        if value is None:
            raise KeyError(client)
        return value

    def __setitem__(self, client: int, value: T) -> None:
        self._count += client not in self
        self._changed[client] = value

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._count -= 1
        self._changed[client] = None

    def __contains__(self, client: object) -> bool:
        if client in self._changed:
            return self._changed[client] is not None
        return isinstance(client, int) and self._look(client, lambda _: True) is not None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        on_disk = () if self._disk is None else self._disk.numbers(self.name)
        changed = self._changed
        yield from sorted(
            {*(c for c in on_disk if c not in changed), *(c for c, v in changed.items() if v is not None)}
        )

    def _look(self, client: int, use: Callable[[memoryview], R]) -> R | None:
        return None if self._disk is None else self._disk.get(self.name, client, use)


def numbers(name: bytes) -> Table[int]:
    """A table of numbers below 2^64."""
    return Table(name, lambda value: value.to_bytes(8, "big"), lambda raw: int.from_bytes(raw, "big"))
