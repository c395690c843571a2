"""Small studies that several test files share."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from support import Line
from torch import Tensor, nn

from fedreuse.client.errors import TaskError
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.plan import Cell, StudyPlan, parse_plan

LINES: dict[str, Any] = {
    "name": "lines",
    "base": {
        "rounds": 3,
        "clients": {"total": 6, "per_round": 3},
        "train": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        "proxy": {"batches": 2, "batch_size": 3},
        "evaluation.every": 1,
    },
    "methods": ["fedavg", "dg-fedreuse"],
    "tasks": [{"label": "line", "task": "support:Line"}],
    "seeds": [7, 8],
    "compare": {"control": "fedavg", "margin": 2.0},
}
"""Four runs of three rounds of three of six clients, on the tiny task `support:Line`."""


def lines_plan(**changes: Any) -> StudyPlan:
    """`LINES` with other keys; None takes one out."""
    return parse_plan({key: value for key, value in (LINES | changes).items() if value is not None}, "test")


def complete(study: Study, cell: Cell) -> Path:
    """Run a cell as `fedreuse sim output=...` would."""
    update = {"output": study.path(cell), "sim": cell.config.sim.model_copy(update={"workers": 1})}
    config = cell.config.model_copy(update=update)
    wire = study.plan.wire
    folder = create_run(config, make_task(config), body="sim --wire" if wire else "sim")
    simulate(folder, config, wire=wire)
    return folder


# ---------------------------------------------------------------- tasks that go wrong


class Moody(Line):
    """As `Line`; task option `orders` is a folder in which a file with the name of an order has it carried out."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        orders = Path(self._context.options["orders"])
        (orders / f"pid-{os.getpid()}").touch()
        if (orders / f"refuse-{self._context.seed}").exists():
            raise TaskError("the data is not what it was")
        if (orders / f"die-{self._context.seed}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (orders / "slow").exists():
            time.sleep(0.05)
        return super().loss(model, batch)


def moody_plan(orders: Path, **changes: Any) -> StudyPlan:
    """`LINES` on the task `Moody`."""
    orders.mkdir(exist_ok=True)
    task = {"label": "line", "task": {"name": "studies:Moody", "options": {"orders": str(orders)}}}
    return lines_plan(tasks=[task], **changes)
