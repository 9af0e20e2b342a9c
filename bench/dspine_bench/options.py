"""Options that the workloads share."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

KEYWORD = inspect.Parameter.KEYWORD_ONLY

TargetOpt = Annotated[
    Path | None, typer.Option("-m", "--target", metavar="FILE", help="The target's GGUF.")
]
DrafterOpt = Annotated[
    list[Path] | None,
    typer.Option("-md", "--drafter", metavar="FILE", help="A drafter; may be repeated."),
]
SweepOpt = Annotated[
    str | None,
    typer.Option(metavar="n-draft=2,3,4", help="Depths. Default: the drafter's block size - 1."),
]
CacheOpt = Annotated[
    list[str] | None,
    typer.Option("--kv", metavar="TYPE", help="Cache type; may be repeated. Default: q8_0."),
]
TemperatureOpt = Annotated[
    list[float] | None,
    typer.Option("--temperature", metavar="T", min=0.0, help="May be repeated. Default: 0."),
]
UrlOpt = Annotated[
    str | None, typer.Option(metavar="URL", help="A llama-server that runs already.")
]
UrlBaselineOpt = Annotated[
    str | None, typer.Option(metavar="URL", help="The same without a drafter.")
]
ApiKeyOpt = Annotated[
    str | None, typer.Option(envvar="LLAMA_API_KEY", metavar="KEY", help="For --url.")
]
RepeatsOpt = Annotated[int, typer.Option(min=1, help="Repeats of every request.")]
WarmupOpt = Annotated[int, typer.Option(min=0, help="Requests to each server, dropped.")]
TokensOpt = Annotated[
    int | None, typer.Option("-n", "--max-tokens", min=2, metavar="N", help="Tokens generated.")
]
ContextOpt = Annotated[
    int | None, typer.Option("-c", "--ctx-size", min=1, metavar="N", help="Default: as needed.")
]
InterleaveOpt = Annotated[
    str | None,
    typer.Option(
        metavar="request|repeat",
        help="Servers side by side, or one at a time. Default: what the memory allows.",
    ),
]
ServerOpt = Annotated[
    Path | None, typer.Option("--server", metavar="FILE", help="Another llama-server.")
]
FlashOpt = Annotated[
    str | None,
    typer.Option(
        "-fa", "--flash-attn", metavar="on|off|auto", help="Of every server. Default: on."
    ),
]
ThreadsOpt = Annotated[
    int, typer.Option("-t", "--threads", min=0, metavar="N", help="0: the program's own choice.")
]
ExtraOpt = Annotated[
    list[str] | None,
    typer.Option("--flag", metavar="WORD", help="A word for every server's command; repeatable."),
]
ParallelOpt = Annotated[
    int, typer.Option("-np", "--parallel", min=1, help="Conversations at a time.")
]
OutputOpt = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Results and report.html go there.")
]
QuickOpt = Annotated[bool, typer.Option("--quick", help="Fewer prompts and shorter answers.")]
QuietOpt = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the result, not the table.")]


# parameter -> its option and its default, in the order of the help
SHARED: dict[str, tuple[Any, Any]] = {
    "target": (TargetOpt, None),
    "drafter": (DrafterOpt, None),
    "sweep": (SweepOpt, None),
    "kv": (CacheOpt, None),
    "temperature": (TemperatureOpt, None),
    "url": (UrlOpt, None),
    "url_baseline": (UrlBaselineOpt, None),
    "api_key": (ApiKeyOpt, None),
    "repeats": (RepeatsOpt, 5),
    "warmup": (WarmupOpt, 1),
    "max_tokens": (TokensOpt, None),
    "ctx_size": (ContextOpt, None),
    "interleave": (InterleaveOpt, None),
    "server": (ServerOpt, None),
    "flash_attn": (FlashOpt, None),
    "flag": (ExtraOpt, None),
    "threads": (ThreadsOpt, 0),
    "output": (OutputOpt, Path("bench-out")),
    "quick": (QuickOpt, False),
    "quiet": (QuietOpt, False),
}
# field of request.Flags -> parameter of another name; lists become tuples
RENAMED = {
    "drafters": "drafter",
    "caches": "kv",
    "temperatures": "temperature",
    "extra": "flag",
    "n_ctx": "ctx_size",
}


def workload(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that the workloads share, but those of these names.

    The command gets them as `request.Flags`, its first argument, and its own options by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        _, *own = inspect.signature(command).parameters.values()
        shared = [
            inspect.Parameter(name, KEYWORD, default=default, annotation=option)
            for name, (option, default) in SHARED.items()
            if name not in without
        ]
        mine = [p.replace(kind=KEYWORD, annotation=hints[p.name]) for p in own]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            own_values = {p.name: given.pop(p.name) for p in mine}
            command(flags_of(given), **own_values)

        del run.__wrapped__  # its signature is not the command's
        run.__signature__ = inspect.Signature([*mine, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*mine, *shared)}
        return run

    return decorate


def flags_of(given: Mapping[str, Any]) -> Any:
    """`request.Flags` of the values that a command received.

    What a repeatable option has twice is measured once, but for words of commands (`--flag`) and
    for drafters, of which two of one name are an error. BadParameter for a value that none may be.
    """
    from dspine_bench.request import Flags

    values = {name: value for name, value in given.items() if name not in RENAMED.values()}
    for field, option in RENAMED.items():
        if given.get(option):
            value = given[option]
            values[field] = tuple(value) if isinstance(value, list) else value
    for field in ("caches", "temperatures"):
        if field in values:
            values[field] = tuple(dict.fromkeys(values[field]))
    for heat in values.get("temperatures", ()):
        if not math.isfinite(heat):  # "inf" and "nan" pass as 0 or more
            raise typer.BadParameter(
                f"{heat:g}: expected a finite number", param_hint="--temperature"
            )
    interleave = values.get("interleave")
    if interleave not in (None, "request", "repeat"):
        raise typer.BadParameter(
            f"{interleave!r} is not request or repeat", param_hint="--interleave"
        )
    if values["flash_attn"] not in (None, "on", "off", "auto"):
        raise typer.BadParameter(
            f"{values['flash_attn']!r} is not on, off or auto", param_hint="--flash-attn"
        )
    check_folder(values["output"])
    return Flags(**values)


def check_folder(folder: Path) -> None:
    """BenchError where results could not be written, before anything is measured."""
    from dspine_bench.errors import BenchError

    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise BenchError(f"--output {folder}: {place} is no folder")
    if not os.access(place, os.W_OK):
        raise BenchError(f"--output {folder}: {place} cannot be written")
