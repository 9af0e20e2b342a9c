"""`dspine chat`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dspine.commands import _options as o


def chat(
    target: o.TargetOpt,
    draft: o.DraftOpt = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.")] = "",
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Whether the target thinks, where its template can switch that.",
        ),
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
    verbose: o.VerboseOpt = False,
) -> None:
    """Talk to a target in the terminal, with its own chat template.

    Each line is a message; the answer grows on stdout, with its speed and its accepted length
    below it on a terminal. /stats shows counts, /clear starts anew, /exit ends; Ctrl-C ends an
    answer. Reads messages from a pipe as well.
    """
    from dspine._chat import Chat

    settings = o.settings_of(
        max_tokens=max_tokens,
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
        conversation = Chat(engine, settings, system=system, thinking=thinking)
        conversation.run(sys.stdin)
    # In a terminal the user has seen it and gone on.
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(1)
