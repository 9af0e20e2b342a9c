"""Runs llama-server for a demonstration or a test, and asks it for token ids."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

HOST = "127.0.0.1"


class ServerExitError(RuntimeError):
    """llama-server ended before it was ready; `code` is its exit code, `log` what it wrote."""

    def __init__(self, code: int, log: str) -> None:
        last = [line for line in log.splitlines() if line.strip()][-8:]
        super().__init__(f"llama-server ended with code {code}:\n" + "\n".join(last))
        self.code = code
        self.log = log


@dataclass(frozen=True)
class Completion:
    """An answer of /completion. `drafted` and `accepted` count tokens, 0 without a drafter."""

    tokens: list[int]
    text: str
    drafted: int
    accepted: int
    cached: int
    stop: str  # "limit", "eos" or "word"

    @property
    def rounds(self) -> int:
        """Verifications: each emits what it accepted and one token; the first is the prompt's."""
        return len(self.tokens) - 1 - self.accepted

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round; 1.0 is plain decoding."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 1.0


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class LlamaServer:
    """A llama-server process; use it as a context manager.

    Args:
        program: path of llama-server.
        arguments: its command line, without host and port.
        log: file that receives what it writes.
    """

    def __init__(self, program: Path, arguments: Sequence[str | Path], log: Path) -> None:
        self.command = [str(program), *map(str, arguments)]
        self.log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client()

    def start(self, timeout_s: float = 120) -> LlamaServer:
        """Start and wait until it is ready; ServerExitError if it ends, TimeoutError if not."""
        port = free_port()
        # nothing between this process and the loopback interface: no proxies of the environment
        self._client = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=120, trust_env=False)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.command, "--host", HOST, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                self._process = None
                raise ServerExitError(code, self.log)
            with contextlib.suppress(httpx.HTTPError):
                self.get("/health")
                return self
            time.sleep(0.05)
        self.stop()
        raise TimeoutError(f"llama-server was not ready after {timeout_s:g} s: {self.log_path}")

    def stop(self) -> int | None:
        """End the process, by force after 20 s; returns its exit code, None if it never ran."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        self._client.close()
        process.terminate()
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    @property
    def log(self) -> str:
        """What the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> str:
        """GET a path; httpx.HTTPStatusError for an error status."""
        return self._client.get(path).raise_for_status().text

    def stream(
        self, path: str, body: dict[str, Any]
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        """POST JSON; a context manager with the open answer, to be read line by line."""
        return self._client.stream("POST", path, json=body)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST JSON and parse the answer; httpx.HTTPStatusError for an error status."""
        return self._client.post(path, json=body).raise_for_status().json()

    def complete(self, prompt: Sequence[int] | str, n_predict: int, **settings: Any) -> Completion:
        """Continue token ids or a text greedily; `settings` are fields of /completion."""
        body: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n_predict": n_predict,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        answer = self.post("/completion", body | settings)
        timings = answer["timings"]
        return Completion(
            tokens=answer["tokens"],
            text=answer["content"],
            drafted=timings.get("draft_n", 0),
            accepted=timings.get("draft_n_accepted", 0),
            cached=timings.get("cache_n", 0),
            stop=answer["stop_type"],
        )

    def __enter__(self) -> LlamaServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
