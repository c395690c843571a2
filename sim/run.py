"""Making and opening run folders: what every body of a federation does before its first round."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedreuse.client.proxy import head_parameters
from fedreuse.client.task import Task, TaskContext, load_task
from fedreuse.client.workbench import initial_weights, schema_of, state_arrays
from fedreuse.proto import PROTOCOL_VERSION
from fedreuse.proto.streams import cohort
from fedreuse.server.federation import TABLE_HEADERS, Evaluator, Federation, new_state
from fedreuse.server.store import RunError, RunStore
from fedreuse.server.weights import load_model, save_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import CONFIG, ENVIRONMENT, INITIAL, PARTITION
from fedreuse.sim.tasks.division import Division

logger = logging.getLogger(__name__)


def make_task(config: RunConfig, folder: Path | None = None) -> Task:
    """The task of a configuration. Raises TaskError.

    folder: the run folder, once there is one. What it says about who has which examples is read, not drawn again;
    raises RunError if the task then divides them in another way than when the run began.
    """
    options: dict[str, Any] = {
        **config.task.options,
        "model": config.task.model,
        "train_limit": config.task.train_limit,
        "partition": config.partition.model_dump(),
    }
    saved = folder / PARTITION if folder is not None and (folder / PARTITION).exists() else None
    context = TaskContext(config.seed, config.clients.total, config.data, options, saved)
    task = load_task(config.task.name, context)
    if folder is not None:
        _check_partition(folder, _division(task))
    return task


def _division(task: Task | None) -> Division | None:
    """A task's division of its examples, if it has one; a user's own task need not."""
    division = getattr(task, "division", None)
    return division if isinstance(division, Division) else None


def _check_partition(folder: Path, division: Division | None) -> None:
    try:
        began = json.loads((folder / ENVIRONMENT).read_text())["partition_sha256"]
    except (OSError, ValueError, KeyError):
        return  # whoever needs that file says what is wrong with it
    found = division.hash() if division is not None else None
    if began is not None and found != began:  # a server without a task began with none
        raise RunError(
            f"{folder} began with the partition of SHA-256 {began}, the task now gives {found}: restore data, "
            f"{PARTITION} and installation as they were, or start another run"
        )


def init_model(config: RunConfig, task: Task, path: Path) -> None:
    """Write schema and initial weights, drawn from the `init` stream."""
    model = initial_weights(task, config.seed)
    schema = schema_of(model, buffers_as_parameters=config.task.buffers == "paper")
    save_model(
        path,
        schema,
        state_arrays(model),
        note=f"initial weights, task {config.task.name}, seed {config.seed}",
    )


def create_run(config: RunConfig, task: Task | None, model: Path | None = None, *, body: str = "sim") -> Path:
    """Make a new run folder; its initial weights come from `model` or from the task. Raises RunError.

    `body` is the command that runs it; `resume` reads it back.
    """
    folder = config.folder
    if config.output is None:
        numbers = itertools.count(2)
        while folder.exists():  # nobody asked for this very name
            folder = config.folder.with_name(f"{config.folder.name}-{next(numbers)}")
    if (folder / CONFIG).exists():
        raise RunError(
            f"{folder} already holds a run; continue it with `fedreuse resume {folder}` or choose another "
            "with output=FOLDER"
        )
    if task is not None and config.gate.kind == "score":
        with torch.random.fork_rng(devices=[]):  # this model is only looked at
            head_parameters(task.model(), config.proxy)
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        schema, flat = load_model(model)
        arrays = {t.name: v.reshape(t.shape) for t, v in zip(schema.tensors, schema.views(flat), strict=True)}
        save_model(folder / INITIAL, schema, arrays, note=f"copied from {model.name}")
    elif task is not None:
        init_model(config, task, folder / INITIAL)
    else:
        raise RunError("a server without a task needs --model FILE, made by `fedreuse init-model`")
    division = _division(task)
    if division is not None:
        division.save(folder / PARTITION)
        for remark in division.remarks:
            logger.warning("%s partition: %s", config.partition.kind, remark)
    (folder / ENVIRONMENT).write_text(json.dumps(_environment(config, division, body), indent=2) + "\n")
    # Last: a folder with config.yaml is complete.
    partial = folder / (CONFIG + ".partial")
    partial.write_text(config.to_yaml())
    partial.rename(folder / CONFIG)
    return folder


def open_federation(folder: Path, config: RunConfig, evaluator: Evaluator | None) -> Federation:
    """The federation of a run folder after its last committed round. Raises RunError."""
    schema, flat = load_model(folder / INITIAL)
    store, settings = RunStore(folder, config.memory.budget), config.federation()
    state = store.load()
    if state is None:
        state = new_state(secrets.token_hex(8), schema, flat)
        store.initialise(state, TABLE_HEADERS | {"rounds.csv": settings.round_columns})
    return Federation(settings, schema, store, state, evaluator)


def _environment(config: RunConfig, division: Division | None, body: str) -> dict[str, Any]:
    packages = ("fedreuse", "torch", "numpy", "grpcio", "protobuf", "xxhash", "lmdb", "safetensors")
    return {
        **({"evaluation": "archival"} if config.evaluation.archival else {}),
        "body": body,
        "protocol_version": PROTOCOL_VERSION,
        "packages": {name: version(name) for name in packages},
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "config_sha256": hashlib.sha256(config.to_yaml().encode()).hexdigest(),
        "partition_sha256": division.hash() if division is not None else None,
        "schedule_sha256": _schedule_hash(config),
    }


def _schedule_hash(config: RunConfig) -> str:
    """SHA-256 of who is selected in every round, ascending, as little-endian int64: equal for methods compared."""
    digest = hashlib.sha256()
    for round in range(config.rounds):
        selected = cohort(config.seed, round, config.clients.total, config.clients.per_round)
        digest.update(np.array(selected, "<i8").tobytes())
    return digest.hexdigest()
