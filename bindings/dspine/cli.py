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

from dspine_convert.errors import ConvertError, ExitCode, Interrupted
from dspine_convert.signals import signals_held, signals_raise
from dspine_convert.streams import prepare_streams, say, settle_stdout, write_quietly

from dspine._errors import DspineError

SCHEMA_VERSION = 1  # of everything that --json prints


def __getattr__(name: str) -> Any:
    """The typer application, for whoever runs it without main()."""
    if name == "app":
        from dspine.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _os_error_text(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # What has no name here is standard output: files are opened by their names.
        return f"{error.filename or 'standard output'}: disk full ({error.strerror})"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _outcome(error: BaseException) -> tuple[int, str]:
    """Exit code and message of whatever ended the run."""
    if isinstance(error, DspineError | ConvertError):
        return ExitCode.FAILED, str(error)
    if isinstance(error, KeyboardInterrupt | Interrupted) or type(error).__name__ == "Abort":
        return ExitCode.INTERRUPTED, str(error) or "interrupted"
    if isinstance(error, SystemExit):  # the parser's answer to a reader that went away
        return ExitCode.FAILED, "standard output: broken pipe"
    if isinstance(error, OSError):
        return ExitCode.FAILED, _os_error_text(error)
    if isinstance(error, MemoryError):
        return ExitCode.FAILED, "out of memory"
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ExitCode.BUG, f"internal error: {text}\nthis is a bug; --debug shows where"


def own_words(arguments: Sequence[str]) -> list[str]:
    """The words before `--`: what follows is another program's."""
    words = list(arguments)
    return words[: words.index("--")] if "--" in words else words


def _fail(error: BaseException, arguments: Sequence[str]) -> int:
    """Say on stderr, and for --json on stdout, what ended the run; returns the exit code."""
    parser = sys.modules.get("dspine_convert.usage")
    usage_text = getattr(parser, "usage_text", None)  # absent while imports fail
    usage = usage_text(error) if usage_text is not None else None
    words = own_words(arguments)
    if usage is not None:
        hint = "; flags of llama-server go after --" if "serve" in words else ""
        code, text = int(ExitCode.USAGE), f"{usage} (see --help{hint})"
    else:
        code, text = _outcome(error)
        if "--debug" in words:
            say("".join(traceback.format_exception(error)))
    say(f"dspine: {text}")
    if "--json" in words:
        document = {"schema_version": SCHEMA_VERSION, "error": text, "exit_code": int(code)}
        write_quietly(sys.stdout, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return int(code)


def _run(arguments: Sequence[str]) -> int:
    # Held: an exception in the middle of an import may end as a traceback of the import system.
    with signals_held() as arrived:
        from dspine.command import execute
    if arrived:
        raise Interrupted
    own = own_words(arguments)
    # --debug is understood anywhere, as it concerns no command in particular
    return execute([*(w for w in own if w != "--debug"), *arguments[len(own) :]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        with signals_raise():
            code = _run(arguments)
    except BaseException as error:
        with signals_held():
            code = _fail(error, arguments)
    lost = settle_stdout()
    if lost is not None and code == ExitCode.DONE:
        say(f"dspine: standard output: {lost.strerror or lost}")
        code = ExitCode.FAILED
    return int(code)
