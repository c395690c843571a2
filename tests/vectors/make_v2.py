"""Golden vectors of packed bodies, protocol version 2: `python make_v2.py` in this folder wrote them, once.

    NAME.body.bin     the packed body
    NAME.payload.bin  what was packed, as it is
    NAME.base.bin     the model that the body is coded against, if it is
    NAME.json         schema, blocks, whether it is a change, the codings of its sections

They were made with the first packer of that version; tests/reference.py, written from proto/README.md alone, reads
the same values from them. A later packer may well choose otherwise; what these bytes mean must not change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_second_decoder import model, moved, schema_of, update

from fedreuse.proto import codec
from fedreuse.proto.packing import Coded, pack, pack_change, unpack, unpack_change
from fedreuse.proto.schema import Schema

FOLDER = Path(__file__).parent / "v2"
WIDE = schema_of(("float32", (200, 160)), ("float32", (10,)))
NARROW = schema_of(("float16", (200, 160)), ("float32", (10,)))
MIXED = schema_of(("float32", (64, 66)), ("float32", (10,)), ("float16", (40,)), ("bfloat16", (5, 7)))


def grid_model(schema: Schema, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A matrix whose changes gather in some rows and columns."""
    old = model(schema, random)
    new = old.copy()
    high, wide = schema.tensors[0].shape
    rows, columns = random.integers(0, 2, high), random.integers(0, 2, wide)
    likely = np.array([0.01, 0.1, 0.95])[rows[:, None] + columns[None, :]].reshape(-1)
    view = schema.views(new)[0]
    noise = random.normal(0, 1e-2, view.size) * (random.random(view.size) < likely)
    view[:] = (view + noise).astype(view.dtype)
    return old, new


def save(
    name: str, schema: Schema, blocks: tuple, body: bytes, base: object, payload: bytes, coded: list[Coded]
) -> None:
    about = {
        "schema": [[t.dtype, list(t.shape)] for t in schema.tensors],
        "blocks": [[b.index, int(b.mode), b.kept, b.length] for b in blocks],
        "change": name.startswith("change"),
        "codings": [[c.index_coding, c.value_coding] for c in coded],
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    (FOLDER / f"{name}.body.bin").write_bytes(body)
    (FOLDER / f"{name}.payload.bin").write_bytes(payload)
    if base is not None:
        (FOLDER / f"{name}.base.bin").write_bytes(np.asarray(base).tobytes())


def main() -> None:
    random = np.random.default_rng(2026)
    old = model(MIXED, random)
    new = moved(MIXED, old, random, 0.9)
    wide_old, wide_new = grid_model(WIDE, random)
    cases = {
        "update_based": (MIXED, old, update(MIXED, old, new, 0.2)),
        "update_alone": (MIXED, None, update(MIXED, old, new, 0.2)),
        "update_sparse": (MIXED, old, update(MIXED, old, new, 0.005)),
        "update_grid": (WIDE, None, update(WIDE, wide_old, wide_new, 0.25)),
        "dense": (MIXED, None, codec.dense_payload(MIXED, new)),
    }
    for name, (schema, base, payload) in cases.items():
        body, coded = pack(schema, payload, base).body, []
        unpack(schema, payload.blocks, body, base, coded)
        save(name, schema, payload.blocks, body, base, bytes(payload.body), coded)
    changes = {
        "change": (MIXED, old, moved(MIXED, old, random, 0.3)),
        "change_grid": (NARROW, *grid_model(NARROW, random)),
    }
    for name, (schema, before, after) in changes.items():
        body, coded, dense = pack_change(schema, after, before).body, [], codec.dense_payload(schema, after)
        unpack_change(schema, dense.blocks, body, before, coded)
        save(name, schema, dense.blocks, body, before, bytes(dense.body), coded)


if __name__ == "__main__":
    main()
