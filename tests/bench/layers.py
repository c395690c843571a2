"""One run, every byte layer: plain and TLS, over loopback and over a link with 20 Mbit/s and 1 % loss both ways.

    python tests/bench/layers.py --data DATA [--task mnist|digits] [--rounds N] [--processes P] [-o FOLDER] [--json]

Four runs of dg-fedreuse with the same seed, a server and P client processes in network namespaces of their own (root,
iproute2, nft, ethtool). The ledger's layers stand below each other, with what each adds to the one above; a referee
outside of both ends (see network.py) counted packets, and every byte between its count and the ledger's is explained.
MNIST is taken from, or downloaded into, DATA; digits needs none. Finished runs in FOLDER are not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from network import PORT, WAYS, Link, Network, NetworkError, Seen, from_json, to_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from roundtrip import surroundings

from fedreuse.proto.ledger import CONNECTION, CONNECTION_LAYERS, MESSAGE_LAYERS, Row
from fedreuse.proto.meter import SYN_EXTRA
from fedreuse.server.store import RunError
from fedreuse.sim.compare import Run, compare
from fedreuse.sim.launch import split_clients
from fedreuse.sim.records import read_rows

RATE, LOSS = 20_000_000, 0.01
HEADERS = 52
"""IPv4, TCP and its time stamps."""
TIMESTAMPS = 12
CLIENTS = 50
LIMIT_SECONDS, EXIT_SECONDS = 3600.0, 20.0
SAMPLE_SECONDS = 0.5
REFEREE = "referee.json"
"""Written into a run's folder when everything about it is known."""

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Setup:
    tls: bool
    link: bool

    @property
    def name(self) -> str:
        return f"{'tls' if self.tls else 'plain'}-{'link' if self.link else 'loopback'}"

    def network(self) -> Network:
        return Link("bench", RATE, LOSS) if self.link else Network("bench")


SETUPS = tuple(Setup(tls, link) for link in (False, True) for tls in (False, True))


class BenchError(Exception):
    """A run that went wrong; the text says which, and where its logs are."""


# ---------------------------------------------------------------- running


def run(setup: Setup, options: argparse.Namespace) -> None:
    """Make a run's folder, unless it is there and finished. Raises BenchError, NetworkError."""
    folder = options.output / setup.name
    if (folder / REFEREE).exists():
        return
    if folder.exists():
        shutil.rmtree(folder)
    began = time.monotonic()
    with setup.network() as network:
        quiet = _federate(setup, options, network, folder)
        time.sleep(0.5)  # the last acknowledgements
        facts = {
            "seconds": time.monotonic() - began,
            "congestion_control": network.congestion_control(),
            "seen": to_json(network.seen()),
            "quiet": quiet,
            **surroundings(),
        }
    (folder / REFEREE).write_text(json.dumps(facts, indent=1) + "\n")
    console.print(f"[dim]{setup.name}: {facts['seconds']:.0f} s[/dim]")


def _federate(setup: Setup, options: argparse.Namespace, network: Network, folder: Path) -> Any:
    """The counters in the last quiet moment with all clients connected, None if there was none."""
    logs = options.output / "logs" / setup.name
    logs.mkdir(parents=True, exist_ok=True)
    keys = [
        "method=dg-fedreuse",
        f"task={options.task}",
        f"rounds={options.rounds}",
        f"clients.total={CLIENTS}",
        f"clients.processes={options.processes}",
        f"output={folder}",
        f"server.host={network.address}",
        f"server.port={PORT}",
    ]
    if options.data is not None:
        keys.append(f"data={options.data}")
    if setup.tls:
        keys += _certificates(options.output / "certificates", network.address)
    with _processes(logs) as start:
        server = start(
            "server", network.inside(network.server, [*FEDREUSE, "server", *keys, "--exit-with-parent"])
        )
        while not (folder / "server.json").exists():
            if server.poll() is not None:
                raise BenchError(f"{setup.name}: the server did not listen; see {logs / 'server.log'}")
            time.sleep(0.05)
        clients = []
        for n, share in enumerate(split_clients(CLIENTS, options.processes)):
            name = f"client-{n}"
            command = [*FEDREUSE, "client", f"{network.address}:{PORT}", "--run", str(folder)]
            command += ["--clients", f"{share.start}-{share.stop - 1}", "--exit-with-parent"]
            command += ["--state", str(folder / "clients" / name)]
            clients.append(start(name, network.inside(network.client, command)))
        end, quiet = time.monotonic() + LIMIT_SECONDS, None
        while server.poll() is None and time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
            moment = network.quiet()
            if moment is not None and all(moment[way]["kernel"]["connections"] == CLIENTS for way in WAYS):
                quiet = moment
        for process in (server, *clients):
            if process.wait(max(0.0, end - time.monotonic())):
                raise BenchError(f"{setup.name}: a process ended with {process.returncode}; see {logs}")
    return quiet


FEDREUSE = (sys.executable, "-m", "fedreuse.sim.cli")


@contextmanager
def _processes(logs: Path) -> Iterator[Any]:
    """Starts processes; those that are left at the end are stopped."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            alive = [process for process in started if process.poll() is None]
            for process in alive:
                end(process)
            until = time.monotonic() + EXIT_SECONDS
            while time.monotonic() < until and any(process.poll() is None for process in alive):
                time.sleep(0.05)


def _certificates(folder: Path, address: str) -> list[str]:
    """Keys of the configuration for a server at `address`; the files are made if they are not there."""
    names = {part: folder / f"{address}-{part}.pem" for part in ("certificate", "key", "ca")}
    if not names["ca"].exists():
        import trustme

        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert(address)
        names["certificate"].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(names["key"])
        authority.cert_pem.write_to_path(names["ca"])
    return [f"server.tls.{part}={path}" for part, path in names.items()]


# ---------------------------------------------------------------- layers


@dataclass(frozen=True)
class Outcome:
    setup: Setup
    folder: Path
    run: Run
    seen: Mapping[str, Seen]
    quiet: Any
    congestion_control: str
    seconds: float


def outcomes(options: argparse.Namespace) -> list[Outcome]:
    folders = [options.output / setup.name for setup in SETUPS]
    result = []
    for setup, folder, finished in zip(SETUPS, folders, compare(folders).runs, strict=True):
        facts = json.loads((folder / REFEREE).read_text())
        seen = from_json(facts["seen"])
        others = (facts[name] for name in ("quiet", "congestion_control", "seconds"))
        result.append(Outcome(setup, folder, finished, seen, *others))
    return result


LAYERS = (*MESSAGE_LAYERS, "http2 or tls", *CONNECTION_LAYERS[2:])
STEPS = (
    ("payload - modelled", "coding", "payload", "modelled"),
    ("message - payload", "headers of messages, control messages", "message", "payload"),
    ("grpc - message", "5 bytes a message", "grpc", "message"),
    ("http2 or tls - grpc", "frames, windows, pings; records, handshakes", "http2 or tls", "grpc"),
    ("tcp_payload - http2 or tls", "sent again", "tcp_payload", "http2 or tls"),
    ("ip - tcp_payload", "headers, pure ACKs among them", "ip", "tcp_payload"),
)


def layers(run: Run, way: Any) -> dict[str, int | None]:
    return {**run.measured(way), "http2 or tls": run.connections[way].socket}


def steps(found: Mapping[str, int | None]) -> dict[str, int | None]:
    """What each layer adds to the one above."""
    result = {}
    for name, _, upper, lower in STEPS:
        a, b = found[upper], found[lower]
        result[name] = None if a is None or b is None else a - b
    return result


# ---------------------------------------------------------------- the referee


def verdict(outcome: Outcome, way: Any) -> dict[str, int | None]:
    """The referee's count and the ledger's, and the bytes between them.

    The ledger's formula for IP counts `HEADERS` bytes a segment and `SYN_EXTRA` a connection. What the referee has
    beyond it: segments that left after the last reading of their connection (its goodbye, acknowledgements, FIN),
    SACK options, which no counter of the kernel tells of, and SYNs sent again; RSTs are shorter. A client reads its
    counters once more after the goodbye in which it told the server of them: its own log is nearer. What has left after
    the last reading follows from the other figures here; `moment` is the check that could fail.
    """
    seen, found = outcome.seen[way], layers(outcome.run, way)
    connections = len(
        {row.client for row in read_rows(outcome.folder) if (row.kind, row.direction) == (CONNECTION, way)}
    )
    segments, payload, ip = found["segments"], found["tcp_payload"], found["ip"]
    assert segments is not None
    assert payload is not None
    late = seen.packets - segments
    ends = own(outcome, way)
    between: dict[str, int | None] = {
        "packets, referee": seen.packets,
        "packets, ledger": segments,
        "packets, sender's last reading": ends.segments,
        "FIN": seen.fin,
        "RST": seen.rst,
        "dropped at random": seen.lost,
        "dropped, queue full": seen.queued_out,
        "pure ACKs, referee": seen.pure_acks,
        "payload, referee": seen.payload,
        "payload, ledger": payload,
        "payload, sender's last reading": ends.payload,
        "payload, difference": seen.payload - payload,
        "tcp_payload - tcp_retransmitted - http2 or tls": _identity(found),
        "ip, referee": seen.ip,
        "ip, ledger": ip,
    }
    if ip is not None:
        between |= {
            "ip, difference": seen.ip - ip,
            "payload after the last reading": seen.payload - payload,
            "headers after the last reading": HEADERS * late,
            "SACK options": seen.options,
            "SYNs sent again": SYN_EXTRA * (seen.syn - connections),
            "RSTs without time stamps": -TIMESTAMPS * seen.bare,
        }
    return between


@dataclass(frozen=True)
class Ends:
    """Sums over connections as their sender read them last."""

    segments: int | None
    payload: int | None


def own(outcome: Outcome, way: Any) -> Ends:
    """From the client processes' logs for the uplink; the server's last readings are its ledger's."""
    if way == "down":
        found = layers(outcome.run, way)
        return Ends(found["segments"], found["tcp_payload"])
    rows = [row for row in _client_rows(outcome) if row.direction == way and row.segments is not None]
    return Ends(sum(row.segments or 0 for row in rows), sum(row.tcp_payload or 0 for row in rows))


def _identity(found: Mapping[str, int | None]) -> int | None:
    sent, again, once = (found[layer] for layer in ("tcp_payload", "tcp_retransmitted", "http2 or tls"))
    return None if sent is None or again is None or once is None else sent - again - once


def _client_rows(outcome: Outcome) -> list[Row]:
    return [row for log in (outcome.folder / "clients").glob("*/") for row in read_rows(log)]


def moment(outcome: Outcome, way: Any) -> dict[str, int] | None:
    """The formulas on the kernel's counters against the referee, with nothing on its way and nobody gone."""
    if outcome.quiet is None:
        return None
    kernel, seen = outcome.quiet[way]["kernel"], Seen(**outcome.quiet[way]["seen"])
    result = {
        "payload, referee": seen.payload,
        "payload, kernel": kernel["sent"],
        "payload, difference": seen.payload - kernel["sent"],
    }
    if outcome.setup.link:
        # No socket counts its SYN-ACK.
        segments = kernel["segments"] + (kernel["connections"] if way == "down" else 0)
        ip = kernel["sent"] + HEADERS * segments + SYN_EXTRA * kernel["connections"]
        resent = (SYN_EXTRA + (HEADERS if way == "down" else 0)) * (seen.syn - kernel["connections"])
        result |= {
            "packets, referee": seen.packets,
            "packets, kernel": segments,
            "ip, referee": seen.ip,
            "ip, by the formula": ip,
            "ip, difference": seen.ip - ip,
            "SACK options": seen.options,
            "SYNs sent again": resent,
            "unexplained": seen.ip - ip - seen.options - resent,
        }
    return result


def received(outcome: Outcome) -> int:
    """What the clients' own sockets say arrived, from the client processes' logs: the other end's kernel counters."""
    rows = (row for row in _client_rows(outcome) if row.direction == "down")
    found = (row.tls if outcome.setup.tls else row.http2 for row in rows)
    return sum(value for value in found if value is not None)


# ---------------------------------------------------------------- showing it


def to_document(done: Sequence[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "task": options.task,
        "rounds": options.rounds,
        "runs": [
            {
                "name": outcome.setup.name,
                "seconds": outcome.seconds,
                "congestion_control": outcome.congestion_control,
                "layers": {way: layers(outcome.run, way) for way in WAYS},
                "steps": {way: steps(layers(outcome.run, way)) for way in WAYS},
                "absent": [{"layers": list(a.layers), "reason": a.reason} for a in outcome.run.absences],
                "referee": {way: verdict(outcome, way) for way in WAYS},
                "quiet": {way: moment(outcome, way) for way in WAYS},
                "received_by_clients": received(outcome),
            }
            for outcome in done
        ],
    }


def show(document: dict[str, Any]) -> None:
    notes: dict[str, None] = {}
    runs = document["runs"]
    for way, title in zip(WAYS, ("Uplink", "Downlink"), strict=True):
        table = _table(f"{title}: {document['task']}, {document['rounds']} rounds, bytes", runs)
        for layer in LAYERS:
            cells = [_cell(run["layers"][way][layer]) for run in runs]
            table.add_row(layer, *cells, end_section=layer in ("grpc", "ip"))
        for name, _, _, _ in STEPS:
            table.add_row(name, *(_cell(run["steps"][way][name]) for run in runs))
        console.print(table)
        for run in runs:
            for absence in run["absent"]:
                mine = [name.split()[1] for name in absence["layers"] if name.startswith(f"{way}link")]
                if mine:
                    reason = re.sub(r" \(MSS \d+\)| / and \d+ more in bytes.csv", "", absence["reason"])
                    reason = " / ".join(dict.fromkeys(reason.split(" / ")))
                    notes[f"— {', '.join(mine)} in {run['name']}: {reason}"] = None
    for name, what, _, _ in STEPS:
        console.print(f"[dim]{name}: {what}[/dim]", highlight=False)
    for note in notes:
        console.print(note, highlight=False, markup=False)
    for way, title in zip(WAYS, ("Uplink", "Downlink"), strict=True):
        table = _table(f"{title}: the ledger against packets counted by nft", runs)
        for name in max((run["referee"][way] for run in runs), key=len):
            cells = [_cell(run["referee"][way].get(name)) for run in runs]
            table.add_row(name, *cells, end_section=name in SECTIONS)
            if name == "ip, difference":
                shares = [_share(run["referee"][way]) for run in runs]
                table.add_row("  in % of the referee's", *shares, end_section=True)
        console.print(table)
    for way, title in zip(WAYS, ("Uplink", "Downlink"), strict=True):
        table = _table(f"{title}: the kernel's counters against nft, in a quiet moment before the end", runs)
        found = [run["quiet"][way] or {} for run in runs]
        for name in max(found, key=len):
            table.add_row(name, *(_cell(there.get(name)) for there in found))
        console.print(table)
    table = _table("Downlink: sent once (server's ledger) against arrived (clients' sockets)", runs)
    sent = [run["layers"]["down"]["http2 or tls"] for run in runs]
    arrived = [run["received_by_clients"] for run in runs]
    table.add_row("sent", *map(_cell, sent))
    table.add_row("arrived", *map(_cell, arrived))
    table.add_row("difference", *(_cell(b - a) for a, b in zip(sent, arrived, strict=True)))
    console.print(table)
    said = ", ".join(dict.fromkeys(run["congestion_control"] for run in runs))
    console.print(
        f"congestion control {said}; the link: {RATE / 1e6:g} Mbit/s and {LOSS:.0%} loss each way, no added delay",
        highlight=False,
    )


SECTIONS = (
    *("packets, sender's last reading", "pure ACKs, referee"),
    *("payload, difference", "tcp_payload - tcp_retransmitted - http2 or tls"),
)


def _share(between: Mapping[str, Any]) -> str:
    if between["ip, ledger"] is None:
        return "—"
    return f"{100 * between['ip, difference'] / between['ip, referee']:.4f}"


def _table(title: str, runs: Sequence[Any]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run["name"], justify="right")
    return table


def _cell(value: int | None) -> str:
    return "—" if value is None else f"{value:,}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--task", choices=("mnist", "digits"), default="mnist")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="client processes (default: 2)")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/layers"))
    parser.add_argument("--json", action="store_true", help="machine-readable result")
    options = parser.parse_args()
    if options.rounds < 1 or options.processes < 1:
        parser.error("at least 1 round and 1 process")
    options.output = options.output.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for setup in SETUPS:
            run(setup, options)
        document = to_document(outcomes(options), options)
    except (BenchError, NetworkError, RunError) as error:
        console.print(f"[red]failed:[/red] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        show(document)


if __name__ == "__main__":
    main()
