"""A study as tables for the terminal: methods side by side, one table a data set."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from fedreuse.sim.console import out
from fedreuse.sim.page import Lines, Page
from fedreuse.sim.report.plot import LAYER_NAMES
from fedreuse.sim.study.convergence import STAYS
from fedreuse.sim.study.show import Block, Compared, Row, Showing, many
from fedreuse.sim.study.statistics import half_width, spread


def render(showing: Showing, console: Console = out, *, brief: bool = False) -> None:
    """Print an overview, then every figure of every data set; `brief` leaves the latter out."""
    page, study = Page(console), showing.study
    page.heading(f"Study {study.plan.name}: {many(len(study.plan.seeds))}, frozen {study.frozen[:10]}")
    if study.plan.description:
        page.note(study.plan.description)
    page.list([("Warning:", text) for text in showing.warnings] + [("Note:", text) for text in showing.notes])
    if showing.blocks:
        lines = [line for block in showing.blocks for line in overview(showing, block, page)]
        page.table(list(heads(showing)), lines)
    for block in () if brief else showing.blocks:
        page.heading(block.name)
        page.table([row.method for row in block.rows], everything(showing, block, page))
    if not showing.blocks:
        page.note("No row is complete yet.")
    if showing.incomplete:
        page.heading("In no table, since not all seeds are complete")
        page.list(list(lacking(showing)))
    if showing.blocks:
        page.list(list(legend(showing)))


def everything(showing: Showing, block: Block, page: Page) -> Lines:
    """All figures of a data set, below their headings; a column a method."""
    columns = [list(_column(showing, block, row, page)) for row in block.rows]
    return [
        (row[0][0], [] if row[0][1] is None else [cell or "" for _, cell in row])
        for row in zip(*columns, strict=True)
    ]


def lacking(showing: Showing) -> Iterator[tuple[str, str]]:
    """Rows that are in no table, each with what its unfinished seeds lack."""
    cells = showing.study.cells
    for one in showing.incomplete:
        seeds: dict[str, list[str]] = {}
        for cell, reason in one.reasons.items():
            seeds.setdefault(reason, []).append(str(cells[cell].seed))
        said = (
            f"seed{'s' if len(mine) > 1 else ''} {', '.join(mine)} {reason}" for reason, mine in seeds.items()
        )
        yield f"{one.block}, {one.method}:", "; ".join(said)


def legend(showing: Showing) -> Iterator[tuple[str, str]]:
    """How to read the tables."""
    plan, seeds = showing.study.plan, len(showing.study.plan.seeds)
    if seeds > 1:
        yield "±", f"sample standard deviation over {seeds} seeds"
    if plan.compare:
        c = plan.compare
        share, inner = f"{100 * c.confidence:g} %", f"{100 * (2 * c.confidence - 1):g} %"
        yield (
            "Difference:",
            f"method less {c.control}, seed by seed, in percentage points of {c.metric.replace('_', ' ')}; intervals "
            "are Student's",
        )
        yield (
            "Equivalent:",
            f"both one-sided tests against ±{c.margin:g} points, fixed before the first run, reject at "
            f"{1 - c.confidence:g} (the {inner} interval lies inside)"
            + (
                "; p by Holm over all data sets of the study, those not complete yet with p = 1"
                if c.holm
                else ""
            )
            + ". Not shown is no proof of a difference; superiority is not tested",
        )
        yield (
            "Retained:",
            f"mean over mean of the control; the criterion, {100 * c.retention:g} %, was fixed before the first run",
        )
        if seeds > 1:
            yield (
                "Power:",
                f"with {seeds} seeds the {share} interval is ±{half_width(seeds, c.confidence):.2f} sd wide; seeds "
                "needed (where the mean lies within the margin): what it takes at this sd without a true difference",
            )
    if plan.target:
        what = (
            f"{100 * plan.target.accuracy:g} %"
            if plan.target.accuracy is not None
            else f"{100 * plan.target.share:g} % of what {plan.target.of} has at its end with the same seed"
        )
        yield (
            "Target:",
            f"validation accuracy of {what}, kept for {STAYS} evaluations; a seed that did not reach it is censored: "
            "no mean is taken then",
        )
    yield (
        "Saved:",
        "of dense modelled bytes; ceiling: always reuse what may be reused, on the same schedules",
    )
    yield (
        "Point gained:",
        "bytes after the first evaluation for each percentage point of validation accuracy gained since",
    )
    yield (
        "Cost:",
        "operations are those of matrix products and convolutions; seconds and peak memory those of the machine that "
        "each cell ran on",
    )


# ---------------------------------------------------------------- the overview


def heads(showing: Showing) -> Iterator[str]:
    """Of the overview's columns."""
    plan = showing.study.plan
    yield f"{_metric(showing).replace('_', ' ')}\n%"
    if plan.compare:
        yield f"difference, points\nand {100 * plan.compare.confidence:g} % interval"
        yield f"within\n±{plan.compare.margin:g}"
    yield "uplink saved\nmodelled, %"
    if showing.measured:
        yield f"uplink saved\n{showing.measured}, %"
    if plan.target:
        yield "rounds to\ntarget"


def overview(showing: Showing, block: Block, page: Page) -> Iterator[tuple[str, list[str]]]:
    """A line a method, below the data set's name."""
    plan = showing.study.plan
    yield block.name, []
    for row in block.rows:
        cells = [_percent(row, _metric(showing), page)]
        if plan.compare:
            found = next((one for one in block.comparisons if one.method == row.method), None)
            control = row.method == plan.compare.control
            shown = [_difference(found), found.verdict] if found else [page.absent, page.absent]
            cells += ["control", ""] if control else shown
        cells.append(_mean(row, "uplink_modelled_saving", page))
        if showing.measured:
            cells.append(_mean(row, f"uplink_{showing.measured}_saving", page))
        if plan.target:
            values = row.values("target_round")
            known = row.values("target_accuracy") is not None
            missed = sum(value is None for value in row.figures["target_round"])
            missing = f"not: {missed} of {len(row.outcomes)}" if known else page.absent
            cells.append(missing if values is None else f"{spread(values).mean:.1f}")
        yield f"  {row.method}", cells


def _metric(showing: Showing) -> str:
    plan = showing.study.plan.compare
    return plan.metric if plan else "test_accuracy"


def _difference(found: Compared) -> str:
    limits = _limits(found.paired.interval)
    return f"{found.paired.mean:+.2f}" + (f" ({limits})" if limits else "")


def _mean(row: Row, name: str, page: Page) -> str:
    values = row.values(name)
    return page.absent if values is None else page.percent(spread(values).mean)


# ---------------------------------------------------------------- a column


def _column(showing: Showing, block: Block, row: Row, page: Page) -> Iterator[tuple[str, str | None]]:
    yield "Test accuracy (%)", None
    yield "  mean", _percent(row, "test_accuracy", page)
    for outcome, value in zip(row.outcomes, row.figures["test_accuracy"], strict=True):
        yield f"    seed {outcome.cell.seed}", page.percent(value)
    yield "  mean over clients", _percent(row, "test_accuracy_macro", page)
    yield "  validation", _percent(row, "validation_accuracy", page)
    plan = showing.study.plan.compare
    if block.comparisons and plan:
        found = next((one for one in block.comparisons if one.method == row.method), None)
        yield from _comparison(showing, row, found, page)
    measured = showing.measured
    yield "Uplink saved (%)", None
    yield "  modelled", _percent(row, "uplink_modelled_saving", page)
    if any(_gated(other) for other in block.rows):
        yield (
            "  modelled, ceiling",
            _percent(row, "uplink_modelled_saving_ceiling", page) if _gated(row) else "no gate",
        )
    if measured:
        yield f"  {LAYER_NAMES[measured]}", _percent(row, f"uplink_{measured}_saving", page)
    yield "Both directions saved (%)", None
    yield "  modelled", _percent(row, "both_modelled_saving", page)
    if measured:
        yield f"  {LAYER_NAMES[measured]}", _percent(row, f"both_{measured}_saving", page)
    if showing.study.plan.target:
        yield from _target(row, page, measured)
    yield "For each point gained", None
    for stage in ("modelled", *([measured] if measured else [])):
        yield f"  both, {LAYER_NAMES[stage]}", _size(row, f"both_{stage}_bytes_per_point", page)
    yield "Fairness over clients (%)", None
    for name, label in FAIRNESS.items():
        yield f"  {label}", _percent(row, f"fairness_{name}", page)
    yield "  Jain index", _plain(row, "fairness_jain", page, ".4f")
    yield "  clients counted", _plain(row, "fairness_clients", page, "g")
    yield "Reuse", None
    yield "  of selected (%)", _percent(row, "reuse_fraction", page)
    yield "  trained afresh (%)", _percent(row, "active_fraction", page)
    yield "  staleness, mean", _plain(row, "staleness_mean_rounds", page, ".3f")
    yield "  staleness, most", _most(row, "staleness_max_rounds", page)
    yield "Cost", None
    yield "  seconds", _plain(row, "seconds", page, ".4g")
    for name in ("training", "proxy_gate", "proxy_refresh"):
        yield f"  {name.replace('_', ' ')}, GFLOP", _plain(row, f"flops_{name}", page, ".4g", 1e-9)
    yield "  peak memory", _size(row, "memory_process_bytes", page)


FAIRNESS = {"mean": "mean", "std": "std", "min": "worst", "worst_tenth": "worst tenth", "max": "best"}


def _comparison(
    showing: Showing, row: Row, found: Compared | None, page: Page
) -> Iterator[tuple[str, str | None]]:
    plan = showing.study.plan.compare
    assert plan is not None
    control = row.method == plan.control
    result = found.paired if found else None

    def cell(text: str | None) -> str:
        return "" if control else page.absent if text is None else text

    yield "Difference (points)", None
    yield "  mean", "control" if control else cell(None if result is None else f"{result.mean:+.2f}")
    for n, outcome in enumerate(row.outcomes):
        yield f"    seed {outcome.cell.seed}", "" if result is None else f"{result.differences[n]:+.2f}"
    sd = None if result is None else result.sd
    yield "  sd", cell(None if sd is None else f"{sd:.2f}")
    yield f"  {100 * plan.confidence:g} % interval", cell(_limits(result.interval if result else None))
    yield f"  {100 * (2 * plan.confidence - 1):g} % interval", cell(_limits(result.inner if result else None))
    yield f"  p, within ±{plan.margin:g}", cell(_p(result.p if result else None))
    if plan.holm:
        yield "  p, Holm", cell(_p(found.adjusted if found else None))
    yield "  verdict", cell(found.verdict if found else None)
    near = found is not None and abs(found.paired.mean) < plan.margin and sd is not None
    needed = "" if not near or found is None else "> 1000" if found.needed is None else f"{found.needed}"
    yield "  seeds needed", needed
    kept = found.retention if found else None
    yield "  retained (%)", cell(None if kept is None else f"{100 * kept:.2f}")
    enough = None if kept is None else "yes" if kept >= plan.retention else "no"
    yield f"  retained {100 * plan.retention:g} %", cell(enough)


def _limits(limits: tuple[float, float] | None) -> str | None:
    return None if limits is None else f"{limits[0]:+.2f} {limits[1]:+.2f}"


def _p(p: float | None) -> str | None:
    return None if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _target(row: Row, page: Page, measured: str | None) -> Iterator[tuple[str, str | None]]:
    yield "To the target", None
    yield "  accuracy (%)", _percent(row, "target_accuracy", page)
    due = row.values("target_accuracy")
    rounds = [value for value in row.figures["target_round"] if value is not None]
    missed = len(row.outcomes) - len(rounds)
    if due is None or missed:
        text = page.absent if due is None else "not reached"
        yield "  rounds", text
        yield "    seeds", "" if due is None else f"{missed} of {len(row.outcomes)}"
        text = "" if due is None else page.absent
        layers = ["modelled", *(["measured"] if measured else [])]
        yield from ((f"  {way}, {layer}", text) for layer in layers for way in ("uplink", "both"))
        return
    yield "  rounds", _plain(row, "target_round", page, ".1f")
    yield "    seeds", ""
    for layer in ("modelled", *(["measured"] if measured else [])):
        for way in ("uplink", "both"):
            yield f"  {way}, {layer}", _size(row, f"target_{way}_{layer}_bytes", page)


def _gated(row: Row) -> bool:
    return row.outcomes[0].cell.config.gate.kind != "none"


def _percent(row: Row, name: str, page: Page) -> str:
    return _plain(row, name, page, ".2f", 100)


def _plain(row: Row, name: str, page: Page, form: str, scale: float = 1) -> str:
    values = row.values(name)
    if values is None:
        return page.absent
    whole = spread([scale * value for value in values])
    if whole.sd is None or (form == "g" and whole.sd == 0):
        return format(whole.mean, form)
    return f"{format(whole.mean, form)} ± {format(whole.sd, form)}"


def _most(row: Row, name: str, page: Page) -> str:
    values = row.values(name)
    return page.absent if values is None else f"{max(values):g}"


def _size(row: Row, name: str, page: Page) -> str:
    values = row.values(name)
    return page.absent if values is None else page.size(round(spread(values).mean))
