"""Several clients trained at once: each as if alone, within float tolerance, or a refusal that says why."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import CPU, completed, decisions, events, final_state, go_on, plan_of, small_config, table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedreuse.client.errors import TaskError
from fedreuse.client.settings import ClientPlan, ObjectiveSettings
from fedreuse.client.together import train_together
from fedreuse.client.trainer import train
from fedreuse.sim.config import ConfigError
from fedreuse.sim.models import CharGRU, LeNet5, ShallowCNN, group_norm
from fedreuse.sim.tasks.classification import Classification

SIZES = (9, 4, 13, 1, 8, 9)


class Labels:
    """Cross-entropy, without the losses of single examples."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Each(Labels):
    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Turned(Each):
    """Inputs are turned round at random."""

    def augment(self, batch: Any, generator: np.random.Generator) -> Any:
        x, y = batch
        turned = torch.from_numpy(generator.random(len(x)) < 0.5)
        return torch.where(turned.view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x), y


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8)),
    "cnn": (lambda: ShallowCNN(1, 8, 10), (1, 8, 8)),
    "lenet5": (lambda: LeNet5(1, 14, 10), (1, 14, 14)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), group_norm(4), nn.Flatten(), nn.Linear(64, 10)),
        (3, 6, 6),
    ),
}


def images(
    shape: tuple[int, ...], count: int, seed: int, dtype: torch.dtype = torch.float64
) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=random, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 10, (count,), generator=random))


def both(
    task: Any, model: nn.Module, plan: ClientPlan, data: dict[int, Dataset[Any]], round: int = 3
) -> list[tuple[Any, Any, dict[str, Tensor], dict[str, Tensor]]]:
    """Of every client: (steps, loss) alone and together, and weights alone and together."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    together = train_together(task, model, plan, round, CPU, list(data.items()))
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    found = []
    for (client, examples), (trained, weights) in zip(data.items(), together, strict=True):
        model.load_state_dict(start)
        alone = train(task, model, examples, plan, client, round, CPU)
        mine = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append((alone, trained, mine, weights))
    model.load_state_dict(start)
    return found


@pytest.mark.parametrize("task", [Labels(), Each(), Turned()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("name", MODELS)
def test_each_client_learns_what_it_would_alone(name: str, task: Any) -> None:
    """In double precision, so that only another order of sums is forgiven: 1e-12."""
    make, shape = MODELS[name]
    torch.manual_seed(1)
    model = make().double()
    plan = plan_of(local_epochs=2, batch_size=4, momentum=0.9, weight_decay=1e-2, learning_rate=0.05)
    plan = plan.model_copy(update={"objective": ObjectiveSettings(kind="proximal", mu=0.3)})
    data = {client: images(shape, n, client) for client, n in zip((5, 0, 7, 3, 2, 11), SIZES, strict=True)}
    for alone, together, mine, its in both(task, model, plan, data):
        assert together.steps == alone.steps
        assert together.loss == pytest.approx(alone.loss, rel=1e-10)
        assert list(its) == list(mine)
        for parameter in mine:
            torch.testing.assert_close(its[parameter], mine[parameter], rtol=1e-10, atol=1e-12)


def test_texts_too() -> None:
    torch.manual_seed(1)
    model = CharGRU(10).double()
    random = torch.Generator().manual_seed(0)
    data = {
        client: TensorDataset(
            torch.randint(0, 10, (n, 6), generator=random), torch.randint(0, 10, (n,), generator=random)
        )
        for client, n in enumerate((5, 8))
    }
    for alone, together, mine, its in both(Each(), model, plan_of(), data):
        assert together.steps == alone.steps
        for parameter in mine:
            torch.testing.assert_close(its[parameter], mine[parameter], rtol=1e-10, atol=1e-12)


def test_frozen_parameters_and_buffers_stay() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, 10))).double()
    model.body.requires_grad_(False)
    data = {client: images((3,), 6, client) for client in (0, 1)}
    for _, _, _, weights in both(Each(), model, plan_of(), data):
        assert list(weights) == ["head.weight", "head.bias"]


class Point(nn.Module):
    def __init__(self, *start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


class Quadratic:
    """1/2 ||w - x||^2: a step of rate 0.5 goes half the way to the batch's mean."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        return self.losses(model, batch).mean()

    def losses(self, model: Any, batch: Any) -> Tensor:
        return 0.5 * ((model.w - batch[0]) ** 2).sum(1)


def test_one_step_of_three_clients_by_hand() -> None:
    data = {
        0: TensorDataset(torch.tensor([[4.0, 0.0], [0.0, 4.0]], dtype=torch.float64)),
        1: TensorDataset(torch.tensor([[-8.0, 2.0]], dtype=torch.float64)),
        2: TensorDataset(torch.tensor([[0.0, 0.0], [3.0, 0.0], [6.0, 6.0]], dtype=torch.float64)),
    }
    plan = plan_of(learning_rate=0.5, batch_size=4, momentum=0, weight_decay=0)
    found = train_together(Quadratic(), Point(0.0, 0.0), plan, 0, CPU, list(data.items()))  # type: ignore[arg-type]
    # Means (2, 2), (-8, 2) and (3, 2); half the way. Losses: 16/2, 68/2, and (0 + 9 + 72)/6.
    assert [weights["w"].tolist() for _, weights in found] == [[1.0, 1.0], [-4.0, 1.0], [1.5, 1.0]]
    assert [trained.loss for trained, _ in found] == pytest.approx([8.0, 34.0, 13.5], rel=1e-6)
    assert [trained.steps for trained, _ in found] == [1, 1, 1]


class Named(Each):
    pass


class NamedExamples(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), 1, f"example {index}"


@pytest.mark.parametrize(
    ("model", "data", "due"),
    [
        (nn.Sequential(nn.Linear(3, 10), nn.BatchNorm1d(10)), images((3,), 4, 0), "batch normalisation"),
        (nn.Sequential(nn.Linear(3, 10), nn.Dropout(0.5)), images((3,), 4, 0), "random operation"),
        (nn.Linear(3, 10), NamedExamples(), "a batch holds a str"),
    ],
    ids=["batch normalisation", "dropout", "words"],
)
def test_what_cannot_be_vectorised_is_refused_with_the_reason(
    model: nn.Module, data: Dataset[Any], due: str
) -> None:
    with pytest.raises(TaskError, match=due) as caught:
        train_together(Named(), model.double(), plan_of(), 0, CPU, [(0, data), (1, data)])  # type: ignore[arg-type]
    assert "sim.mode" in str(caught.value)


@pytest.mark.parametrize("several", [False, True])
def test_the_mean_of_a_task_s_losses_is_its_loss(several: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, generator=random)
    y = (
        torch.randint(0, 2, (7, 5), generator=random)
        if several
        else torch.randint(0, 5, (7,), generator=random)
    )
    task, model = Classification(), nn.Identity()
    losses = task.losses(model, (x, y))
    assert losses.shape == (7,)
    torch.testing.assert_close(losses.mean(), task.loss(model, (x, y)))


# Whole runs


RUN = ("rounds=6", "clients.per_round=4", "train.momentum=0.9", "train.weight_decay=0.01")


def weights_of(folder: Path) -> np.ndarray:
    state: np.ndarray = np.frombuffer(final_state(folder), np.float32)
    return state


@pytest.mark.parametrize("wire", [False, True])
@pytest.mark.parametrize("method", ["fedprox", "age-only"])
def test_a_vectorised_run_agrees_with_a_serial_one(tmp_path: Path, method: str, wire: bool) -> None:
    runs = {
        mode: completed(small_config(tmp_path / mode, *RUN, f"sim.mode={mode}", method=method), wire=wire)
        for mode in ("serial", "vectorised")
    }
    mine, its = weights_of(runs["vectorised"]), weights_of(runs["serial"])
    np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    said = ("round_opened", "train", "reuse", "update", "committed")
    kinds = [
        [
            (e["type"], e["round"], e.get("client"), e.get("cause"))
            for e in events(folder)
            if e["type"] in said
        ]
        for folder in runs.values()
    ]
    assert kinds[0] == kinds[1]
    columns = ("round", "fresh", "reused", "uplink_modelled", "downlink_modelled")
    for one, other in zip(*(table(folder) for folder in runs.values()), strict=True):
        assert [one[c] for c in columns] == [other[c] for c in columns]
    for mode, folder in runs.items():
        assert json.loads((folder / "summary.json").read_text())["machine"]["mode"] == mode
        assert [e["mode"] for e in events(folder) if e["type"] == "simulation"] == [mode]


def test_the_same_bits_every_time_and_after_an_interruption(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise Enough

    mode = "sim.mode=vectorised"
    one = completed(small_config(tmp_path / "one", *RUN, mode))
    config = small_config(tmp_path / "other", *RUN, mode)
    with pytest.raises(Enough):
        completed(config, committed=stop)
    go_on(config.folder)
    assert final_state(tmp_path / "other") == final_state(one)
    assert decisions(tmp_path / "other") == decisions(one)


def test_smaller_groups_agree_and_one_client_s_trouble_stays_its_own(tmp_path: Path) -> None:
    wild = ("task.options.wild=[1]", "clients.per_round=6", "rounds=2")
    runs = [
        completed(
            small_config(
                tmp_path / f"{n}", *wild, "sim.mode=vectorised", f"sim.together={n}", method="fedavg"
            )
        )
        for n in (1, 4, 6)
    ]
    for folder in runs:
        faults = [(e["round"], e["client"], e["code"]) for e in events(folder) if e["type"] == "fault"]
        assert faults == [(1, 1, "NOT_FINITE"), (2, 1, "NOT_FINITE")]
        np.testing.assert_allclose(weights_of(folder), weights_of(runs[0]), rtol=1e-4, atol=1e-6)


def test_a_run_that_cannot_be_vectorised_says_so(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="batch normalisation"):
        completed(small_config(tmp_path / "run", "sim.mode=vectorised", task="support:Grid"))


def test_unknown_modes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sim\.mode.*'serial'"):
        small_config(tmp_path / "run", "sim.mode=fast")
