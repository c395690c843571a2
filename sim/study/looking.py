"""`fedreuse study show`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedreuse.sim.console import Json, err, errors, out

if TYPE_CHECKING:
    from fedreuse.sim.study.plan import Cell

HELP = "\n\n".join(
    (
        "Show what a study came to: every seed, differences to the control, equivalence, bytes, fairness.",
        "A row enters a table only when all its seeds are complete; the others are listed with what is the matter. "
        "Each method is compared with the control seed by seed, against the margin fixed before the first run. "
        "A target that a run did not reach is censored, never guessed.",
    )
)


def show(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the study, e.g. runs/studies/NAME; finished or not.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write one HTML page, which needs no network and no other file."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Write seeds.csv, comparisons.csv and incomplete.csv into this folder."),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The overview only.")] = False,
    as_json: Json = False,
) -> None:
    """Read a study folder, write what was asked for, and print."""
    with errors():
        from fedreuse.sim.study.show import show as read

        showing = read(folder, _progress)
        if csv is not None:
            from fedreuse.sim.study.export import write_csv

            for path in write_csv(showing, csv):
                err.print(f"wrote {path}", highlight=False, soft_wrap=True)
        if output is not None:
            from fedreuse.sim.study.page import write_page

            write_page(showing, output)
            size = output.stat().st_size / 1e6
            err.print(
                f"wrote {output} ({size:.1f} MB); open it in a browser", highlight=False, soft_wrap=True
            )
        if as_json:
            from fedreuse.sim.study.export import to_json

            sys.stdout.write(json.dumps(to_json(showing), indent=2) + "\n")
        else:
            from fedreuse.sim.study.tables import render

            render(showing, out, brief=brief)


def _progress(cells: list[Cell]) -> Iterable[Cell]:
    from rich.progress import track

    return track(cells, "reading cells", console=err, transient=True, disable=not err.is_terminal)
