"""A whole federation on this machine: one server process, several client processes, one view on them."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fedreuse.client.tls import ClientTls, open_channel
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import transport
from fedreuse.proto.captures import CaptureTo
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import ADDRESS, SUMMARY, LaunchError

START_SECONDS = 120.0
STOP_SECONDS = 15.0
LAST_LINES = 12


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"  {line}" for line in lines)


def split_clients(total: int, processes: int) -> list[range]:
    """Contiguous shares of the clients, one per process, as equal as possible."""
    processes = min(processes, total)
    bounds = [round(i * total / processes) for i in range(processes + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def launch(
    folder: Path,
    config: RunConfig,
    *,
    device: str = "cpu",
    progress: Callable[[pb.StatusReply], None],
    capture: CaptureTo | None = None,
) -> dict[str, Any]:
    """Run a run folder to its end over gRPC; its summary. Stops everything if anything dies or on Ctrl-C.

    `progress` is called about twice a second with the server's status; the server writes what `capture` asks for.
    Raises LaunchError.
    """
    if config.server.tls is not None and config.server.tls.client_ca is not None:
        raise LaunchError(
            "launch has no certificates for its clients; start them by hand or drop tls.client_ca"
        )
    (folder / ADDRESS).unlink(missing_ok=True)
    with _children() as start:
        arguments = ["server", "--run", str(folder), "--exit-with-parent"]
        if capture is not None:
            arguments += ["--capture", str(capture.folder), "--capture-rounds", str(capture.rounds)]
        server = start("server", folder, arguments)
        address = _wait_for_address(folder, server)
        if address is None:  # the run was over already
            return dict(json.loads((folder / SUMMARY).read_text()))
        clients = []
        for n, share in enumerate(split_clients(config.clients.total, config.clients.processes)):
            name = f"client-{n:02d}"
            arguments = [
                "client",
                address,
                "--clients",
                f"{share.start}-{share.stop - 1}",
                "--run",
                str(folder),
                "--state",
                str(folder / "clients" / name),
                "--device",
                device,
                "--exit-with-parent",
            ]
            clients.append(start(name, folder, arguments))
        _follow(address, trusted(config), server, clients, progress)
    summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    return summary


@contextmanager
def _children() -> Iterator[Callable[[str, Path, list[str]], _Child]]:
    children: list[_Child] = []

    def start(name: str, folder: Path, arguments: list[str]) -> _Child:
        log = folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as handle:
            process = subprocess.Popen(
                [sys.executable, "-m", "fedreuse.sim.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the launcher alone; it stops the others in order.
                start_new_session=True,
            )
        child = _Child(name, process, log)
        children.append(child)
        return child

    try:
        yield start
    finally:
        _stop(children)


def _stop(children: list[_Child]) -> None:
    for number, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        alive = [child for child in children if child.process.poll() is None]
        for child in alive:
            child.process.send_signal(number)
        end = time.monotonic() + patience
        while time.monotonic() < end and any(child.process.poll() is None for child in alive):
            time.sleep(0.05)


def _wait_for_address(folder: Path, server: _Child) -> str | None:
    path = folder / ADDRESS
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if path.exists():
            return str(json.loads(path.read_text())["address"])
        if server.process.poll() == 0 and (folder / SUMMARY).exists():
            return None
        if server.process.poll() is not None:
            raise LaunchError(f"the server ended before it listened; {server.log} says:\n{server.tail()}")
        time.sleep(0.05)
    raise LaunchError(f"the server did not listen within {START_SECONDS:.0f} s; see {server.log}")


def trusted(config: RunConfig) -> ClientTls | None:
    """What a client that knows the run's configuration trusts."""
    tls = config.server.tls
    return None if tls is None else ClientTls(ca=tls.ca or tls.certificate)


def _follow(
    address: str,
    tls: ClientTls | None,
    server: _Child,
    clients: list[_Child],
    progress: Callable[[pb.StatusReply], None],
) -> None:
    """Watch until the server is done. A client may end only after the server has finished."""
    with open_channel(address, tls) as channel:
        status = channel.unary_unary(transport.STATUS)
        while server.process.poll() is None:
            try:
                reply = pb.StatusReply.FromString(status(b"", timeout=2, wait_for_ready=True))
            except grpc.RpcError:
                continue  # starting or ending
            progress(reply)
            for client in clients:
                if client.process.poll() not in (None, 0):
                    raise LaunchError(f"{client.name} failed; {client.log} says:\n{client.tail()}")
            time.sleep(0.4)
    if server.process.returncode != 0:
        raise LaunchError(f"the server failed; {server.log} says:\n{server.tail()}")
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end and any(client.process.poll() is None for client in clients):
        time.sleep(0.05)
