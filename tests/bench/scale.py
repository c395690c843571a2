"""What a round costs with a hundred and with a hundred thousand clients.

    python tests/bench/scale.py [--clients N,N,...] [--rounds R] [--methods M,M] [--json]          (half an hour)
    python tests/bench/scale.py cohort                                                          (seconds)

A measurement is one process of one torch thread: a new run of `clients.total` virtual clients, 100 of them a round, 20
examples each, a model of 2,410 parameters, in this process (`sim.workers=1`), without and with `--wire`. After R rounds
it stops, and a second process goes on with the same folder for as many rounds as are averaged: its start-up and memory
show what a server pays for the clients that are known by then. Round times are means of the first and the last 20 of
the R rounds, round 1 left out; "start" is from the call to the first round's beginning, its cohort's joins included,
imports not. With `cohort`, what drawing 100 clients of N costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

HERE = Path(__file__).parent
PER_ROUND, AVERAGED = 100, 20
CLIENTS = (100, 1_000, 10_000, 100_000)
METHODS = ("fedavg", "dg-fedreuse")

console = Console(width=None if sys.stdout.isatty() else 110)


class EnoughError(Exception):
    """As many rounds as wanted are committed."""


# ---------------------------------------------------------------- one measurement


def measure(folder: Path, clients: int, method: str, wire: bool, stop: int, rounds: int) -> dict[str, Any]:
    """Make or go on with the run in `folder` until `stop` rounds are committed."""
    import torch  # noqa: F401 - not part of the start

    from fedreuse.sim.config import load_config
    from fedreuse.sim.folder import CONFIG, read_config
    from fedreuse.sim.run import create_run, make_task
    from fedreuse.sim.simulate import simulate

    sys.path.insert(0, str(HERE))
    began, times = time.perf_counter(), []
    if (folder / CONFIG).exists():
        config = read_config(folder)
    else:
        settings = {
            "method": method,
            "task": "crowd:Crowd",
            "clients.total": clients,
            "clients.per_round": min(PER_ROUND, clients),
            "rounds": rounds,
            "train.local_epochs": 1,
            "train.batch_size": 20,
            "proxy.batches": 1,
            "evaluation.every": 1_000_000,
            "sim.workers": 1,
            "output": folder,
        }
        config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
        create_run(config, make_task(config))
    opened = 0.0

    def committed(row: Mapping[str, Any]) -> None:
        nonlocal opened
        times.append((time.process_time(), time.perf_counter()))
        opened = opened or times[0][1] - float(row["seconds"]) - began
        if row["round"] == stop:
            raise EnoughError

    with suppress(EnoughError):
        simulate(folder, config, wire=wire, committed=committed)
    spent = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(times)]
    first, last = spent[:AVERAGED], spent[-AVERAGED:]
    return {
        "start_s": opened,
        **{
            f"{when}_{what}_ms": 1000 * statistics.fmean(pair[index] for pair in part)
            for when, part in (("first", first), ("last", last))
            for index, what in enumerate(("cpu", "wall"))
        },
        **memory(),
    }


def memory() -> dict[str, float]:
    """This process's memory in MB: at its highest, and now what is its own."""
    with Path("/proc/self/status").open() as status:
        fields = dict(line.split(":", 1) for line in status)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_mb": peak / 1024, "own_mb": int(fields["RssAnon"].split()[0]) / 1024}


def known(folder: Path) -> int:
    """Clients that took part."""
    seen: set[int] = set()
    with (folder / "events.jsonl").open() as events:
        for line in events:
            event = json.loads(line)
            if event["type"] == "round_opened":
                seen.update(event["cohort"])
    return len(seen)


# ---------------------------------------------------------------- all of them


def child(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def cases(
    options: argparse.Namespace, folder: Path, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    todo = [(m, w, n) for m in options.methods for w in (False, True) for n in options.clients]
    bar = progress.add_task("", total=len(todo))
    for method, wire, clients in todo:
        name = f"{method}, --wire" if wire else method
        progress.update(bar, description=f"{name}, {clients:,} clients")
        run, total = folder / f"{name}-{clients}", options.rounds + AVERAGED + 1
        new = child(run, clients, method, int(wire), options.rounds, total)
        again = child(run, clients, method, int(wire), total, total)
        size = sum(path.stat().st_blocks for path in (run / "state").rglob("*")) * 512 / 1e6
        yield name, {"clients": clients, "known": known(run), "new": new, "again": again, "state_mb": size}
        progress.advance(bar)


def show(title: str, rows: Sequence[Mapping[str, Any]], rounds: int) -> None:
    table = Table(title=f"{title}, {PER_ROUND} clients a round", title_justify="left")
    for head in (
        "clients",
        f"known\nafter {rounds}",
        "start\ns",
        "CPU ms/round\nfirst",
        "\nlast",
        "wall ms/round\nfirst",
        "\nlast",
        "peak\nMB",
        "again:\nstart s",
        "CPU ms\n/round",
        "peak\nMB",
    ):
        table.add_column(head, justify="right")
    for row in rows:
        new, again = row["new"], row["again"]
        table.add_row(
            f"{row['clients']:,}",
            f"{row['known']:,}",
            f"{new['start_s']:.2f}",
            *(f"{new[f'{w}_{what}_ms']:.0f}" for what in ("cpu", "wall") for w in ("first", "last")),
            f"{new['peak_mb']:.0f}",
            f"{again['start_s']:.2f}",
            f"{again['last_cpu_ms']:.0f}",
            f"{again['peak_mb']:.0f}",
        )
    console.print(table)


def cohort_costs() -> list[dict[str, float]]:
    from fedreuse.proto.streams import cohort

    results = []
    for power in range(2, 10):
        began, draws = time.perf_counter(), 0
        while time.perf_counter() - began < 0.3:
            cohort(1, draws, 10**power, PER_ROUND)
            draws += 1
        results.append({"clients": 10**power, "us": (time.perf_counter() - began) / draws * 1e6, **memory()})
    return results


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        folder, clients, method, wire, stop, rounds = sys.argv[2:]
        result = measure(Path(folder), int(clients), method, bool(int(wire)), int(stop), int(rounds))
        sys.stdout.write(json.dumps(result) + "\n")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("rounds", "cohort"), default="rounds")
    parser.add_argument("--clients", type=integers, default=CLIENTS, metavar="N,N,...")
    parser.add_argument("--rounds", type=int, default=300, metavar="R")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=METHODS, metavar="M,M")
    parser.add_argument("--json", action="store_true", help="the numbers instead of tables")
    options = parser.parse_args()
    if options.what == "cohort":
        results: Any = cohort_costs()
        if not options.json:
            for row in results:
                console.print(f"100 of {row['clients']:>13,} clients: {row['us']:6.0f} µs")
    else:
        if options.rounds < AVERAGED + 2:
            parser.error(f"--rounds: at least {AVERAGED + 2}")
        results = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with (
            tempfile.TemporaryDirectory() as folder,
            Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ):
            for name, row in cases(options, Path(folder), progress):
                results.setdefault(name, []).append(row)
        if not options.json:
            for name, rows in results.items():
                show(name, rows, options.rounds)
    if options.json:
        console.print_json(json.dumps(results))


if __name__ == "__main__":
    main()
