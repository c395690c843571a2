"""The list of tasks: every built-in one, MedMNIST's sets of images one by one, and what is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedreuse.sim.catalogue import catalogue
from fedreuse.sim.cli import app

FLAT = ["path", "chest", "derma", "oct", "pneumonia", "retina", "breast", "blood", "tissue"]
FLAT += ["organa", "organc", "organs"]
"""Yang et al. (2023), Table 2."""


def test_every_task_is_listed(tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in catalogue(tmp_path)}
    others = [
        "digits",
        "mnist",
        "fashionmnist",
        "emnist-balanced",
        "cifar10",
        "cifar100",
        "npz:FILE",
        "shakespeare",
    ]
    assert set(entries) >= {*others, *(f"medmnist:{name}mnist" for name in FLAT)}
    assert sum(name.startswith("medmnist:") for name in entries) == 12
    for name in ("mnist", "emnist-balanced", "cifar100", "medmnist:pathmnist", "shakespeare"):
        assert entries[name].terms, name
        assert entries[name].at_hand is False, name
    assert (entries["mnist"].model, entries["cifar10"].model) == ("cnn", "resnet18")
    assert entries["shakespeare"].model == "gru"
    # 11.6 MB of four files, as on the data set's own page.
    assert entries["mnist"].size == 11_594_722


@pytest.mark.parametrize(
    ("file", "task"),
    [("retinamnist.npz", "medmnist:retinamnist"), ("tinyshakespeare.txt", "shakespeare")],
)
def test_what_is_at_hand_is_said(tmp_path: Path, file: str, task: str) -> None:
    np.savez(tmp_path / "retinamnist.npz") if file.endswith("npz") else (tmp_path / file).write_text("A:\nb")
    found = {entry.name for entry in catalogue(tmp_path) if entry.at_hand}
    assert found == {task, "digits"}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runner = CliRunner()
    told = runner.invoke(app, ["tasks", "--data", str(tmp_path), "--json"])
    assert told.exit_code == 0
    assert {"name", "model", "terms", "size", "at_hand"} < set(json.loads(told.stdout)[0])
    shown = runner.invoke(app, ["tasks", "--data", str(tmp_path)]).stdout
    assert "medmnist:retinamnist" in shown
    assert "12 MB to download" in shown
