"""`dspine-bench table`: figures that others published, beside what was measured here.

The published ones are data of this module, with where they come from; nothing computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from dspine_bench.schema import ALL, DraftReport, Mode, Report, Row, ServerReport, Spread
from dspine_bench.terminal import (
    counted,
    is_quick,
    length_text,
    over_text,
    repeats_of,
    spread_text,
)
from dspine_bench.urls import device_text, from_urls

DEPTH = 15  # of the published figures: block 16
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


def _is_greedy(mode: Mode) -> bool:
    return mode.temperature == 0 and mode.name != mode.baseline


def _modes(report: ServerReport) -> list[str]:
    """Greedy drafting modes: those of the published depth, else all; none is chosen by its speed.

    Next to the published depth comes the drafter's own, its block size - 1, as published too.
    """
    greedy = [mode for mode in report.modes if _is_greedy(mode)]
    for depth in (DEPTH, None):
        if same := [mode.name for mode in greedy if mode.n_draft == depth]:
            return same
    return [mode.name for mode in greedy]


def _rows(report: Report, workload: str, category: str) -> list[Row]:
    """Rows of a category that may stand beside a greedy figure: texts were compared."""
    if not isinstance(report, ServerReport) or report.workload != workload:
        return []
    names = _modes(report)
    rows = [r for r in report.summary if r.mode in names and r.category == category]
    return [r for r in rows if r.checked and r.ratio is not None]


def _plain(report: ServerReport, row: Row) -> float:
    """The baseline's speed on the prompts of a row."""
    assert row.speed is not None and row.ratio is not None  # as _rows has seen to
    baseline = next(m.baseline for m in report.modes if m.name == row.mode)
    speeds = [r.speed for r in report.summary if (r.mode, r.category) == (baseline, row.category)]
    if row.counted == row.prompts and speeds and speeds[0]:
        return speeds[0].median
    return row.speed.median / row.ratio.median


def _numbered(reports: Sequence[Report], made: Callable[[Report], Sequence[str]]) -> str | None:
    """Texts of every result, with its number; None of nothing."""
    shown = [f"[{n}] {text}" for n, report in enumerate(reports, 1) for text in made(report)]
    return "; ".join(shown) or None


def _speed_texts(report: Report, workload: str, category: str, label: str) -> list[str]:
    if not isinstance(report, ServerReport):
        return []
    return [
        f"{_plain(report, row):.1f} -> {row.speed.median:.1f} tok/s, {row.ratio.median:.2f}x, "
        f"{length_text(row)} a round{over_text(row)} ({label}{row.mode})"
        for row in _rows(report, workload, category)
        if row.speed and row.ratio
    ]


def _speed(workload: str, *categories: str) -> Callable[[Sequence[Report]], str | None]:
    def of(report: Report) -> list[str]:
        found = []
        for category in categories:
            label = f"{category}; " if len(categories) > 1 else ""
            found += _speed_texts(report, workload, category, label)
        return found

    return lambda reports: _numbered(reports, of)


def _length(reports: Sequence[Report]) -> str | None:
    def of(report: Report) -> list[str]:
        rows = _rows(report, "tasks", ALL)
        return [f"{length_text(row)}{over_text(row)} ({row.mode})" for row in rows]

    return _numbered(reports, of)


def _depths(reports: Sequence[Report]) -> str | None:
    def of(report: Report) -> list[str]:
        depths = list(dict.fromkeys(r.category for r in _single(report, "depth")))
        rows = [row for depth in depths for row in _rows(report, "depth", depth)]
        return [
            f"{row.speed.median:.1f} at {row.category} ({row.mode})" for row in rows if row.speed
        ]

    return _numbered(reports, of)


def _single(report: Report, workload: str) -> list[Row]:
    """Rows of single categories."""
    if not isinstance(report, ServerReport) or report.workload != workload:
        return []
    return [row for row in report.summary if row.category != ALL]


def _part(family: str, *parts: str) -> Callable[[Sequence[Report]], str | None]:
    def find(reports: Sequence[Report]) -> str | None:
        def of(report: Report) -> list[str]:
            if not isinstance(report, DraftReport):
                return []
            shown = []
            for shape in report.shapes:
                found = [
                    r.ms
                    for r in report.summary
                    if (r.shape, r.family) == (shape, family) and r.part in parts
                ]
                if found:
                    shown.append(f"{_sum_text(found, repeats_of(report))} ({shape})")
            return shown

        return _numbered(reports, of)

    return find


def _sum_text(found: Sequence[Spread], repeats: int) -> str:
    """Times added; what noise alone could give is said to be no figure."""
    low, high = sum(s.min for s in found), sum(s.max for s in found)
    if low <= 0:
        return f"lost in noise: {low:.2f} to {high:.2f} ms"
    median = sum(s.median for s in found)
    return f"{spread_text(Spread(median=median, min=low, max=high), repeats, 3)} ms"


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


NAMED = ("code", "math", "summary", "translation", "prose")  # categories with a figure above


def _others(reports: Sequence[Report]) -> list[tuple[str, str | None]]:
    """Measured categories that nobody published a figure of."""
    categories = dict.fromkeys(r.category for x in reports for r in _single(x, "tasks"))
    return [(c, _speed("tasks", c)(reports)) for c in categories if c not in NAMED]


def _settings(report: Report) -> str:
    """Temperature, cache, repeats and --quick: what decides whether figures may be compared."""
    parts = [counted(repeats_of(report), "repeat")]
    if isinstance(report, ServerReport):
        heat = sorted({mode.temperature for mode in report.modes})
        caches = sorted({mode.cache_type or "not known" for mode in report.modes})
        parts.insert(0, f"T={', '.join(f'{t:g}' for t in heat)}; KV {', '.join(caches)}")
        if any(heat):
            parts.append("sampled modes are not in the table")
    if isinstance(report, DraftReport):
        asked = report.config
        parts.insert(0, f"weights {asked.get('type')}; {asked.get('context')} tokens of context")
        parts.append(f"{asked.get('threads')} threads")
    if isinstance(report, ServerReport):
        parts.append(f"up to {report.config.max_tokens} tokens")
    if is_quick(report):
        parts.append("--quick")
    return "; ".join(parts)


def conditions(reports: Sequence[Report], names: Sequence[str] = ()) -> list[str]:
    """Of our results, a line each: they are not those of the published figures."""
    lines = []
    for number, report in enumerate(reports, 1):
        device = device_text(report)
        if from_urls(report):
            device += ", the servers' machine is not known"
        models = ""
        if isinstance(report, ServerReport):
            found = [f"{m.name} {m.type}" for m in report.models]
            found += [f"{m.url} {m.model or ''}".strip() for m in report.modes if m.url]
            models = "".join(f"{model}; " for model in dict.fromkeys(found))
        name = f" {names[number - 1]}" if names else ""
        commit = report.provenance.commit or "unknown"
        lines.append(
            f"[{number}]{name} {report.workload}: {_settings(report)}; {models}{device}; "
            f"commit {commit}"
        )
    return lines


def _heading(reports: Sequence[Report]) -> str:
    """The measured column's head; with the settings, by number where there are several."""
    lines = [f"[{number}] {_settings(report)}" for number, report in enumerate(reports, 1)]
    return "\n".join(["measured here", *lines])


def table(reports: Sequence[Report]) -> Table:
    """Two columns of figures that were obtained under different conditions."""
    made = Table(
        title="Published by others, and measured here: other machines, models and prompts",
        title_justify="left",
    )
    made.add_column("")
    made.add_column("published (not ours)", style="italic")
    made.add_column("published for", style="dim")
    made.add_column(Text(_heading(reports)))
    for figure in FIGURES:
        ours = Text(figure.find(reports) or "-")
        made.add_row(figure.what, figure.published, figure.source, ours)
    for category, found in _others(reports):
        made.add_row(category, "-", "-", Text(found or "-"))
    return made
