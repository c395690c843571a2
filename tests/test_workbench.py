"""The workbench: global weights into the model and deltas out, bit for bit, in the schema's terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import CPU, GridModel, plan_of
from torch import Tensor, nn

from fedreuse.client.workbench import (
    Workbench,
    from_numpy,
    initial_weights,
    resolve_device,
    schema_of,
    state_arrays,
    to_numpy,
)
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload, dense_payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Mixed(nn.Module):
    """Every kind of tensor that travels: several widths, a scalar, a 4-d weight, batch statistics, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.b16 = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.f16 = nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
        self.f64 = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.b16_scalar = nn.Parameter(torch.tensor(0.0, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))


class Only:
    """A task that is nothing but a model."""

    def __init__(self, model: type[nn.Module]) -> None:
        self.model = model


def bench_of(model: type[nn.Module], memory_format: str = "contiguous") -> tuple[Workbench, Schema]:
    bench = Workbench(Only(model), CPU)  # type: ignore[arg-type]
    schema = schema_of(model())
    bench.prepare(schema, plan_of(memory_format=memory_format))
    return bench, schema


def random_state(schema: Schema, seed: int) -> dict[str, np.ndarray]:
    """Values over many powers of two, so that hardly a difference is exact; with a negative zero."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for spec in schema.tensors:
        values = rng.normal(size=spec.shape) * 2.0 ** rng.integers(-8, 8, spec.shape)
        arrays[spec.name] = np.asarray(values).astype(spec.numpy_dtype)
    arrays["conv.weight"].flat[0] = -0.0
    return arrays


def payload(schema: Schema, arrays: dict[str, np.ndarray]) -> Payload:
    return dense_payload(schema, schema.flatten(arrays))


def bits(arrays: Any) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


formats = pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])


# The schema of a model


def test_schema_lists_parameters_then_float_then_integer_buffers() -> None:
    assert [(t.name, t.dtype, t.shape, t.kind) for t in schema_of(Mixed()).tensors] == [
        ("b16", "bfloat16", (5,), PARAMETER),
        ("f16", "float16", (2, 2), PARAMETER),
        ("f64", "float64", (3,), PARAMETER),
        ("scalar", "float32", (), PARAMETER),
        ("b16_scalar", "bfloat16", (), PARAMETER),
        ("conv.weight", "float32", (3, 2, 3, 3), PARAMETER),
        ("norm.weight", "float32", (3,), PARAMETER),
        ("norm.bias", "float32", (3,), PARAMETER),
        ("norm.running_mean", "float32", (3,), FLOAT_BUFFER),
        ("norm.running_var", "float32", (3,), FLOAT_BUFFER),
        ("mask", "bool", (2,), INTEGER_BUFFER),
        ("norm.num_batches_tracked", "int64", (), INTEGER_BUFFER),
    ]


def test_buffers_as_parameters_moves_the_float_buffers_only() -> None:
    kinds = {t.name: t.kind for t in schema_of(Mixed(), buffers_as_parameters=True).tensors}
    assert kinds["norm.running_mean"] == kinds["norm.running_var"] == PARAMETER
    assert kinds["mask"] == kinds["norm.num_batches_tracked"] == INTEGER_BUFFER


def test_a_tensor_that_cannot_travel_is_named() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(ProtocolError, match=r"'phase' has dtype torch\.complex64") as caught:
        schema_of(Complex())
    assert caught.value.code == pb.SCHEMA_MISMATCH


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.write.weight = self.read.weight


def test_tied_weights_are_parameters_under_both_names() -> None:
    # As a float buffer the second name would be averaged by another rule and then overwrite the first.
    assert [(t.name, t.kind) for t in schema_of(Tied()).tensors] == [
        ("read.weight", PARAMETER),
        ("write.weight", PARAMETER),
    ]


# Load and delta


@formats
def test_load_puts_every_bit_into_the_model(memory_format: str) -> None:
    bench, schema = bench_of(Mixed, memory_format)
    arrays = random_state(schema, 1)
    bench.load(payload(schema, arrays))
    state = bits(state_arrays(bench.model))
    for spec in schema.tensors:
        if spec.kind != INTEGER_BUFFER:
            assert state[spec.name] == arrays[spec.name].tobytes(), spec.name


@formats
def test_delta_is_new_minus_old_in_each_tensor_s_own_precision(memory_format: str) -> None:
    bench, schema = bench_of(Mixed, memory_format)
    old, new = random_state(schema, 2), random_state(schema, 3)
    bench.load(payload(schema, old))
    with torch.no_grad():
        for name, tensor in bench.model.state_dict().items():
            if schema.tensors[schema.indices[name]].kind != INTEGER_BUFFER:
                tensor.copy_(from_numpy(new[name]))
    deltas = bench.delta(payload(schema, old))
    assert sorted(deltas) == list(schema.travelling) == list(range(10))
    for index, delta in deltas.items():
        spec = schema.tensors[index]
        expected = np.asarray(new[spec.name] - old[spec.name]).reshape(-1)
        assert delta.dtype == spec.numpy_dtype == expected.dtype, spec.name
        assert delta.tobytes() == expected.tobytes(), spec.name


@formats
def test_nothing_trained_is_a_zero_delta(memory_format: str) -> None:
    bench, schema = bench_of(Mixed, memory_format)
    weights = payload(schema, random_state(schema, 4))
    bench.load(weights)
    assert all(not delta.any() for delta in bench.delta(weights).values())


def test_the_memory_format_is_the_plan_s_and_the_order_of_a_delta_is_not() -> None:
    plain, schema = bench_of(Mixed, "contiguous")
    last, _ = bench_of(Mixed, "channels_last")
    assert last.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not plain.model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    zero = payload(schema, {t.name: np.zeros(t.shape, t.numpy_dtype) for t in schema.tensors})
    ramp = torch.arange(54.0).reshape(3, 2, 3, 3)
    for bench in (plain, last):
        bench.load(zero)
        with torch.no_grad():
            bench.model.conv.weight.copy_(ramp)
        assert bench.delta(zero)[schema.indices["conv.weight"]].tolist() == list(range(54))


def test_batch_statistics_are_loaded_and_their_change_is_in_the_delta() -> None:
    bench, schema = bench_of(GridModel)
    arrays = state_arrays(GridModel())
    weights = payload(schema, {name: array.copy() for name, array in arrays.items()})
    bench.load(weights)
    bench.model.train()
    norm = bench.model.features[1]
    norm(torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1).expand(2, 2, 1, 1))
    # Momentum 0.1; batch mean 2, unbiased variance 2: mean 0.1 * 2, var 0.9 * 1 + 0.1 * 2.
    deltas = bench.delta(weights)
    mean, var = (deltas[schema.indices[f"features.1.running_{what}"]] for what in ("mean", "var"))
    np.testing.assert_allclose(mean, [0.2, 0.2], rtol=1e-6)
    np.testing.assert_allclose(var, [0.1, 0.1], rtol=1e-6)


def test_integer_buffers_return_to_their_start_and_never_travel() -> None:
    bench, schema = bench_of(GridModel)
    weights = payload(schema, state_arrays(GridModel()))
    counter = bench.model.features[1].num_batches_tracked
    for _ in range(2):
        bench.load(weights)
        bench.model.train()
        bench.model(torch.zeros(2, 1, 4, 4))
        assert counter.item() == 1
        assert schema.indices["features.1.num_batches_tracked"] not in bench.delta(weights)
    bench.load(weights)
    assert counter.item() == 0


# The server's schema must be the model's


def refused(schema: Schema) -> str:
    bench = Workbench(Only(Mixed), CPU)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError) as caught:
        bench.prepare(schema, plan_of())
    assert caught.value.code == pb.SCHEMA_MISMATCH
    return caught.value.detail


def changed(name: str, **change: Any) -> Schema:
    return Schema.of(replace(t, **change) if t.name == name else t for t in schema_of(Mixed()).tensors)


def test_another_shape_names_the_tensor_and_both_shapes() -> None:
    text = refused(changed("norm.weight", shape=(4,)))
    assert "'norm.weight'" in text
    assert "[3]" in text
    assert "float32[4]" in text


def test_a_scalar_is_not_a_vector_of_one() -> None:
    assert "'scalar'" in refused(changed("scalar", shape=(1,)))


def test_another_dtype_names_the_tensor_and_both_dtypes() -> None:
    text = refused(changed("b16", dtype="float16"))
    assert "'b16'" in text
    assert "bfloat16" in text
    assert "float16[5]" in text


def test_a_missing_tensor_is_named() -> None:
    extra = TensorSpec("conv.bias", "float32", (3,), PARAMETER)
    assert "'conv.bias' is missing here" in refused(Schema.of([*schema_of(Mixed()).tensors, extra]))


def test_a_tensor_the_server_does_not_know_is_named() -> None:
    fewer = Schema.of(t for t in schema_of(Mixed()).tensors if t.name != "scalar")
    assert "has no tensor 'scalar'" in refused(fewer)


def test_a_schema_with_buffers_as_parameters_fits_the_same_model() -> None:
    bench = Workbench(Only(GridModel), CPU)  # type: ignore[arg-type]
    schema = schema_of(GridModel(), buffers_as_parameters=True)
    bench.prepare(schema, plan_of())
    arrays = {name: array + array.dtype.type(1) for name, array in state_arrays(GridModel()).items()}
    bench.load(payload(schema, arrays))
    assert bench.model.features[1].running_mean.tolist() == [1.0, 1.0]
    assert bench.model.features[1].running_var.tolist() == [2.0, 2.0]


# Between torch and numpy


@given(
    st.sampled_from(["float64", "float32", "float16", "bfloat16", "int64", "int16", "uint8", "bool"]),
    st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (1, 2, 3, 2)]),
    st.integers(0, 1 << 32),
    st.booleans(),
)
def test_arrays_survive_torch_bit_for_bit(
    dtype: str, shape: tuple[int, ...], seed: int, read_only: bool
) -> None:
    # Any bits at all, NaN payloads included; of a bool only the two that are one.
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=int)) * kind.itemsize
    raw = rng.integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    array = raw.view(kind).reshape(shape)
    array.flags.writeable = not read_only
    tensor = from_numpy(array)
    assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, f"torch.{dtype}")
    back = to_numpy(tensor)
    assert (back.shape, back.dtype) == (shape, kind)
    assert back.tobytes() == array.tobytes()


def test_a_read_only_array_is_copied_not_written_through() -> None:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    from_numpy(array).fill_(1.0)
    assert array.tolist() == [0.0, 0.0, 0.0]


def test_to_numpy_gives_row_major_order_of_any_layout() -> None:
    ramp = torch.arange(24.0).reshape(1, 2, 3, 4)
    for tensor in (ramp, ramp.to(memory_format=torch.channels_last)):
        assert to_numpy(tensor).reshape(-1).tolist() == list(range(24))
    assert to_numpy(torch.arange(6.0).reshape(2, 3).T).reshape(-1).tolist() == [0, 3, 1, 4, 2, 5]


# Initial weights and devices


def test_initial_weights_come_from_the_init_stream_alone() -> None:
    def weight(seed: int) -> Tensor:
        return initial_weights(Only(GridModel), seed).classifier.weight  # type: ignore[arg-type, return-value, union-attr]

    first = weight(5)
    torch.manual_seed(99)
    after = torch.rand(3)
    torch.manual_seed(99)
    assert torch.equal(weight(5), first)
    assert torch.equal(torch.rand(3), after)  # and leave the global generator as it was
    assert not torch.equal(weight(6), first)


def test_devices_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda:99", "mps", "gpu", ""])
def test_an_impossible_device_is_a_value_error_that_names_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}'.*cpu.*auto|device '{name}'.*auto.*cpu"):
        resolve_device(name)
