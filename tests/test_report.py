"""The report's numbers by hand, from the run folder of test_compare; how it looks is test_report_browser's."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_compare import BYTES, settings, write_run
from test_connections import DOWN_ROWS, UP_ROWS, write
from typer.testing import CliRunner

from fedreuse.server.store import RunError
from fedreuse.sim import cli
from fedreuse.sim.behind import read_behind
from fedreuse.sim.compare import compare
from fedreuse.sim.report import figures, gate
from fedreuse.sim.report.chronicle import FATES, Chronicle, read_chronicle
from fedreuse.sim.report.page import render

EVENTS = [
    {"round": 1, "type": "round_opened", "threshold": 0.9, "cohort": [0, 1]},
    {"round": 1, "type": "update", "client": 0},
    {"round": 1, "type": "update", "client": 1},
    {"round": 2, "type": "round_opened", "threshold": 0.9, "cohort": [0, 1]},
    {"round": 2, "type": "score", "client": 0, "score": 0.5},
    {"round": 2, "type": "update", "client": 0},  # broken off: this did not count
    {"round": 2, "type": "round_opened", "threshold": 0.85, "cohort": [0, 1]},
    {"round": 2, "type": "score", "client": 0, "score": 0.1},
    {"round": 2, "type": "reuse", "client": 0},
    {"round": 2, "type": "fault", "client": 1, "bridged": True},
    {"round": 3, "type": "round_opened", "threshold": 0.8, "cohort": [0, 3]},
    {"round": 3, "type": "score", "client": 0, "score": 0.8},
    {"round": 3, "type": "update", "client": 0},
    {"round": 3, "type": "fault", "client": 3, "bridged": False},
]
TENSORS = """\
round,direction,tensors,modes,index_coding,value_coding,bodies,stored,modelled,index_bytes,value_bytes
1,up,weight,bitmap,bitmap,planes,2,4,60,5,30
2,up,weight,bitmap,bitmap,planes,1,2,30,3,15
1,up,bias (+1),dense,all,planes,2,6,24,0,20
1,down,weight,dense,all,planes,1,10,40,0,33
"""


def read(folder: Path) -> Chronicle:
    (run,) = compare([folder]).runs
    return read_chronicle(folder, run)


def data_of(html: str) -> dict[str, Any]:
    start = html.index('id="data">') + len('id="data">')
    return dict(json.loads(html[start : html.index("</script>", start)]))


def test_bytes_are_added_up_round_by_round(tmp_path: Path) -> None:
    story = read(write_run(tmp_path / "run", events=EVENTS))
    # Round 1: two updates of 40. Round 2: a refused one and a reuse of 16. Round 3: one.
    assert story.per_round("modelled", "up") == [80, 56, 40]
    assert story.outside["up", "message"] == 60  # two joins
    assert story.cumulative("message", "up") == [160, 210, 260]
    assert story.cumulative("payload", "up", "down") == [
        82 + 96,
        82 + 96 + 41 + 96,
        82 + 96 + 41 + 96 + 41 + 48,
    ]
    assert story.total("grpc", "up", "down") == 310 + 535


def test_a_layer_that_is_absent_has_no_series(tmp_path: Path) -> None:
    rows = BYTES.replace("1,0,up,update,ok,40,41,50,60", "1,0,up,update,ok,40,41,50,")
    story = read(write_run(tmp_path / "run", rows=rows, events=EVENTS, summary=None))
    assert story.per_round("grpc", "up") is None
    assert story.cumulative("grpc", "up", "down") is None
    assert story.per_round("grpc", "down") == [130, 130, 65]
    assert story.total("socket", "up") is None


def test_connections_give_the_layers_below(tmp_path: Path) -> None:
    story = read(write(tmp_path / "run", *UP_ROWS, *DOWN_ROWS, events=EVENTS))
    assert story.per_round("socket", "up") == [352, 0, 0]
    assert story.per_round("tcp_payload", "down") == [600, 0, 0]
    assert story.total("ip", "up") is None


def test_fates_and_scores_are_those_of_the_last_try(tmp_path: Path) -> None:
    story = read(write_run(tmp_path / "run", events=EVENTS))
    fates = {key: FATES[fate] for key, fate in story.fates.items()}
    assert fates == {
        (1, 0): "fresh",
        (1, 1): "fresh",
        (2, 0): "reused",
        (2, 1): "bridged",
        (3, 0): "fresh",
        (3, 3): "fault",
    }
    assert [(s.round, s.score, s.threshold) for s in story.scores] == [(2, 0.1, 0.85), (3, 0.8, 0.8)]
    assert story.clauses["cacheless"] == (2, 0, 0)
    assert story.clauses["threshold"] == (0, 0, 1)


def test_models_are_grouped_by_how_far_a_client_was_behind(tmp_path: Path) -> None:
    """Of six models one was charged and never sent. Client 0: first, then 1 and 1 behind. Client 1: first, then
    one behind, but that was lost."""
    folder = write_run(tmp_path / "run", events=EVENTS)
    groups = {b.label: (b.models, b.payload, b.worst) for b in read_behind(folder, 3)}
    assert groups == {"first": (2, 96, 48), "1": (3, 144, 48)}
    late = BYTES + "9,1,down,model,ok,56,20,22,27\n"
    folder = write_run(tmp_path / "late", rows=late, events=EVENTS, summary=None)
    assert [b.label for b in read_behind(folder, 9)] == ["first", "1", "6 to 8"]
    assert read_behind(folder, 9)[-1].ratio(56) == 20 / 56


def test_a_waterfall_goes_from_the_fields_to_the_deepest_layer(tmp_path: Path) -> None:
    story = read(write(tmp_path / "run", *UP_ROWS, *DOWN_ROWS, events=EVENTS))
    plot = figures.waterfall(0, story, "up")
    assert plot is not None
    (bars,) = plot.figure["data"]
    # 176 modelled, 164 payload, 260 message, 310 gRPC, 352 on the sockets, 362 with what was sent again.
    assert bars["measure"] == ["absolute", *["relative"] * 5, "total"]
    assert [round(x * 1e6) for x in bars["x"]] == [176, -12, 96, 50, 42, 10, 362]
    assert [text.split("<br>")[0] for text in bars["y"]] == [
        *("modelled fields", "coding", "protobuf", "gRPC prefix", "HTTP/2", "sent again", "TCP payload"),
    ]
    assert plot.table.rows == (
        *(("modelled", 176), ("payload", 164), ("message", 260), ("grpc", 310)),
        *(("socket", 352), ("tcp_payload", 362)),
    )


def test_tensors_are_added_up_over_rounds(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", events=EVENTS)
    (folder / "tensors.csv").write_text(TENSORS)
    plot = figures.tensors(0, read(folder), "up")
    assert plot is not None
    assert plot.table.rows == (
        ("up", "weight", "bitmap", "bitmap", "planes", 3, 6, 90, 8, 45),
        ("up", "bias (+1)", "dense", "all", "planes", 2, 6, 24, 0, 20),
    )
    assert plot.figure["data"][0]["y"] == [
        "weight<br><i>bitmap: bitmap / planes</i>",
        "bias (+1)<br><i>dense: all / planes</i>",
    ]
    by_name = {bars["name"]: [round(x * 1e6) for x in bars["x"]] for bars in plot.figure["data"]}
    assert by_name == {"modelled fields": [90, 24], "payload: indices": [8, 0], "payload: values": [45, 20]}


def test_the_page_says_why_a_layer_is_absent(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", events=EVENTS)
    metered = write(tmp_path / "metered", *UP_ROWS, *DOWN_ROWS, events=EVENTS)
    absent = data_of(render([plain, metered]))["absent"]
    assert {(a["run"], a["layer"], a["way"]) for a in absent} == {
        (0, layer, way) for layer in ("socket", "tcp_payload") for way in ("up", "down", "both")
    }
    assert {a["reason"] for a in absent} == {"bytes.csv has no rows of connections"}


def test_nothing_a_run_is_called_becomes_markup(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&'\""
    folder = write_run(tmp_path / name, events=EVENTS)
    (folder / "tensors.csv").write_text(TENSORS.replace("weight", "</script><script>alert(2)//"))
    html = render([folder])
    assert "<img src=x" not in html
    assert "<script>alert(2)" not in html
    assert data_of(html)["runs"] == [name]
    assert "&lt;img" in html


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = render([write_run(tmp_path / "run", events=EVENTS)])
    page = html[: html.index('<script type="application/json"')]
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_big_map_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_CELLS", 6)
    plot = gate.fates(0, read(write_run(tmp_path / "run", events=EVENTS)))
    assert len(plot.figure["data"][0]["z"]) == 2  # two clients by three rounds
    assert "clients 0 to 1 of 3 that were ever selected" in plot.about
    assert len(plot.table.rows) == 6


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("events.jsonl", '{"round": 1}\n', "events.jsonl is damaged"),
        ("events.jsonl", "[1]\n", "events.jsonl is damaged"),
        (
            "events.jsonl",
            '{"round": 1, "type": "round_opened", "threshold": NaN, "cohort": []}\n',
            "nan where a number is due",
        ),
        ("tensors.csv", "round,direction\n1,up\n", "tensors.csv is damaged"),
        ("rounds.csv", "round\n", "rounds.csv"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    folder = write_run(tmp_path / "run", events=EVENTS, config=settings(method="age-only"))
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=words):
        render([folder])


def test_the_command_writes_a_page_and_leaves_no_other(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", events=EVENTS)
    done = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert (done.exit_code, "wrote" in done.output) == (0, True), done.output
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert not list(folder.glob(".report*"))
    done = CliRunner().invoke(cli.app, ["report", str(tmp_path / "none")])
    assert (done.exit_code, "is not a run folder" in done.output) == (1, True), done.output


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="up to 8"):
        render([tmp_path / str(n) for n in range(9)])


def test_a_run_without_a_round_has_no_report(tmp_path: Path) -> None:
    header = "round,selected,fresh,reused,fault,bridged,cacheless,age,threshold,quota,validation_accuracy\n"
    folder = write_run(tmp_path / "run", rounds=header, events=[], summary=None)
    with pytest.raises(RunError, match="no run has a committed round"):
        render([folder])
