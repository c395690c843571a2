"""The `fedreuse` command."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedreuse.sim import looking
from fedreuse.sim.console import (
    Capture,
    CaptureRounds,
    ConfigFile,
    Data,
    Device,
    Json,
    Overrides,
    TensorBoard,
    TlsCa,
    TlsCertificate,
    TlsKey,
    Verbose,
    client_tls,
    complain,
    err,
    errors,
    out,
)
from fedreuse.sim.running import capture_to, check_tensorboard, run_here, run_processes
from fedreuse.sim.study.commands import app as studies

if TYPE_CHECKING:
    from fedreuse.sim.config import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated learning over gRPC in which every byte is counted.\n\n"
    "First success: [bold]fedreuse launch rounds=10[/bold], then [bold]fedreuse compare runs/*[/bold].",
)


def _configuration(file: Path | None, overrides: list[str] | None, data: Path | None) -> RunConfig:
    from fedreuse.sim.config import load_config

    extra = [f"data={data}"] if data is not None else []
    return load_config(file, [*(overrides or []), *extra])


def _logging(verbose: bool) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")


# ---------------------------------------------------------------- running


@app.command()
def sim(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Data = None,
    device: Device = "cpu",
    wire: Annotated[
        bool, typer.Option("--wire", help="Serialize every message for real, in process.")
    ] = False,
    capture: Capture = None,
    capture_rounds: CaptureRounds = 2,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a federation in this process, with virtual clients."""
    _logging(verbose)
    with errors():
        from fedreuse.sim.run import create_run, make_task

        if capture is not None and not wire:
            complain(ValueError("--capture needs --wire: without it there are no messages"))
        check_tensorboard(tensorboard)
        resolved = _configuration(config, overrides, data)
        task = make_task(resolved)
        folder = create_run(resolved, task, body="sim --wire" if wire else "sim")
        run_here(
            folder,
            resolved,
            wire=wire,
            device=device,
            as_json=as_json,
            tensorboard=tensorboard,
            capture=capture_to(capture, capture_rounds),
        )


@app.command()
def launch(
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Data = None,
    device: Device = "cpu",
    capture: Capture = None,
    capture_rounds: CaptureRounds = 2,
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a federation on this machine: a server and client processes over gRPC."""
    _logging(verbose)
    with errors():
        from fedreuse.sim.run import create_run, make_task

        check_tensorboard(tensorboard)
        resolved = _configuration(config, overrides, data)
        folder = create_run(resolved, make_task(resolved), body="launch")
        run_processes(
            folder,
            resolved,
            device=device,
            as_json=as_json,
            tensorboard=tensorboard,
            capture=capture_to(capture, capture_rounds),
        )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was interrupted.")],
    device: Device = "cpu",
    tensorboard: TensorBoard = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Go on with an interrupted run; it ends as if nothing had happened."""
    _logging(verbose)
    with errors():
        from fedreuse.sim.folder import read_body, read_config

        resolved = read_config(run)
        body = read_body(run)
        check_tensorboard(tensorboard)
        if body == "launch":
            run_processes(run, resolved, device=device, as_json=as_json, tensorboard=tensorboard)
        elif body.startswith("sim"):
            wire = "--wire" in body
            run_here(run, resolved, wire=wire, device=device, as_json=as_json, tensorboard=tensorboard)
        else:
            complain(
                ValueError(f"{run} belongs to a server; start it again with `fedreuse server --run {run}`")
            )


@app.command()
def server(
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Serve an existing run folder (new or interrupted).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Schema and initial weights from `fedreuse init-model`.")
    ] = None,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate/--no-evaluate", help="Compute metrics with the task beside the server."),
    ] = True,
    data: Data = None,
    capture: Capture = None,
    capture_rounds: CaptureRounds = 2,
    verbose: Verbose = True,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Serve a federation: wait for clients, run all rounds, write the run folder.

    Started again with --run after a crash it goes on from the last committed round.
    """
    _logging(verbose)
    with errors():
        from fedreuse.server.store import RunError
        from fedreuse.sim.folder import read_body, read_config
        from fedreuse.sim.roles import exit_with_parent as watch_parent
        from fedreuse.sim.roles import serve
        from fedreuse.sim.run import create_run, make_task

        if exit_with_parent:
            watch_parent(os.getppid())
        if run is not None:
            resolved, folder = read_config(run), run
            if read_body(run).startswith("sim"):
                raise RunError(f"{run} belongs to `fedreuse sim`; continue it with `fedreuse resume {run}`")
            task = make_task(resolved, run) if evaluate else None
        else:
            resolved = _configuration(config, overrides, data)
            task = make_task(resolved) if evaluate or model is None else None
            folder = create_run(resolved, task, model, body="server")
            task = task if evaluate else None
        summary = serve(
            folder,
            resolved,
            task,
            listening=_listening(folder),
            committed=_committed,
            capture=capture_to(capture, capture_rounds),
        )
        if summary is None:
            err.print(f"stopped; go on with `fedreuse server --run {folder}`")
            raise typer.Exit(130)


@app.command()
def client(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server.")],
    clients: Annotated[str, typer.Option("--clients", help="Indices to host, e.g. 3 or 0-4 or 1,5,7.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Take task and data from this run's configuration.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Folder for held state and the byte log; default: memory only."),
    ] = None,
    data: Data = None,
    device: Device = "cpu",
    give_up: Annotated[
        float, typer.Option("--give-up", help="Seconds without a server that are too many.")
    ] = 300.0,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    verbose: Verbose = True,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Take part in a federation with one or more clients.

    What to train is the client's own business (its task and data); how to train comes from the server.
    """
    _logging(verbose)
    with errors():
        from fedreuse.sim.folder import read_config
        from fedreuse.sim.launch import trusted
        from fedreuse.sim.roles import exit_with_parent as watch_parent
        from fedreuse.sim.roles import take_part
        from fedreuse.sim.run import make_task

        if exit_with_parent:
            watch_parent(os.getppid())
        resolved = read_config(run) if run is not None else _configuration(config, overrides, data)
        indices = _indices(clients, resolved.clients.total)
        known = trusted(resolved) if run is not None else None
        tls = client_tls(tls_ca or (known.ca if known else None), tls_certificate, tls_key)
        finished = take_part(
            address,
            indices,
            resolved,
            make_task(resolved, run),
            state=state,
            device=device,
            give_up=give_up,
            tls=tls,
        )
        if not finished:
            raise typer.Exit(130)


# ---------------------------------------------------------------- preparing


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("fedreuse.yaml"),
    method: Annotated[str, typer.Option(help="Recipe to start from.")] = "dg-fedreuse",
) -> None:
    """Write a commented configuration file with every key and its default."""
    with errors():
        from fedreuse.sim.template import template

        if file.exists():
            complain(ValueError(f"{file} exists; remove it or choose another name"))
        file.write_text(template(method))
        out.print(f"wrote {file}; run it with `fedreuse sim -c {file}` or `fedreuse launch -c {file}`")


@app.command("init-model")
def init_model(
    file: Annotated[Path, typer.Argument(help="Where to write it, e.g. model.safetensors.")],
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Data = None,
) -> None:
    """Write a task's schema and initial weights to one safetensors file, for a server without the task."""
    with errors():
        from fedreuse.sim.run import init_model as write_model
        from fedreuse.sim.run import make_task

        resolved = _configuration(config, overrides, data)
        write_model(resolved, make_task(resolved), file)
        out.print(f"wrote {file}; serve it with `fedreuse server --model {file} --no-evaluate`")


# ---------------------------------------------------------------- looking

for command in (
    looking.status,
    looking.compare,
    looking.report,
    looking.partition,
    looking.inspect,
    looking.methods,
    looking.tasks,
):
    app.command()(command)


# ---------------------------------------------------------------- studies

app.add_typer(studies, name="study")

# ---------------------------------------------------------------- shared pieces


def _listening(folder: Path) -> Any:
    def show(address: str) -> None:
        err.print(f"listening on {address}; run folder {folder}", highlight=False)

    return show


def _committed(row: dict[str, Any]) -> None:
    logging.getLogger("fedreuse").info(
        "round %d: fresh %d, reused %d, fault %d", row["round"], row["fresh"], row["reused"], row["fault"]
    )


def _indices(text: str, total: int) -> list[int]:
    """`3`, `0-4`, `1,5,7`: client indices below `total`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            span = range(int(first), int(last) + 1) if dash else [int(first)]
            found += span[: total + 1]
        except ValueError:
            complain(ValueError(f"--clients {text!r}: write 3, 0-4 or 1,5,7"))
    bad = [i for i in found if not 0 <= i < total]
    if bad or not found or len(set(found)) != len(found):
        complain(ValueError(f"--clients {text!r}: distinct indices from 0 to {total - 1} are needed"))
    return found


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
