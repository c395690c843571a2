"""The package as a stranger gets it: a wheel, fresh generated code, any protobuf from 6.31 to 7."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("proto", "server", "client", "sim")
SHIPPED = (".py", ".pyi", ".proto", ".typed", ".html", ".css", ".js", ".yaml")


def run(*command: object, cwd: Path | None = None, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a clean copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE"):
        run("cp", "-r", ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    # The build backend is there already; an isolated build would fetch it anew.
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source)
    return next(out.glob("fedreuse-*.whl"))


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"fedreuse/{path.relative_to(ROOT)}"
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }
    assert names == expected


def test_the_wheel_works_where_its_dependencies_are(wheel: Path, tmp_path: Path) -> None:
    """In a new environment that sees this one's packages: import, command line, a short run."""
    home = tmp_path / "venv"
    # with system site packages in the sense of this environment: its packages, without the editable fedreuse.
    venv.create(home, system_site_packages=True, with_pip=True)
    python = home / "bin" / "python"
    inherited = next(path for path in sys.path if path.endswith("site-packages"))
    site = next((home / "lib").glob("python*/site-packages"))
    (site / "inherited.pth").write_text(inherited + "\n")  # found, but its own .pth files are not run
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    where = run(
        python, "-c", "import fedreuse.proto, fedreuse.sim; print(fedreuse.proto.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(home)
    out = run(
        home / "bin" / "fedreuse",
        "sim",
        "--json",
        "--wire",
        "rounds=2",
        "clients.total=4",
        "clients.per_round=2",
        "sim.workers=1",
        cwd=tmp_path,
    )
    assert '"method": "dg-fedreuse"' in out


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    options = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "proto/federation.proto"]
    run(sys.executable, "-m", "grpc_tools.protoc", "-Ifedreuse/proto=proto", *options, cwd=ROOT)
    for name in ("federation_pb2.py", "federation_pb2.pyi"):
        fresh = (tmp_path / "fedreuse" / "proto" / name).read_text()
        assert (ROOT / "proto" / name).read_text() == fresh, "stale; run `make proto`"


@pytest.mark.parametrize("version", ["6.31.1", "7.36.2"])
def test_the_generated_code_runs_with(version: str) -> None:
    """`make` puts these two versions beside the environment."""
    folder = Path(sys.prefix) / f"protobuf-{version}"
    assert folder.is_dir(), f"{folder} is missing; run `make setup`"
    program = (
        "import google.protobuf, fedreuse.proto.federation_pb2 as pb;"
        "m = pb.ClientMessage(join=pb.Join(client=3, held_round=0), received=7);"
        "n = pb.ClientMessage.FromString(m.SerializeToString());"
        "print(google.protobuf.__version__, n.join.client, n.join.HasField('held_round'), n.received)"
    )
    paths = os.pathsep.join([str(folder), str(Path(sys.prefix) / "lib")])
    assert run(sys.executable, "-c", program, PYTHONPATH=paths).split() == [version, "3", "True", "7"]
