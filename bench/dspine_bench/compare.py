"""`dspine-bench compare`: two results of one workload, figure by figure.

What makes another text or another ratio is refused: two results of it have nothing to say about
each other. Programs, drafters, caches, flags and machines may differ, as they are what is compared;
each of them that does is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_bench.errors import BenchError
from dspine_bench.schema import (
    ALL,
    ConvertReport,
    DraftReport,
    DraftRow,
    EngineReport,
    Mode,
    ModelFile,
    Report,
    Row,
    Sample,
    ServerReport,
    WorkloadFile,
)
from dspine_bench.summary import Verdict
from dspine_bench.summary import row as row_of
from dspine_bench.urls import far_servers

WIDE_PARTS = ("verify", "context injection")  # parts with a row for each of several widths
ACCEPTED = "mean accepted length"
SHORT = 12  # characters of a hash that is shown
NAMES = ("first", "second")  # of two results that have no files' names
# flags that say which files and where, which is in other conditions or in none
PLACES = ("-m", "-md", "--host", "--port")

Pair = tuple[str, str | None, str | None]  # a condition, in the first and the second; None: unknown


@dataclass(frozen=True)
class Figure:
    """A figure of a row of a result; `better` is the sign of a change for the better.

    0: it is shown, and neither better nor worse. `is_ratio`: of two things measured in turn, so
    that a slow machine leaves it alone.
    """

    row: str
    name: str
    value: float | None
    better: int
    is_ratio: bool = True

    @property
    def what(self) -> str:
        """Row and name, of which one may be empty."""
        return ": ".join(filter(None, (self.row, self.name)))


@dataclass(frozen=True)
class Difference:
    """A figure of both results; None: not reported."""

    what: str
    first: float | None
    second: float | None
    better: int

    @property
    def change(self) -> float | None:
        """second / first - 1; None where one of them was not reported, or is not above 0."""
        if self.first is None or self.second is None or min(self.first, self.second) <= 0:
            return None
        return self.second / self.first - 1

    def worse(self, threshold: float, *, either_way: bool) -> bool:
        """Past the threshold; a figure that is no longer reported always is."""
        if not self.better:
            return False
        if self.first is not None and self.second is None:
            return True
        if either_way and self.first is None and self.second is not None:
            return True
        if self.change is None:
            return False
        if either_way:
            return abs(self.change) > threshold
        return self.change * self.better < -threshold


def _row_name(row: Row) -> str:
    return f"{row.mode}, {row.category}"


def _times(row: Row) -> Iterator[Figure]:
    """What single requests of a replay take, milliseconds."""
    spreads = (("latency, ms", row.latency_ms), ("first token, ms", row.first_token_ms))
    for name, found in spreads:
        yield Figure(_row_name(row), name, found.median if found else None, -1, is_ratio=False)


def _server_figures(report: ServerReport) -> Iterator[Figure]:
    """Speeds of all modes; what is against the baseline, of those that draft."""
    plain = {mode.name for mode in report.modes if mode.name == mode.baseline}
    for row in report.summary:
        where, speed = _row_name(row), row.speed.median if row.speed else None
        yield Figure(where, "tokens/s", speed, 1, is_ratio=False)
        if report.workload == "replay":
            yield from _times(row)
        if row.mode in plain:
            continue
        yield Figure(where, "ratio", row.ratio.median if row.ratio else None, 1)
        if report.workload == "replay":
            requests = row.request_ratio
            yield Figure(where, "request ratio", requests.median if requests else None, 1)
        yield Figure(where, ACCEPTED, row.mean_accepted_length, 1)


def _draft_figures(report: DraftReport) -> Iterator[Figure]:
    """Times; and ratios of what is one call each, as differences of graphs may be near nothing."""
    for row in report.summary:
        tail = f", {row.rows} rows" if row.part in WIDE_PARTS else ""
        where = f"{row.shape}, {row.family}, {row.part}{tail}"
        better = -1 if row.ms.min > 0 else 0  # a part that is not told apart from nothing
        yield Figure(where, "ms", row.ms.median, better, is_ratio=False)
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
                yield Figure(f"{shape}, {what}", "", row.ms.median / base.ms.median, -1)


def _convert_figures(report: ConvertReport) -> Iterator[Figure]:
    yield Figure("", "time / peer's time", report.summary.ratio.median, -1)
    yield Figure("", "memory", report.summary.peak_rss, -1, is_ratio=False)


def _engine_figures(report: EngineReport) -> Iterator[Figure]:
    yield Figure("", "engine / server, a round", report.summary.ratio.median, -1)


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


def only_in(report: Report, other: Report) -> list[str]:
    """The rows of a result that the other lacks."""
    there = {figure.row for figure in figures(other)}
    return list(dict.fromkeys(f.row for f in figures(report) if f.row not in there))


def compare(first: Report, second: Report, *, ratios: bool = False) -> list[Difference]:
    """The figures that both have, or their ratios alone.

    Speeds and times of two machines say nothing about a program: there it is ratios too. Rows
    over other prompts are left out. BenchError for two workloads, and for results without a common
    row that has a ratio.
    """
    if first.workload != second.workload:
        raise BenchError(f"{first.workload} and {second.workload} cannot be compared")
    ratios = ratios or _other_machine(first, second)
    first, second = _over_common_prompts(first, second)
    apart = {_row_name(row) for row, _, _ in _apart(first, second)}
    one, two = (
        {f.what: f for f in figures(report) if (f.is_ratio or not ratios) and f.row not in apart}
        for report in (first, second)
    )
    shared = [what for what in one if what in two]
    # the baseline's speed alone is no comparison of anything that drafts
    if not any(one[what].is_ratio for what in shared):
        raise BenchError(f"the two results have no mode and category in common{_have(one, two)}")
    better = {what: one[what].better if two[what].better else 0 for what in shared}
    return [Difference(w, one[w].value, two[w].value, better[w]) for w in shared]


def _over_common_prompts(first: Report, second: Report) -> tuple[Report, Report]:
    """Both with rows over the prompts that count in both.

    A slow prompt that is left out of one of them would be a gain there. A row that has no such
    prompt stays as it is, and so does a replay's throughput, which is of all requests or of none.
    """
    if not isinstance(first, ServerReport) or not isinstance(second, ServerReport):
        return first, second
    one, two = _left_out(first), _left_out(second)
    either = {name: one[name] | two[name] for name in one.keys() & two.keys()}
    return _without(first, either), _without(second, either)


def _without(report: ServerReport, left_out: Mapping[str, set[str]]) -> ServerReport:
    own, rows = _left_out(report), []
    for found in report.summary:
        name = _row_name(found)
        out = left_out.get(name, set())
        again = out > own[name] and not _prompts(report, found) <= out
        rows.append(_row_without(report, found, out) if again else found)
    return report.model_copy(update={"summary": rows})


def _row_without(report: ServerReport, found: Row, prompts: set[str]) -> Row:
    mode = next(mode for mode in report.modes if mode.name == found.mode)
    samples: dict[str, list[Sample]] = {mode.name: [], mode.baseline: []}
    for sample in report.samples:
        if sample.mode in samples and found.category in (ALL, sample.category):
            samples[sample.mode].append(sample)
    verdict = Verdict(frozenset(prompts), frozenset(), found.checked)
    made = row_of(mode, found.category, samples, verdict, report.replays)
    if report.replays:
        made = made.model_copy(update={"speed": found.speed, "ratio": found.ratio})
    return made


def newly_differing(first: Report, second: Report) -> list[str]:
    """ "mode: prompt" for each text that differs from plain decoding in the second alone."""
    if not isinstance(first, ServerReport) or not isinstance(second, ServerReport):
        return []
    one, two = (
        [f"{r.mode}: {prompt}" for r in report.summary for prompt in r.differing]
        for report in (first, second)
    )
    return [text for text in dict.fromkeys(two) if text not in one]


def lost(first: Report, second: Report, *, either_way: bool) -> int:
    """Rows and equal texts that the second no longer has; or either of them, `either_way`."""
    ways = ((first, second), (second, first)) if either_way else ((first, second),)
    return sum(len(only_in(a, b)) + len(newly_differing(a, b)) for a, b in ways)


def _have(*sides: dict[str, Figure]) -> str:
    """ ": ... and ..." with some rows of both sides."""
    rows = [list(dict.fromkeys(f.row for f in side.values() if f.is_ratio))[:3] for side in sides]
    return ": " + " and ".join("; ".join(some) or "none" for some in rows)


def aligned(first: Report, second: Report) -> Report:
    """The second with its drafter's modes named as in the first, where each has one drafter.

    A mode is called as its drafter's file is: two drafters would have no mode in common.
    """
    if not isinstance(first, ServerReport) or not isinstance(second, ServerReport):
        return second
    mine, other = _drafter(first), _drafter(second)
    if mine is None or other is None or mine == other:
        return second
    known = {mode.name for mode in first.modes}
    theirs = [m.name for m in second.modes if m.drafter and m.name.startswith(other)]
    names = {name: mine + name.removeprefix(other) for name in theirs}
    names = {theirs: ours for theirs, ours in names.items() if ours in known}

    def renamed(rows: Iterable[Any]) -> list[Any]:
        return [row.model_copy(update={"mode": names.get(row.mode, row.mode)}) for row in rows]

    modes = [m.model_copy(update={"name": names.get(m.name, m.name)}) for m in second.modes]
    update: dict[str, list[Any]] = {"modes": modes}
    update |= {name: renamed(getattr(second, name)) for name in ("samples", "replays", "summary")}
    return second.model_copy(update=update)


def _drafter(report: ServerReport) -> str | None:
    """What the modes of the only drafter begin with."""
    found = {Path(mode.drafter).stem for mode in report.modes if mode.drafter}
    return found.pop() if len(found) == 1 else None


def refuse(first: Report, second: Report, names: Sequence[str] = NAMES) -> None:
    """BenchError where a text or the meaning of a ratio differs; `names` of the two files.

    It says what each of them has. What one of them does not know is no reason.
    """
    who = f"{names[0]} and {names[1]}"
    if first.workload != second.workload:
        raise BenchError(f"{who}: {first.workload} and {second.workload} cannot be compared")
    known = [pair for pair in _fixed(first, second) if None not in pair]
    asked = [found for found in _apart(first, second) if found[0].category != ALL]
    for row, a, b in asked[:1]:  # the others are mostly so for the same reason
        same = f"prompts of {_row_name(row)} ({len(a & b)} in both)"
        known.append((same, f"{len(a)}", f"{len(b)}"))
    if lines := _lines(known, names):
        raise BenchError(f"{who} cannot be compared: {'; '.join(lines)}")


def conditions(first: Report, second: Report, names: Sequence[str] = NAMES) -> list[str]:
    """What else differs between the two, a sentence each; `names` of the two files."""
    lines = _lines([*_fixed(first, second), *_free(first, second)], names)
    if _other_machine(first, second):
        known = far_servers(first) == far_servers(second)
        which = "other machines" if known else "the servers' machines are not known to be the same"
        lines.append(f"{which}: only ratios are compared, no speeds and no times")
    for name, one, two in ((names[0], first, second), (names[1], second, first)):
        if rows := only_in(one, two):
            lines.append(f"only in {name}: {'; '.join(rows)}")
        if texts := newly_differing(two, one):
            lines.append(f"differs from plain decoding only in {name}: {'; '.join(texts)}")
    for row, _, _ in _apart(first, second):
        lines.append(f"{_row_name(row)}: left out, it is over other prompts")
    return lines + _other_prompts(first, second)


def _lines(pairs: Iterable[Pair], names: Sequence[str]) -> list[str]:
    """Those that differ, each once: modes mostly share what they differ in."""
    found = (
        f"{what}: {a or 'not known'} in {names[0]}, {b or 'not known'} in {names[1]}"
        for what, a, b in pairs
        if a != b
    )
    return list(dict.fromkeys(found))


def _fixed(first: Report, second: Report) -> Iterator[Pair]:
    """What decides about texts and the meaning of a ratio."""
    if not isinstance(first, DraftReport | ConvertReport):
        yield _files("target", *(_models(report, "target") for report in (first, second)))
    if isinstance(first, ServerReport) and isinstance(second, ServerReport):
        yield _files("prompts", first.files, second.files)
        for name in ("max_tokens", "parallel"):
            yield name, f"{getattr(first.config, name)}", f"{getattr(second.config, name)}"
        for a, b in _matched(first, second):
            yield "temperature", f"{a.temperature:g}", f"{b.temperature:g}"
            yield f"n_draft of {a.name}", _depth(a), _depth(b)
            yield "model at the URL", a.model, b.model


def _free(first: Report, second: Report) -> Iterator[Pair]:
    """What may be the purpose of a comparison."""
    yield from _machines(first, second)
    yield from _between(_made_by(first), _made_by(second))
    yield _files("drafter", *(_models(report, "drafter") for report in (first, second)))
    yield from _between(_settings(first), _settings(second))
    if isinstance(first, ServerReport) and isinstance(second, ServerReport):
        matched = _matched(first, second)
        for a, b in matched:
            yield "cache type", a.cache_type, b.cache_type
            yield f"URL of {a.name}", a.url, b.url
            builds = (a.build, b.build)  # the baseline's are in `_made_by`
            if None not in builds and builds != (first.provenance.build, second.provenance.build):
                yield f"build of {a.name}", *builds
        yield _flags(matched)
    elif isinstance(first, DraftReport) and isinstance(second, DraftReport):
        for shape in first.shapes.keys() & second.shapes.keys():
            yield f"shape {shape}", f"{first.shapes[shape]}", f"{second.shapes[shape]}"


def _between(one: Mapping[str, str | None], two: Mapping[str, str | None]) -> Iterator[Pair]:
    for name in dict.fromkeys((*one, *two)):
        yield name, one.get(name), two.get(name)


def _gpus(report: Report) -> list[str]:
    """What else than the CPU is computed on; a CPU's memory is not the same after every start."""
    others = [d for d in report.hardware.devices if d.backend != "CPU"]
    return [f"{d.backend} {d.description}, {d.total_bytes >> 20} MiB" for d in others]


def _is_elsewhere(report: Report) -> bool:
    """Whether no server is on the machine that `hardware` is of."""
    far = far_servers(report)
    return bool(far) and all(url is not None for _, url in far)


def _other_machine(first: Report, second: Report) -> bool:
    if far_servers(first) != far_servers(second):
        return True
    if _is_elsewhere(first):  # one server, whoever asked it
        return False
    a, b = first.hardware, second.hardware
    if (a.cpu, a.cores) != (b.cpu, b.cores):
        return True
    one, two = _gpus(first), _gpus(second)
    if one and two:
        return one != two
    # a build without its GPU backend lists none and is slow: the driver is there all the same
    return one != two and a.driver != b.driver


def _machines(first: Report, second: Report) -> Iterator[Pair]:
    """A client's machine is named so, and says nothing of a server's elsewhere."""
    away = [_is_elsewhere(report) for report in (first, second)]
    for name, one, two in _between(_machine(first), _machine(second)):
        if all(away):
            yield f"client's {name}", one, two
        else:
            yield name, None if away[0] else one, None if away[1] else two


def _machine(report: Report) -> dict[str, str | None]:
    machine = report.hardware
    return {
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "GPUs": "; ".join(_gpus(report)) or "none",
        "system": machine.system,
        "driver": machine.driver,
        "limits": machine.limits,
    }


def _made_by(report: Report) -> dict[str, str | None]:
    made = report.provenance
    changes = " with changes" if made.dirty else ""
    variables = sorted((made.environment or {}).items())
    environment = " ".join(f"{name}={value}" for name, value in variables) or "none"
    return {
        "version": made.version,
        "commit": f"{made.commit[:SHORT]}{changes}" if made.commit else None,
        "llama.cpp": made.pin,
        "build": made.build,
        "native build": made.binaries and made.binaries[:SHORT],
        "environment": None if made.environment is None else environment,
    }


def _settings(report: Report) -> dict[str, str | None]:
    """What was asked for; context and further words of servers are among their flags."""
    if not isinstance(report, ServerReport):
        return {name: str(value) for name, value in report.config.items()}
    names = ("repeats", "warmup", "quick", "interleave")
    return {name: str(getattr(report.config, name)) for name in names}


def _models(report: Report, role: str) -> list[ModelFile]:
    if isinstance(report, ServerReport | EngineReport):
        return [model for model in report.models if model.role == role]
    return []


def _files(
    what: str,
    one: Sequence[ModelFile | WorkloadFile],
    two: Sequence[ModelFile | WorkloadFile],
) -> Pair:
    """By their hashes, as a name may be of another file."""
    a, b = (", ".join(f"{f.name} {f.sha256[:SHORT]}" for f in some) or None for some in (one, two))
    same = [f.sha256 for f in one] == [f.sha256 for f in two]
    return what, a, a if same else b


def _matched(first: ServerReport, second: ServerReport) -> list[tuple[Mode, Mode]]:
    """Modes of one name."""
    there = {mode.name: mode for mode in second.modes}
    return [(mode, there[mode.name]) for mode in first.modes if mode.name in there]


def _depth(mode: Mode) -> str:
    return "the drafter's own" if mode.n_draft is None else str(mode.n_draft)


def _flags(modes: Sequence[tuple[Mode, Mode]]) -> Pair:
    """Flags of the servers' commands that the same mode of the other result lacks."""
    here: dict[str, None] = {}
    there: dict[str, None] = {}
    for a, b in modes:
        if a.command and b.command:  # of a server at a URL nothing is known
            one, two = _phrases(a.command), _phrases(b.command)
            here |= dict.fromkeys(flag for flag in one if flag not in two)
            there |= dict.fromkeys(flag for flag in two if flag not in one)
    return "server flags", " ".join(here) or "none", " ".join(there) or "none"


def _phrases(command: Sequence[str]) -> list[str]:
    """The flags of a command, each with its values; without files and ports."""
    found: list[list[str]] = []
    for word in command[1:]:
        if not found or re.match(r"-+[^\W\d]", word):  # "-1" is a value
            found.append([])
        found[-1].append(word)
    return [" ".join(words) for words in found if words[0] not in PLACES]


def _prompts(report: ServerReport, row: Row) -> set[str]:
    return {
        s.prompt for s in report.samples if s.mode == row.mode and row.category in (ALL, s.category)
    }


def _apart(first: Report, second: Report) -> list[tuple[Row, set[str], set[str]]]:
    """Rows of both that were not asked the same, with their prompts."""
    if not isinstance(first, ServerReport) or not isinstance(second, ServerReport):
        return []
    there = {_row_name(row) for row in second.summary}
    shared = [row for row in first.summary if _row_name(row) in there]
    both = [(row, _prompts(first, row), _prompts(second, row)) for row in shared]
    return [(row, one, two) for row, one, two in both if one != two]


def _left_out(report: Report) -> dict[str, set[str]]:
    rows = report.summary if isinstance(report, ServerReport) else []
    return {_row_name(row): {*row.differing, *row.unstable} for row in rows}


def _other_prompts(first: Report, second: Report) -> list[str]:
    """Rows that are not over the same prompts."""
    one, two = _left_out(first), _left_out(second)
    return [
        f"{where}: compared without {', '.join(sorted(one[where] | two[where]))}"
        for where in one
        if where in two and one[where] != two[where]
    ]
