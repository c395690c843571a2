"""Archival evaluation: test curves as published ones, and a stamp on everything that could pass for evidence."""

import json
from pathlib import Path

import pytest
from support import completed, small_config, table
from test_compare import rendered

from fedreuse.sim.compare import compare, to_json
from fedreuse.sim.config import load_config
from fedreuse.sim.report.page import render


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archival")
    config = small_config(folder / "run", "rounds=4", "evaluation.archival=true", "evaluation.every=2")
    return completed(config, wire=True)


def test_test_accuracies_stand_in_the_rounds_in_which_something_was_evaluated(folder: Path) -> None:
    rows = table(folder)
    assert [bool(row["test_accuracy"]) for row in rows] == [True, True, False, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert float(rows[-1]["test_accuracy"]) == summary["test"]["accuracy"]


def test_the_model_is_that_of_the_same_run_without_looking(folder: Path, tmp_path: Path) -> None:
    other = completed(small_config(tmp_path / "run", "rounds=4", "evaluation.every=2"), wire=True)
    assert (other / "bytes.csv").read_bytes() == (folder / "bytes.csv").read_bytes()
    assert "test_accuracy" not in table(other)[0]
    stamped = [
        file.name for file in other.iterdir() if file.is_file() and b"archival: true" in file.read_bytes()
    ]
    assert stamped == []


def test_everything_it_writes_is_stamped(folder: Path) -> None:
    assert {row["evaluation"] for row in table(folder)} == {"archival"}
    for name in ("summary.json", "test.json"):
        assert json.loads((folder / name).read_text())["archival"] is True
    assert json.loads((folder / "test-opened.jsonl").read_text())["archival"] is True
    assert json.loads((folder / "environment.json").read_text())["evaluation"] == "archival"
    assert "archival: true" in (folder / "config.yaml").read_text()
    assert b"archival, after 4 rounds" in (folder / "model.safetensors").read_bytes()


def test_comparisons_begin_with_a_warning(folder: Path) -> None:
    sentence = "run: archival, its test set was looked at after every evaluation: no evidence for anything"
    assert compare([folder]).warnings == (sentence,)
    assert to_json(compare([folder]))["warnings"] == [sentence]
    text = " ".join(rendered(folder).split())
    assert "Warning: run: archival" in text
    assert "run: archival, dg-fedreuse on support:Line" in text


def test_reports_say_it_in_their_title_and_beside_the_figure(folder: Path) -> None:
    text = render([folder])
    assert "<title>fedreuse: run (archival)</title>" in text
    assert "archival: looked at often" in text
    assert "opened once" not in text


def test_the_folder_without_a_name_of_its_own_says_it() -> None:
    config = load_config(None, ["evaluation.archival=true"])
    assert config.folder == Path("runs/dg-fedreuse-digits-seed101-archival")
