"""Random crops and mirror images, and how training and proxy draw them (algorithms 9.3; DG paper, 5.1, 8.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import CPU, Line, plan_of, task_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedreuse.client.proxy import head_gradient
from fedreuse.client.settings import ProxySettings
from fedreuse.client.trainer import train
from fedreuse.proto.streams import Purpose, stream
from fedreuse.sim.tasks.augment import crop_and_flip

# Crop and flip


class Scripted:
    """A generator that draws what it was told, and checks what it is asked for."""

    def __init__(self, *draws: tuple[int, Any]) -> None:
        self._draws = list(draws)

    def integers(self, low: int, high: int, size: Any) -> np.ndarray:
        top, values = self._draws.pop(0)
        assert (low, high) == (0, top)
        array = np.array(values)
        assert array.shape == (size if isinstance(size, tuple) else (size,))
        return array


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_crop_and_flip_by_hand(layout: torch.memory_format) -> None:
    # One image of two channels, 1 2 / 3 4 and ten times that, four times; one pixel of 9 or 8 around it:
    #   9 9 9 9
    #   9 1 2 9
    #   9 3 4 9
    #   9 9 9 9
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    x = torch.stack([torch.stack([one, 10 * one])] * 4).contiguous(memory_format=layout)
    draws = Scripted((3, [[1, 0, 2, 0], [1, 0, 2, 2]]), (2, [1, 0, 0, 1]))
    found = crop_and_flip(x, draws, 1, torch.tensor([9.0, 8.0]))  # type: ignore[arg-type]
    assert found[:, 0].tolist() == [
        [[2, 1], [4, 3]],  # rows 1-2, columns 1-2, mirrored
        [[9, 9], [9, 1]],  # rows 0-1, columns 0-1
        [[4, 9], [9, 9]],  # rows 2-3, columns 2-3
        [[9, 9], [9, 2]],  # rows 0-1, columns 2-3, mirrored
    ]
    assert found[:, 1].tolist() == [
        [[20, 10], [40, 30]],
        [[8, 8], [8, 10]],
        [[40, 8], [8, 8]],
        [[8, 8], [8, 20]],
    ]
    assert found.is_contiguous(memory_format=layout)


def test_crop_and_flip_as_an_independent_loop() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 3, 6, 5)).astype(np.float32))
    border = torch.tensor([-1.0, -2.0, -3.0])
    found = crop_and_flip(x, np.random.default_rng(3), 2, border)
    draws = np.random.default_rng(3)
    top, left = draws.integers(0, 5, (2, 50))
    flipped = draws.integers(0, 2, 50)
    for i in range(50):
        for c in range(3):
            padded = np.pad(x[i, c].numpy(), 2, constant_values=border[c].item())
            cut = padded[top[i] : top[i] + 6, left[i] : left[i] + 5]
            np.testing.assert_array_equal(found[i, c].numpy(), np.fliplr(cut) if flipped[i] else cut)


def test_all_places_and_both_sides_come_about_equally_often() -> None:
    # One bright pixel in the middle of 9x9, padding 4: it lands on each of the 81 places.
    x = torch.zeros(81_000, 1, 9, 9)
    x[:, :, 4, 4] = 1
    places = crop_and_flip(x, np.random.default_rng(1), 4, torch.zeros(1)).sum((0, 1))
    assert places.sum() == 81_000
    # 1,000 expected, standard deviation 31.4; 5 of them.
    assert (places - 1000).abs().max() < 160
    side = torch.zeros(10_000, 1, 1, 2)
    side[..., 0] = 1
    mirrored = crop_and_flip(side, np.random.default_rng(1), 0, torch.zeros(1))[..., 1].sum()
    assert abs(mirrored - 5000) < 250  # standard deviation 50


# The hook


class Moved:
    """Example j is the number j; augmentation adds 1,000 times a draw from 0 to 99. Remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def augment(self, batch: Any, generator: np.random.Generator) -> Any:
        (x,) = batch
        return [x + 1000.0 * torch.from_numpy(generator.integers(0, 100, len(x)))[:, None]]

    def loss(self, model: Any, batch: Any) -> Tensor:
        (x,) = batch
        self.batches.append([int(value) for value in x[:, 0]])
        return 0.0 * model.fc.sum() + x.sum()


class Still(Moved):
    augment = None  # type: ignore[assignment]  # no hook


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Parameter(torch.zeros(1))


NUMBERS = TensorDataset(torch.arange(10.0)[:, None])


def trained(task: Moved, client: int = 3, round: int = 5, seed: int = 7, epochs: int = 2) -> list[list[int]]:
    plan = plan_of(seed, local_epochs=epochs, batch_size=4)
    train(task, Scalar(), NUMBERS, plan, client, round, CPU)  # type: ignore[arg-type]
    return task.batches


def test_training_batches_are_augmented_from_the_stream_of_client_round_and_epoch() -> None:
    expected = []
    for epoch in (0, 1):
        order = stream(7, Purpose.BATCH_ORDER, client=3, round=5, draw=epoch).permutation(10)
        draws = stream(7, Purpose.AUGMENTATION, client=3, round=5, draw=epoch)
        expected += [
            [int(j + 1000 * draw) for j, draw in zip(part, draws.integers(0, 100, len(part)), strict=True)]
            for part in (order[:4], order[4:8], order[8:])
        ]
    assert trained(Moved()) == expected
    assert expected[:3] != expected[3:]


def test_augmentation_does_not_depend_on_the_order_of_use() -> None:
    alone = trained(Moved(), client=3, round=5)
    task = Moved()
    for client, round in ((1, 5), (3, 4), (2, 9)):
        trained(task, client, round)
    task.batches.clear()
    assert trained(task, client=3, round=5) == alone


@pytest.mark.parametrize("change", [{"client": 4}, {"round": 6}, {"seed": 8}])
def test_another_client_round_or_seed_is_augmented_otherwise(change: dict[str, int]) -> None:
    moves, others = ([[x // 1000 for x in b] for b in trained(Moved(), **how)] for how in ({}, change))
    assert moves != others


def test_augmentation_does_not_shift_the_batch_order_and_is_optional() -> None:
    assert [[x % 1000 for x in batch] for batch in trained(Moved())] == trained(Still())


@pytest.mark.parametrize("purpose", [Purpose.PROXY_GATE, Purpose.PROXY_REFRESH])
def test_proxy_batches_are_augmented_from_the_proxy_s_own_stream(purpose: Purpose) -> None:
    task, plan = Moved(), plan_of(proxy=ProxySettings(batches=2, batch_size=4))
    head_gradient(task, Scalar(), NUMBERS, plan, purpose, 3, 5, CPU)  # type: ignore[arg-type]
    draws = stream(7, purpose, client=3, round=5)
    order = draws.permutation(10)
    expected = [(part + 1000 * draws.integers(0, 100, 4)).tolist() for part in (order[:4], order[4:8])]
    assert task.batches == expected


def test_a_task_s_attribute_that_cannot_be_called_is_no_hook() -> None:
    task: Any = task_of(Line)
    task.augment = True
    trained_loss = train(task, task.model(), task.client_data(0), plan_of(), 0, 0, CPU).loss
    assert np.isfinite(trained_loss)
