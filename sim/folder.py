"""What lies in a run folder, and how to read it; no torch needed."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from fedreuse.server.store import RunError
from fedreuse.sim.config import ConfigError, RunConfig

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
INITIAL = "initial.safetensors"
PARTITION = "partition.npz"
"""Who has which examples, where the task divides them by the configuration."""
FINAL = "model.safetensors"
TEST_RESULT = "test.json"
TEST_OPENED = "test-opened.jsonl"
SUMMARY = "summary.json"
ADDRESS = "server.json"
"""Where a running server listens."""


class LaunchError(Exception):
    """A process of the federation failed; the text says which, and shows the end of its log."""


def read_config(folder: Path) -> RunConfig:
    """The resolved configuration of a run. Raises RunError."""
    path = folder / CONFIG
    if not path.exists():
        raise RunError(f"{folder} is not a run folder: it has no {CONFIG}")
    _check_unchanged(folder, path)
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text()))
    except (ValueError, yaml.YAMLError, ConfigError) as error:
        raise RunError(f"{path} cannot be used: {error}") from None


def _check_unchanged(folder: Path, path: Path) -> None:
    """A run goes on with the configuration it began with. Raises RunError."""
    try:
        began = json.loads((folder / ENVIRONMENT).read_text())["config_sha256"]
    except (OSError, ValueError, KeyError):
        return  # whoever needs that file says what is wrong with it
    if hashlib.sha256(path.read_bytes()).hexdigest() != began:
        raise RunError(f"{path} was changed since the run began; restore it, or start another run with it")


def read_body(folder: Path) -> str:
    """The command that runs a run folder. Raises RunError."""
    try:
        return str(json.loads((folder / ENVIRONMENT).read_text())["body"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder / ENVIRONMENT} cannot be read: {error!r}") from None


@contextmanager
def damage(path: Path, advice: str) -> Iterator[None]:
    """Turns what a damaged file's content causes into a RunError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path} is damaged: {what}; {advice}") from None


def repair(folder: Path) -> str:
    return (
        f"if the run is going on, try again; if it was interrupted, `fedreuse resume {folder}` mends it; "
        "otherwise restore the file"
    )


def check_ending(path: Path) -> None:
    """A number that was cut off would pass for a smaller one."""
    with path.open("rb") as handle:
        handle.seek(-min(1, path.stat().st_size), os.SEEK_END)
        if handle.read() != b"\n":
            raise ValueError("the last line is not complete")
