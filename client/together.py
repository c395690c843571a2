"""Local training of several clients at once: their weights stacked, one vectorised step for all (torch.func).

What comes out agrees with `train`, client by client, within float tolerance: the sums inside a step may run in another
order. It pays where a step is so small that calling its operations costs more than what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import Dataset

from fedreuse.client.batches import has_batch_norm
from fedreuse.client.errors import TaskError
from fedreuse.client.objective import Objective, objective
from fedreuse.client.settings import ClientPlan, TrainSettings
from fedreuse.client.task import Task
from fedreuse.client.trainer import Trained, batches

Weights = dict[str, Tensor]
"""By parameter name, in the model's order."""
WAY_OUT = "set sim.mode to serial or processes"


def train_together(
    task: Task,
    model: nn.Module,
    plan: ClientPlan,
    round: int,
    device: torch.device,
    work: Sequence[tuple[int, Dataset[Any]]],
) -> list[tuple[Trained, Weights]]:
    """Train every client of `work` (client, data) from the model's weights: what `train` yields, and the weights.

    Each client takes its own batches in its own order; those of one shape make their step together. If the task
    has `losses`, batches whose lengths share the next power of two are filled up to the longest of them, with
    examples that count nothing. The model is left as it is. Raises TaskError for what cannot be vectorised, with
    the reason.
    """
    refuse(model, plan, device)
    model.train()
    start = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    stack = _Stack(start, len(work), plan.train)
    step = _gradients(task, model, objective(plan.objective, model))
    fill = has_losses(task)
    streams = {
        row: batches(task, data, plan, client, round, device, join_single=False)
        for row, (client, data) in enumerate(work)
    }
    steps = [0] * len(work)
    losses: list[list[Tensor]] = [[] for _ in work]
    while streams:
        for rows, lasts, batch, counts in _same_shapes(_next_of_each(streams), fill=fill):
            try:
                gradients, values = step(stack.of(rows), batch, counts)
            except RuntimeError as error:
                raise TaskError(f"several clients cannot train at once here: {error}; {WAY_OUT}") from error
            stack.move(rows, gradients)
            for row, last, value in zip(rows, lasts, values.detach().unbind(), strict=True):
                steps[row] += 1
                if last:
                    losses[row].append(value)
    return [
        (Trained(count, float(torch.stack(seen).mean())), stack.row(row))
        for row, (count, seen) in enumerate(zip(steps, losses, strict=True))
    ]


def refuse(model: nn.Module, plan: ClientPlan, device: torch.device) -> None:
    """Raise TaskError for a model or plan that can be seen not to allow it."""
    if has_batch_norm(model):
        raise TaskError(
            f"batch normalisation keeps statistics of one client at a time, so no mode vectorised; {WAY_OUT}, or "
            "choose a model with group normalisation"
        )
    if plan.train.amp and device.type == "cuda":
        raise TaskError(
            f"train.amp scales the loss of one client at a time, so no mode vectorised; {WAY_OUT}"
        )


def has_losses(task: Task) -> bool:
    return callable(getattr(task, "losses", None))


class _Stack:
    """The weights of `count` clients, each tensor (count, *shape), and what SGD remembers of them."""

    def __init__(self, start: Mapping[str, Tensor], count: int, settings: TrainSettings) -> None:
        self._settings = settings
        self._weights = {name: torch.stack([p.contiguous()] * count) for name, p in start.items()}
        self._velocities = (
            {name: torch.zeros_like(w) for name, w in self._weights.items()} if settings.momentum else {}
        )
        self._count = count

    def of(self, rows: Sequence[int]) -> Weights:
        """The weights of some clients, (len(rows), *shape)."""
        return {name: self._some(w, rows) for name, w in self._weights.items()}

    def _some(self, stacked: Tensor, rows: Sequence[int]) -> Tensor:
        return stacked if len(rows) == self._count else stacked[rows]

    @torch.no_grad()
    def move(self, rows: Sequence[int], gradients: Mapping[str, Tensor]) -> None:
        """A step as `trainer.Sgd` makes it: v <- m v + (g + d w), w <- w - lr v. Gradients are overwritten."""
        settings, all_ = self._settings, len(rows) == self._count
        at = None if all_ else torch.tensor(rows, device=next(iter(gradients.values())).device)
        for name, change in gradients.items():
            stacked = self._weights[name]
            weights = self._some(stacked, rows)
            if settings.weight_decay:
                change.add_(weights, alpha=settings.weight_decay)
            if settings.momentum:
                velocity = self._some(self._velocities[name], rows)
                change = velocity.mul_(settings.momentum).add_(change)
                if at is not None:
                    self._velocities[name].index_copy_(0, at, change)
            weights.add_(change, alpha=-settings.learning_rate)
            if at is not None:
                stacked.index_copy_(0, at, weights)

    def row(self, row: int) -> Weights:
        """One client's weights; views."""
        return {name: w[row] for name, w in self._weights.items()}


class _Loss(nn.Module):
    """The objective as a function of a model's parameters and one client's batch, for `functional_call`."""

    def __init__(self, task: Task, model: nn.Module, extra: Objective) -> None:
        super().__init__()
        self.model = model
        self._task, self._extra = task, extra

    def forward(self, at: Sequence[Tensor], batch: Any, counts: Tensor | None) -> Tensor:
        if counts is None:
            return self._extra.loss(self._task.loss(self.model, batch), at)
        losses = cast(Any, self._task).losses(self.model, batch)
        return self._extra.loss((losses * counts).sum() / counts.sum(), at)


def _gradients(task: Task, model: nn.Module, extra: Objective) -> Callable[..., tuple[Weights, Tensor]]:
    """(weights, batch, counts), all stacked -> (gradients, losses), all stacked."""
    loss = _Loss(task, model, extra)

    def of_one(weights: Weights, batch: Any, counts: Tensor | None) -> Tensor:
        named = {f"model.{name}": w for name, w in weights.items()}
        return cast(Tensor, functional_call(loss, named, (list(weights.values()), batch, counts)))

    of_some = vmap(grad_and_value(of_one), in_dims=(0, 0, 0))
    of_some_alone = vmap(grad_and_value(lambda w, b: of_one(w, b, None)), in_dims=(0, 0))

    def step(weights: Weights, batch: Any, counts: Tensor | None) -> tuple[Weights, Tensor]:
        found = of_some_alone(weights, batch) if counts is None else of_some(weights, batch, counts)
        return cast(tuple[Weights, Tensor], found)

    return step


# ---------------------------------------------------------------- batches of one shape


def _next_of_each(streams: dict[int, Iterator[tuple[bool, Any]]]) -> Iterator[tuple[int, bool, Any]]:
    """(row, last epoch?, batch) of every client that has one left; those that have none leave `streams`."""
    for row in list(streams):
        found = next(streams[row], None)
        if found is None:
            del streams[row]
        else:
            yield row, *found


def _same_shapes(
    drawn: Iterator[tuple[int, bool, Any]], *, fill: bool
) -> Iterator[tuple[list[int], list[bool], Any, Tensor | None]]:
    """Batches that can be stacked, stacked: rows, last epoch?, batch, and if filled which examples count."""
    groups: dict[Any, list[tuple[int, bool, list[Tensor], int]]] = {}
    structures: dict[Any, Any] = {}
    for row, last, batch in drawn:
        leaves, structure = tree_flatten(batch)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            odd = next(type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor))
            raise TaskError(f"several clients cannot train at once where a batch holds a {odd}; {WAY_OUT}")
        count = len(leaves[0])
        room = 1 << (count - 1).bit_length() if fill else count
        key = str(structure), room, tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        groups.setdefault(key, []).append((row, last, leaves, count))
        structures[key] = structure
    for key, members in groups.items():
        longest = max(count for *_, count in members)
        stacked = [
            torch.stack([_filled(leaf, longest) for leaf in column])
            for column in zip(*(leaves for _, _, leaves, _ in members), strict=True)
        ]
        counts = None
        if fill:
            counts = torch.zeros(len(members), longest, device=stacked[0].device)
            for n, (*_, count) in enumerate(members):
                counts[n, :count] = 1
        rows, lasts = [row for row, *_ in members], [last for _, last, *_ in members]
        yield rows, lasts, tree_unflatten(stacked, structures[key]), counts


def _filled(leaf: Tensor, count: int) -> Tensor:
    """A batch of `count` examples, the first one repeated at its end as often as it takes."""
    missing = count - len(leaf)
    return leaf if not missing else torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])])
