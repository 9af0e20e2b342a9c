"""The entry point: signals, one error handler, exit codes.

Imports little: signals must be handled before the slow imports, which a first Ctrl-C often hits.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from dspine_convert.errors import SCHEMA_VERSION, ConvertError, ExitCode, Interrupted
from dspine_convert.signals import signals_held, signals_raise
from dspine_convert.streams import prepare_streams, say, settle_stdout, write_quietly

CANNOT_START = "can't start new thread"  # CPython's words; the exception has no type of its own


def __getattr__(name: str) -> Any:
    """The typer application, for whoever runs it without main()."""
    if name == "app":
        from dspine_convert.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{where}disk full ({error.strerror}); nothing was left behind"
    return f"{where}{error.strerror or error}"


def _outcome(error: BaseException) -> tuple[ExitCode, str]:
    """Exit code and message of whatever ended the run."""
    if isinstance(error, ConvertError):
        return ExitCode.FAILED, str(error)
    if isinstance(error, KeyboardInterrupt | Interrupted) or type(error).__name__ == "Abort":
        said = str(error) if isinstance(error, Interrupted) else ""
        return ExitCode.INTERRUPTED, said or "interrupted; nothing was left behind"
    if isinstance(error, SystemExit):  # the parser's answer to a reader that went away
        return ExitCode.FAILED, "standard output: broken pipe"
    if isinstance(error, OSError):
        return ExitCode.FAILED, _os_error_text(error)
    if isinstance(error, MemoryError):
        return ExitCode.FAILED, "out of memory"
    if isinstance(error, RuntimeError) and CANNOT_START in str(error):
        return ExitCode.FAILED, f"{CANNOT_START}; fewer --threads may help"
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ExitCode.BUG, f"internal error: {text}\nthis is a bug; --debug shows where"


def _fail(error: BaseException, arguments: Sequence[str]) -> ExitCode:
    """Say on stderr, and for --json on stdout, what ended the run; returns the exit code."""
    parser = sys.modules.get("dspine_convert.usage")
    usage_text = getattr(parser, "usage_text", None)  # absent while imports fail
    usage = usage_text(error) if usage_text is not None else None
    if usage is not None:
        code, text = ExitCode.USAGE, f"{usage} (see --help)"
    else:
        code, text = _outcome(error)
        if "--debug" in arguments:
            say("".join(traceback.format_exception(error)))
    say(f"dspine-convert: {text}")
    if "--json" in arguments:
        document = {"schema_version": SCHEMA_VERSION, "error": text, "exit_code": int(code)}
        write_quietly(sys.stdout, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return code


def _run(arguments: Sequence[str]) -> None:
    # Held: an exception in the middle of an import may end as a traceback of the import system.
    with signals_held() as arrived:
        from dspine_convert.command import execute
    if arrived:
        raise Interrupted
    execute(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    code = ExitCode.DONE
    try:
        with signals_raise():
            _run(arguments)
    except BaseException as error:
        with signals_held():
            code = _fail(error, arguments)
    lost = settle_stdout()
    if lost is not None and code is ExitCode.DONE:
        say(f"dspine-convert: standard output: {lost.strerror or lost}")
        code = ExitCode.FAILED
    return int(code)
