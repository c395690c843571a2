"""How much the simulator costs beside a hand-written single-process PyTorch loop, on the same work.

    python tests/bench/engine.py --peers PEERS                  digits upscaled to 28x28: one step a client
    python tests/bench/engine.py --peers PEERS --data DATA      MNIST, too: 30 steps a client

PEERS is the folder with `w2/floor.py`, the loop, which is run unchanged (or named by FEDREUSE_BENCH_PEERS); DATA
holds MNIST/raw. Work: 100 clients with equal shares, 10 a round, one epoch in batches of 20, plain SGD, dense FedAvg,
a CNN of 421,642 parameters, one thread. Every contender is a process of its own, all in turn; CPU seconds of a round
are those of all its processes, the first round left out. Ratios compare runs of the same turn, so they hold on a
busy machine where seconds do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

HERE = Path(__file__).parent
LOOP, LOOP_LAST = "loop", "loop, channels-last"
RUN = (
    "method=custom",
    "seed=1",
    "clients.total=100",
    "clients.per_round=10",
    "partition.kind=iid",
    "train.local_epochs=1",
    "train.batch_size=20",
    "train.learning_rate=0.05",
    "train.momentum=0",
    "train.weight_decay=0",
)
SERIAL = ("sim.workers=1",)
CONTENDERS: dict[str, tuple[str, ...]] = {
    LOOP: ("loop",),
    LOOP_LAST: ("loop", "--channels-last"),
    "serial, contiguous": ("ours", *SERIAL, "train.memory_format=contiguous"),
    "serial, channels-last": ("ours", *SERIAL, "train.memory_format=channels_last"),
    "2 workers, channels-last": ("ours", "sim.workers=2", "train.memory_format=channels_last"),
    "serial, channels-last, wire": ("ours", "--wire", *SERIAL, "train.memory_format=channels_last"),
}
LIMIT_SECONDS = 1800

console = Console(width=None if sys.stdout.isatty() else 110)


class BenchError(Exception):
    """A measurement that went wrong; the text says which and what its process said."""


@dataclass(frozen=True)
class Setting:
    """What is the same for every contender."""

    peers: Path
    data: Path
    work: str
    rounds: int


def measure(contender: str, setting: Setting) -> dict[str, Any]:
    """The figures of one run. Raises BenchError."""
    role, *options = CONTENDERS[contender]
    if role == "loop":
        command = [role, str(setting.peers), *options]
    else:
        task = {"digits": "engine_task:Digits", "mnist": "engine_task:MNIST"}[setting.work]
        work = (f"task={task}", f"data={setting.data}", f"rounds={setting.rounds}")
        command = [role, *options, *RUN, *work]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "BENCH_ROUNDS": str(setting.rounds),
        "BENCH_MNIST": str(setting.data / "MNIST") if setting.work == "mnist" else "",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_side.py"), *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise BenchError(
            f"{contender} on {setting.work} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def session(settings: Sequence[Setting], contenders: Sequence[str], repeats: int) -> dict[str, Any]:
    """By work and contender the figures of every repeat."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=repeats * len(settings) * len(contenders))
        for _ in range(repeats):
            for setting in settings:
                for contender in contenders:
                    progress.update(bar, description=f"{setting.work}, {contender}")
                    figures = measure(contender, setting)
                    results.setdefault(setting.work, {}).setdefault(contender, []).append(figures)
                    progress.advance(bar)
    return results


def ratios(runs: dict[str, list[dict[str, Any]]], contender: str, base: str) -> list[float]:
    """CPU seconds of a round over those of `base` in the same turn."""
    if base not in runs:
        return []
    return [mine["cpu"] / its["cpu"] for mine, its in zip(runs[contender], runs[base], strict=True)]


def show(work: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    some = next(iter(runs.values()))
    table = Table(title=f"{work}, {some[0]['rounds']} rounds, {len(some)} turns", title_justify="left")
    table.add_column("")
    heads = (
        "CPU ms a round",
        "of the loop",
        "of the loop\nchannels-last",
        "start-up\nCPU s",
        "first round\nCPU s",
    )
    for head in (*heads, "RSS\nMiB", "PSS\nMiB", "accuracy\n%"):
        table.add_column(head, justify="right")
    for contender, figures in runs.items():
        table.add_row(
            contender,
            spread([1000 * run["cpu"] for run in figures], ".0f"),
            spread(ratios(runs, contender, LOOP), ".2f"),
            spread(ratios(runs, contender, LOOP_LAST), ".2f"),
            f"{middle(figures, 'startup_cpu'):.2f}",
            f"{middle(figures, 'first_cpu'):.2f}",
            f"{middle(figures, 'rss') / 2**20:.0f}",
            f"{middle(figures, 'pss') / 2**20:.0f}",
            f"{100 * middle(figures, 'accuracy'):.1f}",
        )
    console.print(table)


def middle(figures: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in figures)


def spread(values: list[float], form: str) -> str:
    """Median (smallest to largest)."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, default=os.environ.get("FEDREUSE_BENCH_PEERS"))
    parser.add_argument("--data", type=Path, help="folder that holds MNIST/raw; without it only digits")
    parser.add_argument("--work", action="append", choices=("digits", "mnist"), help="only this work")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="only this contender; repeatable")
    parser.add_argument("--json", action="store_true", help="every figure of every run")
    options = parser.parse_args()
    if options.peers is None or not (options.peers / "w2" / "floor.py").exists():
        parser.error(f"no w2/floor.py in {options.peers}: name the folder with --peers")
    works = options.work or ["digits", *(["mnist"] if options.data else [])]
    if "mnist" in works and not (options.data and (options.data / "MNIST" / "raw").is_dir()):
        parser.error(f"no MNIST/raw in {options.data}: name the folder with --data")
    if options.rounds < 3:
        parser.error("at least 3 rounds, since the first is left out")
    data = options.data or Path("data")
    settings = [Setting(options.peers.resolve(), data.resolve(), work, options.rounds) for work in works]
    try:
        results = session(settings, options.only or list(CONTENDERS), options.repeats)
    except BenchError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    else:
        for work, runs in results.items():
            show(work, runs)


if __name__ == "__main__":
    main()
