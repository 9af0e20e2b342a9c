"""llama-server as a child process of this one, and a client of it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import httpx

from dspine import _client
from dspine._address import LOOPBACK, ServerError, check_free
from dspine._errors import InvalidError
from dspine._launch import ALL_LAYERS, CACHE_TYPE, Choices, Launch, prepare
from dspine._process import (
    ServerExitError,
    ServerTimeoutError,
    die_with_parent,
    end,
    spawn,
    wait_until,
)
from dspine._programs import program

START_TIMEOUT_S = 600.0  # a large model from a slow disk
NAME = "llama-server"
NOT_RUNNING = "the server does not run; use it in a `with` block, or start() it"

StrPath = str | os.PathLike[str]


class Server(_client.Requests):
    """A llama-server for a target and, if given, its drafter.

        with dspine.Server("target.gguf", "drafter.gguf") as server:
            print(server.complete("Once upon a time", 100).text)

    It starts with `with` or `start()`, and ends with the block or `stop()`; one that is forgotten
    is ended when it is collected, or with the interpreter. Started while there are no other
    threads, on Linux, it also ends with a process that is killed. Requests may come from any
    thread.

    A setting that is None is left to llama-server. A flag in `extra` replaces the chosen one.

    Args:
        target: GGUF file, or OWNER/REPO[:FILE or QUANT] on the hub.
        draft: the same of the drafter, or None.
        n_ctx: tokens of context over all slots; None is what the memory plan says fits.
        n_draft: tokens drafted a round; "auto" is the choice that `dspine tune` stored for this
            pair, else the file's block size - 1.
        n_parallel: slots.
        cache_type: of K and V of target and drafter.
        flash_attn: "on", "off" or "auto".
        gpu_layers: layers of target and drafter on the GPU.
        host, port: where it listens; port 0 is a free one.
        extra: further words of llama-server's command line.
        force: start even where the plan says that it does not fit, and leave the check of the
            pair to llama-server.
        log: file that receives what the server writes; None keeps it only for `log`.
        timeout_s: seconds until it must be ready.
        request_timeout_s: longest silence of a request in seconds; None waits for ever.
        defaults: fields for the body of every completion and chat.
        executable: another llama-server than the one of this package.
    """

    def __init__(
        self,
        target: StrPath,
        draft: StrPath | None = None,
        *,
        n_ctx: int | None = None,
        n_draft: int | Literal["auto"] | None = "auto",
        n_parallel: int | None = 1,
        cache_type: str | None = CACHE_TYPE,
        flash_attn: str | None = "on",
        gpu_layers: int | None = ALL_LAYERS,
        host: str = LOOPBACK,
        port: int = 0,
        extra: Sequence[StrPath] = (),
        force: bool = False,
        log: StrPath | None = None,
        timeout_s: float = START_TIMEOUT_S,
        request_timeout_s: float | None = _client.REQUEST_TIMEOUT_S,
        defaults: Mapping[str, Any] | None = None,
        executable: StrPath | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[[subprocess.Popen[bytes]], Server] | None = None
        self._http: httpx.Client | None = None
        self._log_file: BinaryIO | None = None
        self._launch: Launch | None = None
        self.defaults = dict(defaults or {})
        self.log_path = None if log is None else Path(log)
        self._target, self._draft = os.fspath(target), None if draft is None else os.fspath(draft)
        self._choices = Choices(
            n_ctx=n_ctx,
            n_draft=n_draft,
            n_parallel=n_parallel,
            cache_type=cache_type,
            flash_attn=flash_attn,
            gpu_layers=gpu_layers,
            host=host,
            port=port,
            extra=tuple(os.fspath(word) for word in extra),
            force=force,
        )
        self._executable = executable
        self._timeouts = (timeout_s, request_timeout_s)

    def __repr__(self) -> str:
        state = f"running at {self.url}" if self._process is not None else "not running"
        return f"<dspine.Server {self._target} {self._draft or 'without a drafter'}, {state}>"

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            warnings.warn(f"{self!r} was never stopped", ResourceWarning, stacklevel=2)
            self.stop()

    def start(self) -> Server:
        """Start and wait until it is ready; returns itself.

        Raises LoadError for a missing program or a file that is none, ServerError for a port in
        use or a plan that does not fit, ServerExitError with the last lines of the log where the
        server ends while loading, ServerTimeoutError after `timeout_s`.
        """
        if self._process is not None:
            raise InvalidError("start(): the server is running already")
        self._launch = launch = self._prepared()
        check_free(launch.address)
        self._log_file = self._open_log()
        process = spawn(launch.command, self._log_file.fileno(), die_with_parent())
        self._process = process
        self._finalizer = weakref.finalize(self, end, process)
        self._http = _client.connect(launch.address, launch.api_key, self._timeouts[1])
        try:
            self._wait(process, self._http)
        except BaseException:  # an interrupt too: no server may be left behind
            self.stop()
            raise
        return self

    def _prepared(self) -> Launch:
        executable = Path(self._executable) if self._executable else program(NAME)
        return prepare(executable, self._target, self._draft, self._choices)

    def _open_log(self) -> BinaryIO:
        """A fresh log: it stays open after the server's end, so that it can be read."""
        if self._log_file is not None:
            self._log_file.close()
        try:
            if self.log_path is None:
                file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
            else:
                file = self.log_path.open("wb+")
        except OSError as error:
            raise ServerError(f"{self.log_path}: {error.strerror or error}") from None
        weakref.finalize(self, file.close)
        return file

    def _wait(self, process: subprocess.Popen[bytes], http: httpx.Client) -> None:
        if wait_until(lambda: _client.is_ready(http), process, self._timeouts[0]):
            return
        code = process.poll()
        if code is not None:
            raise ServerExitError(NAME, code, self.log)
        raise ServerTimeoutError(NAME, self._timeouts[0], self.log)

    def stop(self) -> int | None:
        """End the server, by force after 20 s; returns its exit code, None if it does not run."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        if self._http is not None:
            self._http.close()
        code = end(process)
        if self._finalizer is not None:
            self._finalizer.detach()
        return code

    @property
    def command(self) -> tuple[str, ...]:
        """The command line; read before the start, of a server started now."""
        if self._launch is None:
            self._launch = self._prepared()
        return self._launch.command

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen and why, a sentence each."""
        return () if self._launch is None else self._launch.notes

    @property
    def url(self) -> str:
        """Where clients connect, for instance "http://127.0.0.1:8080"."""
        return self._running().address.url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._running().address.port

    @property
    def pid(self) -> int | None:
        """Process id, None while it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> str:
        """What the server has written so far; kept after it ended."""
        if self._log_file is None:
            return ""
        descriptor = self._log_file.fileno()  # shared with the server: no seek may move its place
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0).decode(errors="replace")

    def _running(self) -> Launch:
        if self._launch is None or self._process is None:
            raise InvalidError(NOT_RUNNING)
        return self._launch

    def _session(self) -> httpx.Client:
        if self._process is None or self._http is None:
            raise InvalidError(NOT_RUNNING)
        return self._http

    def _lost(self, error: Exception) -> ServerError:
        process = self._process
        if process is None:
            return ServerError(f"the server was stopped during a request ({error})")
        try:
            # A connection breaks a moment before its process can be seen to have ended.
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ServerError(f"{self.url}: {type(error).__name__}: {error}")
        return ServerExitError(NAME, code, self.log)
