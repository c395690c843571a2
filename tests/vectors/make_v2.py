"""Golden vectors of packed bodies and changes, put together by hand from the description in proto/README.md.

Values are bit patterns. What a body consists of is said part by part; `packed` in the folder above, which shares
nothing with the encoder, turns numbers into bits. `python make_v2.py` writes NAME.json into the folder v2 beside
this file, always the same bytes. `written` vectors are what our encoder must write, too; the others hold codings
that it chooses only for more values, or frames, which depend on the zstd at hand. Every reader must read all.
"""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))

import packed
from packed import bits, low_bits, stored, varint

FOLDER = Path(__file__).parent / "v2"
MODES = {"DENSE": 1, "PAIRS": 2, "BITMAP": 3}
CODINGS = {"PACKED": 1, "CHANGE": 2}
KINDS = {"PARAMETER": 1, "FLOAT_BUFFER": 2, "INTEGER_BUFFER": 3}
WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
BASE_ROUND = 300


@dataclass
class Tensor:
    """`old` is its base; `kept` what the payload holds: coordinate to pattern, or all patterns."""

    name: str
    dtype: str
    shape: str
    old: list[int]
    kept: dict[int, int] | list[int]
    mode: str = "DENSE"
    kind: str = "PARAMETER"

    def __post_init__(self) -> None:
        self.words = self.kept if isinstance(self.kept, dict) else dict(enumerate(self.kept))

    def raw(self, patterns: list[int]) -> bytes:
        return b"".join(pattern.to_bytes(WIDTHS[self.dtype], "little") for pattern in patterns)

    @property
    def payload(self) -> bytes:
        at = sorted(self.words)
        values = self.raw([self.words[j] for j in at])
        if self.mode == "PAIRS":
            return b"".join(struct.pack("<I", j) for j in at) + values
        if self.mode == "BITMAP":
            return bits([j in self.words for j in range(len(self.old))]) + values
        return self.raw([self.words.get(j, 0) for j in range(len(self.old))])


@dataclass
class Case:
    """`declared` is k of a dense tensor that holds fewer values."""

    name: str
    about: str
    coding: str
    tensors: list[Tensor]
    body: list[tuple[bytes, str]]
    based: bool = True
    written: bool = True
    declared: dict[str, int] = field(default_factory=dict)


def text(patterns: list[int], dtype: str) -> str:
    """Patterns in hexadecimal; n times the same one after the other as PATTERN*n."""
    digits = 2 * WIDTHS[dtype]
    runs = [(f"{pattern:0{digits}x}", len(list(same))) for pattern, same in groupby(patterns)]
    return " ".join(word if count == 1 else f"{word}*{count}" for word, count in runs)


# ---------------------------------------------------------------- a change of every dtype

# float32: 1.0 = 3f800000, -2.0 = c0000000. Ranks: 1.0 is bf800000, -2.0 is 3fffffff.
W_OLD = [0x3F800000] * 6 + [0xC0000000, 0x80000000]
W_NEW = [*W_OLD[:1], 0x3F800003, *W_OLD[2:5], 0x3F7FFFFF, 0xC0000101, 0x00000000]
H_OLD, H_NEW = [0x3C00, 0x3C00, 0x8001], [0x3C00, 0x3C40, 0x0001]
B_OLD, B_NEW = [0x3F80, 0xBF80], [0x3F81, 0xBF82]
D_OLD, D_NEW = [0x3FF0000000000000, 0, 0], [0x3FF0000000000000, 0xBFF0000000000000, 1]
V_OLD, V_NEW = [0x3F800000], [0x3F800000]

EVERY_DTYPE = Case(
    "change_every_dtype",
    "A section each for float32 (two tensors), float16, bfloat16, float64 and a float32 buffer that stands still.",
    "CHANGE",
    [
        Tensor("weight", "float32", "2x4", W_OLD, W_NEW),
        Tensor("half", "float16", "3", H_OLD, H_NEW),
        Tensor("brain", "bfloat16", "2", B_OLD, B_NEW),
        Tensor("double", "float64", "3", D_OLD, D_NEW),
        Tensor("scale", "float32", "", [0x40000000], [0x40000001]),
        Tensor("mean", "float32", "1", V_OLD, V_NEW, kind="FLOAT_BUFFER"),
    ],
    [
        (b"\x05", "weight and scale: 5 of 9 coordinates changed"),
        (b"\x01" + stored(bits([0, 1, 0, 0, 0, 1, 1, 1, 1])), "BITMAP of coordinates 1, 5, 6, 7, 8"),
        # 3 up; 1 down; 257 away from zero: down; -0 to 0: 1 up; 1 up.
        (b"\x04" + stored([4, 3, 19, 2, 2]), "STEPS: lengths 2, 1, 9 (down), 1, 1"),
        (bytes.fromhex("01 01"), "one bit below 3 = 11; a byte below 257 = 1 00000001"),
        (b"\x02" + b"\x01" + stored(bits([0, 1, 1])), "half: 2 of 3, BITMAP"),
        # 64 up; 8001 is rank 7ffe, 0001 is 8001: 3 up.
        (b"\x04" + stored([14, 4]), "STEPS: lengths 7 and 2"),
        (bytes.fromhex("01 00 00 00 00 00 00"), "one bit of 3; six bits of 64 = 1000000"),
        (b"\x02\x00", "brain: both, ALL"),
        (b"\x04" + stored([2, 5]), "STEPS: 1 up, 2 down"),
        (bytes.fromhex("00"), "one bit of 2 = 10"),
        (b"\x02\x01" + stored(bits([0, 1, 1])), "double: 2 of 3, BITMAP"),
        (b"\x00" + struct.pack("<dQ", -1.0, 1), "RAW: -1.0 and the smallest subnormal"),
        (bytes.fromhex("00 02 00"), "mean: none changed; GAPS, no numbers"),
        (bytes.fromhex("04 00"), "STEPS, no symbols"),
    ],
)

# ---------------------------------------------------------------- gaps

LONG_OLD = [0x3F80] * 5000
LONG_NEW = [0x3F81 if j in (7, 8, 4999) else 0x3F80 for j in range(5000)]

GAPS = Case(
    "change_gaps",
    "Three of 5000 coordinates: skipped are 7, 0 and 4990.",
    "CHANGE",
    [Tensor("line", "bfloat16", "5000", LONG_OLD, LONG_NEW)],
    [
        (b"\x03\x02", "3 coordinates, GAPS"),
        (stored([3, 0, 13]), "bit lengths of 7, 0, 4990"),
        # 7 = 1 11; 4990 = 1 0011 01111110: one byte 7e, then four bit planes, 1 1 0 0.
        (bytes.fromhex("01 01 7e 01 01 00 00"), "two bits of 7; twelve bits of 4990"),
        (b"\x04" + stored([2, 2, 2]), "STEPS: 1 up each"),
    ],
)

# ---------------------------------------------------------------- updates

MIXED = Case(
    "update_modes",
    "All three modes in one section, and -0.0 in a dense tensor that declares more values than it stores.",
    "PACKED",
    [
        Tensor("a", "float32", "12", [0] * 12, {3: 0x3F800000, 11: 0xBF800000}, "PAIRS"),
        Tensor("b", "float32", "3x3", [0] * 9, {0: 0x40000000, 4: 0x40400000, 8: 0x40800000}, "BITMAP"),
        Tensor("c", "float32", "4", [0] * 4, {1: 0x80000000, 2: 0x40A00000}),
        Tensor("mean", "float32", "2", [0] * 2, [0x3F000000, 0xBF000000], kind="FLOAT_BUFFER"),
    ],
    [
        (b"\x07", "a, b, c end to end: 7 of 25 coordinates"),
        (b"\x01" + stored(bits([j in (3, 11, 12, 16, 20, 22, 23) for j in range(25)])), "BITMAP"),
        (b"\x00" + struct.pack("<7f", 1, -1, 2, 3, 4, -0.0, 5), "RAW"),
        (b"\x02\x00", "mean: both, ALL"),
        (b"\x00" + struct.pack("<2f", 0.5, -0.5), "RAW"),
    ],
    based=False,
    declared={"c": 3},
)


def useful(u: int, w: int) -> int:
    """m, as the protocol's description has it."""
    e_u, e_w, m_w = u >> 23 & 0xFF, w >> 23 & 0xFF, w & 0x7FFFFF
    g = e_w - e_u
    if 0 in (e_u, e_w) or g < 2:
        return 23
    return max(0, 23 - g) + (g <= 23 and u >> 31 != w >> 31 and m_w < 1 << 24 - g)


def small(n: int, negative: bool = False) -> int:
    """The pattern of n times 2^-24, half the unit of 1.0."""
    return struct.unpack("<I", struct.pack("<f", -(n * 2.0**-24) if negative else n * 2.0**-24))[0]


# Weights 1.0, then 1.25, then -1.0; updates of a few halves of their unit. Those that make 1.0 smaller may be odd.
WEIGHTS = [0x3F800000] * 6 + [0x3FA00000] * 5 + [0xBF800000] * 3
DIFFERENCES = [
    *(small(n, True) for n in (1, 2, 3, 5, 9)),
    small(6),
    *(small(n, n % 4 == 0) for n in (2, 4, 6, 12, 14)),
    *(small(n) for n in (1, 7, 15)),
]
LOWEST = 127 - 24  # the exponent of 2^-24
USED = [useful(u, w) for u, w in zip(DIFFERENCES, WEIGHTS, strict=True)]
MANTISSAS = [(u & 0x7FFFFF) >> 23 - m for u, m in zip(DIFFERENCES, USED, strict=True)]
assert all(m << 23 - n == u & 0x7FFFFF for u, m, n in zip(DIFFERENCES, MANTISSAS, USED, strict=True))

BASED = Case(
    "update_based",
    "Differences of weights near 1.0 in halves of its unit: up to three mantissa bits instead of 23.",
    "PACKED",
    [Tensor("w", "float32", "2x7", WEIGHTS, DIFFERENCES)],
    [
        (b"\x0e\x00", "14 coordinates, ALL"),
        (bytes([3, LOWEST]), "BASED, e0 = 103"),
        (stored([2 * ((u >> 23 & 0xFF) - LOWEST) + (u >> 31) for u in DIFFERENCES]), "symbols"),
        (low_bits(MANTISSAS, USED), "mantissas: " + " ".join(map(str, USED)) + " bits"),
    ],
)

# ---------------------------------------------------------------- what only more values need

AT = [64 * r + c for r in range(64) for c in range(64) if r == c or r * c % 37 == 1]
SIGNS = [j // 64 % 3 == 0 or j % 5 == 0 for j in AT]  # rows with more minuses, rows with fewer
VALUES = {j: sign << 31 | 0x3F800000 + 0x0A5F3 * (j % 97) for j, sign in zip(AT, SIGNS, strict=True)}
FLAGS = [[64 * r + c in VALUES for c in range(64)] for r in range(64)]
ROWS, COLUMNS, GROUPS = [r % 2 for r in range(64)], [c // 7 % 3 for c in range(64)], [[1, 0, 3], [3, 1, 1]]
OWN = [GROUPS[ROWS[j // 64]][COLUMNS[j % 64]] for j in AT]
STILL = [0x3F800000] * 4096
MOVED = [VALUES.get(j, 0x3F800000) for j in range(4096)]
STEPPED = [j for j in AT if MOVED[j] != STILL[j]]
STEPPED_FLAGS = [[64 * r + c in STEPPED for c in range(64)] for r in range(64)]

SYMBOLS = [2 * ((VALUES[j] >> 23 & 0xFF) - 126) + sign for j, sign in zip(AT, SIGNS, strict=True)]
UPDATE_GRID = Case(
    "update_grid",
    "A grid of two classes of rows, three of columns and four groups, of which one has no cells; signs turned in the "
    "rows with more minuses.",
    "PACKED",
    [Tensor("w", "float32", "64x64", [0] * 4096, VALUES, "PAIRS")],
    [
        (varint(len(AT)), f"{len(AT)} of 4096 coordinates"),
        (b"\x03" + packed.grid(FLAGS, ROWS, COLUMNS, GROUPS), "GRID"),
        (
            packed.floats(
                [VALUES[j] for j in AT],
                126,
                symbols=packed.grid_symbols(SYMBOLS, AT, OWN, 64, 64),
            ),
            "FLOAT, e0 = 126, which no value has",
        ),
    ],
    based=False,
    written=False,
)

WAYS = [packed.rank(MOVED[j], 4) - packed.rank(STILL[j], 4) for j in STEPPED]
CHANGE_GRID = Case(
    "change_grid",
    "The same coordinates as steps from 1.0, where the value is another.",
    "CHANGE",
    [Tensor("w", "float32", "64x64", STILL, MOVED)],
    [
        (varint(len(STEPPED)), f"{len(STEPPED)} of 4096 coordinates"),
        (b"\x03" + packed.grid(STEPPED_FLAGS, ROWS, COLUMNS, GROUPS), "GRID"),
        (
            packed.steps(
                [MOVED[j] for j in STEPPED],
                [STILL[j] for j in STEPPED],
                4,
                packed.grid_symbols(
                    [2 * abs(way).bit_length() + (way < 0) for way in WAYS],
                    STEPPED,
                    [GROUPS[ROWS[j // 64]][COLUMNS[j % 64]] for j in STEPPED],
                    64,
                    64,
                ),
            ),
            "STEPS",
        ),
    ],
    written=False,
)

# Frames by hand (RFC 8878): magic, descriptor 20 (single segment, one byte of content size), size, a block of one
# repeated byte (header size << 3 | 1 << 1 | 1), the byte.
RUN = [0x3FC00000] * 100  # 1.5; rotated left by one: 7f800000


def run(byte: int, count: int) -> bytes:
    frame = (
        bytes.fromhex("28b52ffd20") + bytes([count]) + (count << 3 | 3).to_bytes(3, "little") + bytes([byte])
    )
    return varint(2 * len(frame) + 1) + frame


FRAMES = Case(
    "update_frames",
    "A hundred times 1.5 in planes, each a frame of one block of a repeated byte.",
    "PACKED",
    [Tensor("w", "float32", "104", [0] * 104, {j: 0x3FC00000 for j in range(100)}, "PAIRS")],
    [
        (b"\x64", "100 of 104 coordinates"),
        (b"\x01" + stored(bits([1] * 100 + [0] * 4)), "BITMAP, stored"),
        (b"\x01" + run(0, 100) + run(0, 100), "PLANES: the lower two are zero"),
        (run(0x80, 100), "the third plane"),
        (run(0x7F, 100), "the exponents"),
    ],
    based=False,
    written=False,
)

CASES = [EVERY_DTYPE, GAPS, MIXED, BASED, UPDATE_GRID, CHANGE_GRID, FRAMES]


# ---------------------------------------------------------------- files


def number_field(number: int, value: int) -> bytes:
    """A varint field; proto3 leaves out zeros."""
    return varint(number * 8) + varint(value) if value else b""


def fixed64_field(number: int, value: int) -> bytes:
    return varint(number * 8 + 1) + struct.pack("<Q", value)


def message_field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def build(case: Case) -> bytes:
    body = b"".join(data for data, _ in case.body)
    payload = b"".join(tensor.payload for tensor in case.tensors)
    canonical = "".join(f"{t.name}\t{t.dtype}\t{t.shape}\t{KINDS[t.kind]}\n" for t in case.tensors)
    schema_hash = xxhash.xxh3_64_intdigest(canonical.encode())
    kept = [case.declared.get(t.name, len(t.words)) for t in case.tensors]
    headers = [
        number_field(1, index) + number_field(2, MODES[t.mode]) + number_field(3, k) + number_field(4, 1)
        for index, (t, k) in enumerate(zip(case.tensors, kept, strict=True))
    ]
    header = (
        fixed64_field(1, schema_hash)
        + b"".join(message_field(2, content) for content in headers)
        + number_field(3, len(body))
        + fixed64_field(4, xxhash.xxh3_64_intdigest(body))
        + number_field(5, CODINGS[case.coding])
        + (number_field(6, BASE_ROUND) if case.based else b"")
        + fixed64_field(7, xxhash.xxh3_64_intdigest(payload))
    )
    description = {
        "about": case.about,
        "coding": case.coding,
        "base": BASE_ROUND if case.based else None,
        "written": case.written,
        "tensors": [
            {
                "name": t.name,
                "dtype": t.dtype,
                "shape": t.shape,
                "kind": t.kind,
                "mode": t.mode,
                "kept": k,
                "base": text(t.old, t.dtype) if case.based else None,
                "content": text([t.words.get(j, 0) for j in range(len(t.old))], t.dtype),
                "coordinates": None if t.mode == "DENSE" else " ".join(map(str, sorted(t.words))),
            }
            for t, k in zip(case.tensors, kept, strict=True)
        ],
        "header": header.hex(),
        "body": [f"{data.hex()}  {meaning}" for data, meaning in case.body],
    }
    return (json.dumps(description, indent=2, ensure_ascii=False) + "\n").encode()


def build_all() -> dict[str, bytes]:
    return {f"{case.name}.json": build(case) for case in CASES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in build_all().items():
        (FOLDER / name).write_bytes(data)
