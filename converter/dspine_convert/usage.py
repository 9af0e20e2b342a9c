"""What the option parser gives back, for the entry point of every command line."""

from __future__ import annotations

import typer

from dspine_convert.errors import ExitCode, Interrupted

# The base class of everything the option parser raises for a wrong command line.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def usage_text(error: BaseException) -> str | None:
    """What a wrong command line got wrong, with the option's name; None for other errors."""
    if not isinstance(error, UsageError):
        return None
    described = getattr(error, "format_message", None)
    return str(described() if described else error).rstrip(".")


def exit_code(done: object) -> int:
    """Exit code of what a parsed command returned; raises Interrupted for an interrupt.

    The parser turns some exceptions into a returned code: an exit, and an interrupt.
    """
    if done == ExitCode.INTERRUPTED:
        raise Interrupted
    return done if isinstance(done, int) else int(ExitCode.DONE)
