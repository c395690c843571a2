"""Looking into captured messages: what is read is right, what cannot be read is said, and nothing crashes."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support import small_config
from test_protocol_document import BASE, OLD, SCHEMA, examples
from typer.testing import CliRunner

from fedreuse.proto import codec, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.anatomy import dissect, envelope
from fedreuse.proto.captures import Capture, CaptureTo
from fedreuse.proto.codec import Block
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import chunk_frames, outgoing
from fedreuse.proto.ledger import Row
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.server.store import RunError
from fedreuse.sim import cli
from fedreuse.sim.inspect_view import show
from fedreuse.sim.inspection import inspect
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate

DENSE = (Block(0, pb.DENSE, 16, 64),)
KEPT = (Block(0, pb.DENSE, 2, 64),)
"""Dense, so that the body is not longer than its payload."""


def write(
    folder: Path, round: int, kind: str, message: object, body: bytes = b"", schema: Schema = SCHEMA
) -> Path:
    """A capture of a message of client 7 or to it."""
    way, side = ("up", "client") if kind == "update" else ("down", "server")
    out = outgoing(side, kind, message, received=1, chunks=chunk_frames(side, body))  # type: ignore[arg-type]
    Capture(folder, schema, round, 1)(Row(round, 7, way, kind), message, out.frames)  # type: ignore[arg-type]
    return folder / f"r{round + 1:04d}-c00007-{way}-{kind}.frames"


def model(folder: Path, round: int, sealed: transfers.Sealed) -> Path:
    header = transfers.transfer_header(SCHEMA, sealed)
    return write(folder, round, "model", pb.ModelBroadcast(round=round, transfer=header), bytes(sealed.body))


def newer() -> np.ndarray:
    """The example's model of round 5."""
    new = OLD.copy()
    new.view(np.uint32)[[1, 6]] = np.uint32(0x3F800001), np.uint32(0xC0000002)
    return new


def whole(values: np.ndarray) -> transfers.Sealed:
    return transfers.plain(codec.dense_payload(SCHEMA, values.view(np.uint8)))


def change(values: np.ndarray) -> transfers.Sealed:
    flat = values.view(np.uint8)
    sealed = transfers.seal_change(SCHEMA, codec.dense_payload(SCHEMA, flat), flat, (4, BASE))
    assert sealed is not None
    return sealed


def update(folder: Path, base: int = 5) -> Path:
    """The document's PACKED values, against the model of the given round."""
    body = examples()[2]
    payload = packing.unpack(SCHEMA, KEPT, body, newer().view(np.uint8))
    header = pb.Transfer(
        schema_hash=SCHEMA.hash,
        tensors=[pb.TensorHeader(index=0, mode=pb.DENSE, kept=2, format=pb.RAW)],
        length=len(body),
        checksum=codec.checksum(body),
        coding=pb.PACKED,
        base=base,
        content=codec.checksum(payload.body),
    )
    return write(folder, 5, "update", pb.SparseUpdate(round=5, transfer=header, steps=3), body)


def rendered(path: Path, width: int = 80, run: Path | None = None, **options: bool) -> str:
    out = io.StringIO()
    show(inspect(path, run), Console(file=out, width=width), **options)
    return out.getvalue()


# ---------------------------------------------------------------- the document's examples


def test_a_change_is_told_apart_as_the_document_does() -> None:
    body = examples()[0]  # 02 | 01 | 04 | 42 00 | 04 | 04 | 02 05 | 00
    anatomy = dissect(SCHEMA, pb.CHANGE, DENSE, body, BASE)
    assert [(p.at, p.length, p.text) for p in anatomy.pieces] == [
        (0, 0, "section of w: 16 coordinates"),
        (0, 1, "2 are stored"),
        (1, 1, "indices: BITMAP"),
        (2, 1, "bits: stream of 2 bytes, stored in 2"),
        (3, 2, "2 bytes"),
        (5, 1, "values: STEPS"),
        (6, 1, "symbols: stream of 2 bytes, stored in 2"),
        (7, 2, "2 bytes"),
        (9, 1, "low bits, 1 planes, 1 bytes"),
    ]
    assert anatomy.stop is None
    (found,) = anatomy.found
    assert (found.stored, found.index_coding, found.value_coding) == (2, "bitmap", "steps")
    assert (found.index_bytes, found.value_bytes) == (5, 5)
    # All lengths of STEPS are known without the base.
    assert dissect(SCHEMA, pb.CHANGE, DENSE, body) == anatomy


def test_values_against_an_unknown_base_are_read_as_far_as_they_can_be() -> None:
    body = examples()[2]  # 02 | 01 | 04 42 00 | 03 | 6c | 04 00 00 | 00 00 00 01
    full = dissect(SCHEMA, pb.PACKED, KEPT, body, BASE)
    assert full.stop is None
    assert [(p.at, p.length) for p in full.pieces[-3:]] == [(7, 1), (8, 2), (10, 4)]
    part = dissect(SCHEMA, pb.PACKED, KEPT, body)
    assert part.stop is not None
    assert part.pieces[:-1] == full.pieces[:-1]
    assert (part.pieces[-1].at, part.pieces[-1].length) == (10, 4)
    (found,) = part.found
    assert (found.index_bytes, found.value_bytes) == (5, None)


def test_the_header_of_the_document_is_told_apart() -> None:
    header = examples()[1]
    pieces = envelope(header, pb.ServerMessage)
    assert [(p.at, p.length, p.text) for p in pieces[:6]] == [
        (0, 2, "model, 45 bytes"),
        (2, 2, "round 5"),
        (4, 2, "transfer, 41 bytes"),
        (6, 9, "schema_hash 43e3034ab3a5d15a"),
        (15, 2, "tensors, 6 bytes"),
        (17, 2, "mode DENSE"),
    ]
    assert pieces[-1].text == "received 1"
    covered = sorted(n for p in pieces for n in range(p.at, p.at + p.length))
    assert covered == list(range(len(header)))


def test_repeated_fields_are_left_out_unless_asked_for() -> None:
    message = pb.ClientMessage(
        update=pb.SparseUpdate(transfer=pb.Transfer(tensors=[pb.TensorHeader(index=9)] * 10))
    )
    data = message.SerializeToString()
    texts = [piece.text for piece in envelope(data, pb.ClientMessage)]
    assert texts.count("tensors, 2 bytes") == 3
    assert "7 more like these" in texts
    everything = [piece.text for piece in envelope(data, pb.ClientMessage, everything=True)]
    assert everything.count("tensors, 2 bytes") == 10


SHAPES = [(), (5,), (70, 80), (3, 2000, 700)]


@pytest.mark.parametrize("keep", [1.0, 0.3, 0.01])
def test_every_byte_of_a_body_belongs_to_one_piece(keep: float) -> None:
    """All codings, grids and cut tensors included."""
    random = np.random.default_rng(3)
    kinds = [(f"p{n}", "float32", shape, PARAMETER) for n, shape in enumerate(SHAPES)]
    kinds += [("half", "float16", (90, 90), PARAMETER), ("mean", "float64", (5000,), FLOAT_BUFFER)]
    schema = Schema((*(TensorSpec(*kind) for kind in kinds), TensorSpec("n", "int64", (), INTEGER_BUFFER)))
    base = np.zeros(schema.offsets[-1], np.uint8)
    arrays = {}
    for index in schema.travelling:
        spec = schema.tensors[index]
        rows = np.repeat(
            random.random(spec.shape[0] if spec.shape else 1) ** 6,
            spec.size // max(1, (spec.shape or (1,))[0]),
        )
        schema.views(base)[index][:] = random.normal(size=spec.size)
        arrays[index] = (random.normal(size=spec.size) * rows).astype(spec.numpy_dtype)
    payload = codec.encode(schema, arrays, lambda i: max(1, int(keep * schema.tensors[i].size)))
    sealed = transfers.seal(schema, payload, (0, base))
    assert sealed.coding == pb.PACKED
    anatomy = dissect(schema, sealed.coding, sealed.blocks, sealed.body, base)
    assert anatomy.stop is None
    at = 0
    for piece in anatomy.pieces:
        assert piece.at == at
        at += piece.length
    assert at == len(sealed.body)
    sizes = [(f.stored, f.index_bytes, f.value_bytes) for f in anatomy.found]
    assert sizes == [(s.stored, s.index_bytes, s.value_bytes) for s in sealed.sections]
    cut = [(f.part, f.parts) for f in anatomy.found if f.parts > 1]
    assert cut == [(n, 5) for n in range(1, 6)]  # 3 rows of 1,400,000: five pieces of 2^20 at most


# ---------------------------------------------------------------- captures and their bases


def test_a_base_in_the_same_folder_is_found_through_another(tmp_path: Path) -> None:
    """The update needs round 5's model, which is a change of round 4's, which is whole."""
    path = update(tmp_path)
    alone = inspect(path)
    assert alone.body is not None
    assert "needs the model of round 6" in str(alone.body.problem)
    assert alone.body.values is None
    model(tmp_path, 5, change(newer()))
    assert "needs the model" in str(inspect(path).body.problem)  # type: ignore[union-attr]
    model(tmp_path, 4, whole(OLD))
    body = inspect(path).body
    assert body is not None
    assert (body.problem, body.base_from) == (None, "r0006-c00007-down-model.frames")
    assert body.values is not None
    assert body.values[0][[1, 6]].tolist() == [1.5 * 2**-19, 2**-19]
    assert np.count_nonzero(body.values[0]) == 2


def test_another_runs_model_is_no_base(tmp_path: Path) -> None:
    model(tmp_path, 5, whole(OLD * 3))
    body = inspect(update(tmp_path)).body
    assert body is not None
    assert "would be refused" in str(body.problem)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_shows_sender_fields_tensors_and_bytes(tmp_path: Path, width: int) -> None:
    model(tmp_path, 5, whole(newer()))
    text = rendered(update(tmp_path), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for shown in (
        "update, client 7 to the server, round 6",
        "PACKED against the model of round 6",
        "match their checksums",
        "steps 3",
        "bitmap / based",
        "64 B",  # modelled
        "14 B",  # on the wire
        "100.00",
        "0 to 2.86e-06",
        "0000 02 2 are stored",
        "0006 6c lowest exponent e0 108",
    ):
        assert shown in words


def test_hex_shows_every_byte(tmp_path: Path) -> None:
    body = bytes(range(256)) * 4
    spec = Schema((TensorSpec("w", "float32", (256,), PARAMETER),))
    payload = codec.Payload((Block(0, pb.DENSE, 256, 1024),), body)
    message = pb.ModelBroadcast(transfer=codec.transfer_header(spec, payload))
    path = write(tmp_path, 0, "model", message, body, spec)
    assert "fe ff" not in rendered(path)
    assert rendered(path, everything=True).count("fe ff") == 4


def test_a_real_runs_messages_are_all_readable(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=3", "sim.workers=1")
    folder = create_run(config, make_task(config), body="sim --wire")
    simulate(folder, config, wire=True, capture=CaptureTo(tmp_path / "cap", 3))
    paths = sorted((tmp_path / "cap").iterdir())
    bodies = [inspect(path).body for path in paths]
    assert {path.name.split("-")[3].partition(".")[0] for path in paths} >= {
        "update",
        "model",
        "join",
        "welcome",
    }
    assert sum(body is not None for body in bodies) > 6
    assert all(body.problem is None and body.anatomy.stop is None for body in bodies if body)


def test_the_first_model_comes_from_the_run_folder(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=1", "sim.workers=1", task="support:Grid")
    folder = create_run(config, make_task(config), body="sim --wire")
    simulate(folder, config, wire=True, capture=CaptureTo(tmp_path / "cap", 1))
    path = next((tmp_path / "cap").glob("r0001-*-up-update.frames"))
    for other in (tmp_path / "cap").glob("*-down-*"):
        other.unlink()
    for run in (None, folder):
        body = inspect(path, run).body
        assert body is not None
        if body.base is not None:
            assert (body.problem is None) == (run is not None)


def test_a_run_with_another_model_is_refused(tmp_path: Path) -> None:
    folder = create_run(config := small_config(tmp_path / "run"), make_task(config))
    path = update(tmp_path, base=0)
    for run in (folder, tmp_path / "nowhere"):
        with pytest.raises(RunError):
            inspect(path, run)


# ---------------------------------------------------------------- hostile files


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    path = update(tmp_path)
    assert call(path)[0] == 0
    assert "No such file" in call(tmp_path / "r0001-c00001-up-update.frames")[1]
    for name, words in {
        "notes.txt": "not the name of a capture",
        "r0001-c00001-up-join.frames": "was it renamed?",
        "r0001-c00001-down-update.frames": "r0001-c00001-down-update.frames",
    }.items():
        (tmp_path / name).write_bytes(path.read_bytes())
        code, text = call(tmp_path / name)
        assert (code, text.startswith("error:")) == (1, True)
        assert words in text
    cut = tmp_path / "r0001-c00001-up-update.frames"
    cut.write_bytes(path.read_bytes()[: -len(examples()[2]) - 8])
    assert "ends before its message" in call(cut)[1]
    cut.write_bytes(path.read_bytes() + b"\1\0\0\0x")
    assert "after a whole message" in call(cut)[1]


def test_promises_of_enormous_things_are_refused(tmp_path: Path) -> None:
    huge = Schema((TensorSpec("w", "float32", (1 << 40,), PARAMETER),))
    tensor = pb.TensorHeader(index=0, mode=pb.DENSE, kept=1 << 40, format=pb.RAW)
    header = pb.Transfer(schema_hash=huge.hash, tensors=[tensor], length=5, coding=pb.PACKED)
    path = write(tmp_path, 0, "model", pb.ModelBroadcast(transfer=header), b"abcde", huge)
    assert "the limit" in call(path)[1]
    large = Schema((TensorSpec("w", "float32", (1 << 20,), PARAMETER),))
    header.tensors[0].kept, header.schema_hash, header.length = 1 << 20, large.hash, 1 << 22
    path = write(tmp_path / "b", 0, "model", pb.ModelBroadcast(transfer=header), b"abcde", large)
    code, text = call(path)
    assert (code, "ends before" in text or "is announced" in text) == (1, True)


def test_no_changed_byte_brings_a_traceback(tmp_path: Path) -> None:
    """Either the file is refused in a sentence, or the page says what is wrong with the body."""
    model(tmp_path, 5, whole(newer()))
    path = update(tmp_path)
    data, random = path.read_bytes(), np.random.default_rng(11)
    for n in range(len(data)):
        changed = bytearray(data)
        changed[n] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(changed))
        try:
            inspection = inspect(path)
        except ProtocolError:
            continue
        show(inspection, Console(file=io.StringIO(), width=80))


def test_a_field_in_another_form_is_unknown() -> None:
    """protobuf skips such fields: train_loss as 8 bytes, steps as a string, update as a number."""
    data = b"\x1a\x0c" + b"\x21" + bytes(range(8)) + b"\x1a\x01a" + b"\x18\x05"
    pb.ClientMessage.FromString(data)
    texts = [piece.text for piece in envelope(data, pb.ClientMessage)]
    assert texts == ["update, 12 bytes", "unknown field 4", "unknown field 3", "unknown field 3"]


def test_help_teaches() -> None:
    code, text = call("--help")
    assert code == 0
    for word in ("captured message", "--hex", "--run", "--capture"):
        assert word in text
    for command in ("sim", "launch", "server"):
        result = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "120"})
        assert "--capture-rounds" in result.output
        assert "fedreuse inspect" in " ".join(result.output.split())


def test_capturing_in_process_needs_messages(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.app, ["sim", "--capture", str(tmp_path / "cap"), f"output={tmp_path / 'run'}"]
    )
    assert result.exit_code == 1
    assert "--capture needs --wire" in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()
