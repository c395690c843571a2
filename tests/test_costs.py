"""Floating-point operations against sums by hand, and peak memory against what was allocated."""

import json
import subprocess
import sys
from pathlib import Path

from support import Line, completed, small_config, task_of

from fedreuse.client.settings import ClientPlan, ProxySettings, TrainSettings
from fedreuse.client.task import TaskContext
from fedreuse.sim.chronology import Work
from fedreuse.sim.costs import count_flops, peak_memory
from fedreuse.sim.tasks.digits import Digits

EXAMPLES = {n: 6 + n for n in range(6)}


def plan(proxy: ProxySettings | None = None) -> ClientPlan:
    return ClientPlan(seed=7, train=TrainSettings(local_epochs=3, batch_size=4), proxy=proxy)


def test_training_is_forward_and_backward_of_every_example_really_used() -> None:
    """A layer 3 -> 2: 2 * 3 * 2 = 12 forward, 12 for its weights; its input needs no gradient.

    Clients 0 and 2 hold 6 and 8 examples and train twice and once over 3 epochs: 3 * (2 * 6 + 8) = 60 of them.
    """
    found = count_flops(task_of(Line), plan(), Work({0: 2, 2: 1}, {}), EXAMPLES)
    assert found is not None
    assert (found.training, found.proxy_gate, found.proxy_refresh) == (60 * 24, 0, 0)


def test_proxies_are_counted_apart() -> None:
    """The head is the whole model here. A proxy sees up to 2 batches of 3: 6 examples of everybody."""
    proxy = ProxySettings(batches=2, batch_size=3, head=("fc",))
    found = count_flops(task_of(Line), plan(proxy), Work({0: 2, 2: 1}, {0: 5}), EXAMPLES)
    assert found is not None
    assert (found.proxy_gate, found.proxy_refresh) == (5 * 6 * 24, 3 * 6 * 24)


def test_a_proxys_backward_pass_ends_at_the_head() -> None:
    """ShallowCNN on 8x8 digits: convolutions 1 -> 32 at 8x8 and 32 -> 64 at 4x4, linear 256 -> 128 -> 10.

    Forward: 2 * 9 * 32 * 64 + 2 * 9 * 32 * 64 * 16 + 2 * 256 * 128 + 2 * 128 * 10 multiplications and additions.
    Backward of the head: both weights (as much as forward) and the input of the second, but not of the first.
    """
    task = Digits(TaskContext(7, 4, Path("none"), {"partition": {"kind": "dirichlet", "minimum_size": 64}}))
    examples = {n: len(task.client_data(n)) for n in range(4)}
    proxy = ProxySettings(batches=1, batch_size=64, head=("classifier",))
    settings = ClientPlan(seed=7, train=TrainSettings(local_epochs=1, batch_size=32), proxy=proxy)
    found = count_flops(task, settings, Work({0: 1}, {0: 1}), examples)
    assert found is not None
    first, second = 2 * 9 * 32 * 64, 2 * 9 * 32 * 64 * 16
    head = 2 * 256 * 128 + 2 * 128 * 10
    used = min(64, examples[0])
    assert found.proxy_gate == used * (first + second + head + head + 2 * 128 * 10)
    # Training: forward, all weights, and the inputs of all layers but the first.
    step = 3 * (first + second + head) - first
    assert found.training == examples[0] * step


def test_nothing_trained_is_absent_not_zero() -> None:
    assert count_flops(task_of(Line), plan(), Work({}, {}), {}) is None


def test_a_run_says_what_it_cost(tmp_path: Path) -> None:
    folder = completed(small_config(tmp_path / "run", "rounds=2", "clients.per_round=6", method="fedavg"))
    summary = json.loads((folder / "summary.json").read_text())
    # Two rounds of one epoch over 6 + 7 + ... + 11 = 51 examples.
    assert summary["flops"] == {"training": 2 * 51 * 24, "proxy_gate": 0, "proxy_refresh": 0}
    assert summary["staleness"] == {"contributions": 12, "mean": 0.0, "max": 0}
    assert summary["reuse"]["active"] == 1.0
    assert 0 < summary["machine"]["seconds"] < 100
    assert summary["machine"]["memory"]["process"] > 50e6


def test_memory_of_processes_that_were_started_is_apart() -> None:
    code = "import sys; b = bytearray(200_000_000); print(); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    before = peak_memory().workers or 0  # other tests may have left a server of worker processes
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        found = peak_memory()
    assert found.workers is not None
    assert 200e6 < found.workers - before < 260e6
