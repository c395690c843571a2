"""What a run comes to: accuracy, bytes by direction and layer, savings, reuse, costs; read from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from fedreuse.proto import modelled
from fedreuse.server.outcome import CAUSES
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.chronology import staleness
from fedreuse.sim.config import RunConfig
from fedreuse.sim.fairness import FEWEST_EXAMPLES, fairness
from fedreuse.sim.folder import INITIAL, SUMMARY, read_body
from fedreuse.sim.records import read_rounds
from fedreuse.sim.remarks import absences
from fedreuse.sim.sums import read_sums
from fedreuse.sim.testset import Examined

UNFINISHED = "known when a run ends"
UNOPENED = "the test set has not been opened"
CLOSED = "evaluation.test=false leaves the test set closed"


def summarise(
    folder: Path,
    config: RunConfig,
    test: Examined | None,
    costs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of a run as far as it has come; absent figures are None.

    `costs` holds what cannot be read from the folder: `flops` and `memory`, figures, or the reason why not; and the
    simulator's `mode`.
    """
    rounds = read_rounds(folder)
    sums = read_sums(folder, None)
    schema, _ = load_model(folder / INITIAL)
    dense = modelled.dense_bytes((t.size, t.width) for t in schema.tensors)
    selected = _sum(rounds, "selected")
    up, down = sums.layers("up"), sums.layers("down")
    validation = [float(r["validation_accuracy"]) for r in rounds if r["validation_accuracy"]]
    counts = {name: _sum(rounds, name) for name in ("fresh", "reused", *CAUSES, "fault", "bridged")}
    stale = staleness(folder)
    return {
        **({"archival": True} if config.evaluation.archival else {}),
        "method": config.method,
        "task": config.task.name,
        "train_limit": config.task.train_limit,
        "seed": config.seed,
        "rounds": len(rounds),
        "clients": {"total": config.clients.total, "per_round": config.clients.per_round},
        "dense_bytes": dense,
        "selected": selected,
        "accuracy": {
            "validation": validation[-1] if validation else None,
            "test": test.metrics.get("accuracy") if test else None,
        },
        **_test(test, UNOPENED if config.evaluation.test else CLOSED),
        "uplink": up,
        "downlink": down,
        "absent": {
            layer: absence.reason for absence in absences(sums, _body(folder)) for layer in absence.layers
        },
        "saving": {
            "uplink_modelled": _uplink_saving(up["modelled"], selected, dense),
            "symmetric_modelled": _symmetric_saving(up["modelled"], down["modelled"], selected, dense),
            "uplink_grpc": _uplink_saving(up["grpc"], selected, dense),
            "symmetric_grpc": _symmetric_saving(up["grpc"], down["grpc"], selected, dense),
        },
        "reuse": {
            "fraction": counts["reused"] / selected if selected else None,
            "active": counts["fresh"] / selected if selected else None,
            **counts,
        },
        "staleness": asdict(stale) if stale else None,
        "flops": (costs or {}).get("flops", {"absent": UNFINISHED}),
        "machine": {
            "mode": (costs or {}).get("mode"),
            "seconds": sum(float(row.get("seconds") or 0) for row in rounds),
            "memory": (costs or {}).get("memory", {"absent": UNFINISHED}),
        },
    }


def _test(test: Examined | None, untested: str) -> dict[str, Any]:
    """What the test set said: over all examples (micro), as a mean over clients (macro), and how evenly.

    `untested` is the reason where there is nothing.
    """
    if test is None:
        absent = {"absent": untested}
        return {"test": absent, "fairness": absent}
    found = {"openings": test.openings, "accuracy": test.metrics.get("accuracy")}
    found["loss"] = _finite(test.metrics.get("loss"))
    if not test.clients:
        reason = test.absent or "no test example stands for any client"
        return {"test": found | {"absent": reason}, "fairness": {"absent": reason}}
    count = len(test.clients)
    found |= {
        "macro_accuracy": sum(client.accuracy for client in test.clients) / count,
        "macro_loss": _finite(sum(client.loss for client in test.clients) / count),
        "clients": count,
    }
    even = fairness(test.clients)
    few = {"absent": f"no client has {FEWEST_EXAMPLES} test examples"}
    return {"test": found, "fairness": asdict(even) if even else few}


def _finite(value: float | None) -> float | None:
    """A diverged model's loss may be beyond all numbers, which JSON has no word for."""
    return value if value is not None and isfinite(value) else None


def _body(folder: Path) -> str | None:
    """The command that ran it; older folders, and those put together by hand, do not say."""
    try:
        return read_body(folder)
    except RunError:
        return None


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    partial = folder / (SUMMARY + ".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.rename(folder / SUMMARY)


def _sum(rounds: list[dict[str, str]], column: str) -> int:
    return sum(int(row[column]) for row in rounds)


def _uplink_saving(uplink: int | None, selected: int, dense: int) -> float | None:
    if uplink is None or not selected:
        return None
    return modelled.uplink_saving(uplink, selected, dense)


def _symmetric_saving(up: int | None, down: int | None, selected: int, dense: int) -> float | None:
    if up is None or down is None or not selected:
        return None
    return modelled.symmetric_saving(up + down, selected, dense)
