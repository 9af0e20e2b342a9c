"""The options and what they call. Imports everything; cli imports this once signals are handled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dspine_convert import __version__, report
from dspine_convert.convert import Options, Result, run
from dspine_convert.errors import ConvertError, Interrupted
from dspine_convert.plan import OutputType, Plan
from dspine_convert.streams import say
from dspine_convert.usage import exit_code

app = typer.Typer(
    name="dspine-convert",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspine-convert {__version__}")
        raise typer.Exit


def _say_notes(plan: Plan) -> None:
    for note in (*plan.notes, *(n for f in plan.files for n in f.notes)):
        say(f"note: {note}")


def _announce(plan: Plan, *, quiet: bool, verbose: bool) -> None:
    """Say on stderr what is about to be written."""
    if quiet:
        return
    for file in plan.files:
        say(report.summary_line(file))
    _say_notes(plan)
    for name, reason in plan.dropped:
        say(f"dropped {name}: {reason}")
    if verbose:
        say(report.as_text(plan))


def _print_result(result: Result, options: Options, *, json: bool, quiet: bool) -> None:
    if json:
        text = report.as_json(
            result.plan, options.directory, plan_only=options.dry_run, reports=result.reports
        )
        typer.echo(text)
        return
    if options.dry_run:
        if not quiet:
            _say_notes(result.plan)
        typer.echo(report.as_text(result.plan))
        return
    for line in report.verify_lines(result.reports):
        say(line)
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
    typer.Option(
        "-t",
        "--type",
        case_sensitive=False,
        help="File type; may be given several times. Default: bf16.",
    ),
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
_FoldOpt = Annotated[
    bool,
    typer.Option(
        "--fold",
        help="Store what two matrices make of each token's code, in place of the codes: less work "
        "per draft, the same size where the transfer rank is twice the message size.",
    ),
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


def _check_given(given: Options) -> None:
    """Refuse options that say nothing, or that cannot apply to what they stand beside."""
    for hint, value in (("SRC", given.source), ("--target", given.target), ("--name", given.name)):
        if value is not None and not value.strip():
            raise typer.BadParameter("it is empty", param_hint=f"'{hint}'")
    for hint, value, place in (
        ("--revision", given.revision, given.source),
        ("--target-revision", given.target_revision, given.target),
    ):
        if value is not None and os.path.lexists(place):
            raise typer.BadParameter(
                f"{place} is a local path; a revision is of a hub repository",
                param_hint=f"'{hint}'",
            )


@contextmanager
def _named_stdout() -> Iterator[None]:
    """An error of the system without a file name is one of standard output."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise


def _fail_after_writing(error: BaseException, written: list[Path]) -> NoReturn:
    """The files are there: no message may say that nothing was left behind."""
    there = f"complete and in place: {', '.join(map(str, written))}"
    if isinstance(error, OSError):
        where = error.filename or "at the end"
        raise ConvertError(f"{where}: {error.strerror or error}; {there}") from error
    raise Interrupted(f"interrupted; {there}") from error


def _run(options: Options, *, json: bool, verbose: bool) -> None:
    """Convert and show the result."""
    _check_given(options)
    quiet, written = options.quiet, list[Path]()
    try:
        result = run(options, lambda plan: _announce(plan, quiet=quiet, verbose=verbose), written)
        with _named_stdout():
            _print_result(result, options, json=json, quiet=quiet)
    except (OSError, Interrupted, KeyboardInterrupt) as error:
        if not written:
            raise
        _fail_after_writing(error, written)


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
    fold: _FoldOpt = False,
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
        fold=fold,
        verify=verify,
        dry_run=dry_run,
        quiet=quiet,
    )
    _run(options, json=json, verbose=verbose)


def execute(arguments: Sequence[str]) -> None:
    """Parse and run one command line; raises whatever ends it early."""
    command = typer.main.get_command(app)
    done = command.main(
        list(arguments) or ["--help"], prog_name="dspine-convert", standalone_mode=False
    )
    exit_code(done)  # an interrupt is one of the codes
