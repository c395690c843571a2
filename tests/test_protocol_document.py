"""The protocol's own description: its examples are real, and its tables are complete."""

import re
from pathlib import Path

import numpy as np

from fedreuse.proto import PROTOCOL_VERSION, codec, floats, masks, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec

DOCUMENT = (Path(__file__).parents[1] / "proto" / "README.md").read_text(encoding="utf-8")
SCHEMA = Schema((TensorSpec("w", "float32", (2, 8), PARAMETER),))
OLD = np.ones(16, np.float32)
OLD[6] = -2
BASE = OLD.view(np.uint8)


def examples() -> list[bytes]:
    """The hexadecimal blocks, without their explanations."""
    blocks = re.findall(r"```hex\n(.*?)```", DOCUMENT, flags=re.S)
    pair = r"(?:[0-9a-f]{2}(?: |$))+"
    texts = ["".join(re.match(pair, line)[0] for line in block.splitlines()) for block in blocks]  # type: ignore[index]
    return [bytes.fromhex(text) for text in texts]


def test_the_change_is_what_the_document_shows() -> None:
    body, header, _ = examples()
    up, down = np.uint32(0x3F800001), np.uint32(0xC0000002)  # the next float above 1; the second below -2
    new = OLD.copy()
    new.view(np.uint32)[[1, 6]] = up, down
    dense = codec.dense_payload(SCHEMA, new.view(np.uint8))
    sealed = transfers.seal_change(SCHEMA, dense, new.view(np.uint8), (4, BASE))
    assert sealed is not None
    assert sealed.body == body
    message = pb.ModelBroadcast(round=5, transfer=transfers.transfer_header(SCHEMA, sealed))
    assert pb.ServerMessage(model=message, received=1).SerializeToString() == header


def test_the_documents_bytes_are_read_as_it_says() -> None:
    body, header, _ = examples()
    transfer = pb.ServerMessage.FromString(header).model.transfer
    blocks = codec.check_layout(SCHEMA, transfer)
    payload = transfers.open_body(
        SCHEMA, transfer, codec.Payload(blocks, body), lambda number: {4: BASE}.get(number)
    )
    values = codec.decode(SCHEMA, payload)[0]
    assert values.view(np.uint32)[[1, 6]].tolist() == [0x3F800001, 0xC0000002]
    assert np.array_equal(np.delete(values, [1, 6]), np.delete(OLD, [1, 6]))


def test_the_update_against_its_base() -> None:
    *_, body = examples()
    block = Block(0, pb.BITMAP, 2, 10)
    payload = packing.unpack(SCHEMA, (block,), body, BASE)
    assert bytes(payload.body) == b"\x42\x00" + np.array([1.5 * 2**-19, 2**-19], "<f4").tobytes()


def test_every_code_is_explained_with_its_number() -> None:
    refusals = DOCUMENT[DOCUMENT.index("### Refusals") : DOCUMENT.index("## Schema and payload")]
    rows = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", refusals, flags=re.M))
    assert {int(number): name for number, name in rows.items()} == {
        value: name for name, value in pb.Code.items() if value
    }


def test_the_codings_have_the_numbers_of_the_program() -> None:
    first, second = DOCUMENT.split("the **value coding**")
    for text, names in ((first, masks.NAMES), (second, floats.NAMES)):
        found = re.findall(r"^\| (\d) \| ([A-Z]+) \|", text, flags=re.M)[-len(names) :]
        assert [(int(n), name.lower()) for n, name in found] == list(enumerate(names))


def test_the_document_speaks_of_this_version() -> None:
    assert DOCUMENT.startswith(f"# The fedreuse protocol, version {PROTOCOL_VERSION}\n")
