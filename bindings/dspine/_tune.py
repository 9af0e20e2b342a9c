"""Finds the depth at which a pair is fastest on this machine, with the user's own prompts.

One server at a time, so that whatever can be served can be tuned: every repeat starts plain
decoding and each depth once, in another order. The depth with the best median ratio to plain
decoding wins; where none is faster in every repeat, plain decoding does: a drafter must never make
a machine slower.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine._client import Completion
from dspine._errors import InvalidError
from dspine._models import check_pair, open_model
from dspine._server import Server
from dspine._terms import mean_accepted_length

PLAIN = 0  # the depth of decoding without the drafter
USUAL_DEPTHS = (2, 3, 4, 7, 15)
WARMUP_TOKENS = 8
# What a depth must gain in the median to be chosen, beside being faster in every repeat.
LEAST_GAIN = 0.01
# Among depths this close to the best, the shallowest: it needs less memory.
ALIKE = 0.01

Progress = Callable[[int, int, str], None]  # done, of how much, what


@dataclass(frozen=True)
class Prompt:
    """Messages and tools as in OpenAI's chat API."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


def _user(text: str) -> Prompt:
    return Prompt([{"role": "user", "content": text.strip()}])


# For whoever has no prompts at hand: prose is drafted worst, code and JSON best.
PROMPTS: tuple[Prompt, ...] = tuple(
    _user(text)
    for text in (
        "Explain to a friend how tides come about, and why there are two a day.",
        "Write a Python function that returns the prime factors of a number, with a docstring "
        "and three asserts.",
        "Return a JSON array of five fictional books with title, author, year and pages. "
        "Return the JSON alone.",
        "Write the first paragraph of a story that begins in an empty railway station.",
    )
)


@dataclass(frozen=True)
class Point:
    """A depth and what it brought.

    Attributes:
        depth: tokens drafted a round; 0 is plain decoding.
        speed: generated tokens a second, median of the repeats.
        ratio: speed over plain decoding in the same repeat: median, smallest, largest.
        mean_accepted_length: tokens a round.
        differing: prompts whose greedy text is not that of plain decoding.
    """

    depth: int
    speed: float
    ratio: float
    ratio_min: float
    ratio_max: float
    mean_accepted_length: float
    differing: int


@dataclass(frozen=True)
class _Run:
    """All prompts at one depth in one repeat."""

    tokens: int
    milliseconds: float
    rounds: int
    accepted: int
    texts: tuple[tuple[int, ...], ...]

    @property
    def speed(self) -> float:
        return 1000 * self.tokens / self.milliseconds if self.milliseconds else 0.0


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: JSONL with `messages` (and `tools`) or `prompt`, otherwise one a line.

    Raises InvalidError that names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path}: no UTF-8 text at byte {error.start}") from None
    # splitlines() would cut at U+2028 too, which may stand in a prompt; "\r" at the end is dropped
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidError(f"{path}: there is no prompt in it")
    first = lines[0][1].lstrip()
    if first.startswith("["):
        raise InvalidError(f"{path}: a JSON array, expected JSON lines: an object a line")
    is_json = first.startswith("{")
    return [_prompt(line, f"{path}:{n}") if is_json else _user(line) for n, line in lines]


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidError(f"{where}: no JSON: {error}") from None
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        return _user(entry["prompt"])
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InvalidError(f"{where}: expected an object with `messages` or `prompt`")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise InvalidError(f"{where}: a message must be an object with a role")
    tools = entry.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidError(f"{where}: tools must be a list of objects")
    return Prompt(messages, tools)


def depths_for(block_size: int, wanted: Sequence[int] = ()) -> list[int]:
    """The depths to try, ascending; InvalidError for one that the drafter does not have."""
    deepest = block_size - 1
    for depth in wanted:
        if not 1 <= depth <= deepest:
            raise InvalidError(f"depth {depth}: the drafter's are 1 to {deepest}")
    if wanted:
        return sorted(set(wanted))
    return sorted({depth for depth in USUAL_DEPTHS if depth < deepest} | {deepest})


def block_size(draft: str) -> int:
    """Block size of a drafter's file."""
    header = open_model(draft, "DRAFT").header
    return header.integer("dflash.block_size", 0) if header is not None else 0


def local_files(target: str, draft: str) -> tuple[Path, Path]:
    """Both files, downloaded where they lie on a hub; HeaderError where they do not fit."""
    found, drafter = open_model(target, "TARGET"), open_model(draft, "DRAFT")
    check_pair(found, drafter)
    return found.path(fetch=True), drafter.path(fetch=True)


def _ask(server: Server, prompt: Prompt, max_tokens: int) -> Completion:
    body: dict[str, Any] = {"messages": [dict(message) for message in prompt.messages]}
    if prompt.tools:
        body["tools"] = [dict(tool) for tool in prompt.tools]
    text = server.post("/apply-template", body)["prompt"]
    return server.complete(text, max_tokens, cache_prompt=False)


def _run(server: Server, prompts: Sequence[Prompt], max_tokens: int) -> _Run:
    _ask(server, prompts[0], WARMUP_TOKENS)
    answers = [_ask(server, prompt, max_tokens) for prompt in prompts]
    return _Run(
        tokens=sum(a.generated for a in answers),
        milliseconds=sum(a.generated_ms for a in answers),
        rounds=sum(a.rounds for a in answers),
        accepted=sum(a.accepted for a in answers),
        texts=tuple(tuple(a.tokens) for a in answers),
    )


def measure(
    target: Path,
    draft: Path,
    prompts: Sequence[Prompt],
    depths: Sequence[int],
    *,
    repeats: int,
    max_tokens: int,
    progress: Progress,
    **settings: Any,
) -> list[Point]:
    """Plain decoding and every depth, `repeats` times each; the points, plain decoding first.

    Args:
        settings: arguments of `Server` that all have in common, for instance n_ctx.
    """
    runs: dict[int, list[_Run]] = {depth: [] for depth in (PLAIN, *depths)}
    total = repeats * len(runs)
    done = 0
    for repeat in range(repeats):
        order = list(runs)
        at = repeat % len(order)
        for depth in [*order[at:], *order[:at]]:
            progress(done, total, f"depth {depth}" if depth else "plain decoding")
            pair = (target, None) if depth == PLAIN else (target, draft)
            with Server(*pair, n_draft=depth or None, **settings) as server:
                runs[depth].append(_run(server, prompts, max_tokens))
            done += 1
    progress(done, total, "")
    return [_point(depth, found, runs[PLAIN]) for depth, found in runs.items()]


def _point(depth: int, runs: Sequence[_Run], plain: Sequence[_Run]) -> Point:
    ratios = [mine.speed / base.speed for mine, base in zip(runs, plain, strict=True) if base.speed]
    rounds = sum(run.rounds for run in runs)
    # other text in one repeat is enough; where plain decoding itself varies, nothing can be said
    differing = sum(
        not {run.texts[i] for run in runs} <= {base.texts[i] for base in plain}
        for i in range(len(plain[0].texts))
    )
    return Point(
        depth=depth,
        speed=statistics.median(run.speed for run in runs),
        ratio=statistics.median(ratios) if ratios else 0.0,
        ratio_min=min(ratios, default=0.0),
        ratio_max=max(ratios, default=0.0),
        mean_accepted_length=mean_accepted_length(sum(r.accepted for r in runs), rounds),
        differing=differing,
    )


def choose(points: Sequence[Point]) -> int | None:
    """The depth to use: the best ratio of those with plain decoding's text, else 0.

    None where depths are faster but not one keeps the text: that says nothing of plain decoding.
    """
    drafted = [p for p in points if p.depth != PLAIN]
    faster = [p for p in drafted if p.ratio >= 1 + LEAST_GAIN and p.ratio_min > 1]
    if faster and all(p.differing for p in drafted):
        return None
    faster = [p for p in faster if not p.differing]
    if not faster:
        return PLAIN
    best = max(p.ratio for p in faster)
    return min(p.depth for p in faster if p.ratio >= best * (1 - ALIKE))
