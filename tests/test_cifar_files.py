"""The files of CIFAR-10: sheets and batches, damaged ones, the download, the cache of decoded images."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import pickle
import tarfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sheets import SMALL, labels, pictures, write_sheet, write_sheets
from torchvision import datasets

from fedreuse.client.errors import TaskError
from fedreuse.sim.tasks import cifar_files
from fedreuse.sim.tasks.cifar_files import CIFAR10, CIFAR100, MD5, Layout, load
from fedreuse.sim.tasks.pickles import load_plain


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedreuse"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with small sheets."""
    return write_sheets(tmp_path / "data")


def assert_loaded(folder: Path) -> None:
    train, test = load(folder, SMALL)
    assert np.array_equal(np.concatenate([train.images, test.images]), pictures())
    assert np.array_equal(np.concatenate([train.labels, test.labels]), labels())
    assert (len(train.labels), len(test.labels)) == (50, 20)


# Sheets


def test_sheets_are_read_row_by_row(data: Path) -> None:
    assert_loaded(data)


def broken(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def text(path: Path) -> None:
    path.write_text("<html>not found</html>")


def larger(path: Path) -> None:
    Image.new("RGB", (192, 64)).save(path, lossless=True)


def other_arrays(path: Path) -> None:
    np.savez(path, labels=labels())


def one_less(path: Path) -> None:
    np.savez(path, train_labels=labels()[:50], test_labels=labels()[50:69])


def unbalanced(path: Path) -> None:
    wrong = labels()
    wrong[0] = 1
    np.savez(path, train_labels=wrong[:50], test_labels=wrong[50:])


def out_of_range(path: Path) -> None:
    wrong = labels()
    wrong[wrong == 9] = 10
    np.savez(path, train_labels=wrong[:50], test_labels=wrong[50:])


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("train_03.webp", Path.unlink, r"cannot be read \(No such file"),
        ("train_00.webp", broken, "cannot be read"),
        ("test_01.webp", text, "is no image that Pillow can read"),
        ("train_04.webp", larger, "is 192x64 pixels, not 160x64"),
        ("labels.npz", Path.unlink, r"cannot be read \(No such file"),
        ("labels.npz", broken, "does not hold train_labels"),
        ("labels.npz", other_arrays, "does not hold train_labels and test_labels"),
        ("labels.npz", one_less, "holds 19 test labels, not 20"),
        ("labels.npz", unbalanced, r"has \[4, 6, 5, .* train images of the classes, not 5 of each"),
        ("labels.npz", out_of_range, r"has train labels \[.*8, 10\], not 0 to 9"),
    ],
)
def test_a_damaged_sheet_is_named(
    data: Path, cache: Path, name: str, damage: Callable[[Path], None], what: str
) -> None:
    damage(data / "cifar10" / name)
    with pytest.raises(TaskError, match=f"{name} ({what}).*--data FOLDER"):
        load(data, SMALL)
    assert not cache.exists() or list(cache.iterdir()) == []


# The cache


def memory_of(array: np.ndarray) -> object:
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def test_decoded_once_and_mapped_afterwards(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_loaded(data)
    (kept,) = cache.iterdir()
    assert kept.stat().st_size == 128 + 70 * (32 * 32 * 3 + 1)  # npy header, pixels, labels
    monkeypatch.setattr(Image, "open", None)
    assert_loaded(data)
    train, _ = load(data, SMALL)
    assert isinstance(memory_of(train.images), mmap.mmap)
    assert not train.images.flags.writeable


def test_a_changed_sheet_is_decoded_anew(data: Path) -> None:
    load(data, SMALL)
    path = data / "cifar10" / "train_01.webp"
    before = path.stat()
    write_sheet(path, pictures()[60:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert np.array_equal(load(data, SMALL)[0].images[10:20], pictures()[60:])


@pytest.mark.parametrize("left", [0, 100, 5000])
def test_a_cut_cache_file_is_replaced(data: Path, cache: Path, left: int) -> None:
    load(data, SMALL)
    (kept,) = cache.iterdir()
    os.truncate(kept, left)
    assert_loaded(data)
    assert list(cache.iterdir()) == [kept]
    assert kept.stat().st_size > 5000


def test_a_cache_folder_that_cannot_be_written_is_done_without(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_loaded(data)
    assert "cannot be kept decoded" in caplog.text


def test_without_xdg_cache_home_the_cache_is_in_the_home(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load(data, SMALL)
    assert len(list((tmp_path / "home" / ".cache" / "fedreuse").iterdir())) == 1


def test_several_at_once_leave_one_whole_file(data: Path, cache: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(assert_loaded, data) for _ in range(12)]:
            done.result()
    assert len(list(cache.iterdir())) == 1


# torchvision's batches


def write_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small batches as torchvision's: rows of all red, all green, all blue levels; and their checksums."""
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    ends = [0, 10, 20, 30, 40, 50, 70]
    for name, start, end in zip(MD5, ends[:-1], ends[1:], strict=True):
        rows = [np.concatenate([image[..., c].ravel() for c in range(3)]) for image in pictures()[start:end]]
        content = pickle.dumps({"data": np.array(rows), "labels": labels()[start:end].tolist()}, protocol=2)
        for key in (b"data", b"labels"):  # strings as Python 2 wrote them
            new, old = b"X" + len(key).to_bytes(4, "little") + key, b"U" + bytes([len(key)]) + key
            assert new in content
            content = content.replace(new, old)
        (batches / name).write_bytes(content)
        monkeypatch.setitem(MD5, name, hashlib.md5(content).hexdigest())
    return batches


def test_torchvisions_batches_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batches(tmp_path / "data", monkeypatch)
    assert_loaded(tmp_path / "data")


def test_a_batch_with_the_wrong_content_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_batches(tmp_path / "data", monkeypatch) / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    monkeypatch.setattr(cifar_files, "load_plain", only_before("data_batch_3", path.read_bytes()))
    with pytest.raises(TaskError, match=r"data_batch_3 has MD5 .* not .*--data FOLDER"):
        load(tmp_path / "data", SMALL)


def only_before(name: str, content: bytes) -> Callable[..., object]:
    real = cifar_files.load_plain

    def load_plain(given: bytes) -> object:
        assert given != content, f"{name} was unpickled"
        return real(given)

    return load_plain


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100])
def test_checksums_are_torchvisions(layout: Layout) -> None:
    known = getattr(datasets, layout.name)
    assert dict(known.train_list + known.test_list) == layout.md5
    (origin,) = layout.data_set().origins()
    assert (origin.urls, origin.md5) == ([known.url], known.tgz_md5)
    assert layout.batches == known.base_folder


def test_absent_files_that_cannot_be_downloaded_are_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "url", (tmp_path / "gone.tar.gz").as_uri())
    folder = tmp_path / "data"
    with pytest.raises(TaskError) as info:
        load(folder)
    for part in (str(folder / "cifar-10-batches-py"), "data_batch_1", "test_batch", "--data FOLDER"):
        assert part in str(info.value)
    assert "170.5 MB, 184 MB unpacked" in caplog.text
    assert "no licence is stated" in caplog.text
    assert list(folder.iterdir()) == []  # nothing half done is left


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_absent_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = write_batches(tmp_path / "origin", monkeypatch)
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(batches, batches.name)
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
        monkeypatch.setattr(datasets.CIFAR10, "url", url)
        assert_loaded(tmp_path / "data")
        server.shutdown()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-py"]
    assert {path.name for path in (tmp_path / "data" / "cifar-10-batches-py").iterdir()} == set(MD5)


# CIFAR-100


def write_hundred(folder: Path, train: bytes | None = None) -> Layout:
    """70 images of 10 fine and 2 coarse labels in the files of CIFAR-100."""
    batches = folder / "cifar-100-python"
    batches.mkdir(parents=True)
    rows = [np.concatenate([image[..., c].ravel() for c in range(3)]) for image in pictures()]
    md5 = {}
    for name, part in (("train", slice(50)), ("test", slice(50, 70))):
        own = labels()[part].tolist()
        batch = {"data": np.array(rows[part]), "fine_labels": own, "coarse_labels": [y // 5 for y in own]}
        content = pickle.dumps({**batch, "filenames": ["a.png"] * len(own)}, protocol=2)
        content = train if train is not None and name == "train" else content
        (batches / name).write_bytes(content)
        md5[name] = hashlib.md5(content).hexdigest()
    return replace(CIFAR100, train=50, test=20, classes=10, md5=md5)


def test_cifar_100_has_fine_labels(tmp_path: Path) -> None:
    layout = write_hundred(tmp_path)
    train, test = load(tmp_path, layout)
    assert np.array_equal(np.concatenate([train.images, test.images]), pictures())
    assert np.array_equal(np.concatenate([train.labels, test.labels]), labels())
    assert (tmp_path / "cache" / "fedreuse").exists()


def test_cifar_10_s_sheets_are_not_cifar_100_s(data: Path) -> None:
    assert CIFAR10.missing(data) == []
    assert CIFAR100.missing(data) == ["train", "test"]


class Evil:
    """Unpickling it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_names_a_function_is_refused_though_its_checksum_is_right(tmp_path: Path) -> None:
    content = pickle.dumps({"data": Evil(tmp_path / "executed"), "fine_labels": []}, protocol=2)
    layout = write_hundred(tmp_path / "data", content)
    with pytest.raises(TaskError, match=r"train is no batch of images \(it names posix\.mkdir, which is not"):
        load(tmp_path / "data", layout)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([]),
        pickle.dumps({"data": 3, "fine_labels": []}),
        pickle.dumps({"data": np.zeros(5, np.uint8), "fine_labels": []}),
        pickle.dumps({"data": np.zeros((50, 3072), np.uint8)}),
    ],
)
def test_a_pickle_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    layout = write_hundred(tmp_path, content)
    with pytest.raises(TaskError, match=r"train is no batch of images .*--data FOLDER"):
        load(tmp_path, layout)


@pytest.mark.parametrize("protocol", range(5))
def test_plain_values_and_arrays_are_read(protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, "text"], "b": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    found = load_plain(pickle.dumps(value, protocol))
    assert found["a"] == value["a"]
    assert np.array_equal(found["b"], value["b"])
