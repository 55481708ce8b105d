"""A loopback hub for models: takes the uploads of huggingface_hub and serves them again.

A stand-in for the protocol (repository, pre-upload, LFS, commit, tree, resolve), not for the Hub's
rules. Weights go the way of large files, everything else inside the commit, as on the real one.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHA = "89abcdef0123456789abcdef0123456789abcdef"


class ModelHub:
    """`repos` maps a repository's name to its files (path -> bytes); `private` to what it was
    created as. Uploads need the token "good"; `requests` lists (method, path)."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}  # sha256 -> content
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = unquote(urlsplit(self.path).path)
                hub.requests.append((self.command, path))
                if self.command in ("POST", "PUT"):
                    signed = self.headers.get("Authorization") == "Bearer good"
                    if not signed and not path.startswith("/lfs/"):
                        return self.send(401, {"error": "Invalid username or password."})
                    return self.send(*hub.take(path, body))
                self.send(*hub.give(path))

            do_HEAD = do_GET = do_POST = do_PUT = answer

            def send(
                self, status: int, value: object, headers: dict[str, str] | None = None
            ) -> None:
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for key, text in {"Content-Type": "application/json", **(headers or {})}.items():
                    self.send_header(key, text)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "ModelHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, token: str | None = "good") -> dict[str, str]:
        """Variables for a process that is to use this hub and nothing else."""
        found = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
                 "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
        return found | ({"HF_TOKEN": token} if token else {})

    def take(self, path: str, body: bytes) -> tuple[int, object]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.repos.setdefault(repo, {})
            self.private.setdefault(repo, asked.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{repo}", "name": repo, "id": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/lfs/(\w+)", path):
            assert hashlib.sha256(body).hexdigest() == match[1]
            self.large[match[1]] = body
            return 200, {}
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}},
                }
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            files = self.repos[match[1]]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/{match[1]}/commit/{SHA}", "commitOid": SHA}
        return 404, {"error": f"nothing at {path}"}

    def give(self, path: str) -> tuple[int, object, dict[str, str]]:
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path)
        tree = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        match = api or tree or file
        if not match or match[1] not in self.repos:
            return 404, {}, {"X-Error-Code": "RepoNotFound"}
        files = self.repos[match[1]]
        if api:
            siblings = [{"rfilename": name} for name in files]
            return 200, {"id": match[1], "sha": SHA, "siblings": siblings}, {}
        if tree:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": self._etag(body)}
                for name, body in files.items()
            ]
            return 200, entries, {}
        if file[2] not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
        body = files[file[2]]
        return 200, body, {"ETag": f'"{self._etag(body)}"', "X-Repo-Commit": SHA}

    def _etag(self, body: bytes) -> str:
        return hashlib.sha1(body).hexdigest()
