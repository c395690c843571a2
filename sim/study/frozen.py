"""What every folder with a frozen definition needs: its digest, files that appear whole, one command at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedreuse.server.store import RunError
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import read_body
from fedreuse.sim.study.plan import differences, identity

LOCK = "lock"


def digest(definition: Any) -> str:
    """SHA-256 of a definition's content, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()


def replace(path: Path, text: str) -> None:
    """Write a file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


@contextmanager
def exclusively(folder: Path) -> Iterator[None]:
    """One command at a time runs what is in a folder. Raises RunError if another one does."""
    with (folder / LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder} is being run by another command; wait for it") from None
        yield


def check_run(path: Path, found: RunConfig, due: RunConfig, body: str, owner: str) -> None:
    """The run folder of a cell holds the cell's run, run by `fedreuse` and `body`. Raises RunError if not.

    `owner` is what the cell belongs to: a study, a tune.
    """
    changed = list(differences(identity(found), identity(due)))
    if changed:
        raise RunError(
            f"{path} holds another run than the {owner}'s: "
            + "; ".join(f"{key} is {is_!r} there, {want!r} in the {owner}" for key, is_, want in changed)
            + f"; move it away, or give the {owner} another folder"
        )
    if read_body(path) != body:
        raise RunError(
            f"{path} was run by `fedreuse {read_body(path)}`, the {owner}'s cells by `fedreuse {body}`"
        )
