"""The figure of the README: accuracy against bytes, the gate's scores, and why clients trained.

    python docs/results/figures.py OUT.png RUN [RUN ...]

The last run whose gate scores clients gives the two panels on the right.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

CAUSES = {
    "cacheless": "#4c78a8",
    "age": "#72b7b2",
    "threshold": "#f58518",
    "quota": "#e45756",
    "reused": "#bab0ac",
}


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "rounds.csv").open() as handle:
        return list(csv.DictReader(handle))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def accuracy(axes: Any, folders: list[Path]) -> None:
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        rows = table(folder)
        sent = np.cumsum([int(r["uplink_modelled"]) for r in rows]) / 1e6
        points = [
            (x, 100 * float(r["validation_accuracy"]))
            for x, r in zip(sent, rows, strict=True)
            if r["validation_accuracy"]
        ]
        axes.plot(*zip(*points, strict=True), marker=".", label=summary["method"])
    axes.set(xlabel="uplink so far, modelled (MB)", ylabel="validation accuracy (%)", ylim=(90, 100))
    axes.legend(frameon=False)


def scores(axes: Any, folder: Path) -> None:
    found = [e["score"] for e in events(folder) if e["type"] == "score"]
    tau = float(table(folder)[-1]["tau"])
    axes.hist(found, bins=np.arange(0, 2.01, 0.05), color="#4c78a8")
    axes.axvline(tau, color="#e45756", label=f"τ from round 13 on: {tau:.3f}")
    axes.set(xlabel="proxy discrepancy D", ylabel="scores", xlim=(0, 2))
    axes.legend(frameon=False)


def causes(axes: Any, folder: Path) -> None:
    rows = table(folder)
    rounds = np.array([int(r["round"]) for r in rows])
    below = np.zeros(len(rows))
    for name, colour in CAUSES.items():
        height = np.array([int(r[name]) for r in rows])
        axes.bar(rounds, height, 1.0, bottom=below, color=colour, label=name)
        below += height
    axes.set(xlabel="round", ylabel="selected clients", xlim=(0.5, rounds[-1] + 0.5))
    axes.legend(frameon=False, ncols=3, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def main(out: str, *runs: str) -> None:
    folders = [Path(run) for run in runs]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    scored = [f for f in folders if any(r["tau"] for r in table(f))][-1]
    accuracy(axes[0], folders)
    scores(axes[1], scored)
    causes(axes[2], scored)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
