"""What a federated round trip costs without training: fedreuse against the floor (floor.py), run in turns.

Each measurement is one server process and ten client processes on 127.0.0.1. Ratios compare two
measurements that followed each other, so they hold on a busy machine where seconds do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from workload import CLIENTS, MODELS, change, shapes

HERE = Path(__file__).parent
CONTENDERS = {
    "floor": ("floor.py",),
    "floor, tuned": ("floor.py", "--keep-large-blocks"),
    "fedreuse": ("federated.py", "--folder", "{folder}"),
}
ROUNDS = {"small": 20, "large": 5}
START_SECONDS, ROUND_SECONDS, EXIT_SECONDS = 60.0, 30.0, 15.0
TIMES = ("wall", "cpu", "server_cpu", "client_cpu")

console = Console(width=None if sys.stdout.isatty() else 110)
_mean = statistics.fmean


class BenchError(Exception):
    """A measurement that went wrong; the text says which and what its processes said."""


@dataclass
class Cast:
    """The processes of one measurement; leaving ends them all."""

    folder: Path
    members: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def __aenter__(self) -> Cast:
        return self

    async def __aexit__(self, *_: object) -> None:
        alive = [process for process in self.members.values() if process.returncode is None]
        for end in (asyncio.subprocess.Process.terminate, asyncio.subprocess.Process.kill):
            for process in alive:
                end(process)
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    for process in alive:
                        await process.wait()
            alive = [process for process in alive if process.returncode is None]

    async def start(self, name: str, command: Sequence[str]) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        with (self.folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=log,
                limit=1 << 24,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is this process's business
            )
        self.members[name] = process
        return process

    async def hear(self, name: str) -> dict[str, Any]:
        """The next line of a process, unless any process fails first."""
        stream = self.members[name].stdout
        assert stream is not None
        line = asyncio.create_task(stream.readline())
        ends = {asyncio.create_task(p.wait()): who for who, p in self.members.items() if who != name}
        try:
            waiting: set[asyncio.Task[Any]] = {line, *ends}
            while not line.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {line}:
                    self._check(ends[task], task.result())
        finally:
            for task in (line, *ends):
                task.cancel()
        if not line.result():
            self._check(name, await self.members[name].wait(), silent=True)
        heard: dict[str, Any] = json.loads(line.result())
        return heard

    async def finish(self) -> None:
        """Wait until all have ended by themselves."""
        for name, process in self.members.items():
            self._check(name, await process.wait())

    def _check(self, name: str, code: int, *, silent: bool = False) -> None:
        if code or silent:
            said = (self.folder / f"{name}.log").read_text(errors="replace").strip()
            raise BenchError(f"{name} ended with {code}:\n{said[-3000:] or '(it said nothing)'}")


async def measure(contender: str, model: str, rounds: int) -> dict[str, Any]:
    """One run of a contender. Raises BenchError."""
    limit = START_SECONDS + ROUND_SECONDS * rounds
    with tempfile.TemporaryDirectory(prefix="fedreuse-bench-") as folder:
        script, *options = (part.format(folder=folder) for part in CONTENDERS[contender])
        command = [str(HERE / script), *options]
        try:
            async with asyncio.timeout(limit), Cast(Path(folder)) as cast:
                server = await cast.start(
                    "server", [*command, "server", "--model", model, "--rounds", str(rounds)]
                )
                address = (await cast.hear("server"))["address"]
                clients = [
                    await cast.start(
                        f"client{n}", [*command, "client", "--address", address, "--client", str(n)]
                    )
                    for n in range(CLIENTS)
                ]
                assert server.stdin is not None
                server.stdin.write(json.dumps([client.pid for client in clients]).encode() + b"\n")
                result = await cast.hear("server")
                await cast.finish()
        except TimeoutError:
            raise BenchError(f"{contender}, {model}: not done after {limit:.0f} s") from None
        except BenchError as error:
            raise BenchError(f"{contender}, {model}: {error}") from None
    if abs(result["moved"] / (float(change(0)) * rounds) - 1) > 1e-3:
        raise BenchError(f"{contender}, {model}: {rounds} rounds moved the model by {result['moved']}")
    both = zip(result["server_cpu"], result["client_cpu"], strict=True)
    return result | {"cpu": [server + client for server, client in both]}


async def session(
    models: Sequence[str], contenders: Sequence[str], repeats: int, rounds: int | None
) -> list[Any]:
    """All measurements, the contenders taking turns."""
    results = []
    for model in models:
        for repeat in range(repeats):
            for contender in contenders:
                began = time.monotonic()
                result = await measure(contender, model, rounds or ROUNDS[model])
                results.append({"model": model, "repeat": repeat, "contender": contender, **result})
                console.print(
                    f"{model} {repeat + 1}/{repeats} {contender}: "
                    f"{_mean(result['wall']):.3f} s and {_mean(result['cpu']):.3f} CPU-s per round "
                    f"[dim]({time.monotonic() - began:.0f} s)[/dim]"
                )
    return results


# ---------------------------------------------------------------- showing it


def spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    shown = map(form.format, (statistics.median(values), min(values), max(values)))
    return "{} ({} - {})".format(*shown)


def costs(results: Sequence[Any], model: str, contenders: Sequence[str]) -> Table:
    """Seconds per round and memory of one model, and the seconds in floors."""
    table = Table(title=f"{model}: {raw_bytes(model):,} bytes to and from each of {CLIENTS} clients")
    for column in ("", "wall s/round", "CPU s/round", "server", "clients", "server MB", "clients MB"):
        table.add_column(column, justify="right" if column else "left")
    of = {name: [r for r in results if (r["model"], r["contender"]) == (model, name)] for name in contenders}
    for name, runs in of.items():
        seconds = {key: [_mean(run[key]) for run in runs] for key in TIMES}
        memory = [
            f"{statistics.median(run[key] for run in runs) / 1e6:.0f}" for key in ("server_rss", "client_rss")
        ]
        table.add_row(name, *_cells(seconds, "{:.3f}"), *memory)
    *floors, ours = contenders
    for floor in floors:
        pairs = list(zip(of[floor], of[ours], strict=True))
        ratios = {key: [_mean(run[key]) / _mean(below[key]) for below, run in pairs] for key in TIMES}
        table.add_row(f"{ours} / {floor}", *_cells(ratios, "{:.2f}"), style="bold")
    return table


def _cells(values: Mapping[str, Sequence[float]], form: str) -> list[str]:
    """Ranges for what matters most, medians for its parts."""
    ranges = [spread(values[key], form) for key in ("wall", "cpu")]
    return ranges + [form.format(statistics.median(values[key])) for key in ("server_cpu", "client_cpu")]


def overhead(results: Sequence[Any], models: Sequence[str]) -> Table:
    """What the ledger says about bytes, against the bytes of the bare model."""
    table = Table(title="fedreuse's bytes per round (gRPC layer) over those of the bare model")
    for column in ("", "up", "down"):
        table.add_column(column, justify="right" if column else "left")
    for model in models:
        runs = [r for r in results if r["model"] == model and "up" in r]
        bare = CLIENTS * raw_bytes(model)
        ways = ([n / bare for run in runs for n in run[way]] for way in ("up", "down"))
        table.add_row(model, *(spread(ratios, "{:.6f}") for ratios in ways))
    return table


def raw_bytes(model: str) -> int:
    return 4 * sum(map(math.prod, shapes(model).values()))


def surroundings() -> dict[str, Any]:
    packages = ("fedreuse", "grpcio", "protobuf", "numpy", "lmdb")
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="one model only (default: both)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rounds",
        type=int,
        help="per run (default: " + ", ".join(f"{n} {m}" for m, n in ROUNDS.items()) + ")",
    )
    parser.add_argument("--json", type=Path, help="write all raw values here")
    parser.add_argument(
        "--tuned-floor",
        action="store_true",
        help="also a floor whose malloc keeps large blocks, as fedreuse's does",
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1 or (arguments.rounds is not None and arguments.rounds < 2):
        parser.error("at least 1 repeat and 2 rounds; the first round is left out")
    models = [arguments.model] if arguments.model else list(MODELS)
    contenders = [name for name in CONTENDERS if arguments.tuned_floor or name != "floor, tuned"]
    about = surroundings()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = asyncio.run(session(models, contenders, arguments.repeats, arguments.rounds))
    except BenchError as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    for model in models:
        console.print(costs(results, model, contenders))
    console.print(overhead(results, models))
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
