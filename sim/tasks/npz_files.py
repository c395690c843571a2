"""Files with MedMNIST's keys: what is in them is checked before it takes memory, and nothing is unpickled."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedreuse.client.errors import TaskError
from fedreuse.sim.tasks.files import Bytes, decoded
from fedreuse.sim.tasks.images import LabelledImages

PARTS = ("train", "val", "test")
LIMIT = 20_000_000_000
"""Bytes that the images of a file may take in memory. MedMNIST's largest, PathMNIST at 224x224, takes 16.1e9."""
SHARED = 64 << 20
"""Images that take more bytes are unpacked once into the cache, which all processes map."""
LARGEST_LABEL = 65_535
CHUNK = 1 << 20


class Splits(NamedTuple):
    """validation: None if the file has none; classes: 1 + the largest label, or the number of columns of labels."""

    train: LabelledImages
    validation: LabelledImages | None
    test: LabelledImages
    classes: int


@dataclass(frozen=True)
class _Header:
    """What an array says of itself before its elements."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Faulty(Exception):
    """`key` and what is wrong with it; the file and the advice are added outside."""


def read(path: Path, advice: str, verify: Callable[[], None] = lambda: None, cache: str = "npz") -> Splits:
    """The splits of `path`: `train_images`, `train_labels`, the same for `val` (perhaps) and `test`.

    Images are uint8, (n, h, h) or (n, h, h, 3), labels whole numbers from 0, (n,) or (n, 1), or zeros and ones
    (n, l) for l labels that an image can have at once. `verify` is called before images are unpacked, but not where
    they are in the cache already, under a name that begins with `cache`.
    Raises TaskError, naming file and key, with `advice`.
    """
    try:
        with _opened(path) as archive:
            headers = {name: _header(archive, name) for name in _keys(archive)}
            parts = [part for part in PARTS if f"{part}_images" in headers]
            for part in parts:
                _check_images(headers, part)
            total = sum(headers[f"{part}_images"].size for part in parts)
            if total > LIMIT:
                raise _Faulty(
                    f"the images take {total / 1e9:.1f} GB unpacked, more than {LIMIT / 1e9:.0f} GB"
                )
            labels = [_labels(archive, headers, part) for part in parts]
        unpack = partial(_images, path, headers, parts, verify)
        pixels = unpack() if total <= SHARED else decoded(cache, [path], total, unpack)
        classes = _classes(parts, labels)
    except _Faulty as error:
        raise TaskError(f"{path}: {error}; {advice}") from error
    found: dict[str, LabelledImages] = {}
    start = 0
    for part, own in zip(parts, labels, strict=True):
        header = headers[f"{part}_images"]
        images = pixels[start : start + header.size].reshape(header.shape)
        found[part], start = LabelledImages(images, own), start + header.size
    return Splits(found["train"], found.get("val"), found["test"], classes)


@contextmanager
def _opened(path: Path) -> Iterator[ZipFile]:
    try:
        with ZipFile(path) as archive:
            yield archive
    except FileNotFoundError as error:
        raise _Faulty("there is no such file") from error
    except BadZipFile as error:
        raise _Faulty(f"is damaged, or no npz file ({error})") from error
    except (OSError, EOFError, zlib.error, NotImplementedError, RuntimeError, ValueError) as error:
        # An encrypted file is a RuntimeError, an unknown compression NotImplementedError.
        raise _Faulty(f"cannot be read ({error})") from error


def _keys(archive: ZipFile) -> list[str]:
    held = {name.removesuffix(".npy") for name in archive.namelist()}
    due = [f"{part}_{what}" for part in ("train", "test") for what in ("images", "labels")]
    if {"val_images", "val_labels"} & held:
        due += ["val_images", "val_labels"]
    if missing := [name for name in due if name not in held]:
        shown = ", ".join(sorted(held)[:10]) or "nothing"
        raise _Faulty(f"{' and '.join(missing)} missing; it holds {shown}")
    return due


def _header(archive: ZipFile, key: str) -> _Header:
    info = archive.getinfo(f"{key}.npy")
    with archive.open(info) as handle:
        try:
            if npy.read_magic(handle) != (1, 0):  # later ones are for tables of named columns
                raise ValueError("no npy file of version 1.0")
            shape, fortran, dtype = npy.read_array_header_1_0(handle)
        except ValueError as error:
            raise _Faulty(f"{key} is no array of numbers ({error})") from error
        if dtype.hasobject:
            raise _Faulty(f"{key} holds Python objects, which are never loaded: they could run code")
        if dtype.kind not in "biuf" or min(shape, default=0) < 0:
            raise _Faulty(f"{key} is no array of numbers (type {dtype}, shape {shape})")
        header = _Header(shape, fortran, dtype, handle.tell())
    if info.file_size != header.start + header.size:
        raise _Faulty(
            f"{key} has {info.file_size - header.start} bytes for the {header.size} that it promises"
        )
    return header


def _check_images(headers: dict[str, _Header], part: str) -> None:
    key = f"{part}_images"
    shape, dtype = headers[key].shape, headers[key].dtype
    if dtype != np.uint8:
        raise _Faulty(f"{key} are {dtype}, not uint8 levels from 0 to 255")
    if len(shape) not in (3, 4) or shape[1] != shape[2] or shape[3:] not in ((), (3,)):
        raise _Faulty(f"{key} have shape {shape}, neither (n, h, h) nor (n, h, h, 3)")
    if 0 in shape:
        raise _Faulty(f"{key} are empty, shape {shape}")
    if shape[1:] != headers["train_images"].shape[1:]:
        raise _Faulty(f"{key} have shape {shape}, train_images {headers['train_images'].shape}")


def _labels(archive: ZipFile, headers: dict[str, _Header], part: str) -> NDArray[Any]:
    """(n,) classes, or (n, l) zeros and ones; of the smallest type that holds them."""
    key = f"{part}_labels"
    header, images = headers[key], headers[f"{part}_images"].shape[0]
    if header.dtype.kind not in "iu":
        raise _Faulty(f"{key} are {header.dtype}, not whole numbers (an integer type)")
    if len(header.shape) not in (1, 2) or header.shape[1:] == (0,):
        raise _Faulty(f"{key} have shape {header.shape}, neither (n,) nor (n, 1)")
    if header.shape[0] != images:
        raise _Faulty(f"{key} are {header.shape[0]} for {images} images")
    if header.size > 8 * images * 1024:  # before they take memory
        raise _Faulty(f"{key} have shape {header.shape}: more than 1,024 labels an image")
    labels = _elements(archive, key, header, np.empty(header.size, np.uint8))
    if labels.shape[1:] == (1,):
        labels = labels[:, 0]
    largest = 1 if labels.ndim == 2 else LARGEST_LABEL
    if labels.min() < 0 or labels.max() > largest:
        extra = " where an image can have several labels" if labels.ndim == 2 else ""
        raise _Faulty(f"{key} are from {labels.min()} to {labels.max()}, not from 0 to {largest}{extra}")
    return labels.astype(np.uint8 if labels.max() < 256 else np.uint16)


def _classes(parts: list[str], labels: list[NDArray[Any]]) -> int:
    """Classes are known from what is not tested on. A class may be missing in the validation or the test set."""
    held = dict(zip(parts, labels, strict=True))
    if len({own.shape[1:] for own in labels}) > 1:
        raise _Faulty(f"the labels of {', '.join(parts)} have {[own.shape[1:] for own in labels]} columns")
    train = held["train"]
    if train.ndim == 2:
        return int(train.shape[1])
    classes = 1 + max(int(own.max()) for part, own in held.items() if part != "test")
    if held["test"].max() >= classes:
        raise _Faulty(
            f"test_labels hold class {held['test'].max()}; the classes of the training images are 0 to {classes - 1}"
        )
    return classes


def _images(path: Path, headers: dict[str, _Header], parts: list[str], verify: Callable[[], None]) -> Bytes:
    """The pixels of all parts, one after the other."""
    verify()
    due = [headers[f"{part}_images"] for part in parts]
    pixels = np.empty(sum(header.size for header in due), np.uint8)
    start = 0
    with _opened(path) as archive:
        for part, header in zip(parts, due, strict=True):
            own = pixels[start : start + header.size]
            own[:] = _elements(archive, f"{part}_images", header, own).ravel()
            start += header.size
    return pixels


def _elements(archive: ZipFile, key: str, header: _Header, into: Bytes) -> NDArray[Any]:
    """The array, its elements lying in `into`; read in pieces, so that no more than promised is ever unpacked."""
    filled = 0
    with archive.open(f"{key}.npy") as handle:
        handle.read(header.start)
        while filled < header.size:
            piece = handle.read(min(CHUNK, header.size - filled))
            if not piece:
                raise _Faulty(f"{key} breaks off after {filled} of {header.size} bytes")
            into[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
        handle.read(1)  # the end, where the checksum is compared
    return into.view(header.dtype).reshape(header.shape, order="F" if header.fortran else "C")
