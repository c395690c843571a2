"""`fedreuse study`: run studies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedreuse.sim.console import Data, Device, Json, RunByDefault, complain, cores, err, errors, out
from fedreuse.sim.study import looking

if TYPE_CHECKING:
    from fedreuse.sim.study.attempt import Crew
    from fedreuse.sim.study.folder import Study
    from fedreuse.sim.study.plan import StudyPlan


app = typer.Typer(
    cls=RunByDefault,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Run a study, a grid of paired runs, and look at it.\n\n"
    "[bold]fedreuse study digits-smoke[/bold] runs one that comes with the package; a file of your own is named by "
    "its path.",
)

app.command(help=looking.HELP)(looking.show)

PlanFile = Annotated[str, typer.Argument(metavar="FILE", help="Study file, or the name of a built-in study.")]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="Folder of the study; default: runs/studies/NAME.", show_default=False),
]

_RUN = (
    "Run every cell of a study that is not complete yet.",
    "The first run freezes the definition: seeds, comparison, margin, target, all settings. From then on levels can be "
    "added to a factor, but nothing can be changed.",
    "The same command goes on after an interrupt, a crash or a kill -9, and tries failed cells once more. Ctrl-C ends "
    "running cells after their round. The exit status is 1 if a cell failed.",
)


@app.command(help="\n\n".join(_RUN))
def run(
    file: PlanFile,
    folder: Folder = None,
    data: Data = None,
    device: Device = "cpu",
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Cells at a time; default: as many as there are cores."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the grid and what is left to run; write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the cells of a study that are not complete."""
    with errors():
        from fedreuse.sim.study.folder import Study as StudyFolder
        from fedreuse.sim.study.plan import load_plan

        plan = load_plan(file)
        place = folder or Path("runs") / "studies" / plan.name
        if dry_run:
            _show_plan(plan, place, as_json)
            return
        study = StudyFolder.freeze(plan, place)
        with study.exclusively():
            _run(study, _local(study, workers), device, data, as_json, f"fedreuse study {file}")


def _run(study: Study, crew: Crew, device: str, data: Path | None, as_json: bool, again: str) -> None:
    from fedreuse.sim.study.runner import Pace, run_study, to_json
    from fedreuse.sim.study.view import StudyProgress, show_outcome

    states = study.states()
    pace = Pace(study, states)
    with StudyProgress(err, study, states, pace) as view:
        outcome = run_study(study, crew, view, pace, device=device, data=data)
    if as_json:
        sys.stdout.write(json.dumps(to_json(study, outcome), indent=2) + "\n")
    else:
        show_outcome(out, study, outcome)
    if outcome.interrupted:
        err.print(f"interrupted; go on with `{again}`", highlight=False, soft_wrap=True)
        raise typer.Exit(130)
    if not outcome.complete:
        err.print(f"try again with `{again}`", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    if not as_json:
        out.print(f"more: `fedreuse study show {study.folder}`", highlight=False, soft_wrap=True)


def _local(study: Study, workers: int | None) -> Crew:
    from fedreuse.sim.study.local import LocalCrew

    widest = max(cell.config.sim.workers or 1 for cell in study.cells.values())
    return LocalCrew(workers or max(1, cores() // widest), study.folder / "logs")


def _show_plan(plan: StudyPlan, folder: Path, as_json: bool) -> None:
    from fedreuse.sim.study.folder import Study
    from fedreuse.sim.study.runner import Outcome, Pace, check_folders, in_order, to_json
    from fedreuse.sim.study.view import duration, show_outcome

    study = Study.of(plan, folder)
    if conflicts := check_folders(study):
        complain(ValueError("\n".join(conflicts)))
    states = study.states()
    if as_json:
        sys.stdout.write(json.dumps(to_json(study, Outcome(states)), indent=2) + "\n")
        return
    show_outcome(out, study, Outcome(states))
    pace = Pace(study, states)
    todo = [(cell, cell.config.rounds - states[cell.id].rounds) for cell in in_order(study, states, pace)]
    rounds = sum(left for _, left in todo)
    left = pace.left(todo, 1)
    time = "" if left is None else f", by the pace so far {duration(left)} of one core"
    out.print(f"{len(todo)} to run in {folder}: {rounds} rounds{time}", highlight=False, soft_wrap=True)
