"""Golden vectors: the bytes of protocol version 1, made by a second encoder that shares nothing with ours.

If one of these fails after a change, the change breaks the wire: version 1 must go on meaning these bytes.
"""

import json
import runpy
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fedreuse.proto import codec, modelled
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.schema import Schema, TensorSpec

FOLDER = Path(__file__).parent / "vectors" / "v1"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

every_vector = pytest.mark.parametrize("name", NAMES)


def described(name: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return description


def files(name: str) -> tuple[bytes, bytes]:
    return (FOLDER / f"{name}.header.bin").read_bytes(), (FOLDER / f"{name}.body.bin").read_bytes()


def schema_of(description: dict[str, Any]) -> Schema:
    specs = []
    for t in description["schema"]:
        shape = tuple(int(side) for side in t["shape"].split("x")) if t["shape"] else ()
        specs.append(TensorSpec(t["name"], t["dtype"], shape, pb.TensorKind.Value(t["kind"])))
    return Schema(tuple(specs))


def array(dtype: str, text: str) -> np.ndarray:
    """The numbers of a description; all of them are exact in their dtype."""
    numbers = [float(word) if "float" in dtype else int(word) for word in text.split()]
    return np.array(numbers, ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))


def blocks_of(description: dict[str, Any]) -> tuple[Block, ...]:
    return tuple(
        Block(b["index"], pb.Mode.Value(b["mode"]), b["kept"], b["length"]) for b in description["blocks"]
    )


def test_the_vectors_cover_every_mode_and_dtype() -> None:
    blocks = [(block, described(name)["schema"]) for name in NAMES for block in described(name)["blocks"]]
    assert {block["mode"] for block, _ in blocks} == {"DENSE", "PAIRS", "BITMAP"}
    assert {schema[block["index"]]["dtype"] for block, schema in blocks} == {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    }
    assert any(
        block["mode"] == "DENSE" and block["kept"] < len(block["decoded"].split()) for block, _ in blocks
    )
    assert any(schema[block["index"]]["shape"] == "" for block, schema in blocks)
    assert any(block["length"] == 0 for block, _ in blocks)


def test_the_second_encoder_still_writes_these_files() -> None:
    made = runpy.run_path(str(FOLDER.parent / "make_v1.py"))["build_all"]()
    stored = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert sorted(made) == sorted(stored)
    for name, data in made.items():
        assert data == stored[name], name


@every_vector
def test_the_schema_hash_of_the_vector(name: str) -> None:
    assert f"{schema_of(described(name)).hash:016x}" == described(name)["schema_hash"]


@every_vector
def test_encoding_gives_exactly_these_bytes(name: str) -> None:
    description = described(name)
    schema = schema_of(description)
    sent = {block["index"] for block in description["blocks"]}
    arrays = {i: array(schema.tensors[i].dtype, description["values"][schema.tensors[i].name]) for i in sent}

    def kept(index: int) -> int:
        spec = schema.tensors[index]
        return modelled.kept(spec.size, description["keep_ratio"]) if spec.kind == pb.PARAMETER else spec.size

    payload = codec.encode(schema, arrays, kept)
    header, body = files(name)
    assert payload.blocks == blocks_of(description)
    assert bytes(payload.body) == body
    assert codec.transfer_header(schema, payload).SerializeToString() == header
    assert header.hex() == description["header"]


@every_vector
def test_decoding_gives_exactly_these_values(name: str) -> None:
    description = described(name)
    schema = schema_of(description)
    header, body = files(name)
    transfer = pb.Transfer.FromString(header)
    payload = Payload(codec.check_layout(schema, transfer), body)
    codec.check_body(schema, payload, transfer.checksum)
    assert payload.blocks == blocks_of(description)
    decoded = codec.decode(schema, payload)
    assert list(decoded) == [block["index"] for block in description["blocks"]]
    for block in description["blocks"]:
        spec = schema.tensors[block["index"]]
        expected = array(spec.dtype, block["decoded"])
        assert expected.size == prod(spec.shape)
        assert decoded[block["index"]].dtype == expected.dtype
        # Bytes, not values: -0.0 is not 0.0 here.
        assert decoded[block["index"]].tobytes() == expected.tobytes()


@every_vector
def test_the_description_spells_out_the_body(name: str) -> None:
    description = described(name)
    _, body = files(name)
    spelled = "".join(part.split("  ")[0] for block in description["blocks"] for part in block["body"])
    assert spelled == body.hex()
    assert f"{codec.checksum(body):016x}" == description["checksum"]
    assert len(body) == description["length"]
