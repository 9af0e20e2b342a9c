"""`draft` from its flags to its report."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from dspine_bench.draft import QUICK_WIDTHS, Choices, run
from dspine_bench.errors import BenchError
from dspine_bench.peers import BLOCK, SHAPES, TYPES, Extras
from dspine_bench.progress import shown
from dspine_bench.provenance import build_of_library, hardware, provenance
from dspine_bench.schema import DraftReport

DEFAULT_SHAPES, QUICK_SHAPES = ("small", "mid"), ("small",)
CALLS, QUICK_CALLS = 5, 3


def _choices(
    shapes: tuple[str, ...],
    kind: str,
    repeats: int,
    calls: int,
    context: int,
    threads: int,
    *,
    quick: bool,
) -> Choices:
    for shape in shapes:
        if shape not in SHAPES:
            raise BenchError(f"--shape {shape}: expected one of {', '.join(SHAPES)}")
    if kind not in TYPES:
        raise BenchError(f"--type {kind}: expected one of {', '.join(TYPES)}")
    return Choices(
        shapes=shapes or (QUICK_SHAPES if quick else DEFAULT_SHAPES),
        type=kind,
        repeats=repeats,
        calls=calls,
        context=context,
        widths=QUICK_WIDTHS if quick else tuple(range(1, BLOCK + 1)),
        threads=threads,
        extras=Extras(),
    )


def make(
    shapes: tuple[str, ...] = (),
    kind: str = "q8_0",
    *,
    repeats: int = 5,
    calls: int | None = None,
    context: int = 256,
    threads: int = 0,
    folder: Path | None = None,
    quick: bool = False,
    quiet: bool = False,
) -> DraftReport:
    """Measure and report; the models are made, and removed again, in a folder in `folder`.

    `calls`: 5 of each kind in each repeat where it is not given, 3 with `quick`.
    """
    calls = calls or (QUICK_CALLS if quick else CALLS)
    choices = _choices(shapes, kind, repeats, calls, context, threads, quick=quick)
    machine = hardware()
    with (
        tempfile.TemporaryDirectory(prefix="dspine-draft-", dir=folder) as place,
        shown("draft", quiet=quiet) as progress,
    ):
        found = run(choices, Path(place), progress)
    return DraftReport(
        schema_version=1,
        provenance=provenance(build_of_library()),
        hardware=machine,
        workload="draft",
        config={
            "type": choices.type,
            "repeats": choices.repeats,
            "calls": choices.calls,
            "context": choices.context,
            "threads": choices.n_threads,
            "quick": quick,
        },
        shapes={name: asdict(SHAPES[name]) for name in choices.shapes},
        cases=found.cases,
        samples=found.samples,
        summary=found.summary,
    )
