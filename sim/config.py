"""One typed configuration for every body: simulator, launcher, server and clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedreuse.client.settings import (
    ClientPlan,
    CompressorSettings,
    ObjectiveSettings,
    ProxySettings,
    TrainSettings,
)
from fedreuse.proto.faults import Fault
from fedreuse.server.aggregate import StepSettings
from fedreuse.server.gate import GateSettings
from fedreuse.server.memory import MemorySettings
from fedreuse.server.settings import FederationSettings, ServerSettings
from fedreuse.sim.partition.settings import PartitionSettings, short_form
from fedreuse.sim.recipes import RECIPES


class ConfigError(Exception):
    """A configuration that cannot be used; the text names the key and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSection(_Section):
    """name: one that `fedreuse tasks` lists, or your own module:attribute; options go to the task untouched."""

    name: str = Field("digits", min_length=1)
    model: str | None = Field(
        None, description="cnn, lenet5, resnet18, resnet18-gn or gru; null: the task's own"
    )
    train_limit: int | None = Field(None, ge=2, description="stratified subset of the training data")
    buffers: str = Field(
        "dense", pattern="^(dense|paper)$", description="float buffers: dense, or as parameters"
    )
    options: dict[str, Any] = {}


class ClientsSection(_Section):
    total: int = Field(50, ge=1, le=1_000_000_000, description="N")
    per_round: int = Field(10, ge=1, description="m, selected each round")
    processes: int = Field(4, ge=1, le=1024, description="client processes that `launch` starts")


class EvaluationSection(_Section):
    every: int = Field(5, ge=1, description="validation in round 1, every so many rounds, and the last")
    patience: int | None = Field(None, ge=1, description="early stopping, in evaluations; off by default")
    archival: bool = Field(
        False,
        description="look at the test set each time, as published curves did; never evidence in a study",
    )
    test: bool = Field(
        True,
        description="look at the test set once, at the end; false: never, as in a search over validation",
    )

    @model_validator(mode="after")
    def _open_or_closed(self) -> EvaluationSection:
        if self.archival and not self.test:
            raise ValueError(
                "archival looks at the test set, which test=false leaves closed; choose one of them"
            )
        return self


class SimSection(_Section):
    """How virtual clients compute; a run's summary says what was taken.

    serial and processes give the same bits, vectorised the same within float tolerance.
    """

    mode: Literal["auto", "serial", "processes", "vectorised"] = Field(
        "auto", description="auto: processes, or serial with one worker and on a GPU"
    )
    workers: int | None = Field(None, ge=1, le=256, description="processes; default: one per core")
    together: int = Field(16, ge=1, le=4096, description="clients that train at once in mode vectorised")


class WireSection(_Section):
    """How payloads become bytes; nothing is ever lost, and nothing modelled changes."""

    pack: bool = Field(True, description="without redundancy; false: the forms of the byte model as they are")
    history: int = Field(
        16,
        ge=0,
        le=10_000,
        description="past models the server keeps, to send what changed since; 0: always whole models",
    )


class RunConfig(_Section):
    """Everything that defines a run. Sections hold one part each; defaults are the DG paper's protocol."""

    method: str = "dg-fedreuse"
    task: TaskSection = TaskSection()
    data: Path = Path("data")
    seed: int = Field(101, ge=0, lt=1 << 63)
    rounds: int = Field(90, ge=1, le=1_000_000)
    output: Path | None = None
    clients: ClientsSection = ClientsSection()
    partition: PartitionSettings = PartitionSettings()
    train: TrainSettings = TrainSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    compressor: CompressorSettings = CompressorSettings()
    proxy: ProxySettings = ProxySettings()
    gate: GateSettings = GateSettings()
    memory: MemorySettings = MemorySettings()
    step: StepSettings = StepSettings()
    wire: WireSection = WireSection()
    evaluation: EvaluationSection = EvaluationSection()
    server: ServerSettings = ServerSettings()
    sim: SimSection = SimSection()
    faults: tuple[Fault, ...] = ()

    @field_validator("output", "data", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        """A folder may be called 2026."""
        return str(value) if isinstance(value, int | float) else value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in RECIPES:
            raise ValueError(f"unknown method; known: {', '.join(RECIPES)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        for fault in self.faults:
            if fault.client >= self.clients.total or fault.round > self.rounds:
                raise ValueError(
                    f"fault of client {fault.client} in round {fault.round} lies outside the run"
                )
        self._keep_the_name_honest()
        self.federation()
        return self

    def _keep_the_name_honest(self) -> None:
        """A run called by a method's name is made of that method's parts; constants may differ."""
        if self.method == "custom":
            return
        for part, neutral in (
            ("objective", "plain"),
            ("compressor", "dense"),
            ("gate", "none"),
            ("memory", "none"),
        ):
            due = RECIPES[self.method].get(part, {}).get("kind", neutral)
            kind = getattr(self, part).kind
            if kind != due:
                raise ValueError(
                    f"method {self.method!r} has {part}.kind {due!r}, not {kind!r}; leave {part}.kind out, or set "
                    "method to custom for your own combination"
                )

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        task = self.task.name.replace(":", "-").replace("/", "-")
        stamp = "-archival" if self.evaluation.archival else ""
        return self.output or Path("runs") / f"{self.method}-{task}-seed{self.seed}{stamp}"

    def federation(self) -> FederationSettings:
        return FederationSettings(
            seed=self.seed,
            rounds=self.rounds,
            total=self.clients.total,
            per_round=self.clients.per_round,
            minimum=self.server.minimum,
            keep_ratio=self.compressor.keep_ratio,
            pack=self.wire.pack,
            history=self.wire.history,
            gate=self.gate,
            memory=self.memory,
            step=self.step,
            evaluate_every=self.evaluation.every,
            patience=self.evaluation.patience,
            archival=self.evaluation.archival,
        )

    def plan(self) -> ClientPlan:
        return ClientPlan(
            seed=self.seed,
            train=self.train,
            objective=self.objective,
            compressor=self.compressor,
            proxy=self.proxy if self.gate.kind == "score" else None,
            pack=self.wire.pack,
        )

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


# ---------------------------------------------------------------- building one


def load_config(file: Path | None = None, overrides: list[str] | None = None) -> RunConfig:
    """Defaults, then the method's recipe, then the file, then `key=value` overrides. Raises ConfigError."""
    given = _expand(read_mapping(file) if file else {})
    for text in overrides or []:
        given = merge(given, _override(text))
    return resolve(given)


def resolve(given: dict[str, Any]) -> RunConfig:
    """Defaults, then the method's recipe, then what is given, by section. Raises ConfigError."""
    recipe = RECIPES.get(str(given.get("method", RunConfig.model_fields["method"].default)), {})
    try:
        return RunConfig.model_validate(merge(recipe, given))
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from None


def read_mapping(file: Path) -> dict[str, Any]:
    """Keys and values of a YAML file. Raises ConfigError."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold keys and values, not {type(content).__name__}")
    return content


def _override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override; write key=value, e.g. clients.total=20")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    if isinstance(parsed, str):
        parsed = _number(parsed)
    return nest(key, parsed)


def nest(key: str, value: Any) -> dict[str, Any]:
    """`train.learning_rate` and 0.1 as `{train: {learning_rate: 0.1}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return _expand(value)


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-3 as a string; people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _expand(given: dict[str, Any]) -> dict[str, Any]:
    """`task: mnist` is short for `task: {name: mnist}`, `partition: lq-2` for `{kind: lq, labels: 2}`."""
    short = {"task": lambda text: {"name": text}, "partition": short_form}
    return given | {key: read(given[key]) for key, read in short.items() if isinstance(given.get(key), str)}


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, section by section."""
    result = dict(base)
    for key, value in top.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """A line for each key that `model` refused: which, why, what is allowed."""
    return "\n".join(_sentence(item, model) for item in error.errors())


def _sentence(item: Any, model: type[BaseModel]) -> str:
    where = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_siblings(item['loc'], model)}"
    message = item["msg"].removeprefix("Value error, ")
    got = f", got {item['input']!r}" if where and not isinstance(item["input"], dict) else ""
    return f"{where or 'configuration'}: {message}{got}"


def _siblings(loc: tuple[Any, ...], model: Any) -> str:
    for part in loc[:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    known = getattr(model, "model_fields", None)
    return f"; known here: {', '.join(known)}" if known else ""
