"""`dspine serve`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dspine_convert.streams import say

from dspine._engines import Engine, EngineChoices, EngineLaunch, prepare_engine
from dspine.commands import _options as o

if TYPE_CHECKING:
    from dspine._launch import Launch
    from dspine._memory import Device

METAVAR = "[OPTIONS] [-- FLAGS OF THE SERVER]"

LLAMA_PORT = 8080  # llama-server's own default
LLAMA_TIMEOUT_S = 600.0
ENGINE_TIMEOUT_S = 1800.0  # they compile kernels and capture graphs

_ContextOpt = Annotated[
    int | None,
    typer.Option("-c", "--ctx-size", metavar="N", min=1, help="Context. Default: what fits."),
]
_ParallelOpt = Annotated[
    int | None, typer.Option("-np", "--parallel", metavar="N", min=1, help="Slots. Default: 1.")
]


def _cache_type(value: str | None) -> str | None:
    if value is None:
        return None
    from dspine._memory import CACHE_TYPES

    if value not in CACHE_TYPES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(CACHE_TYPES)}")
    return value


_CacheOpt = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", callback=_cache_type, help="Of K and V of both models. Default: q8_0."
    ),
]
_GpuOpt = Annotated[
    str | None,
    typer.Option(metavar="GPU", help="Plan for this one, as `dspine plan --gpu` names it."),
]
_HostOpt = Annotated[str, typer.Option(help="Address to listen on.")]
_PortOpt = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Default: 8080; sglang 30000, vllm 8000."),
]
_EngineOpt = Annotated[
    Engine,
    typer.Option(help="sglang and vllm take Hugging Face checkpoints and must be installed."),
]
_TimeoutOpt = Annotated[
    float | None,
    typer.Option(
        metavar="S", min=1, help="Seconds until it must be ready. Default: 600; engines 1800."
    ),
]
_LogOpt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The server's log goes there, not to stderr.")
]
_PrintOpt = Annotated[bool, typer.Option("--print", help="Print the command; start nothing.")]
_ForceOpt = Annotated[
    bool, typer.Option("--force", help="Start although it does not fit, or the pair does not.")
]


def serve(
    context: typer.Context,
    target: o.TargetOpt,
    draft: o.DraftOpt = None,
    ctx_size: _ContextOpt = None,
    n_draft: o.DepthOpt = None,
    parallel: _ParallelOpt = None,
    cache_type: _CacheOpt = None,
    gpu: _GpuOpt = None,
    host: _HostOpt = "127.0.0.1",
    port: _PortOpt = None,
    engine: _EngineOpt = Engine.LLAMA_CPP,
    timeout: _TimeoutOpt = None,
    log: _LogOpt = None,
    print_only: _PrintOpt = False,
    force: _ForceOpt = False,
) -> None:
    """Serve a target with its drafter: choose the flags, start the server, wait, pass signals on.

    The exact command is printed. What follows -- goes to the server untouched, and a flag there
    replaces the chosen one. Ends with the server's exit code.
    """
    extra: tuple[str, ...] = context.obj or ()
    launch: Launch | EngineLaunch
    if engine is Engine.LLAMA_CPP:
        name, limit = "llama-server", timeout or LLAMA_TIMEOUT_S
        values: dict[str, Any] = {"n_ctx": ctx_size, "n_draft": n_draft, "n_parallel": parallel}
        values |= {"cache_type": cache_type, "port": port or LLAMA_PORT, "device": _device(gpu)}
        launch = _llama((target, draft), values, host, extra, force, fetch=not print_only)
    else:
        name, limit = engine.value, timeout or ENGINE_TIMEOUT_S
        _refuse(cache_type=cache_type, gpu=gpu, force=force or None)
        asked = EngineChoices(ctx_size, n_draft, parallel, host, port, extra)
        launch = prepare_engine(engine, (target, draft), asked, must_exist=not print_only)
    for note in launch.notes:
        say(f"dspine: {note}")
    if print_only:
        typer.echo(shlex.join(launch.command))
        return
    say(shlex.join(launch.command))
    from dspine._supervise import run

    raise typer.Exit(run(name, launch.command, launch.address, timeout_s=limit, log=log))


def _device(gpu: str | None) -> Device | None:
    """The device to plan for; None: what is found."""
    if gpu is None:
        return None
    from dspine._devices import select

    return select(gpu)


def _llama(
    pair: tuple[str, str | None],
    values: dict[str, Any],
    host: str,
    extra: tuple[str, ...],
    force: bool,
    *,
    fetch: bool,
) -> Launch:
    """The command of llama-server; options that were not given have the defaults of Choices."""
    from dspine._flags import FlagError
    from dspine._launch import Choices, prepare
    from dspine._programs import program

    given = {name: value for name, value in values.items() if value is not None}
    choices = Choices(host=host, extra=extra, force=force, **given)
    try:
        return prepare(program("llama-server"), *pair, choices, fetch=fetch)
    except FlagError as error:
        raise typer.BadParameter(str(error), param_hint="'--'") from None


def _refuse(**given: object) -> None:
    """Options that only llama-server has."""
    for name, value in given.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise typer.BadParameter("it is for llama-server only", param_hint=f"'{flag}'")
