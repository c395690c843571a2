"""CIFAR-10: ResNet-18, the task, a whole small run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sheets import SMALL, labels, pictures, write_sheets
from support import completed, final_state, small_config, table
from torchvision import models

from fedreuse.client.errors import TaskError
from fedreuse.client.proxy import head_parameters
from fedreuse.client.settings import ProxySettings
from fedreuse.client.task import TaskContext, load_task
from fedreuse.client.workbench import schema_of, state_arrays
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER
from fedreuse.server.weights import load_model
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.models import resnet18
from fedreuse.sim.tasks.cifar import Cifar10
from fedreuse.sim.tasks.cifar_files import CIFAR10, load

DATA = Path(
    os.environ.get("FEDREUSE_TEST_DATA", Path(__file__).resolve().parents[1].parent / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "cifar10").is_dir(), reason=f"no cifar10 in {DATA}; name its folder in FEDREUSE_TEST_DATA"
)


class Small(Cifar10):
    source = SMALL


def context(data: Path, clients: int = 3, **options: object) -> TaskContext:
    return TaskContext(1, clients, data, {"partition": {"kind": "iid"}, **options})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedreuse"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with small sheets."""
    return write_sheets(tmp_path / "data")


# The model


def test_resnet18_for_cifar_has_11173962_parameters() -> None:
    # Stem 3·3·3·64 + 2·64 = 1,856. Stages of four 3x3 convolutions with normalisation, from the second on with
    # a 1x1 shortcut: 64: 4·(36,864 + 128) = 147,968; 128: 73,728 + 3·147,456 + 8,192 + 5·256 = 525,568;
    # 256: 2,099,712; 512: 8,393,728. Head 5,130.
    assert 1_856 + 147_968 + 525_568 + 2_099_712 + 8_393_728 + 5_130 == 11_173_962
    model = resnet18(10, "cifar")
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert model.conv1(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_beyond_the_stem_it_is_torchvisions() -> None:
    torch.manual_seed(3)
    model = resnet18(10, "cifar")
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
    with pytest.raises(ValueError, match="imagenet, cifar"):
        resnet18(10, "vit")


def test_running_statistics_travel_and_counters_do_not() -> None:
    kinds = {spec.name: spec.kind for spec in schema_of(resnet18(10, "cifar")).tensors}
    assert kinds["bn1.running_var"] == FLOAT_BUFFER
    assert kinds["bn1.num_batches_tracked"] == INTEGER_BUFFER
    assert sum(kind == INTEGER_BUFFER for kind in kinds.values()) == 20  # as many normalisations
    head = head_parameters(resnet18(10, "cifar"), ProxySettings())
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
    found = evaluator.test(state_arrays(model), 0).metrics
    x, y = task.test().tensors
    logits = model.eval()(x)
    assert found["accuracy"] == int((logits.argmax(1) == y).sum()) / 20
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-5)
    assert set(evaluator.validate(state_arrays(model))) == {"accuracy", "loss"}


def test_an_unknown_stem_is_refused(data: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.options\.stem is 'vit'; known: imagenet, cifar"):
        Small(context(data, stem="vit"))


def test_a_client_with_one_training_example_is_refused(data: Path) -> None:
    with pytest.raises(TaskError, match=r"batch normalisation.*partition.minimum_size to 3"):
        Small(context(data, clients=25))


def test_augmentation_can_be_left_out(data: Path) -> None:
    batch = [torch.zeros(2, 3, 32, 32), torch.zeros(2)]
    assert Small(context(data, augment=False)).augment(batch, np.random.default_rng(0)) is batch
    with pytest.raises(TaskError, match=r"augment is 'no': it must be true or false"):
        Small(context(data, augment="no"))


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
    assert (
        np.bincount(np.concatenate([task.division.labels(i) for i in range(task.division.clients)])).tolist()
        == [5000] * 10
    )
    train, test = load(DATA)
    assert train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert len(CIFAR10.sheet_names("train") + CIFAR10.sheet_names("test")) == 60
    x, _ = task.client_data(7).batch(np.arange(2))
    assert x.shape == (2, 3, 32, 32)
