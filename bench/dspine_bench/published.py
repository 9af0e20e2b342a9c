"""`dspine-bench table`: figures that others published, beside what was measured here.

The published ones are data of this module, with where they come from; nothing computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from dspine_bench.schema import ALL, DraftReport, Report, Row, ServerReport

CARD = "RTX 3090 24 GB, llama.cpp fork, 27B target and drafter Q4_K_M, KV q8_0, n 15, greedy"
SERVER = "data-centre card, the paper's server"
REPLAY = "SGLang, H-class server, 8 parallel agent replays, SWE-bench Pro xhigh"
QWEN = "Qwen3-8B, block 16, greedy, mean of 7 sets"


@dataclass(frozen=True)
class Figure:
    """A published figure, and where the like of it is found in our results.

    `find` takes the results and returns our figure as text, or None.
    """

    what: str
    published: str
    source: str
    find: Callable[[Sequence[Report]], str | None]


def _row(reports: Sequence[Report], workload: str, category: str) -> Row | None:
    """The best drafting row of a category over the results."""
    found: list[Row] = []
    for report in reports:
        if not isinstance(report, ServerReport) or report.workload != workload:
            continue
        plain = {m.name for m in report.modes if m.name == m.baseline}
        found += [r for r in report.summary if r.mode not in plain and r.category == category]
    found = [r for r in found if r.ratio is not None]
    return max(found, key=lambda r: r.ratio.median if r.ratio else 0.0, default=None)


def _speed(workload: str, *categories: str) -> Callable[[Sequence[Report]], str | None]:
    def find(reports: Sequence[Report]) -> str | None:
        rows = [(c, _row(reports, workload, c)) for c in categories]
        shown = [
            f"{row.speed.median:.1f} tok/s, {row.ratio.median:.2f}x, "
            f"{row.mean_accepted_length:.2f} a round ({category}; {row.mode})"
            for category, row in rows
            if row is not None and row.speed and row.ratio
        ]
        return "; ".join(shown) or None

    return find


def _length(reports: Sequence[Report]) -> str | None:
    row = _row(reports, "tasks", ALL)
    return f"{row.mean_accepted_length:.2f} ({row.mode})" if row else None


def _depths(reports: Sequence[Report]) -> str | None:
    shown = []
    for report in reports:
        if isinstance(report, ServerReport) and report.workload == "depth":
            depths = [r.category for r in report.summary if r.category != ALL]
            for depth in dict.fromkeys(depths):
                row = _row([report], "depth", depth)
                if row and row.speed:
                    shown.append(f"{row.speed.median:.1f} at {depth}")
    return " / ".join(shown) or None


def _part(family: str, *parts: str) -> Callable[[Sequence[Report]], str | None]:
    def find(reports: Sequence[Report]) -> str | None:
        shown = []
        for report in reports:
            if not isinstance(report, DraftReport):
                continue
            for shape in report.shapes:
                found = [
                    r.ms.median
                    for r in report.summary
                    if (r.shape, r.family) == (shape, family) and r.part in parts
                ]
                if found:
                    shown.append(f"{sum(found):.3f} ms ({shape})")
        return "; ".join(shown) or None

    return find


FIGURES = (
    Figure("mean accepted length, DSpine", "7.83", QWEN, _length),
    Figure("the same, DFlash / DSpark / DFlash2", "5.92 / 7.44 / 7.55", QWEN, lambda _: None),
    Figure("all tasks, plain and DSpine", "28.2 -> 90.1 tok/s, 3.19x", CARD, _speed("tasks", ALL)),
    Figure("code", "128.7 tok/s, 7.6 a round", CARD, _speed("tasks", "code")),
    Figure("math", "122.8 tok/s, 7.3 a round", CARD, _speed("tasks", "math")),
    Figure(
        "summary, translation",
        "62.0 tok/s, 3.6 a round",
        CARD,
        _speed("tasks", "summary", "translation"),
    ),
    Figure("prose", "41.6 tok/s, 2.5 a round", CARD, _speed("tasks", "prose")),
    Figure("depth 0 / 8K / 32K", "48.0 / 35.6 / 31.1 tok/s", CARD, _depths),
    Figure("agent replays", "248.17 -> 791.30 tok/s, 3.19x", REPLAY, _speed("replay", "replay")),
    Figure("five injections", "at most 0.15 ms", SERVER, _part("dspine", "adjacent injection")),
    Figure(
        "conditional head, DSpine",
        "0.36 ms",
        SERVER,
        _part("dspine", "candidates", "transition cache"),
    ),
    Figure("conditional head, DSpark", "0.88 ms", SERVER, _part("dspark", "Markov head")),
)


def conditions(reports: Sequence[Report]) -> list[str]:
    """Of our results, a line each: they are not those of the published figures."""
    lines = []
    for report in reports:
        device = ", ".join(d.description for d in report.hardware.devices) or report.hardware.cpu
        models = ""
        if isinstance(report, ServerReport):
            models = ", ".join(f"{m.name} {m.type}" for m in report.models) + "; "
        lines.append(
            f"{report.workload}: {models}{device}; commit {report.provenance.commit or 'unknown'}"
        )
    return lines


def table(reports: Sequence[Report]) -> Table:
    """Two columns of figures that were obtained under different conditions."""
    made = Table(
        title="Published by others, and measured here: other machines, models and prompts",
        title_justify="left",
    )
    made.add_column("")
    made.add_column("published (not ours)", style="italic")
    made.add_column("published for", style="dim")
    made.add_column("measured here")
    for figure in FIGURES:
        made.add_row(figure.what, figure.published, figure.source, figure.find(reports) or "-")
    return made
