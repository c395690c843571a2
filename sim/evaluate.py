"""The evaluator beside the server: global weights into the task's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from fedreuse.client.task import Task
from fedreuse.client.workbench import from_numpy
from fedreuse.proto.schema import Array
from fedreuse.sim.testset import ClientTest, Examined

MOST_CLIENTS = 10_000
"""A test set has about as many examples; beyond, single clients' accuracies say nothing."""


class TaskEvaluator:
    """Evaluates on the CPU; metrics are empty where the task has no such data.

    `archival` looks at the test set at every evaluation, as published curves did; such a run is no evidence.
    """

    def __init__(self, task: Task, *, archival: bool = False) -> None:
        self.task, self._archival = task, archival
        self._model = task.model()

    def validate(self, arrays: Mapping[str, Array]) -> Mapping[str, float]:
        """Metrics on the validation set; with `archival` also `test_accuracy`."""
        found = self._metrics(self.task.validation(), arrays)
        if self._archival:
            test = self._metrics(self.task.test(), arrays)
            found |= {"test_accuracy": test["accuracy"]} if "accuracy" in test else {}
        return found

    def test(self, arrays: Mapping[str, Array], clients: int) -> Examined:
        """What the test set says, whole and by client. Only `testset.open_once` calls this."""
        data = self.task.test()
        if data is None:
            return Examined({}, None, "the task has no test set")
        metrics = self._metrics(data, arrays)
        outcomes = getattr(self.task, "outcomes", None)
        positions = getattr(self.task, "test_positions", None)
        if outcomes is None or positions is None:
            name = "outcomes" if outcomes is None else "test_positions"
            return Examined(metrics, None, f"the task has no method {name!r}")
        if clients > MOST_CLIENTS:
            return Examined(
                metrics, None, f"more than {MOST_CLIENTS} clients: they are not looked at one by one"
            )
        with torch.no_grad():
            correct, loss = (np.asarray(values, np.float64) for values in outcomes(self._model, data))
        found = []
        for client in range(clients):
            at = positions(client)
            if len(at):
                found.append(ClientTest(client, len(at), float(correct[at].mean()), float(loss[at].mean())))
        return Examined(metrics, tuple(found), None)

    def _metrics(self, data: Dataset[Any] | None, arrays: Mapping[str, Array]) -> dict[str, float]:
        if data is None:
            return {}
        model = self._load(arrays)
        with torch.no_grad():
            return {name: float(value) for name, value in self.task.metrics(model, data).items()}

    def _load(self, arrays: Mapping[str, Array]) -> nn.Module:
        # A thread per evaluation could change the process's thread count; one thread is part of the twin.
        self._model.load_state_dict({name: from_numpy(array) for name, array in arrays.items()})
        return self._model.eval()
