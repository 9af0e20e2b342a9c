"""Termination signals: raised as Interrupted, or held back while a step must not be cut in two.

The handlers are Python's own, not the thread's signal mask: the kernel may deliver a signal to
any thread of the process, and Python then runs the handler in the main thread all the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from dspine_convert.errors import Interrupted

# SIGHUP: the terminal was closed. Windows lacks it.
NUMBERS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    """Install `handler`, except where the parent asked for a signal to be ignored."""
    previous: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    previous[number] = signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Termination signals raise Interrupted in the main thread."""
    with _handled_by(_raise):
        yield


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Termination signals are only noted, in the list that this yields."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    with _handled_by(note):
        yield arrived
