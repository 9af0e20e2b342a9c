"""The hub, played by a server on the loopback interface; nothing leaves this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub:
    """A stand-in: files by repository, and a log of what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Path]] = {}
        self.log: list[tuple[str, str, str]] = []
        self.sent: dict[str, int] = {}
        self.ranges = True
        self.token_seen: str | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                return

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, *, body: bool) -> None:
                path = unquote(urlsplit(self.path).path).strip("/")
                hub.log.append((self.command, path, self.headers.get("Range", "")))
                hub.token_seen = self.headers.get("Authorization", hub.token_seen)
                if path.startswith("api/models/"):
                    return self.model_info(path.removeprefix("api/models/"))
                repo, _, rest = path.partition("/resolve/")
                file = hub.files.get(repo, {}).get(rest.partition("/")[2])
                if file is None:
                    return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return self.send_file(file, body=body)

            def model_info(self, rest: str) -> None:
                repo = "/".join(rest.split("/")[:2])
                if repo not in hub.files:
                    return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                sizes = {n: p.stat().st_size for n, p in hub.files[repo].items()}
                if "/tree/" in rest:
                    tree = [
                        {"type": "file", "path": n, "size": s, "oid": "0" * 40}
                        for n, s in sizes.items()
                    ]
                    return self.send_json(tree)
                siblings = [{"rfilename": n, "size": s} for n, s in sizes.items()]
                return self.send_json({"id": repo, "sha": COMMIT, "siblings": siblings})

            def send_json(self, value: Any) -> None:
                self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

            def send_file(self, file: Path, *, body: bool) -> None:
                data = file.read_bytes()
                tag = hashlib.sha256(data).hexdigest()
                headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}
                asked = self.headers.get("Range", "")
                if asked.startswith("bytes=") and hub.ranges and body:
                    first, last = asked.removeprefix("bytes=").split("-")
                    if int(first) >= len(data):
                        return self.send(416, b"", {})
                    end = int(last) + 1 if last else len(data)
                    part = data[int(first) : end]
                    hub.sent[file.name] = hub.sent.get(file.name, 0) + len(part)
                    span = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                    return self.send(206, part, {**headers, "Content-Range": span})
                return self.send(200, data if body else b"", headers, length=len(data))

            def send(
                self, code: int, data: bytes, headers: dict[str, str], length: int | None = None
            ) -> None:
                self.send_response(code)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def asked(self, repo: str) -> set[str]:
        """Names of the files of a repository that were fetched with GET."""
        start = f"{repo}/resolve/"
        return {
            path.removeprefix(start).partition("/")[2]
            for method, path, _ in self.log
            if method == "GET" and path.startswith(start)
        }

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that make huggingface_hub ask this one, with its cache below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
