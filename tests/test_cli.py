"""The command line: what works says so, what does not ends with one sentence, never with a traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedreuse.sim import cli
from fedreuse.sim.config import load_config
from fedreuse.sim.recipes import RECIPES

TINY = ["rounds=2", "clients.total=4", "clients.per_round=2", "sim.workers=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


WRONG = {
    "an unknown key": (["sim", "clients.totl=3"], ["clients.totl", "unknown key", "total"]),
    "an unknown section": (["sim", "gatee.kind=age"], ["gatee", "unknown key"]),
    "a value out of range": (["sim", "rounds=0"], ["rounds", "greater than or equal to 1", "got 0"]),
    "a wrong type": (["sim", "rounds=many"], ["rounds", "integer", "'many'"]),
    "no override": (["sim", "rounds"], ["'rounds'", "key=value"]),
    "an unknown method": (["sim", "method=fedsgd"], ["fedsgd", "dg-fedreuse"]),
    "more clients a round than there are": (["sim", "clients.total=3"], ["10 clients per round of 3"]),
    "parts that do not fit the name": (["sim", "method=fedavg", "gate.kind=age"], ["gate.kind", "custom"]),
    "a gate without memory": (["sim", "method=custom", "gate.kind=age"], ["memory.kind"]),
    "a missing file": (["sim", "-c", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    "an unknown task": (["sim", "task=mnst"], ["mnst", "digits", "module:attribute"]),
    "a task module that is not there": (["sim", "task=no_such:Task"], ["no_such"]),
    "missing data": (["sim", "task=mnist", "--data", "empty"], ["empty", "--data"]),
    "no run to resume": (["resume", "nowhere"], ["nowhere", "not a run folder"]),
    "no run to compare": (["compare", "nowhere"], ["nowhere"]),
    "a missing model": (["server", "--model", "m.safetensors", "--no-evaluate"], ["m.safetensors", "init-model"]),
    "client indices": (["client", "127.0.0.1:1", "--clients", "a-b"], ["--clients", "0-4"]),
    "a client too many": (["client", "127.0.0.1:1", "--clients", "50"], ["0 to 49"]),
    "a head that is not there": (["sim", *TINY, "proxy.head=[tail]"], ["tail", "classifier"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_sentence(case):
    arguments, words = WRONG[case]
    result = call(*arguments)
    text = " ".join(result.output.split())
    assert result.exit_code == 1, text
    assert "Traceback" not in text
    assert text.startswith("error:")
    missing = [word for word in words if word not in text]
    assert not missing, text


def test_sim_runs_and_reports():
    result = call("sim", *TINY, "--json", "output=run")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["rounds"], summary["method"], summary["uplink"]["grpc"]) == (2, "dg-fedreuse", None)
    again = call("sim", *TINY, "output=run")
    assert (again.exit_code, "fedreuse resume run" in " ".join(again.output.split())) == (1, True)
    resumed = call("resume", "run", "--json")
    assert json.loads(resumed.stdout) == summary
    compared = call("compare", "run")
    assert "dg-fedreuse" in compared.output
    assert json.loads(call("compare", "run", "--json").stdout)
    assert call("compare", "run", "--csv").stdout.startswith("run,")


@pytest.mark.parametrize("method", RECIPES)
def test_init_writes_the_defaults_of_a_method(method):
    assert call("init", "run.yaml", "--method", method).exit_code == 0
    assert load_config(Path("run.yaml")) == load_config(None, [f"method={method}"])
    assert call("init", "run.yaml").exit_code == 1  # never overwrites
    assert "#" in Path("run.yaml").read_text()
    assert yaml.safe_load(Path("run.yaml").read_text())["method"] == method


def test_methods_and_help():
    listed = call("methods").output
    assert all(name in listed for name in RECIPES)
    for command in ("sim", "launch", "resume", "server", "client", "init", "init-model", "compare", "status"):
        assert command in call("--help").output
        assert call(command, "--help").exit_code == 0


def test_no_server_answers():
    port = free_port()
    result = call("status", f"127.0.0.1:{port}")
    assert (result.exit_code, str(port) in result.output) == (1, True)


def test_a_client_without_a_server_gives_up():
    port = free_port()
    command = ["client", f"127.0.0.1:{port}", "--clients", "0", "--give-up", "1", *TINY]
    done = subprocess.run(
        [sys.executable, "-m", "fedreuse.sim.cli", *command], capture_output=True, text=True, timeout=60
    )
    text = " ".join(done.stderr.split())
    assert done.returncode == 1, text
    assert "Traceback" not in text
    assert f"no federation at 127.0.0.1:{port}" in text


def test_by_hand_a_server_without_a_task_and_two_clients():
    """`init-model`, `server --model`, `client`: no metrics beside such a server, and they are null, not 0."""
    assert call("init-model", "m.safetensors", *TINY).exit_code == 0
    fedreuse = [sys.executable, "-m", "fedreuse.sim.cli"]
    port = free_port()
    serve = [*fedreuse, "server", "--model", "m.safetensors", "--no-evaluate", f"server.port={port}", *TINY]
    server = subprocess.Popen([*serve, "output=run"], stderr=subprocess.PIPE, text=True)
    clients = [
        subprocess.Popen(
            [*fedreuse, "client", f"127.0.0.1:{port}", "--clients", who, *TINY], stderr=subprocess.PIPE
        )
        for who in ("0-1", "2,3")
    ]
    assert [client.wait(120) for client in clients] == [0, 0]
    assert server.wait(60) == 0
    assert f"127.0.0.1:{port}" in server.communicate()[1]
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["accuracy"] == {"validation": None, "test": None}
    # The same configuration in process is its twin, metrics apart.
    assert call("sim", *TINY, "output=twin", "--wire").exit_code == 0
    assert Path("run/model.safetensors").read_bytes() == Path("twin/model.safetensors").read_bytes()
