"""The stochastic proxy: head gradients, discrepancy and signature (DG paper, Eq. 2 and 6; algorithms 2.7)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import CPU, Grid, GridModel, Line, LineModel, plan_of, ready, task_of
from torch import Tensor, nn
from torch.nn import functional

from fedreuse.client.errors import TaskError
from fedreuse.client.held import HeldStore
from fedreuse.client.participant import Participant
from fedreuse.client.proxy import discrepancy, head_gradient, head_parameters, refreshed
from fedreuse.client.settings import ClientPlan, ProxySettings
from fedreuse.client.task import Task
from fedreuse.proto.streams import Purpose, stream

GATE, REFRESH = Purpose.PROXY_GATE, Purpose.PROXY_REFRESH


def plan_with(
    batches: int = 5, batch_size: int = 2, head: tuple[str, ...] = ("classifier", "fc")
) -> ClientPlan:
    return plan_of(proxy=ProxySettings(batches=batches, batch_size=batch_size, head=head))


def gradient_of(
    task: Any,
    model: nn.Module,
    data: Any,
    plan: ClientPlan,
    purpose: Purpose = GATE,
    client: int = 1,
    round: int = 2,
) -> np.ndarray:
    return head_gradient(task, model, data, plan, purpose, client, round, CPU)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# The head gradient


@pytest.mark.parametrize("purpose", [GATE, REFRESH])
def test_it_is_the_gradient_of_the_summed_losses_of_the_first_five_batches(purpose: Purpose) -> None:
    task, model = task_of(Line), LineModel()
    x, y = (data := task.client_data(8)).tensors
    assert len(y) == 14  # seven batches of two, of which five are looked at
    found = gradient_of(task, model, data, plan_with(batches=5, batch_size=2), purpose, client=8, round=3)

    order = stream(7, purpose, client=8, round=3).permutation(14)
    losses = [functional.cross_entropy(model(x[at]), y[at]) for at in order[:10].reshape(5, 2)]
    expected = torch.autograd.grad(sum(losses), [model.fc.weight, model.fc.bias])
    assert found.dtype == np.float32
    np.testing.assert_allclose(
        found, np.concatenate([g.numpy().ravel() for g in expected]), rtol=1e-5, atol=1e-6
    )


def test_fewer_batches_than_asked_for_are_all_used() -> None:
    # 6 examples in batches of 4: a batch of four and one of two, each with its own mean.
    task, model = task_of(Line), LineModel()
    x, y = (data := task.client_data(0)).tensors
    found = gradient_of(task, model, data, plan_with(batches=5, batch_size=4), client=0, round=0)
    order = stream(7, GATE, client=0, round=0).permutation(6)
    total = functional.cross_entropy(model(x[order[:4]]), y[order[:4]])
    total = total + functional.cross_entropy(model(x[order[4:]]), y[order[4:]])
    expected = torch.autograd.grad(total, [model.fc.weight, model.fc.bias])
    np.testing.assert_allclose(
        found, np.concatenate([g.numpy().ravel() for g in expected]), rtol=1e-5, atol=1e-6
    )


def test_only_the_head_counts_though_the_body_has_gradients_too() -> None:
    grid, model = task_of(Grid), GridModel()
    found = gradient_of(grid, model, grid.client_data(0), plan_with())
    assert found.shape == (2 * 32 + 2,)
    assert np.count_nonzero(found) > 0


def test_gate_and_refresh_are_separate_draws_and_each_its_own_again() -> None:
    task, model = task_of(Line), LineModel()
    data = task.client_data(5)
    gate = gradient_of(task, model, data, plan_with(batches=2), GATE)
    refresh = gradient_of(task, model, data, plan_with(batches=2), REFRESH)
    assert not np.array_equal(gate, refresh)
    assert gate.tobytes() == gradient_of(task, model, data, plan_with(batches=2), GATE).tobytes()
    assert refresh.tobytes() == gradient_of(task, model, data, plan_with(batches=2), REFRESH).tobytes()


def test_it_runs_in_train_mode() -> None:
    # Batch statistics: in evaluation mode a shift of all inputs would show in the head's input.
    grid, model = task_of(Grid), GridModel()
    model.eval()
    before = model.features[1].running_mean.clone()
    gradient_of(grid, model, grid.client_data(0), plan_with())
    assert model.training
    assert not torch.equal(model.features[1].running_mean, before)  # hence the reload, see below


def test_a_head_that_the_loss_ignores_has_gradient_zero() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc_used, self.fc_idle = nn.Linear(3, 2), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc_used(x)

    task = task_of(Line)
    found = gradient_of(task, Half(), task.client_data(0), plan_with())
    assert found.shape == (8 + 4,)
    assert np.count_nonzero(found[:8]) > 0
    assert np.count_nonzero(found[8:]) == 0


# Names


def test_the_head_is_every_trainable_parameter_whose_name_contains_a_part() -> None:
    model = GridModel()
    chosen = head_parameters(model, ProxySettings(head=("features.0", "classifier.bias")))
    wanted = [model.features[0].weight, model.features[0].bias, model.classifier.bias]
    assert [id(p) for p in chosen] == [id(p) for p in wanted]


def test_no_match_names_what_there_is() -> None:
    with pytest.raises(TaskError, match=r"no parameter name contains 'head' or 'out'.*fc\.weight, fc\.bias"):
        head_parameters(LineModel(), ProxySettings(head=("head", "out")))


def test_frozen_parameters_are_no_head() -> None:
    model = LineModel()
    model.fc.weight.requires_grad_(False)
    settings = ProxySettings(head=("fc",))
    assert [id(p) for p in head_parameters(model, settings)] == [id(model.fc.bias)]
    model.fc.bias.requires_grad_(False)
    with pytest.raises(TaskError, match="no parameter name contains 'fc'"):
        head_parameters(model, settings)


# No trace


def flags(model: nn.Module) -> list[bool]:
    return [p.requires_grad for p in model.parameters()]


def test_requires_grad_is_restored_and_no_gradient_stays() -> None:
    grid, model = task_of(Grid), GridModel()
    model.features[0].weight.requires_grad_(False)  # the user's own frozen layer stays frozen
    before = flags(model)
    assert before == [False, True, True, True, True, True]
    gradient_of(grid, model, grid.client_data(0), plan_with())
    assert flags(model) == before
    assert all(p.grad is None for p in model.parameters())


def test_requires_grad_is_restored_after_a_failing_loss() -> None:
    class Broken:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            raise RuntimeError("no loss today")

    model = GridModel()
    with pytest.raises(RuntimeError, match="no loss today"):
        gradient_of(Broken(), model, task_of(Grid).client_data(0), plan_with())
    assert flags(model) == [True] * 6


def test_old_gradients_do_not_leak_in() -> None:
    task, model = task_of(Line), LineModel()
    data = task.client_data(2)
    clean = gradient_of(task, model, data, plan_with())
    task.loss(model, data.tensors).backward()
    assert gradient_of(task, model, data, plan_with()).tobytes() == clean.tobytes()


def participant(task: Task, plan: ClientPlan, client: int = 0) -> tuple[Participant, Any]:
    bench, schema, weights = ready(task, plan)
    one = Participant(client, task, bench, HeldStore())
    one.welcome("run", schema, plan, None)
    return one, weights


def trained(one: Participant, round: int, weights: Any) -> tuple[bytes, int, float]:
    update = one.train(round, weights)
    return bytes(update.sealed.body), update.steps, update.train_loss


def test_a_score_leaves_no_trace_in_the_training_after_it() -> None:
    # With batch normalisation the proxy moves running statistics; they must not reach the update.
    task, plan = task_of(Grid), plan_with()
    quiet, weights = participant(task, plan)
    scored, same = participant(task, plan)
    first = trained(quiet, 0, weights)
    assert first == trained(scored, 0, same)
    for one in (quiet, scored):
        one.closed(0, True)
    assert scored.score(1, same).signature_round == 0
    assert trained(quiet, 1, weights) == trained(scored, 1, same)


def test_the_global_weights_are_untouched_and_the_same_score_comes_again() -> None:
    one, weights = participant(task_of(Grid), plan_with())
    before = bytes(weights.body)
    one.train(0, weights)
    one.closed(0, True)
    scores = [one.score(1, weights) for _ in range(3)]
    assert bytes(weights.body) == before
    assert scores[0] == scores[1] == scores[2]
    assert one.score(2, weights) != scores[0]  # another round, other batches


def test_the_signature_is_the_refresh_proxy_at_the_round_s_weights_not_after_training() -> None:
    # 14 examples, of which each proxy looks at four.
    task, plan = task_of(Line), plan_with(batches=2)
    one, weights = participant(task, plan, client=8)
    one.train(0, weights)
    one.closed(0, True)
    score = one.score(3, weights)

    def at_start(purpose: Purpose, round: int) -> np.ndarray:
        bench, _, same = ready(task, plan)
        bench.load(same)
        gradient = gradient_of(task, bench.model, task.client_data(8), plan, purpose, client=8, round=round)
        return gradient.astype(np.float64)

    def distance(z: np.ndarray, h: np.ndarray) -> float:
        return 1 - z @ h / (np.linalg.norm(z) * np.linalg.norm(h))

    z, h = at_start(GATE, 3), at_start(REFRESH, 0)
    assert score.signature_round == 0
    assert score.value == pytest.approx(distance(z, h), abs=1e-6)
    # Another draw would have been another score.
    assert abs(distance(z, at_start(GATE, 0)) - score.value) > 1e-3


def test_without_a_signature_the_score_is_one() -> None:
    one, weights = participant(task_of(Line), plan_with())
    assert (one.score(0, weights).value, one.score(0, weights).signature_round) == (1.0, None)
    one.train(0, weights)  # staged, but never confirmed
    assert one.score(1, weights).signature_round is None


# Equation 2


def test_discrepancy_by_hand() -> None:
    assert discrepancy(vector(3, 4), vector(6, 8)) == pytest.approx(0, abs=1e-12)
    assert discrepancy(vector(1, 0), vector(0, 5)) == 1.0
    assert discrepancy(vector(3, 4), vector(-3, -4)) == pytest.approx(2, abs=1e-12)
    # cos 45 degrees.
    assert discrepancy(vector(1, 0), vector(1, 1)) == pytest.approx(1 - math.sqrt(0.5), abs=1e-7)


def test_a_zero_vector_has_discrepancy_one() -> None:
    assert discrepancy(vector(0, 0), vector(1, 2)) == 1.0
    assert discrepancy(vector(1, 2), vector(0, 0)) == 1.0
    assert discrepancy(vector(0, 0), vector(0, 0)) == 1.0


def test_epsilon_shows_only_for_tiny_gradients() -> None:
    # <z, h> = 1e-12 and ||z|| ||h|| + 1e-12 = 2e-12.
    assert discrepancy(vector(1e-6), vector(1e-6)) == pytest.approx(0.5, abs=1e-6)


floats = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=8))
def test_discrepancy_lies_in_0_to_2_and_is_a_float32(pairs: list[tuple[float, float]]) -> None:
    z, h = (vector(*column) for column in zip(*pairs, strict=True))
    d = discrepancy(z, h)
    assert 0 <= d <= 2
    assert d == float(np.float32(d))  # what travels is what was compared
    assert d == discrepancy(h, z)


# Equation 6


def test_refresh_by_hand() -> None:
    # 0.9 (1, 0) + 0.1 (0, 2) = (0.9, 0.2).
    new = refreshed(vector(1, 0), vector(0, 2), 0.9)
    assert new.dtype == np.float32
    np.testing.assert_allclose(new, [0.9, 0.2], rtol=1e-6)
    assert refreshed(vector(1, 0), vector(0, 2), 0.0).tolist() == [0.0, 2.0]


def test_the_first_signature_is_the_refresh_proxy() -> None:
    assert refreshed(None, vector(0, 2), 0.9).tolist() == [0.0, 2.0]
