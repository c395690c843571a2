"""The study file: which runs make up a study, and what will be compared in it.

A study is the product of its factors: tasks x partitions x overrides x methods x seeds. Each value of a factor is a
*level*: a label and the configuration keys it sets. The study's own keys are checked here, those of the runs by the
run configuration itself, so that a wrong key is refused with the same words as on the command line.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedreuse.sim.config import ConfigError, RunConfig, explain, merge, nest, read_mapping, resolve

FACTORS = ("task", "partition", "override", "method")
"""In the order in which their labels make a cell's name; the seed comes last."""

_LABEL = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_DUE = {"task": "task.name", "method": "method"}
_ELSEWHERE = {
    "seed": "seeds are listed under `seeds`",
    "output": "cells lie in the study's folder",
    "data": "where data lies is said with --data",
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Level(BaseModel):
    """One value of a factor: its label, and the configuration keys it sets, nested or dotted."""

    model_config = ConfigDict(extra="allow", frozen=True)

    label: str = Field(pattern=f"^{_LABEL}$", description="names the level in cells and tables")

    @property
    def settings(self) -> dict[str, Any]:
        return self.model_extra or {}


def _levels(key: str) -> BeforeValidator:
    """`mnist` is short for `{label: mnist, task: mnist}`; a label may be left out where `key` gives one."""

    def read(values: Any) -> Any:
        if not isinstance(values, list | tuple):
            raise ValueError("write a list of names, or of {label: ..., key: value, ...}")
        return tuple(one(value) for value in values)

    def one(value: Any) -> Any:
        if isinstance(value, str):
            value = {key: value}
        if not isinstance(value, dict) or "label" in value:
            return value
        name = value.get(key, value.get(key.partition(".")[0]))
        if not isinstance(name, str):
            raise ValueError("a level that is more than a name needs a label")
        return {"label": re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-")} | value

    return BeforeValidator(read)


class Comparison(_Section):
    """What will be claimed, fixed before the first run (spec 9.4): each method against one control, paired by seed."""

    control: str = Field(description="label of the method that all others are compared with")
    metric: Literal["test_accuracy", "test_accuracy_macro", "validation_accuracy"] = "test_accuracy"
    margin: float = Field(
        1.0, gt=0, le=100, allow_inf_nan=False, description="of equivalence, in percentage points"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of the intervals; tests use 1 - confidence")
    retention: float = Field(0.98, gt=0, le=1, description="share of the control's metric to be retained")
    holm: bool = Field(True, description="correct for several data sets")


class Target(_Section):
    """A validation accuracy to be reached: a share of what the method `of` has at its end, or a figure."""

    of: str | None = None
    share: float = Field(0.95, gt=0, le=1)
    accuracy: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="after")
    def _one_of_them(self) -> Target:
        if (self.of is None) == (self.accuracy is None):
            raise ValueError("a target is either `of` a method's label (and a `share`), or an `accuracy`")
        return self


class StudyPlan(_Section):
    """A study file. Keys of runs under `base` hold for every cell; levels set theirs on top."""

    name: str = Field(pattern=f"^{_LABEL}$")
    description: str = ""
    base: dict[str, Any] = {}
    methods: Annotated[tuple[Level, ...], _levels("method")] = Field(min_length=1)
    tasks: Annotated[tuple[Level, ...], _levels("task")] = Field(min_length=1)
    partitions: Annotated[tuple[Level, ...], _levels("partition")] = ()
    overrides: Annotated[tuple[Level, ...], _levels("label")] = ()
    seeds: tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...] = Field(min_length=1)
    wire: bool = Field(False, description="serialize every message for real, in process")
    compare: Comparison | None = None
    target: Target | None = None

    @model_validator(mode="after")
    def _consistent(self) -> StudyPlan:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("a seed is listed twice")
        for factor, levels in self.factors.items():
            twice = [label for label, n in Counter(level.label for level in levels).items() if n > 1]
            if twice:
                raise ValueError(
                    f"two levels of factor {factor!r} are labelled {twice[0]!r}; give each its own label"
                )
        methods = [level.label for level in self.methods]
        for key, label in (
            ("compare.control", self.compare and self.compare.control),
            ("target.of", self.target and self.target.of),
        ):
            if label is not None and label not in methods:
                raise ValueError(
                    f"{key}: no method is labelled {label!r}; there are {', '.join(map(str, methods))}"
                )
        self._check_keys()
        return self

    def _check_keys(self) -> None:
        """Each key has one owner, so that the order of factors never decides."""
        set_by = {"base": set(leaves(nested(self.base)))}
        for factor, levels in self.factors.items():
            set_by[factor] = set()
            for level in levels:
                own = set(leaves(nested(level.settings)))
                if factor in _DUE and _DUE[factor] not in own:
                    raise ValueError(f"{factor} {level.label!r} does not say {_DUE[factor]}")
                set_by[factor] |= own
        for name, keys in set_by.items():
            for key in keys:
                if reason := _ELSEWHERE.get(key):
                    raise ValueError(f"{name} sets {key}; {reason}")
                if key in _DUE.values() and key != _DUE.get(name):
                    raise ValueError(f"{name} sets {key}; that is a factor of its own")
        for (first, keys), (second, others) in itertools.combinations(list(set_by.items())[1:], 2):
            if both := sorted(keys & others):
                raise ValueError(f"{both[0]} is set by factor {first!r} and by factor {second!r}")

    @property
    def factors(self) -> dict[str, tuple[Level, ...]]:
        """The levels of each factor that the file names, in the order of FACTORS."""
        found = dict(zip(FACTORS, (self.tasks, self.partitions, self.overrides, self.methods), strict=True))
        return {name: levels for name, levels in found.items() if levels}

    def cells(self) -> dict[str, Cell]:
        """All runs of the study by name: by seed first, then by task, partition, override, method.

        Raises ConfigError naming the cell whose configuration is refused.
        """
        cells: dict[str, Cell] = {}
        for seed, levels in itertools.product(self.seeds, self._combinations()):
            cell = self._cell(seed, levels)
            if cell.id in cells:
                raise ConfigError(f"two cells would be called {cell.id}; choose labels that differ more")
            cells[cell.id] = cell
        return cells

    def _combinations(self) -> Iterator[dict[str, Level]]:
        for levels in itertools.product(*self.factors.values()):
            yield dict(zip(self.factors, levels, strict=True))

    def _cell(self, seed: int, levels: dict[str, Level]) -> Cell:
        named = [
            level.label
            for factor, level in levels.items()
            if factor in ("task", "method") or len(self.factors[factor]) > 1
        ]
        name = "-".join([*named, f"s{seed}"])
        given = nested(self.base)
        for level in levels.values():
            given = merge(given, nested(level.settings))
        try:
            config = resolve(given | {"seed": seed})
        except ConfigError as error:
            raise ConfigError(f"cell {name}: {error}") from None
        if config.evaluation.archival:
            raise ConfigError(
                f"cell {name}: evaluation.archival looks at the test set again and again; such runs are no evidence, "
                "and no study takes them"
            )
        if not config.evaluation.test:
            raise ConfigError(
                f"cell {name}: evaluation.test=false leaves the test set closed; such runs belong to a search over "
                "validation and are no evidence, and no study takes them"
            )
        return Cell(name, {factor: level.label for factor, level in levels.items()}, seed, config)


@dataclass(frozen=True)
class Cell:
    """One run of a study. `factors` gives the label of each factor but the seed."""

    id: str
    factors: dict[str, str] = field(hash=False)
    seed: int
    config: RunConfig = field(hash=False)

    @property
    def group(self) -> tuple[str, ...]:
        """What its seeds have in common: the labels of all factors."""
        return tuple(self.factors.values())


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes two runs the same run: everything but where its files lie and how it was computed."""
    return config.model_dump(mode="json", exclude={"output", "data", "sim"})


def differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys in which two mappings differ, with both values; a value that is not there is None."""
    left, right = leaves(first), leaves(second)
    for key in dict.fromkeys((*left, *right)):
        if left.get(key) != right.get(key):
            yield key, left.get(key), right.get(key)


def load_plan(name: str) -> StudyPlan:
    """The plan in a file, or the one of that name that comes with the package. Raises ConfigError."""
    file = definition_file(name, "study", built_in())
    return parse_plan(read_mapping(file), str(file))


def definition_file(name: str, what: str, known: dict[str, Path]) -> Path:
    """A file of that name, or else the one among those that come with the package. Raises ConfigError."""
    file = Path(name)
    if file.is_file():
        return file
    if name not in known:
        raise ConfigError(
            f"{name}: no such file, nor a {what} of that name; there are {', '.join(sorted(known))}"
        )
    return known[name]


def parse_plan(content: dict[str, Any], where: str) -> StudyPlan:
    """A plan and all its cells checked; `where` begins the sentence of a ConfigError."""
    try:
        plan = StudyPlan.model_validate(content)
        plan.cells()
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, StudyPlan)}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return plan


def built_in(folder_name: str = "studies") -> dict[str, Path]:
    """The study files that come with the package, by name; other definitions in a folder of theirs."""
    folder = Path(str(resources.files("fedreuse.sim") / folder_name))
    return {file.stem: file for file in folder.glob("*.yaml")}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose keys may be dotted, by section."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found = merge(found, nest(str(key), value))
    return found


def leaves(settings: dict[str, Any], above: Sequence[str] = ()) -> dict[str, Any]:
    """Values that are no sections, by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        path = (*above, str(key))
        found |= leaves(value, path) if isinstance(value, dict) and value else {".".join(path): value}
    return found
