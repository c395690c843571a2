"""The study file: which cells it makes, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedreuse.sim.config import ConfigError, load_config
from fedreuse.sim.study.plan import Level, StudyPlan, built_in, identity, load_plan, parse_plan

PLAN: dict[str, Any] = {
    "name": "two",
    "base": {"rounds": 4, "clients": {"total": 20}, "clients.per_round": 5},
    "methods": ["fedavg", {"label": "lazy", "method": "dg-fedreuse", "gate.quota": 0.1}],
    "tasks": ["digits", {"label": "half", "task": "digits", "task.train_limit": 700}],
    "seeds": [3, 1],
}


def plan(**changes: Any) -> StudyPlan:
    return parse_plan({key: value for key, value in (PLAN | changes).items() if value is not None}, "file")


def test_cells_are_the_product_of_the_factors_by_seed_first():
    assert list(plan().cells()) == [
        "digits-fedavg-s3",
        "digits-lazy-s3",
        "half-fedavg-s3",
        "half-lazy-s3",
        "digits-fedavg-s1",
        "digits-lazy-s1",
        "half-fedavg-s1",
        "half-lazy-s1",
    ]


def test_a_cell_is_configured_as_on_the_command_line():
    cell = plan().cells()["half-lazy-s1"]
    line = [
        "method=dg-fedreuse",
        "task=digits",
        "task.train_limit=700",
        "gate.quota=0.1",
        "seed=1",
        "rounds=4",
    ]
    assert cell.config == load_config(None, [*line, "clients.total=20", "clients.per_round=5"])
    assert cell.factors == {"task": "half", "method": "lazy"}
    assert (cell.seed, cell.group) == (1, ("half", "lazy"))


def test_a_level_stands_over_the_base():
    levels = ["fedavg", {"label": "long", "method": "fedavg", "rounds": 9}]
    cells = plan(methods=levels, tasks=["digits"], seeds=[1]).cells()
    assert [cell.config.rounds for cell in cells.values()] == [4, 9]


def test_partitions_and_overrides_name_a_cell_where_there_are_several():
    one = plan(partitions=["iid"], overrides=[{"label": "slow", "train.learning_rate": 0.01}]).cells()
    assert "digits-fedavg-s3" in one
    assert one["digits-fedavg-s3"].config.partition.kind == "iid"
    assert one["digits-fedavg-s3"].config.train.learning_rate == 0.01
    several = plan(
        partitions=["iid", {"label": "skewed", "partition": {"kind": "dirichlet", "alpha": 0.1}}],
        overrides=[
            {"label": "slow", "train.learning_rate": 0.01},
            {"label": "fast", "train": {"learning_rate": 0.1}},
        ],
    ).cells()
    assert len(several) == 2 * 2 * 2 * 2 * 2
    cell = several["half-skewed-fast-lazy-s1"]
    assert (cell.config.partition.alpha, cell.config.train.learning_rate) == (0.1, 0.1)
    assert cell.factors == {"task": "half", "partition": "skewed", "override": "fast", "method": "lazy"}


def test_a_label_is_made_of_the_name():
    made = plan(tasks=["medmnist:retinamnist"], methods=[{"method": "fedavg", "rounds": 2}])
    assert [level.label for level in (*made.tasks, *made.methods)] == ["medmnist-retinamnist", "fedavg"]
    assert made.methods[0] == Level(label="fedavg", method="fedavg", rounds=2)


def test_identity_leaves_out_where_and_how():
    lines = ["data=elsewhere", "output=run", "sim.workers=3"]
    assert identity(load_config(None, lines)) == identity(load_config())
    assert identity(load_config(None, ["wire.pack=false"])) != identity(load_config())


def test_a_plan_survives_being_written_down():
    first = plan(compare={"control": "fedavg"}, target={"of": "fedavg"}, partitions=["iid"])
    again = parse_plan(yaml.safe_load(yaml.safe_dump(first.model_dump(mode="json"))), "again")
    assert again == first
    assert again.cells() == first.cells()


FAST = {"label": "fast", "train.learning_rate": 0.1}
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an unknown key": ({"sedes": [1]}, ["sedes: unknown key", "seeds"]),
    "no seeds": ({"seeds": []}, ["seeds", "at least 1"]),
    "a seed twice": ({"seeds": [1, 1]}, ["seed is listed twice"]),
    "no methods": ({"methods": None}, ["methods", "required"]),
    "methods that are no list": ({"methods": "fedavg"}, ["methods", "list of names"]),
    "a level without a method": ({"methods": [{"label": "a", "rounds": 3}]}, ["method 'a'", "does not say method"]),
    "an unknown method": ({"methods": ["fedsgd"]}, ["cell digits-fedsgd-s3", "fedsgd", "dg-fedreuse"]),
    "an unknown key of a run": ({"base": {"train.rate": 1}}, ["cell digits-fedavg-s3", "train.rate", "learning_rate"]),
    "a value out of range": ({"base": {"rounds": 0}}, ["rounds", "got 0"]),
    "two levels of one name": ({"methods": ["fedavg", "fedavg"]}, ["two levels", "'fedavg'"]),
    "a label that is no name": ({"methods": [{"label": "a/b", "method": "fedavg"}]}, ["label", "a/b"]),
    "a level without a name": ({"overrides": [{"rounds": 3}]}, ["needs a label"]),
    "one key of two factors": (
        {"overrides": [FAST], "methods": [FAST | {"method": "fedavg"}]},
        ["train.learning_rate", "'override'", "'method'"],
    ),
    "a seed in the base": ({"base": {"seed": 1}}, ["seed", "`seeds`"]),
    "a folder in the base": ({"base": {"output": "x"}}, ["output", "study's folder"]),
    "a method in the base": ({"base": {"method": "fedavg"}}, ["method", "factor of its own"]),
    "a task in an override": ({"overrides": [{"label": "a", "task": "mnist"}]}, ["task.name", "factor of its own"]),
    "a control that is not there": ({"compare": {"control": "fedprox"}}, ["compare.control", "fedprox", "lazy"]),
    "a margin of nothing": ({"compare": {"control": "fedavg", "margin": 0}}, ["compare.margin", "greater than 0"]),
    "an unknown metric": ({"compare": {"control": "fedavg", "metric": "f1"}}, ["compare.metric", "test_accuracy"]),
    "no target": ({"target": {}}, ["target", "`of`", "`accuracy`"]),
    "two targets": ({"target": {"of": "fedavg", "accuracy": 0.9}}, ["target", "either"]),
    "names that run together": (
        {"tasks": [{"label": "a", "task": "digits"}, {"label": "a-b", "task": "digits"}],
         "methods": [{"label": "b-c", "method": "fedavg"}, {"label": "c", "method": "fedprox"}]},
        ["two cells", "a-b-c-s3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(case):
    changes, words = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        plan(**changes)
    text = str(caught.value)
    assert text.startswith("file: ")
    assert not [word for word in words if word not in text], text


def test_the_studies_that_come_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"dg-paper", "dg-paper-cifar10", "dg-paper-whole", "digits-smoke"} <= built_in().keys()
    for name in built_in():
        assert load_plan(name).name == name
    paper = load_plan("dg-paper")
    assert len(paper.cells()) == 4 * 3 * 5
    assert paper.wire
    # An independent spelling of one cell.
    line = [
        "method=topk-fedavg",
        "task=mnist",
        "task.train_limit=12000",
        "seed=101",
        "rounds=90",
        "sim.workers=1",
    ]
    assert identity(paper.cells()["mnist-12k-topk-fedavg-s101"].config) == identity(load_config(None, line))


def test_a_file_stands_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dg-paper").write_text(yaml.safe_dump(PLAN))
    assert load_plan("dg-paper").name == "two"
    with pytest.raises(ConfigError, match=r"nowhere: no such file.*digits-smoke"):
        load_plan("nowhere")
    Path("broken.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML"):
        load_plan("broken.yaml")
