"""The model's tensors as both sides know them: names, dtypes, shapes, kinds, and one hash over all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError

Array = NDArray[Any]

_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})

PARAMETER, FLOAT_BUFFER, INTEGER_BUFFER = pb.PARAMETER, pb.FLOAT_BUFFER, pb.INTEGER_BUFFER

MAX_TENSORS = 100_000
MAX_ELEMENTS = 1 << 40
MAX_DIMENSIONS = 64
"""numpy's own limit; it also keeps a hostile shape from being multiplied out for minutes."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: `size` elements of `width` bytes each."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: pb.TensorKind

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return _DTYPES[self.dtype]

    @property
    def width(self) -> int:
        return self.numpy_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.width

    @property
    def is_float(self) -> bool:
        return self.dtype in _FLOATS

    def canonical(self) -> str:
        return f"{self.name}\t{self.dtype}\t{'x'.join(map(str, self.shape))}\t{int(self.kind)}\n"


@dataclass(frozen=True)
class Schema:
    """Ordered tensors: parameters, then float buffers, then integer buffers.

    The order puts everything that travels in front, so that a dense model is one contiguous prefix of
    the state and the cached part of an update is one contiguous prefix of its body.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _validate(self.tensors)

    @staticmethod
    def of(tensors: Iterable[TensorSpec]) -> Schema:
        """Schema of tensors in any order; the order inside each kind is kept."""
        return Schema(tuple(sorted(tensors, key=lambda tensor: int(tensor.kind))))

    @cached_property
    def hash(self) -> int:
        """XXH3-64 of the canonical text."""
        return xxhash.xxh3_64_intdigest("".join(t.canonical() for t in self.tensors).encode())

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def indices(self) -> Mapping[str, int]:
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    def of_kind(self, *kinds: int) -> tuple[int, ...]:
        return tuple(i for i, tensor in enumerate(self.tensors) if tensor.kind in kinds)

    @cached_property
    def travelling(self) -> tuple[int, ...]:
        """Indices of everything that is ever sent: parameters and float buffers."""
        return self.of_kind(PARAMETER, FLOAT_BUFFER)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the flat state, and the total at the end."""
        total, result = 0, [0]
        for tensor in self.tensors:
            total += tensor.nbytes
            result.append(total)
        return tuple(result)

    def views(self, flat: NDArray[np.uint8]) -> list[Array]:
        """Each tensor's elements, one-dimensional, as views into the flat state (uint8)."""
        pairs = zip(self.tensors, self.offsets, strict=False)
        return [flat[at : at + t.nbytes].view(t.numpy_dtype) for t, at in pairs]

    def flatten(self, arrays: Mapping[str, Array]) -> NDArray[np.uint8]:
        """Copy named arrays into one flat state. Raises ProtocolError naming the first misfit."""
        flat = np.empty(self.offsets[-1], np.uint8)
        for spec, view in zip(self.tensors, self.views(flat), strict=True):
            array = arrays.get(spec.name)
            if array is None:
                raise ProtocolError(pb.SCHEMA_MISMATCH, f"tensor {spec.name!r} is missing")
            if array.shape != spec.shape or array.dtype != spec.numpy_dtype:
                raise ProtocolError(
                    pb.SCHEMA_MISMATCH,
                    f"tensor {spec.name!r} is {array.dtype}{list(array.shape)}, "
                    f"the schema says {spec.dtype}{list(spec.shape)}",
                )
            view[:] = array.reshape(-1)
        return flat

    def to_proto(self) -> pb.Schema:
        tensors = [
            pb.TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, kind=t.kind) for t in self.tensors
        ]
        return pb.Schema(tensors=tensors, hash=self.hash)

    @staticmethod
    def from_proto(message: pb.Schema) -> Schema:
        """Checked schema from a peer. Raises ProtocolError."""
        if len(message.tensors) > MAX_TENSORS:
            raise ProtocolError(
                pb.MALFORMED, f"schema of {len(message.tensors)} tensors, limit {MAX_TENSORS}"
            )
        schema = Schema(tuple(TensorSpec(t.name, t.dtype, tuple(t.shape), t.kind) for t in message.tensors))
        if schema.hash != message.hash:
            raise ProtocolError(
                pb.SCHEMA_MISMATCH,
                f"schema hashes to {schema.hash:016x}, the message says {message.hash:016x}",
            )
        return schema

    def difference(self, other: Schema) -> str | None:
        """One sentence about the first tensor in which two schemas differ, or None."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"tensor {mine.canonical().strip()!r} here, {theirs.canonical().strip()!r} there"
        if len(self) != len(other):
            return f"{len(self)} tensors here, {len(other)} there"
        return None


def _validate(tensors: tuple[TensorSpec, ...]) -> None:
    names: set[str] = set()
    previous = 0
    for tensor in tensors:
        where = f"tensor {tensor.name!r} of the schema"
        if not tensor.name or any(c in tensor.name for c in "\t\n"):
            raise ProtocolError(pb.MALFORMED, f"{where} has an unusable name")
        if tensor.name in names:
            raise ProtocolError(pb.MALFORMED, f"{where} appears twice")
        names.add(tensor.name)
        if tensor.dtype not in _DTYPES:
            raise ProtocolError(
                pb.MALFORMED, f"{where} has dtype {tensor.dtype!r}, known: {', '.join(_DTYPES)}"
            )
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise ProtocolError(
                pb.MALFORMED, f"{where} has {len(tensor.shape)} dimensions, limit {MAX_DIMENSIONS}"
            )
        if any(side < 0 for side in tensor.shape) or tensor.size > MAX_ELEMENTS:
            raise ProtocolError(pb.MALFORMED, f"{where} has shape {list(tensor.shape)}")
        if tensor.kind not in (PARAMETER, FLOAT_BUFFER, INTEGER_BUFFER):
            raise ProtocolError(pb.MALFORMED, f"{where} has unknown kind {int(tensor.kind)}")
        if tensor.is_float != (tensor.kind != INTEGER_BUFFER):
            raise ProtocolError(
                pb.MALFORMED,
                f"{where}: {tensor.dtype} cannot be of kind {pb.TensorKind.Name(tensor.kind)}; parameters and "
                "float buffers hold floats, integer buffers hold integers or bool",
            )
        if tensor.kind < previous:
            raise ProtocolError(pb.MALFORMED, f"{where} stands after tensors of a later kind")
        previous = tensor.kind
