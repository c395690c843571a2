"""Data sets that are not there yet: what they are is said, then they are fetched, checked and put in place.

A file appears in its place complete or not at all. Nothing is fetched where the files are there.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from tarfile import TarError
from tarfile import open as open_tar
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
from zipfile import BadZipFile, ZipFile

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedreuse.client.errors import TaskError

CHUNK = 1 << 18
SILENCE = 30.0
"""Seconds without a byte after which a server is given up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """A file to fetch. urls: where it is, tried in this order; md5: of the whole file.

    members: of an archive (zip, or tar in any packing), what is taken out and the names it gets; of a file that is
    used as it is, nothing, and it keeps its name.
    """

    urls: Sequence[str]
    md5: str
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class DataSet:
    """A data set that can be fetched.

    terms: whose it is and under which licence; size: bytes to fetch (None: the server says), unpacked: bytes on the
    disk in the end if they are others; folder: where the files belong, below the folder with data sets; files: those
    that are needed. origins: asked only when something is to be fetched.
    """

    name: str
    terms: str
    folder: str
    files: tuple[str, ...]
    origins: Callable[[], Sequence[Origin]]
    size: int | None = None
    unpacked: int = 0


class _Failed(Exception):
    """A transfer that did not succeed; the text says why."""


_FAULTS = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    HTTPException,
    BadZipFile,
    TarError,
    zlib.error,
    _Failed,
)


def fetch(data_set: DataSet, data: Path) -> None:
    """Fetch the files of a data set into `data`. Raises TaskError that says what to put where."""
    place = data / data_set.folder
    try:
        data.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, since other processes may look for the files, or fetch them, right now.
        with TemporaryDirectory(prefix=f".{data_set.name}-", dir=data) as partial:
            got = _Fetching(data_set, data).all(Path(partial))
            place.mkdir(parents=True, exist_ok=True)
            for path in got:
                path.replace(place / path.name)
    except _FAULTS as error:
        files = " and ".join(filter(None, [", ".join(data_set.files[:-1]), data_set.files[-1]]))
        raise TaskError(
            f"{data_set.name} is not in {data}, and it could not be downloaded ({error}). Put {files} into {place}, "
            f"or name another folder in place of {data} with --data FOLDER"
        ) from error


class _Fetching:
    """The files of a data set on their way, and a bar that shows how far they are."""

    def __init__(self, data_set: DataSet, data: Path) -> None:
        self._data_set, self._data = data_set, data
        self._announced = False
        self._size: int | None = None
        self._done = 0
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._shown = self._bar.add_task(data_set.name, total=data_set.size, start=False)

    def all(self, folder: Path) -> list[Path]:
        """The files, checked, in `folder`."""
        found: list[Path] = []
        try:
            if self._data_set.size is not None:
                self._announce(self._data_set.size)
            for origin in self._data_set.origins():
                path = folder / origin.name
                self._from_first_that_gives_it(origin, path)
                self._done += path.stat().st_size
                found += _unpacked(origin, path) if origin.members else [path]
        finally:
            self._bar.stop()
        return found

    def _from_first_that_gives_it(self, origin: Origin, path: Path) -> None:
        reasons = []
        for url in origin.urls:
            try:
                return self._transfer(url, origin.md5, path)
            except (OSError, ValueError, HTTPException, _Failed) as error:
                reasons.append(f"{url}: {str(error).strip() or type(error).__name__}")
        raise _Failed("; ".join(reasons))

    def _transfer(self, url: str, md5: str, path: Path) -> None:
        digest = hashlib.md5(usedforsecurity=False)
        count = 0
        request = Request(url, headers={"User-Agent": "fedreuse"})
        with urlopen(request, timeout=SILENCE) as source:
            length = source.headers.get("Content-Length")
            self._announce(None if length is None else int(length))
            with path.open("wb") as target:
                while piece := source.read(CHUNK):
                    target.write(piece)
                    digest.update(piece)
                    count += len(piece)
                    self._bar.update(self._shown, completed=self._done + count)
        if length is not None and count != int(length):
            raise _Failed(f"the transfer broke off after {count} of {length} bytes")
        if digest.hexdigest() != md5:
            raise _Failed(f"what came has MD5 {digest.hexdigest()}, not {md5}")

    def _announce(self, length: int | None) -> None:
        """Once, before the first byte of content. A warning, since it is shown whatever the logging is set to."""
        this = self._data_set
        if not self._announced:
            self._announced = True
            self._size = this.size or length
            said = f"{self._size / 1e6:.1f} MB" if self._size else "a file of unknown size"
            if this.unpacked:
                said += f", {this.unpacked / 1e6:.0f} MB unpacked"
            logger.warning("%s is not in %s: downloading %s (%s)", this.name, self._data, said, this.terms)
            self._bar.update(self._shown, total=self._size)
            self._bar.start_task(self._shown)
            self._bar.start()  # only now, or the line above would run into it
        needed, free = (self._size or 0) + this.unpacked, shutil.disk_usage(self._data).free
        if needed > free:
            raise _Failed(f"it takes {needed / 1e6:.0f} MB, and only {free / 1e6:.0f} MB are free there")


def _unpacked(origin: Origin, archive: Path) -> list[Path]:
    """The members of a checked archive, beside it; the archive goes."""
    if archive.suffix == ".zip":
        with ZipFile(archive) as packed:
            for member, name in origin.members.items():
                with packed.open(member) as source:
                    _copy(source, archive.with_name(name))
    else:
        with open_tar(archive) as tar:
            for member, name in origin.members.items():
                stored = tar.extractfile(member)
                if stored is None:
                    raise _Failed(f"{archive.name} holds no file {member}")
                with stored:
                    _copy(stored, archive.with_name(name))
    archive.unlink()
    return [archive.with_name(name) for name in origin.members.values()]


def _copy(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(source, target, CHUNK)
