"""The durable side of a run: its folder, and one atomic commit per round.

Tables and events are appended first, then one LMDB transaction makes the round count: it holds the state
and the lengths up to which the files are valid. Whatever was appended after the last commit is cut off when
the run is opened again, so a process may be killed at any moment.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedreuse.server.disk import Disk
from fedreuse.server.memory import Caches
from fedreuse.server.table import Table, numbers

FORMAT = 2
"""Of the durable state; a run goes on only with the format it began with."""
TABLES = ("rounds.csv", "bytes.csv", "tensors.csv", "events.jsonl")
_MODELS = b"models"


class RunError(Exception):
    """A run folder that cannot be used; the text says why and what to do."""


@dataclass
class RunState:
    """Everything a run needs to go on after `committed` rounds.

    `flat` is the global state (uint8), `past` the models of earlier rounds, by round, that were read back. Of each
    client: its `examples`, its cached update, and in a simulation the round of the model that it holds.
    """

    run: str
    schema_hash: int
    committed: int
    flat: NDArray[np.uint8]
    notes: dict[str, Any] = field(default_factory=dict)
    past: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    examples: Table[int] = field(default_factory=lambda: numbers(b"examples"))
    caches: Caches = field(default_factory=Caches)
    holdings: Table[int] = field(default_factory=lambda: numbers(b"holdings"))

    @property
    def tables(self) -> tuple[Table[Any], ...]:
        return self.examples, self.caches, self.holdings


class RunStore:
    """Owns a run folder exclusively while open.

    Of what is read of the clients at most `budget` bytes, and a round's, stay in memory (None: no limit). The tables
    of a state that was loaded or committed read from here, while this is open.
    """

    def __init__(self, folder: Path, budget: int | None = None) -> None:
        self.folder = folder
        foreign = [name for name in TABLES if (folder / name).exists() and not (folder / "state").exists()]
        if foreign:
            raise RunError(
                f"{folder} holds {foreign[0]} but no run state; it is not a run's folder, choose another"
            )
        (folder / "state").mkdir(parents=True, exist_ok=True)
        self._lock = _exclusive(folder)
        try:
            self._disk = Disk(folder / "state" / "server", budget)
            meta = self._read_meta()
        except lmdb.Error as error:
            self._lock.close()
            raise RunError(
                f"the state of {folder} cannot be read: {error}; restore the folder's state/"
            ) from None
        except RunError:
            self._disk.close()
            self._lock.close()
            raise
        lengths = meta["lengths"] if meta else {}
        self._files = {name: _open_at(folder / name, lengths.get(name, 0)) for name in TABLES}
        self._syncing = ThreadPoolExecutor(len(TABLES), thread_name_prefix="sync")

    def close(self) -> None:
        """Let go of the folder. Raises OSError, the folder being free all the same, if the disk is full."""
        with ExitStack() as stack:
            stack.callback(self._lock.close)
            stack.callback(self._disk.close)
            for handle in self._files.values():
                stack.callback(handle.close)
            self._syncing.shutdown()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_meta(self) -> dict[str, Any] | None:
        raw = self._disk.meta()
        if raw is None:
            return None
        meta: dict[str, Any] = json.loads(raw)
        if (found := meta.get("format", 1)) != FORMAT:
            raise RunError(
                f"{self.folder} was written by another version of fedreuse (format {found} of a run's state, this one "
                f"has {FORMAT}); go on with that version, or run it again into another folder"
            )
        return meta

    def load(self) -> RunState | None:
        """The state after the last committed round; None for a run that never committed."""
        meta = self._read_meta()
        if meta is None:
            return None
        past: dict[int, NDArray[np.uint8]] = {}
        for number in self._disk.numbers(_MODELS):
            model = self._disk.get(_MODELS, number, lambda raw: np.frombuffer(raw, np.uint8).copy())
            assert model is not None
            past[number] = model
        flat = past.pop(meta["committed"], None)
        if flat is None:
            raise RunError(
                f"the state of {self.folder} is damaged: it lacks the model; restore the folder's state/"
            )
        state = RunState(meta["run"], meta["schema_hash"], meta["committed"], flat, meta["notes"], past)
        self._attach(state)
        self._disk.trim()
        return state

    def _attach(self, state: RunState) -> None:
        for table in state.tables:
            table.attach(self._disk)

    def initialise(self, state: RunState, headers: Mapping[str, Sequence[str]]) -> None:
        """Commit a fresh state; `headers` are the column names of the CSV tables."""
        for name, columns in headers.items():
            self._files[name].write(_csv_text([columns]))
        self._attach(state)
        self.commit(state)

    def commit(
        self,
        state: RunState,
        *,
        rows: Mapping[str, Iterable[Sequence[Any]]] | None = None,
        events: Iterable[Mapping[str, Any]] = (),
        history: int = 0,
    ) -> None:
        """Make a state durable together with new table rows and events; atomic.

        `history` is how many models before the current one stay. What is written of clients is what changed.
        Raises OSError if the disk is full; the last commit then still stands.
        """
        for name, table in (rows or {}).items():
            self._files[name].write(_csv_text(table))
        self._files["events.jsonl"].write("".join(json.dumps(event) + "\n" for event in events))
        # At the same time, so that one journal commit of the file system serves all.
        lengths = dict(zip(self._files, self._syncing.map(_flush, self._files.values()), strict=True))
        meta = {
            "format": FORMAT,
            "run": state.run,
            "schema_hash": state.schema_hash,
            "committed": state.committed,
            "lengths": lengths,
            "notes": state.notes,
        }
        old = [n for n in self._disk.numbers(_MODELS) if not 0 <= state.committed - n <= history]
        with self._disk.writing() as writer:
            writer.meta(json.dumps(meta).encode())
            writer.put(_MODELS, state.committed, state.flat.data)
            for number in old:
                writer.delete(_MODELS, number)
            for changed in state.tables:
                changed.write(writer)
        for changed in state.tables:
            changed.written()
        self._disk.trim()


def read_weights(folder: Path) -> tuple[int, NDArray[np.uint8]]:
    """Rounds committed and the flat global state, for a reader beside the owner of the run."""
    try:
        disk = Disk(folder / "state" / "server", beside=True)
    except lmdb.Error:
        raise RunError(f"{folder} has no committed state that this version can read") from None
    with closing(disk):
        newest = disk.newest(_MODELS, lambda meta: int(json.loads(meta)["committed"]))
    if newest is None:
        raise RunError(f"{folder} has no committed state")
    return newest[0], np.frombuffer(newest[1], np.uint8)


def _exclusive(folder: Path) -> IO[str]:
    handle = (folder / "state" / "lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise RunError(
            f"{folder} is in use by another process; wait for it or choose another output"
        ) from None
    return handle


def _open_at(path: Path, length: int) -> IO[str]:
    """Open for appending, with everything past the committed length cut off."""
    path.touch()
    if path.stat().st_size < length:
        raise RunError(f"{path} is shorter than the {length} bytes the last commit left; the run is damaged")
    os.truncate(path, length)
    return path.open("a", encoding="utf-8", newline="")


def _flush(handle: IO[str]) -> int:
    handle.flush()
    os.fsync(handle.fileno())
    return os.fstat(handle.fileno()).st_size


def _csv_text(rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
