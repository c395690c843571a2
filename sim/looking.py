"""Commands that only look: at a server, at runs, at captured messages, at the methods there are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedreuse.sim.console import (
    ConfigFile,
    Data,
    Json,
    Overrides,
    TlsCa,
    TlsCertificate,
    TlsKey,
    client_tls,
    complain,
    errors,
    out,
)


def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of a server.")],
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
) -> None:
    """Ask a running server how far it is."""
    with errors():
        import grpc
        from google.protobuf.json_format import MessageToDict

        from fedreuse.client.tls import hint, open_channel
        from fedreuse.proto import federation_pb2 as pb
        from fedreuse.proto import transport

        tls = client_tls(tls_ca, tls_certificate, tls_key)
        with open_channel(address, tls) as channel:
            try:
                reply = channel.unary_unary(transport.STATUS)(b"", timeout=5)
            except grpc.RpcError as error:
                advice = hint(error.details(), tls is not None) or "is it running there?"
                complain(OSError(f"no fedreuse server answers at {address}: {error.details()}; {advice}"))
        out.print_json(json.dumps(MessageToDict(pb.StatusReply.FromString(reply))))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, e.g. runs/*; finished or not.")],
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Long table on standard output: a line per run, kind and layer.")
    ] = False,
) -> None:
    """Modelled against measured bytes, savings, reuse and accuracy of one or more runs, side by side.

    Every layer that was observed stands beside the modelled one, both directions, with its ratio to modelled and to
    dense bytes; up to grpc also by kind of message. A dash is a layer that was not observed, and the reason is given.
    --json and --csv hold the exact figures.
    """
    with errors():
        from fedreuse.sim import compare as comparing
        from fedreuse.sim.tables import render

        comparison = comparing.compare(runs)
        if as_json:
            sys.stdout.write(json.dumps(comparing.to_json(comparison), indent=2) + "\n")
        elif as_csv:
            comparing.to_csv(comparison, sys.stdout)
        else:
            render(comparison, out)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, e.g. runs/*; finished or not.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; default: report.html in the first run."),
    ] = None,
) -> None:
    """Write one HTML page about one or more runs: bytes by layer, accuracy, the gate, payloads.

    The page needs no network and no other file. It can be filtered by run, direction and layer, and the numbers behind
    each plot can be saved from it.
    """
    with errors():
        from fedreuse.sim.report import write_report

        path = output or runs[0] / "report.html"
        write_report(runs, path)
        out.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB); open it in a browser", soft_wrap=True)


def partition(
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Show what this run saved instead of dividing anew.")
    ] = None,
    data: Data = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a page with plots to this file, FILE.html.")
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="A line for every client, however many.")] = False,
    as_json: Json = False,
) -> None:
    """Divide a task's training examples over clients and show who holds what.

    Try [bold]fedreuse partition partition=dirichlet-0.1 clients.total=20[/bold]. Kinds: iid, iid-balanced, half-iid-0.5
    (the IID share), dirichlet-0.5 (alpha), lq-2 (labels a client), shards-2 (shards a client), quantity-1 (beta),
    natural (writers, speakers, users), resample-20 (for benchmarks: examples a client).

    Examples include those held out for validation. The SHA-256 is of all clients' examples: runs that are compared
    must have the same; it stands in environment.json of every run.
    """
    with errors():
        from fedreuse.sim.config import load_config
        from fedreuse.sim.folder import read_config
        from fedreuse.sim.holdings import look
        from fedreuse.sim.holdings_view import show
        from fedreuse.sim.run import make_task

        if run is not None and (overrides or config):
            complain(ValueError("--run shows what a run saved; overrides and --config would not apply"))
        if plot is not None and plot.suffix not in (".html", ".htm"):
            complain(ValueError(f"--plot {plot}: the plot is a page to open in a browser; name it FILE.html"))
        extra = [f"data={data}"] if data is not None else []
        resolved = load_config(config, [*(overrides or []), *extra]) if run is None else read_config(run)
        holdings = look(resolved, make_task(resolved, run))
        if as_json:
            sys.stdout.write(json.dumps(holdings.to_json()) + "\n")
        else:
            show(holdings, out, everybody=everybody)
        if plot is not None:
            from fedreuse.sim.report.holdings import write_page

            write_page(holdings, plot)
            if not as_json:
                out.print(f"\nwrote {plot}; open it in a browser", soft_wrap=True)


def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="A captured message, e.g. captures/r0001-c00007-up-update.frames."),
    ],
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Run folder in which to look for a model that the body is coded against."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--hex", help="Show every byte, and all of long tables.")
    ] = False,
) -> None:
    """Show what is inside a captured message: sender, fields, tensors, and what its bytes mean.

    Captures are made by `fedreuse sim --wire --capture DIR` and `fedreuse launch --capture DIR`. A body that is coded
    against an earlier model is read whole if that model was captured in the same folder or --run has it; otherwise
    its structure is shown.
    """
    with errors():
        from fedreuse.sim.inspect_view import show
        from fedreuse.sim.inspection import inspect as take_apart

        show(take_apart(file, run), out, everything=everything)


def methods() -> None:
    """List the methods and the parts they are made of."""
    from rich.table import Table

    from fedreuse.sim.recipes import RECIPES, SUMMARIES

    table = Table("method", "what it is", "parts that differ from plain dense averaging")
    for name, parts in RECIPES.items():
        shown = ", ".join(
            f"{part}.{key}={value}" for part, values in parts.items() for key, value in values.items()
        )
        table.add_row(name, SUMMARIES[name], shown or "none")
    out.print(table)


def tasks(data: Data = None, as_json: Json = False) -> None:
    """List the tasks: what they learn from, their model, licence and size, and whether the data are at hand.

    Another model is chosen with task.model: cnn, lenet5, resnet18, resnet18-gn or, for texts, gru. Your own images are
    npz:FILE, your own everything module:attribute; the README has an example.
    """
    with errors():
        from dataclasses import asdict

        from fedreuse.sim.catalogue import catalogue, table

        folder = data or Path("data")
        entries = list(catalogue(folder))
        if as_json:
            sys.stdout.write(json.dumps([asdict(entry) for entry in entries], indent=2) + "\n")
        else:
            out.print(table(entries, folder))
