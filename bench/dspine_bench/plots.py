"""Plots from results, as SVG for the page and PNG for a README.

Narrow figures with large letters: a phone shows them as wide as it is.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspine_bench.errors import BenchError
from dspine_bench.schema import ALL, DraftReport, Report, Row, ServerReport, Spread
from dspine_bench.summary import by_pairs, by_repeat, replay_rates, uses_server_clock
from dspine_bench.terminal import counted, is_quick, repeats_of
from dspine_bench.urls import device_text

WIDTH = 5.0  # inches
LEGEND_LINE = 0.2  # inches
TITLE_HEIGHT, CAPTION_LINE = 0.35, 0.13  # inches
CAPTION_COLUMNS, CAPTION_SIZE = 84, 7
INK = "#222222"  # the page draws it in its own
RATIO_LABEL = "speed / plain decoding"
COLOURS = ("#1f6f8b", "#d1495b", "#edae49", "#4f7942", "#6d597a", "#8d99ae", "#00a896", "#e07a5f")
# no two of 40 curves are alike
MARKS = ("o-", "s--", "^:", "D-.", "v-")
STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "path",  # the page needs no font
    "svg.hashsalt": "dspine",  # the same input gives the same bytes
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # names of categories and files are no mathematics
}


@dataclass(frozen=True)
class Plot:
    """A drawn figure: `name` is fit for a file name."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise BenchError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _drawn(
    name: str, title: str, caption: str, height: float, paint: Callable[[Any], None]
) -> Plot:
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, height))
        paint(axes)
        svg, png = io.StringIO(), io.BytesIO()
        nothing = {"Date": None, "Creator": None}
        figure.savefig(svg, format="svg", metadata=nothing, transparent=True)
        _say_what_it_is(figure, title, caption)
        figure.savefig(png, format="png", dpi=160)
        plt.close(figure)
    text = svg.getvalue()
    text = text[text.index("<svg") :]
    # the width is the page's; viewBox keeps the proportions
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', text, count=1)
    return Plot(name, title, caption, _apart(_themed(text), name), png.getvalue())


def _say_what_it_is(figure: Any, title: str, caption: str) -> None:
    """Title and caption inside: a PNG is passed on alone."""
    lines = textwrap.wrap(caption, CAPTION_COLUMNS)
    room = TITLE_HEIGHT + CAPTION_LINE * len(lines)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + room)
    # the layout leaves this share of the height to the text
    figure.get_layout_engine().set(rect=(0, 0, 1, height / (height + room)))
    figure.text(0.02, 0.99, title, va="top", fontsize=12, weight="bold")
    top = 1 - TITLE_HEIGHT / (height + room)
    figure.text(0.02, top, "\n".join(lines), va="top", fontsize=CAPTION_SIZE)


def _themed(svg: str) -> str:
    """Black in the page's ink, so that the figure can be read on dark paper too."""
    return re.sub(rf"(?i)#000000|{INK}", "currentColor", svg)


def _apart(svg: str, name: str) -> str:
    """Ids that no other figure of the page has."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    return re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)


def caption(report: Report) -> str:
    """Device, models, types and commit: what a figure holds for."""
    parts = [device_text(report)]
    if isinstance(report, ServerReport):
        parts += [f"{m.role} {m.name} ({m.type})" for m in report.models]
        kinds = sorted({m.cache_type for m in report.modes if m.cache_type})
        parts += [f"KV {' '.join(kinds)}"] if kinds else []
        parts.append(f"T={' '.join(sorted({f'{m.temperature:g}' for m in report.modes}))}")
        parts.append(f"{report.config.parallel} at a time")
        parts.append(f"up to {report.config.max_tokens} tokens")
    elif isinstance(report, DraftReport):
        parts.append(f"random weights {report.config.get('type')}")
    parts.append(counted(repeats_of(report), "repeat") + (", --quick" if is_quick(report) else ""))
    commit = (report.provenance.commit or "unknown")[:9]
    parts.append(f"commit {commit}{'+changes' if report.provenance.dirty else ''}")
    return "; ".join(parts)


def _drafting(report: ServerReport) -> list[str]:
    return [mode.name for mode in report.modes if mode.name != mode.baseline]


def _rows(report: ServerReport, mode: str) -> dict[str, Row]:
    return {row.category: row for row in report.summary if row.mode == mode}


def _raw_ratios(
    report: ServerReport, mode: str, row: Row, *, requests: bool = False
) -> list[float]:
    """The ratio of every repeat: what the spread's ends are taken from."""
    baseline = next(m.baseline for m in report.modes if m.name == mode)
    skip = {*row.differing, *row.unstable}
    if report.replays and not requests:
        return by_pairs(*(replay_rates(report.replays, name) for name in (mode, baseline)))

    def of(name: str) -> list[Any]:
        return [
            s
            for s in report.samples
            if s.mode == name and row.category in (ALL, s.category) and s.prompt not in skip
        ]

    mine, base = of(mode), of(baseline)
    clock = not requests and uses_server_clock([*mine, *base])
    return by_pairs(by_repeat(mine, clock), by_repeat(base, clock))


@dataclass(frozen=True)
class _Bar:
    """A ratio and its single repeats; None is drawn as "not reported"."""

    ratio: Spread | None
    raw: Sequence[float]


def _bars(axes: Any, ticks: Sequence[str], series: Sequence[tuple[str, list[_Bar | None]]]) -> None:
    """Ratios against 1.0: a group for every tick, and in it a bar for every series."""
    step = 0.8 / len(series)
    for number, (label, bars) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for index, bar in enumerate(bars):
            y = index + (number - (len(series) - 1) / 2) * step
            if bar is None:
                continue
            if bar.ratio is None:
                axes.text(0.03, y, "not reported", fontsize=8, color=colour, va="center")
                continue
            axes.barh(y, bar.ratio.median, step * 0.9, color=colour, alpha=0.75)
            axes.plot(bar.raw, [y] * len(bar.raw), "o", ms=3, color=INK, alpha=0.6)
        axes.barh(0, 0, color=colour, alpha=0.75, label=label)  # of bars that are not there too
    axes.axvline(1.0, color=INK, lw=1.5)
    axes.set_yticks(range(len(ticks)), ticks)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(RATIO_LABEL)
    axes.grid(axis="y", visible=False)
    _legend(axes, len(series))


def _bar_plot(
    report: ServerReport,
    name: str,
    title: str,
    ticks: Sequence[str],
    series: Sequence[tuple[str, list[_Bar | None]]],
) -> Plot | None:
    """The figure of some bars; None where no ratio is reported."""
    if not any(bar and bar.ratio for _, bars in series for bar in bars):
        return None
    height = 1.2 + len(ticks) * max(0.38, 0.2 * len(series)) + LEGEND_LINE * len(series)
    many = repeats_of(report) > 1
    marks = "bars are medians, dots single repeats" if many else "bars are of one repeat"
    text = f"{caption(report)}; {marks}"
    return _drawn(name, title, text, height, lambda axes: _bars(axes, ticks, series))


def speed_by_task(report: ServerReport) -> Plot | None:
    """Speed over plain decoding by category; every repeat is a point."""
    categories = list(dict.fromkeys(r.category for r in report.summary))

    def bars(mode: str) -> list[_Bar | None]:
        rows = _rows(report, mode)
        found = [rows.get(category) for category in categories]
        return [_Bar(r.ratio, _raw_ratios(report, mode, r)) if r else None for r in found]

    series = [(mode, bars(mode)) for mode in _drafting(report)]
    title = "Speed against plain decoding, by task"
    return _bar_plot(report, "speed-by-task", title, categories, series)


def replay_speed(report: ServerReport) -> Plot | None:
    """A replay's throughput and single requests over plain decoding."""
    series: list[tuple[str, list[_Bar | None]]] = []
    for mode in _drafting(report):
        for row in _rows(report, mode).values():
            whole = _Bar(row.ratio, _raw_ratios(report, mode, row))
            single = _Bar(row.request_ratio, _raw_ratios(report, mode, row, requests=True))
            series.append((mode, [whole, single]))
    ticks = ("all tokens /\nwall time", "single\nrequests")
    return _bar_plot(report, "replay", "Agent replay against plain decoding", ticks, series)


def _legend(axes: Any, entries: int, columns: int = 1) -> None:
    """Below the figure: the layout keeps it clear of the label of the axis."""
    if entries > 1:
        axes.figure.legend(fontsize=9, loc="outside lower center", ncols=columns, frameon=False)


def accepted_by_position(report: ServerReport) -> Plot | None:
    """Share of rounds that accepted the n-th drafted token."""
    curves = [
        (row.mode if len(_drafting(report)) > 1 else row.category, row.accepted_by_position)
        for row in _chosen(report)
        if row.accepted_by_position
    ]
    if not curves:
        return None

    def paint(axes: Any) -> None:
        for number, (label, values) in enumerate(curves):
            places = range(1, len(values) + 1)
            colour = INK if label == ALL else COLOURS[number % len(COLOURS)]
            marks = MARKS[number % len(MARKS)]  # curves of modes lie on each other, and all show
            values = [100 * value for value in values]
            axes.plot(places, values, marks, ms=6 - number % 5, color=colour, label=label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("rounds that accept it, %")
        axes.set_ylim(0, 100)
        _legend(axes, len(curves), columns)

    columns = 1 if len(_drafting(report)) > 1 else 3  # names of modes are long
    height = 3.4 + LEGEND_LINE * -(-len(curves) // columns)
    title = "Accepted tokens by position"
    return _drawn("accepted-by-position", title, caption(report), height, paint)


def _chosen(report: ServerReport) -> list[Row]:
    """One curve a mode where there are several, one a category otherwise."""
    modes = _drafting(report)
    rows = [row for row in report.summary if row.mode in modes]
    if len(modes) > 1:
        last = {row.mode: row for row in rows}  # the category of all comes last
        return list(last.values())
    return rows


def _with_ends(
    axes: Any, points: Sequence[tuple[int, Spread]], report: Report, colour: str, label: str
) -> None:
    """A curve of medians, with bars from one extreme to the other."""
    x, y = [at for at, _ in points], [spread.median for _, spread in points]
    ends = [[s.median - s.min for _, s in points], [s.max - s.median for _, s in points]]
    bars = ends if repeats_of(report) > 1 else None
    axes.errorbar(x, y, bars, fmt="o-", ms=4, capsize=3, color=colour, label=label)


def _marks(report: Report) -> str:
    """What the marks of such a curve are."""
    many = repeats_of(report) > 1
    marks = "points are medians, bars the extremes" if many else "points are of one repeat"
    return f"{caption(report)}; {marks}"


def depth_curve(report: ServerReport) -> Plot | None:
    """Speed by the length of the context."""
    modes = [mode.name for mode in report.modes]

    def paint(axes: Any) -> None:
        for number, mode in enumerate(modes):
            rows = [r for c, r in _rows(report, mode).items() if c != ALL and r.speed]
            points = sorted((int(r.category), r.speed) for r in rows if r.speed)
            if points:
                _with_ends(axes, points, report, COLOURS[number % len(COLOURS)], mode)
        axes.set_xlabel("tokens of context before the answer")
        axes.set_ylabel("tokens a second")
        axes.set_ylim(bottom=0)
        _legend(axes, len(modes))

    if not any(row.speed for row in report.summary):
        return None
    height = 3.4 + LEGEND_LINE * len(modes)
    return _drawn("depth", "Speed by context", _marks(report), height, paint)


def sweep_curve(report: ServerReport) -> Plot | None:
    """Ratio by the number of drafted tokens, where a run swept it."""
    points: dict[str, list[tuple[int, Row]]] = {}
    for mode in report.modes:
        if mode.n_draft and mode.drafter:
            rows = _rows(report, mode.name)
            row = rows.get(ALL) or next(iter(rows.values()), None)
            if row and row.ratio:
                curve = mode.name.replace(f" n={mode.n_draft}", "")  # drafter, cache, temperature
                points.setdefault(curve, []).append((mode.n_draft, row))
    if not any(len(found) > 1 for found in points.values()):
        return None

    def paint(axes: Any) -> None:
        for number, (curve, found) in enumerate(points.items()):
            found.sort(key=lambda pair: pair[0])
            ratios = [(n, row.ratio) for n, row in found if row.ratio]
            _with_ends(axes, ratios, report, COLOURS[number % len(COLOURS)], curve)
        axes.axhline(1.0, color=INK, lw=1.5)
        axes.set_xlabel("tokens drafted a round")
        axes.set_ylabel(RATIO_LABEL)
        axes.set_ylim(bottom=0)
        _legend(axes, len(points))

    height = 3.4 + LEGEND_LINE * len(points)
    return _drawn("sweep", "Speed by draft depth", _marks(report), height, paint)


def verify_cost(report: DraftReport) -> Plot | None:
    """The time of a verification by its width, one row being 1."""
    curves = {
        shape: [r for r in report.summary if r.shape == shape and r.part == "verify"]
        for shape in report.shapes
    }
    curves = {shape: rows for shape, rows in curves.items() if rows and rows[0].ms.median}
    if not curves:
        return None

    def paint(axes: Any) -> None:
        for number, (shape, rows) in enumerate(curves.items()):
            x = [row.rows for row in rows]
            y = [row.ms.median / rows[0].ms.median for row in rows]
            axes.plot(x, y, "o-", ms=4, color=COLOURS[number % len(COLOURS)], label=shape)
        axes.set_xlabel("rows of a verification (drafted tokens + 1)")
        axes.set_ylabel("time, one row = 1")
        axes.set_ylim(bottom=0)
        _legend(axes, len(curves))

    return _drawn("verify-cost", "Verification by width", caption(report), 3.6, paint)


SUMS = ("layers", "head", "convolutions, selector", "Markov head")
PARTS = (*SUMS, "adjacent injection", "candidates", "transition cache", "walk")


def draft_parts(report: DraftReport) -> list[Plot]:
    """The parts of a draft, stacked, by family; a figure for each shape."""
    return [_parts_of(report, shape) for shape in report.shapes]


def _parts_of(report: DraftReport, shape: str) -> Plot:
    families = list(dict.fromkeys(c.family for c in report.cases if c.shape == shape))

    def paint(axes: Any) -> None:
        left = [0.0] * len(families)
        for number, part in enumerate(PARTS):
            found = {
                r.family: r.ms.median for r in report.summary if r.shape == shape and r.part == part
            }
            # a difference of two noisy times may come out below nothing
            widths = [max(found.get(family, 0.0), 0.0) for family in families]
            if any(widths):
                colour = COLOURS[number % len(COLOURS)]
                axes.barh(families, widths, left=left, color=colour, label=part)
                left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.grid(axis="y", visible=False)
        _legend(axes, len(PARTS), 2)

    below = sum(r.shape == shape and r.part in PARTS and r.ms.median < 0 for r in report.summary)
    title = f"One draft of 16 rows by part, shape {shape}"
    text = caption(report) + (f"; not drawn: {counted(below, 'part')} below zero" if below else "")
    name = re.sub(r"[^A-Za-z0-9]+", "-", shape)  # a result may call a shape anything
    return _drawn(f"draft-{name}", title, text, 4.0, paint)


def _plots_of(report: Report) -> list[Plot | None]:
    if isinstance(report, DraftReport):
        return [*draft_parts(report), verify_cost(report)]
    if not isinstance(report, ServerReport):
        return []
    if report.workload == "depth":
        return [depth_curve(report), accepted_by_position(report)]
    if report.workload == "tasks":
        return [speed_by_task(report), sweep_curve(report), accepted_by_position(report)]
    return [replay_speed(report)]


def headings(reports: Sequence[Report], names: Sequence[str]) -> list[str]:
    """What each result is called: with its file's name where several are of one kind."""
    kinds = [report.workload for report in reports]
    names = names or [f"result {number}" for number in range(1, len(reports) + 1)]
    return [
        f"{kind}: {name}" if kinds.count(kind) > 1 else kind
        for kind, name in zip(kinds, names, strict=True)
    ]


def plots(reports: Sequence[Report], names: Sequence[str] = ()) -> list[Plot]:
    """Everything that the results allow to draw; `names` are those of their files."""
    found: list[Plot] = []
    for report, heading in zip(reports, headings(reports, names), strict=True):
        _, _, name = heading.partition(": ")
        tail = f" ({name})" if name else ""
        drawn = [plot for plot in _plots_of(report) if plot is not None]
        found += [replace(plot, title=plot.title + tail) for plot in drawn]
    return _renamed(found)


def _renamed(found: Sequence[Plot]) -> list[Plot]:
    """A number behind a name that is taken, in the figure's ids too."""
    taken: dict[str, int] = {}
    made = []
    for plot in found:
        taken[plot.name] = taken.get(plot.name, 0) + 1
        count = taken[plot.name]
        if count == 1:
            made.append(plot)
            continue
        name = f"{plot.name}-{count}"
        svg = plot.svg.replace(f'id="{plot.name}-', f'id="{name}-')
        svg = svg.replace(f"#{plot.name}-", f"#{name}-")
        made.append(Plot(name, plot.title, plot.caption, svg, plot.png))
    return made


def save_png(found: Sequence[Plot], folder: Path) -> list[Path]:
    """Write the PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in found:
        path = folder / f"{plot.name}.png"
        path.write_bytes(plot.png)
        paths.append(path)
    return paths
