"""What an update would gain if it were coded against the same client's cached update, which both sides hold.

    python tests/bench/context.py RUN [--clients N]     a finished run of a method that caches updates

Trains clients of the run once more from its last model and codes each large tensor twice with the wire's own parts:
as the wire does, and with every context split by the cached update: the mask by whether a coordinate was in it, the
signs by its sign, the exponents by its magnitude. The wire does not do the latter; this says what that costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from fedreuse.client.held import HeldStore
from fedreuse.client.host import ClientHost, be_deterministic
from fedreuse.proto import codec, floats, masks
from fedreuse.proto.codec import Payload
from fedreuse.proto.entropy import Writer
from fedreuse.proto.packing import OWN_SECTION
from fedreuse.proto.schema import Array, Schema
from fedreuse.server.store import RunStore
from fedreuse.server.weights import load_model
from fedreuse.sim.folder import INITIAL, read_config
from fedreuse.sim.run import make_task

Mask = NDArray[np.bool_]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=10)
    options = parser.parse_args()
    be_deterministic()
    config, (schema, _) = read_config(options.run), load_model(options.run / INITIAL)
    with RunStore(options.run) as store:
        state = store.load()
    if state is None or not state.caches:
        sys.exit(f"{options.run} has no cached updates")
    host = ClientHost(make_task(config), torch.device("cpu"), HeldStore(None))
    weights = codec.dense_payload(schema, state.flat)
    # Without the gate's second pass, which puts the weights back, the workbench still has the trained model.
    plan = config.plan().model_copy(update={"proxy": None})
    shares, ages = [], []
    for client in sorted(state.caches)[: options.clients]:
        participant = host.participant(client)
        participant.enter(state.run, schema, plan)
        participant.train(state.committed, weights)
        fresh = codec.encode(schema, participant._bench.delta(weights), participant._kept)
        new, old = _large(schema, fresh), _large(schema, state.caches[client].payload)
        pairs = [_coded(schema, index, new[index], old[index], state.flat) for index in new]
        shares.append(sum(split for _, split in pairs) / sum(plain for plain, _ in pairs))
        ages.append(state.committed - state.caches[client].round)
    spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
    Console().print(
        f"{options.run.name}: {len(shares)} clients, cached updates {min(ages)} to {max(ages)} rounds old: with the "
        f"cached update as context {statistics.fmean(shares):.4f} of the wire's bytes (sd {spread:.4f})"
    )


def _large(schema: Schema, payload: Payload) -> dict[int, Array]:
    return {i: a for i, a in codec.decode(schema, payload).items() if a.size >= OWN_SECTION}


def _coded(schema: Schema, index: int, new: Array, old: Array, state: NDArray[np.uint8]) -> tuple[int, int]:
    """Bytes of one tensor as the wire codes it, and with the old update as context."""
    shape = masks.matrix_shape(schema.tensors[index].shape)
    chosen, before = new != 0, old != 0
    at = np.flatnonzero(chosen)
    grid = masks._find_grid(chosen.reshape(shape))
    group = grid.of(np.arange(chosen.size))
    side = _streams([grid.rows, grid.columns, grid.groups.reshape(-1)])
    plain_mask = side + _bits(chosen, group)
    split_mask = side + _bits(chosen, group * 2 + before)

    bits, was = new[at].view(np.uint32), old[at].view(np.uint32)
    exponent, negative = (bits >> 23).astype(np.uint8), (bits >> 31).astype(bool)
    low = int(floats.mantissa_bits(exponent, negative, schema.views(state)[index][at]).sum()) // 8
    row = at // shape[1]
    majority = 2 * np.bincount(row, weights=negative, minlength=shape[0]) > np.bincount(
        row, minlength=shape[0]
    )
    known = before[at]
    by_row = negative ^ majority[row]
    by_old = np.where(known, negative ^ (was >> 31).astype(bool), by_row)
    magnitude = ((was >> 23) & 0xFF).astype(np.int64)
    middle = int(np.median(magnitude[known])) if known.any() else 0
    level = np.where(known, 2 + np.clip(magnitude - middle, -1, 1), 0)
    relative = (exponent - exponent.min()).astype(np.int64) * 2
    here = group[at]
    plain = _by(relative + by_row, here)
    split = min(
        plain,
        _by(relative + by_old, here * 2 + known),
        _by(relative + by_old, here // 2 * 4 + level),
        _by(relative + by_row, here // 2 * 4 + level),
    )
    return plain_mask + plain + low, min(plain_mask, split_mask) + split + low


def _bits(chosen: Mask, context: NDArray[np.integer]) -> int:
    return _streams([np.packbits(chosen[context == c], bitorder="little") for c in np.unique(context)])


def _by(symbols: NDArray[np.integer], context: NDArray[np.integer]) -> int:
    return _streams([symbols[context == c].astype(np.uint8) for c in np.unique(context)])


def _streams(parts: list[NDArray[np.uint8]]) -> int:
    out = Writer()
    for part in parts:
        out.stream(part)
    return out.nbytes


if __name__ == "__main__":
    main()
