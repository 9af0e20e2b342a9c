"""Standard output and error, so that neither a full disk nor odd names can end a conversion."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def prepare_streams() -> None:
    """Names with bytes that the terminal cannot show are escaped, not refused."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def write_quietly(stream: TextIO | None, text: str) -> None:
    """Write what the user may miss: a reader that went away is no reason to stop."""
    if stream is not None:
        with suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def say(text: str) -> None:
    """A line on stderr."""
    write_quietly(sys.stderr, text + "\n")


def settle_stdout() -> OSError | None:
    """Flush stdout; if that fails, return why, and keep the interpreter from trying again."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
        return error
    except ValueError:  # closed by somebody else
        return None
    return None
