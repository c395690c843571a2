"""One run in detail: layer by layer, message by message, and what its bodies are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fedreuse.proto.ledger import LAYERS, MESSAGE_LAYERS, Direction
from fedreuse.sim.compare import Run
from fedreuse.sim.page import Lines, Page
from fedreuse.sim.sums import COUNTED, WAYS, Body, Entry, total

TITLES: dict[str, tuple[Direction, ...]] = {
    "To the server (up)": ("up",),
    "To the clients (down)": ("down",),
    "Both ways": WAYS,
}


def details(run: Run, mark: str, page: Page) -> None:
    """Print the tables of one run."""
    page.heading(f"{mark} {run.name}, by layer")
    page.table(["bytes", "to\nmodelled", "to\ndense"], list(_layers(run, page)))
    costs = list(_costs(run, page))
    if costs:
        page.heading(f"{mark} {run.name}, what one control message costs on average")
        page.table(["count", "message", "grpc", "paper's\nmodel"], costs)
    if run.bodies:
        page.heading(f"{mark} {run.name}, what the bodies are made of, by coding of indices / values")
        page.table(
            ["modelled", "indices", "values", "to\nmodelled", "share\n(%)"], list(_bodies(run.bodies, page))
        )
    if run.behind:
        page.heading(f"{mark} {run.name}, models sent, by rounds since their client's last one")
        page.table(["count", "payload", "mean\nto dense", "worst\nto dense"], list(_behind(run, page)))
    page.heading(f"{mark} {run.name}, by kind of message")
    page.table(["count", *MESSAGE_LAYERS, "payload\nratio", "grpc\nratio"], list(_kinds(run, page)))
    if any(run.connections[way].rows for way in WAYS):
        page.note("Below grpc bytes belong to connections and cannot be split by kind.")


def _layers(run: Run, page: Page) -> Iterator[tuple[str, list[str]]]:
    for title, ways in TITLES.items():
        sums, star = run.measured(*ways), "*" if "down" in ways else ""
        yield title, []
        for layer in LAYERS:
            if layer not in MESSAGE_LAYERS and not run.applies(layer, *ways):
                continue
            count = sums[layer]
            name = layer.replace("_", " ") + (star if layer == "modelled" else "")
            if layer in COUNTED:
                yield f"  {name}", [page.number(count), "", ""]
            else:
                ratios = page.ratio(count, sums["modelled"]), page.part(run.to_dense(count, *ways))
                yield f"  {name}", [page.size(count), *ratios]
            if layer == "tls" and sums["http2"] is not None and sums["tls"] is not None:
                both = sums["http2"] + sums["tls"]
                ratios = page.ratio(both, sums["modelled"]), page.part(run.to_dense(both, *ways))
                yield "  http2 + tls", [page.size(both), *ratios]


def _costs(run: Run, page: Page) -> Iterator[tuple[str, list[str]]]:
    for cost in run.costs():
        if cost.message is not None or cost.grpc is not None:
            cells = f"{cost.messages}", page.mean(cost.message), page.mean(cost.grpc), f"{cost.paper} B"
            yield f"  {cost.kind} ({cost.direction})", list(cells)


def _bodies(bodies: Sequence[Body], page: Page) -> Lines:
    """The share is of the direction's bytes."""
    lines: Lines = []
    for way in WAYS:
        there = [body for body in bodies if body.direction == way]
        whole = sum(body.wire for body in there)
        if there:
            lines.append((way.title(), []))
        for body in there:
            lines.append((f"  {body.index_coding} / {body.value_coding}", _parts([body], whole, page)))
        if len(there) > 1:
            lines.append(("  all", _parts(there, whole, page)))
    return lines


def _parts(bodies: Sequence[Body], whole: int, page: Page) -> list[str]:
    charge, wire = sum(body.modelled for body in bodies), sum(body.wire for body in bodies)
    sizes = (charge, sum(body.index_bytes for body in bodies), sum(body.value_bytes for body in bodies))
    return [
        *map(page.size, sizes),
        page.ratio(wire, charge),
        page.percent(wire / whole) if whole else "",
    ]


def _behind(run: Run, page: Page) -> Iterator[tuple[str, list[str]]]:
    dense = run.dense_bytes
    for group in run.behind:
        ratios = page.part(group.ratio(dense)), page.part(group.worst / dense)
        yield f"  {group.label}", [f"{group.models}", page.size(group.payload), *ratios]


def _kinds(run: Run, page: Page) -> Iterator[tuple[str, list[str]]]:
    """The byte table of a run."""

    def cells(entries: Sequence[Entry]) -> list[str]:
        messages, events = sum(e.messages for e in entries), sum(e.events for e in entries)
        sums = total(entries)
        charge = sums["modelled"]
        count = f"({events})" if events and not messages else f"{messages}"
        return [
            count,
            *map(page.size, sums.values()),
            page.ratio(sums["payload"], charge),
            page.ratio(sums["grpc"], charge),
        ]

    for way in WAYS:
        there = [entry for entry in run.entries if entry.direction == way]
        yield f"{way.title()}link", []
        for kind, group in groupby(there, key=lambda entry: entry.kind):
            entries = list(group)
            yield f"  {kind}", cells(entries)
            for entry in entries:
                if entry.status != "ok" and entry.status != kind:
                    yield f"    {'not sent' if entry.status == 'fault' else entry.status}", cells([entry])
        yield "  total", cells(there)
    yield "Both", cells(run.entries)
