"""The command line: options, one error handler, exit codes."""

from __future__ import annotations

import errno
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from dspine_convert import __version__, report
from dspine_convert.convert import Options, Result, run
from dspine_convert.errors import ConvertError, ExitCode, Interrupted
from dspine_convert.plan import OutputType, Plan

# The base class of everything the option parser raises for a wrong command line.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="dspine-convert",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=False,
)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspine-convert {__version__}")
        raise typer.Exit


def _announce(plan: Plan, *, quiet: bool, verbose: bool) -> None:
    """Say on stderr what is about to be written."""
    if quiet:
        return
    for file in plan.files:
        _say(report.summary_line(file))
    for note in (*plan.notes, *(n for f in plan.files for n in f.notes)):
        _say(f"note: {note}")
    for name, reason in plan.dropped:
        _say(f"dropped {name}: {reason}")
    if verbose:
        _say(report.as_text(plan))


def _print_result(result: Result, options: Options, *, json: bool, quiet: bool) -> None:
    if json:
        text = report.as_json(
            result.plan, options.directory, plan_only=options.dry_run, reports=result.reports
        )
        typer.echo(text)
        return
    if options.dry_run:
        for note in (*result.plan.notes, *(n for f in result.plan.files for n in f.notes)):
            _say(f"note: {note}")
        typer.echo(report.as_text(result.plan))
        return
    if not quiet:
        for line in report.verify_lines(result.reports):
            _say(line)
    for path in result.paths:
        typer.echo(str(path))


# The options, one by one; the types carry their help.
_SourceOpt = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Checkpoint: a directory, a safetensors file, or a hub repository."
    ),
]
_TargetOpt = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="The model to draft for: its GGUF, its Hugging Face directory, or "
        "repo_id:file.gguf on the hub, of which only the header is read.",
    ),
]
_TypesOpt = Annotated[
    list[OutputType] | None,
    typer.Option("-t", "--type", help="File type; may be given several times. Default: bf16."),
]
_DirectoryOpt = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Output directory.")
]
_CodesOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The codes file, where it is apart from the weights."),
]
_ConfigOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The config, if not beside the weights.")
]
_TensorMapOpt = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSON object: name in the file to published name."),
]
_NameOpt = Annotated[
    str | None, typer.Option(help="Name of the drafter, and of the files. Default: SRC's.")
]
_RevisionOpt = Annotated[str | None, typer.Option(help="Revision of SRC on the hub.")]
_TargetRevisionOpt = Annotated[str | None, typer.Option(help="Revision of TARGET on the hub.")]
_DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan from headers alone; write nothing.")
]
_VerifyOpt = Annotated[
    bool, typer.Option("--verify", help="Read the files back and report the worst errors.")
]
_ForceOpt = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
_JsonOpt = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_ThreadsOpt = Annotated[
    int | None, typer.Option(min=1, max=1024, help="Worker threads. Default: all cores.")
]
_QuietOpt = Annotated[bool, typer.Option("-q", "--quiet", help="Errors and results only.")]
_VerboseOpt = Annotated[bool, typer.Option("-v", "--verbose", help="Print the plan too.")]
_DebugOpt = Annotated[bool, typer.Option("--debug", help="Show a traceback on failure.")]
_VersionOpt = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
]


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def convert(
    source: _SourceOpt,
    target: _TargetOpt,
    types: _TypesOpt = None,
    directory: _DirectoryOpt = Path(),
    codes: _CodesOpt = None,
    config: _ConfigOpt = None,
    tensor_map: _TensorMapOpt = None,
    name: _NameOpt = None,
    revision: _RevisionOpt = None,
    target_revision: _TargetRevisionOpt = None,
    dry_run: _DryRunOpt = False,
    verify: _VerifyOpt = False,
    force: _ForceOpt = False,
    json: _JsonOpt = False,
    threads: _ThreadsOpt = None,
    quiet: _QuietOpt = False,
    verbose: _VerboseOpt = False,
    debug: _DebugOpt = False,
    version: _VersionOpt = False,
) -> None:
    """Convert a DSpine checkpoint to GGUF, next to the target it drafts for."""
    options = Options(
        source=source,
        target=target,
        types=tuple(dict.fromkeys(types or [OutputType.BF16])),
        directory=directory,
        codes=codes,
        config=config,
        tensor_map=tensor_map,
        name=name,
        revision=revision,
        target_revision=target_revision,
        threads=threads,
        force=force,
        verify=verify,
        dry_run=dry_run,
        quiet=quiet,
    )
    result = run(options, lambda plan: _announce(plan, quiet=quiet, verbose=verbose))
    _print_result(result, options, json=json, quiet=quiet)


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


@contextmanager
def _termination_raises() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted, unless the parent asked for them to be ignored."""
    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, _on_terminate)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{where}disk full ({error.strerror}); nothing was left behind"
    return f"{where}{error.strerror or error}"


def _outcome(error: BaseException) -> tuple[ExitCode, str]:
    """Exit code and message of whatever ended the run."""
    if isinstance(error, ConvertError):
        return ExitCode.FAILED, str(error)
    if isinstance(error, _UsageError):
        return ExitCode.USAGE, f"{error} (see --help)"
    if isinstance(error, KeyboardInterrupt | Interrupted | typer.Abort):
        return ExitCode.INTERRUPTED, "interrupted; nothing was left behind"
    if isinstance(error, OSError):
        return ExitCode.FAILED, _os_error_text(error)
    if isinstance(error, MemoryError):
        return ExitCode.FAILED, "out of memory"
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ExitCode.BUG, f"internal error: {text}\nthis is a bug; --debug shows where"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = typer.main.get_command(app)
    try:
        with _termination_raises():
            done = command.main(
                arguments or ["--help"], prog_name="dspine-convert", standalone_mode=False
            )
        # The parser turns some exceptions into a returned code, an interrupt among them.
        if done == ExitCode.INTERRUPTED:
            raise Interrupted
    except BaseException as error:
        code, text = _outcome(error)
        if "--debug" in arguments:
            _say(traceback.format_exc())
        _say(f"dspine-convert: {text}")
        return int(code)
    return int(ExitCode.DONE)
