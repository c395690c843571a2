"""The tables of a run on disk: one LMDB environment, a named database for each table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import lmdb

R = TypeVar("R")

MAP_BYTES = 1 << 40
"""Address space LMDB may use; the file grows only as needed."""
TABLES = (b"models", b"examples", b"caches", b"holdings")
READ_AROUND = 1 << 16
"""Bytes that the kernel maps around a page that is touched for the first time."""


class Disk:
    """Numbered values in named tables, and one text beside them.

    What is read stays mapped into this process's memory, where it counts as its own, until more than `budget` bytes
    of it were read (None: for ever); `trim` then lets go of all of it. Reading is safe from any thread.
    """

    def __init__(self, folder: Path, budget: int | None = None, *, beside: bool = False) -> None:
        """`beside` its owner another process may read. Raises lmdb.Error."""
        self._folder, self._budget, self._beside = folder, budget, beside
        self._lock = Lock()
        self._open(create=not beside)

    def _open(self, *, create: bool) -> None:
        self._env = lmdb.open(
            str(self._folder), map_size=MAP_BYTES, max_dbs=len(TABLES), readonly=self._beside
        )
        if create:
            with self._env.begin(write=True) as txn:  # one commit for all that do not exist yet
                for name in TABLES:
                    self._env.open_db(name, txn=txn)
        self._tables = {name: self._env.open_db(name, create=False) for name in TABLES}
        self._read = 0

    def close(self) -> None:
        self._env.close()

    def trim(self) -> None:
        """Let go of what was read, if that is more than the budget."""
        with self._lock:
            if self._budget is not None and self._read > self._budget:
                self._env.close()
                self._open(create=False)

    # -- reading

    def meta(self) -> bytes | None:
        with self._lock, self._env.begin() as txn:
            value: bytes | None = txn.get(b"meta")
        return value

    def newest(self, table: bytes, number_of: Callable[[bytes], int]) -> tuple[int, bytes] | None:
        """The number that the text gives and the value of that number, both of the same commit."""
        with self._lock, self._env.begin() as txn:
            text = txn.get(b"meta")
            number = None if text is None else number_of(text)
            value = None if number is None else txn.get(key(number), db=self._tables[table])
        return None if number is None or value is None else (number, value)

    def get(self, table: bytes, number: int, use: Callable[[memoryview], R]) -> R | None:
        """What `use` makes of a value, None if there is none. The view that `use` is given ends with the call."""
        with self._lock, self._env.begin(self._tables[table], buffers=True) as txn:
            value = txn.get(key(number))
            if value is None:
                return None
            self._read += len(value) + READ_AROUND
            return use(value)

    def numbers(self, table: bytes) -> list[int]:
        """Of all values of a table, ascending."""
        with self._lock, self._env.begin(self._tables[table]) as txn:
            return list(_numbers(txn))

    def count(self, table: bytes) -> int:
        """How many values a table has; does not read them."""
        with self._lock, self._env.begin() as txn:
            return int(txn.stat(self._tables[table])["entries"])

    # -- writing

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """All changes or, after an exception, none. Raises OSError if the disk is full."""
        try:
            with self._env.begin(write=True) as txn:
                yield Writer(txn, self._tables)
        except (lmdb.DiskError, lmdb.MapFullError) as error:
            raise OSError(f"the state in {self._folder} could not be written: {error}") from error


class Writer:
    """The changes of one commit."""

    def __init__(self, txn: Any, tables: dict[bytes, Any]) -> None:
        self._txn, self._tables = txn, tables

    def meta(self, text: bytes) -> None:
        self._txn.put(b"meta", text)

    def put(self, table: bytes, number: int, value: bytes | memoryview) -> None:
        self._txn.put(key(number), value, db=self._tables[table])

    def delete(self, table: bytes, number: int) -> None:
        self._txn.delete(key(number), db=self._tables[table])


def key(number: int) -> bytes:
    """Keys sort as their numbers do."""
    return number.to_bytes(8, "big")


def _numbers(txn: Any) -> Iterator[int]:
    for raw in txn.cursor().iternext(keys=True, values=False):
        yield int.from_bytes(raw, "big")
