"""What the lossless wire gains on real runs, and what it costs.

    python tests/bench/wire.py gains RUN...      bytes of finished runs against the byte model and dense models
    python tests/bench/wire.py speed RUN         one more real update of RUN, beside other formats

Run folders come from `fedreuse sim` or `fedreuse launch`. Speeds are megabytes of the dense model a second on one
thread, and ratios to copying the dense model, taken in turn in the same process. Peaks are what a call allocates at
most, its result included, in dense models.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.table import Table

from fedreuse.proto import codec, modelled, transfers
from fedreuse.proto.codec import Payload
from fedreuse.proto.ledger import Row
from fedreuse.server.weights import load_model
from fedreuse.sim.folder import INITIAL, read_config
from fedreuse.sim.records import read_rows

console = Console(width=None if sys.stdout.isatty() else 110)
LAGS = ((1, 1), (2, 4), (5, 5), (6, 16), (17, 10**9))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="machine-readable result")
    modes = parser.add_subparsers(dest="mode", required=True)
    gains = modes.add_parser("gains", help="bytes of finished runs")
    gains.add_argument("runs", nargs="+", type=Path)
    speed = modes.add_parser("speed", help="time and bytes of one more update of a run")
    speed.add_argument("run", type=Path)
    speed.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    result = (
        {str(run): gains_of(run) for run in options.runs}
        if options.mode == "gains"
        else measure(options.run, options.repeats)
    )
    if options.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    elif options.mode == "gains":
        show_gains(result)
    else:
        show_speed(result)


# ---------------------------------------------------------------- gains


def gains_of(run: Path) -> dict[str, Any]:
    """Payload bytes against modelled fields (uplink) and dense fp32 (downlink), worst round and lag by lag."""
    schema, _ = load_model(run / INITIAL)
    dense = sum(schema.tensors[i].nbytes for i in schema.travelling)
    rows = list(read_rows(run))
    updates = [row for row in rows if row.kind == "update" and row.status == "ok"]
    models = sorted((r for r in rows if r.kind == "model" and r.payload is not None), key=lambda r: r.round)
    selected = _selected(run)
    state = modelled.dense_bytes((t.size, t.width) for t in schema.tensors)
    up, down = _sum(rows, "up", "payload"), _sum(rows, "down", "payload")
    return {
        "rounds": max(row.round for row in rows),
        "uplink": _shares(updates, lambda row: row.modelled or 0),
        "by_part": _parts(run),
        "uplink_saving": {
            layer: 1 - total / (selected * state)
            for layer in ("modelled", "payload", "grpc", "http2", "tls")
            if (total := _sum(rows, "up", layer)) is not None
        },
        "downlink": _shares(models, lambda _row: dense),
        "downlink_by_lag": _by_lag(models, dense),
        "both_saving": 1 - ((up or 0) + (down or 0)) / (2 * selected * state),
    }


def _selected(run: Path) -> int:
    with (run / "rounds.csv").open(newline="") as handle:
        return sum(int(row["selected"]) for row in csv.DictReader(handle))


def _sum(rows: Iterable[Row], way: str, layer: str) -> int | None:
    values = [getattr(row, layer) for row in rows if row.direction == way]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _shares(rows: list[Row], of: Callable[[Row], int]) -> dict[str, Any]:
    """Payload over `of`, all rounds together and the worst one."""
    by_round: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_round[row.round].append(row)
    share = {n: sum(r.payload or 0 for r in group) / sum(map(of, group)) for n, group in by_round.items()}
    worst = max(share, key=lambda n: share[n])
    single = max(rows, key=lambda row: (row.payload or 0) / of(row))
    return {
        "messages": len(rows),
        "bytes": sum(row.payload or 0 for row in rows),
        "share": sum(row.payload or 0 for row in rows) / sum(map(of, rows)),
        "worst_round": [worst, share[worst]],
        "worst_message": [single.round, single.client, (single.payload or 0) / of(single)],
    }


def _by_lag(models: list[Row], dense: int) -> dict[str, Any]:
    """Share of the dense model by how many rounds the client was behind; 0: it held nothing."""
    last: dict[int, int] = {}
    found: dict[int, list[float]] = defaultdict(list)
    for row in models:
        lag = row.round - last[row.client] if row.client in last else 0
        found[lag].append((row.payload or 0) / dense)
        if row.status == "ok":
            last[row.client] = row.round
    groups = {"whole": found.pop(0, [])}
    for low, high in LAGS:
        name = str(low) if low == high else f"{low}-{high}" if high < 10**9 else f"{low}+"
        groups[name] = [share for lag, shares in found.items() if low <= lag <= high for share in shares]
    return {
        name: {"messages": len(shares), "mean": statistics.fmean(shares), "max": max(shares)}
        for name, shares in groups.items()
        if shares
    }


def _parts(run: Path) -> dict[str, Any]:
    """Uplink bytes of places and of values, per coding."""
    sums: dict[str, int] = defaultdict(int)
    path = run / "tensors.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as handle:
        for row in csv.DictReader(handle):
            if row["direction"] == "up":
                sums[f"index {row['index_coding']}"] += int(row["index_bytes"])
                sums[f"values {row['value_coding']}"] += int(row["value_bytes"])
    return dict(sums)


def show_gains(results: dict[str, Any]) -> None:
    table = Table(title="lossless wire, payload layer", title_justify="left")
    table.add_column("")
    for run in results:
        table.add_column(Path(run).name, justify="right")
    runs = list(results.values())

    def line(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(cell(run) for run in runs))

    line("rounds", lambda r: str(r["rounds"]))
    line("uplink / modelled fields", lambda r: f"{r['uplink']['share']:.4f}")
    line("  worst round", lambda r: "{1:.4f} (round {0})".format(*r["uplink"]["worst_round"]))
    line("  worst message", lambda r: "{2:.4f} (round {0}, client {1})".format(*r["uplink"]["worst_message"]))
    for layer in ("modelled", "payload", "grpc", "http2", "tls"):
        line(f"uplink saving, {layer}, %", lambda r, at=layer: _percent(r["uplink_saving"].get(at)))
    line("downlink / dense fp32", lambda r: f"{r['downlink']['share']:.4f}")
    for lag in ("whole", "1", "2-4", "5", "6-16", "17+"):
        line(
            f"  {'held nothing' if lag == 'whole' else lag + ' behind'}",
            lambda r, at=lag: (
                "{mean:.3f} (max {max:.3f}, n {messages})".format(**r["downlink_by_lag"][at])
                if at in r["downlink_by_lag"]
                else "-"
            ),
        )
    line("both directions, saving of dense, %", lambda r: _percent(r["both_saving"]))
    console.print(table)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


# ---------------------------------------------------------------- speed


def measure(run: Path, repeats: int) -> dict[str, Any]:
    """Train one more client of a run and time every way to write and read its update and the model."""
    import numpy as np
    import safetensors.numpy
    import torch

    from fedreuse.client.held import HeldStore
    from fedreuse.client.host import ClientHost, be_deterministic
    from fedreuse.proto.streams import cohort
    from fedreuse.server.store import RunStore
    from fedreuse.sim.run import make_task

    be_deterministic()
    config = read_config(run)
    schema, _ = load_model(run / INITIAL)
    with RunStore(run) as store:
        state = store.load()
    if state is None or not state.past:
        raise SystemExit(f"{run} keeps no past model; run it with wire.history of at least 1")
    number = state.committed
    client = cohort(config.seed, number, config.clients.total, config.clients.per_round)[0]
    participant = ClientHost(make_task(config), torch.device("cpu"), HeldStore(None)).participant(client)
    # Without the gate's second pass, which puts the weights back, the workbench still has the trained model.
    participant.enter(state.run, schema, config.plan().model_copy(update={"proxy": None}))
    weights = codec.dense_payload(schema, state.flat)
    participant.train(number, weights)
    arrays = participant._bench.delta(weights)
    named = {schema.tensors[index].name: array for index, array in arrays.items()}
    tensors = {name: torch.from_numpy(array) for name, array in named.items()}
    previous = max(state.past)
    older = min(state.past, key=lambda n: abs(number - 5 - n))
    dense_bytes = sum(schema.tensors[i].nbytes for i in schema.travelling)
    flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])

    def update() -> transfers.Sealed:
        payload = codec.encode(schema, arrays, participant._kept)
        return transfers.seal(schema, payload, (number, state.flat))

    def change(base: int) -> transfers.Sealed:
        sealed = transfers.seal_change(schema, weights, state.flat, (base, state.past[base]))
        return sealed or transfers.plain(weights)

    def opened(sealed: transfers.Sealed) -> Callable[[], Payload]:
        header = transfers.transfer_header(schema, sealed)
        received = Payload(codec.check_layout(schema, header), sealed.body)
        models = {**state.past, number: state.flat}
        return lambda: transfers.open_body(schema, header, received, models.get)

    def saved(write: Callable[[io.BytesIO], Any]) -> Callable[[], bytes]:
        def call() -> bytes:
            out = io.BytesIO()
            write(out)
            return out.getvalue()

        return call

    plain = codec.encode(schema, arrays, participant._kept)
    tasks: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {}

    def add(name: str, write: Callable[[], Any], read: Callable[[Any], Callable[[], Any]]) -> None:
        made = write()
        tasks[name] = write, read(made), made.nbytes if hasattr(made, "nbytes") else len(made)

    add("update, Top-K, packed", update, opened)
    add(
        "update, Top-K, plain",
        lambda: transfers.plain(codec.encode(schema, arrays, participant._kept)),
        opened,
    )
    add("model, change, 1 round", lambda: change(previous), opened)
    add(f"model, change, {number - older} rounds", lambda: change(older), opened)
    add("model, packed", lambda: transfers.seal(schema, weights), opened)
    add(
        "torch.save, dense",
        saved(lambda out: torch.save(tensors, out)),
        lambda made: lambda: torch.load(io.BytesIO(made), weights_only=True),
    )
    add(
        "numpy.savez, dense",
        saved(lambda out: np.savez(out, **named)),
        lambda made: lambda: {k: v.copy() for k, v in np.load(io.BytesIO(made)).items()},
    )
    add(
        "safetensors, dense",
        lambda: safetensors.numpy.save(named),
        lambda made: lambda: safetensors.numpy.load(made),
    )
    copies: list[float] = []
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in tasks}
    for _ in range(repeats):
        for name, (write, read, _) in tasks.items():
            copies.append(_seconds(flat.copy))
            times[name][0].append(_seconds(write))
            times[name][1].append(_seconds(read))
    copy = statistics.median(copies)
    return {
        "run": str(run),
        "round": number,
        "client": client,
        "dense_bytes": dense_bytes,
        "modelled_fields": plain.nbytes,
        "copy_seconds": copy,
        "rows": {
            name: {
                "bytes": size,
                "write": _speed(times[name][0], dense_bytes, copy),
                "read": _speed(times[name][1], dense_bytes, copy),
                "write_peak": _peak(write) / dense_bytes,
                "read_peak": _peak(read) / dense_bytes,
            }
            for name, (write, read, size) in tasks.items()
        },
    }


def _seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of this thread: other processes on the machine do not count."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _peak(call: Callable[[], Any]) -> int:
    """Most bytes that were allocated at once, what is returned included."""
    tracemalloc.start()
    kept = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak


def _speed(seconds: list[float], dense: int, copy: float) -> dict[str, float]:
    middle = statistics.median(seconds)
    return {
        "megabytes_a_second": dense / middle / 1e6,
        "slowest": dense / max(seconds) / 1e6,
        "copies": middle / copy,
    }


def show_speed(result: dict[str, Any]) -> None:
    dense = result["dense_bytes"]
    title = (
        f"{Path(result['run']).name}, round {result['round'] + 1}, client {result['client']}: dense "
        f"{dense:,} B, modelled fields of the update {result['modelled_fields']:,} B, a copy of the dense model "
        f"{1e3 * result['copy_seconds']:.1f} ms CPU"
    )
    table = Table(title=title, title_justify="left")
    heads = ("", "bytes", "of dense", "write MB/s", "copies", "peak", "read MB/s", "copies", "peak")
    for name in heads:
        table.add_column(name, justify="right" if name else "left")
    for name, row in result["rows"].items():
        write, read = row["write"], row["read"]
        table.add_row(
            name,
            f"{row['bytes']:,}",
            f"{row['bytes'] / dense:.4f}",
            f"{write['megabytes_a_second']:,.0f}",
            f"{write['copies']:.1f}",
            f"{row['write_peak']:.2f}",
            f"{read['megabytes_a_second']:,.0f}",
            f"{read['copies']:.1f}",
            f"{row['read_peak']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
