"""The test set is opened once: refusals, crashes between look and record, and what is told by client."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Grid, child, completed, small_config, task_of

from fedreuse.client.task import Outcomes, TaskContext
from fedreuse.client.workbench import state_arrays
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import read_config
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate
from fedreuse.sim.summary import summarise
from fedreuse.sim.tasks.digits import Digits
from fedreuse.sim.tasks.images import ImageSet
from fedreuse.sim.testset import ClientTest, Examined, open_once, read_examined

MODEL, OTHER = np.zeros(8, np.uint8), np.ones(8, np.uint8)
SEEN = Examined(
    {"accuracy": 0.75, "loss": 0.5}, (ClientTest(0, 3, 1.0, 0.25), ClientTest(4, 1, 0.0, 1.25)), None
)


def opened(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "test-opened.jsonl").read_text().splitlines()]


def never() -> Examined:
    raise AssertionError("the test set was looked at")


def test_what_was_seen_is_kept_and_read_back(tmp_path: Path) -> None:
    assert read_examined(tmp_path, MODEL) is None
    assert open_once(tmp_path, 90, MODEL, lambda: SEEN, archival=False) == SEEN
    assert read_examined(tmp_path, MODEL) == SEEN
    (line,) = opened(tmp_path)
    assert (line["rounds"], len(line["model"]), line["time"][-4:]) == (90, 64, " UTC")


@pytest.mark.parametrize("model", [MODEL, OTHER])
def test_a_second_look_is_refused(tmp_path: Path, model: np.ndarray) -> None:
    open_once(tmp_path, 90, MODEL, lambda: SEEN, archival=False)
    before = (tmp_path / "test.json").read_bytes()
    with pytest.raises(
        RunError, match=r"the test set of .* has been opened and is not opened again; test\.json"
    ):
        open_once(tmp_path, 90, model, never, archival=False)
    assert len(opened(tmp_path)) == 1
    assert (tmp_path / "test.json").read_bytes() == before


def crash() -> Examined:
    raise SystemExit("killed while looking")


def test_after_a_crash_the_same_look_is_repeated_and_counted(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit):
            open_once(tmp_path, 90, MODEL, crash, archival=False)
    assert read_examined(tmp_path) is None
    assert open_once(tmp_path, 90, MODEL, lambda: SEEN, archival=False).openings == 3
    found = read_examined(tmp_path, MODEL)
    assert found is not None
    assert found.openings == len(opened(tmp_path)) == 3


def test_after_a_crash_no_other_model_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        open_once(tmp_path, 60, MODEL, crash, archival=False)
    with pytest.raises(
        RunError, match=r"was opened at 20.* on another model \(after 60 rounds\); a second look"
    ):
        open_once(tmp_path, 90, OTHER, never, archival=False)


def test_a_result_of_another_model_is_nobodys(tmp_path: Path) -> None:
    open_once(tmp_path, 90, MODEL, lambda: SEEN, archival=False)
    with pytest.raises(RunError, match="about another model than the one of"):
        read_examined(tmp_path, OTHER)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"metrics": {}}', '{"metrics": {}, "clients": [[1]]}'])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "test.json").write_text(text)
    with pytest.raises(RunError, match=r"test\.json is damaged: .*; restore the file"):
        read_examined(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"time": "noon", "rounds": 3}'])
def test_a_damaged_list_of_openings_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "test-opened.jsonl").write_text(text + "\n")
    with pytest.raises(RunError, match=r"test-opened\.jsonl is damaged: .*; restore the file"):
        open_once(tmp_path, 90, MODEL, never, archival=False)


def test_the_result_of_an_older_folder_is_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_text('{"accuracy": 0.5, "loss": 1.5}')
    found = read_examined(tmp_path, MODEL)
    assert found is not None
    assert (found.metrics, found.clients) == ({"accuracy": 0.5, "loss": 1.5}, None)
    assert found.absent is not None


# ---------------------------------------------------------------- in a run


def test_a_run_killed_while_it_looks_finishes_with_the_same_figures(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=2")
    folder = create_run(config, make_task(config))
    for moment in ("before", "after"):
        process = child(folder, death=("look", moment, 1))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (folder / "test.json").exists()
    summary = simulate(folder, read_config(folder))
    assert summary["test"].pop("openings") == 3
    undisturbed = completed(small_config(tmp_path / "other", "rounds=2"))
    due = json.loads((undisturbed / "summary.json").read_text())
    assert due["test"].pop("openings") == 1
    assert summary["test"] == due["test"]


class ByClient(Grid):
    """Test examples 0 to 24 belong to clients 0, 1, 3 in turn, the others to nobody."""

    def outcomes(self, model: torch.nn.Module, data: Any) -> Outcomes:
        x, y = data.tensors
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        return Outcomes((logits.argmax(1) == y).numpy(), loss.numpy())

    def test_positions(self, client: int) -> np.ndarray:
        turn = {0: 0, 1: 1, 3: 2}.get(client)
        return np.arange(0) if turn is None else np.arange(turn, 25, 3)


def test_micro_and_macro_come_from_one_model(tmp_path: Path) -> None:
    """Clients 0, 1, 3 have 9, 8, 8 examples, so that nobody counts for fairness."""
    task = task_of(ByClient)
    config = small_config(tmp_path / "run", "rounds=2", task="support:Grid")
    folder = create_run(config, task)
    found = simulate(folder, config, task=task)
    model = task.model()
    schema, flat = load_model(folder / "model.safetensors")
    arrays = {
        t.name: torch.from_numpy(v.reshape(t.shape).copy())
        for t, v in zip(schema.tensors, schema.views(flat), strict=True)
    }
    model.load_state_dict(arrays)
    x, y = task.test().tensors
    with torch.no_grad():
        logits = model.eval()(x)
    right = (logits.argmax(1) == y).numpy()
    losses = -torch.log_softmax(logits, 1)[torch.arange(len(y)), y].numpy()
    shares = [np.arange(0, 25, 3), np.arange(1, 25, 3), np.arange(2, 25, 3)]
    assert found["test"] == {
        "openings": 1,
        "accuracy": pytest.approx(right.mean()),
        "loss": pytest.approx(losses.mean(), rel=1e-5),
        "macro_accuracy": pytest.approx(np.mean([right[at].mean() for at in shares])),
        "macro_loss": pytest.approx(np.mean([losses[at].mean() for at in shares]), rel=1e-5),
        "clients": 3,
    }
    assert found["fairness"] == {"absent": "no client has 10 test examples"}


def test_a_loss_beyond_all_numbers_is_absent(tmp_path: Path) -> None:
    folder = completed(small_config(tmp_path / "run", "rounds=1"))
    wild = Examined({"accuracy": 0.5, "loss": float("nan")}, (ClientTest(0, 3, 0.5, float("inf")),), None)
    found = summarise(folder, read_config(folder), wild)["test"]
    assert (found["loss"], found["macro_loss"], found["macro_accuracy"]) == (None, None, 0.5)


@pytest.mark.parametrize(("lacking", "due"), [("outcomes", "outcomes"), ("test_positions", "test_positions")])
def test_without_a_clients_view_its_figures_are_absent_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, lacking: str, due: str
) -> None:
    monkeypatch.delattr(ByClient, lacking)
    task = task_of(ByClient)
    found = TaskEvaluator(task).test(state_arrays(task.model()), 6)
    assert (found.clients, found.absent) == (None, f"the task has no method {due!r}")
    assert found.metrics.keys() == {"accuracy", "loss"}


def test_without_a_test_set_everything_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByClient, "test", lambda _self: None)
    task = task_of(ByClient)
    found = TaskEvaluator(task).test(state_arrays(task.model()), 6)
    assert found == Examined({}, None, "the task has no test set")


def test_of_very_many_clients_none_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(ByClient)
    monkeypatch.setattr(ByClient, "test_positions", lambda *_: never())
    found = TaskEvaluator(task).test(state_arrays(task.model()), 10_001)
    assert found.absent == "more than 10000 clients: they are not looked at one by one"


def test_built_in_tasks_look_at_each_client() -> None:
    """Every test digit stands for one client; per example as in `metrics`."""
    task = Digits(TaskContext(101, 20, Path("none"), {}))
    model = task.model()
    found = TaskEvaluator(task).test(state_arrays(model), 20)
    assert found.clients is not None
    assert sum(client.examples for client in found.clients) == 360
    right = sum(client.examples * client.accuracy for client in found.clients)
    assert right == pytest.approx(360 * found.metrics["accuracy"])
    loss = sum(client.examples * client.loss for client in found.clients)
    assert loss / 360 == pytest.approx(found.metrics["loss"], rel=1e-5)
    third = found.clients[3]
    data = ImageSet(task.test()._source, task.test_positions(third.client), task.levels)
    assert task.metrics(model, data)["accuracy"] == pytest.approx(third.accuracy)


def test_of_several_labels_an_example_has_its_share() -> None:
    """Labels 1 0 1 and 0 0 0 against yes no no and no no yes: two of three right in both."""
    logits = torch.tensor([[2.0, -1.0, -1.0], [-1.0, -1.0, 3.0]])
    labels = torch.tensor([[1, 0, 1], [0, 0, 0]])
    task = Digits(TaskContext(101, 20, Path("none"), {}))
    task._logits = lambda *_: iter([(logits, labels)])  # type: ignore[method-assign]
    found, whole = task.outcomes(task.model(), task.test()), task.metrics(task.model(), task.test())
    assert found.correct == pytest.approx([2 / 3, 2 / 3])
    assert whole["accuracy"] == pytest.approx(4 / 6)
    # Each label's own: log(1 + e^-2), log(1 + e^-1), log(1 + e), and log(1 + e^-1) twice, log(1 + e^3).
    losses = [(0.126928 + 0.313262 + 1.313262) / 3, (2 * 0.313262 + 3.048587) / 3]
    assert found.loss == pytest.approx(losses, abs=1e-6)
    assert whole["loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
