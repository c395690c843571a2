"""CIFAR-10: sheets and batches, the cache of decoded images, ResNet-18, a whole small run."""

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
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import completed, final_state, small_config, table
from torchvision import datasets, models

from fedreuse.client.errors import TaskError
from fedreuse.client.proxy import head_parameters
from fedreuse.client.settings import ProxySettings
from fedreuse.client.task import TaskContext, load_task
from fedreuse.client.workbench import schema_of, state_arrays
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER
from fedreuse.server.weights import load_model
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.models import resnet18
from fedreuse.sim.tasks import cifar_files
from fedreuse.sim.tasks.cifar import Cifar10
from fedreuse.sim.tasks.cifar_files import CIFAR10, MD5, Layout, load

DATA = Path(
    os.environ.get("FEDREUSE_TEST_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason=f"no cifar10 in {DATA}; name its folder in FEDREUSE_TEST_DATA"
)
SMALL = Layout(train=50, test=20, classes=10, rows=2, columns=5)
"""Seven sheets of ten images; of each class five images to train on and two to test on."""


class Small(Cifar10):
    layout = SMALL


def context(data: Path, clients: int = 3, **options: object) -> TaskContext:
    return TaskContext(1, clients, data, {"partition": {"kind": "iid"}, **options})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedreuse"


def pictures() -> np.ndarray:
    """70 images of noise, each of its own."""
    return np.random.default_rng(0).integers(0, 256, (70, 32, 32, 3), dtype=np.uint8)


def labels() -> np.ndarray:
    return np.arange(70, dtype=np.uint8) % 10


def write_sheet(path: Path, images: np.ndarray) -> None:
    """Ten images, five beside each other, pasted one by one."""
    sheet = Image.new("RGB", (160, 64))
    for i, image in enumerate(images):
        sheet.paste(Image.fromarray(image), (32 * (i % 5), 32 * (i // 5)))
    sheet.save(path, lossless=True, method=0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with small sheets."""
    folder = tmp_path / "data" / "cifar10"
    folder.mkdir(parents=True)
    for number in range(7):
        name = f"train_{number:02}.webp" if number < 5 else f"test_{number - 5:02}.webp"
        write_sheet(folder / name, pictures()[10 * number : 10 * number + 10])
    np.savez(folder / "labels.npz", train_labels=labels()[:50, None], test_labels=labels()[50:, None])
    return tmp_path / "data"


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
    monkeypatch.setattr(cifar_files.pickle, "loads", only_before("data_batch_3", path.read_bytes()))
    with pytest.raises(TaskError, match=r"data_batch_3 has MD5 .* not .*--data FOLDER"):
        load(tmp_path / "data", SMALL)


def only_before(name: str, content: bytes) -> Callable[..., object]:
    real = pickle.loads

    def loads(given: bytes, **how: str) -> object:
        assert given != content, f"{name} was unpickled"
        return real(given, **how)

    return loads


def test_checksums_are_torchvisions() -> None:
    assert dict(datasets.CIFAR10.train_list + datasets.CIFAR10.test_list) == MD5


def test_absent_files_that_cannot_be_downloaded_are_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(datasets.CIFAR10, "url", (tmp_path / "gone.tar.gz").as_uri())
    folder = tmp_path / "data"
    with pytest.raises(TaskError) as info:
        load(folder, SMALL)
    for part in (str(folder / "cifar10"), "data_batch_1", "--data FOLDER"):
        assert part in str(info.value)
    assert "170 MB" in caplog.text
    assert "no licence is stated" in caplog.text
    assert list(folder.iterdir()) == []  # nothing half done is left


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_absent_files_are_downloaded_by_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = write_batches(tmp_path / "origin", monkeypatch)
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": []}))
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(batches, batches.name)
    small = {
        "tgz_md5": hashlib.md5(archive.read_bytes()).hexdigest(),
        "train_list": [[name, MD5[name]] for name in list(MD5)[:5]],
        "test_list": [["test_batch", MD5["test_batch"]]],
        "meta": {
            "filename": "batches.meta",
            "key": "label_names",
            "md5": hashlib.md5((batches / "batches.meta").read_bytes()).hexdigest(),
        },
    }
    for name, value in small.items():
        monkeypatch.setattr(datasets.CIFAR10, name, value)
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


# The model


def test_resnet18_for_cifar_has_11173962_parameters() -> None:
    # Stem 3·3·3·64 + 2·64 = 1,856. Stages of four 3x3 convolutions with normalisation, from the second on with
    # a 1x1 shortcut: 64: 4·(36,864 + 128) = 147,968; 128: 73,728 + 3·147,456 + 8,192 + 5·256 = 525,568;
    # 256: 2,099,712; 512: 8,393,728. Head 5,130.
    assert 1_856 + 147_968 + 525_568 + 2_099_712 + 8_393_728 + 5_130 == 11_173_962
    model = resnet18(10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_beyond_the_stem_it_is_torchvisions() -> None:
    torch.manual_seed(3)
    model = resnet18(10)
    theirs = models.resnet18(num_classes=10)
    assert sum(p.numel() for p in resnet18(10, "imagenet").parameters()) == 11_181_642
    names = [name for name in theirs.state_dict() if name != "conv1.weight"]
    assert [name for name in model.state_dict() if name != "conv1.weight"] == names
    theirs.load_state_dict({**model.state_dict(), "conv1.weight": theirs.conv1.weight})
    theirs.conv1, theirs.maxpool = model.conv1, torch.nn.Identity()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), theirs.eval()(x))
    # He initialisation over the outputs, as torchvision's: variance 2 / (3·3·64); 1,728 weights, 5 deviations.
    variance = model.conv1.weight.var(correction=0).item()
    assert variance == pytest.approx(2 / 576, rel=5 * (2 / 1728) ** 0.5)
    with pytest.raises(ValueError, match="cifar, imagenet"):
        resnet18(10, "vit")


def test_running_statistics_travel_and_counters_do_not() -> None:
    kinds = {spec.name: spec.kind for spec in schema_of(resnet18(10)).tensors}
    assert kinds["bn1.running_var"] == FLOAT_BUFFER
    assert kinds["bn1.num_batches_tracked"] == INTEGER_BUFFER
    assert sum(kind == INTEGER_BUFFER for kind in kinds.values()) == 20  # as many normalisations
    head = head_parameters(resnet18(10), ProxySettings())
    assert [p.shape for p in head] == [(10, 512), (10,)]


# The task


def test_inputs_are_normalised_by_channel_and_evaluated_as_they_are(data: Path) -> None:
    task = Small(context(data, stem="imagenet"))
    x, y = task.test().tensors
    assert (x.shape, x.dtype, y.dtype) == ((20, 3, 32, 32), torch.float32, torch.int64)
    used = pictures()[:50].astype(np.float64)
    assert task.mean == pytest.approx(used.mean((0, 1, 2)), rel=1e-12)
    assert task.std == pytest.approx(used.std((0, 1, 2)), rel=1e-12)
    expected = (pictures()[50:] - task.mean) / task.std
    np.testing.assert_array_equal(x.permute(0, 2, 3, 1).numpy(), expected.astype(np.float32))
    item, label = task.test()[4]
    assert torch.equal(item, x[4])
    assert (label, y.tolist()) == (4, labels()[50:].tolist())


def test_a_training_batch_is_cropped_with_black_borders(data: Path) -> None:
    task = Small(context(data))
    x, y = task.client_data(0).tensors
    changed, same = task.augment([x, y], np.random.default_rng(0))
    assert same is y
    # Undone normalisation gives whole levels; what is not of the image is level 0.
    levels = (changed.permute(0, 2, 3, 1).numpy() * task.std + task.mean).round()
    draws = np.random.default_rng(0)
    (top, left), flipped = draws.integers(0, 9, (2, len(x))), draws.integers(0, 2, len(x))
    original = (x.permute(0, 2, 3, 1).numpy() * task.std + task.mean).round()
    for i in range(len(x)):
        padded = np.pad(original[i], ((4, 4), (4, 4), (0, 0)))
        cut = padded[top[i] : top[i] + 32, left[i] : left[i] + 32]
        assert np.array_equal(levels[i], cut[:, ::-1] if flipped[i] else cut)
    assert (levels == 0).all(-1).any()


def test_validation_and_test_are_not_augmented(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Small(context(data, stem="imagenet"))
    monkeypatch.setattr(Small, "augment", lambda *_: pytest.fail("augmented"))
    evaluator, model = TaskEvaluator(task), task.model()
    found = evaluator.test(state_arrays(model))
    x, y = task.test().tensors
    logits = model.eval()(x)
    assert found["accuracy"] == int((logits.argmax(1) == y).sum()) / 20
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    assert set(evaluator.validate(state_arrays(model))) == {"accuracy", "loss"}


def test_an_unknown_stem_is_refused(data: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.options\.stem is 'vit'; known: cifar, imagenet"):
        Small(context(data, stem="vit"))


def test_a_client_with_one_training_example_is_refused(data: Path) -> None:
    with pytest.raises(TaskError, match=r"batch normalisation.*partition.minimum_size to 3"):
        Small(context(data, clients=25))


def run(data: Path, output: Path, stem: str, **how: bool) -> Path:
    config = small_config(
        output,
        f"data={data}",
        f"task.options.stem={stem}",
        "partition.kind=iid",
        "rounds=1",
        "clients.total=3",
        "clients.per_round=2",
        "train.batch_size=16",  # the last of 17 examples joins the batch before
        "train.learning_rate=0.01",
        method="topk-fedavg",
        task="test_cifar:Small",
    )
    return completed(config, **how)


def test_a_round_on_small_sheets(data: Path, tmp_path: Path) -> None:
    folder = run(data, tmp_path / "run", "cifar", wire=True)
    (row,) = table(folder)
    assert (row["fresh"], row["fault"]) == ("2", "0")
    assert np.isfinite(float(row["train_loss"]))
    schema, flat = load_model(folder / "model.safetensors")
    assert all(np.isfinite(values).all() for values in schema.views(flat))
    before = load_model(folder / "initial.safetensors")[1]
    moved = {
        spec.name: not np.array_equal(new, old)
        for spec, new, old in zip(schema.tensors, schema.views(flat), schema.views(before), strict=True)
    }
    assert moved["fc.weight"]
    assert moved["conv1.weight"]
    assert moved["layer4.1.bn2.running_var"]
    assert not moved["layer4.1.bn2.num_batches_tracked"]


def test_a_second_run_gives_the_same_bits(data: Path, tmp_path: Path) -> None:
    first, second = (run(data, tmp_path / name, "imagenet", wire=name == "b") for name in "ab")
    assert final_state(first) == final_state(second)


@needs_data
def test_the_real_images() -> None:
    task = load_task("cifar10", TaskContext(101, 50, DATA, {}))
    assert isinstance(task, Cifar10)
    # Known facts: mean and deviation of levels scaled to 1; a frog, two trucks, a deer, a car ...
    assert (task.mean / 255).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert (task.std / 255).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)
    assert np.bincount(np.concatenate(task.labels_by_client())).tolist() == [5000] * 10
    train, test = load(DATA)
    assert train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert len(CIFAR10.sheets("train") + CIFAR10.sheets("test")) == 60
    x, _ = task.client_data(7).batch(np.arange(2))
    assert x.shape == (2, 3, 32, 32)
