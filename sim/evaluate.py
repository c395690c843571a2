"""The evaluator beside the server: global weights into the task's own metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.utils.data import Dataset

from fedreuse.client.task import Task
from fedreuse.client.workbench import from_numpy
from fedreuse.proto.schema import Array


class TaskEvaluator:
    """Evaluates on the CPU; metrics are empty where the task has no such data."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = task.model()

    def validate(self, arrays: Mapping[str, Array]) -> Mapping[str, float]:
        return self._metrics(self._task.validation(), arrays)

    def test(self, arrays: Mapping[str, Array]) -> Mapping[str, float]:
        return self._metrics(self._task.test(), arrays)

    def _metrics(self, data: Dataset[object] | None, arrays: Mapping[str, Array]) -> Mapping[str, float]:
        if data is None:
            return {}
        # A thread per evaluation could change the process's thread count; one thread is part of the twin.
        self._model.load_state_dict({name: from_numpy(array) for name, array in arrays.items()})
        self._model.eval()
        with torch.no_grad():
            return {name: float(value) for name, value in self._task.metrics(self._model, data).items()}
