"""Files with MedMNIST's keys: what they may hold, and what becomes of hostile ones."""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from medmnist_files import arrays, write

from fedreuse.client.errors import TaskError
from fedreuse.sim.tasks import npz_files
from fedreuse.sim.tasks.npz_files import read

ADVICE = "put it right"
U8 = np.uint8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedreuse"


@pytest.mark.parametrize("size", [4, 28, 65])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_was_written_is_read(tmp_path: Path, size: int, colour: bool, save: Callable[..., None]) -> None:
    content = arrays(size=size, colour=colour)
    save(tmp_path / "own.npz", **content)
    train, validation, test, classes = read(tmp_path / "own.npz", ADVICE)
    assert validation is not None
    for part, found in (("train", train), ("val", validation), ("test", test)):
        assert np.array_equal(found.images, content[f"{part}_images"])
        assert found.labels.tolist() == content[f"{part}_labels"][:, 0].tolist()
        assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.uint8)
    assert classes == 3


def test_labels_need_no_second_dimension_and_validation_need_not_be(tmp_path: Path) -> None:
    content = {key: array.ravel() if "labels" in key else array for key, array in arrays(val=0).items()}
    found = read(write(tmp_path / "own.npz", content), ADVICE)
    assert found.validation is None
    assert found.train.labels.shape == (40,)


def test_matlab_s_order_of_elements(tmp_path: Path) -> None:
    content = {key: np.asfortranarray(array) for key, array in arrays(colour=True).items()}
    assert content["train_images"].flags.f_contiguous
    found = read(write(tmp_path / "own.npz", content), ADVICE)
    assert np.array_equal(found.train.images, arrays(colour=True)["train_images"])
    assert np.array_equal(found.test.images, arrays(colour=True)["test_images"])


@pytest.mark.parametrize("kind", ["int8", "int16", ">i4", "int64", "uint64"])
def test_labels_of_any_integer_type(tmp_path: Path, kind: str) -> None:
    content = arrays()
    content["train_labels"] = content["train_labels"].astype(kind)
    assert read(write(tmp_path / "own.npz", content), ADVICE).train.labels.tolist()[:4] == [0, 1, 2, 0]


def test_more_than_256_classes(tmp_path: Path) -> None:
    content = arrays()
    content["train_labels"] = np.arange(40)[:, None] * 10
    found = read(write(tmp_path / "own.npz", content), ADVICE)
    assert found.train.labels.tolist() == list(range(0, 400, 10))
    assert found.classes == 391


def test_a_class_may_be_missing_in_validation_and_test(tmp_path: Path) -> None:
    content = arrays()
    content["val_labels"][:] = 1
    content["test_labels"][:] = 0
    assert read(write(tmp_path / "own.npz", content), ADVICE).classes == 3


def test_several_labels_an_image(tmp_path: Path) -> None:
    content = arrays()
    for part in ("train", "val", "test"):
        own = content[f"{part}_labels"]
        content[f"{part}_labels"] = np.concatenate([own == 0, own == 1, own == 2, own < 2], 1).astype(
            np.uint8
        )
    found = read(write(tmp_path / "own.npz", content), ADVICE)
    assert found.classes == 4
    assert found.train.labels[:3].tolist() == [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 0]]


def test_large_images_are_unpacked_once_into_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "own.npz", size=65, colour=True)
    read(path, ADVICE)
    assert not cache.exists()  # small ones are not worth it
    monkeypatch.setattr(npz_files, "SHARED", 1000)
    first = read(path, ADVICE)
    (kept,) = cache.iterdir()
    assert kept.stat().st_size == 128 + 62 * 65 * 65 * 3  # npy header, pixels of 40 + 12 + 10 images
    monkeypatch.setattr(npz_files, "_images", lambda *_: pytest.fail("unpacked again"))
    second = read(path, ADVICE)
    content = arrays(size=65, colour=True)
    for found in (first, second):
        assert np.array_equal(found.test.images, content["test_images"])
    base: object = second.train.images
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


# Hostile files


def changed(**how: object) -> Callable[[Path], None]:
    """A file in which some arrays are others, or none."""

    def damage(path: Path) -> None:
        content = {key: array for key, array in {**arrays(), **how}.items() if array is not None}
        np.savez(path, **content, allow_pickle=True)

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    """One byte of pixels is another; only the archive's checksum tells."""
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def text(path: Path) -> None:
    path.write_text("<html>not found</html>")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def member(path: Path, key: str, content: bytes) -> None:
    """The file with one member replaced."""
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in arrays().items() if name != key})
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{key}.npy", content)
    path.write_bytes(buffer.getvalue())


def npy(shape: str, data: bytes = b"", kind: str = "|u1") -> bytes:
    """An array file with any shape in its header."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def no_array(path: Path) -> None:
    member(path, "train_images", b"P5 28 28 255")


def short(path: Path) -> None:
    member(path, "train_images", npy("(40, 28, 28)", bytes(100)))


def long(path: Path) -> None:
    member(path, "test_labels", npy("(10, 1)", bytes(11)))


def negative(path: Path) -> None:
    member(path, "train_images", npy("(-40, 28, 28)", bytes(100)))


def promises(path: Path) -> None:
    member(path, "train_images", npy("(1000000000, 1000000, 1000000)"))


def bomb(path: Path) -> None:
    """46 MB of zeros, where the limit is set to 20 MB."""
    zeros = {
        key: np.zeros((len(a), 866, 866) if "images" in key else a.shape, U8) for key, a in arrays().items()
    }
    np.savez_compressed(path, **zeros)
    assert path.stat().st_size < 100_000


def wide(path: Path) -> None:
    member(path, "train_labels", npy("(40, 200000)", bytes(8_000_000)))


def code(path: Path) -> None:
    """Unpickling it would make a file."""

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.mkdir, (str(path.parent / "executed"),)

    changed(train_labels=np.array([Evil()] * 40, dtype=object))(path)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "there is no such file"),
    "truncated": (cut, r"is damaged, or no npz file"),
    "flipped": (flip, r"is damaged, .*Bad CRC-32"),
    "no zip": (text, r"is damaged, or no npz file"),
    "folder": (folder, r"cannot be read .*directory"),
    "objects": (code, "train_labels holds Python objects, which are never loaded"),
    "no array": (no_array, "train_images is no array of numbers"),
    "short": (short, "train_images has 100 bytes for the 31360 that it promises"),
    "long": (long, "test_labels has 11 bytes for the 10 that it promises"),
    "negative": (negative, r"train_images is no array of numbers .*\(-40, 28, 28\)"),
    "promises": (promises, "train_images has 0 bytes for the 1000000000000000000000 that it promises"),
    "bomb": (bomb, r"the images take 0\.0 GB unpacked, more than 0 GB"),
    "wide": (wide, r"train_labels have shape \(40, 200000\): more than 1,024 labels"),
    "keys": (
        changed(test_images=None, test_labels=None),
        "test_images and test_labels missing; it holds train_",
    ),
    "half validation": (changed(val_labels=None), "val_labels missing"),
    "float images": (
        changed(train_images=np.zeros((40, 28, 28), np.float32)),
        "train_images are float32, not u",
    ),
    "flat images": (
        changed(train_images=np.zeros((40, 784), U8)),
        r"train_images have shape \(40, 784\), nei",
    ),
    "oblong": (changed(train_images=np.zeros((40, 28, 30), U8)), r"train_images have shape \(40, 28, 30\)"),
    "two channels": (changed(val_images=np.zeros((12, 28, 28, 2), U8)), r"val_images have shape"),
    "another size": (
        changed(test_images=np.zeros((10, 32, 32), U8)),
        r"test_images have .* train_images \(40, 28",
    ),
    "text labels": (changed(train_labels=np.array(["cat"] * 40)), "train_labels is no array of numbers"),
    "float labels": (changed(train_labels=np.zeros((40, 1))), "train_labels are float64, not whole numbers"),
    "negative labels": (
        changed(test_labels=np.full((10, 1), -1)),
        "test_labels are from -1 to -1, not from 0",
    ),
    "large labels": (
        changed(train_labels=np.full((40, 1), 1 << 40)),
        "train_labels are from .* not from 0 to 65535",
    ),
    "unlike": (changed(test_labels=np.full((10, 1), 3)), "test_labels hold class 3; .* are 0 to 2"),
    "count": (changed(train_labels=np.zeros((39, 1), U8)), "train_labels are 39 for 40 images"),
    "cube": (changed(train_labels=np.zeros((40, 1, 1), U8)), r"train_labels have shape \(40, 1, 1\)"),
    "number": (changed(train_images=np.uint8(3)), r"train_images have shape \(\)"),
    "empty": (
        changed(test_images=np.zeros((0, 28, 28), U8), test_labels=np.zeros((0, 1), U8)),
        "test_images are empty",
    ),
    "no columns": (changed(train_labels=np.zeros((40, 0), U8)), r"train_labels have shape \(40, 0\)"),
    "no bits": (
        changed(train_labels=np.full((40, 2), 2, U8)),
        "train_labels are from 2 to 2, not from 0 to 1 where an image",
    ),
    "columns": (changed(val_labels=np.zeros((12, 2), U8)), "the labels of train, val, test have"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error_that_names_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, what = HOSTILE[name]
    path = write(tmp_path / "own.npz")
    damage(path)
    monkeypatch.setattr(npz_files, "LIMIT", 20_000_000)
    with pytest.raises(TaskError, match=rf"own\.npz: ({what}).*; put it right$"):
        read(path, ADVICE)
    assert not (tmp_path / "executed").exists()


def test_an_encrypted_file(tmp_path: Path) -> None:
    """The flag in the archive's directory, and in the member's own header, says so."""
    path = write(tmp_path / "own.npz")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    path.write_bytes(content)
    with pytest.raises(TaskError, match=r"own\.npz: cannot be read .*encrypted"):
        read(path, ADVICE)
