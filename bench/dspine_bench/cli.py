"""The entry point: signals, one error handler, exit codes.

Imports little: signals must be handled before the slow imports.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from dspine._errors import DspineError
from dspine_convert.errors import ConvertError, ExitCode, Interrupted
from dspine_convert.signals import signals_held, signals_raise
from dspine_convert.streams import prepare_streams, say, settle_stdout


def _reader_left(error: BaseException) -> bool:
    """Whether `| head` and the like closed standard output; the parser ends with SystemExit."""
    return isinstance(error, BrokenPipeError | SystemExit)


def _outcome(error: BaseException) -> tuple[int, str]:
    """Exit code and message of whatever ended the run."""
    parser = sys.modules.get("dspine_convert.usage")
    usage = parser.usage_text(error) if parser is not None else None
    if usage is not None:
        return ExitCode.USAGE, f"{usage} (see --help)"
    if isinstance(error, DspineError | ConvertError):
        return ExitCode.FAILED, str(error)
    if isinstance(error, KeyboardInterrupt | Interrupted) or type(error).__name__ == "Abort":
        return ExitCode.INTERRUPTED, str(error) or "interrupted"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return ExitCode.FAILED, f"{where}{error.strerror or error}"
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ExitCode.BUG, f"internal error: {text}\nthis is a bug; --debug shows where"


def _run(arguments: Sequence[str]) -> int:
    with signals_held() as arrived:
        from dspine_bench.command import execute
    if arrived:
        raise Interrupted
    return execute([word for word in arguments if word != "--debug"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        with signals_raise():
            code = _run(arguments)
    except BaseException as error:
        with signals_held():
            code, text = (ExitCode.FAILED, "") if _reader_left(error) else _outcome(error)
            if "--debug" in arguments:
                say("".join(traceback.format_exception(error)))
            if text:
                say(f"dspine-bench: {text}")
    lost = settle_stdout()
    if lost is not None and code == ExitCode.DONE:
        if not _reader_left(lost):
            say(f"dspine-bench: standard output: {lost.strerror or lost}")
        code = ExitCode.FAILED
    return int(code)
