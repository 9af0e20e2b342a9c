"""Progress on stderr: a bar in bytes on a terminal, a line per ten percent otherwise."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dspine_convert.streams import write_quietly


class Meter(Protocol):
    """What the workers report to; `advance` may be called from any thread."""

    def advance(self, nbytes: int) -> None: ...


class Silent:
    """Reports nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        return None

    def advance(self, nbytes: int) -> None:
        """Ignore the report."""


class Lines(Silent):
    """A line on `stream` whenever another tenth is done."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, max(total, 1), stream
        self._done = 0
        self._tenth = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to what is done."""
        with self._lock:
            self._done += nbytes
            tenth = self._done * 10 // self.total
            if tenth > self._tenth:
                self._tenth = tenth
                mb = self._done / 1e6
                write_quietly(self.stream, f"{self.label} {tenth * 10}% ({mb:.0f} MB)\n")


class Bar(Silent):
    """A bar that counts bytes; honours NO_COLOR through rich."""

    def __init__(self, label: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(label, total=total)

    def __enter__(self) -> Bar:
        with suppress(OSError):  # the terminal may be gone
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._progress.stop()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to what is done."""
        with suppress(OSError):
            self._progress.advance(self._task, nbytes)


def meter(label: str, total: int, *, quiet: bool) -> Silent:
    """The meter that suits this stderr."""
    if quiet:
        return Silent()
    if sys.stderr is None:
        return Silent()
    if sys.stderr.isatty():
        return Bar(label, total)
    return Lines(label, total, sys.stderr)
