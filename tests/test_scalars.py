"""Scalars for TensorBoard: what rounds.csv says, each round once, absent layers left out."""

import builtins
from pathlib import Path
from typing import Any

import pytest
from support import small_config
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from typer.testing import CliRunner

from fedreuse.sim import cli
from fedreuse.sim.folder import LaunchError
from fedreuse.sim.scalars import TensorBoard, last_step

HEADER = (
    "round,selected,fresh,reused,fault,train_loss,uplink_modelled,uplink_grpc,downlink_modelled,"
    "validation_accuracy,validation_loss\n"
)
ROWS = [
    "1,3,3,0,0,2.5,100,120,300,0.25,1.5\n",
    "2,3,1,2,0,,40,,300,,\n",
    "3,3,0,2,1,1.5,60,70,300,0.5,1.25\n",
]


def scalars(logs: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(logs), size_guidance={SCALARS: 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()[SCALARS]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.csv").write_text(HEADER + ROWS[0])
    return tmp_path / "run"


def add(run: Path, text: str) -> None:
    with (run / "rounds.csv").open("a") as handle:
        handle.write(text)


def test_rounds_are_written_as_they_appear(tmp_path: Path, run: Path) -> None:
    with TensorBoard(tmp_path / "tb", run) as board:
        board.update()
        add(run, ROWS[1][:9])  # half a line is no round yet
        board.update()
        assert last_step(tmp_path / "tb") == 1
        add(run, ROWS[1][9:] + ROWS[2])
        board.update()
    assert scalars(tmp_path / "tb") == {
        "validation/accuracy": [(1, 0.25), (3, 0.5)],
        "validation/loss": [(1, 1.5), (3, 1.25)],
        "train/loss": [(1, 2.5), (3, 1.5)],
        "clients/fresh": [(1, 3), (2, 1), (3, 0)],
        "clients/reused": [(1, 0), (2, 2), (3, 2)],
        "clients/fault": [(1, 0), (2, 0), (3, 1)],
        "uplink/modelled_per_round": [(1, 100), (2, 40), (3, 60)],
        "uplink/modelled_so_far": [(1, 100), (2, 140), (3, 200)],
        # Round 2 was not observed, so there is no sum from there on.
        "uplink/grpc_per_round": [(1, 120), (3, 70)],
        "uplink/grpc_so_far": [(1, 120)],
        "downlink/modelled_per_round": [(1, 300), (2, 300), (3, 300)],
        "downlink/modelled_so_far": [(1, 300), (2, 600), (3, 900)],
    }


def test_who_goes_on_writes_no_round_twice(tmp_path: Path, run: Path) -> None:
    for text in ("", ROWS[1], "", ROWS[2]):
        add(run, text)
        with TensorBoard(tmp_path / "tb", run):
            pass
    found = scalars(tmp_path / "tb")
    assert found["clients/fresh"] == [(1, 3), (2, 1), (3, 0)]
    assert found["uplink/modelled_so_far"] == [(1, 100), (2, 140), (3, 200)]


def test_a_round_that_a_kill_cut_short_is_written_again(tmp_path: Path, run: Path) -> None:
    """The first scalars of round 2 are there, its last one is not."""
    with TensorBoard(tmp_path / "tb", run) as board:
        board.update()
        board._writer.add_scalar("clients/fresh", 1, 2)
    add(run, ROWS[1])
    assert last_step(tmp_path / "tb") == 1
    with TensorBoard(tmp_path / "tb", run):
        pass
    found = scalars(tmp_path / "tb")
    assert found["clients/fresh"] == [(1, 3), (2, 1)]
    assert found["clients/fault"] == [(1, 0), (2, 0)]


def test_a_run_without_rounds_yet(tmp_path: Path, run: Path) -> None:
    (run / "rounds.csv").unlink()
    with TensorBoard(tmp_path / "tb", run) as board:
        board.update()
        (run / "rounds.csv").write_text(HEADER[:20])
        board.update()
        (run / "rounds.csv").write_text(HEADER + ROWS[0])
    assert last_step(tmp_path / "tb") == 1


def test_two_runs_do_not_share_a_folder(tmp_path: Path, run: Path) -> None:
    with TensorBoard(tmp_path / "tb", run):
        pass
    with pytest.raises(LaunchError, match=r"holds the scalars of .*run"):
        TensorBoard(tmp_path / "tb", tmp_path)
    (tmp_path / "tb" / "run.txt").unlink()
    with pytest.raises(LaunchError, match="something else"):
        TensorBoard(tmp_path / "tb", run)


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    output = tmp_path / "run"
    result = CliRunner().invoke(cli.app, ["sim", "--tensorboard", str(tmp_path / "tb"), f"output={output}"])
    text = " ".join(result.output.split())
    assert (result.exit_code, "Traceback" in text) == (1, False)
    assert "pip install 'fedreuse[tensorboard]'" in text
    assert not output.exists()


@pytest.mark.parametrize("command", [["sim"], ["launch", "clients.processes=2"]])
def test_a_run_writes_its_rounds(tmp_path: Path, command: list[str]) -> None:
    logs, output = tmp_path / "tb", tmp_path / "run"
    settings = small_config(output, "rounds=3").model_dump(mode="json")
    small = [f"clients.total={settings['clients']['total']}", "clients.per_round=3", "task=support:Line"]
    name, *extra = command
    arguments = [
        name,
        "--tensorboard",
        str(logs),
        "rounds=3",
        "sim.workers=1",
        f"output={output}",
        *small,
        *extra,
    ]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    found = scalars(logs)
    rounds = (output / "rounds.csv").read_text().splitlines()
    column = rounds[0].split(",").index("uplink_modelled")
    expected = [(n, float(row.split(",")[column])) for n, row in enumerate(rounds[1:], 1)]
    assert found["uplink/modelled_per_round"] == expected
    assert ("uplink/grpc_per_round" in found) == (name == "launch")
    again = CliRunner().invoke(cli.app, ["resume", "--tensorboard", str(logs), str(output)])
    assert again.exit_code == 0, again.output
    assert scalars(logs) == found


def test_help_teaches() -> None:
    for command in ("sim", "launch", "resume"):
        assert (
            "--tensorboard" in CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "120"}).output
        )
