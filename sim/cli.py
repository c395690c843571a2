"""The `fedreuse` command."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fedreuse.proto.captures import CaptureTo
    from fedreuse.proto.federation_pb2 import StatusReply
    from fedreuse.sim.config import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated learning over gRPC in which every byte is counted.\n\n"
    "First success: [bold]fedreuse launch rounds=10[/bold], then [bold]fedreuse compare runs/*[/bold].",
)
out = Console()
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, e.g. method=topk-fedavg task=mnist clients.total=20 train.learning_rate=0.1",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; `fedreuse init` writes a commented one.")
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder with data sets (the key `data`).")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:INDEX.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")]
Capture = Annotated[
    Path | None,
    typer.Option("--capture", help="Write every message to a file in this folder, for `fedreuse inspect`."),
]
CaptureRounds = Annotated[
    int,
    typer.Option("--capture-rounds", min=1, help="How many rounds --capture writes, from the first one on."),
]
TensorBoard = Annotated[
    Path | None,
    typer.Option("--tensorboard", help="Write scalars of every round into this folder, for TensorBoard."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what the processes log.")]


@contextmanager
def errors() -> Iterator[None]:
    """Known faults end the command with a sentence and status 1; Ctrl-C with status 130."""
    from fedreuse.client.errors import AgentError, TaskError
    from fedreuse.proto.errors import ProtocolError
    from fedreuse.server.store import RunError
    from fedreuse.sim.config import ConfigError
    from fedreuse.sim.folder import LaunchError

    known = (
        AgentError,
        ConfigError,
        LaunchError,
        OSError,
        ProtocolError,
        RunError,
        TaskError,
    )
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted; continue with `fedreuse resume RUN`")
        raise typer.Exit(130) from None
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, known):
            raise
        _complain(first)
    except known as error:
        _complain(error)


def _complain(error: BaseException) -> None:
    err.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


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
            _complain(ValueError("--capture needs --wire: without it there are no messages"))
        _check_tensorboard(tensorboard)
        resolved = _configuration(config, overrides, data)
        task = make_task(resolved)
        folder = create_run(resolved, task, body="sim --wire" if wire else "sim")
        _simulate(
            folder,
            resolved,
            wire=wire,
            device=device,
            as_json=as_json,
            tensorboard=tensorboard,
            capture=_capture(capture, capture_rounds),
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

        _check_tensorboard(tensorboard)
        resolved = _configuration(config, overrides, data)
        folder = create_run(resolved, make_task(resolved), body="launch")
        _launch(
            folder,
            resolved,
            device=device,
            as_json=as_json,
            tensorboard=tensorboard,
            capture=_capture(capture, capture_rounds),
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
        _check_tensorboard(tensorboard)
        if body == "launch":
            _launch(run, resolved, device=device, as_json=as_json, tensorboard=tensorboard)
        elif body.startswith("sim"):
            wire = "--wire" in body
            _simulate(run, resolved, wire=wire, device=device, as_json=as_json, tensorboard=tensorboard)
        else:
            _complain(
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
            task = make_task(resolved) if evaluate else None
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
            capture=_capture(capture, capture_rounds),
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
    verbose: Verbose = True,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
) -> None:
    """Take part in a federation with one or more clients.

    What to train is the client's own business (its task and data); how to train comes from the server.
    """
    _logging(verbose)
    with errors():
        from fedreuse.sim.folder import read_config
        from fedreuse.sim.roles import exit_with_parent as watch_parent
        from fedreuse.sim.roles import take_part
        from fedreuse.sim.run import make_task

        if exit_with_parent:
            watch_parent(os.getppid())
        resolved = read_config(run) if run is not None else _configuration(config, overrides, data)
        indices = _indices(clients, resolved.clients.total)
        finished = take_part(
            address, indices, resolved, make_task(resolved), state=state, device=device, give_up=give_up
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
            _complain(ValueError(f"{file} exists; remove it or choose another name"))
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


@app.command()
def status(address: Annotated[str, typer.Argument(help="HOST:PORT of a server.")]) -> None:
    """Ask a running server how far it is."""
    with errors():
        import grpc
        from google.protobuf.json_format import MessageToDict

        from fedreuse.proto import federation_pb2 as pb
        from fedreuse.proto import transport

        with grpc.insecure_channel(address) as channel:
            try:
                reply = channel.unary_unary(transport.STATUS)(b"", timeout=5)
            except grpc.RpcError as error:
                _complain(OSError(f"no fedreuse server answers at {address}: {error.details()}"))
        out.print_json(json.dumps(MessageToDict(pb.StatusReply.FromString(reply))))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Long table on standard output.")] = False,
) -> None:
    """Modelled against serialized bytes, savings, reuse and accuracy of one or more runs, side by side."""
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


@app.command()
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


@app.command()
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


# ---------------------------------------------------------------- shared pieces


def _simulate(
    folder: Path,
    config: RunConfig,
    *,
    wire: bool,
    device: str,
    as_json: bool,
    tensorboard: Path | None = None,
    capture: CaptureTo | None = None,
) -> None:
    from fedreuse.sim.progress import RunProgress
    from fedreuse.sim.simulate import simulate

    with (
        _scalars(tensorboard, folder) as update,
        RunProgress(err, f"{config.method} {config.task.name}", config.rounds) as progress,
    ):

        def committed(row: dict[str, Any]) -> None:
            progress.row(row)
            update()

        summary = simulate(folder, config, wire=wire, device=device, committed=committed, capture=capture)
    _report(folder, summary, as_json)


def _launch(
    folder: Path,
    config: RunConfig,
    *,
    device: str,
    as_json: bool,
    tensorboard: Path | None = None,
    capture: CaptureTo | None = None,
) -> None:
    from fedreuse.sim.launch import launch as run_processes
    from fedreuse.sim.progress import RunProgress

    with (
        _scalars(tensorboard, folder) as update,
        RunProgress(err, f"{config.method} {config.task.name}", config.rounds) as progress,
    ):

        def status(reply: StatusReply) -> None:
            progress.status(reply)
            update()

        summary = run_processes(folder, config, device=device, progress=status, capture=capture)
    _report(folder, summary, as_json)


def _capture(folder: Path | None, rounds: int) -> CaptureTo | None:
    from fedreuse.proto.captures import CaptureTo

    return None if folder is None else CaptureTo(folder, rounds)


def _check_tensorboard(logs: Path | None) -> None:
    """Complain before anything has begun."""
    if logs is not None:
        from fedreuse.sim.scalars import writer_class

        writer_class()


@contextmanager
def _scalars(logs: Path | None, folder: Path) -> Iterator[Callable[[], None]]:
    """What to call when rounds may have been committed."""
    if logs is None:
        yield lambda: None
        return
    from fedreuse.sim.scalars import TensorBoard as Scalars

    with Scalars(logs, folder) as scalars:
        yield scalars.update


def _report(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return
    from fedreuse.sim.compare import compare as read
    from fedreuse.sim.tables import render

    render(read([folder]), out, brief=True)
    out.print(f"more: `fedreuse compare {folder}`", highlight=False, soft_wrap=True)


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
            _complain(ValueError(f"--clients {text!r}: write 3, 0-4 or 1,5,7"))
    bad = [i for i in found if not 0 <= i < total]
    if bad or not found or len(set(found)) != len(found):
        _complain(ValueError(f"--clients {text!r}: distinct indices from 0 to {total - 1} are needed"))
    return found


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
