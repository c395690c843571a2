"""Local objectives: F_i(w) alone, or with mu/2 ||w - w_t||^2 over the trainable parameters (DG paper, Eq. 5)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import GridModel
from torch import nn

from fedreuse.client.objective import Plain, Proximal, objective
from fedreuse.client.settings import ObjectiveSettings


class Pair(nn.Module):
    """Parameters a = (1, -2) and a scalar b = 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.b = nn.Parameter(torch.tensor(3.0))


def move(model: Pair, a: tuple[float, float], b: float) -> None:
    with torch.no_grad():
        model.a.copy_(torch.tensor(a))
        model.b.fill_(b)


def proximal(model: nn.Module, mu: float) -> Proximal:
    extra = objective(ObjectiveSettings(kind="proximal", mu=mu), model)
    assert isinstance(extra, Proximal)
    return extra


def test_the_proximal_term_by_hand() -> None:
    model = Pair()
    extra = proximal(model, 0.5)
    move(model, (3.0, 1.0), 2.0)
    # w - w_t = (2, 3) and -1: 0.5/2 (4 + 9 + 1) = 3.5, on top of a task loss of 10.
    loss = extra.loss(torch.tensor(10.0))
    assert loss.item() == 13.5
    # Its gradient is mu (w - w_t).
    loss.backward()
    assert model.a.grad.tolist() == [1.0, 1.5]
    assert model.b.grad.item() == -0.5


def test_the_proximal_gradient_is_added_to_the_task_s() -> None:
    model = Pair()
    extra = proximal(model, 0.25)
    move(model, (5.0, -2.0), 3.0)
    # Task loss a0^2: gradient 2 * 5 = 10; proximal 0.25 * (5 - 1) = 1.
    extra.loss(model.a[0] ** 2).backward()
    assert model.a.grad.tolist() == [11.0, 0.0]


def test_where_every_round_starts_the_term_and_its_gradient_are_zero() -> None:
    # The derivative of a norm (not squared) would be NaN here.
    model = Pair()
    loss = proximal(model, 0.5).loss(torch.tensor(10.0))
    assert loss.item() == 10.0
    loss.backward()
    assert model.a.grad.tolist() == [0.0, 0.0]
    assert model.b.grad.item() == 0.0


def test_the_anchor_is_the_weights_at_the_start_whatever_happens_to_them_later() -> None:
    model = Pair()
    extra = proximal(model, 2.0)
    for step in (1.0, 2.0, 4.0):
        move(model, (1.0 + step, -2.0), 3.0)
        assert extra.loss(torch.tensor(0.0)).item() == step**2


@given(st.floats(0, 100, width=32), st.floats(-10, 10, width=32), st.floats(-10, 10, width=32))
def test_the_gradient_is_mu_times_the_distance(mu: float, start: float, now: float) -> None:
    parameter = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    extra = Proximal([parameter], mu)
    with torch.no_grad():
        parameter.fill_(now)
    extra.loss(torch.zeros((), dtype=torch.float64)).backward()
    assert parameter.grad.item() == pytest.approx(mu * (now - start), rel=1e-12)


def test_plain_hands_the_task_s_loss_through() -> None:
    loss = torch.tensor(1.25)
    assert Plain().loss(loss) is loss
    for settings in (ObjectiveSettings(), ObjectiveSettings(kind="plain", mu=3.0)):
        extra = objective(settings, Pair())
        assert extra.loss(loss) is loss


def test_mu_zero_is_plain() -> None:
    model = Pair()
    extra = objective(ObjectiveSettings(kind="proximal", mu=0.0), model)
    move(model, (100.0, 100.0), 100.0)
    assert extra.loss(torch.tensor(1.25)).item() == 1.25


def test_buffers_do_not_count() -> None:
    model = GridModel()
    extra = proximal(model, 1.0)
    with torch.no_grad():
        model.features[1].running_mean.add_(5.0)
        model.features[1].running_var.add_(5.0)
        model.features[1].num_batches_tracked.add_(5)
    assert extra.loss(torch.tensor(0.0)).item() == 0.0
    with torch.no_grad():
        model.features[1].weight.add_(torch.tensor([3.0, 4.0]))  # a batch norm's own parameters do
    assert extra.loss(torch.tensor(0.0)).item() == 12.5


def test_frozen_parameters_do_not_count() -> None:
    model = Pair()
    model.b.requires_grad_(False)
    extra = proximal(model, 2.0)
    move(model, (2.0, -2.0), 300.0)
    assert extra.loss(torch.tensor(0.0)).item() == 1.0
