"""A study as JSON, and as tidy CSV files: a line a seed, a line a comparison, a line an unfinished cell."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedreuse.sim.study.show import Block, Compared, Row, Showing

SEEDS, COMPARISONS, INCOMPLETE = "seeds.csv", "comparisons.csv", "incomplete.csv"
INCOMPLETE_COLUMNS = ("data_set", "method", "cell", "reason")


def to_json(showing: Showing) -> dict[str, Any]:
    """Exact figures; accuracies are fractions, differences percentage points, null is absent or censored."""
    study = showing.study
    return {
        "study": study.plan.name,
        "definition": study.plan.model_dump(mode="json"),
        "sha256": study.sha256,
        "frozen": study.frozen,
        "measured_layer": showing.measured,
        "warnings": list(showing.warnings),
        "notes": list(showing.notes),
        "seeds": list(_seeds(showing)),
        "comparisons": list(_comparisons(showing)),
        "incomplete": list(_incomplete(showing)),
    }


def write_csv(showing: Showing, folder: Path) -> list[Path]:
    """Write seeds.csv, comparisons.csv and incomplete.csv; an absent figure is an empty cell."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds, compared, lacking = list(_seeds(showing)), list(_comparisons(showing)), list(_incomplete(showing))
    tables: dict[str, tuple[Sequence[str], list[dict[str, Any]]]] = {
        SEEDS: (list(seeds[0]) if seeds else ["data_set", "method", "seed"], seeds),
        COMPARISONS: (list(compared[0]) if compared else ["data_set", "method", "control"], compared),
        INCOMPLETE: (INCOMPLETE_COLUMNS, lacking),
    }
    for name, (columns, rows) in tables.items():
        with (folder / name).open("w", encoding="utf-8", newline="") as handle:
            writer = csv.DictWriter(handle, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return [folder / name for name in tables]


def _seeds(showing: Showing) -> Iterator[dict[str, Any]]:
    for block in showing.blocks:
        for row in block.rows:
            differences = _differences(block, row)
            for n, outcome in enumerate(row.outcomes):
                cell = outcome.cell
                yield {
                    "data_set": block.name,
                    **{
                        factor: cell.factors.get(factor)
                        for factor in ("task", "partition", "override", "method")
                    },
                    "seed": cell.seed,
                    "cell": cell.id,
                    "difference_points": differences[n] if differences else None,
                    **{name: values[n] for name, values in row.figures.items()},
                }


def _differences(block: Block, row: Row) -> tuple[float, ...]:
    return next((one.paired.differences for one in block.comparisons if one.method == row.method), ())


def _comparisons(showing: Showing) -> Iterator[dict[str, Any]]:
    plan = showing.study.plan.compare
    for block in showing.blocks:
        for one in block.comparisons:
            assert plan is not None
            yield {
                "data_set": block.name,
                "method": one.method,
                "control": plan.control,
                **_figures(one, plan.metric),
            }


def _figures(one: Compared, metric: str) -> Mapping[str, Any]:
    paired = asdict(one.paired)
    interval, inner = (paired.pop(name) or (None, None) for name in ("interval", "inner"))
    return {
        "metric": metric,
        "seeds": len(paired.pop("differences")),
        "difference_mean_points": paired["mean"],
        "difference_sd_points": paired["sd"],
        "confidence": paired["confidence"],
        "interval_low_points": interval[0],
        "interval_high_points": interval[1],
        "inner_low_points": inner[0],
        "inner_high_points": inner[1],
        "margin_points": paired["margin"],
        "equivalence_p": paired["p"],
        "equivalence_p_holm": one.adjusted,
        "verdict": one.verdict,
        "retention": one.retention,
        "seeds_needed": one.needed,
    }


def _incomplete(showing: Showing) -> Iterator[dict[str, Any]]:
    for one in showing.incomplete:
        for cell, reason in one.reasons.items():
            yield dict(zip(INCOMPLETE_COLUMNS, (one.block, one.method, cell, reason), strict=True))
