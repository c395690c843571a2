"""What a user brings: a model, each client's data, a loss and metrics. One short file is enough.

A task is named `module:attribute` (or by an entry point of the group `fedreuse.tasks`); the attribute is
called with a `TaskContext` and returns an object with the methods of `Task`. An entry point whose attribute has itself
an attribute `argument`, a word for it, is named with one: `npz:FILE`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedreuse.client.errors import TaskError

ENTRY_POINTS = "fedreuse.tasks"


@dataclass(frozen=True)
class TaskContext:
    """What a task may need to know.

    seed: root of all named random streams (`fedreuse.proto.streams`); clients: how many there are;
    data: folder with data sets; options: the `task` and `partition` sections of the configuration;
    partition: file in which a run saved who has which examples, to be read instead of drawn again;
    argument: what follows the name of an entry point that takes one.
    """

    seed: int
    clients: int
    data: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    partition: Path | None = None
    argument: str = ""


class Task(Protocol):
    """The user's side of federated learning.

    A task may also offer `augment(batch, generator)`: random changes to batches of training and of the proxy,
    see `Augment`. Evaluation never sees them. With `losses(model, batch)`, the (n,) losses of the examples whose
    mean is `loss`, clients with batches of different lengths can train at once. With `outcomes(model, data)` and
    `test_positions(client)`, see `Outcomes`, the test is also reported client by client.
    """

    def model(self) -> nn.Module:
        """A fresh model. Called under the `init` stream's seed when initial weights are made."""

    def client_data(self, client: int) -> Dataset[Any]:
        """The training examples of one client, a map-style data set; the same at every call."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over a batch: a list of what the data set's items hold, stacked by torch's collate."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        """Metrics of an evaluated model over a data set, e.g. {"accuracy": 0.9, "loss": 0.3}."""

    def validation(self) -> Dataset[Any] | None:
        """Examples that steer decisions: cut from training data, never from the test set."""

    def test(self) -> Dataset[Any] | None:
        """The test set; opened once, after the last round."""


class Outcomes(NamedTuple):
    """What an evaluated model made of each of the n examples of a data set; a task's `outcomes(model, data)`.

    correct: (n,) bool, or what share of it is right where an example has several answers; loss: (n,), each
    example's own. The means of both are the accuracy and the loss of `Task.metrics`. A task that has them also has
    `test_positions(client)`: the indices of the test examples that stand for a client's own data, none for a client
    without any.
    """

    correct: NDArray[Any]
    loss: NDArray[Any]


Augment = Callable[[Any, np.random.Generator], Any]
"""(batch as `Task.loss` gets it, on its device; the named stream to draw from) -> the batch to train on.

All randomness must come from the generator, the same number of draws for the same shapes: a batch then
depends on nothing but seed, client, round and epoch.
"""


def augmentation(task: Task) -> Augment:
    """The task's `augment`, or one that changes nothing if the task has none."""
    offered = getattr(task, "augment", None)
    return cast(Augment, offered) if callable(offered) else _unchanged


def _unchanged(batch: Any, _generator: np.random.Generator) -> Any:
    return batch


def load_task(name: str, context: TaskContext) -> Task:
    """Build the task called `name`. Raises TaskError."""
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    first, colon, rest = name.partition(":")
    factory = cast(Callable[[TaskContext], Any], found[first].load()) if first in found else None
    word = getattr(factory, "argument", None)
    if factory is not None and word is not None:
        if not rest:
            raise TaskError(f"task {name!r} needs more: write {first}:{word}")
        return cast(Task, factory(replace(context, argument=rest)))
    if colon:
        return cast(Task, _from_module(name)(context))
    if factory is None:
        raise TaskError(
            f"no task called {name!r}; installed: {', '.join(sorted(found)) or 'none'}; "
            "your own file is named module:attribute"
        )
    return cast(Task, factory(context))


def _from_module(name: str) -> Callable[[TaskContext], Any]:
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a task in the working directory needs no installation
    try:
        return cast(Callable[[TaskContext], Any], getattr(importlib.import_module(module), attribute))
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise
        raise TaskError(f"task {name!r}: no module {module!r} in this directory or installation") from None
    except AttributeError:
        raise TaskError(f"task {name!r}: module {module!r} has no attribute {attribute!r}") from None
