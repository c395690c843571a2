"""Next-character prediction, a client a speaker of Shakespeare's plays (McMahan et al., 2017; LEAF, 2018)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from fedreuse.client.batches import WholeBatches
from fedreuse.client.errors import TaskError
from fedreuse.client.task import TaskContext
from fedreuse.sim.models import Characters, choose
from fedreuse.sim.partition import Indices
from fedreuse.sim.tasks.classification import Classification
from fedreuse.sim.tasks.division import divide
from fedreuse.sim.tasks.speakers import CONTEXT, WINDOW, Speaker, Starts, read

PLACES = ("shakespeare", "tinyshakespeare.txt")
"""Below the folder with data sets: LEAF's folder, a plain text."""
KINDS = ("natural", "iid", "quantity", "resample")
"""Kinds of partition that do not go by labels: these are characters, by which nobody would divide a text."""

logger = logging.getLogger(__name__)


class Options(BaseModel):
    """The task's own options; of a plain text, a stride of 1 gives LEAF's windows, and ten times the work of 10."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    source: str | None = Field(None, description="LEAF's folder or a plain text; from here or from --data")
    minimum_characters: int = Field(2000, ge=1, description="speakers with fewer are left out")
    stride: int | None = Field(
        None, ge=1, description="every so many windows; null: 10 of a text, 1 of LEAF's"
    )


class Windows(WholeBatches):
    """Windows of a text, by where they start. An item is a context (80,) and the character that follows, int64."""

    def __init__(self, characters: NDArray[np.uint8], starts: Starts) -> None:
        self._characters, self._starts = characters, starts

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batch(np.array([index]))
        return x[0], y[0]

    def batch(self, indices: NDArray[np.int64]) -> list[Tensor]:
        """Contexts (b, 80) and the characters that follow (b,)."""
        at = self._starts[indices][:, None] + np.arange(WINDOW)
        window = torch.from_numpy(self._characters[at].astype(np.int64))
        return [window[:, :CONTEXT], window[:, CONTEXT]]


class Shakespeare(Classification):
    """Which character follows 80 others; a client is a speaker, the largest ones take part.

    Options: see `Options`, and `train_limit`, `partition` (of kind natural; iid mixes the speakers) and `model` as for
    images. `speakers`: who takes part, by index of the client where the partition is natural. Validation and test
    windows are those of all that take part; `sim.tasks.speakers` says how texts are cut.
    Raises TaskError.
    """

    default_model: ClassVar[str] = "gru"
    terms: ClassVar[str] = "the plays are in the public domain; not downloaded"
    evaluation_batch = 500

    @staticmethod
    def at_hand(data: Path) -> bool:
        return any((data / place).exists() for place in PLACES)

    def __init__(self, context: TaskContext) -> None:
        options = _options(context)
        path = _source(context, options)
        found = read(path, options.stride or (1 if path.is_dir() else 10))
        self.seed, self.alphabet = context.seed, found.alphabet
        self.chosen = choose(
            context.options,
            self.default_model,
            Characters(CONTEXT),
            len(found.alphabet),
            tuple(Options.model_fields),
        )
        self.speakers = _largest(found.speakers, context.clients, options.minimum_characters, path)
        self._characters = found.characters
        train, self._train_owners = _gathered([speaker.train for speaker in self.speakers])
        self._validation, _ = _gathered([speaker.validation for speaker in self.speakers])
        self._test, test_owners = _gathered([speaker.test for speaker in self.speakers])
        self.division = divide(
            self._next(train),
            _natural(context),
            owners=self._train_owners,
            own_validation=True,
            test_labels=self._next(self._test),
            test_owners=test_owners,
        )
        self._train = train[self.division.used]

    def model(self) -> nn.Module:
        return self.chosen()

    def client_data(self, client: int) -> Windows:
        """The training windows of one client. Raises TaskError for an index out of range."""
        return Windows(self._characters, self._train[self.division.train(client)])

    def validation(self) -> Windows:
        return Windows(self._characters, self._validation)

    def test(self) -> Windows:
        return Windows(self._characters, self._test)

    def _next(self, starts: Starts) -> NDArray[np.uint8]:
        return self._characters[starts + CONTEXT]


def _options(context: TaskContext) -> Options:
    try:
        return Options.model_validate(dict(context.options))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TaskError(f"task.options.{where} is {first['input']!r}: {first['msg']}") from None


def _source(context: TaskContext, options: Options) -> Path:
    if options.source is not None:
        places = [Path(options.source).absolute(), (context.data / options.source).absolute()]
    else:
        places = [(context.data / name).absolute() for name in PLACES]
    for path in places:
        if path.exists():
            return path
    raise TaskError(
        f"shakespeare: there is no {' or '.join(map(str, places))}. It is not downloaded: put LEAF's folder (with "
        "train/*.json and test/*.json) or a plain text there, or name another folder with --data FOLDER"
    )


def _largest(found: list[Speaker], clients: int, least: int, path: Path) -> list[Speaker]:
    """The speakers with the most characters, of equally many the one that comes first by name."""
    fitting = [speaker for speaker in found if speaker.characters >= least and speaker.complete]
    if len(fitting) < clients:
        raise TaskError(
            f"{path}: {len(fitting)} of {len(found)} speakers have at least {least} characters and a window to train, "
            f"to validate and to test on, too few for {clients} clients: lower clients.total to {len(fitting)} or "
            "less, or task.options.minimum_characters"
        )
    taken = sorted(fitting, key=lambda speaker: (-speaker.characters, speaker.name))[:clients]
    logger.info(
        "%d of %d speakers take part, the largest first: %s",
        clients,
        len(found),
        ", ".join(f"{speaker.name} ({speaker.characters})" for speaker in taken),
    )
    return taken


def _gathered(parts: list[Starts]) -> tuple[Starts, Indices]:
    """All starts, and whose each is."""
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _natural(context: TaskContext) -> TaskContext:
    """The context, if speakers can be divided so."""
    settings: Any = context.options.get("partition")
    kind = settings.get("kind") if isinstance(settings, dict) else getattr(settings, "kind", None)
    if kind not in KINDS:
        raise TaskError(
            f"partition.kind is {kind}, which goes by labels, and the labels of a text are its characters; clients are "
            "speakers with partition.kind=natural, and mixed ones with partition.kind=iid"
        )
    return context
