"""MedMNIST's sets by name, and your own images in files of the same form."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from medmnist.evaluator import getACC
from medmnist.info import INFO
from medmnist_files import arrays, write
from support import completed, small_config, table
from torch import nn
from torch.utils.data import TensorDataset

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext, load_task
from fedreuse.sim.tasks import medmnist
from fedreuse.sim.tasks.images import ImageTask
from fedreuse.sim.tasks.medmnist import find, known_sets

DATA = Path(
    os.environ.get("FEDREUSE_TEST_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "retinamnist.npz").is_file(), reason=f"no retinamnist.npz in {DATA}; see FEDREUSE_TEST_DATA"
)


def task(name: str, data: Path, clients: int = 3, **options: object) -> ImageTask:
    made = load_task(name, TaskContext(7, clients, data, {"partition": {"kind": "iid"}, **options}))
    assert isinstance(made, ImageTask)
    return made


# MedMNIST


def test_the_table_is_the_package_s() -> None:
    assert known_sets() == INFO


@needs_data
def test_retinamnist_has_its_own_validation_images() -> None:
    retina = task("medmnist:retinamnist", DATA, clients=50)
    # Known numbers of images: 1,080, 120 and 400; of the five grades 486, 128, 206, 194 and 66 to train on.
    parts = [retina.client_data(client) for client in range(50)]
    assert (sum(map(len, parts)), len(retina.validation()), len(retina.test())) == (1080, 120, 400)
    labels = torch.cat([part.tensors[1] for part in parts])
    assert torch.bincount(labels).tolist() == [486, 128, 206, 194, 66]
    x, y = retina.validation().tensors
    assert (x.shape, x.dtype, y.dtype) == ((120, 3, 28, 28), torch.float32, torch.int64)
    with np.load(DATA / "retinamnist.npz") as file:
        levels = (x.permute(0, 2, 3, 1).numpy() * retina.std + retina.mean).round()
        assert np.array_equal(levels, file["val_images"])
        assert y.tolist() == file["val_labels"][:, 0].tolist()
        # Normalised over the training images, and those only.
        assert retina.mean == pytest.approx(file["train_images"].mean((0, 1, 2)), rel=1e-12)
    assert retina.model()(x[:2]).shape == (2, 5)
    # 3·3·3·32 + 32, 3·3·32·64 + 64, 7·7·64·128 + 128, 128·5 + 5.
    assert sum(p.numel() for p in retina.model().parameters()) == 896 + 18_496 + 401_536 + 645


@needs_data
def test_a_round_on_retinamnist(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        f"data={DATA}",
        "task.model=lenet5",
        "task.train_limit=200",
        "rounds=1",
        "clients.total=4",
        "clients.per_round=2",
        method="dg-fedreuse",
        task="medmnist:retinamnist",
    )
    (row,) = table(completed(config))
    assert (row["fresh"], row["fault"]) == ("2", "0")
    assert 0 <= float(row["validation_accuracy"]) <= 1


@needs_data
def test_another_copy_than_medmnist_s_is_refused_but_can_be_named_as_a_file() -> None:
    with pytest.raises(
        TaskError, match=r"breastmnist\.npz has MD5 .* not 750601b1f.*name it npz:breastmnist\.np"
    ):
        task("medmnist:breastmnist", DATA)
    own = task("npz:breastmnist.npz", DATA)
    assert (len(own.validation()), len(own.test()), own.classes) == (78, 156, 2)


def listed(monkeypatch: pytest.MonkeyPatch, path: Path, name: str, **about: object) -> None:
    """MedMNIST's table says of this set that it is this file."""
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    suffix = path.stem.partition("_")[2]
    keys = (
        {f"url_{suffix}": path.as_uri(), f"MD5_{suffix}": md5}
        if suffix
        else {"url": path.as_uri(), "MD5": md5}
    )
    table = {**INFO, name: {**INFO[name], **keys, **about}}
    monkeypatch.setattr(medmnist, "known_sets", lambda: table)


def test_a_set_that_is_not_there_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin = write(tmp_path / "pathmnist.npz", colour=True, classes=9)
    listed(monkeypatch, origin, "pathmnist")
    path_mnist = task("medmnist:pathmnist", tmp_path / "data")
    assert (len(path_mnist.validation()), path_mnist.classes) == (12, 9)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["pathmnist.npz"]
    assert "MedMNIST-pathmnist is not in" in caplog.text
    assert "MedMNIST, CC BY 4.0" in caplog.text
    assert "0.1 MB" in caplog.text  # 62 images of 28x28x3 bytes of noise
    origin.unlink()
    task("medmnist:pathmnist", tmp_path / "data")


def test_other_sizes_are_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, write(tmp_path / "bloodmnist_64.npz", size=64, colour=True, classes=8), "bloodmnist")
    blood = task("medmnist:bloodmnist", tmp_path, size=64)
    assert blood.test().tensors[0].shape == (10, 3, 64, 64)
    assert blood.evaluation_batch == 191  # as many pixels as 1,000 images of 28x28
    with pytest.raises(
        TaskError, match=r"task\.options\.size is 32; medmnist:bloodmnist comes in 28, 64, 128, 224"
    ):
        task("medmnist:bloodmnist", tmp_path, size=32)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "medmnist:nodulemnist3d",
            "nodulemnist3d is a set of volumes; of images there are pathmnist, chestmnist",
        ),
        ("medmnist:mnist", "mnist is unknown; there are pathmnist, chestmnist"),
        ("medmnist:", "'medmnist:' needs more: write medmnist:NAME"),
        ("medmnist", "'medmnist' needs more: write medmnist:NAME"),
        ("npz", "'npz' needs more: write npz:FILE"),
        ("digits:Foo", "no module 'digits'"),
    ],
)
def test_names_that_are_none(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        task(name, tmp_path)


def test_every_flat_set_can_be_named() -> None:
    names = [name for name, about in INFO.items() if "3D" not in about["python_class"]]
    assert len(names) == 12
    for name in names:
        for size, suffix in ((28, ""), (64, "_64"), (128, "_128"), (224, "_224")):
            info = find(name, size)
            assert info.file == f"{name}{suffix}.npz"
            assert (info.md5, info.classes) == (INFO[name][f"MD5{suffix}"], len(INFO[name]["label"]))
            (origin,) = info.data_set().origins()
            assert origin.name == info.file


# Several labels an image


def many_labels() -> dict[str, np.ndarray]:
    content = arrays()
    rng = np.random.default_rng(1)
    for part in ("train", "val", "test"):
        bits = (rng.random((len(content[f"{part}_labels"]), 14)) < 0.2).astype(np.uint8)
        bits[0] = 0
        content[f"{part}_labels"] = bits
    return content


class Constant(nn.Module):
    """The same logits for every image."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), -1)


def test_several_labels_are_a_yes_or_no_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, write(tmp_path / "chestmnist.npz", many_labels()), "chestmnist")
    chest = task("medmnist:chestmnist", tmp_path)
    x, y = chest.test().tensors
    assert (y.shape, chest.model()(x).shape) == ((10, 14), (10, 14))
    # Two labels with probabilities 1/4 and 3/4: of a yes and a no, of two yes, the losses are
    # (ln 4 + ln 4) / 2 and (ln 4 + ln 4/3) / 2; of the four answers only the last is right.
    model = Constant([-math.log(3), math.log(3)])
    labels = torch.tensor([[1, 0], [1, 1]])
    due = (3 * math.log(4) + math.log(4 / 3)) / 4
    assert chest.loss(model, [torch.zeros(2, 1), labels]).item() == pytest.approx(due, rel=1e-6)
    found = chest.metrics(model, TensorDataset(torch.zeros(2, 1), labels))
    assert found == {"accuracy": 0.25, "loss": pytest.approx(due, rel=1e-6)}


def test_accuracies_are_those_of_medmnist_s_evaluator(tmp_path: Path) -> None:
    several = task(f"npz:{write(tmp_path / 'several.npz', many_labels())}", tmp_path)
    one = task(f"npz:{write(tmp_path / 'one.npz')}", tmp_path)
    two = task(f"npz:{write(tmp_path / 'two.npz', classes=2)}", tmp_path)
    for made, kind in ((several, "multi-label, binary-class"), (one, "multi-class"), (two, "binary-class")):
        model = made.model()
        x, y = made.test().tensors
        logits = model.eval()(x).detach()
        scores = torch.sigmoid(logits) if y.ndim == 2 else torch.softmax(logits, 1)
        due = getACC(y.numpy(), scores.numpy(), kind)
        assert made.metrics(model, made.test())["accuracy"] == pytest.approx(due, abs=1e-12)


def test_partitions_by_label_go_by_an_image_s_first_label(tmp_path: Path) -> None:
    content = arrays()
    # 16 images with none, 12 with the second (and perhaps the third) label, 12 with the first (and others).
    bits = np.array([[0, 0, 0]] * 16 + [[0, 1, 0], [0, 1, 1]] * 6 + [[1, 0, 0], [1, 1, 1]] * 6, np.uint8)
    content["train_labels"] = bits
    for part in ("val", "test"):
        content[f"{part}_labels"] = np.zeros((len(content[f"{part}_labels"]), 3), np.uint8)
    path = write(tmp_path / "own.npz", content)
    own = task(f"npz:{path}", tmp_path, clients=1, train_limit=20)
    # Half of all: half of each of the three kinds.
    labels = own.client_data(0).tensors[1]
    assert (labels.sum(1) == 0).sum() == 8
    assert ((labels[:, 0] == 0) & (labels[:, 1] == 1)).sum() == 6
    assert (labels[:, 0] == 1).sum() == 6
    skewed = task(f"npz:{path}", tmp_path, clients=2, partition={"kind": "dirichlet", "alpha": 0.5})
    assert sum(len(skewed.client_data(client)) for client in range(2)) == 40


# Your own file


def test_a_file_is_looked_for_here_then_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "own.npz", classes=5)
    monkeypatch.chdir(tmp_path / "here")
    assert task("npz:own.npz", Path("../data")).classes == 5
    write(Path("own.npz"), classes=4)
    assert task("npz:own.npz", Path("../data")).classes == 4
    with pytest.raises(
        TaskError, match=rf"npz:o\.npz: there is no file {tmp_path}/here/o\.npz or {tmp_path}/here/\.\./"
    ):
        task("npz:o.npz", Path("../data"))


def test_without_validation_images_a_tenth_of_each_client_s_is_cut(tmp_path: Path) -> None:
    own = task(f"npz:{write(tmp_path / 'own.npz', val=0)}", tmp_path, clients=2)
    assert [len(own.client_data(client)) for client in range(2)] == [18, 18]
    assert len(own.validation()) == 4
    given = task(f"npz:{write(tmp_path / 'own.npz')}", tmp_path, clients=2)
    assert [len(given.client_data(client)) for client in range(2)] == [20, 20]
    assert len(given.validation()) == 12


def test_a_faulty_file_says_how_to_write_a_good_one(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", {**arrays(), "test_labels": np.zeros((3, 1), np.uint8)})
    with pytest.raises(
        TaskError, match=r"own\.npz: test_labels are 3 for 10 images; write it with numpy\.savez_"
    ):
        task(f"npz:{path}", tmp_path)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", size=8)
    with pytest.raises(
        TaskError, match=r"'lenet5' takes images of 12x12 .* 8x8 .*: cnn, resnet18, resnet18-gn"
    ):
        task(f"npz:{path}", tmp_path, model="lenet5")
    small = write(tmp_path / "small.npz", size=3)
    with pytest.raises(TaskError, match="none of those built in"):
        task(f"npz:{small}", tmp_path)
    assert task(f"npz:{path}", tmp_path, model="resnet18-gn").model()(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_a_whole_run_on_a_file_of_one_s_own(tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", colour=True, size=12)
    config = small_config(
        tmp_path / "run", "rounds=2", "clients.total=3", "clients.per_round=2", "partition.kind=iid",
        method="dg-fedreuse", task=f"npz:{path}",
    )  # fmt: skip
    assert table(completed(config, wire=True))[0]["fresh"] == "2"
