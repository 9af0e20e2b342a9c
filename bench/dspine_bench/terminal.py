"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dspine_bench.schema import DraftReport, DraftRow, Report, Row, ServerReport, Spread

WIDE = 110  # columns of a table that is piped into a file


def console() -> Console:
    """Standard output; wide where it is no terminal, so that nothing is cut."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=WIDE)


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def spread_text(spread: Spread, repeats: int, digits: int = 2) -> str:
    """A median with its extremes, which a single repeat has none of."""
    ends = f" ({spread.min:.{digits}f}-{spread.max:.{digits}f})" if repeats > 1 else ""
    return f"{spread.median:.{digits}f}{ends}"


def ratio_text(row: Row, repeats: int) -> str:
    """The ratio with its extremes, and what it is over where that is not everything."""
    if row.ratio is None:
        return "not reported"
    return spread_text(row.ratio, repeats) + over_text(row)


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
    table = Table(title=title, title_justify="left")
    ratio = ratio_head(report.config.repeats)
    for name in ("", "mode", "tok/s", ratio, "mean len", "accepted", "same text"):
        table.add_column(name, justify="left" if name in ("", "mode") else "right")
    if report.workload == "replay":
        table.add_column("first token", justify="right")
        table.add_column("request", justify="right")
    last = ""
    for row in sorted(report.summary, key=lambda r: _order(report, r)):
        if last and row.category != last:
            table.add_section()
        last = row.category
        cells = _server_cells(row, report.config.repeats)
        if report.workload == "replay":
            cells += [_milliseconds(row.first_token_ms), _milliseconds(row.latency_ms)]
        table.add_row(*cells)
    return table


def _milliseconds(spread: Spread | None) -> str:
    return f"{spread.median:.0f} ms" if spread else ""


def _order(report: ServerReport, row: Row) -> int:
    categories = list(dict.fromkeys(r.category for r in report.summary))
    return categories.index(row.category)


def draft_parts(rows: Sequence[DraftRow], shape: str) -> dict[str, dict[str, DraftRow]]:
    """Rows of one shape by part and family, those of single widths left out."""
    found: dict[str, dict[str, DraftRow]] = {}
    for row in rows:
        if row.shape == shape and not row.part.startswith(("verify", "context ")):
            found.setdefault(row.part, {})[row.family] = row
    return found


def _draft_table(report: DraftReport, shape: str) -> Table:
    families = list(dict.fromkeys(case.family for case in report.cases if case.shape == shape))
    table = Table(title=f"One round by part, shape {shape}, milliseconds", title_justify="left")
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
    if isinstance(report, DraftReport):
        return len({sample.repeat for sample in report.samples})
    return report.config.repeats


def is_quick(report: Report) -> bool:
    """Whether --quick made it."""
    if isinstance(report, DraftReport):
        return bool(report.config.get("quick"))
    return report.config.quick


def _width_table(report: DraftReport, shape: str) -> Table:
    table = Table(title=f"Verification by width, shape {shape}", title_justify="left")
    for name in ("rows", "ms", "over one row"):
        table.add_column(name, justify="right")
    rows = [r for r in report.summary if r.shape == shape and r.part == "verify"]
    for row in rows:
        over = row.ms.median / rows[0].ms.median if rows[0].ms.median else 0.0
        table.add_row(str(row.rows), f"{row.ms.median:.3f}", f"{over:.2f}")
    return table


def show(report: Report, out: Console) -> None:
    """Print a report's tables."""
    if isinstance(report, DraftReport):
        for shape in report.shapes:
            out.print(_draft_table(report, shape))
            out.print(_width_table(report, shape))
    else:
        out.print(_server_table(report))
        for row in report.summary:
            if row.differing:
                out.print(f"{row.mode}, {row.category}: other text at {', '.join(row.differing)}")
