"""A comparison as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console

from fedreuse.proto.ledger import Direction, Layer
from fedreuse.server.outcome import CAUSES
from fedreuse.sim.compare import Comparison, Run
from fedreuse.sim.details import details
from fedreuse.sim.page import Lines, Page
from fedreuse.sim.remarks import both_ways
from fedreuse.sim.reuse import BINS, Scores
from fedreuse.sim.sums import WAYS

EXPLANATIONS = {
    "modelled": "the numbers alone, as papers count them: per tensor the smallest of dense, value + index and "
    "bitmap form; 16 B for a reuse",
    "payload": "the encoded tensors that were really produced",
    "message": "the serialized protobuf messages",
    "grpc": "the messages with gRPC's 5-byte prefix on every frame",
    "http2, tls": "what crossed the sockets, in plaintext or encrypted; a connection has one of the two",
    "tcp payload": "that, and what of it was sent again (tcp retransmitted)",
    "ip": "whole packets, headers and acknowledgements without payload (pure acks) included",
    "ratio": "bytes of a layer / modelled bytes; to dense: / modelled dense bytes, m B0 a direction",
    "—": "not observed in this run; that is not zero",
    "(n)": "events that the byte model charges for although no message carried them",
    "*": "downlink by the symmetric convention: one dense model per selected client and round",
    "saving": "1 - bytes / modelled dense bytes: m B0 (uplink, Eq. 15) or 2 m B0 (symmetric, Eq. 16)",
    "ceiling": "a gate that never fires (D = 0) on the same cohorts, quota and age limit, without faults",
    "D": "a client's discrepancy score; it trains afresh where D reaches the threshold of its round",
    "units": "1 kB = 1000 B; lost and refused messages are included; exact figures: --json, --csv",
}

BELOW: tuple[Layer, ...] = ("http2", "tls", "tcp_payload", "ip")
"""Layers of connections that stand beside those of messages, where a run has them."""


def render(comparison: Comparison, console: Console, *, brief: bool = False) -> None:
    """Print everything as tables that fit the console's width; `brief` leaves out kinds and explanations."""
    page, runs = Page(console), comparison.runs
    marks = [f"{n}" for n in range(1, len(runs) + 1)] if len(runs) > 1 else ["Run:"]
    page.list((mark, _title(run, page)) for mark, run in zip(marks, runs, strict=True))
    page.list(("Warning:", text) for text in comparison.warnings)
    page.list(("Note:", text) for text in comparison.notes)
    heads = [run.config.method for run in runs]
    if len(runs) > 1:
        heads = [f"{mark}\n{head}" for mark, head in zip(marks, heads, strict=True)]
    page.table(heads, _side_by_side(runs, page))
    if brief:
        return
    page.list(_absences(comparison, marks))
    for mark, run in zip(marks, runs, strict=True):
        details(run, mark, page)
    page.list((page.absent if mark == "—" else mark, text) for mark, text in EXPLANATIONS.items())


def _absences(comparison: Comparison, marks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Why layers are absent, each reason once, and how those below gRPC were obtained."""
    runs: dict[tuple[str, str], list[str]] = {}
    said: set[str] = set()
    for mark, run in zip(marks, comparison.runs, strict=True):
        for absence in run.absences:
            runs.setdefault((both_ways(absence.layers), absence.reason), []).append(mark)
            said.add(absence.reason)
    for (what, reason), where in runs.items():
        which = f" in {', '.join(where)}" if len(comparison.runs) > 1 else ""
        yield "Absent:", f"{what}{which}: {reason}"
    how = dict.fromkeys(
        text for run in comparison.runs for there in run.connections.values() for text in there.how
    )
    yield from (("Obtained:", text) for text in how if text and text not in said)


def _title(run: Run, page: Page) -> str:
    config, clients = run.config, run.config.clients
    rounds = f"{run.rounds} rounds" if run.finished else f"round {run.rounds} of {config.rounds} (unfinished)"
    if run.finished and run.rounds < config.rounds:
        rounds += f" of {config.rounds} (stopped early)"
    stamp = "archival, " if config.evaluation.archival else ""
    return (
        f"{run.name}: {stamp}{config.method} on {config.task.name}, seed {config.seed}, {clients.per_round} of "
        f"{clients.total} clients a round, {rounds}, dense model {page.size(run.dense_bytes)}"
    )


def _side_by_side(runs: Sequence[Run], page: Page) -> Lines:
    bins = sorted({n for run in runs if run.scores for n, count in enumerate(run.scores.counts) if count})
    below = [
        layer for layer in BELOW if any(run.measured(way)[layer] is not None for run in runs for way in WAYS)
    ]
    by_client = any(run.macro is not None for run in runs)
    columns = [list(_figures(run, page, bins, below, by_client)) for run in runs]
    return [
        (row[0][0], [] if row[0][1] is None else [cell or "" for _, cell in row])
        for row in zip(*columns, strict=True)
    ]


def _figures(
    run: Run, page: Page, bins: Sequence[int], below: Sequence[Layer], by_client: bool
) -> Iterator[tuple[str, str | None]]:
    """A run's column, with the same labels for every run; a heading has no cell."""
    gated, top, clients = run.config.gate.kind != "none", run.ceiling, run.clients
    yield "Accuracy (%)", None
    yield "  validation", page.percent(run.validation)
    yield "  test", page.percent(run.test)
    if by_client:
        even = run.fairness or {}
        yield "    over clients", page.percent(run.macro)
        yield "    worst tenth", page.percent(even.get("worst_tenth"))
        yield "    deviation", page.percent(even.get("std"))
    yield "Rounds", f"{run.rounds} of {run.config.rounds}"
    ways: dict[str, tuple[Direction, ...]] = {"Uplink": ("up",), "Downlink": ("down",), "Both": WAYS}
    for title, directions in ways.items():
        sums, star = run.bytes(*directions), "*" if "down" in directions else ""
        yield f"{title} (bytes)", None
        for layer, count in sums.items():
            yield f"  {layer}{star if layer == 'modelled' else ''}", page.size(count)
        whole = run.measured(*directions)
        for lower in below:
            yield f"  {lower.replace('_', ' ')}", page.size(whole[lower])
        yield "  payload ratio", page.ratio(sums["payload"], sums["modelled"])
        yield "  grpc ratio", page.ratio(sums["grpc"], sums["modelled"])
    yield "Uplink saving (%)", None
    for layer, saving in run.uplink_saving().items():
        yield f"  {layer}", page.percent(saving)
    yield from _savings_below(run, page, below, "up")
    yield (
        "  modelled, ceiling",
        page.percent(top.uplink_saving if top else None) if gated else "no gate",
    )
    yield "Symmetric saving (%)", None
    for layer, saving in run.symmetric_saving().items():
        yield f"  {layer}{'*' if layer == 'modelled' else ''}", page.percent(saving)
    yield from _savings_below(run, page, below, *WAYS)
    yield "Reuse (% of selected)", None
    yield "  reused", page.percent(run.reuse_fraction)
    yield "  ceiling", page.percent(top.reuse_fraction if top else None) if gated else "no gate"
    yield "Selected clients", f"{run.selected}"
    yield "  fresh", f"{clients['fresh']}"
    yield from ((f"    {cause}", f"{clients[cause]}") for cause in CAUSES)
    yield "    no gate", f"{clients['always']}"
    yield from ((f"  {what}", f"{clients[what]}") for what in ("reused", "fault"))
    yield "    bridged", f"{clients['bridged']}"
    if bins:
        yield from _score_figures(run.scores, bins)


def _savings_below(
    run: Run, page: Page, below: Sequence[Layer], *ways: Direction
) -> Iterator[tuple[str, str | None]]:
    whole = run.measured(*ways)
    for layer in below:
        part = run.to_dense(whole[layer], *ways)
        yield f"  {layer.replace('_', ' ')}", page.percent(None if part is None else 1 - part)


def _score_figures(scores: Scores | None, bins: Sequence[int]) -> Iterator[tuple[str, str | None]]:
    yield "Scores D", None
    yield "  below threshold", f"{scores.below}" if scores else ""
    yield "  threshold reached", f"{scores.reached}" if scores else ""
    names = ("minimum", "lower quartile", "median", "upper quartile", "maximum")
    for name, value in zip_longest(names, scores.quartiles if scores else ()):
        yield f"  {name}", "" if value is None else f"{value:.4f}"
    for n in bins:
        end = "]" if n == BINS - 1 else ")"
        yield (
            f"  in [{2 * n / BINS:.1f}, {2 * (n + 1) / BINS:.1f}{end}",
            f"{scores.counts[n]}" if scores else "",
        )
