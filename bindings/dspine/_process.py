"""A server process: started in its own group, watched while it loads, ended for certain."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dspine._address import ServerError

STOP_TIMEOUT_S = 20.0  # a server that saves its state or frees a large model needs some
POLL_S = 0.05
LAST_LINES = 8


class ServerExitError(ServerError):
    """The server ended on its own; `code` is its exit code, `log` what it wrote."""

    def __init__(self, name: str, code: int, log: str) -> None:
        super().__init__(f"{name} {how_it_ended(code)}{quoted(log)}")
        self.code = code
        self.log = log


class ServerTimeoutError(ServerError, TimeoutError):
    """The server was not ready in time; `log` is what it wrote."""

    def __init__(self, name: str, timeout_s: float, log: str) -> None:
        super().__init__(f"{name} was not ready after {timeout_s:g} s and was ended{quoted(log)}")
        self.log = log


def how_it_ended(code: int) -> str:
    """An exit code of `subprocess` in words."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def last_lines(log: str, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log that say something."""
    return list(deque((line.rstrip() for line in log.splitlines() if line.strip()), maxlen=count))


def quoted(log: str) -> str:
    """The last lines of a log, to follow a sentence."""
    lines = last_lines(log)
    return "; its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def shell_code(code: int) -> int:
    """The exit code of a child as a shell would report it: 128 + signal where one killed it."""
    return 128 - code if code < 0 else code


def spawn(
    command: Sequence[str], output: int, before_exec: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program with both outputs at the descriptor `output`.

    It gets a session of its own: a terminal's Ctrl-C goes to every process of a group, and
    llama-server takes a second interrupt as "exit at once, without cleaning up".
    Raises ServerError where it cannot be started.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    except OSError as error:
        raise ServerError(f"{command[0]}: cannot be started: {error.strerror or error}") from None


def die_with_parent() -> Callable[[], None] | None:
    """A function for the child that has Linux end it when this process dies, even if killed.

    None elsewhere, and where this is not the only thread: the kernel watches the thread that
    started the child, and a child of several threads must not run Python before its program.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig, number = 1, int(signal.SIGTERM)
    return lambda: prctl(pr_set_pdeathsig, number, 0, 0, 0)


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float
) -> bool:
    """Wait until `ready()`, the end of the process or the deadline; True if it is ready."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return process.poll() is None
        time.sleep(POLL_S)
    return False


def end(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> int:
    """Terminate, kill after `timeout_s`; returns the exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
