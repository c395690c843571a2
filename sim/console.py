"""What all commands share: consoles, options with their help, and how they complain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

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
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", help="Speak TLS and trust this authority (PEM file).")
]
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
    from fedreuse.proto.pem import TlsError
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
        TlsError,
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
        complain(first)
    except known as error:
        complain(error)


def complain(error: BaseException) -> NoReturn:
    """One sentence, and status 1."""
    err.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
