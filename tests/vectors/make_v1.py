"""Golden vectors of protocol version 1, made with nothing but `struct`, plain Python and xxhash.

An encoder written a second time, on purpose unlike the first: values are Python floats, bits are strings,
Top-K is a sort. `python make_v1.py` writes, for each case, into the folder v1 beside this file

    NAME.json        the input, what is expected and the body with each part's meaning
    NAME.header.bin  the serialized Transfer
    NAME.body.bin    the body

and always the same bytes.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

FOLDER = Path(__file__).parent / "v1"

DENSE, PAIRS, BITMAP = 1, 2, 3
MODE_NAMES = {DENSE: "DENSE", PAIRS: "PAIRS", BITMAP: "BITMAP"}
KINDS = {"PARAMETER": 1, "FLOAT_BUFFER": 2, "INTEGER_BUFFER": 3}
CODES = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


def number(dtype: str, value: float) -> bytes:
    """One value in little-endian bytes; it must be exact, so that the decimal text says all."""
    if dtype == "bfloat16":
        # The upper half of a float32.
        whole = struct.pack("<f", value)
        assert whole[:2] == bytes(2), f"{value} is not a bfloat16"
        return whole[2:]
    data = struct.pack(CODES[dtype], value)
    assert struct.unpack(CODES[dtype], data)[0] == value, f"{value} is not a {dtype}"
    return data


def text(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: list[int]
    values: list[Any]
    kind: str = "PARAMETER"

    def __post_init__(self) -> None:
        assert len(self.values) == math.prod(self.shape)
        if "float" in self.dtype:
            self.values = [float(value) for value in self.values]


@dataclass
class Case:
    name: str
    about: str
    keep_ratio: float
    tensors: list[Tensor]


CASES = [
    Case(
        "fp32_bitmap",
        "k = 4 of 20: bitmap 16 + 3 = 19 bytes, pairs 32, dense 80. Four bits of the last byte are unused.",
        0.2,
        [
            Tensor(
                "conv.weight",
                "float32",
                [2, 1, 2, 5],
                [0.25, -1.5, 0, 3, -0.125, 0.5, 0, 0.75, -8, 0.375, 0, 0, -0.5, 1, 0, 0.0625, 0, 0, 0, 2],
            )
        ],
    ),
    Case(
        "fp32_pairs",
        "k = 2 of 72: pairs 16 bytes, bitmap 8 + 9 = 17, dense 288.",
        0.03,
        [Tensor("fc.weight", "float32", [8, 9], [0.5] * 40 + [-2.0] + [0.25] * 30 + [1024.5])],
    ),
    Case(
        "fp32_dense",
        "Everything is kept; minus zero and the smallest denormal, 2^-149, travel as they are.",
        1.0,
        [Tensor("fc.weight", "float32", [2, 2], [1.0, -0.0, 2.0**-149, -3.5])],
    ),
    Case(
        "dense_with_zeros",
        "k = 8 of 9 float16: dense 18 bytes equals bitmap 16 + 2, and dense comes first. The smallest value "
        "becomes zero.",
        0.9,
        [Tensor("fc.bias", "float16", [9], [1.0, -2.0, 3.0, 0.03125, 5.0, -6.0, 7.0, -8.0, 9.0])],
    ),
    Case(
        "bf16_ties",
        "k = 5 of 16 bfloat16: bitmap 10 + 2 = 12 bytes. Six magnitudes of 1 compete for the last three "
        "places; the lower coordinates win, whatever the sign.",
        0.3125,
        [
            Tensor(
                "layer.weight",
                "bfloat16",
                [4, 4],
                [0.5, -1.0, 0.5, 0.25, 1.0, 2.0, 0.0, -0.5, -1.0, 1.0, 0.0, 1.0, -3.0, 0.125, -1.0, -0.25],
            )
        ],
    ),
    Case(
        "fp16_signed_zeros",
        "k = 6 of 12 float16: four values and, as all zeros tie, the first two of them, one with its sign. "
        "Bitmap 12 + 2 = 14 bytes. -2^-24 is the smallest denormal.",
        0.5,
        [
            Tensor(
                "layer.weight",
                "float16",
                [12],
                [-0.0, 0.0, -0.0, 65504.0, 0.0, -0.5, 0.0, -(2.0**-24), 0.0, 0.0, -0.0, 0.25],
            )
        ],
    ),
    Case(
        "fp64_pairs",
        "k = 1 of 40: pairs 12 bytes, bitmap 8 + 5 = 13, dense 320.",
        0.03,
        [Tensor("embedding.weight", "float64", [40], [0.5] * 39 + [-0.1])],
    ),
    Case(
        "float_buffers",
        "A normalised convolution: parameters by Top-K, running statistics whole, the counter stays at home.",
        0.2,
        [
            Tensor("conv.weight", "float32", [10], [1.0, 2.0, 3.0, 4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0]),
            Tensor("bn.weight", "float32", [3], [0.5, 0.75, -0.5]),
            Tensor("bn.running_mean", "float32", [3], [0.5, 0.0, -0.25], "FLOAT_BUFFER"),
            Tensor("bn.running_var", "bfloat16", [3], [1.0, 0.0, 0.5], "FLOAT_BUFFER"),
            Tensor("bn.num_batches_tracked", "int64", [], [12], "INTEGER_BUFFER"),
        ],
    ),
    Case(
        "scalar_and_empty",
        "A tensor without sides has one value, a tensor with a side of 0 has none and no bytes.",
        0.2,
        [
            Tensor("temperature", "float32", [], [2.5]),
            Tensor("nothing", "float32", [0], []),
            Tensor("flat", "float64", [3, 0, 2], []),
            Tensor("bias", "float32", [2], [-1.0, 4.0]),
        ],
    ),
    Case(
        "integers_dense",
        "Integers and bool are always dense.",
        1.0,
        [
            Tensor("count", "int64", [2], [-2, 2**62 + 1], "INTEGER_BUFFER"),
            Tensor("mask", "bool", [3], [True, False, True], "INTEGER_BUFFER"),
            Tensor("int32", "int32", [1], [-(2**31)], "INTEGER_BUFFER"),
            Tensor("int16", "int16", [2], [-1, 258], "INTEGER_BUFFER"),
            Tensor("int8", "int8", [2], [-128, 127], "INTEGER_BUFFER"),
            Tensor("uint8", "uint8", [2], [0, 255], "INTEGER_BUFFER"),
        ],
    ),
]

# In these cases integer buffers are encoded too; in an update they never travel.
WITH_INTEGERS = {"integers_dense"}


# ---------------------------------------------------------------- one tensor


@dataclass
class Encoded:
    mode: int
    kept: int
    parts: list[tuple[bytes, str]]
    decoded: list[Any]

    @property
    def body(self) -> bytes:
        return b"".join(data for data, _ in self.parts)


def encode(tensor: Tensor, keep_ratio: float) -> Encoded:
    d, dtype = len(tensor.values), tensor.dtype
    k = min(d, max(1, math.floor(keep_ratio * d))) if tensor.kind == "PARAMETER" else d
    order = sorted(range(d), key=lambda j: (-abs(tensor.values[j]), j))
    at = sorted(order[:k])
    zero = 0.0 if "float" in dtype else 0
    decoded = [tensor.values[j] if j in at else zero for j in range(d)]
    width = len(number(dtype, zero))
    sizes = {DENSE: d * width, PAIRS: k * (4 + width), BITMAP: math.ceil(d / 8) + k * width}
    mode = min(sizes, key=lambda mode: (sizes[mode], mode))

    parts = []
    if mode == PAIRS:
        parts += [(struct.pack("<I", j), f"coordinate {j}") for j in at]
    if mode == BITMAP:
        bits = ["1" if j in at else "0" for j in range(d)]
        bits += ["0"] * (-d % 8)
        for first in range(0, len(bits), 8):
            # Coordinate j is bit j % 8, and int() reads the highest bit first.
            byte = int("".join(reversed(bits[first : first + 8])), 2)
            parts.append((bytes([byte]), f"bitmap of coordinates {first}..{min(first + 7, d - 1)}"))
    parts += [
        (number(dtype, decoded[j]), f"value {text(decoded[j])} at {j}")
        for j in (range(d) if mode == DENSE else at)
    ]
    encoded = Encoded(mode, k, parts, decoded)
    assert len(encoded.body) == sizes[mode]
    return encoded


# ---------------------------------------------------------------- protobuf by hand


def varint(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def number_field(field: int, value: int) -> bytes:
    """A varint field; proto3 leaves out zeros."""
    return varint(field * 8) + varint(value) if value else b""


def fixed64_field(field: int, value: int) -> bytes:
    return varint(field * 8 + 1) + struct.pack("<Q", value) if value else b""


def message_field(field: int, content: bytes) -> bytes:
    return varint(field * 8 + 2) + varint(len(content)) + content


def tensor_header(index: int, encoded: Encoded) -> bytes:
    raw = 1
    return (
        number_field(1, index)
        + number_field(2, encoded.mode)
        + number_field(3, encoded.kept)
        + number_field(4, raw)
        + number_field(5, len(encoded.body))
    )


# ---------------------------------------------------------------- one case


def schema_text(tensors: list[Tensor]) -> str:
    return "".join(f"{t.name}\t{t.dtype}\t{'x'.join(map(str, t.shape))}\t{KINDS[t.kind]}\n" for t in tensors)


def build(case: Case) -> dict[str, bytes]:
    """The three files of a case by name."""
    sent = {
        index: encode(tensor, case.keep_ratio)
        for index, tensor in enumerate(case.tensors)
        if tensor.kind != "INTEGER_BUFFER" or case.name in WITH_INTEGERS
    }
    body = b"".join(encoded.body for encoded in sent.values())
    schema_hash = xxhash.xxh3_64(schema_text(case.tensors).encode()).intdigest()
    checksum = xxhash.xxh3_64(body).intdigest()
    header = (
        fixed64_field(1, schema_hash)
        + b"".join(message_field(2, tensor_header(index, encoded)) for index, encoded in sent.items())
        + number_field(3, len(body))
        + fixed64_field(4, checksum)
    )
    description = {
        "about": case.about,
        "keep_ratio": case.keep_ratio,
        "schema": [
            {"name": t.name, "dtype": t.dtype, "shape": "x".join(map(str, t.shape)), "kind": t.kind}
            for t in case.tensors
        ],
        "schema_hash": f"{schema_hash:016x}",
        "values": {t.name: " ".join(map(text, t.values)) for t in case.tensors},
        "blocks": [
            {
                "tensor": case.tensors[index].name,
                "index": index,
                "mode": MODE_NAMES[encoded.mode],
                "kept": encoded.kept,
                "length": len(encoded.body),
                "decoded": " ".join(map(text, encoded.decoded)),
                "body": [f"{data.hex()}  {meaning}" for data, meaning in encoded.parts],
            }
            for index, encoded in sent.items()
        ],
        "length": len(body),
        "checksum": f"{checksum:016x}",
        "header": header.hex(),
    }
    readable = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    return {
        f"{case.name}.json": readable.encode(),
        f"{case.name}.header.bin": header,
        f"{case.name}.body.bin": body,
    }


def build_all() -> dict[str, bytes]:
    return {name: data for case in CASES for name, data in build(case).items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in build_all().items():
        (FOLDER / name).write_bytes(data)
