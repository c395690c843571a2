"""What a study shows: rows of complete cells only, paired figures by hand, censored targets, what is the matter."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shown import DENSE, by_hand, write_cell, write_study
from studies import complete, lines_plan
from typer.testing import CliRunner

from fedreuse.server.store import RunError
from fedreuse.sim.cli import app
from fedreuse.sim.config import ConfigError
from fedreuse.sim.study.export import to_json, write_csv
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.plan import Cell
from fedreuse.sim.study.show import Compared, Row, Showing, show
from fedreuse.sim.study.statistics import holm
from fedreuse.sim.study.tables import render

RISE = [0.2, 0.5, 0.6, 0.7, 0.75]
"""Validation accuracies of rounds 1 to 5; the sixth is each test's own."""
CONTROL = {1: 0.80, 2: 0.82, 3: 0.78, 4: 0.81, 5: 0.79}
SHIFT = {1: -0.004, 2: 0.001, 3: -0.003, 4: 0.002, 5: -0.001}


def curve(cell: Cell) -> list[float]:
    end = CONTROL[cell.seed] + (SHIFT[cell.seed] if cell.factors["method"] == "age-only" else 0.0)
    return [*RISE, end]


def row(showing: Showing, block: str, method: str) -> Row:
    return next(r for b in showing.blocks if b.name == block for r in b.rows if r.method == method)


def compared(showing: Showing, block: str) -> Compared:
    (found,) = next(b for b in showing.blocks if b.name == block).comparisons
    return found


def printed(showing: Showing, width: int = 120, *, brief: bool = False) -> str:
    out = io.StringIO()
    render(showing, Console(file=out, width=width), brief=brief)
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "byhand"
    write_study(folder, by_hand(), curve)
    return folder


@pytest.fixture(scope="module")
def showing(folder: Path) -> Showing:
    return show(folder)


# ---------------------------------------------------------------- complete rows


def test_rows_are_methods_of_data_sets_and_have_every_seed(showing: Showing) -> None:
    assert [(b.name, [r.method for r in b.rows]) for b in showing.blocks] == [
        ("a", ["topk-fedavg", "age-only"]),
        ("b", ["topk-fedavg", "age-only"]),
    ]
    control = row(showing, "a", "topk-fedavg")
    assert [outcome.cell.seed for outcome in control.outcomes] == [1, 2, 3, 4, 5]
    assert control.figures["test_accuracy"] == tuple(CONTROL.values())
    assert (showing.incomplete, showing.warnings, showing.notes) == ((), (), ())
    assert showing.measured == "grpc"


def test_differences_are_paired_by_seed_in_points(showing: Showing) -> None:
    """-0.4, 0.1, -0.3, 0.2, -0.1: see test_study_statistics."""
    found = compared(showing, "a")
    assert found.paired.differences == pytest.approx((-0.4, 0.1, -0.3, 0.2, -0.1))
    assert (found.paired.mean, found.paired.sd) == (pytest.approx(-0.1), pytest.approx(0.254951, abs=1e-6))
    assert found.retention == pytest.approx(0.799 / 0.8)
    assert found.verdict == "equivalent"
    assert (
        found.needed == 3
    )  # 0.254951 * 2.920 / sqrt(3) = 0.430; for n = 2 it is 0.254951 * 6.314 / sqrt(2) = 1.138


def test_p_values_are_corrected_over_the_data_sets(showing: Showing) -> None:
    """Two equal p-values: both doubled."""
    one, two = compared(showing, "a"), compared(showing, "b")
    assert one.paired.p is not None
    assert one.adjusted == two.adjusted == pytest.approx(2 * one.paired.p)


def test_savings_and_bytes_by_hand(showing: Showing) -> None:
    """Six rounds of two clients; the gate reuses one of two from round 2 on: 7 updates and 5 reuses.

    Dense: 12 * 1000. Measured (gRPC): 215 an update, 15 a join of four clients.
    """
    control, gated = row(showing, "a", "topk-fedavg"), row(showing, "a", "age-only")
    assert control.figures["uplink_modelled_bytes"] == (12 * 300,) * 5
    assert control.figures["uplink_grpc_bytes"] == (12 * 215 + 4 * 15,) * 5
    assert gated.figures["uplink_modelled_bytes"] == (7 * 300 + 5 * 16,) * 5
    assert gated.figures["uplink_grpc_bytes"] == (7 * 215 + 4 * 15,) * 5
    assert gated.figures["uplink_modelled_saving"] == pytest.approx((1 - 2180 / (12 * DENSE),) * 5)
    assert gated.figures["both_modelled_saving"] == pytest.approx((1 - (2180 + 12000) / 24000,) * 5)
    assert gated.figures["reuse_fraction"] == pytest.approx((5 / 12,) * 5)
    assert gated.figures["staleness_mean_rounds"] == pytest.approx((5 / 12,) * 5)
    assert control.figures["uplink_modelled_saving_ceiling"] == (None,) * 5


def test_bytes_for_a_point_are_those_after_the_first_evaluation(showing: Showing) -> None:
    """Seed 1: from 20 % in round 1 to 80 % in round 6, five rounds of 2 * (1000 + 300) bytes: 13,000 for 60 points."""
    found = row(showing, "a", "topk-fedavg").figures["both_modelled_bytes_per_point"]
    assert found[0] == pytest.approx(13_000 / 60)


def test_fairness_and_costs_come_from_the_summary(showing: Showing) -> None:
    """Four clients at the accuracy -0.1, -1/30, 1/30, 0.1."""
    found = row(showing, "a", "topk-fedavg").figures
    assert found["fairness_clients"] == (4,) * 5
    assert found["fairness_min"][0] == pytest.approx(0.7)
    assert found["fairness_variance"][0] == pytest.approx((0.01 + 1 / 900) / 2)
    assert found["flops_training"] == (5_000_000_000,) * 5
    assert found["seconds"] == (12.0,) * 5


def test_data_sets_are_named_by_what_there_is_a_choice_of(tmp_path: Path) -> None:
    """Two partitions and one override: the latter goes without saying. Methods are paired within a data set."""
    plan = by_hand(
        seeds=[1],
        tasks=["support:Line"],
        partitions=[{"label": "even", "partition.alpha": 9.0}, {"label": "skewed", "partition.alpha": 0.1}],
        overrides=[{"label": "once", "train.local_epochs": 1}],
    )

    def by_partition(cell: Cell) -> list[float]:
        low = {"even": 0.8, "skewed": 0.6}[cell.factors["partition"]]
        return [*RISE, low - (0.01 if cell.factors["method"] == "age-only" else 0)]

    write_study(tmp_path / "s", plan, by_partition)
    shown = show(tmp_path / "s")
    assert [block.name for block in shown.blocks] == ["support-Line, even", "support-Line, skewed"]
    for block in shown.blocks:
        (found,) = block.comparisons
        assert found.paired.differences == pytest.approx((-1.0,))
    assert shown.blocks[1].rows[0].figures["test_accuracy"] == (0.6,)


# ---------------------------------------------------------------- the target


def test_the_target_is_a_share_of_the_controls_end_with_the_same_seed(tmp_path: Path) -> None:
    """0.9 of 0.5 is 0.45, reached in round 2 and kept; 0.9 of 0.8 is 0.72, kept for two evaluations only."""
    ends = {1: 0.5, 2: 0.8}

    def slow(cell: Cell) -> list[float]:
        return [0.2, 0.5, 0.5, 0.5, 0.73, ends[cell.seed]]

    plan = by_hand(seeds=[1, 2], tasks=["support:Line"])
    write_study(tmp_path / "s", plan, slow)
    found = row(show(tmp_path / "s"), "support-Line", "age-only")
    assert found.figures["target_accuracy"] == pytest.approx((0.45, 0.72))
    assert found.figures["target_round"] == (2, None)
    # Joins (15 and 25 a client, 4 of them), a round of two updates and one of an update and a reuse.
    assert found.figures["target_uplink_modelled_bytes"] == (3 * 300 + 16, None)
    assert found.figures["target_uplink_measured_bytes"] == (3 * 215 + 4 * 15, None)
    assert found.figures["target_both_measured_bytes"] == (3 * 215 + 4 * 15 + 4 * 815 + 4 * 25, None)
    text = printed(show(tmp_path / "s"))
    assert "not: 1 of 2" in text
    assert "not reached" in text


def test_a_target_may_be_a_figure(tmp_path: Path) -> None:
    plan = by_hand(seeds=[1], tasks=["support:Line"], target={"accuracy": 0.55})
    write_study(tmp_path / "s", plan, curve)
    assert row(show(tmp_path / "s"), "support-Line", "topk-fedavg").figures["target_round"] == (3,)


def test_without_the_method_that_sets_it_there_is_no_target(tmp_path: Path) -> None:
    plan = by_hand(seeds=[1], tasks=["support:Line"])
    write_study(tmp_path / "s", plan, curve, without=["support-Line-topk-fedavg-s1"])
    shown = show(tmp_path / "s")
    found = row(shown, "support-Line", "age-only")
    assert (found.figures["target_accuracy"], found.figures["target_round"]) == ((None,), (None,))
    assert "not reached" not in printed(shown)


# ---------------------------------------------------------------- what is not complete


@pytest.fixture
def partly(tmp_path: Path) -> Study:
    """Of method age-only on b, seed 2 failed, seed 3 is under way, seed 4 was never begun."""
    out = ("b-age-only-s2", "b-age-only-s3", "b-age-only-s4")
    study = write_study(tmp_path / "s", by_hand(), curve, without=out)
    study.record_failure(study.cells["b-age-only-s2"], "MemoryError", "no room")
    study.record_failure(study.cells["b-age-only-s2"], "MemoryError", "still no room")
    cell = study.cells["b-age-only-s3"]
    write_cell(study.path(cell), cell, [0.1, 0.2], finished=False)
    return study


def test_a_row_with_an_unfinished_seed_enters_no_table_and_is_listed_with_reasons(partly: Study) -> None:
    shown = show(partly.folder)
    assert [r.method for b in shown.blocks if b.name == "b" for r in b.rows] == ["topk-fedavg"]
    (lacking,) = shown.incomplete
    assert (lacking.block, lacking.method) == ("b", "age-only")
    assert lacking.reasons["b-age-only-s3"] == "not finished: round 2 of 6"
    assert lacking.reasons["b-age-only-s4"] == "not begun"
    failed = lacking.reasons["b-age-only-s2"]
    assert failed.startswith("failed in round 0 of 6, attempt 2, 20")
    assert failed.endswith("MemoryError: still no room")
    assert set(lacking.reasons) == {"b-age-only-s2", "b-age-only-s3", "b-age-only-s4"}
    text = printed(shown, brief=True)
    words = " ".join(text.split())
    assert "In no table" in words
    assert "b, age-only: seed 2 failed in round 0 of 6" in words
    assert "still no room; seed 3 not finished: round 2 of 6; seed 4 not begun" in words


def test_a_data_set_that_is_not_complete_counts_in_the_family_with_p_1(partly: Study) -> None:
    found = compared(show(partly.folder), "a")
    assert found.paired.p is not None
    assert found.adjusted == pytest.approx(holm([found.paired.p, 1.0])[0])
    assert found.adjusted == pytest.approx(2 * found.paired.p)


def test_without_the_control_nothing_is_compared_and_a_note_says_so(tmp_path: Path) -> None:
    write_study(tmp_path / "s", by_hand(), curve, without=["a-topk-fedavg-s3"])
    shown = show(tmp_path / "s")
    assert next(b for b in shown.blocks if b.name == "a").comparisons == ()
    assert "a: no comparison yet, the control is not complete" in shown.notes


def test_a_cell_that_cannot_be_read_is_not_complete(tmp_path: Path) -> None:
    study = write_study(tmp_path / "s", by_hand(), curve)
    with (study.path(study.cells["a-age-only-s1"]) / "bytes.csv").open("a") as handle:
        handle.write("7,0,up,upd")
    (lacking,) = show(tmp_path / "s").incomplete
    assert lacking.reasons.keys() == {"a-age-only-s1"}
    assert lacking.reasons["a-age-only-s1"].startswith("cannot be read: ")
    assert "bytes.csv" in lacking.reasons["a-age-only-s1"]


def test_a_study_without_any_complete_row_says_so(tmp_path: Path) -> None:
    Study.freeze(by_hand(), tmp_path / "s")
    shown = show(tmp_path / "s")
    assert shown.blocks == ()
    assert len(shown.incomplete) == 4
    assert "No row is complete yet." in printed(shown)
    write_csv(shown, tmp_path / "csv")
    assert (tmp_path / "csv" / "seeds.csv").read_text() == "data_set,method,seed\n"


def test_a_folder_that_is_no_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path} is not a study folder"):
        show(tmp_path)


# ---------------------------------------------------------------- what is not claimed


def test_nothing_is_claimed_from_fewer_than_five_seeds(tmp_path: Path) -> None:
    write_study(tmp_path / "s", by_hand(seeds=[1, 2, 3]), curve)
    shown = show(tmp_path / "s")
    assert compared(shown, "a").verdict == "no claim"
    assert compared(shown, "a").paired.interval is not None
    assert shown.warnings == ("3 seeds: figures are shown, but with fewer than 5 nothing is claimed",)


def test_one_seed_shows_a_difference_and_no_interval(tmp_path: Path) -> None:
    write_study(tmp_path / "s", by_hand(seeds=[1]), curve)
    shown = show(tmp_path / "s")
    found = compared(shown, "a")
    assert found.paired.differences == pytest.approx((-0.4,))
    assert (found.paired.interval, found.adjusted, found.needed) == (None, None, None)
    assert "-0.40" in printed(shown)


def test_a_large_spread_does_not_show_equivalence(tmp_path: Path) -> None:
    """Differences -2, 0.5, -1.5, 1, -0.5: five times the spread; the interval reaches beyond the margin."""

    def wild(cell: Cell) -> list[float]:
        shift = 5 * SHIFT[cell.seed] if cell.factors["method"] == "age-only" else 0
        return [*RISE, CONTROL[cell.seed] + shift]

    write_study(tmp_path / "s", by_hand(), wild)
    found = compared(show(tmp_path / "s"), "a")
    assert found.verdict == "not shown"
    # 1.274755 / sqrt(n) * t < 1: n = 6 gives 2.015 * 0.52042 = 1.0486, n = 7 gives 1.943 * 0.48181 = 0.936.
    assert found.needed == 7


def test_the_metric_is_the_plans(tmp_path: Path) -> None:
    """Validation at the end falls behind by a point, the test figure by two."""

    def both(cell: Cell) -> list[float]:
        return [*RISE, 0.8 - (0.01 if cell.factors["method"] == "age-only" else 0)]

    plan = by_hand(seeds=[1], compare={"control": "topk-fedavg", "metric": "validation_accuracy"})
    study = write_study(tmp_path / "s", plan, both)
    path = study.path(study.cells["a-age-only-s1"]) / "summary.json"
    summary = json.loads(path.read_text())
    summary["accuracy"]["test"] = 0.78
    path.write_text(json.dumps(summary))
    shown = show(tmp_path / "s")
    assert compared(shown, "a").paired.differences == pytest.approx((-1.0,))
    assert row(shown, "a", "age-only").figures["test_accuracy"] == (0.78,)
    assert "validation accuracy" in printed(shown, brief=True)


def test_without_holm_p_values_stay(tmp_path: Path) -> None:
    write_study(tmp_path / "s", by_hand(compare={"control": "topk-fedavg", "holm": False}), curve)
    found = compared(show(tmp_path / "s"), "a")
    assert found.adjusted == found.paired.p


def test_archival_runs_are_no_evidence() -> None:
    with pytest.raises(
        ConfigError, match=r"cell a-topk-fedavg-s1: evaluation\.archival looks at the test set again"
    ):
        by_hand(base={"evaluation.archival": True})


def test_runs_that_do_not_pair_are_warned_of(tmp_path: Path) -> None:
    study = write_study(tmp_path / "s", by_hand(), curve)
    path = study.path(study.cells["a-age-only-s1"]) / "environment.json"
    path.write_text(path.read_text().replace("partition 1", "another one"))
    (warning,) = show(tmp_path / "s").warnings
    assert warning == "not paired: a-age-only-s1 divides the examples otherwise than a-topk-fedavg-s1"


def test_figures_that_older_runs_lack_are_absent(tmp_path: Path) -> None:
    study = write_study(tmp_path / "s", by_hand(seeds=[1, 2]), curve)
    path = study.path(study.cells["a-age-only-s1"]) / "summary.json"
    summary = json.loads(path.read_text())
    for key in ("test", "fairness", "staleness", "flops", "machine"):
        del summary[key]
    path.write_text(json.dumps(summary))
    found = row(show(tmp_path / "s"), "a", "age-only")
    assert found.figures["fairness_mean"][0] is None
    assert found.values("fairness_mean") is None
    assert found.values("test_accuracy") == [0.796, 0.821]


# ---------------------------------------------------------------- how it comes out


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_fit_and_have_everything(showing: Showing, width: int) -> None:
    text = printed(showing, width)
    # 79.6, 82.1, 77.7, 81.2, 78.9: squares about 79.9 add up to 12.46, of 4: sd 1.765. Saved: 1 - 2180 / 12000.
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in ("79.90 ± 1.76", "-0.40", "equivalent", "99.88", "81.83", "Jain index"):
        assert part in words, part


def test_a_terminal_that_knows_ascii_only_gets_nothing_else(showing: Showing) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as out:
        render(showing, Console(file=out, width=100))
        out.flush()
        assert b"79.90 +- 1.76" in raw.getvalue()


def test_csv_is_tidy(showing: Showing, tmp_path: Path) -> None:
    for path in write_csv(showing, tmp_path):
        assert path.exists()
    with (tmp_path / "seeds.csv").open(newline="") as handle:
        seeds = list(csv.DictReader(handle))
    assert len(seeds) == 20
    first = next(r for r in seeds if (r["cell"], r["method"]) == ("a-age-only-s1", "age-only"))
    assert (first["data_set"], first["task"], first["partition"], first["seed"]) == ("a", "a", "", "1")
    assert (float(first["test_accuracy"]), float(first["difference_points"])) == (0.796, pytest.approx(-0.4))
    with (tmp_path / "comparisons.csv").open(newline="") as handle:
        lines = list(csv.DictReader(handle))
    assert [(r["data_set"], r["method"], r["verdict"]) for r in lines] == [
        ("a", "age-only", "equivalent"),
        ("b", "age-only", "equivalent"),
    ]
    assert float(lines[0]["interval_low_points"]) == pytest.approx(-0.4166, abs=1e-4)
    assert (tmp_path / "incomplete.csv").read_text() == "data_set,method,cell,reason\n"


def test_json_holds_what_the_tables_hold(showing: Showing) -> None:
    found: dict[str, Any] = json.loads(json.dumps(to_json(showing), allow_nan=False))
    assert (found["study"], found["measured_layer"], len(found["seeds"])) == ("byhand", "grpc", 20)
    assert found["definition"]["compare"]["margin"] == 1.0
    assert found["comparisons"][0]["verdict"] == "equivalent"


def test_the_command_shows_writes_and_complains(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    page, tables = tmp_path / "page.html", tmp_path / "csv"
    result = runner.invoke(
        app, ["study", "show", str(folder), "--brief", "-o", str(page), "--csv", str(tables)]
    )
    assert result.exit_code == 0
    assert "equivalent" in result.stdout
    assert {path.name for path in tables.iterdir()} == {"seeds.csv", "comparisons.csv", "incomplete.csv"}
    assert "<!doctype html>" in page.read_text()
    result = runner.invoke(app, ["study", "show", str(folder), "--json"])
    assert json.loads(result.stdout)["study"] == "byhand"
    result = runner.invoke(app, ["study", "show", str(tmp_path)])
    assert (result.exit_code, "is not a study folder" in result.stderr) == (1, True)


def test_real_runs_are_shown(tmp_path: Path) -> None:
    """Two methods, two seeds, three rounds on digits, really run."""
    base = {
        "rounds": 3,
        "clients": {"total": 10, "per_round": 4},
        "train.local_epochs": 1,
        "evaluation.every": 1,
    }
    study = Study.freeze(lines_plan(tasks=["digits"], base=base, wire=True), tmp_path / "s")
    for cell in study.cells.values():
        complete(study, cell)
    shown = show(tmp_path / "s")
    assert (shown.incomplete, shown.measured) == ((), "grpc")
    here = (
        "test_accuracy_macro",
        "fairness_jain",
        "staleness_mean_rounds",
        "flops_training",
        "both_grpc_saving",
    )
    for found in shown.blocks[0].rows:
        assert [name for name in here if found.values(name) is None] == []
    gated = row(shown, "digits", "dg-fedreuse").figures
    assert all(value and value > 0 for value in gated["flops_proxy_refresh"])
