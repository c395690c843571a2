"""What one complete cell of a study came to: its figures, each with its unit in its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedreuse.proto.ledger import Direction
from fedreuse.sim.compare import compare
from fedreuse.sim.folder import SUMMARY, damage
from fedreuse.sim.report.chronicle import MEASURED, STAGES, Chronicle, Stage, read_chronicle
from fedreuse.sim.study.convergence import reached
from fedreuse.sim.study.plan import Cell
from fedreuse.sim.sums import WAYS

BOTH: dict[str, tuple[Direction, ...]] = {"uplink": ("up",), "downlink": ("down",), "both": WAYS}
EVEN = ("clients", "mean", "variance", "std", "min", "max", "worst_tenth", "jain")
OPERATIONS = ("training", "proxy_gate", "proxy_refresh")

Figure = float | int | None


@dataclass(frozen=True)
class Outcome:
    """A complete cell. `figures` has None for what is absent; accuracies and fractions are 0 to 1, sizes bytes."""

    cell: Cell
    story: Chronicle
    figures: Mapping[str, Figure]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Validated rounds and their accuracies."""
        return [(n, accuracy) for n, accuracy in enumerate(self.story.validation, 1) if accuracy is not None]

    def to_target(self, target: float | None, measured: Stage | None) -> dict[str, Figure]:
        """Rounds and bytes until validation accuracy reached `target`; all None where it did not (censored)."""
        round = None if target is None else reached(self.evaluations, target)
        stages: dict[str, Stage | None] = {"modelled": "modelled", "measured": measured}
        found: dict[str, Figure] = {"target_accuracy": target, "target_round": round}
        for name, stage in stages.items():
            for way in ("uplink", "both"):
                sums = self.story.cumulative(stage, *BOTH[way]) if stage else None
                here = None if sums is None or round is None else sums[round - 1]
                found[f"target_{way}_{name}_bytes"] = here
        return found


def read_outcome(cell: Cell, folder: Path) -> Outcome:
    """The figures of a finished run. Raises RunError naming what is missing or damaged."""
    (run,) = compare([folder]).runs
    story = read_chronicle(folder, run)
    with damage(folder / SUMMARY, "restore the file"):
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        figures = dict(_figures(summary)) | dict(_bytes(story))
    return Outcome(cell, story, figures)


def measured_stage(outcomes: Sequence[Outcome]) -> Stage | None:
    """The deepest measured layer that all of them have in both directions."""
    everywhere = [s for s in MEASURED if all(o.story.total(s, *WAYS) is not None for o in outcomes)]
    return everywhere[-1] if everywhere and outcomes else None


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Summaries of older runs lack whole sections."""
    test, even = summary.get("test") or {}, summary.get("fairness") or {}
    stale, machine = summary.get("staleness") or {}, summary.get("machine") or {}
    flops, memory = summary.get("flops") or {}, machine.get("memory") or {}
    yield "test_accuracy", summary["accuracy"]["test"]
    yield "test_accuracy_macro", test.get("macro_accuracy")
    yield "test_loss", test.get("loss")
    yield "test_loss_macro", test.get("macro_loss")
    yield "validation_accuracy", summary["accuracy"]["validation"]
    yield from ((f"fairness_{name}", even.get(name)) for name in EVEN)
    yield "rounds", summary["rounds"]
    yield "reuse_fraction", summary["reuse"]["fraction"]
    yield "active_fraction", summary["reuse"]["fresh"] / summary["selected"] if summary["selected"] else None
    yield "staleness_mean_rounds", stale.get("mean")
    yield "staleness_max_rounds", stale.get("max")
    yield from ((f"flops_{name}", flops.get(name)) for name in OPERATIONS)
    yield "seconds", machine.get("seconds")
    yield "memory_process_bytes", memory.get("process")
    yield "memory_workers_bytes", memory.get("workers")


def _bytes(story: Chronicle) -> Iterator[tuple[str, Figure]]:
    run = story.run
    for way, ways in BOTH.items():
        for stage in STAGES:
            yield f"{way}_{stage}_bytes", story.total(stage, *ways)
    for way in ("uplink", "both"):
        for stage in STAGES:
            part = run.to_dense(story.total(stage, *BOTH[way]), *BOTH[way])
            yield f"{way}_{stage}_saving", None if part is None else 1 - part
    yield "uplink_modelled_saving_ceiling", run.ceiling.uplink_saving if run.ceiling else None
    yield "reuse_fraction_ceiling", run.ceiling.reuse_fraction if run.ceiling else None
    for stage in STAGES:
        yield f"both_{stage}_bytes_per_point", _per_point(story, stage)


def _per_point(story: Chronicle, stage: Stage) -> float | None:
    """Bytes, both directions, after the first evaluation for each percentage point gained since; None without gain."""
    sums = story.cumulative(stage, *WAYS)
    seen = [(n, accuracy) for n, accuracy in enumerate(story.validation) if accuracy is not None]
    if sums is None or not seen:
        return None
    (first, low), (last, high) = seen[0], seen[-1]
    return (sums[last] - sums[first]) / (100 * (high - low)) if high > low else None
