"""Fetching data sets from a web server on this machine: whole ones, slow, cut and wrong ones, full disks."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import re
import resource
import shutil
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from fedreuse.client.errors import TaskError
from fedreuse.sim.tasks import download
from fedreuse.sim.tasks.download import DataSet, Origin, fetch

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes


class Server(ThreadingHTTPServer):
    """What to answer, by path; `asked` are the paths asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Callable[[Handler], None]] = {}
        self.asked: list[str] = []

    def url(self, path: str, answer: Callable[[Handler], None]) -> str:
        self.answers[path] = answer
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)
        self.server.answers[self.path.partition("?")[0]](self)

    def log_message(self, *_: object) -> None:
        pass


def answer(
    content: bytes, promised: int | None = -1, pieces: int = 1, pause: float = 0
) -> Callable[[Handler], None]:
    """The content, in pieces with pauses; its length as promised (None: not said)."""

    def send(handler: Handler) -> None:
        handler.send_response(200)
        if promised is not None:
            handler.send_header("Content-Length", str(len(content) if promised < 0 else promised))
        handler.end_headers()
        size = -(-len(content) // pieces)
        for start in range(0, len(content), size):
            handler.wfile.write(content[start : start + size])
            time.sleep(pause)

    return send


def not_found(handler: Handler) -> None:
    handler.send_error(404)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def one_file(url: str | list[str], size: int | None = None, unpacked: int = 0) -> DataSet:
    urls = [url] if isinstance(url, str) else url
    origin = Origin(urls, md5(CONTENT))
    return DataSet(
        "SET", "somebody's, under a licence", "SET/raw", ("a.bin",), lambda: [origin], size, unpacked
    )


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("promised", [-1, None])
def test_a_file_is_fetched_to_its_place(server: Server, tmp_path: Path, promised: int | None) -> None:
    fetch(one_file(server.url("/x/a.bin", answer(CONTENT, promised)) + "?download=1"), tmp_path / "data")
    assert names(tmp_path / "data") == ["SET/raw/a.bin"]
    assert (tmp_path / "data/SET/raw/a.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(("size", "said"), [(None, "1.0 MB"), (1_234_567, "1.2 MB, 5 MB unpacked")])
def test_licence_and_size_are_said_before_the_first_byte(
    server: Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    size: int | None,
    said: str,
) -> None:
    heard: list[str] = []

    def send(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        deadline = time.monotonic() + 5
        while not caplog.text and time.monotonic() < deadline:
            time.sleep(0.005)
        heard.append(caplog.text)
        handler.wfile.write(CONTENT)

    fetch(one_file(server.url("/a.bin", send), size, 5_000_000 if size else 0), tmp_path)
    assert f"SET is not in {tmp_path}: downloading {said} (somebody's, under a licence)" in heard[0]
    assert caplog.text.count("downloading") == 1


def test_members_of_a_zip_and_of_a_tar(server: Server, tmp_path: Path) -> None:
    packed, tar = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("deep/one.gz", gzip.compress(b"one"))
        archive.writestr("deep/other", b"not wanted")
    with tarfile.open(fileobj=tar, mode="w:gz") as files:
        for name in ("folder/two", "folder/other"):
            info = tarfile.TarInfo(name)
            info.size = 3
            files.addfile(info, io.BytesIO(b"two"))
    contents = {"/s.zip": packed.getvalue(), "/s.tar.gz": tar.getvalue()}
    origins = [
        Origin([server.url(path, answer(content))], md5(content), members)
        for (path, content), members in zip(
            contents.items(), [{"deep/one.gz": "one.gz"}, {"folder/two": "two"}], strict=True
        )
    ]
    fetch(DataSet("SET", "free", "here", ("one.gz", "two"), lambda: origins), tmp_path)
    assert names(tmp_path) == ["here/one.gz", "here/two"]
    assert gzip.decompress((tmp_path / "here/one.gz").read_bytes()) == b"one"
    assert (tmp_path / "here/two").read_bytes() == b"two"


def test_a_second_address_is_tried_when_the_first_does_not_give_it(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [
        server.url("/1/a.bin", not_found),
        server.url("/2/a.bin", answer(b"something else")),
        server.url("/3/a.bin", answer(CONTENT)),
    ]
    fetch(one_file(urls), tmp_path)
    assert (tmp_path / "SET/raw/a.bin").read_bytes() == CONTENT
    assert server.asked == ["/1/a.bin", "/2/a.bin", "/3/a.bin"]
    assert caplog.text.count("downloading") == 1


def failing(server: Server, kind: str) -> str:
    kinds = {
        "404": not_found,
        "wrong checksum": answer(CONTENT[:-1] + b"!"),
        "cut": answer(CONTENT[:300_000], promised=len(CONTENT)),
        "cut, length not said": answer(CONTENT[:300_000], promised=None),
        "silent": lambda _handler: time.sleep(0.6),
        "slower and slower": answer(CONTENT, pieces=3, pause=0.6),
        "no HTTP": lambda handler: handler.wfile.write(b"220 mail\r\n\r\n") and None,
    }
    return server.url("/a.bin", kinds[kind])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("404", "HTTP Error 404"),
        ("wrong checksum", "what came has MD5 [0-9a-f]{32}, not"),
        ("cut", "broke off after 300000 of 1024000 bytes"),
        ("cut, length not said", "what came has MD5"),
        ("silent", "timed out"),
        ("slower and slower", "timed out"),
        ("no HTTP", "220 mail"),
    ],
)
def test_what_does_not_come_whole_leaves_nothing_and_says_what_to_do(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    monkeypatch.setattr(download, "SILENCE", 0.3)
    folder = tmp_path / "data"
    url = failing(server, kind)
    advice = re.escape(
        f"Put a.bin into {folder}/SET/raw, or name another folder in place of {folder} with --data "
    )
    with pytest.raises(
        TaskError, match=rf"^SET is not in .* be downloaded \({url}: .*{why}.*\)\. {advice}FOLDER"
    ):
        fetch(one_file(url), folder)
    assert list(folder.iterdir()) == []


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at this port: it was taken and given back."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as gone:
        url = gone.url("/a.bin", not_found)
    with pytest.raises(TaskError, match=r"refused.*Put a\.bin into"):
        fetch(one_file(url), tmp_path)


def test_a_slow_server_is_waited_for(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE", 0.5)
    fetch(one_file(server.url("/a.bin", answer(CONTENT, pieces=8, pause=0.1))), tmp_path)  # 0.8 s in all
    assert (tmp_path / "SET/raw/a.bin").read_bytes() == CONTENT


def test_an_archive_without_what_it_should_hold(server: Server, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other", b"")
    content = buffer.getvalue()
    origin = Origin([server.url("/s.zip", answer(content))], md5(content), {"member": "a"})
    with pytest.raises(TaskError, match="no item named 'member' in the archive"):
        fetch(DataSet("SET", "free", "here", ("a",), lambda: [origin]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_seen_before_anything_is_fetched(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=900_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    urls = [server.url("/1/a.bin", answer(CONTENT)), server.url("/2/a.bin", answer(CONTENT))]
    with pytest.raises(TaskError, match=r"it takes 3 MB, and only 1 MB are free there.*--data FOLDER"):
        fetch(one_file(urls, unpacked=2_000_000), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way(server: Server, tmp_path: Path) -> None:
    """The system lets no file grow beyond 500,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(TaskError, match=r"File too large.*Put a\.bin into"):
            fetch(one_file(server.url("/a.bin", answer(CONTENT))), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TaskError, match="--data FOLDER"):
        fetch(one_file(server.url("/a.bin", answer(CONTENT))), tmp_path / "file")
    assert server.asked == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> list[Origin]:
        (next(tmp_path.iterdir()) / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(DataSet("SET", "free", "here", ("a",), interrupted), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_several_at_once_leave_one_whole_file(server: Server, tmp_path: Path) -> None:
    url = server.url("/a.bin", answer(CONTENT, pieces=4, pause=0.02))
    threads = [threading.Thread(target=fetch, args=(one_file(url), tmp_path)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == ["SET/raw/a.bin"]
    assert (tmp_path / "SET/raw/a.bin").read_bytes() == CONTENT


def test_a_terminal_sees_rate_and_time_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(download, "Console", lambda **_: console)
    fetch(one_file(server.url("/a.bin", answer(CONTENT, pieces=4, pause=0.2))), tmp_path)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"SET .* 1\.0/1\.0 MB", text)
    assert re.search(r"MB/s left 0:00:0\d", text)


def test_licence_and_size_stand_on_a_line_before_the_bar(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    handler = logging.StreamHandler(screen)
    monkeypatch.setattr(download, "Console", lambda **_: Console(file=screen, force_terminal=True, width=100))
    download.logger.addHandler(handler)
    try:
        fetch(one_file(server.url("/a.bin", answer(CONTENT))), tmp_path)
    finally:
        download.logger.removeHandler(handler)
    said = f"SET is not in {tmp_path}: downloading 1.0 MB (somebody's, under a licence)\n"
    assert screen.getvalue().startswith(said)
    assert "MB/s" in screen.getvalue()[len(said) :]
