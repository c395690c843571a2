"""The 2-D sets of MedMNIST by name, `medmnist:retinamnist`: small medical images (Yang et al., 2023)."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.tasks.download import DataSet, Origin, fetch
from fedreuse.sim.tasks.files import md5_of
from fedreuse.sim.tasks.images import ImageTask
from fedreuse.sim.tasks.npz_files import read

SIZES = (28, 64, 128, 224)
AGAIN = "delete it and fetch it again, or name another folder with --data FOLDER"


@dataclass(frozen=True)
class Info:
    """A set as the medmnist package describes it. samples: numbers of images by part; colour: of three channels."""

    name: str
    url: str
    md5: str
    size: int
    colour: bool
    classes: int
    kind: str
    samples: Mapping[str, int]
    licence: str

    @property
    def file(self) -> str:
        return f"{self.name}.npz" if self.size == SIZES[0] else f"{self.name}_{self.size}.npz"

    def data_set(self) -> DataSet:
        """What is fetched if it is not there."""
        origins = partial(_origins, self.url, self.md5)
        return DataSet(f"MedMNIST-{self.name}", f"MedMNIST, {self.licence}", "", (self.file,), origins)


class MedMnist(ImageTask):
    """A 2-D set of MedMNIST with its own validation images. Option `size`: pixels a side, 28 unless it says more.

    Of chestmnist an image has any of 14 labels at once: a yes or no for each is learnt, see `ImageTask`. The grades of
    retinamnist are learnt as classes, as MedMNIST does.
    """

    argument = "NAME"
    own_options = ("size",)

    def __init__(self, context: TaskContext) -> None:
        info = find(context.argument, context.options.get("size", SIZES[0]))
        path = context.data.absolute() / info.file
        if not path.exists():
            fetch(info.data_set(), context.data.absolute())
        train, validation, test, _ = read(
            path, AGAIN, partial(_verify, path, info.md5), f"medmnist-{path.stem}"
        )
        super().__init__(context, train, test, info.classes, validation)


def find(name: str, size: object) -> Info:
    """The set called `name`, its images `size` pixels a side. Raises TaskError with what there is."""
    flat = flat_sets()
    if name not in flat:
        what = "is a set of volumes; of images there are" if name in known_sets() else "is unknown; there are"
        raise TaskError(f"medmnist:{name} {what} {', '.join(flat)}")
    about = known_sets()[name]
    sizes = [known for known in SIZES if known == SIZES[0] or f"url_{known}" in about]
    if size not in sizes or isinstance(size, bool):
        raise TaskError(
            f"task.options.size is {size!r}; medmnist:{name} comes in {', '.join(map(str, sizes))}"
        )
    suffix = "" if size == SIZES[0] else f"_{size}"
    return Info(
        name=name,
        url=about[f"url{suffix}"],
        md5=about[f"MD5{suffix}"],
        size=int(str(size)),
        colour=about["n_channels"] == 3,
        classes=len(about["label"]),
        kind=about["task"],
        samples=about["n_samples"],
        licence=about["license"],
    )


def flat_sets() -> list[str]:
    """The names of the sets of images; the others are of volumes."""
    return [name for name, about in known_sets().items() if not about["python_class"].endswith("3D")]


@cache
def known_sets() -> dict[str, dict[str, Any]]:
    """What the medmnist package knows of its sets: its table INFO, read from its source.

    Importing the package takes seconds and makes a folder in the user's home; the table is a plain literal.
    """
    package = find_spec("medmnist")
    if package is None or not package.submodule_search_locations:
        raise TaskError("MedMNIST's sets need the package medmnist: pip install medmnist")
    source = Path(package.submodule_search_locations[0], "info.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "INFO":
            return dict(ast.literal_eval(statement.value))
    raise TaskError("this version of the package medmnist has no table INFO; version 3.0 has one")


def _verify(path: Path, due: str) -> None:
    found = md5_of(path)
    if found != due:
        raise TaskError(
            f"{path} has MD5 {found}, not {due}, MedMNIST's own: {AGAIN}; to use the file as it is, name it "
            f"npz:{path.name}"
        )


def _origins(url: str, md5: str) -> list[Origin]:
    return [Origin([url], md5)]
