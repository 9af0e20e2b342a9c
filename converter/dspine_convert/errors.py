"""The one exception type that users see, and the table of exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

MAX_NAME = 120
SCHEMA_VERSION = 1  # of everything that --json prints


class ExitCode(IntEnum):
    """Every code the command can end with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    BUG = 3
    INTERRUPTED = 130


class ConvertError(Exception):
    """A refusal or an expected failure; its text is one to three lines for the user."""


class Interrupted(BaseException):
    """A termination signal arrived; derives from BaseException so that nothing swallows it.

    A text, if there is one, says what the run left behind.
    """


def short(text: str) -> str:
    """A name from a file, cut so that a message stays readable whatever the file holds."""
    kept = text[: MAX_NAME - 1]
    while len(repr(kept)) > MAX_NAME + 2:  # what is escaped takes several places
        kept = kept[:-8]
    return text if len(text) < MAX_NAME and kept == text else kept + "…"


def some_names(names: Iterable[str], limit: int = 5) -> str:
    """Join up to `limit` names, sorted, and say how many there are in all."""
    ordered = sorted(names)
    text = ", ".join(repr(short(name))[1:-1] for name in ordered[:limit])
    if len(ordered) > limit:
        text += f", … ({len(ordered)} in all)"
    return text
