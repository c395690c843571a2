"""MNIST and FashionMNIST from a local folder in torchvision's layout, downloaded only when absent.

A folder that holds the `.gz` files need not be writable: they are unpacked in memory.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.files import damaged
from fedreuse.sim.tasks.images import ImageTask, LabelledImages

SIZE = 28
CLASSES = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A data set of four idx files below `name`/raw.

    md5: of each file's `.gz`, the same as in torchvision, whose import costs more than reading the data.
    """

    name: str
    terms: str
    download: str
    md5: Mapping[str, str]


MNIST_SOURCE = Source(
    name="MNIST",
    terms="(c) Yann LeCun and Corinna Cortes, CC BY-SA 3.0",
    download="11.6 MB, 55 MB unpacked",
    md5={
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
FASHION_SOURCE = Source(
    name="FashionMNIST",
    terms="(c) Zalando SE, MIT licence",
    download="30.9 MB, 55 MB unpacked",
    md5={
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)


class MNIST(ImageTask):
    """Handwritten digits, 28x28 (LeCun et al., 1998): 60,000 images to train on, 10,000 to test on."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context, *load(MNIST_SOURCE, context.data), classes=CLASSES)


class FashionMNIST(ImageTask):
    """Articles of clothing, 28x28 (Xiao et al., 2017): 60,000 images to train on, 10,000 to test on."""

    def __init__(self, context: TaskContext) -> None:
        super().__init__(context, *load(FASHION_SOURCE, context.data), classes=CLASSES)


def load(source: Source, folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """The training and the test set. Raises TaskError if a file is absent or damaged."""
    raw = folder.absolute() / source.name / "raw"
    missing = [name for name in source.md5 if _find(raw, name) is None]
    if missing:
        _download(source, folder.absolute(), missing[0])
    return _labelled(source, raw, "train"), _labelled(source, raw, "t10k")


def _find(raw: Path, name: str) -> Path | None:
    """The unpacked file if there is one, else the packed one."""
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.is_file()), None)


def _download(source: Source, folder: Path, missing: str) -> None:
    """Let torchvision fetch the four files. Each appears in its place complete or not at all."""
    # A warning, since it is shown whatever the logging is set to.
    logger.warning("%s is not in %s: downloading %s (%s)", source.name, folder, source.download, source.terms)
    raw = folder / source.name / "raw"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, since other processes may look for the files, or download them, right now.
        with TemporaryDirectory(prefix=f".{source.name}-", dir=folder) as partial:
            from torchvision import datasets  # 1 s and 170 MB, not spent when the data are there

            getattr(datasets, source.name)(partial, download=True)
            raw.mkdir(parents=True, exist_ok=True)
            for name in source.md5:
                (Path(partial) / source.name / "raw" / name).replace(raw / name)
    except (OSError, RuntimeError, EOFError, HTTPException) as error:
        raise TaskError(
            f"{source.name}: no {missing} or {missing}.gz in {raw}, and it could not be downloaded ({error}). "
            f"Put the four files there, or name the folder that holds {source.name}/raw with --data FOLDER"
        ) from error


def _labelled(source: Source, raw: Path, part: str) -> LabelledImages:
    """One half of the data set; part is `train` or `t10k`."""
    image_path, images = _read(source, raw, f"{part}-images-idx3-ubyte", dimensions=3)
    label_path, labels = _read(source, raw, f"{part}-labels-idx1-ubyte", dimensions=1)
    if len(images) == 0 or images.shape[1:] != (SIZE, SIZE):
        raise damaged(image_path, f"holds an array of shape {images.shape}, not (n, {SIZE}, {SIZE})")
    if len(labels) != len(images):
        raise damaged(label_path, f"holds {len(labels)} labels for {len(images)} images")
    if labels.max() >= CLASSES:
        raise damaged(label_path, f"holds label {labels.max()}; they are 0 to {CLASSES - 1}")
    return LabelledImages(images, labels)


def _read(source: Source, raw: Path, name: str, dimensions: int) -> tuple[Path, NDArray[np.uint8]]:
    """The array of an idx file, read-only, and the file it came from.

    An idx file is 0, 0, 8 (unsigned bytes), the number of dimensions, each dimension as a big-endian
    uint32, then the elements in row-major order.
    """
    path = _find(raw, name) or raw / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix == ".gz":
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != source.md5[name]:
            raise damaged(path, f"has MD5 {found}, not {source.md5[name]}")
        content = gzip.decompress(content)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(path, f"is no idx file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) != header + math.prod(shape):
        raise damaged(path, f"has {len(content)} bytes, not {header + math.prod(shape)}")
    return path, np.frombuffer(content, np.uint8, offset=header).reshape(shape)
