"""Options that the workloads share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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
    str, typer.Option("-fa", "--flash-attn", metavar="on|off|auto", help="Of every server.")
]
ThreadsOpt = Annotated[
    int, typer.Option("-t", "--threads", min=0, metavar="N", help="0: the program's own choice.")
]
ExtraOpt = Annotated[
    list[str] | None,
    typer.Option("--flag", metavar="WORD", help="A word for every server's command; repeatable."),
]
OutputOpt = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Results and report.html go there.")
]
QuickOpt = Annotated[bool, typer.Option("--quick", help="Fewer prompts and shorter answers.")]
QuietOpt = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the result, not the table.")]


def flags_of(**given: Any) -> Any:
    """`request.Flags` of the values that a command received."""
    from dspine_bench.request import Flags

    lists = {"drafters": "drafter", "caches": "kv", "temperatures": "temperature", "extra": "flag"}
    values = {name: value for name, value in given.items() if name not in lists.values()}
    for name, option in lists.items():
        if given.get(option):
            values[name] = tuple(given[option])
    interleave = values.get("interleave")
    if interleave not in (None, "request", "repeat"):
        raise typer.BadParameter(
            f"{interleave!r} is not request or repeat", param_hint="--interleave"
        )
    return Flags(**values)
