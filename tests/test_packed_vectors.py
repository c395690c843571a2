"""Golden vectors of packed bodies and changes, put together without our encoder.

If one of these fails after a change, the change breaks the wire: version 2 must go on meaning these bytes.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fedreuse.proto import codec, floats, masks, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.packing import Coded
from fedreuse.proto.schema import Schema, TensorSpec

FOLDER = Path(__file__).parent / "vectors" / "v2"
VECTORS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))
}
WRITTEN = [name for name, vector in VECTORS.items() if vector["written"]]
UNSIGNED = {"float64": "<u8", "float32": "<u4", "float16": "<u2", "bfloat16": "<u2"}
every_vector = pytest.mark.parametrize("name", VECTORS)


def schema_of(vector: dict[str, Any]) -> Schema:
    specs = []
    for t in vector["tensors"]:
        shape = tuple(int(side) for side in t["shape"].split("x")) if t["shape"] else ()
        specs.append(TensorSpec(t["name"], t["dtype"], shape, pb.TensorKind.Value(t["kind"])))
    return Schema(tuple(specs))


def patterns(text: str, dtype: str) -> np.ndarray:
    """Words in hexadecimal, WORD*n for n of them."""
    words = [word.partition("*") for word in text.split()]
    return np.repeat([int(word, 16) for word, _, _ in words], [int(n or 1) for _, _, n in words]).astype(
        UNSIGNED[dtype]
    )


def payload_of(vector: dict[str, Any]) -> Payload:
    """The payload by the rules of the three modes."""
    blocks, body = [], b""
    for index, t in enumerate(vector["tensors"]):
        words = patterns(t["content"], t["dtype"])
        if t["mode"] == "DENSE":
            data = words.tobytes()
        else:
            at = np.array(t["coordinates"].split(), np.uint32)
            chosen = np.isin(np.arange(len(words)), at)
            places = at.astype("<u4") if t["mode"] == "PAIRS" else np.packbits(chosen, bitorder="little")
            data = places.tobytes() + words[at].tobytes()
        blocks.append(Block(index, pb.Mode.Value(t["mode"]), t["kept"], len(data)))
        body += data
    return Payload(tuple(blocks), body)


def base_of(vector: dict[str, Any]) -> np.ndarray | None:
    if vector["base"] is None:
        return None
    parts = [patterns(t["base"], t["dtype"]).view(np.uint8) for t in vector["tensors"]]
    return np.concatenate(parts)


def body_of(vector: dict[str, Any]) -> bytes:
    return bytes.fromhex("".join(part.split("  ")[0] for part in vector["body"]))


def opened(name: str) -> tuple[Payload, list[Coded]]:
    vector, coded = VECTORS[name], []
    schema = schema_of(vector)
    header = pb.Transfer.FromString(bytes.fromhex(vector["header"]))
    received = Payload(codec.check_layout(schema, header), body_of(vector))
    models = {vector["base"]: base_of(vector)}
    return transfers.open_body(schema, header, received, models.get, coded), coded


def test_the_vectors_cover_every_coding_mode_and_float() -> None:
    sections = [section for name in VECTORS for section in opened(name)[1]]
    assert {s.index_coding for s in sections} == set(range(len(masks.NAMES)))
    assert {s.value_coding for s in sections} == set(range(len(floats.NAMES)))
    tensors = [t for vector in VECTORS.values() for t in vector["tensors"]]
    assert {t["mode"] for t in tensors} == {"DENSE", "PAIRS", "BITMAP"}
    assert {t["dtype"] for t in tensors} == set(UNSIGNED)


def test_the_vectors_are_still_made_like_this() -> None:
    made = runpy.run_path(str(FOLDER.parent / "make_v2.py"))["build_all"]()
    stored = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert made == stored


@every_vector
def test_a_body_gives_exactly_this_payload(name: str) -> None:
    payload, _ = opened(name)
    expected = payload_of(VECTORS[name])
    assert payload.blocks == expected.blocks
    assert bytes(payload.body) == expected.body


@pytest.mark.parametrize("name", WRITTEN)
def test_packing_gives_exactly_this_body(name: str) -> None:
    vector = VECTORS[name]
    schema, payload, base = schema_of(vector), payload_of(vector), base_of(vector)
    if vector["coding"] == "CHANGE":
        assert base is not None
        body = packing.pack_change(schema, np.frombuffer(payload.body, np.uint8), base).body
    else:
        body = packing.pack(schema, payload, base).body
    assert body.hex(" ") == body_of(vector).hex(" ")


@pytest.mark.parametrize("name", WRITTEN)
def test_the_header_is_exactly_this(name: str) -> None:
    vector = VECTORS[name]
    schema, payload, base = schema_of(vector), payload_of(vector), base_of(vector)
    known = None if base is None else (vector["base"], base)
    if vector["coding"] == "CHANGE":
        assert known is not None
        sealed = transfers.seal_change(schema, payload, np.frombuffer(payload.body, np.uint8), known)
    else:
        sealed = transfers.seal(schema, payload, known)
    assert sealed is not None
    assert transfers.transfer_header(schema, sealed).SerializeToString().hex() == vector["header"]


def test_patterns_are_the_numbers_they_are_said_to_be() -> None:
    words = patterns("3f800000 c0000000*2", "float32")
    assert words.view(np.float32).tolist() == [1, -2, -2]
    assert patterns("3f80", "bfloat16").view(ml_dtypes.bfloat16).tolist() == [1]
