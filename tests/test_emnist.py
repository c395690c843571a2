"""EMNIST Balanced: torchvision's layout, pictures turned upright, one archive with files of other splits."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext, load_task
from fedreuse.sim.tasks.mnist import EMNIST_SOURCE, EmnistBalanced

COUNTS = {"train": 94, "test": 47}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def upright(part: str) -> np.ndarray:
    return np.random.default_rng(len(part)).integers(0, 256, (COUNTS[part], 28, 28), dtype=np.uint8)


def files() -> dict[str, bytes]:
    """As in the archive: packed, rows and columns of each picture exchanged."""
    found = {}
    for part, count in COUNTS.items():
        turned = np.array([picture.T for picture in upright(part)])
        found[f"emnist-balanced-{part}-images-idx3-ubyte"] = idx(turned)
        found[f"emnist-balanced-{part}-labels-idx1-ubyte"] = idx(np.arange(count, dtype=np.uint8) % 47)
    return found


def task(data: Path) -> EmnistBalanced:
    made = load_task("emnist-balanced", TaskContext(1, 2, data, {"partition": {"kind": "iid"}}))
    assert isinstance(made, EmnistBalanced)
    return made


def assert_loaded(made: EmnistBalanced) -> None:
    x, y = made.test().tensors
    assert np.array_equal((x[:, 0].numpy() * made.std + made.mean).round(), upright("test"))
    assert y.tolist() == list(range(47))
    assert sum(len(made.client_data(client)) for client in range(2)) + len(made.validation()) == 94
    assert made.model()(x[:2]).shape == (2, 47)


@pytest.mark.parametrize("packed", [True, False])
def test_pictures_are_turned_upright(tmp_path: Path, packed: bool) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in files().items():
        (raw / f"{name}.gz" if packed else raw / name).write_bytes(
            gzip.compress(content) if packed else content
        )
    assert_loaded(task(tmp_path))


def test_of_the_archive_only_the_balanced_split_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive = tmp_path / "gzip.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("gzip/emnist-letters-mapping.txt", "1 65 97")
        for name, content in files().items():
            zipped.writestr(f"gzip/{name}.gz", gzip.compress(content))
    monkeypatch.setattr(datasets.EMNIST, "url", archive.as_uri())
    monkeypatch.setattr(datasets.EMNIST, "md5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert_loaded(task(tmp_path / "data"))
    kept = sorted(path.name for path in (tmp_path / "data" / "EMNIST" / "raw").iterdir())
    assert kept == sorted(f"{name}.gz" for name in files())
    assert "561.8 MB" in caplog.text
    assert "NIST" in caplog.text


def test_a_packed_file_that_breaks_off_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in files().items():
        (raw / f"{name}.gz").write_bytes(gzip.compress(content)[:-20])
    with pytest.raises(TaskError, match=r"emnist-balanced-train-images-idx3-ubyte\.gz cannot be unpacked"):
        task(tmp_path)


def test_the_files_are_torchvision_s_of_the_balanced_split() -> None:
    (origin,) = EMNIST_SOURCE.data_set().origins()
    assert (origin.urls, origin.md5) == ([datasets.EMNIST.url], datasets.EMNIST.md5)
    assert len(datasets.EMNIST.classes_split_dict["balanced"]) == EMNIST_SOURCE.classes == 47
    assert set(EMNIST_SOURCE.md5) == set(files())
