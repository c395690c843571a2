"""Files of data sets: what is said of damaged ones, and a cache of decoded ones that processes share."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError

Bytes = NDArray[np.uint8]

logger = logging.getLogger(__name__)


def damaged(path: Path, what: str) -> TaskError:
    """`what` follows the file's name."""
    return TaskError(
        f"{path} {what}: delete it and fetch it again, or name another folder with --data FOLDER"
    )


def md5_of(path: Path) -> str:
    """MD5 (hexadecimal) of a file. Raises TaskError if it cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error


def decoded(name: str, sources: Sequence[Path], size: int, decode: Callable[[], Bytes]) -> Bytes:
    """The `size` bytes, shape (size,), that `decode` makes of the source files; not to be written to.

    They are kept in the user's cache folder, so that they are decoded once and all processes map the same
    memory. A change of a source's path, size or time of change decodes anew. Where nothing can be kept, every
    process decodes for itself. Raises TaskError if a source is not there.
    """
    key = _key(sources)
    try:
        path = _cache_folder() / f"{name}-{key}.npy"
    except RuntimeError:  # no XDG_CACHE_HOME and no home
        return decode()
    if (kept := _map(path, size)) is not None:
        return kept
    fresh = decode()
    try:
        _keep(path, fresh)
    except OSError as error:
        logger.warning("%s cannot be kept decoded, every process will decode it: %s", name, error)
        return fresh
    kept = _map(path, size)
    return fresh if kept is None else kept


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG rules a relative path counts as none.
    return (base if base.is_absolute() else Path.home() / ".cache") / "fedreuse"


def _key(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        try:
            seen = source.stat()
        except OSError as error:
            raise damaged(source, f"cannot be read ({error.strerror})") from error
        digest.update(f"{source.resolve()}\0{seen.st_size}\0{seen.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _map(path: Path, size: int) -> Bytes | None:
    """The kept bytes; None if there are none, or not `size` whole ones."""
    try:
        kept = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return np.asarray(kept) if kept.dtype == np.uint8 and kept.shape == (size,) else None


def _keep(path: Path, content: Bytes) -> None:
    """Write under another name first: other processes may read, or write the same, right now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".decoding-", dir=path.parent) as partial:
        written = Path(partial) / path.name
        with written.open("wb") as handle:
            np.save(handle, content)
            handle.flush()
            os.fsync(handle.fileno())  # a file of the right size and wrong content would be believed
        written.replace(path)
