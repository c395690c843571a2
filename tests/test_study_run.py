"""Running a study: what is run and in which order, what fails, what a kill or Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from studies import complete, lines_plan, moody_plan
from support import final_state
from typer.testing import CliRunner

from fedreuse.sim import cli
from fedreuse.sim.study.folder import Failure, Study
from fedreuse.sim.study.local import LocalCrew
from fedreuse.sim.study.plan import Cell, StudyPlan
from fedreuse.sim.study.runner import Outcome, Pace, in_order, run_study


class Notes:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.rounds: list[tuple[str, int]] = []
        self.over: list[tuple[str, str]] = []

    def started(self, cell: Cell) -> None:
        self.begun.append(cell.id)

    def committed(self, cell: Cell, rounds: int) -> None:
        self.rounds.append((cell.id, rounds))

    def ended(self, cell: Cell, outcome: str, failure: Failure | None) -> None:
        assert (outcome == "failed") == (failure is not None)
        self.over.append((cell.id, outcome))

    def stopping(self) -> None:
        pass


def run(study: Study, slots: int = 2) -> tuple[Outcome, Notes]:
    notes = Notes()
    with study.exclusively():
        crew = LocalCrew(slots, study.folder / "logs")
        return run_study(study, crew, notes, Pace(study, study.states())), notes


def kinds(outcome: Outcome) -> dict[str, str]:
    return {name: state.kind for name, state in outcome.states.items()}


def processes(orders: Path) -> list[int]:
    """Those that trained and still live."""
    pids = [int(path.name.removeprefix("pid-")) for path in orders.glob("pid-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


# ---------------------------------------------------------------- to the end


def test_a_study_runs_to_its_end_and_is_left_alone_then(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path / "study")
    outcome, notes = run(study)
    assert outcome.complete
    assert notes.begun == list(study.cells)
    assert sorted(notes.rounds) == sorted((name, n) for name in study.cells for n in (1, 2, 3))
    # Each cell is the run that `fedreuse sim` makes.
    alone = Study.freeze(lines_plan(), tmp_path / "alone")
    for cell in alone.cells.values():
        assert final_state(complete(alone, cell)) == final_state(study.path(cell))
    before = {path: path.stat().st_mtime_ns for path in (study.folder / "cells").rglob("*.json")}
    again, notes = run(Study.open(study.folder))
    assert (again.complete, notes.begun) == (True, [])
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_run_that_was_begun_by_hand_is_gone_on_with(tmp_path):
    study = Study.freeze(lines_plan(seeds=[7]), tmp_path)
    complete(study, study.cells["line-fedavg-s7"])
    outcome, notes = run(study)
    assert (outcome.complete, notes.begun) == (True, ["line-dg-fedreuse-s7"])


def test_seeds_come_one_after_the_other_and_the_longest_first(tmp_path):
    study = Study.freeze(lines_plan(methods=["fedavg", "fedprox", "dg-fedreuse"]), tmp_path)
    pace = Pace(study, study.states())
    order = [cell.id for cell in in_order(study, study.states(), pace)]
    assert order == list(study.cells)  # nothing is known
    for name, seconds in (("line-fedavg-s7", 1.0), ("line-fedprox-s7", 2.0), ("line-dg-fedreuse-s7", 3.0)):
        pace.add(study.cells[name], seconds)
    order = [cell.id for cell in in_order(study, study.states(), pace)]
    methods = ["dg-fedreuse", "fedprox", "fedavg"]
    assert order == [f"line-{method}-s{seed}" for seed in (7, 8) for method in methods]


def test_time_left(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    first, second, *_ = study.cells.values()
    pace = Pace(study, study.states())
    assert pace.left([(first, 3)], 1) is None
    pace.add(first, 2.0)
    pace.add(first, 4.0)
    assert pace.left([(first, 5)], 1) == 15.0  # 3 seconds a round
    assert pace.left([(first, 5), (second, 10)], 1) == 45.0  # the unknown one taken for average
    pace.add(second, 9.0)
    assert pace.left([(first, 10), (second, 10)], 1) == 120.0
    assert pace.left([(first, 10), (second, 10)], 4) == 90.0  # a cell is not divided
    assert pace.left([], 2) == 0.0


# ---------------------------------------------------------------- failures


def test_a_cell_that_fails_is_listed_and_tried_again(tmp_path):
    orders = tmp_path / "orders"
    study = Study.freeze(moody_plan(orders), tmp_path / "study")
    (orders / "refuse-7").touch()
    outcome, notes = run(study)
    assert kinds(outcome) == {
        "line-fedavg-s7": "failed",
        "line-dg-fedreuse-s7": "failed",
        "line-fedavg-s8": "complete",
        "line-dg-fedreuse-s8": "complete",
    }
    assert not outcome.complete
    failure = outcome.states["line-fedavg-s7"].failure
    assert failure is not None
    assert (failure.type, failure.sentence, failure.attempt) == (
        "TaskError",
        "the data is not what it was",
        1,
    )
    assert "Traceback" in (study.folder / "logs" / "line-fedavg-s7.log").read_text()
    (orders / "refuse-7").unlink()
    outcome, notes = run(study)
    assert outcome.complete
    assert sorted(notes.begun) == ["line-dg-fedreuse-s7", "line-fedavg-s7"]
    assert len(study.failures()) == 2  # what happened stays written down


def test_a_killed_process_fails_its_cell_alone(tmp_path):
    orders = tmp_path / "orders"
    study = Study.freeze(moody_plan(orders, methods=["fedavg"], seeds=[7, 8, 9]), tmp_path / "study")
    (orders / "die-8").touch()
    outcome, _ = run(study, slots=3)
    assert list(kinds(outcome).values()) == ["complete", "failed", "complete"]
    failure = outcome.states["line-fedavg-s8"].failure
    assert failure is not None
    assert (failure.type, "SIGKILL" in failure.sentence, "--workers" in failure.sentence) == (
        "Crash",
        True,
        True,
    )


# ---------------------------------------------------------------- the command


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["study", *(str(a) for a in arguments)])


@pytest.fixture
def moody(tmp_path, monkeypatch) -> Path:
    """In a folder with a slow study in `study.yaml`, its orders in `orders`."""
    monkeypatch.chdir(tmp_path)
    plan = moody_plan(tmp_path / "orders", base=dict(lines_plan().base) | {"rounds": 25}, seeds=[7])
    write(plan)
    (tmp_path / "orders" / "slow").touch()
    return tmp_path


def write(plan: StudyPlan) -> None:
    Path("study.yaml").write_text(yaml.safe_dump(plan.model_dump(mode="json")))


def background(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedreuse.sim.cli", "study", "study.yaml", "--workers", "2", *arguments]
    # A session of its own: Ctrl-C goes to the whole of it, as in a terminal.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_dry_run_shows_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = call("digits-smoke", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "6 to run in runs/studies/digits-smoke: 60 rounds" in shown.output
    assert json.loads(call("--dry-run", "--json", "digits-smoke").stdout)["counts"] == {"missing": 6}
    assert list(tmp_path.iterdir()) == []


def test_status_and_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(moody_plan(tmp_path / "orders", seeds=[7]))
    (tmp_path / "orders" / "refuse-7").touch()
    failed = call("study.yaml", "--folder", "there", "--workers", 2)
    text = " ".join(failed.output.split())
    assert failed.exit_code == 1
    assert "2 cells: 2 failed" in text
    assert "failed: line-fedavg-s7 (TaskError): the data is not what it was" in text
    (tmp_path / "orders" / "refuse-7").unlink()
    done = call("run", "study.yaml", "--folder", "there", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["complete"], result["counts"], result["unpaired"]) == (True, {"complete": 2}, [])
    assert result["cells"][0] == {
        "cell": "line-fedavg-s7", "task": "line", "method": "fedavg", "seed": 7, "state": "complete", "rounds": 3,
        "of": 3, "failure": None,
    }  # fmt: skip


def test_conflicts_are_shown_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(lines_plan())
    study = Study.freeze(lines_plan(base=dict(lines_plan().base) | {"rounds": 2}), tmp_path / "other")
    for name in ("line-fedavg-s7", "line-fedavg-s8"):
        complete(study, study.cells[name])
    study.folder.joinpath("study.yaml").unlink()
    shown = call("study.yaml", "--folder", "other", "--dry-run")
    text = " ".join(shown.output.split())
    assert shown.exit_code == 1
    for name in ("line-fedavg-s7", "line-fedavg-s8"):
        assert f"{name} holds another run than the study's: rounds is 2 there, 3 in the study" in text
    assert call("study.yaml", "--folder", "other").exit_code == 1


def test_ctrl_c_ends_running_cells_after_their_round(moody):
    process = background()
    wait_for(lambda: len(processes(moody / "orders")) == 2)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "go on with `fedreuse study study.yaml`" in errors
    assert "Traceback" not in errors + output
    assert processes(moody / "orders") == []
    study = Study.open(moody / "runs" / "studies" / "lines")
    assert study.failures() == []
    states = [state for state in study.states().values() if state.kind == "part"]
    assert len(states) == 2
    # What is there was committed: nothing is cut off when the cells go on.
    tables = {cell: (study.path(cell) / "rounds.csv").read_text() for cell in study.cells.values()}
    (moody / "orders" / "slow").unlink()
    assert call("study.yaml").exit_code == 0
    for cell, text in tables.items():
        assert (study.path(cell) / "rounds.csv").read_text().startswith(text)


def test_a_killed_runner_leaves_nobody_behind_and_goes_on(moody):
    process = background()
    wait_for(lambda: len(processes(moody / "orders")) == 2)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(moody / "orders"), 20)
    (moody / "orders" / "slow").unlink()
    done = call("study.yaml", "--json")
    assert (done.exit_code, json.loads(done.stdout)["counts"]) == (0, {"complete": 2}), done.output
    alone = Study.freeze(Study.open(moody / "runs" / "studies" / "lines").plan, moody / "alone")
    cell = alone.cells["line-dg-fedreuse-s7"]
    study = Study.open(moody / "runs" / "studies" / "lines")
    assert final_state(complete(alone, cell)) == final_state(study.path(cell))


def test_a_second_runner_is_refused(moody):
    study = Study.freeze(lines_plan(), moody / "there")
    with study.exclusively():
        write(lines_plan())
        refused = call("study.yaml", "--folder", "there")
    assert refused.exit_code == 1
    assert "is being run by another command" in " ".join(refused.output.split())
