"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dspine_bench.compare import Difference
from dspine_bench.schema import (
    MIN_REPEATS,
    ConvertReport,
    DraftReport,
    DraftRow,
    EngineReport,
    Report,
    Row,
    ServerReport,
    Spread,
)

if TYPE_CHECKING:
    from dspine_bench.record import Step

WIDE = 150  # columns of a table that is piped into a file


def console() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is cut."""
    out = Console(highlight=False, markup=False)  # names of files and prompts are no markup
    return out if out.is_terminal else Console(highlight=False, markup=False, width=WIDE)


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def spread_text(spread: Spread, repeats: int, digits: int = 2) -> str:
    """A median with its extremes, which a single repeat has none of."""
    ends = f" ({spread.min:.{digits}f}-{spread.max:.{digits}f})" if repeats > 1 else ""
    return f"{spread.median:.{digits}f}{ends}"


def ratio_text(row: Row, repeats: int) -> str:
    """The ratio with its extremes, and what it is over where that is not everything."""
    return _over(row, row.ratio, repeats)


def request_text(row: Row, repeats: int) -> str:
    """The same of single requests."""
    return _over(row, row.request_ratio, repeats)


def _over(row: Row, ratio: Spread | None, repeats: int) -> str:
    return "not reported" if ratio is None else spread_text(ratio, repeats) + over_text(row)


def over_text(row: Row) -> str:
    """ " over N of M prompts" where prompts are left out."""
    return "" if row.counted == row.prompts else f" over {row.counted} of {row.prompts} prompts"


def ratio_head(repeats: int) -> str:
    """The head of the column with the ratios."""
    return "ratio (min-max)" if repeats > 1 else "ratio, one repeat"


def length_text(row: Row) -> str:
    """The mean accepted length."""
    if row.mean_accepted_length is None:
        return "not reported"
    return f"{row.mean_accepted_length:.2f}"


def equal_text(row: Row) -> str:
    """Whether the texts are those of the baseline."""
    if not row.checked:
        return "sampled"
    unstable = f"{len(row.unstable)} of {row.prompts} unstable" if row.unstable else ""
    if row.differing:
        text = f"{len(row.differing)} of {row.prompts} differ"
        return f"{text}, {unstable}" if unstable else text
    if not row.counted:
        return f"not compared ({unstable})"
    return f"yes ({unstable}: not compared)" if unstable else "yes"


def _server_cells(row: Row, repeats: int) -> list[str]:
    return [
        row.category,
        row.mode,
        f"{row.speed.median:.1f}" if row.speed else "not reported",
        ratio_text(row, repeats),
        length_text(row),
        f"{100 * row.acceptance_rate:.0f} %" if row.drafted else "",
        equal_text(row),
    ]


def _server_table(report: ServerReport) -> Table:
    names = [m.name for m in report.models] or [m.url for m in report.modes if m.url]
    title = f"{report.workload}: {', '.join(dict.fromkeys(names))}"
    table = Table(title=title, title_justify="left", caption=asked_text(report))
    ratio = ratio_head(report.config.repeats)
    for name in ("", "mode", "tok/s", ratio, "mean len", "accepted", "same text"):
        table.add_column(name, justify="left" if name in ("", "mode") else "right")
    if report.workload == "replay":
        for name in ("requests' ratio", "first token", "request"):
            table.add_column(name, justify="right")
    last = ""
    for row in by_category(report):
        if last and row.category != last:
            table.add_section()
        last = row.category
        cells = _server_cells(row, report.config.repeats)
        if report.workload == "replay":
            cells.append(request_text(row, report.config.repeats))
            cells += [_milliseconds(row.first_token_ms), _milliseconds(row.latency_ms)]
        table.add_row(*cells)
    return table


def _milliseconds(spread: Spread | None) -> str:
    return f"{spread.median:.0f} ms" if spread else ""


def by_category(report: ServerReport) -> list[Row]:
    """The rows, those of one category together."""
    categories = list(dict.fromkeys(r.category for r in report.summary))
    return sorted(report.summary, key=lambda row: categories.index(row.category))


def draft_parts(rows: Sequence[DraftRow], shape: str) -> dict[str, dict[str, DraftRow]]:
    """Rows of one shape by part and family, those of single widths left out."""
    found: dict[str, dict[str, DraftRow]] = {}
    for row in rows:
        if row.shape == shape and not row.part.startswith(("verify", "context ")):
            found.setdefault(row.part, {})[row.family] = row
    return found


def _draft_table(report: DraftReport, shape: str) -> Table:
    families = list(dict.fromkeys(case.family for case in report.cases if case.shape == shape))
    title = f"One round by part, shape {shape}, milliseconds"
    table = Table(title=title, title_justify="left", caption=asked_text(report))
    table.add_column("part")
    for family in families:
        table.add_column(family, justify="right")
    for part, by_family in draft_parts(report.summary, shape).items():
        cells = [by_family.get(family) for family in families]
        repeats = repeats_of(report)
        table.add_row(part, *(_part_text(cell, repeats) for cell in cells))
    return table


def _part_text(row: DraftRow | None, repeats: int) -> str:
    return "" if row is None else spread_text(row.ms, repeats, 3)


def repeats_of(report: Report) -> int:
    """Repeats of a result."""
    if isinstance(report, ServerReport):
        return report.config.repeats
    return len({sample.repeat for sample in report.samples})


def is_quick(report: Report) -> bool:
    """Whether --quick made it."""
    if isinstance(report, ServerReport):
        return report.config.quick
    return bool(report.config.get("quick"))


def asked_text(report: Report) -> str:
    """How much was measured, for below a table."""
    repeats = repeats_of(report)
    parts = [counted(repeats, "repeat")]
    if isinstance(report, ServerReport):
        prompts = len({sample.prompt for sample in report.samples})
        parts += [counted(prompts, "prompt"), f"up to {report.config.max_tokens} tokens"]
    if is_quick(report):
        parts.append("--quick")
    if repeats < MIN_REPEATS:
        parts.append(f"too few to publish, which takes {MIN_REPEATS} repeats")
    return "; ".join(parts)


def _width_table(report: DraftReport, shape: str) -> Table:
    table = Table(title=f"Verification by width, shape {shape}", title_justify="left")
    for name in ("rows", "ms", "over one row"):
        table.add_column(name, justify="right")
    rows = [r for r in report.summary if r.shape == shape and r.part == "verify"]
    for row in rows:
        over = row.ms.median / rows[0].ms.median if rows[0].ms.median else 0.0
        table.add_row(str(row.rows), f"{row.ms.median:.3f}", f"{over:.2f}")
    return table


def show_differences(
    heads: tuple[str, str, str],
    found: Sequence[Difference],
    notes: Sequence[str],
    threshold: float,
    out: Console,
    *,
    either_way: bool,
    lost: int = 0,
) -> bool:
    """Print a comparison; whether something is past the threshold.

    So are `lost` rows, which one of the two lacks, and texts that differ in one; the notes name
    them.
    """
    table = Table()
    for number, name in enumerate((*heads, "change")):
        table.add_column(name, justify="right" if number else "left")
    failed = 0
    for one in found:
        worse = one.worse(threshold, either_way=either_way)
        failed += worse
        values = ["not reported" if v is None else f"{v:.3f}" for v in (one.first, one.second)]
        change = "" if one.change is None else f"{100 * one.change:+.1f} %"
        style = "bold red" if worse else None
        table.add_row(one.what, *values, change + (" !" if worse else ""), style=style)
    out.print(table)
    for line in notes:
        out.print(line, markup=False, soft_wrap=True)  # whole where it is piped
    passed = f"past the threshold of {100 * threshold:g} %"
    if failed:
        out.print(f"{failed} of {len(found)} {passed}")
    else:
        out.print(f"none of {len(found)} is {passed}{largest_text(found)}")
    if lost:
        out.print(f"rows that are missing and texts that differ count as worse: {lost}")
    return failed > 0 or lost > 0


def largest_text(found: Sequence[Difference]) -> str:
    """ "; the largest change is …", of those that are reported."""
    changes = [abs(one.change) for one in found if one.change is not None]
    return f"; the largest change is {100 * max(changes):.1f} %" if changes else ""


def minutes(seconds: float) -> str:
    """A time as a reader thinks of it."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def show_plan(steps: Sequence[Step], repeats: int, out: Console, *, quick: bool) -> None:
    """Print what `record` is going to measure, and about how long that takes."""
    table = Table(
        title="record: times are of two idle cores with AMX; up to four times with AVX2",
        title_justify="left",
    )
    for name in ("part", "", "result", "takes"):
        table.add_column(name)
    total = 0.0
    for step in steps:
        seconds = step.part.estimate(repeats, quick=quick) if step.needed else 0.0
        total += seconds
        takes = f"about {minutes(seconds)}" if step.needed else "is there"
        table.add_row(step.part.name, step.part.what, str(step.path), takes)
    out.print(table)
    out.print(f"in all about {minutes(total)}" if total else "nothing to measure")


def facts(report: ConvertReport | EngineReport) -> dict[str, str]:
    """The few figures of a result that has no rows, by name."""
    repeats = repeats_of(report)
    ratio = spread_text(report.summary.ratio, repeats)
    if isinstance(report, ConvertReport):
        sizes = {f"size of {name}": f"{size / 1e9:.2f} GB" for name, size in report.sizes.items()}
        memory = f"{report.summary.peak_rss / 2**20:.0f} MiB"
        return {"time / peer's time": ratio, "memory": memory, **sizes}
    found = report.summary
    return {
        "engine / llama-server, time of a round": ratio,
        "engine": f"{found.engine_ms:.3f} ms",
        "llama-server": f"{found.server_ms:.3f} ms",
        "same ids": "yes" if found.same_ids else "no",
        "same rounds": "yes" if found.same_rounds else "no",
    }


def _facts_table(report: ConvertReport | EngineReport) -> Table:
    table = Table(title=report.workload, title_justify="left", show_header=False)
    for name, value in facts(report).items():
        table.add_row(name, value)
    return table


def show(report: Report, out: Console) -> None:
    """Print a report's tables."""
    if isinstance(report, DraftReport):
        for shape in report.shapes:
            out.print(_draft_table(report, shape))
            out.print(_width_table(report, shape))
    elif not isinstance(report, ServerReport):
        out.print(_facts_table(report))
    else:
        out.print(_server_table(report))
        for row in report.summary:
            if row.differing:
                out.print(f"{row.mode}, {row.category}: other text at {', '.join(row.differing)}")
