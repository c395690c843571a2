"""A run with `evaluation.test=false` never asks for the test set, says so everywhere, and is no evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
from studies import lines_plan
from support import Line, completed, final_state, small_config

from fedreuse.sim.compare import compare
from fedreuse.sim.config import ConfigError, load_config
from fedreuse.sim.folder import read_config
from fedreuse.sim.report.page import render
from fedreuse.sim.simulate import simulate

CLOSED = "evaluation.test=false leaves the test set closed"


class Sealed(Line):
    """As `Line`, but whoever asks for the test set has made a mistake."""

    def test(self) -> NoReturn:
        raise AssertionError("the test set was asked for")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("closed") / "run"
    return completed(small_config(place, "rounds=2", "evaluation.test=false", task="test_closed_test:Sealed"))


def test_the_task_is_never_asked(folder: Path) -> None:
    assert not (folder / "test.json").exists()
    assert not (folder / "test-opened.jsonl").exists()
    simulate(folder, read_config(folder))  # nor when a finished run is gone on with


def test_by_default_it_is_asked(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was asked for"):
        completed(small_config(tmp_path / "run", "rounds=2", task="test_closed_test:Sealed"))


def test_the_model_is_that_of_the_open_run(folder: Path, tmp_path: Path) -> None:
    assert final_state(completed(small_config(tmp_path / "run", "rounds=2"))) == final_state(folder)


def test_the_reason_stands_where_the_figures_would(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["test"], summary["fairness"]) == ({"absent": CLOSED}, {"absent": CLOSED})
    assert summary["accuracy"]["test"] is None
    assert 0 < summary["accuracy"]["validation"] <= 1
    assert not read_config(folder).evaluation.test
    assert "  test: false\n" in (folder / "config.yaml").read_text()
    sentence = "run: its test set was left closed (evaluation.test=false), as in a search over validation"
    assert sentence in compare([folder]).notes
    assert "validation only, test set left closed" in render([folder])


def test_no_study_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"cell line-fedavg-s7: evaluation\.test=false .* no evidence"):
        lines_plan(base=dict(lines_plan().base) | {"evaluation.test": False})


def test_archival_and_closed_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="evaluation: archival looks at the test set, which test=false"):
        load_config(None, ["evaluation.archival=true", "evaluation.test=false"])
