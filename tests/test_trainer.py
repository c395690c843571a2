"""Local training: E epochs of SGD in a named order, K_i steps counted (algorithms 0.2, 0.4, 1.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import CPU, Grid, GridModel, Line, LineModel, plan_of, task_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedreuse.client.batches import fetch, split
from fedreuse.client.settings import ClientPlan, ObjectiveSettings
from fedreuse.client.trainer import Trained, train
from fedreuse.proto.streams import Purpose, stream


class Point(nn.Module):
    """One parameter vector w, float64, so that sums by hand agree to many digits."""

    def __init__(self, *start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))


class Quadratic:
    """Loss 1/2 ||w - x||^2, mean over the batch: its gradient is w - mean(x). Remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []

    def loss(self, model: Any, batch: Any) -> Tensor:
        (x,) = batch
        self.batches.append(x)
        return 0.5 * ((model.w - x) ** 2).sum(1).mean()


def points(*rows: list[float]) -> TensorDataset:
    return TensorDataset(torch.tensor(rows, dtype=torch.float64))


def numbered(n: int) -> TensorDataset:
    """Example j is the number j."""
    return points(*([float(j)] for j in range(n)))


def fit(
    task: Any, model: nn.Module, data: Dataset[Any], plan: ClientPlan, client: int = 0, round: int = 0
) -> Trained:
    return train(task, model, data, plan, client, round, CPU)


def orders(task: Quadratic) -> list[list[int]]:
    """The batches a task saw of `numbered` examples."""
    return [[int(x) for x in batch[:, 0]] for batch in task.batches]


# One step and several


def test_one_step_of_sgd_by_hand() -> None:
    model = Point(1.0, 1.0)
    plan = plan_of(learning_rate=0.1, momentum=0.0, weight_decay=0.0)
    trained = fit(Quadratic(), model, points([2.0, 4.0], [4.0, 8.0]), plan)
    # mean(x) = (3, 6), gradient (1, 1) - (3, 6) = (-2, -5), w = 1 + 0.1 * 2, 1 + 0.1 * 5.
    assert model.w.tolist() == pytest.approx([1.2, 1.5], rel=1e-15)
    # 1/2 (1 + 9) = 5 and 1/2 (9 + 49) = 29: mean 17.
    assert trained == Trained(steps=1, loss=17.0)


def test_one_client_one_step_no_momentum_moves_by_minus_eta_times_the_gradient() -> None:
    # Algorithms 0.4, with a gradient from autograd on the whole data at once.
    task = task_of(Line)
    data, model, twin = task.client_data(0), LineModel(), LineModel()
    twin.load_state_dict(model.state_dict())
    plan = plan_of(batch_size=100, learning_rate=0.05, momentum=0.0, weight_decay=0.0)
    assert fit(task, model, data, plan).steps == 1
    x, y = data.tensors
    gradients = torch.autograd.grad(functional.cross_entropy(twin(x), y), list(twin.parameters()))
    for new, old, gradient in zip(model.parameters(), twin.parameters(), gradients, strict=True):
        # A weight below 1 keeps 2^-24 of a step of about 0.01.
        torch.testing.assert_close(new - old, -0.05 * gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_momentum_and_weight_decay_as_an_independent_loop(momentum: float, weight_decay: float) -> None:
    x = np.array([[1.0, -2.0], [0.5, 3.0], [-4.0, 1.0], [2.0, 2.0], [7.0, -1.0]])
    plan = plan_of(
        seed=3, local_epochs=3, batch_size=2, learning_rate=0.1, momentum=momentum, weight_decay=weight_decay
    )
    model = Point(1.0, -1.0)
    assert fit(Quadratic(), model, points(*x.tolist()), plan, client=4, round=6).steps == 9

    w, velocity = np.array([1.0, -1.0]), None
    for epoch in range(3):
        order = stream(3, Purpose.BATCH_ORDER, client=4, round=6, draw=epoch).permutation(5)
        for batch in (order[:2], order[2:4], order[4:]):
            gradient = w - x[batch].mean(0) + weight_decay * w
            velocity = gradient if velocity is None else momentum * velocity + gradient
            w = w - 0.1 * velocity
    np.testing.assert_allclose(model.w.detach().numpy(), w, rtol=1e-12)


def test_the_proximal_term_pulls_towards_the_start() -> None:
    # Every example is 2, w_t = 0, mu = 1, learning rate 1/2; gradient (w - 2) + (w - 0).
    # w: 0 -> 1 -> 1 - 1/2 (-1 + 1) = 1. Plain SGD: 0 -> 1 -> 1.5.
    plan = plan_of(local_epochs=2, learning_rate=0.5, momentum=0.0, weight_decay=0.0)
    plain, proximal = Point(0.0), Point(0.0)
    fit(Quadratic(), plain, points([2.0]), plan)
    near = plan.model_copy(update={"objective": ObjectiveSettings(kind="proximal", mu=1.0)})
    trained = fit(Quadratic(), proximal, points([2.0]), near)
    assert (float(plain.w), float(proximal.w)) == (1.5, 1.0)
    # The reported loss is the objective that was minimised: 1/2 (1 - 2)^2 + 1/2 (1 - 0)^2.
    assert trained.loss == 1.0


def test_the_reported_loss_is_the_mean_over_the_last_epoch_s_batches() -> None:
    # Two examples of 2, one a batch, learning rate 1/2: w 0, 1, 1.5, 1.75 before each step;
    # losses 1/2 (w - 2)^2: 2, 0.5, then 0.125 and 0.03125 in the last epoch, mean 0.078125.
    plan = plan_of(local_epochs=2, batch_size=1, learning_rate=0.5, momentum=0.0, weight_decay=0.0)
    assert fit(Quadratic(), Point(0.0), points([2.0], [2.0]), plan) == Trained(4, 0.078125)


def test_the_optimiser_is_fresh_in_every_training() -> None:
    # With the old velocity the second training would take 0.5 * (0.9 * 2 + 2).
    plan = plan_of(learning_rate=0.5, momentum=0.9, weight_decay=0.0)
    model = Point(0.0)
    for _ in range(2):
        with torch.no_grad():
            model.w.zero_()
        fit(Quadratic(), model, points([2.0]), plan)
        assert float(model.w) == 1.0


def test_frozen_parameters_stay() -> None:
    task, model = task_of(Line), LineModel()
    model.fc.bias.requires_grad_(False)
    bias, weight = model.fc.bias.clone(), model.fc.weight.clone()
    fit(task, model, task.client_data(0), plan_of(weight_decay=0.1))
    assert torch.equal(model.fc.bias, bias)
    assert not torch.equal(model.fc.weight, weight)


# Batches


def test_steps_are_counted_with_the_last_short_batch() -> None:
    # 10 examples in batches of 4: 4, 4, 2 are three steps, three times.
    task = Quadratic()
    assert fit(task, Point(0.0), numbered(10), plan_of(local_epochs=3)).steps == 9
    assert [len(batch) for batch in task.batches] == [4, 4, 2] * 3


class Watched:
    """A task that notes how large its batches were."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.sizes: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.sizes.append(len(batch[0]))
        return self._task.loss(model, batch)


def test_with_batch_normalisation_a_last_batch_of_one_joins_the_one_before() -> None:
    grid = task_of(Grid)
    assert len(grid.client_data(0)) == 9
    watched = Watched(grid)
    assert fit(watched, GridModel(), grid.client_data(0), plan_of(local_epochs=2)).steps == 4
    assert watched.sizes == [4, 5, 4, 5]


def test_without_batch_normalisation_a_last_batch_of_one_stands_alone() -> None:
    line = task_of(Line)
    assert len(line.client_data(3)) == 9
    watched = Watched(line)
    assert fit(watched, LineModel(), line.client_data(3), plan_of()).steps == 3
    assert watched.sizes == [4, 4, 1]


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_batches_cut_an_order_without_loss(n: int, size: int, join_single: bool) -> None:
    order = np.random.default_rng(n).permutation(n)
    batches = split(order, size, join_single)
    assert np.concatenate(batches).tolist() == order.tolist()
    last = n % size or size
    expected = [size] * ((n - 1) // size) + [last]
    if join_single and last == 1 and len(expected) > 1:
        expected[-2:] = [size + 1]
    assert [len(batch) for batch in batches] == expected


def test_items_of_any_map_style_data_set_are_collated() -> None:
    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.full((1, 2, 2), float(index)), "y": index}

    batch = fetch(Items(), np.array([2, 0]), CPU, torch.channels_last)
    assert batch["y"].tolist() == [2, 0]
    assert batch["x"][:, 0, 0, 0].tolist() == [2.0, 0.0]
    assert batch["x"].is_contiguous(memory_format=torch.channels_last)


# Randomness has names


def test_batch_order_is_the_stream_of_seed_client_round_and_epoch() -> None:
    task = Quadratic()
    fit(task, Point(0.0), numbered(20), plan_of(seed=11, local_epochs=2, batch_size=20), client=3, round=5)
    expected = [
        stream(11, Purpose.BATCH_ORDER, client=3, round=5, draw=epoch).permutation(20).tolist()
        for epoch in (0, 1)
    ]
    assert orders(task) == expected
    assert expected[0] != expected[1]


def test_batch_order_depends_on_nothing_else() -> None:
    seen = []
    for change in ({}, {"learning_rate": 0.7}, {"momentum": 0.0}):
        torch.manual_seed(len(seen))
        np.random.seed(len(seen))
        task = Quadratic()
        fit(task, Point(float(len(seen))), numbered(12), plan_of(**change), client=1, round=2)
        seen.append(orders(task))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(("seed", "client", "round"), [(8, 1, 2), (7, 2, 2), (7, 1, 3)])
def test_another_seed_client_or_round_is_another_order(seed: int, client: int, round: int) -> None:
    base, other = Quadratic(), Quadratic()
    fit(base, Point(0.0), numbered(20), plan_of(7), client=1, round=2)
    fit(other, Point(0.0), numbered(20), plan_of(seed), client, round)
    assert orders(base) != orders(other)


def trained_bits(task: Any, start: nn.Module, plan: ClientPlan, client: int, round: int) -> dict[str, bytes]:
    model = GridModel()
    model.load_state_dict(start.state_dict())
    fit(task, model, task.client_data(0), plan, client, round)
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def test_the_same_inputs_give_the_same_bits() -> None:
    # Convolution, batch normalisation, dropout; whatever state torch's own generator is in.
    task, start, plan = task_of(Grid), GridModel(), plan_of(local_epochs=3)
    first = trained_bits(task, start, plan, client=2, round=4)
    torch.manual_seed(123456)
    torch.rand(17)
    assert trained_bits(task, start, plan, client=2, round=4) == first
    assert trained_bits(task, start, plan, client=2, round=5) != first
    assert trained_bits(task, start, plan, client=3, round=4) != first


class Dropped(nn.Module):
    """Nothing is learnt; dropout is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(0.5)
        self.masks: list[list[float]] = []

    def forward(self) -> Tensor:
        mask = self.dropout(torch.ones(64))
        self.masks.append(mask.tolist())
        return mask.sum() * self.w.sum()


class Forward:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model()


def test_dropout_has_a_stream_of_its_own() -> None:
    def masks(client: int, round: int, n: int = 4) -> list[list[float]]:
        model = Dropped()
        fit(Forward(), model, numbered(n), plan_of(local_epochs=2), client, round)
        return model.masks

    assert masks(1, 1) == masks(1, 1)
    assert masks(1, 1)[0] != masks(1, 1)[1]
    assert masks(1, 1) != masks(2, 1)
    assert masks(1, 1) != masks(1, 2)
    # More examples draw longer batch orders, which must not shift the dropout.
    assert masks(1, 1, n=4)[:2] == masks(1, 1, n=8)[:2]
