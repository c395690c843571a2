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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from fedreuse.proto.codec import Block, Payload
from fedreuse.server.memory import CachedUpdate

MAP_BYTES = 1 << 40
"""Address space LMDB may use; the file grows only as needed."""
TABLES = ("rounds.csv", "bytes.csv", "tensors.csv", "events.jsonl")
_CACHE = b"cache/"
_MODEL = b"model/"


class RunError(Exception):
    """A run folder that cannot be used; the text says why and what to do."""


@dataclass
class RunState:
    """Everything a run needs to go on after `committed` rounds.

    `flat` is the global state (uint8), `past` the models of earlier rounds, by round, that were read back.
    """

    run: str
    schema_hash: int
    committed: int
    flat: NDArray[np.uint8]
    examples: dict[int, int] = field(default_factory=dict)
    caches: dict[int, CachedUpdate] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    past: dict[int, NDArray[np.uint8]] = field(default_factory=dict)


class RunStore:
    """Owns a run folder exclusively while open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        foreign = [name for name in TABLES if (folder / name).exists() and not (folder / "state").exists()]
        if foreign:
            raise RunError(
                f"{folder} holds {foreign[0]} but no run state; it is not a run's folder, choose another"
            )
        (folder / "state").mkdir(parents=True, exist_ok=True)
        self._lock = _exclusive(folder)
        try:
            self._env = lmdb.open(
                str(folder / "state" / "server"), map_size=MAP_BYTES, max_dbs=0, subdir=True
            )
            meta = self._read_meta()
        except lmdb.Error as error:
            self._lock.close()
            raise RunError(
                f"the state of {folder} cannot be read: {error}; restore the folder's state/"
            ) from None
        lengths = meta["lengths"] if meta else {}
        self._files = {name: _open_at(folder / name, lengths.get(name, 0)) for name in TABLES}
        self._syncing = ThreadPoolExecutor(len(TABLES), thread_name_prefix="sync")

    def close(self) -> None:
        """Let go of the folder. Raises OSError, the folder being free all the same, if the disk is full."""
        with ExitStack() as stack:
            stack.callback(self._lock.close)
            stack.callback(self._env.close)
            for handle in self._files.values():
                stack.callback(handle.close)
            self._syncing.shutdown()

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_meta(self) -> dict[str, Any] | None:
        with self._env.begin() as txn:
            raw = txn.get(b"meta")
        return None if raw is None else json.loads(raw)

    def load(self) -> RunState | None:
        """The state after the last committed round; None for a run that never committed."""
        meta = self._read_meta()
        if meta is None:
            return None
        with self._env.begin(buffers=True) as txn:
            past = {n: np.frombuffer(value, np.uint8).copy() for n, value in _under(txn, _MODEL)}
            examples = {int(k): v for k, v in json.loads(bytes(txn.get(b"examples", b"{}"))).items()}
            caches = {n: _unpack(bytes(value)) for n, value in _under(txn, _CACHE)}
        flat = past.pop(meta["committed"], None)
        if flat is None:
            raise RunError(f"{self.folder} was written by another version, or its state is damaged")
        return RunState(
            meta["run"], meta["schema_hash"], meta["committed"], flat, examples, caches, meta["notes"], past
        )

    def initialise(self, state: RunState, headers: Mapping[str, Sequence[str]]) -> None:
        """Commit a fresh state; `headers` are the column names of the CSV tables."""
        for name, columns in headers.items():
            self._files[name].write(_csv_text([columns]))
        self.commit(state, changed=state.caches)

    def commit(
        self,
        state: RunState,
        *,
        changed: Iterable[int] = (),
        rows: Mapping[str, Iterable[Sequence[Any]]] | None = None,
        events: Iterable[Mapping[str, Any]] = (),
        history: int = 0,
    ) -> None:
        """Make a state durable together with new table rows and events; atomic.

        `changed` names the clients whose cached update differs from the last commit (absent: dropped);
        `history` is how many models before the current one stay.
        Raises OSError if the disk is full; the last commit then still stands.
        """
        for name, table in (rows or {}).items():
            self._files[name].write(_csv_text(table))
        self._files["events.jsonl"].write("".join(json.dumps(event) + "\n" for event in events))
        # At the same time, so that one journal commit of the file system serves all.
        lengths = dict(zip(self._files, self._syncing.map(_flush, self._files.values()), strict=True))
        meta = {
            "run": state.run,
            "schema_hash": state.schema_hash,
            "committed": state.committed,
            "lengths": lengths,
            "notes": state.notes,
        }
        try:
            with self._env.begin(write=True) as txn:
                txn.put(b"meta", json.dumps(meta).encode())
                txn.put(_MODEL + b"%010d" % state.committed, state.flat.data)
                for old in [n for n, _ in _under(txn, _MODEL) if not 0 <= state.committed - n <= history]:
                    txn.delete(_MODEL + b"%010d" % old)
                txn.put(b"examples", json.dumps(state.examples).encode())
                for client in changed:
                    key = _CACHE + b"%010d" % client
                    cached = state.caches.get(client)
                    if cached is None:
                        txn.delete(key)
                    else:
                        txn.put(key, _pack(cached))
        except (lmdb.DiskError, lmdb.MapFullError) as error:
            raise OSError(f"the state of {self.folder} could not be written: {error}") from error


def read_weights(folder: Path) -> tuple[int, NDArray[np.uint8]]:
    """Rounds committed and the flat global state, for a reader beside the owner of the run."""
    path = folder / "state" / "server"
    if not path.exists():
        raise RunError(f"{folder} has no committed state")
    with lmdb.open(str(path), readonly=True, map_size=MAP_BYTES) as env, env.begin() as txn:
        meta = txn.get(b"meta")
        committed = None if meta is None else json.loads(meta)["committed"]
        weights = None if committed is None else txn.get(_MODEL + b"%010d" % committed)
    if committed is None or weights is None:
        raise RunError(f"{folder} has no committed state")
    return committed, np.frombuffer(weights, np.uint8)


def _under(txn: Any, prefix: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers after `prefix` in the keys, with their values."""
    cursor = txn.cursor()
    if cursor.set_range(prefix):
        for key, value in cursor:
            if not bytes(key).startswith(prefix):
                return
            yield int(bytes(key)[len(prefix) :]), value


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


def _pack(cached: CachedUpdate) -> bytes:
    head = {"round": cached.round, "blocks": [list(asdict(b).values()) for b in cached.payload.blocks]}
    return json.dumps(head).encode() + b"\n" + bytes(cached.payload.body)


def _unpack(raw: bytes) -> CachedUpdate:
    head, _, body = raw.partition(b"\n")
    fields = json.loads(head)
    return CachedUpdate(fields["round"], Payload(tuple(Block(*b) for b in fields["blocks"]), body))
