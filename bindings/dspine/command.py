"""The commands and how they are called. cli imports this once signals are handled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from dspine_convert.usage import exit_code

from dspine import __version__
from dspine.cli import own_words
from dspine.commands.chat import chat
from dspine.commands.doctor import doctor
from dspine.commands.generate import generate
from dspine.commands.inspect import inspect
from dspine.commands.plan import plan
from dspine.commands.serve import METAVAR, serve
from dspine.commands.tune import tune

HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="dspine",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=False,
    context_settings=HELP,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dspine {__version__}")
        raise typer.Exit


@app.callback()
def dspine(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on failure.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Run a target with its DSpine drafter: plan the memory, serve, chat."""


for _command in (plan, inspect, serve, chat, generate, tune, doctor):
    _metavar = METAVAR if _command is serve else "[OPTIONS]"
    app.command(context_settings=HELP, options_metavar=_metavar)(_command)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words for the parser, and those after `--` that `serve` hands on untouched."""
    own = own_words(arguments)
    if next((word for word in own if not word.startswith("-")), None) != "serve":
        return list(arguments), []
    return own, list(arguments)[len(own) + 1 :]


def execute(arguments: Sequence[str]) -> int:
    """Parse and run one command line; returns its exit code, or raises what ended it early."""
    words, rest = _split(arguments)
    done = typer.main.get_command(app).main(
        words or ["--help"], prog_name="dspine", standalone_mode=False, obj=tuple(rest)
    )
    return exit_code(done)
