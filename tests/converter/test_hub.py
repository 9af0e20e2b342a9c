"""The hub, played by a server on the loopback interface; nothing leaves this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import pytest

COMMIT = "a" * 40
REPO = "someone/Tiny-DSpine"
TARGET_REPO = "someone/Tiny-Target-GGUF"


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


@pytest.fixture
def hub(draft, target) -> Iterator[Hub]:
    stand_in = Hub()
    directory = draft.write_shards(2, index=True)
    (directory / "README.md").write_text("a card")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "optimizer").mkdir()
    (directory / "optimizer" / "state.safetensors").write_bytes(b"no")
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    stand_in.files[REPO] = {name: directory / name for name in names}
    stand_in.files[TARGET_REPO] = {"tiny.gguf": target}
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


@pytest.fixture
def online(hub, spawn, tmp_path):
    """Run the command line with the stand-in as its hub and an empty cache."""

    def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **environment,
        }
        process = spawn(*arguments, env=env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return run


def test_checkpoint_from_the_hub(hub, online, target, tmp_path):
    args = (REPO, "--target", target, "-t", "f32", "-q")
    code, out, err = online(*args, "-o", tmp_path / "o")
    assert code == 0, err
    path = Path(out.strip())
    assert path.name == "Tiny-DSpine-F32.gguf"
    assert hub.asked(REPO) == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    reader = gguf.GGUFReader(path)
    url = reader.get_field("general.source.url").contents()
    assert url == f"https://huggingface.co/{REPO}"
    assert reader.get_field("general.source.revision").contents() == COMMIT
    # Once cached, it works offline and asks for nothing.
    hub.log.clear()
    code, out, err = online(*args, "-o", tmp_path / "p", HF_HUB_OFFLINE="1")
    assert code == 0, err
    assert Path(out.strip()).read_bytes() == path.read_bytes()
    assert hub.log == []


def test_dry_run_of_a_hub_checkpoint_reads_headers(hub, online, target, tmp_path):
    code, out, err = online(REPO, "--target", target, "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["files"][0]["bytes"] > 0
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_target_header_from_the_hub(hub, online, draft, kit, tmp_path):
    """Only the header is read: the file is larger than what was sent."""
    big = tmp_path / "tiny.gguf"
    big.write_bytes(hub.files[TARGET_REPO]["tiny.gguf"].read_bytes() + bytes(9 << 20))
    hub.files[TARGET_REPO]["tiny.gguf"] = big
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-q")
    code, out, err = online(*args, "-o", tmp_path / "o", HF_TOKEN="hf_secret")
    assert code == 0, err
    assert hub.sent["tiny.gguf"] == 4 << 20
    assert hub.token_seen == "Bearer hf_secret"
    assert "hf_secret" not in out + err
    reader = gguf.GGUFReader(out.strip())
    assert reader.get_field("dspine.target.vocab_size").contents() == 96


def test_header_in_growing_pieces(hub, online, draft, kit, tmp_path):
    """A header larger than the first piece takes further ranges, each byte once."""
    path = kit.new_target(
        tmp_path / "large.gguf", change=lambda w: w.add_string("x.note", "n" * (10 << 20))
    )
    path.write_bytes(path.read_bytes() + bytes(9 << 20))
    hub.files[TARGET_REPO]["large.gguf"] = path
    args = (draft.directory, "--target", f"{TARGET_REPO}:large.gguf", "-q", "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 0, err
    ranges = [r for _, p, r in hub.log if p.endswith("large.gguf") and r]
    assert len(ranges) >= 2
    assert hub.sent["large.gguf"] < path.stat().st_size


@pytest.mark.parametrize("cut", [200, 20])
def test_truncated_target_on_the_hub(hub, online, draft, tmp_path, cut):
    file = hub.files[TARGET_REPO]["tiny.gguf"]
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:cut])
    hub.files[TARGET_REPO]["tiny.gguf"] = short
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 1
    assert "truncated GGUF" in err


def test_a_server_without_ranges(hub, online, draft, tmp_path):
    hub.ranges = False
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o", "-q")
    code, _, err = online(*args)
    assert code == 0, err


def test_cached_target_is_used(hub, online, draft, tmp_path):
    folder = tmp_path / "hf" / "hub" / "models--someone--Tiny-Target-GGUF"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "tiny.gguf").write_bytes(hub.files[TARGET_REPO]["tiny.gguf"].read_bytes())
    hub.files.clear()
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o", "-q")
    code, _, err = online(*args, HF_HUB_OFFLINE="1")
    assert code == 0, err
    assert hub.log == []


@pytest.mark.parametrize(
    ("source", "target_text", "message"),
    [
        ("someone/nothing", None, "hub repository 'someone/nothing'"),
        (None, f"{TARGET_REPO}:absent.gguf", "absent.gguf"),
        (None, "someone/nothing:x.gguf", "someone/nothing:x.gguf"),
    ],
)
def test_absent_on_the_hub(hub, online, draft, target, tmp_path, source, target_text, message):
    args = (source or draft.directory, "--target", target_text or target, "-o", tmp_path / "o")
    code, _, err = online(*args)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") <= 3


def test_offline_without_a_cached_file(hub, online, draft, target, tmp_path):
    args = ("--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(draft.directory, *args, HF_HUB_OFFLINE="1")
    assert code == 1
    assert "HF_HUB_OFFLINE is set" in err
    code, _, err = online(REPO, "--target", target, "-o", tmp_path / "o", HF_HUB_OFFLINE="1")
    assert code == 1
    assert f"hub repository '{REPO}'" in err
    assert hub.log == []


def test_unreachable_hub(online, draft, tmp_path):
    args = (draft.directory, "--target", f"{TARGET_REPO}:tiny.gguf", "-o", tmp_path / "o")
    code, _, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 1
    assert f"{TARGET_REPO}:tiny.gguf" in err
    assert "Traceback" not in err


def test_dry_run_of_a_cached_checkpoint_without_network(hub, online, target, tmp_path):
    """The hub cannot be reached: the cached snapshot is planned. A refusal is still one."""
    args = (REPO, "--target", target, "--dry-run", "--json")
    code, _, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 1
    assert f"hub repository '{REPO}'" in err
    code, _, err = online(REPO, "--target", target, "-o", tmp_path / "o", "-q")
    assert code == 0, err
    code, out, err = online(*args, HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 0, err
    assert json.loads(out)["files"][0]["path"] == "Tiny-DSpine-BF16.gguf"
    hub.files.clear()
    code, _, err = online(*args)
    assert code == 1
    assert f"hub repository '{REPO}'" in err
