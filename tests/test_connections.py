"""Layers below gRPC when runs are compared: they belong to connections, and have a rule of their own."""

import csv
import io
import json
from pathlib import Path

import pytest
from test_compare import BYTES, UP, figures, rendered, write_run
from typer.testing import CliRunner

from fedreuse.proto.ledger import COLUMNS
from fedreuse.server.store import RunError
from fedreuse.sim import cli
from fedreuse.sim.compare import Run, compare, to_csv, to_json

LAYERS = ("http2", "tls", "tcp_payload", "tcp_retransmitted", "segments", "pure_acks", "ip")
LOOPBACK = '"TCP_INFO of the sender; ip: absent, loopback"'


def connection(way: str, cells: str, how: str = LOOPBACK, round: int = 1) -> str:
    """A row of one connection: http2, tls, tcp_payload, tcp_retransmitted, segments, pure_acks, ip."""
    return f"{round},0,{way},connection,ok,,,,,{cells},{how}\n"


def write(folder: Path, *rows: str, **extra: object) -> Path:
    """The run of test_compare with rows of connections."""
    old = BYTES.splitlines()
    messages = "".join(f"{line},,,,,,,,\n" for line in old[1:])
    return write_run(folder, rows=",".join(COLUMNS) + "\n" + messages + "".join(rows), summary=None, **extra)  # type: ignore[arg-type]


def only(folder: Path) -> Run:
    (run,) = compare([folder]).runs
    return run


UP_ROWS = connection("up", "300,,310,10,7,2,"), connection("up", "52,,52,0,3,1,")
DOWN_ROWS = (connection("down", "600,,600,0,9,4,"),)


def test_connections_add_up_and_leave_messages_alone(tmp_path: Path) -> None:
    run = only(write(tmp_path / "run", *UP_ROWS, *DOWN_ROWS))
    up = run.measured("up")
    assert {layer: up[layer] for layer in UP} == UP
    assert [up[layer] for layer in LAYERS] == [352, None, 362, 10, 10, 3, None]
    assert run.measured("up", "down")["tcp_payload"] == 362 + 600
    assert all(entry.kind != "connection" for entry in run.entries)
    assert run.partial == run.partial_connections == ()
    # 352 bytes: 2 of the 176 modelled ones, and 352 / 336 of the dense ones.
    assert run.to_modelled(352, "up") == 2
    assert run.to_dense(352, "up") == pytest.approx(352 / 336)
    assert run.to_dense(952, "up", "down") == pytest.approx(952 / 672)


def test_no_connection_means_absent_and_not_zero(tmp_path: Path) -> None:
    run = only(write_run(tmp_path / "run"))
    assert [run.measured("up")[layer] for layer in LAYERS] == [None] * 7
    (absence,) = run.absences[-1:]
    assert absence.layers[0] == "uplink http2"
    assert absence.layers[-1] == "downlink ip"
    assert "no rows of connections" in absence.reason


def test_a_run_in_process_says_that_it_has_no_connections(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "environment.json").write_text('{"body": "sim --wire"}')
    assert "in process: there are no connections" in only(folder).absences[-1].reason


def test_what_a_part_of_the_connections_has_is_not_added_up(tmp_path: Path) -> None:
    rows = (connection("up", "300,,310,10,7,2,900"), connection("up", "52,,,,,,", "not Linux: no TCP_INFO"))
    run = only(write(tmp_path / "run", *rows))
    up = run.measured("up")
    assert [up[layer] for layer in LAYERS] == [352, None, None, None, None, None, None]
    assert run.partial_connections[:2] == ("uplink tcp_payload (1 of 2)", "uplink tcp_retransmitted (1 of 2)")
    (reason,) = {a.reason for a in run.absences if "uplink ip" in a.layers}
    assert reason == "not Linux: no TCP_INFO"
    assert "tcp_payload (1 of 2)" in compare([tmp_path / "run"]).notes[-1]


def test_encrypted_and_open_connections_are_complete_together(tmp_path: Path) -> None:
    """A run that went on with TLS: each connection has one of the two."""
    run = only(
        write(tmp_path / "run", connection("up", "300,,300,0,7,2,"), connection("up", ",80,80,0,3,1,"))
    )
    up = run.measured("up")
    assert (up["http2"], up["tls"], run.connections["up"].socket) == (300, 80, 380)
    text = rendered(tmp_path / "run")
    assert figures(text, "http2 + tls", "To the server").split()[:2] == ["380", "B"]


def test_a_connection_without_either_makes_both_absent(tmp_path: Path) -> None:
    run = only(write(tmp_path / "run", connection("up", "300,,300,0,7,2,"), connection("up", ",,80,0,3,1,")))
    up = run.measured("up")
    assert (up["http2"], up["tls"], up["tcp_payload"]) == (None, None, 380)
    assert run.partial_connections == ("uplink http2 or tls (1 of 2)",)


def test_tls_does_not_apply_where_nothing_is_encrypted(tmp_path: Path) -> None:
    run = only(write(tmp_path / "run", *UP_ROWS, *DOWN_ROWS))
    assert not run.applies("tls", "up")
    assert all("tls" not in layer for absence in run.absences for layer in absence.layers)


def test_a_connection_with_both_is_damage(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"bytes\.csv is damaged: a connection with both"):
        compare([write(tmp_path / "run", connection("up", "300,300,300,0,7,2,"))])


def test_connections_of_an_open_round_do_not_count(tmp_path: Path) -> None:
    late = connection("up", "1000,,1000,0,1,0,", round=4)
    assert only(write(tmp_path / "run", *UP_ROWS, late)).measured("up")["http2"] == 352


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_show_every_layer_and_each_reason_once(tmp_path: Path, width: int) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, *UP_ROWS, *DOWN_ROWS)
    text = rendered(tmp_path / "a", tmp_path / "b", width=width)
    assert max(map(len, text.splitlines())) <= width
    assert figures(text, "http2", "To the server").split()[:4] == ["352", "B", "2.0000", "1.0476"]
    assert figures(text, "segments", "To the server") == "10 10"
    assert figures(text, "ip", "To the server") == "— — — — — —"
    assert figures(text, "http2", "Uplink (bytes)") == "352 B 352 B"
    words = " ".join(text.split())
    assert words.count("loopback") == 1
    assert "ip (both ways) in 1, 2: TCP_INFO of the sender" in words
    assert words.count("cannot be split by kind") == 2


def test_what_control_messages_cost(tmp_path: Path) -> None:
    notices = "2,0,down,reuse_notice,ok,0,0,17,22,,,,,,,,\n2,1,down,reuse_notice,lost,0,0,20,25,,,,,,,,\n"
    run = only(write(tmp_path / "run", notices))
    costs = {(c.direction, c.kind): (c.messages, c.message, c.grpc, c.paper) for c in run.costs()}
    # Two joins of 30 and 35 bytes; notices of 17 and 20 against the paper's 16.
    assert costs[("up", "join")] == (2, 30, 35, 0)
    assert costs[("down", "reuse_notice")] == (2, 18.5, 23.5, 16)
    assert ("up", "update") not in costs
    text = rendered(tmp_path / "run")
    assert figures(text, "reuse_notice (down)") == "2 18.5 B 23.5 B 16 B"


TENSORS = """\
round,direction,tensors,modes,index_coding,value_coding,bodies,stored,modelled,index_bytes,value_bytes
1,up,weight,bitmap,grid,based,2,8,100,20,40
2,up,weight,bitmap,grid,based,1,4,50,10,20
1,up,bias,dense,all,planes,2,4,16,2,8
4,up,weight,bitmap,grid,based,1,4,50,10,20
1,down,weight,dense,all,planes,2,20,80,0,60
"""


def test_what_bodies_are_made_of(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / "tensors.csv").write_text(TENSORS)
    run = only(folder)
    assert run.bodies is not None
    table = [
        (b.direction, b.index_coding, b.value_coding, b.modelled, b.index_bytes, b.value_bytes)
        for b in run.bodies
    ]
    # The row of round 4, which was never committed, is left out; the largest part comes first.
    assert table == [
        ("up", "grid", "based", 150, 30, 60),
        ("up", "all", "planes", 16, 2, 8),
        ("down", "all", "planes", 80, 0, 60),
    ]
    text = rendered(folder)
    assert figures(text, "grid / based", "Up") == "150 B 30 B 60 B 0.6000 90.00"
    assert figures(text, "all", "Up") == "166 B 32 B 68 B 0.6024 100.00"


def test_a_run_without_that_table_shows_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    assert only(folder).bodies is None
    assert "made of" not in rendered(folder)


@pytest.mark.parametrize("damage", ["1,sideways,weight", "1,up,weight,bitmap,grid,based,2,8,many,20,40\n"])
def test_a_damaged_table_is_named(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path / "run")
    (folder / "tensors.csv").write_text(TENSORS + damage)
    with pytest.raises(RunError, match=r"tensors\.csv is damaged"):
        compare([folder])


def test_help_teaches() -> None:
    text = " ".join(CliRunner().invoke(cli.app, ["compare", "--help"], env={"COLUMNS": "120"}).output.split())
    for words in ("not observed", "to dense bytes", "finished or not", "--json", "--csv"):
        assert words in text


def test_json_and_csv_are_complete(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *UP_ROWS, *DOWN_ROWS)
    (folder / "tensors.csv").write_text(TENSORS)
    comparison = compare([folder])
    (run,) = to_json(comparison)["runs"]
    assert json.loads(json.dumps(run)) == run
    up = run["connections"]["up"]
    assert (up["rows"], up["http2"], up["tls"], up["http2_or_tls"], up["segments"]) == (2, 352, None, 352, 10)
    assert up["how"] == {LOOPBACK.strip('"'): 2}
    assert run["ratios"]["up"]["http2"] == {"to_modelled": 2, "to_dense": pytest.approx(352 / 336)}
    assert "segments" not in run["ratios"]["up"]
    assert run["bodies"][0]["index_bytes"] == 30
    assert run["absent"][0]["layers"] == ["uplink ip", "downlink ip"]
    out = io.StringIO()
    to_csv(comparison, out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    lines = {(r["direction"], r["layer"]): r for r in rows if r["kind"] == "connection"}
    assert (lines["up", "http2"]["bytes"], lines["up", "http2"]["count"]) == ("352", "")
    assert (lines["up", "segments"]["bytes"], lines["up", "segments"]["count"]) == ("", "10")
    assert "loopback" in lines["up", "ip"]["absent"]
    assert lines["up", "tls"]["absent"] == "no connection has it"
    bodies = {
        r["layer"]: r["bytes"] or r["count"] for r in rows if r["kind"] == "body" and r["direction"] == "up"
    }
    assert bodies["body grid/based index"] == "30"
    assert bodies["body grid/based stored values"] == "12"
