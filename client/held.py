"""What a client keeps between rounds, under the stage-then-commit rule.

New state is *staged* when an update is uploaded and becomes *current* only when the server confirms that
this update counted. Both versions carry the round of their update; a confirmation of any other round voids
them. The store survives a kill at any moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import lmdb
from numpy.typing import NDArray
from safetensors.numpy import load, save

Tensors = dict[str, NDArray[Any]]
MAP_BYTES = 1 << 40


@dataclass(frozen=True)
class Held:
    """The versions a client holds for run `run`. `slot` is where the current version lies."""

    run: str = ""
    current: int | None = None
    staged: int | None = None
    slot: int = 0


class _Table(Protocol):
    def get(self, key: str) -> bytes | None: ...

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """All changes or none; None deletes."""

    def close(self) -> None: ...


class _Memory:
    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._rows.get(key)

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = value

    def close(self) -> None:
        pass


class _Lmdb:
    """Safe to open from several processes at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._env = lmdb.open(str(folder), map_size=MAP_BYTES)
        except lmdb.Error as error:
            raise OSError(f"the client state in {folder} cannot be opened: {error}") from None

    def get(self, key: str) -> bytes | None:
        with self._env.begin() as txn:
            value: bytes | None = txn.get(key.encode())
        return value

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for key, value in changes.items():
                    if value is None:
                        txn.delete(key.encode())
                    else:
                        txn.put(key.encode(), value)
        except (lmdb.DiskError, lmdb.ReadonlyError, lmdb.MapFullError) as error:
            raise OSError(f"client state cannot be written to {self._env.path()}: {error}") from None

    def close(self) -> None:
        self._env.close()


class HeldStore:
    """Client-held state of any number of clients, in a folder or (without one) in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._table: _Table = _Memory() if folder is None else _Lmdb(folder)
        self._together: dict[str, bytes | None] | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write everything that changes meanwhile at its end, at once: the disk is waited for once.

        For a process that plays many clients one after the other, and no longer than it may forget all of it.
        """
        changes: dict[str, bytes | None] = {}
        self._together = changes
        try:
            yield
        finally:
            self._together = None
        if changes:
            self._table.write(changes)

    def _get(self, key: str) -> bytes | None:
        if self._together is not None and key in self._together:
            return self._together[key]
        return self._table.get(key)

    def _put(self, changes: Mapping[str, bytes | None]) -> None:
        if self._together is not None:
            self._together.update(changes)
        else:
            self._table.write(changes)

    def versions(self, client: int) -> Held:
        raw = self._get(f"{client}/held")
        return Held() if raw is None else Held(**json.loads(raw))

    def current(self, client: int) -> Tensors | None:
        """The tensors of the current version."""
        held = self.versions(client)
        if held.current is None:
            return None
        raw = self._get(f"{client}/{held.slot}")
        return None if raw is None else load(raw)

    def stage(self, client: int, run: str, round: int, tensors: Tensors) -> None:
        """Keep what will be current once the update of `round` is confirmed."""
        held = self.versions(client)
        if held.run != run:
            held = Held(run)
        self._write(client, replace(held, staged=round), {f"{client}/{1 - held.slot}": save(tensors)})

    def settle(self, client: int, run: str, confirmed: int | None, pending: int | None = None) -> None:
        """Reconcile with the round of the update that the server holds for this client.

        The staged version becomes current if it is the confirmed one; the current one stays if it is;
        anything else is dropped. A version staged for the open round `pending` waits for that round's end.
        """
        held = self.versions(client)
        if held.run == run and held.staged is not None and held.staged == pending:
            if held.current != confirmed:
                self._write(client, replace(held, current=None), {f"{client}/{held.slot}": None})
            return
        if held.run != run or confirmed is None:
            settled = Held(run)
        elif held.staged == confirmed:
            settled = Held(run, confirmed, None, 1 - held.slot)
        elif held.current == confirmed:
            settled = replace(held, staged=None)
        else:
            settled = Held(run)
        if settled == held:
            return
        gone = [n for n in (0, 1) if settled.current is None or n != settled.slot]
        self._write(client, settled, {f"{client}/{n}": None for n in gone})

    def forget(self, client: int) -> None:
        """Lose everything, as a client whose disk is gone."""
        self._put({f"{client}/{part}": None for part in ("held", "0", "1")})

    def close(self) -> None:
        self._table.close()

    def _write(self, client: int, held: Held, slots: Mapping[str, bytes | None]) -> None:
        self._put({**slots, f"{client}/held": json.dumps(asdict(held)).encode()})
