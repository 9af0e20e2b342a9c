"""Progress on stderr: a bar on a terminal, a line for every tenth otherwise, nothing if quiet."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from dspine_convert.streams import say

from dspine_bench.runner import Progress


class _Lines:
    def __init__(self, label: str) -> None:
        self._label, self._tenth = label, -1

    def __call__(self, done: int, total: int, what: str) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth > self._tenth:
            self._tenth = tenth
            say(f"{self._label}: {done} of {total}")


@contextlib.contextmanager
def shown(label: str, *, quiet: bool) -> Iterator[Progress]:
    """A function that takes how much is done, of how much, and what runs now."""
    if quiet:
        yield lambda done, total, what: None
        return
    if not sys.stderr.isatty():
        yield _Lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{label} {what}")

        yield show
