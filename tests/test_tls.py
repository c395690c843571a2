"""TLS: it changes not one bit of a run, and whatever is wrong with it is said in one sentence."""

from __future__ import annotations

import asyncio
import csv
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from certificates import Certificates
from support import CPU, Ledger, completed, small_config
from test_agent import Rows, Stub
from test_cli import call, free_port
from wire import QUICK, serving

from fedreuse.client.agent import Agent
from fedreuse.client.errors import AgentError
from fedreuse.client.held import HeldStore
from fedreuse.client.host import ClientHost
from fedreuse.client.tls import ClientTls, client_credentials
from fedreuse.proto.pem import TlsError
from fedreuse.server import sessions
from fedreuse.server.service import Service
from fedreuse.server.settings import TlsSettings
from fedreuse.server.tls import server_credentials
from fedreuse.sim.config import RunConfig, load_config
from fedreuse.sim.launch import LaunchError, launch, trusted
from fedreuse.sim.run import create_run, make_task, open_federation


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch):
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 0.5)


def connections(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return [row for row in csv.DictReader(handle) if row["kind"] == "connection"]


def assert_encrypted(rows: list[dict[str, str]], clients: int) -> None:
    """Both directions of every client were observed, all as TLS bytes and none as HTTP/2."""
    seen = {(int(row["client"]), row["direction"]) for row in rows}
    assert seen == {(client, way) for client in range(clients) for way in ("up", "down")}
    assert {row["http2"] for row in rows} == {""}
    assert all(int(row["tls"]) >= 0 for row in rows)
    assert all(sum(int(row["tls"]) for row in rows if row["direction"] == way) > 0 for way in ("up", "down"))


# ---------------------------------------------------------------- it works


async def federate(folder: Path, config: RunConfig, tls: ClientTls | None) -> list[Ledger]:
    """Serve a run folder here, all its clients beside it; the clients' ledgers."""
    federation = open_federation(folder, config, None)
    service = Service(federation, config.plan().to_proto(), config.server, config.faults)
    host = ClientHost(make_task(config), CPU, HeldStore(None))
    compute = ThreadPoolExecutor(1)
    ledgers = [Ledger() for _ in range(config.clients.total)]
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    served = asyncio.create_task(service.serve(address.set_result))
    try:
        where = await address
        agents = [
            Agent(where, host.participant(n), ledger, compute, tls=tls) for n, ledger in enumerate(ledgers)
        ]
        await asyncio.wait_for(asyncio.gather(*(agent.run() for agent in agents)), 40)
        assert await served is True
        return ledgers
    finally:
        service.stop()
        await asyncio.gather(served, return_exceptions=True)
        federation.close()
        compute.shutdown()


async def test_a_run_over_tls_has_the_same_bits_as_one_in_process(tmp_path, made):
    tls = made.server()
    config = small_config(
        tmp_path / "tls", "rounds=3", f"server.tls.certificate={tls.certificate}", f"server.tls.key={tls.key}"
    )
    folder = create_run(config, make_task(config))
    ledgers = await federate(folder, config, made.client())
    simulated = completed(small_config(tmp_path / "sim", "rounds=3"))
    # The server's own file of the last model, without a summary: the store has it.
    ended = open_federation(folder, config, None)
    twin = open_federation(simulated, small_config(tmp_path / "sim", "rounds=3"), None)
    try:
        assert (ended.next_round, twin.next_round) == (3, 3)
        assert {k: v.tobytes() for k, v in ended.arrays().items()} == {
            k: v.tobytes() for k, v in twin.arrays().items()
        }
    finally:
        ended.close()
        twin.close()
    assert_encrypted(connections(folder / "bytes.csv"), clients=6)
    for ledger in ledgers:
        rows = [row for row in ledger.written if row.kind == "connection"]
        assert {row.direction for row in rows} == {"up", "down"}
        assert [row.how for row in rows if row.http2 is not None or row.tls is None] == []


async def test_without_tls_nothing_is_called_tls(tmp_path):
    async with serving(tmp_path, clients=1, rounds=1) as running:
        ledger = Rows()
        await Agent(running.address, Stub(), ledger, ThreadPoolExecutor(1)).run()  # type: ignore[arg-type]
        assert await running.task is True
    rows = connections(tmp_path / "bytes.csv")
    assert {row["tls"] for row in rows} == {""}
    assert {row["direction"] for row in rows if int(row["http2"]) > 0} == {"up", "down"}
    assert all(row.tls is None for row in ledger.rows)


@pytest.mark.timeout(200)  # two processes that load torch
def test_launch_with_a_self_signed_certificate_needs_no_authority(tmp_path):
    """Real processes on real data; without `ca` its clients trust the certificate itself."""
    pem, key = tmp_path / "self.pem", tmp_path / "self.key"
    subject = ["-subj", "/CN=fedreuse", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*openssl, "-keyout", key, "-out", pem], check=True, capture_output=True)
    small = ["rounds=2", "clients.total=4", "clients.per_round=2", "clients.processes=1"]
    config = load_config(
        None,
        [*small, f"server.tls.certificate={pem}", f"server.tls.key={key}", f"output={tmp_path / 'run'}"],
    )
    folder = create_run(config, make_task(config), body="launch")
    summary = launch(folder, config, progress=lambda _status: None)
    assert summary["rounds"] == 2
    assert_encrypted(connections(folder / "bytes.csv"), clients=4)
    for path in sorted(folder.glob("clients/*/bytes.csv")):
        assert {row["http2"] for row in connections(path)} == {""}


# ---------------------------------------------------------------- the two sides do not meet

MEETINGS = {
    "an authority that did not sign": (
        "server",
        ("stranger-ca", None),
        "not signed by the authority in --tls-ca",
    ),
    "another host's certificate": ("elsewhere", ("ca", None), "is for another name"),
    "an expired certificate": ("expired", ("ca", None), "not valid at this time"),
    "a certificate of the future": ("future", ("ca", None), "not valid at this time"),
    "a client without TLS": (
        "server",
        None,
        "the server may speak TLS only; name its authority with --tls-ca",
    ),
    "a server without TLS": (None, ("ca", None), "the server does not speak TLS; leave --tls-ca out"),
    "no certificate of the client": ("server, demanding", ("ca", None), "show one with --tls-certificate"),
    "a stranger's certificate": ("server, demanding", ("ca", "stranger"), "signed by its tls.client_ca"),
}


async def meeting(folder: Path, server: TlsSettings | None, client: ClientTls | None) -> None:
    """One agent that gives up soon."""
    settings = QUICK.model_copy(update={"tls": server})
    async with serving(folder, clients=1, rounds=1, settings=settings) as running:
        agent = Agent(running.address, Stub(), Rows(), ThreadPoolExecutor(1), give_up=0.3, tls=client)  # type: ignore[arg-type]
        await asyncio.wait_for(agent.run(), 30)
        assert await running.task is True


@pytest.mark.parametrize("case", MEETINGS)
async def test_sides_that_do_not_meet_say_why(tmp_path, made, case):
    shown, trusts, sentence = MEETINGS[case]
    server = None if shown is None else made.server(shown.partition(",")[0], client_ca="demanding" in shown)
    client = None
    if trusts is not None:
        client = made.client(trusts[1], ca="other" if trusts[0] == "stranger-ca" else "ca")
    with pytest.raises(AgentError) as caught:
        await meeting(tmp_path, server, client)
    assert str(caught.value).count("client 0: no federation at 127.0.0.1:") == 1
    assert sentence in str(caught.value)


async def test_a_client_whose_certificate_is_signed_by_the_right_one_is_let_in(tmp_path, made):
    await meeting(tmp_path, made.server(client_ca=True), made.client("client"))


# ---------------------------------------------------------------- files that cannot be used

FILES = {
    "no certificate there": ({"certificate": "no.pem"}, "no.pem cannot be read: No such file"),
    "no key there": ({"key": "no.key"}, "no.key cannot be read: No such file"),
    "a folder": ({"key": "."}, "cannot be read: Is a directory"),
    "a key that does not belong": ({"key": "client.key"}, "client.key is not the key of"),
    "key and certificate mixed up": ({"certificate": "server.key"}, "server.key holds no certificate in PEM form"),
    "a certificate as key": ({"key": "server.pem"}, "server.pem holds no private key in PEM form"),
    "half a certificate": ({"certificate": "half.pem"}, "one of them is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_used_is_named(made, case):
    changes, sentence = FILES[case]
    text = (made.folder / "server.pem").read_text()
    (made.folder / "half.pem").write_text(text[:200] + "\n-----END CERTIFICATE-----\n")
    paths = {"certificate": "server.pem", "key": "server.key"} | changes
    files = {name: made.folder / path for name, path in paths.items()}
    for attempt in (
        lambda: server_credentials(TlsSettings(**files)),
        lambda: client_credentials(ClientTls(ca=made.folder / "ca.pem", **files)),
    ):
        with pytest.raises(TlsError) as caught:
            attempt()
        assert sentence in str(caught.value)
        assert str(made.folder) in str(caught.value)


def test_an_authority_that_cannot_be_used_is_named(made):
    (made.folder / "empty.pem").write_bytes(b"")
    (made.folder / "noise.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for name, sentence in (
        ("no.pem", "no.pem cannot be read"),
        ("empty.pem", "holds no certificate"),
        ("noise.pem", "no usable"),
    ):
        with pytest.raises(TlsError, match=sentence):
            client_credentials(made.client(ca=name.removesuffix(".pem")))
        settings = made.server().model_copy(update={"client_ca": made.folder / name})
        with pytest.raises(TlsError, match=sentence):
            server_credentials(settings)


def test_certificate_and_key_of_a_client_come_together(made):
    for half in ({"certificate": made.folder / "client.pem"}, {"key": made.folder / "client.key"}):
        with pytest.raises(TlsError, match="a client certificate needs its key, and a key its certificate"):
            client_credentials(ClientTls(ca=made.folder / "ca.pem", **half))


def test_without_settings_there_is_no_tls():
    assert server_credentials(None) is None
    assert client_credentials(None) is None


# ---------------------------------------------------------------- commands


def test_commands_complain_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nobody = f"127.0.0.1:{free_port()}"
    wrong = [
        (["status", nobody, "--tls-ca", "no.pem"], "no.pem cannot be read"),
        (["server", "server.tls.certificate=a.pem", "server.tls.key=a.key", "output=run"], "a.pem cannot be read"),
        (["server", "server.tls.certificate=a.pem", "output=other"], "server.tls.key"),
        (["client", nobody, "--clients", "0", "--tls-certificate", "c.pem"], "need --tls-ca"),
        (["client", nobody, "--clients", "0", "--tls-ca", "ca.pem"], "ca.pem cannot be read"),
    ]  # fmt: skip
    for arguments, sentence in wrong:
        result = call(*arguments)
        text = " ".join(result.output.split())
        assert (result.exit_code, text.startswith("error:"), "Traceback" in text) == (1, True, False), text
        assert sentence in text


async def test_status_over_tls(tmp_path, made):
    settings = QUICK.model_copy(update={"tls": made.server()})
    async with serving(tmp_path, settings=settings) as running:

        async def ask(*more: object) -> str:
            result = await asyncio.to_thread(call, "status", running.address, *more)
            return " ".join(result.output.split())

        assert '"phase": "joining"' in await ask("--tls-ca", made.folder / "ca.pem")
        assert "not signed by the authority in --tls-ca" in await ask("--tls-ca", made.folder / "other.pem")
        assert "the server may speak TLS only" in await ask()


def test_whom_clients_of_a_run_trust(made):
    tls = made.server()
    start = [f"server.tls.certificate={tls.certificate}", f"server.tls.key={tls.key}"]
    assert trusted(load_config(None, [])) is None
    assert trusted(load_config(None, start)) == ClientTls(ca=tls.certificate)
    authority = load_config(None, [*start, f"server.tls.ca={made.folder / 'ca.pem'}"])
    assert trusted(authority) == ClientTls(ca=made.folder / "ca.pem")


def test_launch_has_no_certificates_for_clients(tmp_path, made):
    tls = made.server()
    config = load_config(
        None,
        [f"server.tls.{name}={tls.certificate}" for name in ("certificate", "client_ca")]
        + [f"server.tls.key={tls.key}", f"output={tmp_path / 'run'}"],
    )
    with pytest.raises(LaunchError, match=r"start them by hand or drop tls\.client_ca"):
        launch(tmp_path / "run", config, progress=lambda _status: None)


def test_a_client_of_a_run_shows_its_certificate(tmp_path, made, monkeypatch):
    """With --run the authority comes from the run; the client's own certificate is not forgotten."""
    tls = made.server(client_ca=True)
    overrides = [f"server.tls.certificate={tls.certificate}", f"server.tls.key={tls.key}"]
    config = small_config(tmp_path / "run", *overrides, f"server.tls.ca={made.folder / 'ca.pem'}")
    folder = create_run(config, make_task(config), body="server")
    heard: list[ClientTls | None] = []
    monkeypatch.setattr("fedreuse.sim.roles.take_part", lambda *_, tls, **__: heard.append(tls) or True)
    mine = made.client("client")
    shown = ["--tls-certificate", mine.certificate, "--tls-key", mine.key]
    for more in (shown, []):
        result = call("client", "127.0.0.1:1", "--clients", "0", "--run", folder, *more)
        assert result.exit_code == 0, result.output
    assert heard == [mine, made.client()]
