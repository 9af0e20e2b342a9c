"""Runs a server in the foreground: its log shown, signals forwarded, its exit code returned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from dspine_convert.signals import NUMBERS
from dspine_convert.streams import say

from dspine import _client
from dspine._address import Address, ServerError, check_free
from dspine._process import (
    POLL_S,
    ServerTimeoutError,
    die_with_parent,
    end,
    how_it_ended,
    quoted,
    shell_code,
    spawn,
    wait_until,
)

KEPT_LINES = 64
DRAIN_S = 5.0  # what the server wrote before its end is in the pipe; a grandchild may hold it open


class _Log:
    """Copies the server's output to standard error or a file, and remembers its last lines."""

    def __init__(self, source: BinaryIO, target: Path | None) -> None:
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._source = source
        self._sink: BinaryIO | None = None if target is None else target.open("wb")
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        # Read to the end whatever happens to our own output: a full pipe would stop the server.
        for line in self._source:
            self._lines.append(line)
            with suppress(OSError, ValueError):
                sink = self._sink or sys.stderr.buffer
                sink.write(line)
                sink.flush()

    def finish(self) -> None:
        """Wait for what is still in the pipe."""
        self._thread.join(DRAIN_S)
        if self._sink is not None:
            self._sink.close()

    @property
    def text(self) -> str:
        return b"".join(self._lines).decode(errors="replace")


class _Signals:
    """Termination signals go to the server; those that come before it exists wait for it."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self._pending: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.arrived.append(number)
        if self._process is None:
            self._pending.append(number)
        else:
            self._send(self._process, number)

    @staticmethod
    def _send(process: subprocess.Popen[bytes], number: int) -> None:
        with suppress(OSError):  # it has just ended
            process.send_signal(number)

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        """From now on `process` gets them."""
        self._process = process
        while self._pending:
            self._send(process, self._pending.pop(0))

    @contextmanager
    def installed(self) -> Iterator[_Signals]:
        """Handle the signals, except where our parent asked for one to be ignored (nohup)."""
        before: dict[int, Any] = {n: signal.getsignal(n) for n in NUMBERS}
        handled = [n for n, was in before.items() if was not in (signal.SIG_IGN, None)]
        try:
            for number in handled:
                signal.signal(number, self._handle)
            yield self
        finally:
            for number in handled:
                signal.signal(number, before[number])


def _watch(
    name: str,
    process: subprocess.Popen[bytes],
    address: Address,
    log: _Log,
    arrived: list[int],
    timeout_s: float,
) -> int:
    """Wait until it is ready, then for its end; returns its exit code."""
    started = time.monotonic()
    with _client.connect(address, None, None) as http:
        ready = wait_until(lambda: bool(arrived) or _client.is_ready(http), process, timeout_s)
    ready = ready and not arrived
    if ready:
        say(f"dspine: ready after {time.monotonic() - started:.1f} s at {address.url}")
    elif not arrived and process.poll() is None:
        before = log.text  # what it says when it is ended tells nothing
        end(process)
        log.finish()
        raise ServerTimeoutError(name, timeout_s, before)
    while process.poll() is None:  # not wait(): the main thread must run the signal handlers
        time.sleep(POLL_S)
    log.finish()
    code = process.returncode
    if code != 0 and not arrived:
        # Quoted even where the terminal shows the log: the reason may be far above.
        when = "" if ready else " while loading"
        say(f"dspine: {name} {how_it_ended(code)}{when}{quoted(log.text)}")
    return shell_code(code)


def run(
    name: str,
    command: Sequence[str],
    address: Address,
    *,
    timeout_s: float,
    log: Path | None = None,
) -> int:
    """Run a server until it ends; returns its exit code, 128 + N where signal N killed it.

    SIGINT, SIGTERM and SIGHUP go on to the server. Raises ServerError where it cannot be
    started or the port is in use, and ServerTimeoutError, with the last lines of its log, where
    it is not ready after `timeout_s` seconds; it is ended then.
    """
    check_free(address)
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise ServerError(f"--log {log}: not a place for a file")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as source, _Signals().installed() as signals:
        try:
            process = spawn(command, writing, die_with_parent())
        finally:
            os.close(writing)
        try:
            signals.attach(process)
            return _watch(name, process, address, _Log(source, log), signals.arrived, timeout_s)
        finally:
            end(process)
