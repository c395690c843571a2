"""How training examples are divided over clients, as a configuration says it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from fedreuse.client.errors import TaskError

Indices = NDArray[np.int64]
Labels = NDArray[np.integer[Any]]
Owners = NDArray[Any]
"""Natural ids, shape (n,): the writer, speaker or user each example comes from."""

Kind = Literal[
    "iid",
    "iid-balanced",
    "half-iid",
    "dirichlet",
    "lq",
    "shards",
    "quantity",
    "natural",
    "resample",
]
OPTIONS: dict[str, tuple[str, ...]] = {
    "iid": (),
    "iid-balanced": (),
    "half-iid": ("similarity", "labels"),
    "dirichlet": ("alpha",),
    "lq": ("labels",),
    "shards": ("labels",),
    "quantity": ("beta",),
    "natural": (),
    "resample": ("size",),
}
"""What each kind asks for beside minimum_size; a number in its short form is the first: `lq-2`, `dirichlet-0.1`."""


class PartitionError(TaskError):
    """Examples that cannot be divided as asked; the text says why and what to change."""


class PartitionSettings(BaseModel):
    """How training examples are divided over clients. Short: partition=dirichlet-0.1, lq-2, shards-2, natural ...

    iid: at random, sizes equal; iid-balanced: of each label an equal share; half-iid: a share `similarity` at
    random, the rest by labels; dirichlet: shares of each label drawn; lq: exactly `labels` labels a client;
    shards: `labels` pieces of the examples sorted by label; quantity: at random, sizes drawn; natural: by writer,
    speaker or user; resample: for benchmarks only, every client draws from all examples.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = "dirichlet"
    alpha: FiniteFloat = Field(
        0.5,
        gt=0,
        allow_inf_nan=False,
        description="Dirichlet concentration; small: few labels per client",
    )
    minimum_size: int | None = Field(
        None,
        ge=2,  # one example to train on and one to validate on
        description="least examples of a client, before the validation split; null: 10 when clients hold 60 or "
        "more on average, else 2; of natural always 2",
    )
    labels: int = Field(
        2, ge=1, description="C of lq and shards, and of the part of half-iid that is not IID"
    )
    similarity: FiniteFloat = Field(0.5, gt=0, lt=1, description="share of half-iid that is IID")
    beta: FiniteFloat = Field(
        1.0, gt=0, description="Dirichlet concentration of sizes under quantity; small: very unequal"
    )
    size: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="examples a client draws, with replacement; only of resample, which is for benchmarks",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        return short_form(value) if isinstance(value, str) else value

    def title(self) -> str:
        """The kind and its options in words: `dirichlet, alpha 0.5`."""
        return ", ".join([self.kind, *(f"{name} {value:g}" for name, value in self.options().items())])

    def options(self) -> dict[str, Any]:
        """The options that this kind asks for."""
        return {name: getattr(self, name) for name in OPTIONS[self.kind]}


def short_form(text: str) -> dict[str, str]:
    """`dirichlet-0.1` is `{kind: dirichlet, alpha: 0.1}`; a text without a number is a kind alone."""
    for kind, options in OPTIONS.items():
        if options and text.startswith(f"{kind}-"):
            return {"kind": kind, options[0]: text.removeprefix(f"{kind}-")}
    return {"kind": text}
