"""`dspine generate`."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dspine_convert.streams import say

from dspine.commands import _options as o

if TYPE_CHECKING:
    from dspine._engine import Engine, Result
    from dspine._sampling import Settings


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Default: standard input.")
    ] = None,
    target: o.TargetOpt = ...,  # type: ignore[assignment]  # the parser's word for "required"
    draft: o.DraftOpt = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt there.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before it; may be repeated.")
    ] = None,
    ctx_size: o.ContextOpt = 4096,
    n_draft: o.DepthOpt = None,
    cache_type: o.CacheOpt = "q8_0",
    threads: o.ThreadsOpt = None,
    gpu_layers: o.GpuLayersOpt = -1,
    max_tokens: o.LimitOpt = None,
    temperature: o.TemperatureOpt = None,
    top_k: o.TopKOpt = None,
    top_p: o.TopPOpt = None,
    min_p: o.MinPOpt = None,
    seed: o.SeedOpt = None,
    json: Annotated[bool, typer.Option("--json", help="Print text, ids and counts.")] = False,
    verbose: o.VerboseOpt = False,
) -> None:
    """Continue a prompt: the text on stdout as it grows, one line of counts on stderr."""
    text = _prompt(prompt, file)
    settings = o.settings_of(
        max_tokens=max_tokens,
        stop=stop,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    with o.open_engine(
        target,
        draft,
        ctx_size=ctx_size,
        n_draft=n_draft,
        cache_type=cache_type,
        threads=threads,
        gpu_layers=gpu_layers,
        verbose=verbose,
    ) as engine:
        _run(engine, text, settings, json=json)


def _run(engine: Engine, text: str, settings: Settings, *, json: bool) -> None:
    from dspine._chat import shown, status_line

    begin = time.monotonic()
    with engine.stream(text, **settings) as stream:
        if json:
            document = _document(stream.read())
            typer.echo(json_format.dumps(document, indent=2, ensure_ascii=False))
        else:
            with shown() as show:
                for piece in stream:
                    show(piece.text, status_line(stream, time.monotonic() - begin))
    full = ", the context is full" if stream.result.stop_reason == "context" else ""
    say(f"{stream.n_tokens} tokens{full}, {status_line(stream, time.monotonic() - begin)}")


def _document(result: Result) -> dict[str, Any]:
    from dspine.cli import SCHEMA_VERSION

    stats = result.stats
    return {
        "schema_version": SCHEMA_VERSION,
        "text": result.text,
        "tokens": result.tokens,
        "stop_reason": result.stop_reason,
        "stats": {
            **vars(stats),
            "mean_accepted_length": stats.mean_accepted_length,
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_by_position": stats.acceptance_by_position,
        },
    }


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from where it is; a usage error where there is none, or there are two."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt or a file, not both", param_hint="-f")
    if prompt is not None:
        return prompt
    if file is not None:
        return _decoded(file.read_bytes(), str(file))
    if sys.stdin.isatty():
        raise typer.BadParameter("no prompt, no -f FILE and nothing on standard input")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(data: bytes, source: str) -> str:
    from dspine._errors import InvalidError

    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidError(f"{source}: no UTF-8 text at byte {error.start}") from None
