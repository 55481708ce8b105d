"""A loopback hub: the few endpoints that huggingface_hub and datasets ask for, on 127.0.0.1.

Tests start the real scripts against it (HF_ENDPOINT), so a change of those libraries that would
break a download shows up here without a network.
"""

import hashlib
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves `files` (path in the repository -> bytes) as the data set `repo`, at any revision.

    `requests` lists (method, path). What may go wrong, by path of the repository: `status` is an
    HTTP status to answer instead, `cut` how many transfers end half-way, `slow` the seconds that a
    transfer takes, `instead` other content under the same etag. With `redirect`, files lie on
    another server, as the big ones of the real hub do. `down` ends all connections at once.
    """

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.status: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self.instead: dict[str, bytes] = {}
        self.redirect = self.down = False
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that shall take this hub for the real one."""
        return os.environ | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def fetched(self) -> list[str]:
        """Paths of the repository's files that were downloaded, in order."""
        pattern = re.compile(rf"/datasets/{self.repo}/resolve/[^/]+/(.+)")
        matches = (pattern.fullmatch(path) for method, path in self.requests if method == "GET")
        return [match[1] for match in matches if match]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self.down:
            request.close_connection = True
            return
        self.requests.append((request.command, path))
        api = f"/api/datasets/{self.repo}"
        if match := re.fullmatch(rf"/datasets/{self.repo}/resolve/([^/]+)/(.+)", path):
            commit = match[1] if re.fullmatch("[0-9a-f]{40}", match[1]) else SHA
            self.send_file(request, match[2], commit, self.redirect)
        elif match := re.fullmatch(r"/elsewhere/(.+)", path):
            self.send_file(request, match[1], SHA, redirect=False)
        elif match := re.fullmatch(rf"{api}/tree/[^/]+(?:/(.*))?", path):
            self.send_tree(request, match[1] or "", "recursive=true" in request.path.lower())
        elif re.fullmatch(rf"{api}(/revision/[^/]+)?", path):
            self.send_json(request, {"id": self.repo, "sha": SHA})
        else:
            self.send(request, 404, b"<html>not here</html>")

    def send_file(
        self, request: BaseHTTPRequestHandler, file: str, commit: str, redirect: bool
    ) -> None:
        if file in self.status:
            return self.send(request, self.status[file], b"<html>an error page</html>")
        if file not in self.files:
            return self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        body = self.files[file]
        headers = {"ETag": f'"{etag(file, body)}"', "X-Repo-Commit": commit}
        if redirect:
            headers = {"X-Linked-ETag": headers.pop("ETag"), "X-Linked-Size": str(len(body))}
            headers |= {"X-Repo-Commit": commit, "Location": f"{self.url}/elsewhere/{file}"}
            return self.send(request, 302, b"", headers)
        body = self.instead.get(file, body)
        if request.command == "GET" and self.cut.get(file, 0) > 0:
            self.cut[file] -= 1
            headers["Content-Length"] = str(len(body))
            request.close_connection = True
            return self.send(request, 200, body[: len(body) // 2], headers)
        seconds = self.slow.get(file, 0)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            first, last = int(match[1]), int(match[2] or len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            return self.send(request, 206, body[first : last + 1], headers, seconds)
        self.send(request, 200, body, headers, seconds)

    def send_tree(self, request: BaseHTTPRequestHandler, folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        entries = {}
        for path, body in self.files.items():
            if path.startswith(prefix):
                name = path if recursive else prefix + path.removeprefix(prefix).split("/")[0]
                oid = hashlib.sha1(name.encode()).hexdigest()
                entry = {"type": "file", "path": name, "size": len(body), "oid": oid}
                if name == path and is_big(path):
                    entry["lfs"] = {"oid": etag(path, body), "size": len(body), "pointerSize": 134}
                entries[name] = entry if name == path else entry | {"type": "directory", "size": 0}
        if not entries:
            return self.send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        # the real hub promises no order, so neither do we
        self.send_json(request, sorted(entries.values(), key=lambda e: e["path"], reverse=True))

    def send_json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        self.send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        seconds: float = 0,
    ) -> None:
        headers = {"Content-Length": str(len(body))} | (headers or {})
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            pieces = 50 if seconds else 1
            for i in range(pieces):
                time.sleep(seconds / pieces)
                piece = body[len(body) * i // pieces : len(body) * (i + 1) // pieces]
                request.wfile.write(piece)
                request.wfile.flush()


def is_big(file: str) -> bool:
    """Whether the real hub would keep the file in its large file storage."""
    return file.endswith((".parquet", ".bin"))


def etag(file: str, body: bytes) -> str:
    """Of a big file the sha256, else some other hash."""
    return (hashlib.sha256 if is_big(file) else hashlib.sha1)(body).hexdigest()
