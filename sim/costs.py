"""What a run cost its clients and this machine: floating-point operations by counter, peak memory."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from fedreuse.client.batches import has_batch_norm, split
from fedreuse.client.proxy import head_gradient
from fedreuse.client.settings import ClientPlan
from fedreuse.client.task import Task
from fedreuse.client.trainer import train
from fedreuse.proto.streams import Purpose
from fedreuse.sim.chronology import Work

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of all clients over the run, a multiplication and an addition being two.

    Counted are matrix products and convolutions, forward and backward, of one batch by torch's counter, times the
    examples really used: `training`, the gate's proxy gradients, and those that refresh signatures. Everything
    element-wise is left out: activations, normalisation, the optimiser, Top-K, coding; so are kernels that torch does
    not open to its counter (LSTM on a CPU).
    """

    training: int
    proxy_gate: int
    proxy_refresh: int


def count_flops(task: Task, plan: ClientPlan, work: Work, examples: Mapping[int, int]) -> Flops | None:
    """Of the work done; `examples` has n_i. None if nothing was trained or the counter sees nothing.

    Both real procedures run once, on one client's first batch.
    """
    from torch.utils.flop_counter import FlopCounterMode  # 0.2 s, not spent on starting

    if not work.trained:
        return None
    client = min(work.trained)
    data, model = task.client_data(client), task.model()

    def first(size: int) -> Subset[Any]:
        return Subset(data, range(min(size, examples[client])))

    one = plan.model_copy(update={"train": plan.train.model_copy(update={"local_epochs": 1, "amp": False})})
    batch = first(plan.train.batch_size)
    with FlopCounterMode(display=False) as counter:
        train(task, model, batch, one, client, 0, CPU)
    a_step = counter.get_total_flops() / len(batch)
    if not a_step:
        return None
    seen = sum(n * examples[c] for c, n in work.trained.items()) * plan.train.local_epochs
    gate = refresh = 0.0
    if plan.proxy is not None:
        proxy, join = plan.proxy, has_batch_norm(model)

        def used(client: int) -> int:
            batches = split(np.arange(examples[client]), proxy.batch_size, join)
            return sum(map(len, batches[: proxy.batches]))

        batch = first(proxy.batch_size)
        with FlopCounterMode(display=False) as counter:
            head_gradient(task, model, batch, plan, Purpose.PROXY_GATE, client, 0, CPU)
        a_proxy = counter.get_total_flops() / len(batch)
        gate = a_proxy * sum(n * used(c) for c, n in work.scored.items())
        refresh = a_proxy * sum(n * used(c) for c, n in work.trained.items())
    return Flops(round(a_step * seen), round(gate), round(refresh))


@dataclass(frozen=True)
class PeakMemory:
    """Peak resident memory in bytes of the process that ended the run, and of the processes that it started.

    `workers` adds up peaks, so memory that processes share counts once in each; None without such processes, or
    where the machine has no /proc.
    """

    process: int
    workers: int | None


def peak_memory() -> PeakMemory:
    """Of this process and its living descendants, so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = [peak for pid in _descendants() if (peak := _peak(pid)) is not None]
    return PeakMemory(mine, sum(peaks) if peaks else None)


def _descendants() -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a process stands in parentheses and may hold anything; state and parent follow it.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _peak(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else None
