"""From the flags of the command line to a report: what `tasks`, `depth` and `replay` share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dspine._flags import SPELLINGS
from dspine._flags import settings_of as flag_settings
from dspine_convert.errors import Interrupted
from dspine_convert.signals import signals_held
from dspine_convert.streams import say

from dspine_bench.errors import BenchError
from dspine_bench.modes import ModeSpec, expand, parse_sweep, remote
from dspine_bench.progress import shown
from dspine_bench.prompts import Conversation
from dspine_bench.provenance import commit, hardware, pair_files, provenance
from dspine_bench.runner import (
    Interleave,
    Result,
    Runner,
    Settings,
    Workload,
    choose_interleave,
    described,
)
from dspine_bench.schema import (
    MIN_REPEATS,
    Config,
    Report,
    ServerReport,
    load,
    save,
)
from dspine_bench.summary import summarize
from dspine_bench.terminal import counted
from dspine_bench.urls import unlike

QUICK_TOKENS = {"tasks": 48, "depth": 32, "replay": 24}
TOKENS = {"tasks": 1024, "depth": 256, "replay": 256}
DEFAULT_CACHES = ("q8_0",)
DEPTHS, QUICK_DEPTHS = (0, 8192, 32768), (0, 512, 2048)
PROMPT_ROOM = 3072  # of the context beside what is generated
CELLS = 256  # a slot's context is a multiple of it
BYTES_PER_TOKEN = 2  # at least, of prompts in most languages
# llama-server's settings that the modes have: how to change them
INSTEAD = {
    "n_ctx": "-c",
    "n_parallel": "-np of replay",
    "n_draft": "--sweep n-draft=N",
    "flash_attn": "-fa",
    "type_k": "--kv",
    "type_v": "--kv",
}
WORKLOADS = ("tasks", "depth", "replay", "draft")  # in the order of the page


@dataclass(frozen=True)
class Flags:
    """What the user typed, for any of the three workloads; None is "the default".

    `keep_interrupted`: whole repeats of a run that is interrupted go to `output`.
    """

    target: Path | None = None
    drafters: tuple[Path, ...] = ()
    sweep: str | None = None
    caches: tuple[str, ...] | None = None
    temperatures: tuple[float, ...] = (0.0,)
    url: str | None = None
    url_baseline: str | None = None
    api_key: str | None = None
    repeats: int = MIN_REPEATS
    warmup: int = 1
    max_tokens: int | None = None
    n_ctx: int | None = None
    interleave: Interleave | None = None
    server: Path | None = None
    flash_attn: str | None = None
    extra: tuple[str, ...] = ()
    threads: int = 0
    output: Path = Path("bench-out")
    keep_interrupted: bool = True
    quick: bool = False
    quiet: bool = False


def modes_of(flags: Flags) -> list[ModeSpec]:
    """The modes; BenchError for flags that do not go together."""
    if (flags.url is None) != (flags.url_baseline is None):
        raise BenchError("--url and --url-baseline belong together: the second has no drafter")
    if flags.url is not None and flags.url_baseline is not None:
        if flags.target or flags.drafters or flags.sweep:
            raise BenchError("--url is a server that runs already: no --target, --drafter, --sweep")
        _refuse_with_url(flags)
        if flags.url.rstrip("/").lower() == flags.url_baseline.rstrip("/").lower():
            say("dspine-bench: --url and --url-baseline are the same server: nothing is compared")
        return remote(flags.url, flags.url_baseline, flags.temperatures)
    if flags.target is None or not flags.drafters:
        raise BenchError("give --target and --drafter, or --url and --url-baseline")
    for path in (flags.target, *flags.drafters):
        if not path.is_file():
            raise BenchError(f"{path}: no such file")
    from dspine._tune import block_size

    _check_extra(flags.extra)
    caches = flags.caches or DEFAULT_CACHES
    _check_caches(caches, flags.flash_attn)
    depths = parse_sweep(flags.sweep) if flags.sweep else ()
    own = {path: block - 1 for path in flags.drafters if (block := block_size(str(path))) > 1}
    for path, deepest in own.items():
        if depths and max(depths) > deepest:  # the server would cut it without a word
            raise BenchError(
                f"--sweep n-draft={max(depths)}: {path.name} drafts at most {deepest} tokens "
                "(its block size - 1)"
            )
    return expand(flags.drafters, depths, caches, flags.temperatures, own)


def _check_caches(caches: Sequence[str], flash_attn: str | None) -> None:
    """BenchError for quantized caches without flash attention, which llama.cpp does not have."""
    from dspine._launch import FLOAT_TYPES

    quantized = [cache for cache in caches if cache not in FLOAT_TYPES]
    if flash_attn == "off" and quantized:
        raise BenchError(
            f"--flash-attn off: the caches cannot be {', '.join(quantized)}, expected --kv with "
            f"one of {', '.join(FLOAT_TYPES)}"
        )


def _refuse_with_url(flags: Flags) -> None:
    """BenchError for what only a server that is started here would follow."""
    given = {
        "--threads": flags.threads,
        "--kv": flags.caches,
        "--flash-attn": flags.flash_attn,
        "--ctx-size": flags.n_ctx,
        "--flag": flags.extra,
        "--server": flags.server,
    }
    if found := [name for name, value in given.items() if value]:
        raise BenchError(f"--url is a server that runs already: no {', '.join(found)}")


def _check_extra(extra: tuple[str, ...]) -> None:
    """BenchError for a flag that every mode has a value of its own for."""
    for setting in flag_settings(extra):
        if instead := INSTEAD.get(setting):
            names = " or ".join(SPELLINGS[setting])
            raise BenchError(f"--flag {names}: the modes set it themselves; give {instead}")


def tokens_of(flags: Flags, workload: str) -> int:
    """Tokens to generate."""
    return flags.max_tokens or (QUICK_TOKENS if flags.quick else TOKENS)[workload]


def settings_of(
    flags: Flags, workload: str, modes: list[ModeSpec], *, parallel: int = 1, prompt: int = 0
) -> Settings:
    """The settings; `prompt` is the longest prompt where it is longer than usual."""
    tokens = tokens_of(flags, workload)
    slot = -(-(max(prompt, PROMPT_ROOM) + tokens) // CELLS) * CELLS
    interleave: Interleave = flags.interleave or choose_interleave(flags.target, modes)
    if workload == "replay" and flags.url is None:
        interleave = "repeat"  # a fresh server has an empty prompt cache
    if flags.repeats < MIN_REPEATS:
        say(
            f"dspine-bench: {counted(flags.repeats, 'repeat')}: too few to publish, "
            f"at least {MIN_REPEATS} are needed"
        )
    return Settings(
        repeats=flags.repeats,
        warmup=flags.warmup,
        max_tokens=tokens,
        n_ctx=flags.n_ctx or parallel * slot,
        parallel=parallel,
        quick=flags.quick,
        interleave=interleave,
        extra=(*(("-t", str(flags.threads)) if flags.threads else ()), *flags.extra),
        flash_attn=flags.flash_attn or "on",
        executable=flags.server,
        api_key=flags.api_key,
    )


def measure(
    flags: Flags, workload: Workload, modes: list[ModeSpec], settings: Settings
) -> ServerReport:
    """Run and make the report.

    An interrupted run leaves its whole repeats in WORKLOAD-interrupted.json, and what lay in the
    folder as it was; raises Interrupted, which names the file.
    """
    machine, models = hardware(), pair_files(flags.target, flags.drafters)
    state = commit(Path.cwd())  # what lies there now, whatever is changed while it runs

    def report(result: Result, repeats: int) -> ServerReport:
        named = described(modes, result)
        return ServerReport(
            schema_version=1,
            provenance=provenance(
                result.build, own=flags.url is None, program=flags.server, state=state
            ),
            hardware=machine,
            workload=workload.name,
            files=workload.files,
            models=models,
            config=_config(replace(settings, repeats=repeats), is_remote=flags.url is not None),
            modes=named,
            samples=result.samples,
            replays=result.replays,
            summary=summarize(named, result.samples, result.replays),
        )

    with shown(workload.name, quiet=flags.quiet) as progress:
        runner = Runner(flags.target, modes, settings, progress)
        try:
            result = runner.run(workload)
        except (KeyboardInterrupt, Interrupted) as error:
            if not flags.keep_interrupted or not runner.whole_repeats:
                raise
            path = flags.output / f"{workload.name}-interrupted.json"
            text = _keep(report, runner, path, settings.repeats)
            raise Interrupted(f"interrupted: {text}") from error
    made = report(result, settings.repeats)
    for line in unlike(made.modes):
        say(f"dspine-bench: {line}")
    return made


def _keep(
    report: Callable[[Result, int], ServerReport], runner: Runner, path: Path, repeats: int
) -> str:
    """Save the repeats that are whole; what to say of them."""
    whole = runner.whole_repeats
    with signals_held():
        try:
            save(report(runner.result.first(whole), whole), path)
        except OSError as error:
            return f"nothing is kept, {path}: {error.strerror or error}"
    return f"{whole} of {counted(repeats, 'repeat')} are in {path}"


def _config(settings: Settings, *, is_remote: bool) -> Config:
    return Config(
        repeats=settings.repeats,
        warmup=settings.warmup,
        quick=settings.quick,
        max_tokens=settings.max_tokens,
        n_ctx=None if is_remote else settings.n_ctx,
        parallel=settings.parallel,
        interleave=settings.interleave,
        extra=list(settings.extra),
    )


def same_text(report: Report) -> bool:
    """No text differs from plain decoding."""
    return not isinstance(report, ServerReport) or not any(r.differing for r in report.summary)


def deliver(reports: Iterable[Report], folder: Path) -> tuple[list[Report], list[Path]]:
    """Write each result as it comes, and the page of everything in the folder where it can be."""
    from dspine_bench import page as html

    found: list[Report] = []
    paths: list[Path] = []
    for report in reports:
        found.append(report)
        paths.append(folder / f"{report.workload}.json")
        save(report, paths[-1])
    try:
        paths.append(html.write(_all_in(folder, found), folder / "report.html"))
    except BenchError as error:  # no matplotlib: the results are what matters
        say(f"dspine-bench: no page: {error}")
    return found, paths


def _all_in(folder: Path, fresh: list[Report]) -> list[Report]:
    """The fresh results, and those of other workloads that lie in the folder already."""
    have = {report.workload for report in fresh}
    found = list(fresh)
    for path in sorted(folder.glob("*.json")):
        if path.stem in WORKLOADS and path.stem not in have:
            try:
                found.append(load(path))
            except BenchError as error:
                say(f"dspine-bench: not in the page: {error}")
    return sorted(found, key=lambda report: WORKLOADS.index(report.workload))


def run_tasks(flags: Flags, prompts: Path | None = None, thinking: str = "auto") -> Report:
    """`tasks`."""
    from dspine_bench.prompts import first_of_each, load_tasks
    from dspine_bench.workloads import Tasks

    modes = modes_of(flags)
    talks, file = load_tasks(prompts)
    if flags.quick and prompts is None:
        talks = first_of_each(talks)
    chosen = thinking if thinking != "auto" else ("off" if flags.quick else "both")
    optional = thinking == "auto"
    work = Tasks(talks, file, tokens_of(flags, "tasks"), chosen, optional=optional)
    settings = settings_of(flags, "tasks", modes, prompt=longest(talks))
    return measure(flags, work, modes, settings)


def run_depth(flags: Flags, depths: tuple[int, ...] = ()) -> Report:
    """`depth`; BenchError for a depth that the target was not trained for."""
    from dspine_bench.prompts import load_depth
    from dspine_bench.workloads import DEPTH_ROOM, Depth

    modes = modes_of(flags)
    chosen = depths or (QUICK_DEPTHS if flags.quick else DEPTHS)
    tokens = tokens_of(flags, "depth")
    trained = _trained_context(flags.target)
    if trained is not None:
        too_deep = [d for d in chosen if d + DEPTH_ROOM + tokens > trained]
        if depths and too_deep:
            raise BenchError(
                f"--depths {too_deep[0]}: the target was trained with a context of {trained}, "
                f"{DEPTH_ROOM + tokens} of them are needed beside it"
            )
        for depth in too_deep:
            say(f"dspine-bench: depth {depth} is left out: the target's context is {trained}")
        chosen = tuple(d for d in chosen if d not in too_deep)
        if not chosen:
            raise BenchError(
                f"-n {tokens}: no depth is left, the target was trained with a context of {trained}"
            )
    text, file = load_depth()
    work = Depth(text, file, chosen, tokens)
    settings = settings_of(flags, "depth", modes, prompt=max(chosen) + DEPTH_ROOM)
    return measure(flags, work, modes, settings)


def longest(talks: Sequence[Conversation]) -> int:
    """Tokens that the longest conversation may take, from its size; the servers count them."""
    parts = ([*talk.messages, *talk.tools] for talk in talks)
    sizes = (len(json.dumps(part, ensure_ascii=False).encode()) for part in parts)
    return max(sizes) // BYTES_PER_TOKEN


def _trained_context(target: Path | None) -> int | None:
    if target is None:
        return None
    from dspine._headers import open_header

    header = open_header(str(target))
    return header.integer(f"{header.architecture}.context_length", 0) or None


def run_replay(flags: Flags, conversations: Path | None = None, parallel: int = 8) -> Report:
    """`replay`."""
    from dspine_bench.prompts import load_replay
    from dspine_bench.workloads import ReplayAll

    modes = modes_of(flags)
    talks, file = load_replay(conversations)
    if flags.quick and conversations is None:
        talks = talks[: max(parallel // 2, 1)]
    if parallel > len(talks):
        say(
            f"dspine-bench: {len(talks)} at a time, not {parallel}: there are no more conversations"
        )
        parallel = len(talks)
    work = ReplayAll(talks, file, parallel, tokens_of(flags, "replay"))
    if flags.url is not None:
        say("dspine-bench: servers at a URL keep prompts from one repeat to the next")
    settings = settings_of(flags, "replay", modes, parallel=parallel, prompt=longest(talks))
    return measure(flags, work, modes, settings)
