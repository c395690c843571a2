"""Model files: what was saved is loaded, equal models are equal files, and nothing else is taken for one."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model, save_model

NUMPY: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
FLOATS = ("float64", "float32", "float16", "bfloat16")

SCHEMA = Schema(
    (
        TensorSpec("fc.weight", "float32", (2, 3), PARAMETER),
        TensorSpec("fc.bias", "bfloat16", (2,), PARAMETER),
        TensorSpec("bn.running_mean", "float32", (2,), FLOAT_BUFFER),
        TensorSpec("bn.num_batches_tracked", "int64", (), INTEGER_BUFFER),
    )
)


def arrays() -> dict[str, np.ndarray]:
    return {
        "fc.weight": np.array([[1, -2, 3], [0.5, 0, -0.25]], "<f4"),
        "fc.bias": np.array([1.5, -3], NUMPY["bfloat16"]),
        "bn.running_mean": np.array([0.125, 8], "<f4"),
        "bn.num_batches_tracked": np.array(12, "<i8"),
    }


def raw(named: dict[str, np.ndarray], schema: Schema) -> bytes:
    return b"".join(named[spec.name].tobytes() for spec in schema.tensors)


def saved(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_model(path, SCHEMA, arrays(), note="for a test")
    return path


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (2, 3), (1, 2, 3, 1)])
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    kind = PARAMETER if dtype in FLOATS else INTEGER_BUFFER
    schema = Schema((TensorSpec("t", dtype, shape, kind),))
    size = int(np.prod(shape))
    values = np.array([0, 1, 100, 3, 5, 7][:size]).astype(NUMPY[dtype]).reshape(shape)
    save_model(tmp_path / "m", schema, {"t": values})
    found, flat = load_model(tmp_path / "m")
    assert found == schema
    assert found.hash == schema.hash
    assert flat.dtype == np.uint8
    assert flat.tobytes() == values.tobytes()


def test_a_whole_model_comes_back(tmp_path: Path) -> None:
    schema, flat = load_model(saved(tmp_path))
    assert schema == SCHEMA
    # 6 * 4 + 2 * 2 + 2 * 4 + 8 bytes, in the order of the schema.
    assert flat.size == 44
    assert flat.tobytes() == raw(arrays(), SCHEMA)
    flat[:] = 0  # the caller's own copy


@pytest.mark.parametrize("pattern", [0x7F800000, 0xFFC00001, 0x80000000, 0x00000001])
def test_bits_are_kept_whatever_they_mean(tmp_path: Path, pattern: int) -> None:
    schema = Schema((TensorSpec("t", "float32", (1,), PARAMETER),))
    values = np.array([pattern], "<u4").view("<f4")
    save_model(tmp_path / "m", schema, {"t": values})
    assert load_model(tmp_path / "m")[1].tobytes() == struct.pack("<I", pattern)


def test_strided_arrays_are_saved_in_their_logical_order(tmp_path: Path) -> None:
    schema = Schema((TensorSpec("t", "float32", (2, 3), PARAMETER),))
    values = np.array([[1, 2, 3], [4, 5, 6]], "<f4")
    save_model(tmp_path / "c", schema, {"t": values})
    save_model(tmp_path / "f", schema, {"t": np.asfortranarray(values)})
    assert (tmp_path / "c").read_bytes() == (tmp_path / "f").read_bytes()
    assert load_model(tmp_path / "f")[1].tobytes() == struct.pack("<6f", 1, 2, 3, 4, 5, 6)


def test_the_file_is_safetensors_to_others(tmp_path: Path) -> None:
    found = safetensors.torch.load_file(saved(tmp_path))
    assert set(found) == set(arrays())
    for name, tensor in found.items():
        assert tensor.shape == arrays()[name].shape
        assert tensor.double().tolist() == arrays()[name].astype(np.float64).tolist()
    assert found["fc.bias"].dtype == torch.bfloat16


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    files = set()
    for n in range(8):
        backwards = dict(reversed(arrays().items()))
        save_model(tmp_path / str(n), SCHEMA, backwards if n % 2 else arrays(), note="n")
        files.add((tmp_path / str(n)).read_bytes())
    assert len(files) == 1


def test_another_note_or_number_is_another_file(tmp_path: Path) -> None:
    save_model(tmp_path / "a", SCHEMA, arrays(), note="a")
    save_model(tmp_path / "b", SCHEMA, arrays(), note="b")
    save_model(tmp_path / "c", SCHEMA, arrays() | {"fc.bias": np.zeros(2, NUMPY["bfloat16"])}, note="a")
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 3


# ---------------------------------------------------------------- what is refused


def refused(path: Path) -> str:
    """The text with which a file is refused; it names the file and how to make a good one."""
    with pytest.raises(RunError) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    text = refused(tmp_path / "nowhere" / "model.safetensors")
    assert "No such file or directory" in text
    assert "fedreuse init-model" in text


def test_a_folder(tmp_path: Path) -> None:
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"PK\x03\x04 a zip file, as torch.save makes them", bytes(100)]
)
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert "is not a model file made by `fedreuse init-model`" in refused(path)


def test_a_model_cut_short_anywhere(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "is not a model file" in refused(path)
    path.write_bytes(whole + b"\0")
    assert "is not a model file" in refused(path)


def test_a_safetensors_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    assert "is not a model file" in refused(path)
    safetensors.torch.save_file({"w": torch.zeros(2)}, path, metadata={"format": "pt"})
    assert "is not a model file" in refused(path)


@pytest.mark.parametrize(
    "about",
    [
        "not json",
        "[]",
        "{}",
        '{"kinds": 3}',
        '{"kinds": "w"}',
        '{"kinds": [["w"]]}',
        '{"kinds": [["w", "PARAMETER", 1]]}',
        '{"kinds": [["w", "BUFFER"]]}',
        '{"kinds": [["w", ["PARAMETER"]]]}',
        '{"kinds": [["v", "PARAMETER"]]}',
        '{"kinds": [["w", "INTEGER_BUFFER"]]}',
        '{"kinds": [["w", "PARAMETER"], ["w", "PARAMETER"]]}',
    ],
)
def test_metadata_that_do_not_fit_the_tensors(tmp_path: Path, about: str) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"w": torch.zeros(2)}
    safetensors.torch.save_file(tensors, path, metadata={"fedreuse": '{"kinds": [["w", "PARAMETER"]]}'})
    assert load_model(path)[0].tensors == (TensorSpec("w", "float32", (2,), PARAMETER),)
    safetensors.torch.save_file(tensors, path, metadata={"fedreuse": about})
    assert "is not a model file" in refused(path)


def test_a_dtype_the_protocol_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    kinds = json.dumps({"kinds": [["w", "PARAMETER"]]})
    safetensors.torch.save_file(
        {"w": torch.zeros(2).to(torch.float8_e5m2)}, path, metadata={"fedreuse": kinds}
    )
    assert "is not a model file" in refused(path)
