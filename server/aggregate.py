"""The aggregate of a round and the server step (DG paper, Eq. 8).

Sums run in float32 (float64 for float64 tensors), element by element, in ascending client order, so the
result does not depend on who answered first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from fedreuse.proto.codec import Block, Payload, decode_block
from fedreuse.proto.schema import FLOAT_BUFFER, PARAMETER, Array, Schema, TensorSpec
from fedreuse.proto.topk import is_finite

_TILE = 1 << 16
"""Elements summed at a time, so that the partial sum stays in the processor's cache."""


class StepSettings(BaseModel):
    """w_{t+1} = w_t + learning_rate * aggregate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: FiniteFloat = Field(1.0, gt=0, description="ηs, server learning rate")


@dataclass(frozen=True, slots=True)
class Term:
    """One client's part of the sum: its update times factor, weighted by its examples n_i."""

    client: int
    examples: int
    factor: float
    payload: Payload
    fresh: bool


def weights(terms: Sequence[Term]) -> list[float]:
    """q_i = n_i / sum of n_j over the terms."""
    total = sum(term.examples for term in terms)
    return [term.examples / total for term in terms]


def step(
    schema: Schema, flat: NDArray[np.uint8], terms: Sequence[Term], learning_rate: float
) -> NDArray[np.uint8]:
    """The next flat state. Terms must be in ascending client order and not empty.

    Parameters get the sum over all terms; float buffers the sum over the fresh ones, their weights
    renormalised; integer buffers stay.
    """
    result = flat.copy()
    located = {term.client: {b.index: (b, data) for b, data in term.payload.located()} for term in terms}
    groups: Mapping[int, Sequence[Term]] = {PARAMETER: terms, FLOAT_BUFFER: [t for t in terms if t.fresh]}
    for index, (spec, view) in enumerate(zip(schema.tensors, schema.views(result), strict=True)):
        group = groups.get(spec.kind, ())
        if not group or spec.size == 0:
            continue
        factors = (q * t.factor for q, t in zip(weights(group), group, strict=True))
        blocks = [(*located[t.client][index], factor) for t, factor in zip(group, factors, strict=True)]
        total = _sum(spec, blocks)
        total *= total.dtype.type(learning_rate)
        if view.dtype == total.dtype:
            view += total
        else:
            view[:] = (view.astype(total.dtype) + total).astype(view.dtype)
    return result


def state_is_finite(schema: Schema, flat: NDArray[np.uint8]) -> bool:
    """False if any float of a state overflowed."""
    return all(is_finite(view) for view in schema.views(flat))


def _sum(spec: TensorSpec, blocks: Sequence[tuple[Block, memoryview, float]]) -> Array:
    """sum of factor * block over the blocks, in the order given."""
    dtype = np.dtype(np.float64 if spec.dtype == "float64" else np.float32)
    total = np.zeros(spec.size, dtype)
    decoded = [(*decode_block(spec, block, data), dtype.type(factor)) for block, data, factor in blocks]
    if all(at is None for at, _, _ in decoded):
        product = np.empty(min(_TILE, spec.size), dtype)
        for start in range(0, spec.size, _TILE):
            part = total[start : start + _TILE]
            scratch = product[: part.size]
            for _, values, factor in decoded:
                np.multiply(values[start : start + _TILE], factor, out=scratch, casting="unsafe")
                part += scratch
        return total
    for at, values, factor in decoded:
        scaled = values.astype(dtype) * factor
        if at is None:
            total += scaled
        else:
            total[at] += scaled
    return total
