"""MNIST and its kin from idx files in torchvision's layout, fetched only when absent.

A folder that holds the `.gz` files need not be writable: they are unpacked in memory.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError
from fedreuse.sim.tasks.download import DataSet, Origin, fetch
from fedreuse.sim.tasks.files import damaged
from fedreuse.sim.tasks.images import LabelledImages

SIZE = 28


@dataclass(frozen=True)
class Source:
    """A data set of four idx files below `name`/raw: images and labels of the parts `train` and `test`.

    md5: of each file's `.gz`, the same as in torchvision, whose import costs more than reading the data; None where
    it is not known (then the archive they came in was checked). parts: how names of files begin; size: bytes to fetch.
    transposed: rows and columns have changed places in the files.
    """

    name: str
    terms: str
    size: int
    classes: int
    train: int
    test: int
    md5: Mapping[str, str | None]
    origins: Callable[[Source], Sequence[Origin]]
    parts: Mapping[str, str]
    transposed: bool = False

    def data_set(self) -> DataSet:
        """What is fetched if it is not there."""
        files = tuple(f"{name}.gz" for name in self.md5)
        return DataSet(
            self.name, self.terms, f"{self.name}/raw", files, partial(self.origins, self), self.size
        )

    def missing(self, data: Path) -> list[str]:
        """What of it is not in the folder `data`."""
        raw = data / self.name / "raw"
        return [name for name in self.md5 if not _find(raw, name).is_file()]


def load(source: Source, folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """The training and the test set. Raises TaskError if a file is absent or damaged."""
    folder = folder.absolute()
    if source.missing(folder):
        fetch(source.data_set(), folder)
    raw = folder / source.name / "raw"
    return _labelled(source, raw, "train"), _labelled(source, raw, "test")


def single_files(source: Source) -> Sequence[Origin]:
    """Four packed files, each by itself, as torchvision knows them."""
    from torchvision import datasets  # 1 s and 170 MB, not spent when the data are there

    known = getattr(datasets, source.name)
    return [Origin([f"{mirror}{name}" for mirror in known.mirrors], md5) for name, md5 in known.resources]


def one_archive(source: Source) -> Sequence[Origin]:
    """One zip with many packed files, as torchvision knows it."""
    from torchvision import datasets

    known = getattr(datasets, source.name)
    members = {f"gzip/{name}.gz": f"{name}.gz" for name in source.md5}
    return [Origin([known.url], known.md5, members)]


def _find(raw: Path, name: str) -> Path:
    """The unpacked file if there is one, else the packed one."""
    return raw / name if (raw / name).is_file() else raw / f"{name}.gz"


def _labelled(source: Source, raw: Path, part: str) -> LabelledImages:
    """One half of the data set."""
    begin = source.parts[part]
    image_path, images = _read(source, raw, f"{begin}-images-idx3-ubyte", dimensions=3)
    label_path, labels = _read(source, raw, f"{begin}-labels-idx1-ubyte", dimensions=1)
    if len(images) == 0 or images.shape[1:] != (SIZE, SIZE):
        raise damaged(image_path, f"holds an array of shape {images.shape}, not (n, {SIZE}, {SIZE})")
    if len(labels) != len(images):
        raise damaged(label_path, f"holds {len(labels)} labels for {len(images)} images")
    if labels.max() >= source.classes:
        raise damaged(label_path, f"holds label {labels.max()}; they are 0 to {source.classes - 1}")
    if source.transposed:
        images = np.ascontiguousarray(images.transpose(0, 2, 1))
    return LabelledImages(images, labels)


def _read(source: Source, raw: Path, name: str, dimensions: int) -> tuple[Path, NDArray[np.uint8]]:
    """The array of an idx file, read-only, and the file it came from.

    An idx file is 0, 0, 8 (unsigned bytes), the number of dimensions, each dimension as a big-endian
    uint32, then the elements in row-major order.
    """
    path = _find(raw, name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix == ".gz":
        found, due = hashlib.md5(content, usedforsecurity=False).hexdigest(), source.md5[name]
        if due is not None and found != due:
            raise damaged(path, f"has MD5 {found}, not {due}")
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(path, f"cannot be unpacked ({error})") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(path, f"is no idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) != header + math.prod(shape):
        raise damaged(path, f"has {len(content)} bytes, not {header + math.prod(shape)}")
    return path, np.frombuffer(content, np.uint8, offset=header).reshape(shape)
