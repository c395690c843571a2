"""The files of CIFAR-10 and CIFAR-100: torchvision's batches, or sheets of lossless WebP images; fetched if absent."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedreuse.sim.tasks.download import DataSet, Origin, fetch
from fedreuse.sim.tasks.files import Bytes, damaged, decoded
from fedreuse.sim.tasks.images import LabelledImages
from fedreuse.sim.tasks.pickles import load_plain

SIZE = 32
PIXELS = SIZE * SIZE * 3

PARTS = ("train", "test")
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
"""Of each file of torchvision's folder, the same as in torchvision; checked before anything is unpickled."""
MD5_100 = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}
TERMS = "Alex Krizhevsky, University of Toronto; no licence is stated, a citation of his report of 2009 is asked for"


@dataclass(frozen=True)
class Layout:
    """train, test: numbers of images, equally many of each class; a sheet holds rows x columns of them.

    batches: torchvision's folder, with the MD5 of its files, those of the test set last; key: of the labels in them;
    sheets: the folder of sheets, if there can be one; name: torchvision's class; size: bytes to fetch.
    """

    train: int
    test: int
    classes: int
    rows: int = 25
    columns: int = 40
    name: str = "CIFAR10"
    batches: str = "cifar-10-batches-py"
    md5: Mapping[str, str] = field(default_factory=lambda: MD5)
    key: str = "labels"
    sheets: str | None = "cifar10"
    size: int = 170_498_071

    def sheet_names(self, part: str) -> list[str]:
        """The names of the sheets of `train` or `test`."""
        images = self.train if part == "train" else self.test
        return [f"{part}_{number:02}.webp" for number in range(images // (self.rows * self.columns))]

    def data_set(self) -> DataSet:
        """What is fetched if neither sheets nor batches are there."""
        unpacked = (self.train + self.test) * (PIXELS + 1)
        return DataSet(
            self.name, TERMS, self.batches, tuple(self.md5), partial(_origins, self), self.size, unpacked
        )

    def missing(self, data: Path) -> list[str]:
        """What of the data set is not in the folder `data`."""
        if self.sheets is not None and (data / self.sheets).is_dir():
            return []
        return [name for name in self.md5 if not (data / self.batches / name).is_file()]


CIFAR10 = Layout(train=50_000, test=10_000, classes=10)
CIFAR100 = Layout(
    train=50_000,
    test=10_000,
    classes=100,
    name="CIFAR100",
    batches="cifar-100-python",
    md5=MD5_100,
    key="fine_labels",
    sheets=None,
    size=169_001_437,
)


def load(folder: Path, layout: Layout = CIFAR10) -> tuple[LabelledImages, LabelledImages]:
    """The training and the test set, images (n, 32, 32, 3), mapped from the cache where there is one.

    Sheets are `folder`/cifar10/train_00.webp ... test_09.webp and labels.npz (`train_labels`,
    `test_labels`), torchvision's files `folder`/cifar-10-batches-py/data_batch_1 ... test_batch, or
    `folder`/cifar-100-python/train and test. Raises TaskError if a file is absent or damaged.
    """
    folder = folder.absolute()
    decode: Callable[[], Bytes]
    if layout.missing(folder):
        fetch(layout.data_set(), folder)
    if layout.sheets is not None and (folder / layout.sheets).is_dir():
        sheets = folder / layout.sheets
        names = ["labels.npz", *layout.sheet_names("train"), *layout.sheet_names("test")]
        files, decode = [sheets / name for name in names], partial(_from_sheets, sheets, layout)
    else:
        batches = folder / layout.batches
        files, decode = [batches / name for name in layout.md5], partial(_from_batches, batches, layout)
    count = layout.train + layout.test
    content = decoded(layout.name.lower(), files, count * (PIXELS + 1), decode)
    images = content[: count * PIXELS].reshape(count, SIZE, SIZE, 3)
    labels = content[count * PIXELS :]
    train, test = slice(layout.train), slice(layout.train, None)
    return LabelledImages(images[train], labels[train]), LabelledImages(images[test], labels[test])


def _from_sheets(folder: Path, layout: Layout) -> Bytes:
    """All pixels, then all labels, the training set first."""
    labels = _sheet_labels(folder / "labels.npz", layout)  # first: quick to find damaged
    sheets = [*layout.sheet_names("train"), *layout.sheet_names("test")]
    pixels = np.concatenate([_pixels(folder / name, layout) for name in sheets])
    return np.concatenate([pixels, labels])


def _pixels(path: Path, layout: Layout) -> Bytes:
    """The images of a sheet, row by row from the top left, one after the other."""
    rows, columns = layout.rows, layout.columns
    try:
        with Image.open(path) as image:
            if image.size != (columns * SIZE, rows * SIZE):  # before its pixels take memory
                raise damaged(
                    path, f"is {image.width}x{image.height} pixels, not {columns * SIZE}x{rows * SIZE}"
                )
            sheet = np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise damaged(path, "is no image that Pillow can read") from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise damaged(path, f"cannot be read ({error})") from error
    return sheet.reshape(rows, SIZE, columns, SIZE, 3).swapaxes(1, 2).ravel()


def _sheet_labels(path: Path, layout: Layout) -> Bytes:
    try:
        with np.load(path) as archive:
            parts = [archive["train_labels"].ravel(), archive["test_labels"].ravel()]
    except (OSError, ValueError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        raise damaged(path, f"does not hold train_labels and test_labels ({error})") from error
    return np.concatenate(
        [_checked(path, part, labels, layout) for part, labels in zip(PARTS, parts, strict=True)]
    )


def _from_batches(folder: Path, layout: Layout) -> Bytes:
    """As `_from_sheets`. A batch is a pickle of rows of 32x32 red, then green, then blue levels."""
    pixels, labels = [], []
    for name, md5 in layout.md5.items():
        content = _read(folder / name)
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != md5:
            raise damaged(folder / name, f"has MD5 {found}, not {md5}")
        try:
            batch = load_plain(content)
            pixels.append(batch["data"].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1).ravel())
            labels += batch[layout.key]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(folder / name, f"is no batch of images ({error})") from error
    train = _checked(folder, "train", np.array(labels[: layout.train]), layout)
    test = _checked(folder, "test", np.array(labels[layout.train :]), layout)
    return np.concatenate([*pixels, train, test])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error


def _checked(path: Path, part: str, labels: NDArray[Any], layout: Layout) -> Bytes:
    """The labels of a part as bytes, if they are as many as there should be, and of each class as many."""
    due = layout.train if part == "train" else layout.test
    if len(labels) != due:
        raise damaged(path, f"holds {len(labels)} {part} labels, not {due}")
    values, counts = np.unique(labels, return_counts=True)
    if values.tolist() != list(range(layout.classes)):
        raise damaged(path, f"has {part} labels {values.tolist()}, not 0 to {layout.classes - 1}")
    if counts.min() != counts.max():
        raise damaged(
            path, f"has {counts.tolist()} {part} images of the classes, not {due // layout.classes} of each"
        )
    return labels.astype(np.uint8)


def _origins(layout: Layout) -> Sequence[Origin]:
    from torchvision import datasets  # 1 s and 170 MB, not spent when the data are there

    known = getattr(datasets, layout.name)
    return [Origin([known.url], known.tgz_md5, {f"{layout.batches}/{name}": name for name in layout.md5})]
