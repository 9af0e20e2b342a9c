"""`dspine-bench compare`: two results of one workload, figure by figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dspine_bench.errors import BenchError
from dspine_bench.schema import DraftReport, Report, ServerReport


@dataclass(frozen=True)
class Difference:
    """A figure of both results; `better` is the sign of a change for the better.

    `change` is second / first - 1; None where one of them was not reported.
    """

    what: str
    first: float | None
    second: float | None
    better: int

    @property
    def change(self) -> float | None:
        """Relative change."""
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1

    def worse(self, threshold: float, *, either_way: bool) -> bool:
        """Past the threshold; a figure that is no longer reported always is."""
        if self.first is not None and self.second is None:
            return True
        if self.change is None:
            return False
        if either_way:
            return abs(self.change) > threshold
        return self.change * self.better < -threshold


def _server_figures(report: ServerReport) -> Iterator[tuple[str, float | None, int]]:
    plain = {mode.name for mode in report.modes if mode.name == mode.baseline}
    for row in report.summary:
        if row.mode in plain:
            continue
        where = f"{row.mode}, {row.category}"
        yield f"{where}: ratio", row.ratio.median if row.ratio else None, 1
        yield f"{where}: mean accepted length", row.mean_accepted_length, 1


def _draft_figures(report: DraftReport) -> Iterator[tuple[str, float | None, int]]:
    for row in report.summary:
        rows = f", {row.rows} rows" if row.part in ("verify", "context injection") else ""
        yield f"{row.shape}, {row.family}, {row.part}{rows}: ms", row.ms.median, -1


def figures(report: Report) -> dict[str, tuple[float | None, int]]:
    """What is compared, by name."""
    made = _draft_figures(report) if isinstance(report, DraftReport) else _server_figures(report)
    return {what: (value, better) for what, value, better in made}


def compare(first: Report, second: Report) -> list[Difference]:
    """The figures that both have; BenchError where they have none in common."""
    if first.workload != second.workload:
        raise BenchError(f"{first.workload} and {second.workload} cannot be compared")
    one, two = figures(first), figures(second)
    shared = [what for what in one if what in two]
    if not shared:
        raise BenchError("the two results have no mode and category in common")
    return [Difference(what, one[what][0], two[what][0], one[what][1]) for what in shared]


def conditions(first: Report, second: Report) -> list[str]:
    """What else differs between the two, a sentence each."""
    pairs: list[tuple[str, object, object]] = [
        ("cpu", first.hardware.cpu, second.hardware.cpu),
        ("devices", first.hardware.devices, second.hardware.devices),
        ("driver", first.hardware.driver, second.hardware.driver),
        ("pin", first.provenance.pin, second.provenance.pin),
        ("commit", first.provenance.commit, second.provenance.commit),
        ("config", first.config, second.config),
    ]
    if isinstance(first, ServerReport) and isinstance(second, ServerReport):
        hashes, others = ([m.sha256 for m in r.models] for r in (first, second))
        pairs.append(("model files", hashes, others))
        pairs.append(("prompts", first.files, second.files))
    return [f"{name} differs" for name, a, b in pairs if a != b] + _other_prompts(first, second)


def _left_out(report: Report) -> dict[str, set[str]]:
    rows = report.summary if isinstance(report, ServerReport) else []
    return {f"{r.mode}, {r.category}": {*r.differing, *r.unstable} for r in rows}


def _other_prompts(first: Report, second: Report) -> list[str]:
    """Rows that are not over the same prompts."""
    one, two = _left_out(first), _left_out(second)
    return [f"{w}: other prompts are left out" for w in one if w in two and one[w] != two[w]]
