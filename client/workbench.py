"""The model a client process works on: global weights in, deltas out, in the schema's terms."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from fedreuse.client.settings import ClientPlan
from fedreuse.client.task import Task
from fedreuse.client.trainer import layout, seed_torch
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload, decode_block
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Array, Schema, TensorSpec
from fedreuse.proto.streams import Purpose

_DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one, else the CPU. Raises ValueError with the choices."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = f"device {name!r}: known are auto, cpu, cuda and cuda:INDEX"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(known) from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {name!r}: this machine has {count} CUDA devices; use cpu or auto")
    elif device.type != "cpu":
        raise ValueError(known)
    return device


def to_numpy(tensor: Tensor) -> Array:
    """The elements of a tensor on the CPU, in row-major order, any dtype of a schema."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        # numpy has no bfloat16 of its own; a 0-d tensor cannot be viewed as another dtype.
        bits: Array = plain.reshape(-1).view(torch.int16).numpy()
        halves: Array = bits.view(ml_dtypes.bfloat16).reshape(plain.shape)
        return halves
    array: Array = plain.numpy()
    return array


def from_numpy(array: Array) -> Tensor:
    """A CPU tensor with the same elements; copies if the array is read-only."""
    flat = array if array.flags.writeable else array.copy()
    if flat.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(flat.reshape(-1).view(np.int16)).view(torch.bfloat16).reshape(array.shape)
    return torch.from_numpy(flat)


def schema_of(model: nn.Module, *, buffers_as_parameters: bool = False) -> Schema:
    """The schema of a model's state dict.

    With `buffers_as_parameters` float buffers are treated like parameters (Top-K'd, cached, decayed), as
    the DG paper's byte counter suggests.
    """
    # Tied weights are parameters under each of their names, so that all names stay equal.
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    specs = []
    for name, tensor in model.state_dict().items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise ProtocolError(
                pb.SCHEMA_MISMATCH, f"tensor {name!r} has dtype {tensor.dtype}, which cannot travel"
            )
        kind = (
            PARAMETER if name in trained else FLOAT_BUFFER if tensor.is_floating_point() else INTEGER_BUFFER
        )
        if kind == FLOAT_BUFFER and buffers_as_parameters:
            kind = PARAMETER
        specs.append(TensorSpec(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), kind))
    return Schema.of(specs)


def initial_weights(task: Task, seed: int) -> nn.Module:
    """A fresh model whose weights come from the `init` stream."""
    with torch.random.fork_rng():
        seed_torch(seed, Purpose.INIT, -1, -1)
        return task.model()


class Workbench:
    """One model instance, reloaded for every piece of work; shared by all clients of a process."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.device = device
        self.model = task.model().to(device)
        self._schema: Schema | None = None
        self._tensors: dict[int, Tensor] = {}
        self._counters: list[tuple[Tensor, Tensor]] = []

    def prepare(self, schema: Schema, plan: ClientPlan) -> None:
        """Check the model against the server's schema. Raises ProtocolError SCHEMA_MISMATCH."""
        if self._schema == schema:
            return
        state = self.model.state_dict()
        for spec in schema.tensors:
            mine = state.get(spec.name)
            if mine is None or _DTYPE_NAMES.get(mine.dtype) != spec.dtype or tuple(mine.shape) != spec.shape:
                here = "is missing here" if mine is None else f"is {mine.dtype}{list(mine.shape)} here"
                raise ProtocolError(
                    pb.SCHEMA_MISMATCH,
                    f"tensor {spec.name!r} {here}, the server's model has {spec.dtype}{list(spec.shape)}; "
                    "both sides must use the same task",
                )
        if extra := set(state) - {spec.name for spec in schema.tensors}:
            raise ProtocolError(pb.SCHEMA_MISMATCH, f"the server's model has no tensor {min(extra)!r}")
        self.model = self.model.to(memory_format=layout(plan))
        state = self.model.state_dict()
        self._tensors = {i: state[schema.tensors[i].name] for i in schema.travelling}
        self._counters = [
            (state[t.name], state[t.name].clone()) for t in schema.tensors if t.kind == INTEGER_BUFFER
        ]
        self._schema = schema

    def load(self, weights: Payload) -> None:
        """Put the global weights into the model; integer buffers return to where they began."""
        for counter, start in self._counters:
            counter.copy_(start)
        for index, values in self._views(weights).items():
            self._tensors[index].copy_(from_numpy(values))

    @torch.no_grad()
    def put(self, parameters: Mapping[str, Tensor]) -> None:
        """Set trainable parameters, by name; the others and all buffers stay."""
        own = dict(self.model.named_parameters())
        for name, value in parameters.items():
            own[name].copy_(value)

    def delta(self, weights: Payload) -> dict[int, Array]:
        """w_i - w_t by tensor index, one-dimensional; `weights` are those that were loaded."""
        result: dict[int, Array] = {}
        for index, values in self._views(weights).items():
            start = from_numpy(values).to(self.device)
            result[index] = to_numpy(self._tensors[index] - start).reshape(-1)
        return result

    def _views(self, weights: Payload) -> dict[int, Array]:
        assert self._schema is not None
        views = {}
        for block, data in weights.located():
            spec = self._schema.tensors[block.index]
            _, values = decode_block(spec, block, data)
            views[block.index] = values.reshape(spec.shape)
        return views


def state_arrays(model: nn.Module) -> Mapping[str, Array]:
    return {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
