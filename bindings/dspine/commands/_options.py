"""Options that `dspine chat` and `dspine generate` share, and the engine that they open."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from dspine_convert.streams import say

if TYPE_CHECKING:
    from dspine._engine import Engine
    from dspine._sampling import Settings

TargetOpt = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        metavar="TARGET",
        help="The target: a GGUF file, or OWNER/REPO[:FILE or QUANT] on the hub.",
    ),
]
DraftOpt = Annotated[
    str | None,
    typer.Option("-md", "--model-draft", metavar="DRAFT", help="Its drafter, likewise."),
]
ContextOpt = Annotated[
    int, typer.Option("-c", "--ctx-size", metavar="N", min=0, help="Context; 0: as trained.")
]
DepthOpt = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens drafted a round. Default: as tuned for this pair, else block size - 1.",
    ),
]
CacheOpt = Annotated[str, typer.Option(metavar="TYPE", help="Type of all K and V caches.")]
ThreadsOpt = Annotated[
    int | None, typer.Option("-t", "--threads", metavar="N", min=1, help="CPU threads.")
]
GpuLayersOpt = Annotated[
    int, typer.Option("-ngl", "--gpu-layers", metavar="N", min=-1, help="-1: all that fit.")
]
LimitOpt = Annotated[
    int | None,
    typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Default: until the end."),
]
TemperatureOpt = Annotated[
    float | None,
    typer.Option("--temp", metavar="T", min=0.0, help="0 is greedy. Default: the model's."),
]
TopKOpt = Annotated[int | None, typer.Option(metavar="K", min=0, help="0 is off.")]
TopPOpt = Annotated[float | None, typer.Option(metavar="P", min=0.0, max=1.0, help="1 is off.")]
MinPOpt = Annotated[float | None, typer.Option(metavar="P", min=0.0, max=1.0, help="0 is off.")]
SeedOpt = Annotated[
    int | None,
    typer.Option("-s", "--seed", metavar="N", min=-1, max=2**32 - 1, help="-1 is a new one."),
]
VerboseOpt = Annotated[bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log.")]


def open_engine(
    target: str,
    draft: str | None,
    *,
    ctx_size: int,
    n_draft: int | None,
    cache_type: str,
    threads: int | None,
    gpu_layers: int,
    verbose: bool,
) -> Engine:
    """Find the files, refuse a pair that does not belong together, and load it."""
    from dspine._engine import Engine
    from dspine._models import check_pair, open_model
    from dspine._pair import set_log_level
    from dspine._sampling import FixedDepth

    found_target = open_model(target, "-m")
    found_draft = None if draft is None else open_model(draft, "-md")
    check_pair(found_target, found_draft)
    if verbose:
        set_log_level("info")
    draft_path: Path | None = None if found_draft is None else found_draft.path(fetch=True)
    if sys.stderr.isatty():
        say("loading ...")
    engine = Engine(
        found_target.path(fetch=True),
        draft_path,
        n_ctx=ctx_size,
        n_draft="auto" if n_draft is None else n_draft,
        type_k=cache_type,
        type_v=cache_type,
        draft_type_k=cache_type,
        draft_type_v=cache_type,
        n_gpu_layers=gpu_layers,
        n_gpu_layers_draft=gpu_layers,
        threads=threads,
    )
    if draft is not None and n_draft is None and engine.policy == FixedDepth(0):
        say("not drafting: dspine tune found plain decoding faster; --n-draft N drafts anyway")
    if ctx_size and engine.info.n_ctx > ctx_size:
        say(f"a context of {engine.info.n_ctx}, not {ctx_size}: llama.cpp rounds up")
    return engine


def settings_of(**given: Any) -> Settings:
    """The settings that were given."""
    return cast("Settings", {k: v for k, v in given.items() if v is not None})
