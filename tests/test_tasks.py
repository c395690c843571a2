"""The built-in image tasks: data, splits, normalisation, metrics, and what happens when files are not there."""

from __future__ import annotations

import functools
import gzip
import math
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchvision import datasets

from fedreuse.client.batches import fetch
from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext, load_task
from fedreuse.sim.models import ShallowCNN
from fedreuse.sim.partition import PartitionSettings
from fedreuse.sim.tasks.digits import Digits
from fedreuse.sim.tasks.images import ImageTask, LabelledImages
from fedreuse.sim.tasks.mnist import FASHION_SOURCE, MNIST, MNIST_SOURCE, FashionMNIST

DATA = Path(
    os.environ.get("FEDREUSE_TEST_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}; name their folder in FEDREUSE_TEST_DATA"
)
NOWHERE = Path("no-such-folder")


def context(seed: int = 1, clients: int = 10, data: Path = NOWHERE, **options: object) -> TaskContext:
    return TaskContext(seed, clients, data, options)


def labels_by_client(task: ImageTask) -> list[np.ndarray]:
    """Labels of all examples of each client, validation included."""
    return [task.division.labels(i) for i in range(task.division.clients)]


def images_seen(data: TensorDataset) -> set[bytes]:
    return {x.numpy().tobytes() for x in data.tensors[0]}


# Model


def test_shallow_cnn_has_421642_parameters_on_mnist() -> None:
    # 3·3·1·32 + 32 = 320; 3·3·32·64 + 64 = 18,496; 7·7·64·128 + 128 = 401,536; 128·10 + 10 = 1,290.
    assert (
        sum(p.numel() for p in ShallowCNN(1, 28, 10).parameters())
        == 320 + 18_496 + 401_536 + 1_290
        == 421_642
    )


def test_shallow_cnn_shapes() -> None:
    model = ShallowCNN(3, 8, 5)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"features", "classifier"}
    assert model.classifier[0].in_features == 256
    with pytest.raises(ValueError, match="3x3"):
        ShallowCNN(1, 3, 10)


# Digits


def test_digits_by_entry_point_holds_every_image_once() -> None:
    task = load_task("digits", context())
    parts = [task.client_data(i) for i in range(10)]
    validation, test = task.validation(), task.test()
    assert (sum(map(len, parts)) + len(validation), len(test)) == (1437, 360)
    # Levels are whole numbers: undoing the normalisation gives the 1,797 originals, each once.
    everything = torch.cat([d.tensors[0] for d in (*parts, validation, test)])
    levels = (everything * task.std + task.mean).round().to(torch.uint8).numpy()
    assert sorted(x.tobytes() for x in levels) == sorted(
        x.tobytes() for x in load_digits().images.astype(np.uint8)
    )


def test_digits_labels_belong_to_their_images() -> None:
    original = {x.astype(np.uint8).tobytes(): y for x, y in zip(*load_digits(return_X_y=True), strict=True)}
    task = Digits(context(seed=5))
    for data in (task.client_data(3), task.validation(), task.test()):
        x, y = data.tensors
        levels = (x * task.std + task.mean).round().to(torch.uint8).numpy()
        assert [original[image.tobytes()] for image in levels] == y.tolist()


def test_digits_test_set_is_the_same_for_every_seed() -> None:
    first, other = Digits(context(seed=1)), Digits(context(seed=2, clients=3, train_limit=200))
    assert torch.equal(first.test().tensors[1], other.test().tensors[1])
    pixels = [t.test().tensors[0] * t.std + t.mean for t in (first, other)]
    assert torch.allclose(*pixels, atol=1e-4)
    # 1,797 images: 178 182 177 183 181 182 181 179 174 180 a digit. Times 360/1797 by largest remainder:
    # 35.66 36.46 35.46 36.66 36.26 36.46 36.26 35.86 34.86 36.06; of 355 five are missing: 7, 8, 3, 0, then
    # digits 1 and 5 tie and 1 is lower.
    assert torch.bincount(first.test().tensors[1]).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_inputs_are_float32_with_mean_0_and_deviation_1_over_the_training_images() -> None:
    task = Digits(context(clients=4))
    x = torch.cat([*(task.client_data(i).tensors[0] for i in range(4)), task.validation().tensors[0]])
    assert x.shape == (1437, 1, 8, 8)
    assert x.dtype == torch.float32
    assert x.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert x.double().std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_validation_is_a_tenth_of_each_client_in_ascending_order() -> None:
    task = Digits(context(clients=7))
    validation = task.validation().tensors[1]
    start = 0
    for client, labels in enumerate(labels_by_client(task)):
        size = max(1, round(len(labels) / 10))
        train = task.client_data(client).tensors[1]
        assert len(train) == len(labels) - size
        own = torch.cat([train, validation[start : start + size]])
        assert torch.equal(own.sort().values, torch.from_numpy(labels).long().sort().values)
        start += size
    assert start == len(validation)


def test_a_train_limit_is_stratified_drawn_first_and_normalises() -> None:
    task = Digits(context(clients=5, train_limit=500))
    labels = np.concatenate(labels_by_client(task))
    assert len(labels) == 500
    # 1,437 training images of 142 145 142 146 145 146 145 143 139 144 a digit: 500/1437 of them is 48.4 to 50.8.
    assert (
        np.abs(
            np.bincount(labels) - np.array([142, 145, 142, 146, 145, 146, 145, 143, 139, 144]) * 500 / 1437
        ).max()
        < 1
    )
    x = torch.cat([*(task.client_data(i).tensors[0] for i in range(5)), task.validation().tensors[0]])
    assert x.double().mean().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("limit", [0, 1438])
def test_a_train_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(TaskError, match="from 1 to 1437"):
        Digits(context(train_limit=limit))


def test_a_train_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(TaskError, match="train_limit is '500'"):
        Digits(context(train_limit="500"))


@pytest.mark.parametrize("settings", [{"kind": "iid"}, PartitionSettings(kind="iid")])
def test_partition_settings_come_from_the_options(settings) -> None:
    task = Digits(context(clients=2, partition=settings))
    assert [len(task.division.examples(i)) for i in range(2)] == [719, 718]


def test_wrong_partition_settings_are_a_task_error() -> None:
    with pytest.raises(TaskError, match="alpha"):
        Digits(context(partition={"alpha": -1}))
    with pytest.raises(TaskError, match="1437 examples cannot give each of 800 clients"):
        Digits(context(clients=800))


def test_the_same_context_gives_the_same_task_here_and_in_a_worker() -> None:
    task = Digits(context(seed=3, train_limit=300))
    for other in (Digits(context(seed=3, train_limit=300)), pickle.loads(pickle.dumps(task))):
        assert other.division.hash() == task.division.hash()
        assert torch.equal(other.client_data(4).tensors[0], task.client_data(4).tensors[0])
        assert torch.equal(other.validation().tensors[0], task.validation().tensors[0])
    assert Digits(context(seed=4, train_limit=300)).division.hash() != task.division.hash()


@pytest.mark.parametrize("client", [-1, 10])
def test_a_client_out_of_range_is_refused(client: int) -> None:
    with pytest.raises(TaskError, match="clients 0 to 9"):
        Digits(context()).client_data(client)


# Loss, metrics, batch normalisation


class Fixed(nn.Module):
    """Logits (0, ln 3) for two classes: probabilities 1/4 and 3/4."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, math.log(3)]))
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.logits.expand(len(x), 2))


def tiny_task(cls: type[ImageTask] = ImageTask, **options: object) -> ImageTask:
    """20 images of 4x4 pixels and 2 classes, 10 clients of 2 examples each."""
    images = np.arange(320, dtype=np.uint16).reshape(20, 4, 4).astype(np.uint8)
    data = LabelledImages(images, np.arange(20, dtype=np.uint8) % 2)
    return cls(context(partition={"kind": "iid"}, **options), data, data, 2)


def test_metrics_are_means_over_examples_in_evaluation_mode() -> None:
    task, model = tiny_task(), Fixed()
    model.dropout.eval()  # a frozen part stays frozen
    labels = torch.ones(2500, dtype=torch.long)
    labels[2000:] = 0  # the last, smaller batch: 500 of 2,500 wrong
    metrics = task.metrics(model, TensorDataset(torch.zeros(2500, 1, 4, 4), labels))
    assert metrics["accuracy"] == 0.8
    assert metrics["loss"] == pytest.approx(0.8 * math.log(4 / 3) + 0.2 * math.log(4), rel=1e-6)
    assert set(metrics) == {"accuracy", "loss"}
    assert model.training
    assert not model.dropout.training


def test_metrics_work_for_any_map_style_data_set_and_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    metrics = tiny_task().metrics(Fixed(), [(torch.zeros(1, 4, 4), 1), (torch.zeros(1, 4, 4), 0)])
    assert metrics["accuracy"] == 0.5
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TaskError, match="empty"):
        tiny_task().metrics(Fixed(), [])


def test_loss_is_the_mean_cross_entropy_of_a_batch() -> None:
    model = Fixed().eval()
    loss = tiny_task().loss(model, [torch.zeros(4, 1, 4, 4), torch.tensor([1, 1, 1, 0])])
    assert loss.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), rel=1e-6)
    loss.backward()
    assert model.logits.grad is not None


class Normalised(ImageTask):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.BatchNorm1d(2))


def test_batch_normalisation_with_a_single_training_example_is_refused_when_partitioned() -> None:
    before = torch.get_rng_state()
    with pytest.raises(TaskError, match=r"batch normalisation.*client 0, 1, .*partition.minimum_size to 3"):
        tiny_task(Normalised)
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(tiny_task().client_data(i)) for i in range(10)] == [1] * 10  # no harm without it


def test_training_images_of_one_level_are_refused() -> None:
    grey = LabelledImages(np.full((20, 4, 4), 7, np.uint8), np.zeros(20, np.uint8))
    with pytest.raises(TaskError, match="all pixels"):
        ImageTask(context(clients=1), grey, grey, 2)


# Colour


def test_coloured_images_are_normalised_channel_by_channel() -> None:
    # Red 0 and 2: mean 1, deviation 1. Green 10 and 30: 20, 10. Blue 5, 5, 5, 9: mean 6, variance 3.
    images = np.empty((4, 4, 4, 3), np.uint8)
    for i, pixel in enumerate([(0, 10, 5), (2, 30, 5), (0, 10, 5), (2, 30, 9)]):
        images[i] = pixel
    data = LabelledImages(images, np.array([0, 1, 0, 1], np.uint8))
    task = ImageTask(context(clients=1, partition={"kind": "iid"}), data, data, 2)
    assert task.mean.tolist() == [1, 20, 6]
    assert task.std.tolist() == pytest.approx([1, 10, 3**0.5], rel=1e-15)
    x, y = task.test().tensors
    assert (x.shape, x.dtype) == ((4, 3, 4, 4), torch.float32)
    assert x[:, 0, 1, 2].tolist() == [-1, 1, -1, 1]
    assert x[:, 1, 0, 3].tolist() == [-1, 1, -1, 1]
    assert x[:, 2, 3, 3].tolist() == pytest.approx([-1 / 3**0.5] * 3 + [3**0.5], rel=1e-6)
    assert y.tolist() == [0, 1, 0, 1]
    assert task.model()(x).shape == (4, 2)


def test_rows_columns_and_channels_keep_their_places() -> None:
    images = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    data = LabelledImages(images, np.array([0, 1], np.uint8))
    task = ImageTask(context(clients=1, partition={"kind": "iid"}), data, data, 2)
    (x, label), (second, _) = (task.test()[i] for i in (1, -1))
    assert torch.equal(x, second)
    assert label == 1
    levels = x.numpy() * task.std[:, None, None] + task.mean[:, None, None]
    assert levels[2, 3, 1].round() == images[1, 3, 1, 2] == 48 + 3 * 12 + 1 * 3 + 2
    assert np.array_equal(levels.round().transpose(1, 2, 0), images[1])


def test_a_data_set_fetched_in_part_is_part_of_it_fetched_whole() -> None:
    data = Digits(context()).client_data(2)
    x, y = data.tensors
    at = np.array([5, 0, 9])
    found, labels = fetch(data, at, torch.device("cpu"), torch.channels_last)
    assert torch.equal(found, x[at])
    assert torch.equal(labels, y[at])
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert len(list(data)) == len(data) == len(y)


# MNIST and FashionMNIST


@pytest.fixture(scope="module")
def mnist() -> MNIST:
    return MNIST(context(clients=100, data=DATA))


@needs_data
def test_mnist_is_read_from_packed_files_in_a_folder_that_need_not_be_writable(mnist: MNIST) -> None:
    # Known facts: mean 0.1307 and deviation 0.3081 of levels scaled to 1; 5,923 zeros, 6,742 ones ...
    assert (mnist.mean / 255, mnist.std / 255) == pytest.approx((0.1307, 0.3081), abs=5e-5)
    counts = np.bincount(np.concatenate(labels_by_client(mnist))).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    x, y = mnist.test().tensors
    assert x.shape == (10_000, 1, 28, 28)
    assert y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert mnist.model()(mnist.client_data(99).tensors[0][:2]).shape == (2, 10)


@needs_data
def test_mnist_clients_and_validation_cover_the_training_set(mnist: MNIST) -> None:
    assert sum(len(mnist.client_data(i)) for i in range(100)) + len(mnist.validation()) == 60_000
    assert min(map(len, labels_by_client(mnist))) >= 10
    validation = images_seen(mnist.validation())
    assert not validation & images_seen(mnist.client_data(0))
    assert not validation & images_seen(mnist.test())


@needs_data
def test_fashion_mnist_with_a_limit() -> None:
    task = FashionMNIST(context(clients=5, data=DATA, train_limit=1000))
    assert np.bincount(np.concatenate(labels_by_client(task))).tolist() == [100] * 10  # 6,000 each of 60,000
    assert len(task.test()) == 10_000
    # 0.2860 and 0.3530 over all images; over 1,000 of them near.
    assert (task.mean / 255, task.std / 255) == pytest.approx((0.2860, 0.3530), abs=0.01)


@pytest.mark.parametrize("source", [MNIST_SOURCE, FASHION_SOURCE])
def test_checksums_are_torchvisions(source) -> None:
    resources = getattr(datasets, source.name).resources
    assert {f"{name}.gz": md5 for name, md5 in source.md5.items()} == dict(resources)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_small(folder: Path) -> Path:
    """A folder with 40 training and 10 test images, unpacked; returns the folder of the files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    return raw


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchvision's mirror is a folder that does not exist."""
    monkeypatch.setattr(datasets.MNIST, "mirrors", [f"{(tmp_path / 'gone').as_uri()}/"])


@pytest.mark.usefixtures("offline")
def test_unpacked_files_are_read_as_they_are(tmp_path: Path) -> None:
    raw = write_small(tmp_path)
    task = MNIST(context(clients=2, data=tmp_path))
    pixels = np.frombuffer((raw / "t10k-images-idx3-ubyte").read_bytes()[16:], np.uint8)
    x, y = task.test().tensors
    assert np.array_equal((x.numpy().ravel() * task.std + task.mean).round(), pixels)
    assert y.tolist() == list(range(10))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def behead(path: Path) -> None:
    path.write_bytes(b"\0\0\x08")


def garble(path: Path) -> None:
    path.write_bytes(b"<html>" + path.read_bytes()[6:])


def mislabel(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\x0a")


def shrink(path: Path) -> None:
    path.write_bytes(idx(np.zeros(39, np.uint8)))


def widen(path: Path) -> None:
    path.write_bytes(idx(np.zeros((40, 28, 29), np.uint8)))


def empty(path: Path) -> None:
    path.write_bytes(idx(np.zeros((0, 28, 28), np.uint8)))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-images-idx3-ubyte", cut),
        ("t10k-images-idx3-ubyte", lengthen),
        ("train-labels-idx1-ubyte", behead),
        ("t10k-labels-idx1-ubyte", garble),
        ("train-labels-idx1-ubyte", mislabel),
        ("train-labels-idx1-ubyte", shrink),
        ("train-images-idx3-ubyte", widen),
        ("train-images-idx3-ubyte", empty),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    raw = write_small(tmp_path)
    damage(raw / name)
    with pytest.raises(TaskError, match=f"{name} .*--data FOLDER"):
        MNIST(context(clients=2, data=tmp_path))


@needs_data
def test_a_damaged_packed_file_is_named(tmp_path: Path) -> None:
    raw = write_small(tmp_path)
    (raw / "t10k-labels-idx1-ubyte").unlink()
    packed = raw / "t10k-labels-idx1-ubyte.gz"
    packed.write_bytes((DATA / "MNIST" / "raw" / packed.name).read_bytes()[:-1])
    with pytest.raises(
        TaskError, match=r"t10k-labels-idx1-ubyte\.gz has MD5 .*ec29112dd5afa0611ce80d1b7f02629c"
    ):
        MNIST(context(clients=2, data=tmp_path))


def test_a_packed_file_with_the_wrong_content_is_not_unpacked(tmp_path: Path) -> None:
    raw = write_small(tmp_path)
    plain = raw / "train-images-idx3-ubyte"
    (raw / f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    with pytest.raises(TaskError, match=r"train-images-idx3-ubyte\.gz has MD5"):
        MNIST(context(clients=2, data=tmp_path))


@pytest.mark.usefixtures("offline")
def test_absent_files_that_cannot_be_downloaded_are_an_error_that_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    with pytest.raises(TaskError) as info:
        MNIST(context(data=folder))
    assert str(folder / "MNIST" / "raw") in str(info.value)
    assert "train-images-idx3-ubyte" in str(info.value)
    assert "--data FOLDER" in str(info.value)
    assert "CC BY-SA 3.0" in caplog.text
    assert "11.6 MB" in caplog.text
    assert list(folder.iterdir()) == []  # nothing half done is left


@pytest.mark.usefixtures("offline")
def test_a_data_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TaskError, match="--data FOLDER"):
        MNIST(context(data=tmp_path / "file"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchvision's mirror is a web server on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Quiet, directory=str(DATA / "MNIST" / "raw"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        yield
        server.shutdown()


@needs_data
@pytest.mark.usefixtures("mirror")
def test_absent_files_are_downloaded(tmp_path: Path) -> None:
    task = MNIST(context(clients=3, data=tmp_path / "data", train_limit=600))
    assert len(task.test()) == 10_000
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["MNIST"]
    assert {p.name for p in (tmp_path / "data" / "MNIST" / "raw").iterdir()} == {
        f"{name}.gz" for name in MNIST_SOURCE.md5
    }
