"""`dspine tune`."""

from __future__ import annotations

import json as json_format
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from dspine_convert.errors import ExitCode
from dspine_convert.streams import say

from dspine.commands import _options as o

if TYPE_CHECKING:
    from dspine._tune import Point

BAR = 30  # characters of the best depth's bar
ENOUGH = 3  # starts of each server, below which a choice may be noise


_PromptsOpt = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Yours: one a line, or JSONL with messages. Default: four short ones."
    ),
]
_DepthsOpt = Annotated[
    str, typer.Option(metavar="N,N", help="Default: 2,3,4,7,15 and the deepest.")
]
_ContextOpt = Annotated[
    int, typer.Option("-c", "--ctx-size", metavar="N", min=256, help="Context.")
]
_FlagOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--flag",
        metavar="WORD",
        help="A word for llama-server; may be repeated. The choice is then not kept.",
    ),
]
_StoreOpt = Annotated[
    bool, typer.Option("--store/--no-store", help="Keep the choice for dspine serve.")
]


def _depths(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected 2,3,4", param_hint="'--depths'") from None


def tune(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="GGUF file, or OWNER/REPO[:FILE or QUANT].")
    ],
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Its drafter, likewise.")],
    prompts: _PromptsOpt = None,
    depths: _DepthsOpt = "",
    repeats: Annotated[int, typer.Option(min=1, help="Starts of each server.")] = 3,
    max_tokens: Annotated[int, typer.Option("-n", min=8, help="Tokens of an answer.")] = 192,
    ctx_size: _ContextOpt = 4096,
    cache_type: o.CacheOpt = "q8_0",
    flags: _FlagOpt = None,
    store: _StoreOpt = True,
    json: Annotated[bool, typer.Option("--json", help="Print the curve and the choice.")] = False,
) -> None:
    """Find the drafting depth at which this pair is fastest here, and keep it for `dspine serve`.

    Where no depth beats plain decoding it says so, and nothing is drafted from then on.
    """
    from dspine import _tune

    # A server with words of the user's is another one than serve starts: its depth is not kept.
    keep = store and not flags
    if keep:
        _check_writable()
    asked = _tune.read_prompts(prompts) if prompts else list(_tune.PROMPTS)
    files = _tune.local_files(target, draft)
    chosen_depths = _tune.depths_for(_tune.block_size(draft), _depths(depths))
    points = _tune.measure(
        *files,
        asked,
        chosen_depths,
        repeats=repeats,
        max_tokens=max_tokens,
        progress=lambda done, total, what: say(f"{done} of {total}: {what}") if what else None,
        n_ctx=ctx_size,
        cache_type=cache_type,
        extra=tuple(flags or ()),
    )
    best = _finish(points, files, cache_type, repeats, keep=keep, json=json)
    if store and flags:
        rest = f"--cache-type {cache_type} --n-draft {best} -- {shlex.join(flags)}"
        say(f"not kept, as it was measured with --flag; to use it: dspine serve {rest}")


def _finish(
    points: list[Point],
    files: tuple[Path, Path],
    cache: str,
    repeats: int,
    *,
    keep: bool,
    json: bool,
) -> int:
    """Choose, show, keep; returns the choice. What was measured is shown whatever happens then."""
    from dspine._tune import choose

    best = choose(points)
    if not json:
        _print_curve(points, best)
    stored, problem = None, None
    if best is None:
        problem = _other_text(points)
    elif keep:
        stored, problem = _store(files, best, points, cache)
    if json:
        _print_json(points, best, stored, problem)
    if best is None or problem is not None:
        say(f"dspine: {problem}")
        raise typer.Exit(ExitCode.FAILED)
    if stored is not None:
        _say_kept(stored, cache, repeats)
    return best


def _other_text(points: list[Point]) -> str:
    """Why there is no choice, with the number of prompts at each depth."""
    counts = ", ".join(f"{p.differing} at depth {p.depth}" for p in points if p.depth)
    return (
        f"no depth keeps plain decoding's text (prompts that differ: {counts}): "
        "none is chosen, nothing is kept"
    )


def _check_writable() -> None:
    """Raises InvalidError before minutes of measuring, where the choice could not be kept."""
    from dspine._errors import InvalidError
    from dspine._tuned import check_writable

    try:
        check_writable()
    except OSError as error:
        reason = f"{error.filename}: the choice cannot be kept there: {error.strerror}"
        raise InvalidError(f"{reason}; --no-store measures without keeping it") from None


def _store(
    files: tuple[Path, Path], depth: int, points: list[Point], cache: str
) -> tuple[Path | None, str | None]:
    """The file that holds the choice now, or why there is none."""
    from dspine._tuned import store_depth

    ratio = next(p.ratio for p in points if p.depth == depth)
    try:
        return store_depth(*files, depth, cache, ratio=round(ratio, 3)), None
    except OSError as error:
        return None, f"{error.filename}: the choice was not kept: {error.strerror}"


def _say_kept(stored: Path, cache: str, repeats: int) -> None:
    say(
        f"kept in {stored}: serve, chat, generate and Engine use it with {cache} caches; "
        "--n-draft N overrides"
    )
    if repeats < ENOUGH:
        say(f"from few starts ({repeats}): run it again with --repeats {ENOUGH} to be sure")


def _print_json(
    points: list[Point], best: int | None, stored: Path | None, problem: str | None
) -> None:
    from dspine.cli import SCHEMA_VERSION

    document = {
        "schema_version": SCHEMA_VERSION,
        "points": [asdict(point) for point in points],
        "n_draft": best,
        "stored": str(stored) if stored else None,
    }
    if problem is not None:
        document |= {"error": problem, "exit_code": int(ExitCode.FAILED)}
    typer.echo(json_format.dumps(document, indent=2))


def _print_curve(points: list[Point], best: int | None) -> None:
    top = max(point.ratio for point in points) or 1.0
    typer.echo("depth   tok/s   ratio (min-max)    mean len")
    for point in points:
        spread = f"{point.ratio:.2f} ({point.ratio_min:.2f}-{point.ratio_max:.2f})"
        bar = "#" * max(round(BAR * point.ratio / top), 1)
        mark = " <-" if point.depth == best else ""
        name = str(point.depth) if point.depth else "plain"
        length = f"{point.mean_accepted_length:8.2f}"
        typer.echo(f"{name:>5} {point.speed:7.1f}   {spread:<16}  {length}  {bar}{mark}")
        if point.differing:
            typer.echo(f"      other text at {point.differing} prompts: not chosen")
    if best:
        typer.echo(f"{best} tokens a round are fastest here.")
    elif best is not None:
        drafted = [point for point in points if point.depth]
        tried = ", ".join(str(point.depth) for point in drafted)
        if any(point.ratio > 1 and not point.differing for point in drafted):
            typer.echo(
                f"No depth beat plain decoding in every repeat; tried: {tried}. Nothing will be "
                "drafted; more --repeats would tell more."
            )
        else:
            typer.echo(f"Plain decoding is fastest here; tried: {tried}. Nothing will be drafted.")
