"""`dspine-bench compare`: two results of one workload, figure by figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dspine_bench.errors import BenchError
from dspine_bench.schema import (
    ConvertReport,
    DraftReport,
    DraftRow,
    EngineReport,
    Report,
    ServerReport,
)

WIDE_PARTS = ("verify", "context injection")  # parts with a row for each of several widths


@dataclass(frozen=True)
class Figure:
    """A figure of a result; `better` is the sign of a change for the better.

    `is_ratio`: of two things measured in turn, so that a slow machine leaves it alone.
    """

    what: str
    value: float | None
    better: int
    is_ratio: bool = True


@dataclass(frozen=True)
class Difference:
    """A figure of both results; None: not reported."""

    what: str
    first: float | None
    second: float | None
    better: int

    @property
    def change(self) -> float | None:
        """second / first - 1; None where one of them was not reported."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1

    def worse(self, threshold: float, *, either_way: bool) -> bool:
        """Past the threshold; a figure that is no longer reported always is."""
        if self.first is not None and self.second is None:
            return True
        if either_way and self.first is None and self.second is not None:
            return True
        if self.change is None:
            return False
        if either_way:
            return abs(self.change) > threshold
        return self.change * self.better < -threshold


def _server_figures(report: ServerReport) -> Iterator[Figure]:
    plain = {mode.name for mode in report.modes if mode.name == mode.baseline}
    for row in report.summary:
        if row.mode in plain:
            continue
        where = f"{row.mode}, {row.category}"
        yield Figure(f"{where}: ratio", row.ratio.median if row.ratio else None, 1)
        if report.workload == "replay":
            requests = row.request_ratio
            yield Figure(f"{where}: request ratio", requests.median if requests else None, 1)
        yield Figure(f"{where}: mean accepted length", row.mean_accepted_length, 1)


def _draft_figures(report: DraftReport) -> Iterator[Figure]:
    """Times; and ratios of what is one call each, as differences of graphs may be near nothing."""
    for row in report.summary:
        tail = f", {row.rows} rows" if row.part in WIDE_PARTS else ""
        yield Figure(
            f"{row.shape}, {row.family}, {row.part}{tail}: ms", row.ms.median, -1, is_ratio=False
        )
    for shape in report.shapes:
        found = {(r.family, r.part, r.rows): r for r in report.summary if r.shape == shape}
        for (family, part, rows), row in found.items():
            base: DraftRow | None
            if part == "draft" and family != "dflash":
                base, what = found.get(("dflash", part, rows)), f"{family} / dflash, draft"
            elif part == "verify" and rows > 1:
                base, what = found.get((family, part, 1)), f"verify, {rows} rows / 1 row"
            else:
                continue
            if base and base.ms.median:
                yield Figure(f"{shape}, {what}", row.ms.median / base.ms.median, -1)


def _convert_figures(report: ConvertReport) -> Iterator[Figure]:
    yield Figure("time / peer's time", report.summary.ratio.median, -1)
    yield Figure("memory", report.summary.peak_rss, -1, is_ratio=False)


def _engine_figures(report: EngineReport) -> Iterator[Figure]:
    yield Figure("engine / server, a round", report.summary.ratio.median, -1)


def figures(report: Report) -> Iterator[Figure]:
    """What is compared."""
    if isinstance(report, ServerReport):
        yield from _server_figures(report)
    elif isinstance(report, DraftReport):
        yield from _draft_figures(report)
    elif isinstance(report, ConvertReport):
        yield from _convert_figures(report)
    else:
        yield from _engine_figures(report)


def compare(first: Report, second: Report, *, ratios: bool = False) -> list[Difference]:
    """The figures that both have, or their ratios; BenchError where they have none in common."""
    if first.workload != second.workload:
        raise BenchError(f"{first.workload} and {second.workload} cannot be compared")
    one, two = (
        {f.what: f for f in figures(report) if f.is_ratio or not ratios}
        for report in (first, second)
    )
    shared = [what for what in one if what in two]
    if not shared:
        raise BenchError("the two results have no mode and category in common")
    return [Difference(w, one[w].value, two[w].value, one[w].better) for w in shared]


def conditions(first: Report, second: Report) -> list[str]:
    """What else differs between the two, a sentence each."""
    pairs: list[tuple[str, object, object]] = [
        ("cpu", first.hardware.cpu, second.hardware.cpu),
        ("devices", first.hardware.devices, second.hardware.devices),
        ("driver", first.hardware.driver, second.hardware.driver),
        ("pin", first.provenance.pin, second.provenance.pin),
        ("commit", first.provenance.commit, second.provenance.commit),
        ("native build", first.provenance.binaries, second.provenance.binaries),
        ("config", first.config, second.config),
    ]
    kinds = (ServerReport, EngineReport)
    if isinstance(first, kinds) and isinstance(second, kinds):
        hashes, others = ([m.sha256 for m in r.models] for r in (first, second))
        pairs.append(("model files", hashes, others))
    if isinstance(first, ServerReport) and isinstance(second, ServerReport):
        pairs.append(("prompts", first.files, second.files))
    return [f"{name} differs" for name, a, b in pairs if a != b] + _other_prompts(first, second)


def _left_out(report: Report) -> dict[str, set[str]]:
    rows = report.summary if isinstance(report, ServerReport) else []
    return {f"{r.mode}, {r.category}": {*r.differing, *r.unstable} for r in rows}


def _other_prompts(first: Report, second: Report) -> list[str]:
    """Rows that are not over the same prompts."""
    one, two = _left_out(first), _left_out(second)
    return [f"{w}: other prompts are left out" for w in one if w in two and one[w] != two[w]]
