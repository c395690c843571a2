"""Configuration: the DG paper's protocol by default, recipe < file < override, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from fedreuse.sim.config import ConfigError, RunConfig, load_config
from fedreuse.sim.recipes import RECIPES, SUMMARIES


def config(*overrides: str, file: Path | None = None) -> RunConfig:
    return load_config(file, list(overrides))


def error(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, list(overrides))
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


# Defaults


def test_defaults_are_the_dg_paper_s_protocol() -> None:
    default = config()
    assert default.method == "dg-fedreuse"
    # Section 5.2: N = 50, m = 10, Dirichlet 0.5, E = 3, B = 128, SGD 0.05, momentum 0.9, weight decay 1e-4.
    assert (default.clients.total, default.clients.per_round) == (50, 10)
    assert (default.partition.kind, default.partition.alpha) == ("dirichlet", 0.5)
    train = default.train
    assert (train.local_epochs, train.batch_size) == (3, 128)
    assert (train.learning_rate, train.momentum, train.weight_decay) == (0.05, 0.9, 1e-4)
    assert default.step.learning_rate == 1.0
    # Evaluation at round 1 and every 5.
    assert default.evaluation.every == 5
    # The gate and the memory: tau_0, tau_min, gamma, q_min, S_max, rho.
    gate, memory = default.gate, default.memory
    assert (gate.kind, gate.tau_start, gate.tau_min, gate.gamma) == ("score", 0.9116988, 0.8134931, 0.01)
    assert (gate.quota, gate.score_all) == (0.30, False)
    assert (memory.kind, memory.max_age, memory.decay) == ("reuse", 4, 0.7279635)
    # mu, r, and the proxy: at most 5 batches of 64, signature 0.9 old + 0.1 new.
    assert (default.objective.kind, default.objective.mu) == ("proximal", 3.4156e-4)
    assert (default.compressor.kind, default.compressor.ratio) == ("topk", 0.2)
    proxy = default.proxy
    assert (proxy.batches, proxy.batch_size, proxy.keep) == (5, 64, 0.9)
    assert proxy.head == ("classifier", "fc")


# Recipes: objective, compressor, gate, memory

PARTS = {
    "fedavg": ("plain", 0.0, 1.0, "none", "none"),
    "fedprox": ("proximal", 5e-4, 1.0, "none", "none"),
    "topk-fedavg": ("plain", 0.0, 0.2, "none", "none"),
    "topk-fedprox": ("proximal", 5e-4, 0.2, "none", "none"),
    "dg-fedreuse": ("proximal", 3.4156e-4, 0.2, "score", "reuse"),
    "reuse-only": ("proximal", 3.4156e-4, 1.0, "score", "reuse"),
    "age-only": ("proximal", 3.4156e-4, 0.2, "age", "reuse"),
    "custom": ("plain", 0.0, 1.0, "none", "none"),
}


@pytest.mark.parametrize("method", PARTS)
def test_a_method_is_its_parts(method: str) -> None:
    made = config(f"method={method}")
    parts = (
        made.objective.kind,
        made.objective.mu,
        made.compressor.keep_ratio,
        made.gate.kind,
        made.memory.kind,
    )
    assert parts == PARTS[method]
    # Clients are told to make signatures only where somebody scores them.
    assert (made.plan().proxy is not None) == (made.gate.kind == "score")


def test_every_recipe_is_listed_here_and_described() -> None:
    assert set(PARTS) == set(RECIPES) == set(SUMMARIES)


def test_custom_is_any_combination_of_parts() -> None:
    free = config("method=custom", "memory.kind=reuse", "gate.kind=age", "gate.quota=0.5")
    assert (free.gate.kind, free.gate.quota, free.memory.kind) == ("age", 0.5, "reuse")
    assert free.compressor.keep_ratio == 1.0


@pytest.mark.parametrize(
    ("method", "part", "due"),
    [
        ("fedavg", "objective.kind=proximal", "plain"),
        ("topk-fedavg", "compressor.kind=dense", "topk"),
        ("fedprox", "memory.kind=reuse", "none"),
        ("dg-fedreuse", "gate.kind=age", "score"),
    ],
)
def test_a_method_s_name_stays_honest(method: str, part: str, due: str) -> None:
    key, _, kind = part.partition("=")
    text = error(f"method={method}", part)
    assert f"method {method!r} has {key} {due!r}, not {kind!r}" in text
    assert "set method to custom" in text
    # Constants are free.
    assert config(f"method={method}", "objective.mu=0.125", "gate.quota=0.5").gate.quota == 0.5


def test_server_and_clients_get_the_same_numbers() -> None:
    made = config(
        "seed=9", "clients.total=20", "clients.per_round=4", "compressor.ratio=0.5", "server.minimum=2"
    )
    server, clients = made.federation(), made.plan()
    assert (server.seed, server.total, server.per_round, server.minimum) == (9, 20, 4, 2)
    assert clients.seed == 9
    assert server.keep_ratio == clients.compressor.keep_ratio == 0.5


# Where a value comes from


def test_recipe_then_file_then_override(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "method: age-only\nobjective: {mu: 0.25}\ncompressor: {ratio: 0.5}\ntrain: {batch_size: 7}\n",
    )
    made = config("compressor.ratio=0.75", "train.local_epochs=2", file=file)
    assert made.gate.kind == "age"  # recipe
    assert (made.objective.kind, made.objective.mu) == ("proximal", 0.25)  # recipe, file
    assert made.compressor.ratio == 0.75  # override over file over recipe
    assert (made.train.batch_size, made.train.local_epochs, made.train.momentum) == (7, 2, 0.9)


def test_the_last_override_wins_and_a_method_override_changes_the_recipe(tmp_path: Path) -> None:
    file = written(tmp_path, "method: age-only\n")
    made = config("method=fedavg", "seed=1", "seed=2", file=file)
    assert (made.method, made.gate.kind, made.seed) == ("fedavg", "none", 2)


def test_task_is_short_for_its_name(tmp_path: Path) -> None:
    assert config("task=mnist").task.name == "mnist"
    assert config(file=written(tmp_path, "task: fashionmnist\n")).task.name == "fashionmnist"
    assert config("task=mypackage.tasks:Own").task.name == "mypackage.tasks:Own"


def test_a_task_override_keeps_the_rest_of_the_task_section(tmp_path: Path) -> None:
    file = written(tmp_path, "task: {name: digits, train_limit: 500, options: {width: 3}}\n")
    made = config("task=mnist", "task.options.depth=2", file=file).task
    assert (made.name, made.train_limit, made.options) == ("mnist", 500, {"width": 3, "depth": 2})
    # And the other way round.
    made = config("task.train_limit=40", file=written(tmp_path, "task: mnist\n")).task
    assert (made.name, made.train_limit) == ("mnist", 40)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1E-3", 0.001), ("1.5e-3", 0.0015), ("5", 5.0), ("0.25", 0.25)]
)
def test_numbers_in_overrides_are_numbers(text: str, value: float) -> None:
    # YAML 1.1 reads 1e-3, without a point, as a string.
    assert config(f"train.learning_rate={text}").train.learning_rate == value
    assert config(f"task.options.x={text}").task.options["x"] == value


def test_numbers_in_files_too(tmp_path: Path) -> None:
    file = written(tmp_path, "train: {learning_rate: 1e-3, weight_decay: 5e-5}\n")
    made = config(file=file).train
    assert (made.learning_rate, made.weight_decay) == (0.001, 5e-5)


def test_overrides_hold_any_yaml() -> None:
    made = config(
        "faults=[{round: 2, client: 1, kind: wipe, back: 4}]",
        "proxy.head=[head, out]",
        "evaluation.patience=null",
        "train.amp=yes",
        "task.options.note=a=b",
    )
    assert [(f.round, f.client, f.kind, f.back) for f in made.faults] == [(2, 1, "wipe", 4)]
    assert made.proxy.head == ("head", "out")
    assert made.evaluation.patience is None
    assert made.train.amp is True
    assert made.task.options == {"note": "a=b"}


# What cannot be


def test_an_unknown_key_is_named_with_its_siblings() -> None:
    text = error("train.lr=0.1")
    assert text.startswith("train.lr: unknown key")
    assert "learning_rate" in text
    text = error("trian.batch_size=3")
    assert text.startswith("trian: unknown key")
    assert "train, objective" in text


IMPOSSIBLE = [
    ("method=fedsgd", "method", "unknown method; known: fedavg, fedprox"),
    ("seed=-1", "seed", "greater than or equal to 0, got -1"),
    ("rounds=0", "rounds", "greater than or equal to 1, got 0"),
    ("rounds=many", "rounds", "valid integer"),
    ("clients.total=0", "clients.total", "greater than or equal to 1, got 0"),
    ("train.momentum=1", "train.momentum", "less than 1, got 1"),
    ("train.learning_rate=0", "train.learning_rate", "greater than 0, got 0"),
    ("train.learning_rate=.inf", "train.learning_rate", "finite number, got inf"),
    ("train.memory_format=sparse", "train.memory_format", "'contiguous' or 'channels_last', got 'sparse'"),
    ("compressor.ratio=1.01", "compressor.ratio", "less than or equal to 1, got 1.01"),
    ("compressor.kind=stc", "compressor.kind", "'dense' or 'topk', got 'stc'"),
    ("gate.kind=random", "gate.kind", "'none', 'score' or 'age', got 'random'"),
    ("gate.quota=1.5", "gate.quota", "less than or equal to 1, got 1.5"),
    ("memory.max_age=0", "memory.max_age", "greater than or equal to 1, got 0"),
    ("memory.decay=0", "memory.decay", "greater than 0, got 0"),
    ("partition.alpha=0", "partition.alpha", "greater than 0, got 0"),
    ("task.train_limit=1", "task.train_limit", "greater than or equal to 2, got 1"),
    ("task.buffers=sparse", "task.buffers", "dense|paper"),
    ("proxy.head=[]", "proxy.head", "at least 1 item"),
    ("evaluation.every=0", "evaluation.every", "greater than or equal to 1, got 0"),
    ("sim.workers=0", "sim.workers", "greater than or equal to 1, got 0"),
    ("server.port=70000", "server.port", "less than or equal to 65535, got 70000"),
    ("gate=score", "gate", "dictionary"),
    ("faults=[{round: 0, client: 1}]", "faults.0.round", "greater than or equal to 1, got 0"),
    ("faults=[{round: 1, client: 1, kind: flood}]", "faults.0.kind", "'wipe'"),
    ("faults=[{round: 3, client: 1, back: 3}]", "faults.0", "later than round"),
]


@pytest.mark.parametrize(("override", "key", "allowed"), IMPOSSIBLE, ids=[case[0] for case in IMPOSSIBLE])
def test_an_impossible_value_names_its_key_and_what_is_allowed(override: str, key: str, allowed: str) -> None:
    text = error(override)
    assert text.startswith(f"{key}: ")
    assert allowed in text
    assert "\n" not in text


def test_all_errors_come_at_once() -> None:
    lines = error("rounds=0", "train.momentum=2", "train.lr=1").splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["rounds", "train.lr", "train.momentum"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("clients.total=5", "clients.per_round=6"), "6 clients per round of 5 in total"),
        (("method=custom", "gate.kind=score"), "memory.kind must not be 'none'"),
        (("faults=[{round: 91, client: 0}]",), "fault of client 0 in round 91 lies outside the run"),
        (("faults=[{round: 1, client: 50}]",), "fault of client 50 in round 1 lies outside the run"),
    ],
)
def test_values_that_contradict_each_other(overrides: tuple[str, ...], text: str) -> None:
    assert text in error(*overrides)


@pytest.mark.parametrize("text", ["rounds", "=3", ""])
def test_an_override_without_key_or_value(text: str) -> None:
    assert "write key=value" in error(text)


# Files


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    for text in ("", "# nothing yet\n"):
        assert config(file=written(tmp_path, text)) == config()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    assert error(file=path) == f"{path}: No such file or directory"


@pytest.mark.parametrize("text", ["a: [1, 2\n", "a: b: c\n", "\x00"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    assert error(file=path).startswith(f"{path} is not YAML")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seed: \xff\xfe\n")
    assert error(file=path).startswith(f"{path} is not YAML")


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "list"), ("rounds\n", "str"), ("3\n", "int")])
def test_a_file_without_keys(tmp_path: Path, text: str, kind: str) -> None:
    path = written(tmp_path, text)
    assert error(file=path) == f"{path} must hold keys and values, not {kind}"


# The resolved configuration


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested mappings, by its dotted path."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, item in value.items() for k, v in leaves(item, f"{path}.{key}".lstrip(".")).items()}


@pytest.mark.parametrize("method", PARTS)
def test_the_resolved_configuration_is_written_and_read_back(method: str) -> None:
    made = config(
        f"method={method}",
        "task={name: digits, options: {deep: {list: [1, 2.5, text, null]}}}",
        "faults=[{round: 2, client: 1, kind: stall}]",
        "output=some/folder",
        "train.learning_rate=1e-3",
    )
    text = made.to_yaml()
    assert RunConfig.model_validate(yaml.safe_load(text)) == made
    # As the only file it means the same again: nothing is left to the recipe.
    assert leaves(yaml.safe_load(text))["train.learning_rate"] == 0.001


def test_the_resolved_configuration_says_everything() -> None:
    def fields(model: type[BaseModel], path: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            found |= fields(field.annotation, f"{path}{name}.") if section else {path + name}
        return found

    assert fields(RunConfig) - {"task.options"} <= leaves(yaml.safe_load(config().to_yaml())).keys()


def test_a_run_goes_where_its_name_says() -> None:
    assert config().folder == Path("runs/dg-fedreuse-digits-seed101")
    assert config("task=my.tasks:Own", "seed=3").folder == Path("runs/dg-fedreuse-my.tasks-Own-seed3")
    assert config("output=elsewhere").folder == Path("elsewhere")


def test_a_configuration_cannot_be_changed() -> None:
    made = config()
    with pytest.raises(ValueError, match="frozen"):
        made.train.batch_size = 3  # type: ignore[misc]
