"""Comparing runs: sums, savings and ratios by hand, absent layers, damaged folders, readable tables."""

import csv
import io
import json
import re
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import completed, small_config

from fedreuse.proto.ledger import LAYERS, MESSAGE_LAYERS
from fedreuse.proto.schema import INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.proto.streams import cohort
from fedreuse.server.store import RunError
from fedreuse.server.weights import save_model
from fedreuse.sim.compare import Run, compare, to_csv, to_json
from fedreuse.sim.config import ConfigError, RunConfig, load_config
from fedreuse.sim.reuse import always_reuse_ceiling, score_histogram
from fedreuse.sim.tables import render

# A run of three rounds with two of four clients. B0 = 10 * 4 + 2 * 4 + 8 = 56 bytes, so m B0 = 6 * 56 = 336
# over the run. An update is charged 40 bytes. Client 1 is lost in round 2 after a refused update and client 3
# in round 3 before it got the model; client 0 is reused in round 2.
BYTES = """\
round,client,direction,kind,status,modelled,payload,message,grpc
0,0,up,join,ok,0,0,30,35
0,1,up,join,ok,0,0,30,35
0,0,down,welcome,ok,0,0,100,105
0,1,down,welcome,ok,0,0,100,105
1,0,down,model,ok,56,48,60,65
1,1,down,model,ok,56,48,60,65
1,0,up,update,ok,40,41,50,60
1,1,up,update,ok,40,41,50,60
2,0,down,model,ok,56,48,60,65
2,1,up,update,refused,40,41,50,60
2,0,up,reuse,ok,16,,,
2,1,up,fault,fault,0,,,
2,1,down,model,lost,56,48,60,65
3,0,down,model,ok,56,48,60,65
3,0,up,update,ok,40,41,50,60
3,3,up,fault,fault,0,,,
3,3,down,model,fault,56,,,
"""
UP = {"modelled": 4 * 40 + 16, "payload": 4 * 41, "message": 4 * 50 + 2 * 30, "grpc": 4 * 60 + 2 * 35}
DOWN = {"modelled": 6 * 56, "payload": 5 * 48, "message": 5 * 60 + 200, "grpc": 5 * 65 + 210}
BOTH = {layer: UP[layer] + DOWN[layer] for layer in MESSAGE_LAYERS}
ROUNDS = """\
round,selected,fresh,reused,fault,bridged,cacheless,age,threshold,quota,validation_accuracy
1,2,2,0,0,0,2,0,0,0,0.25
2,2,0,1,1,1,0,0,0,0,
3,2,1,0,1,0,0,0,1,0,0.5
"""
REUSE = {
    "fresh": 3,
    "reused": 1,
    "fault": 2,
    "bridged": 1,
    "cacheless": 2,
    "age": 0,
    "threshold": 1,
    "quota": 0,
}
EVENTS = [
    {"round": 2, "type": "round_opened", "threshold": 0.9},
    {"round": 2, "type": "score", "client": 0, "score": 0.1},
    {"round": 2, "type": "score", "client": 1, "score": 0.5},
    {"round": 3, "type": "round_opened", "threshold": 0.8},
    {"round": 3, "type": "score", "client": 0, "score": 0.8},
    {"round": 3, "type": "update", "client": 0},
    {"round": 3, "type": "score", "client": 3, "score": 2.0},
]
SUMMARY = {
    "method": "dg-fedreuse",
    "rounds": 3,
    "dense_bytes": 56,
    "selected": 6,
    "accuracy": {"validation": 0.5, "test": 0.4375},
    "uplink": dict.fromkeys(LAYERS) | UP,
    "downlink": dict.fromkeys(LAYERS) | DOWN,
    "reuse": REUSE,
}


def settings(*overrides: str, method: str = "dg-fedreuse") -> RunConfig:
    small = ("rounds=3", "clients.total=4", "clients.per_round=2", "seed=7", "gate.quota=0")
    return load_config(None, [f"method={method}", *small, *overrides])


def write_run(
    folder: Path,
    config: RunConfig | None = None,
    *,
    rows: str = BYTES,
    rounds: str = ROUNDS,
    events: list[dict[str, Any]] = EVENTS,
    summary: Mapping[str, Any] | None = SUMMARY,
    parameters: int = 10,
) -> Path:
    """A run folder written by hand; unfinished without a summary."""
    folder.mkdir()
    schema = Schema(
        (
            TensorSpec("weight", "float32", (parameters,), PARAMETER),
            TensorSpec("bias", "float32", (2,), PARAMETER),
            TensorSpec("steps", "int64", (), INTEGER_BUFFER),
        )
    )
    arrays = {t.name: np.zeros(t.shape, t.numpy_dtype) for t in schema.tensors}
    save_model(folder / "initial.safetensors", schema, arrays)
    (folder / "config.yaml").write_text((config or settings()).to_yaml())
    (folder / "bytes.csv").write_text(rows)
    (folder / "rounds.csv").write_text(rounds)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def failed(name: str) -> str:
    """The note that each of these runs has."""
    return f"{name}: 2 of 6 selected clients failed; no uplink is charged for them, which raises the savings"


def only(folder: Path) -> Run:
    (run,) = compare([folder]).runs
    return run


def rendered(*folders: Path, width: int = 80) -> str:
    out = io.StringIO()
    render(compare(folders), Console(file=out, width=width))
    return out.getvalue()


def figures(text: str, label: str, group: str = "") -> str:
    """The figures in the lines with this label below headings that begin with `group`, in all tables."""
    found, heading = [], ""
    for line in text.splitlines():
        heading = line if line[:1].strip() else heading
        match = re.match(rf" *{re.escape(label)} +(?=[\d(—-]|no gate)", line)
        if match and heading.startswith(group):
            found += line[match.end() :].split()
    return " ".join(found)


# ---------------------------------------------------------------- sums


def test_bytes_add_up_by_direction_and_layer(tmp_path: Path) -> None:
    run = only(write_run(tmp_path / "run"))
    assert run.bytes("up") == UP == {"modelled": 176, "payload": 164, "message": 260, "grpc": 310}
    assert run.bytes("down") == DOWN == {"modelled": 336, "payload": 240, "message": 500, "grpc": 535}
    assert run.bytes("up", "down") == {"modelled": 512, "payload": 404, "message": 760, "grpc": 845}


def test_each_kind_is_split_by_what_became_of_it(tmp_path: Path) -> None:
    run = only(write_run(tmp_path / "run"))
    table = {(e.direction, e.kind, e.status): (e.messages, e.events, *e.bytes.values()) for e in run.entries}
    assert table == {
        ("up", "update", "ok"): (3, 0, 120, 123, 150, 180),
        ("up", "update", "refused"): (1, 0, 40, 41, 50, 60),
        ("up", "join", "ok"): (2, 0, 0, 0, 60, 70),
        ("up", "reuse", "ok"): (0, 1, 16, None, None, None),
        ("up", "fault", "fault"): (0, 2, 0, None, None, None),
        ("down", "model", "ok"): (4, 0, 224, 192, 240, 260),
        ("down", "model", "lost"): (1, 0, 56, 48, 60, 65),
        ("down", "model", "fault"): (0, 1, 56, None, None, None),
        ("down", "welcome", "ok"): (2, 0, 0, 0, 200, 210),
    }


def test_savings_divide_every_layer_by_modelled_dense_bytes(tmp_path: Path) -> None:
    run = only(write_run(tmp_path / "run"))
    assert run.uplink_saving() == {
        "modelled": pytest.approx(160 / 336),
        "payload": pytest.approx(172 / 336),
        "message": pytest.approx(76 / 336),
        "grpc": pytest.approx(26 / 336),
    }
    assert run.symmetric_saving() == {
        "modelled": pytest.approx(160 / 672),
        "payload": pytest.approx(268 / 672),
        "message": pytest.approx(-88 / 672),
        "grpc": pytest.approx(-173 / 672),
    }


def test_a_layer_nobody_observed_is_absent_not_zero(tmp_path: Path) -> None:
    """Without serialized messages the last two columns are empty."""
    rows = "\n".join(",".join([*cut.split(",")[:7], "", ""]) for cut in BYTES.splitlines()[1:]) + "\n"
    rows = BYTES.splitlines()[0] + "\n" + rows
    run = only(write_run(tmp_path / "run", rows=rows, summary=None))
    assert run.bytes("up") == {"modelled": 176, "payload": 164, "message": None, "grpc": None}
    assert run.bytes("up", "down")["grpc"] is None
    assert run.uplink_saving()["payload"] == pytest.approx(172 / 336)
    assert run.uplink_saving()["grpc"] is None
    assert run.symmetric_saving()["message"] is None
    assert run.partial == ()
    text = rendered(tmp_path / "run")
    assert figures(text, "grpc", "Uplink (bytes)") == "—"
    assert figures(text, "update") == "4 160 B 164 B — — 1.0250 —"


def test_a_layer_observed_for_some_messages_is_absent_and_said_to_be(tmp_path: Path) -> None:
    rows = BYTES.replace("3,0,up,update,ok,40,41,50,60", "3,0,up,update,ok,40,41,,")
    folder = write_run(tmp_path / "run", rows=rows, summary=None)
    run = only(folder)
    assert run.bytes("up") == {"modelled": 176, "payload": 164, "message": None, "grpc": None}
    assert run.bytes("down") == DOWN
    assert run.uplink_saving()["grpc"] is None
    assert run.partial == ("uplink message", "uplink grpc")
    assert compare([folder]).notes == (
        failed("run"),
        "run: uplink message, uplink grpc observed for some messages only, so not added up",
    )


def test_an_unfinished_run_is_computed_from_its_folder(tmp_path: Path) -> None:
    """Two of three rounds are committed; what the third has sent so far belongs to no m."""
    rounds = "".join(ROUNDS.splitlines(keepends=True)[:3])
    folder = write_run(tmp_path / "run", rounds=rounds, summary=None)
    run = only(folder)
    assert (run.finished, run.rounds, run.selected) == (False, 2, 4)
    assert run.bytes("up")["grpc"] == UP["grpc"] - 60
    assert run.bytes("down")["modelled"] == 4 * 56
    assert (run.validation, run.test) == (0.25, None)
    assert run.scores is not None
    assert run.scores.below + run.scores.reached == 2
    text = " ".join(rendered(folder).split())
    assert "round 2 of 3 (unfinished)" in text


def test_a_refused_message_counts_whatever_round_it_speaks_of(tmp_path: Path) -> None:
    more = {"modelled": 216, "payload": 205, "message": 310, "grpc": 370}
    rows = BYTES + "4000000000,2,up,update,refused,40,41,50,60\n"
    assert (
        only(
            write_run(tmp_path / "run", rows=rows, summary=SUMMARY | {"uplink": dict.fromkeys(LAYERS) | more})
        ).bytes("up")
        == more
    )


def test_a_run_without_a_round_yet_has_nothing_to_show(tmp_path: Path) -> None:
    header, rounds = BYTES.splitlines()[0] + "\n", ROUNDS.splitlines()[0] + "\n"
    folder = write_run(tmp_path / "run", rows=header, rounds=rounds, events=[], summary=None)
    run = only(folder)
    assert run.bytes("up", "down") == dict.fromkeys(MESSAGE_LAYERS)
    assert run.uplink_saving() == dict.fromkeys(MESSAGE_LAYERS)
    assert (run.reuse_fraction, run.ceiling) == (None, None)
    assert "round 0 of 3 (unfinished)" in " ".join(rendered(folder).split())


def test_a_run_that_stopped_early_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", settings("rounds=20"))
    assert "3 rounds of 20 (stopped early)" in " ".join(rendered(folder).split())


def test_what_the_test_set_said_of_clients_is_shown_where_a_run_has_it(tmp_path: Path) -> None:
    even = {"clients": 4, "mean": 0.45, "std": 0.125, "worst_tenth": 0.3}
    summary = SUMMARY | {"test": {"macro_accuracy": 0.4475}, "fairness": even}
    folders = write_run(tmp_path / "new", summary=summary), write_run(tmp_path / "old")
    text = rendered(*folders)
    assert figures(text, "over clients") == "44.75 —"
    assert figures(text, "worst tenth") == "30.00 —"
    assert figures(text, "deviation") == "12.50 —"
    assert "over clients" not in rendered(folders[1])
    found = to_json(compare(folders))["runs"]
    assert [run["accuracy"]["test_macro"] for run in found] == [0.4475, None]
    assert found[0]["fairness"] == even


# ---------------------------------------------------------------- the gate


def plainly(config: RunConfig, rounds: int) -> Fraction:
    """Reuse whenever the age limit and the quota leave it, oldest caches trained first."""
    q = Fraction(str(config.gate.quota))
    total, m = config.clients.total, config.clients.per_round
    last: dict[int, int] = {}
    reused = 0
    for t in range(rounds):
        selected = cohort(config.seed, t, total, m)
        young = [c for c in selected if c in last and t - last[c] < config.memory.max_age]
        owed = max(0, ceil(q * m) - (m - len(young)))
        kept = sorted(young, key=lambda c: (last[c], c))[owed:]
        reused += len(kept)
        last |= {c: t for c in selected if c not in kept}
    return Fraction(reused, rounds * m)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("gate.quota=0.5",),
        ("gate.quota=1",),
        ("clients.total=50", "clients.per_round=10", "gate.quota=0.3"),
        ("clients.total=20", "clients.per_round=10", "gate.quota=0.3", "memory.max_age=9", "seed=5"),
        ("clients.total=12", "clients.per_round=12", "memory.max_age=1"),
    ],
)
def test_the_ceiling_is_what_an_idle_gate_would_reuse(overrides: tuple[str, ...]) -> None:
    config = settings("rounds=90", *overrides)
    for rounds in (1, 2, 17, 90):
        assert always_reuse_ceiling(config, rounds) == pytest.approx(float(plainly(config, rounds)))


def test_without_a_memory_nothing_could_be_reused() -> None:
    assert always_reuse_ceiling(settings(method="topk-fedavg"), 3) == 0


def test_a_minimum_that_no_round_can_reach() -> None:
    # Two clients a round can never make three contributions: such a configuration is refused at once.
    with pytest.raises(ConfigError, match="3 contributions wanted of 2 clients per round"):
        settings("server.minimum=3")


def test_no_rounds_have_no_ceiling() -> None:
    with pytest.raises(ValueError, match="0 rounds"):
        always_reuse_ceiling(settings(), 0)


def test_the_ceiling_implies_a_saving(tmp_path: Path) -> None:
    """Top-K of ratio 0.2 keeps 2 of 10 and 1 of 2 coordinates: min(40, 2 * 8, 2 * 4 + 2) = 10,
    min(8, 8, 4 + 1) = 5, and 8 for the integer: 23 of 56 bytes for a fresh update, 16 for a reuse."""
    run = only(write_run(tmp_path / "run"))
    assert run.ceiling is not None
    f = plainly(run.config, 3)
    assert run.ceiling.reuse_fraction == pytest.approx(float(f))
    assert run.ceiling.uplink_saving == pytest.approx(float(1 - ((1 - f) * 23 + f * 16) / 56))


def test_the_control_without_scores_reaches_the_ceiling(tmp_path: Path) -> None:
    folder = completed(small_config(tmp_path / "run", method="age-only"), wire=True)
    run = only(folder)
    assert run.ceiling is not None
    assert run.reuse_fraction == run.ceiling.reuse_fraction > 0
    assert run.uplink_saving()["modelled"] == pytest.approx(run.ceiling.uplink_saving)
    assert run.scores is None
    (folder / "summary.json").unlink()
    assert only(folder).bytes("up", "down") == run.bytes("up", "down")


def test_scores_are_gathered_with_the_threshold_of_their_round(tmp_path: Path) -> None:
    scores = score_histogram(write_run(tmp_path / "run"), bins=4)
    assert scores.edges == (0, 0.5, 1, 1.5, 2)
    assert scores.counts == (1, 2, 0, 1)
    # 0.1, 0.5, 0.8, 2.0: the quartiles lie a quarter, a half and three quarters of the way through.
    assert scores.quartiles == pytest.approx((0.1, 0.4, 0.65, 1.1, 2.0))
    assert (scores.below, scores.reached) == (2, 2)


def test_the_last_scores_of_a_repeated_round_count(tmp_path: Path) -> None:
    again = [{"round": 3, "type": "round_opened", "threshold": 0.8}, EVENTS[4] | {"score": 0.7}]
    scores = score_histogram(write_run(tmp_path / "run", events=[*EVENTS, *again]))
    assert (scores.below, scores.reached) == (3, 1)


def test_a_run_without_scores_has_no_quartiles(tmp_path: Path) -> None:
    scores = score_histogram(write_run(tmp_path / "run", events=[]))
    assert (sum(scores.counts), scores.quartiles) == (0, ())


# ---------------------------------------------------------------- what does not compare


def test_equal_runs_need_no_remark_on_each_other(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / name) for name in ("a", "b")])
    assert (comparison.warnings, comparison.notes) == ((), (failed("a"), failed("b")))
    assert [run.name for run in comparison.runs] == ["a", "b"]


def test_other_tasks_and_models_are_warned_about(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    task = write_run(tmp_path / "b", settings("task=mnist"))
    model = write_run(tmp_path / "c", parameters=11)
    for other in (task, model):
        (warning,) = compare([a, other]).warnings
        assert "do not compare" in warning
        assert f"Warning: {warning[:40]}" in rendered(a, other)


def test_other_seeds_rounds_and_settings_are_noted(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", settings("seed=8", "partition.alpha=0.1", "gate.gamma=0.5"))
    rounds = "".join(ROUNDS.splitlines(keepends=True)[:3])
    c = write_run(tmp_path / "c", rounds=rounds, summary=None)
    assert compare([a, b]).notes == (
        "different settings: seed (7, 8); partition.alpha (0.5, 0.1); gate.gamma (0.01, 0.5)",
        failed("a"),
        failed("b"),
    )
    assert compare([a, c]).notes[0] == "different numbers of rounds: 3, 2"


def test_parts_that_make_the_method_are_no_difference(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", settings(method="topk-fedavg"))
    assert compare([a, b]).notes == (failed("a"), failed("b"))


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run")
    folders = [tmp_path / parent / "run" for parent in ("x", "y")]
    assert [run.name for run in compare(folders).runs] == [str(folder) for folder in folders]


# ---------------------------------------------------------------- damaged folders


@pytest.mark.parametrize(
    "name", ["config.yaml", "initial.safetensors", "rounds.csv", "bytes.csv", "events.jsonl"]
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_missing_file_is_named(tmp_path: Path, name: str, finished: bool) -> None:
    folder = write_run(tmp_path / "run", summary=SUMMARY if finished else None)
    (folder / name).unlink()
    with pytest.raises(RunError, match=name):
        compare([folder])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "seed: [1\n"),
        ("config.yaml", "seed: many\n"),
        ("config.yaml", ""),
        ("initial.safetensors", "nonsense"),
        ("rounds.csv", ""),
        ("rounds.csv", ROUNDS.replace("fresh", "fish")),
        ("rounds.csv", ROUNDS.replace("3,2,1", "3,2,one")),
        ("rounds.csv", ROUNDS.replace("\n2,2", "\n4,2")),
        ("rounds.csv", ROUNDS[:-2]),
        ("bytes.csv", ""),
        ("bytes.csv", BYTES.replace("grpc", "h2")),
        ("bytes.csv", BYTES.replace("3,3,down", "3,3,left")),
        ("bytes.csv", BYTES.replace("lost", "mislaid")),
        ("bytes.csv", BYTES.replace(",65\n", ",65.5\n")),
        ("bytes.csv", BYTES.rstrip()),
        ("bytes.csv", BYTES[: BYTES.index("2,0,up,reuse") + 12]),
        ("events.jsonl", '{"round": 1, "type": "sco'),
        ("events.jsonl", '{"round": 1, "type": "score", "client": 0, "score": 0.5}\n'),
        ("events.jsonl", "[]\n"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, finished: bool) -> None:
    folder = write_run(tmp_path / "run", summary=SUMMARY if finished else None)
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=name):
        compare([folder])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", json.dumps(SUMMARY | {"uplink": {}}), json.dumps(SUMMARY | {"rounds": "three"})],
)
def test_a_damaged_summary_can_be_removed(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(content)
    with pytest.raises(RunError, match=r"summary\.json is damaged.*remove it"):
        compare([folder])
    (folder / "summary.json").unlink()
    assert only(folder).bytes("up") == UP


def test_a_table_that_contradicts_the_summary_is_refused(tmp_path: Path) -> None:
    less = BYTES.replace("3,0,up,update,ok,40,41,50,60\n", "")
    fewer = "".join(ROUNDS.splitlines(keepends=True)[:3])
    with pytest.raises(RunError, match=r"bytes\.csv does not add up"):
        compare([write_run(tmp_path / "a", rows=less)])
    with pytest.raises(RunError, match=r"rounds\.csv does not add up"):
        compare([write_run(tmp_path / "b", rounds=fewer)])


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(RunError, match="is not a run folder"):
            compare([path])


def test_nothing_and_the_same_run_twice_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(RunError, match="nothing to compare"):
        compare([])
    with pytest.raises(RunError, match="named twice"):
        compare([folder, tmp_path / "." / "run"])


# ---------------------------------------------------------------- JSON and CSV


def as_csv(*folders: Path) -> list[dict[str, str]]:
    out = io.StringIO()
    to_csv(compare(folders), out)
    return list(csv.DictReader(io.StringIO(out.getvalue())))


def test_json_keeps_exact_bytes_and_nulls(tmp_path: Path) -> None:
    result = to_json(compare([write_run(tmp_path / "run")]))
    assert json.loads(json.dumps(result)) == result
    assert list(result) == ["runs", "warnings", "notes"]
    (run,) = result["runs"]
    assert (run["run"], run["method"], run["task"], run["seed"]) == ("run", "dg-fedreuse", "digits", 7)
    assert run["rounds"] == {"done": 3, "planned": 3}
    assert run["accuracy"] == {"validation": 0.5, "test": 0.4375, "test_macro": None}
    assert run["fairness"] is None
    assert run["bytes"] == {"up": UP, "down": DOWN, "both": BOTH}
    assert run["saving"]["uplink"]["grpc"] == pytest.approx(26 / 336)
    assert run["reuse"] == {"fraction": pytest.approx(1 / 6), "always": 0, **REUSE}
    assert run["ceiling"].keys() == {"reuse_fraction", "uplink_saving"}
    assert run["scores"]["below"] == 2
    reuse = next(kind for kind in run["kinds"] if kind["kind"] == "reuse")
    assert reuse["bytes"] == {"modelled": 16, "payload": None, "message": None, "grpc": None}
    assert (reuse["messages"], reuse["events"]) == (0, 1)


def test_csv_has_a_line_per_kind_status_and_layer(tmp_path: Path) -> None:
    table = as_csv(write_run(tmp_path / "run"))
    assert list(table[0]) == [
        *("run", "method", "task", "seed", "direction", "kind", "status", "messages", "layer", "bytes"),
        *("count", "absent"),
    ]
    assert len(table) == 9 * 4 + 2  # models by rounds behind: first, one
    assert list(table[3].values()) == (
        ["run", "dg-fedreuse", "digits", "7", "up", "update", "ok", "3", "grpc", "180", "", ""]
    )
    absent = [(row["kind"], row["layer"]) for row in table if row["status"] == "ok" and row["bytes"] == ""]
    assert absent == [("reuse", "payload"), ("reuse", "message"), ("reuse", "grpc")]


def test_json_and_csv_agree(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", settings("seed=8"))]
    table = as_csv(*folders)
    for run in to_json(compare(folders))["runs"]:
        mine = [row for row in table if row["run"] == run["run"]]
        assert {row["seed"] for row in mine} == {str(run["seed"])}
        for way in ("up", "down"):
            for layer, count in run["bytes"][way].items():
                found = [r["bytes"] for r in mine if (r["direction"], r["layer"]) == (way, layer)]
                assert sum(int(cell) for cell in found if cell) == count
        assert [
            (k["direction"], k["kind"], k["status"], str(k["messages"]), layer, "" if n is None else str(n))
            for k in run["kinds"]
            for layer, n in k["bytes"].items()
        ] == [(*list(row.values())[4:10],) for row in mine if row["kind"] != "behind"]
        assert [(g["label"], g["models"], g["payload"]) for g in run["models_by_rounds_behind"]] == [
            (row["layer"].removeprefix("payload behind "), int(row["messages"]), int(row["bytes"]))
            for row in mine
            if row["kind"] == "behind"
        ]


# ---------------------------------------------------------------- tables

WIDTHS = (60, 80, 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_shown_whole(tmp_path: Path, width: int) -> None:
    folders = [write_run(tmp_path / "run"), write_run(tmp_path / ("long" * 20))]
    text = rendered(*folders, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for label, group, shown in [
        ("validation", "Accuracy (%)", "50.00"),
        ("test", "Accuracy (%)", "43.75"),
        ("Rounds", "Rounds", "3 of 3"),
        ("modelled", "Uplink (bytes)", "176 B"),
        ("payload", "Uplink (bytes)", "164 B"),
        ("message", "Uplink (bytes)", "260 B"),
        ("grpc", "Uplink (bytes)", "310 B"),
        ("payload ratio", "Uplink (bytes)", "0.9318"),  # 164 / 176
        ("grpc ratio", "Uplink (bytes)", "1.7614"),  # 310 / 176
        ("modelled*", "Downlink (bytes)", "336 B"),
        ("grpc", "Downlink (bytes)", "535 B"),
        ("modelled*", "Both (bytes)", "512 B"),
        ("grpc", "Both (bytes)", "845 B"),
        ("modelled", "Uplink saving (%)", "47.62"),  # 160 / 336
        ("grpc", "Uplink saving (%)", "7.74"),  # 26 / 336
        ("modelled*", "Symmetric saving (%)", "23.81"),  # 160 / 672
        ("grpc", "Symmetric saving (%)", "-25.74"),  # -173 / 672
        ("reused", "Reuse (%", "16.67"),
        ("Selected clients", "", "6"),
        ("fresh", "Selected clients", "3"),
        ("cacheless", "Selected clients", "2"),
        ("threshold", "Selected clients", "1"),
        ("reused", "Selected clients", "1"),
        ("fault", "Selected clients", "2"),
        ("bridged", "Selected clients", "1"),
    ]:
        assert figures(text, label, group) == f"{shown} {shown}"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_kinds_is_shown_whole(tmp_path: Path, width: int) -> None:
    text = rendered(write_run(tmp_path / "run"), width=width)
    text = text[text.index("by kind of message") :]
    for label, group, shown in [
        ("update", "Uplink", "4 160 B 164 B 200 B 240 B 1.0250 1.5000"),
        ("refused", "Uplink", "1 40 B 41 B 50 B 60 B 1.0250 1.5000"),
        ("join", "Uplink", "2 0 B 0 B 60 B 70 B"),
        ("reuse", "Uplink", "(1) 16 B — — — — —"),
        ("fault", "Uplink", "(2) 0 B — — — — —"),
        ("total", "Uplink", "6 176 B 164 B 260 B 310 B 0.9318 1.7614"),
        ("model", "Downlink", "5 336 B 240 B 300 B 325 B 0.7143 0.9673"),
        ("lost", "Downlink", "1 56 B 48 B 60 B 65 B 0.8571 1.1607"),
        ("not sent", "Downlink", "(1) 56 B — — — — —"),
        ("total", "Downlink", "7 336 B 240 B 500 B 535 B 0.7143 1.5923"),
        ("Both", "", "13 512 B 404 B 760 B 845 B 0.7891 1.6504"),
    ]:
        assert figures(text, label, group) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (999, "999 B"),
        (1000, "1.000 kB"),
        (9_999, "9.999 kB"),
        (99_996, "100.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.000 MB"),
        (3_900_400, "3.900 MB"),
        (12_345_678, "12.35 MB"),
        (5 * 10**9, "5.000 GB"),
        (2**63, "9223.4 PB"),
    ],
)
def test_bytes_have_four_digits_and_a_unit(tmp_path: Path, count: int, shown: str) -> None:
    rows = BYTES.splitlines()[0] + f"\n1,0,up,update,ok,{count},{count},{count},{count}\n"
    for width in WIDTHS:
        folder = write_run(tmp_path / f"run{width}", rows=rows, summary=None)
        assert figures(rendered(folder, width=width), "modelled", "Uplink (bytes)") == shown


def test_many_runs_are_shown_in_several_tables(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"run{n}", settings(f"seed={n}")) for n in range(5)]
    text = rendered(*folders, width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("Accuracy (%)") == 2
    assert rendered(*folders, width=120).count("Accuracy (%)") == 1


def test_a_run_without_a_gate_has_no_ceiling(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", settings(method="topk-fedavg"))]
    text = rendered(*folders)
    assert figures(text, "ceiling", "Reuse").endswith(" no gate")
    # Scores of the first run only.
    assert figures(text, "median") == "0.6500"


def test_tables_need_neither_colour_nor_unicode(tmp_path: Path) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    rows = BYTES.replace(",65\n", ",\n")
    folder = write_run(tmp_path / "[bold]run", rows=rows, summary=None)
    render(compare([folder]), Console(file=out, width=80, color_system=None))
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "\x1b" not in text
    assert "[bold]run" in text
    assert figures(text, "grpc", "Downlink") == "-"


def test_what_is_shown_is_explained(tmp_path: Path) -> None:
    text = " ".join(rendered(write_run(tmp_path / "run")).split())
    for layer in MESSAGE_LAYERS:
        assert f" {layer} the " in text
    assert "— not observed in this run; that is not zero" in text
    assert "* downlink by the symmetric convention: one dense model per selected client and round" in text
