"""data/download.py against a server on this machine that does all that servers do."""

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import download
from data.download import fetch
from nanorove.errors import UserError

CONTENT = bytes(range(256)) * 9000  # some blocks
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests: list[str] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        kind = self.path.strip("/")
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        page = b"<html>Not Found</html>"
        status, body = {"missing": (404, page), "page": (200, page), "part": (206, CONTENT)}.get(
            kind, (200, CONTENT)
        )
        if kind == "other":
            body = CONTENT[:-1] + b"x"
        self.send_response(status)
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            return
        if kind != "endless":
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body[: 1000 if kind == "cut" else None])
        if kind == "endless":
            self.wfile.write(b"more")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def nothing_in(folder: Path) -> bool:
    return not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("kind", ["good", "moved"])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_file_arrives_whole_and_once(server, tmp_path, kind, size):
    path = tmp_path / "new" / "file.zip"
    fetch(f"{server}/{kind}", path, sha256=SHA256, bytes=size)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644
    asked = len(Handler.requests)
    fetch(f"{server}/{kind}", path, sha256=SHA256, bytes=size)
    assert len(Handler.requests) == asked


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("missing", None, "HTTP status 404 Not Found"),
        ("page", None, "sha256 .*, wanted"),  # nanochat#344: an error page stays as data
        ("page", len(CONTENT), "22 bytes, wanted 2,304,000"),
        ("other", None, "another file than this code was made for"),
        ("part", None, "HTTP status 206 instead of 200"),
        ("cut", None, "1,000 bytes came of 2,304,000; try again"),
        ("cut", len(CONTENT), "1,000 bytes came of 2,304,000; try again"),
        ("endless", None, "does not say how long"),
        ("endless", len(CONTENT), "2,304,001 bytes came of 2,304,000"),
        ("chunked", None, "does not say how long"),
    ],
)
def test_a_broken_transfer_leaves_nothing(server, tmp_path, kind, size, message):
    with pytest.raises(UserError, match=message) as error:
        fetch(f"{server}/{kind}", tmp_path / "new" / "file.zip", sha256=SHA256, bytes=size)
    assert f"{server}/{kind}" in str(error.value) and "\n" not in str(error.value)
    assert nothing_in(tmp_path / "new")


def test_a_file_in_pieces_of_which_the_size_is_known(server, tmp_path):
    fetch(f"{server}/chunked", tmp_path / "file", sha256=SHA256, bytes=len(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_file_that_is_there_is_checked(server, tmp_path):
    path = tmp_path / "file.zip"
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match="file.zip: sha256 .*, wanted .*; delete it"):
        fetch(f"{server}/good", path, sha256=SHA256)
    assert path.read_bytes() == CONTENT[:-1] and Handler.requests == []


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "/etc/passwd", "data:,x"]
)
def test_only_the_web(tmp_path, url):
    with pytest.raises(UserError, match="only https and http"):
        fetch(url, tmp_path / "new" / "file", sha256=SHA256)
    assert nothing_in(tmp_path / "new")


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UserError, match="http://127.0.0.1:1/x: .*refused.*; try again"):
        fetch("http://127.0.0.1:1/x", tmp_path / "file", sha256=SHA256)
    with pytest.raises(UserError, match="http://host.invalid/x: "):
        monkeypatch.setenv("no_proxy", "host.invalid")
        fetch("http://host.invalid/x", tmp_path / "file", sha256=SHA256)


def test_a_disk_that_is_too_small(server, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="2,304,000 bytes, but 1,000 are free in .*; make room"):
        fetch(f"{server}/good", tmp_path / "file", sha256=SHA256)
    assert nothing_in(tmp_path)


def test_two_processes_at_once(server, tmp_path):
    """Each has a temporary name of its own, so neither sees half a file."""
    path, errors = tmp_path / "file", []

    def work() -> None:
        try:
            fetch(f"{server}/good", path, sha256=SHA256)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and path.read_bytes() == CONTENT and list(tmp_path.iterdir()) == [path]


def test_a_file_is_kept_as_it_is_sent(server, tmp_path, monkeypatch):
    """An archive is not unpacked on the way."""
    packed = gzip.compress(b"text")
    monkeypatch.setitem(globals(), "CONTENT", packed)
    fetch(f"{server}/good", tmp_path / "f.gz", sha256=hashlib.sha256(packed).hexdigest())
    assert (tmp_path / "f.gz").read_bytes() == packed
