"""A model on disk: one safetensors file whose metadata says what kind each tensor is. No torch needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Array, Schema, TensorSpec
from fedreuse.server.store import RunError

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ABOUT = "fedreuse"
_KIND = {pb.TensorKind.Name(kind): kind for kind in (PARAMETER, FLOAT_BUFFER, INTEGER_BUFFER)}


def save_model(path: Path, schema: Schema, arrays: Mapping[str, Array], note: str = "") -> None:
    """Write named arrays in the schema's order; `note` goes into the metadata."""
    tensors = {spec.name: np.asarray(arrays[spec.name], order="C") for spec in schema.tensors}
    kinds = [[spec.name, pb.TensorKind.Name(spec.kind)] for spec in schema.tensors]
    # One key only: safetensors writes several in random order, and equal models should be equal files.
    about = json.dumps({"kinds": kinds, "note": note})
    path.write_bytes(safetensors.numpy.save(tensors, {_ABOUT: about}))


def load_model(path: Path) -> tuple[Schema, NDArray[np.uint8]]:
    """Schema and flat state of a file made by `save_model`. Raises RunError naming what is wrong."""
    try:
        raw = path.read_bytes()
        # safetensors.numpy.load knows no bfloat16.
        tensors: dict[str, dict[str, Any]] = dict(safetensors.deserialize(raw))  # type: ignore[no-untyped-call]
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        kinds = json.loads(header["__metadata__"][_ABOUT])["kinds"]
        specs = [
            TensorSpec(name, _NAMES[tensors[name]["dtype"]], tuple(tensors[name]["shape"]), _KIND[kind])
            for name, kind in kinds
        ]
        schema = Schema(tuple(specs))
        flat = b"".join(bytes(tensors[spec.name]["data"]) for spec in schema.tensors)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; make the file with `fedreuse init-model`") from None
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, ProtocolError) as error:
        raise RunError(f"{path} is not a model file made by `fedreuse init-model`: {error}") from None
    if len(flat) != schema.offsets[-1]:
        raise RunError(f"{path}: {len(flat)} bytes of tensors, its schema says {schema.offsets[-1]}")
    return schema, np.frombuffer(flat, np.uint8).copy()
