"""The tasks there are: what each learns from, its usual model, licence and size, and whether its data are at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedreuse.client.task import ENTRY_POINTS


@dataclass(frozen=True)
class Entry:
    """One task. None is what does not apply, or what only the data themselves or their server would say.

    size: bytes of a download; at_hand: whether the data are in the folder with data sets.
    """

    name: str
    learns_from: str
    model: str | None = None
    terms: str | None = None
    size: int | None = None
    at_hand: bool | None = None


def catalogue(data: Path) -> Iterator[Entry]:
    """All installed tasks, MedMNIST's 2-D sets one by one, with what is in the folder `data`."""
    for point in sorted(entry_points(group=ENTRY_POINTS), key=_order):
        yield from _of(point, data.absolute())


def _of(point: EntryPoint, data: Path) -> Iterator[Entry]:
    from fedreuse.sim.tasks.medmnist import MedMnist, flat_sets

    factory: Any = point.load()
    if factory is MedMnist:
        yield from (_medical(name, data) for name in flat_sets())
        return
    lines = (factory.__doc__ or "").strip().splitlines()
    argument = getattr(factory, "argument", None)
    entry = Entry(
        f"{point.name}:{argument}" if argument else point.name,
        lines[0] if lines else "",
        getattr(factory, "default_model", None),
        getattr(factory, "terms", None),
        at_hand=factory.at_hand(data) if hasattr(factory, "at_hand") else None,
    )
    if (source := getattr(factory, "source", None)) is not None:
        known = source.data_set()
        entry = Entry(
            entry.name, entry.learns_from, entry.model, known.terms, known.size, not source.missing(data)
        )
    yield entry


def _medical(name: str, data: Path) -> Entry:
    from fedreuse.sim.tasks.medmnist import MedMnist, find

    info = find(name, 28)
    images = "colour" if info.colour else "grey"
    numbers = " + ".join(f"{info.samples[part]:,}" for part in ("train", "val", "test"))
    kind = (
        f"{info.classes} labels at once" if info.kind.startswith("multi-label") else f"{info.classes} classes"
    )
    return Entry(
        f"medmnist:{name}",
        f"{numbers} {images} images, {kind}.",
        MedMnist.default_model,
        info.licence,
        at_hand=(data / info.file).is_file(),
    )


def _order(point: EntryPoint) -> tuple[bool, str]:
    """Those that come with the package first."""
    return not point.value.startswith("fedreuse."), point.name


def table(entries: Sequence[Entry], data: Path) -> Table:
    """The entries for the terminal."""
    shown = Table(box=None, padding=(0, 2, 0, 0), caption=f"here: whether the data are in {data}")
    shown.caption_justify = "left"
    for name in ("task", "model", "here"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("learns from", ratio=1)
    for e in entries:
        here = {True: "yes", False: "no", None: ""}[e.at_hand]
        size = f"{e.size / 1e6:,.0f} MB to download" if e.size and not e.at_hand else ""
        terms = "; ".join(filter(None, (size, e.terms)))
        about = Text(e.learns_from).append(f"\n{terms}" if terms else "", "dim")
        shown.add_row(e.name, e.model or "", here, about)
    return shown
