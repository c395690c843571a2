"""The README's example is run as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedreuse.sim import cli
from fedreuse.sim.study.plan import parse_plan

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_your_own_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    arguments = re.search(r"`fedreuse launch (task=moons:Moons .*?)`", README, flags=re.S)
    assert arguments is not None
    (tmp_path / "moons.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["sim", "--json", "sim.workers=1", "output=run", *arguments[1].split()]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["rounds"] == 10
    assert summary["accuracy"]["test"] > 0.8  # chance is 0.5
    assert summary["reuse"]["reused"] > 0


def test_commands_of_the_readme_exist() -> None:
    shown = set(
        re.findall(r"fedreuse ([a-z-]+)", "\n".join(re.findall(r"```console\n(.*?)```", README, flags=re.S)))
    )
    help_text = CliRunner().invoke(cli.app, ["--help"]).output
    assert shown
    assert all(command in help_text for command in shown)


def test_the_study_file_of_the_readme_is_one():
    (text,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.S)
    plan = parse_plan(yaml.safe_load(text), "README.md")
    cells = plan.cells()
    assert len(cells) == 2 * 2 * 3 * 5
    skewed = cells["fashionmnist-lq-2-slow-decay-s505"].config
    assert (skewed.partition.kind, skewed.partition.labels, skewed.memory.decay) == ("lq", 2, 0.9)
