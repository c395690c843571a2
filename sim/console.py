"""What all commands share: consoles, options with their help, and how they complain."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

if TYPE_CHECKING:
    from fedreuse.client.tls import ClientTls

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
TlsCertificate = Annotated[
    Path | None, typer.Option("--tls-certificate", help="PEM file to show to a server that asks for one.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="PEM file with its key.")]
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


class RunByDefault(TyperGroup):
    """`fedreuse study FILE` is short for `fedreuse study run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


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


def client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls | None:
    """How a client speaks TLS by its options; None for plaintext."""
    from fedreuse.client.tls import ClientTls

    if ca is None:
        if certificate is not None or key is not None:
            complain(ValueError("--tls-certificate and --tls-key need --tls-ca FILE, the server's authority"))
        return None
    return ClientTls(ca=ca, certificate=certificate, key=key)
