"""A study's folder: what is frozen, what may be added, which run folders count as its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from studies import LINES, complete, lines_plan

from fedreuse.server.store import RunError
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.pairing import unpaired


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """All cells but one are complete; not to be changed."""
    study = Study.freeze(lines_plan(), tmp_path_factory.mktemp("study"))
    for cell in list(study.cells.values())[:3]:
        complete(study, cell)
    return study


# ---------------------------------------------------------------- the frozen definition


def test_frozen_once(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    assert Study.open(tmp_path) == study
    assert Study.freeze(lines_plan(), tmp_path) == study
    assert (study.additions, list(study.cells)) == ((), list(lines_plan().cells()))


CHANGED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a margin": ({"compare": {"control": "fedavg", "margin": 3.0}}, ["compare", '"margin": 2.0', '"margin": 3.0']),
    "no comparison": ({"compare": None}, ["compare", "null"]),
    "a target": ({"target": {"accuracy": 0.5}}, ["target", "null", "0.5"]),
    "a seed more": ({"seeds": [7, 8, 9]}, ["seeds", "[7, 8]", "[7, 8, 9]"]),
    "a seed less": ({"seeds": [7]}, ["seeds", "[7, 8]"]),
    "messages for real": ({"wire": True}, ["wire", "false", "true"]),
    "a level less": ({"methods": ["fedavg"]}, ["line-dg-fedreuse-s7 is gone"]),
    "another label": (
        {"tasks": [{"label": "lines", "task": "support:Line"}]},
        ["line-fedavg-s7 is gone", "and 1 more"],
    ),
    "other rounds": (
        {"base": LINES["base"] | {"rounds": 4}},
        ["rounds of cell line-fedavg-s7 was 3, is now 4"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_what_was_frozen_cannot_change(tmp_path, case):
    changes, words = CHANGED[case]
    study = Study.freeze(lines_plan(), tmp_path)
    before = (tmp_path / "study.yaml").read_bytes()
    with pytest.raises(RunError) as caught:
        Study.freeze(lines_plan(**changes), tmp_path)
    text = str(caught.value)
    assert not [word for word in (str(tmp_path), study.frozen, *words) if word not in text], text
    assert (tmp_path / "study.yaml").read_bytes() == before


def test_cells_may_be_added_and_that_is_written_down(tmp_path):
    first = Study.freeze(lines_plan(), tmp_path)
    more = lines_plan(methods=["dg-fedreuse", "fedprox", "fedavg"], description="with a third method")
    study = Study.freeze(more, tmp_path)
    assert study.frozen == first.frozen
    assert study.sha256 != first.sha256
    assert [addition.cells for addition in study.additions] == [("line-fedprox-s7", "line-fedprox-s8")]
    assert Study.open(tmp_path) == study
    # Only in another order, or with other words: nothing was added.
    again = Study.freeze(lines_plan(methods=["fedavg", "dg-fedreuse", "fedprox"]), tmp_path)
    assert again.additions == study.additions


def test_a_definition_changed_by_hand_is_noticed(tmp_path):
    Study.freeze(lines_plan(), tmp_path)
    path = tmp_path / "study.yaml"
    path.write_text(path.read_text().replace("margin: 2.0", "margin: 9.0"))
    with pytest.raises(RunError, match=r"study\.yaml: the definition was changed after it was frozen"):
        Study.open(tmp_path)
    path.write_text("- nothing")
    with pytest.raises(RunError, match=r"study\.yaml cannot be used"):
        Study.open(tmp_path)
    path.unlink()
    with pytest.raises(RunError, match=r"not a study folder: it has no study\.yaml"):
        Study.open(tmp_path)


def test_one_command_at_a_time(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    with study.exclusively(), pytest.raises(RunError, match="another command"), study.exclusively():
        pass
    with study.exclusively():  # free again
        pass


# ---------------------------------------------------------------- cells


def test_states_of_cells(finished):
    states = finished.states()
    assert [(state.kind, state.rounds) for state in states.values()] == [("complete", 3)] * 3 + [
        ("missing", 0)
    ]
    assert finished.strangers() == []


def test_a_run_made_by_hand_is_a_cell(tmp_path):
    """Whatever `output`, `data` and `sim` say; and a run that has only begun is part of a cell."""
    study = Study.freeze(lines_plan(), tmp_path)
    cell = study.cells["line-fedavg-s7"]
    place = {"output": study.path(cell), "data": Path("elsewhere")}
    by_hand = cell.config.model_copy(update=place)
    create_run(by_hand, make_task(by_hand), body="sim")
    assert study.states()[cell.id].kind == "part"


def test_another_run_in_a_cell_is_refused(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    cell = study.cells["line-fedavg-s7"]
    other = cell.config.model_copy(update={"output": study.path(cell), "rounds": 90})
    create_run(other, make_task(other), body="sim")
    with pytest.raises(
        RunError, match=r"line-fedavg-s7 holds another run.*rounds is 90 there, 3 in the study"
    ):
        study.states()


def test_messages_that_were_not_serialized_do_not_count(tmp_path):
    study = Study.freeze(lines_plan(wire=True), tmp_path)
    cell = study.cells["line-fedavg-s7"]
    dry = cell.config.model_copy(update={"output": study.path(cell)})
    create_run(dry, make_task(dry), body="sim")
    with pytest.raises(
        RunError, match="was run by `fedreuse sim`, the study's cells by `fedreuse sim --wire`"
    ):
        study.states()


def test_strangers_are_named(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    (tmp_path / "cells" / "line-fedavg-s9").mkdir(parents=True)
    assert study.strangers() == ["line-fedavg-s9"]


def test_failures_are_counted_and_the_last_is_the_reason(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    cell = study.cells["line-fedavg-s7"]
    assert study.record_failure(cell, "OSError", "first").attempt == 1
    assert study.record_failure(study.cells["line-fedavg-s8"], "OSError", "other").attempt == 1
    assert study.record_failure(cell, "TaskError", "second").attempt == 2
    state = study.states()[cell.id]
    assert state.kind == "failed"
    assert state.failure is not None
    assert (state.failure.type, state.failure.sentence, state.failure.attempt) == ("TaskError", "second", 2)
    assert len(study.failures()) == 3
    (tmp_path / "failures.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"failures\.jsonl is damaged"):
        study.states()


def test_a_complete_cell_has_failed_no_more(tmp_path):
    study = Study.freeze(lines_plan(), tmp_path)
    cell = study.cells["line-fedavg-s7"]
    study.record_failure(cell, "OSError", "no space")
    complete(study, cell)
    assert study.states()[cell.id].kind == "complete"


# ---------------------------------------------------------------- pairs


def copied(finished: Study, folder: Path) -> Study:
    """A study whose cells can be spoilt."""
    study = Study.freeze(finished.plan, folder)
    for cell in finished.cells.values():
        if finished.path(cell).exists():
            study.path(cell).mkdir(parents=True)
            for name in ("environment.json", "events.jsonl"):
                (study.path(cell) / name).write_bytes((finished.path(cell) / name).read_bytes())
    return study


SEED_7 = ("line-fedavg-s7", "line-dg-fedreuse-s7")


def test_methods_of_one_seed_share_cohorts(finished):
    assert unpaired(finished, list(finished.cells)[:3]) == []


def test_other_cohorts_are_noticed(finished, tmp_path):
    study = copied(finished, tmp_path)
    events = study.path(study.cells[SEED_7[1]]) / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    second = next(line for line in lines if line["type"] == "round_opened" and line["round"] == 2)
    second["cohort"] = [0, 1, 2] if second["cohort"] != [0, 1, 2] else [3, 4, 5]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (sentence,) = unpaired(study, SEED_7)
    assert sentence == "line-dg-fedreuse-s7 selects other clients than line-fedavg-s7 from round 2 on"


def test_another_partition_is_noticed(finished, tmp_path):
    study = copied(finished, tmp_path)
    for name, digest in zip(SEED_7, ("aa", "bb"), strict=True):
        path = study.path(study.cells[name]) / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"partition_sha256": digest}))
    (sentence,) = unpaired(study, SEED_7)
    assert sentence == "line-dg-fedreuse-s7 divides the examples otherwise than line-fedavg-s7"


def test_fewer_clients_a_round_are_another_design(tmp_path):
    """A control with other cohorts on purpose is not compared."""
    few = {"label": "few", "method": "fedavg", "clients.per_round": 2}
    study = Study.freeze(lines_plan(methods=["fedavg", few], seeds=[7]), tmp_path)
    for cell in study.cells.values():
        complete(study, cell)
    assert unpaired(study, study.cells) == []


def test_a_folder_without_events_is_refused(finished, tmp_path):
    study = copied(finished, tmp_path)
    (study.path(study.cells[SEED_7[0]]) / "events.jsonl").unlink()
    with pytest.raises(RunError, match=r"events\.jsonl is missing"):
        unpaired(study, SEED_7)
