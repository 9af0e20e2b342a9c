"""The JSON that a run writes: typed, versioned, and checked when it is written and read.

Terms: a round is one draft and its verification; `drafted` counts drafted tokens, `accepted` those
that survived; mean accepted length = (accepted + rounds) / rounds, so that plain decoding is 1.0;
acceptance rate = accepted / drafted. Times are milliseconds, sizes bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspine_bench.errors import BenchError

SCHEMA_VERSION = 1
ALL = "all"  # the category that has every prompt
AGAIN = "again"  # the folder of second runs, in that of the first
MIN_REPEATS = 5  # fewer are not published
ROUNDING = 1e-9  # of figures that are computed again, on another machine perhaps
LARGEST = 2**53  # whole numbers up to it are exact in every reader of JSON
CONTROL = r"\x00-\x1f\x7f-\x9f"  # characters that a terminal or a page would follow

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Signed = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Label = Annotated[str, Field(pattern=f"^[^{CONTROL}]+$")]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Strict(BaseModel):
    """No field more, none less, nothing converted, nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Provenance(Strict):
    """Who made this, with what.

    `dirty`: the checkout had changes that no commit has. `binaries`: SHA-256 of the native build,
    which may be of another commit than the checkout, or of the program that --server named; None
    of servers at a URL.
    """

    command: list[str]
    time: str  # ISO 8601, UTC
    version: str
    commit: str | None
    dirty: bool | None
    pin: str  # llama.cpp's commit
    build: str  # what the server or the library calls itself
    binaries: str | None = None
    environment: dict[str, str] | None = None  # of llama.cpp and this package; None: not recorded


class Device(Strict):
    """What llama.cpp computes on."""

    name: str
    backend: str
    description: str
    total_bytes: Count


class Hardware(Strict):
    """The machine. `limits` is what nvidia-smi says of clocks and power, where there is one."""

    system: str
    machine: str
    cpu: str
    cores: Count
    memory_bytes: Count
    devices: list[Device]
    driver: str | None
    limits: str | None


class ModelFile(Strict):
    """A GGUF that took part; `type` is the commonest type of its large tensors."""

    role: Literal["target", "drafter"]
    name: str
    bytes: Count
    sha256: str
    architecture: str
    type: str


class WorkloadFile(Strict):
    """A file with prompts."""

    name: str
    sha256: str


class Config(Strict):
    """What was asked for, the same for all modes."""

    repeats: Positive
    warmup: Count  # requests before the first counted one, to each server, dropped
    quick: bool
    max_tokens: Positive
    n_ctx: Count | None
    parallel: Positive
    interleave: Literal["request", "repeat"]
    extra: list[str]  # further words of every server's command


class Mode(Strict):
    """One way to decode; `baseline` names the mode that it is compared with, itself if plain.

    `n_draft` is None where the server chose the depth, 0 without a drafter. `model` is the file
    that a server at a URL says it has loaded, None where it does not say; `build` is what the
    mode's server calls itself, None in older files. `slots` and `slot_context` are how many
    requests it works on at a time and the tokens that each may fill, None where it does not say.
    """

    name: str
    baseline: str
    drafter: str | None
    n_draft: Count | None
    cache_type: str | None
    temperature: Time
    url: str | None
    command: list[str]
    model: str | None = None
    build: str | None = None
    slots: Count | None = None
    slot_context: Count | None = None


class Sample(Strict):
    """One request, as measured.

    `digest` is the SHA-256 of the ids, of the text where the server gives no ids. `accepted_at`
    counts the rounds that accepted the first, second, … drafted token, where the server tells;
    below 0 where it began to count again.
    `generated_ms` is the server's time from the first token to the last; `wall_ms` is the
    client's for the whole request.
    """

    mode: str
    repeat: Count
    prompt: Label
    category: Label
    prompt_tokens: Count
    cached: Count
    tokens: Count
    rounds: Count
    drafted: Count
    accepted: Count
    accepted_at: list[Signed] | None
    prompt_ms: Time
    generated_ms: Time
    first_token_ms: Time | None
    wall_ms: Time
    stop: str
    digest: str
    compared: Literal["ids", "text"]


class Replay(Strict):
    """A whole replay by one mode: `tokens` of all answers in `wall_ms`."""

    mode: str
    repeat: Count
    requests: Count
    tokens: Count
    wall_ms: Time


class Spread(Strict):
    """A median with the smallest and the largest repeat."""

    median: Number
    min: Number
    max: Number

    @model_validator(mode="after")
    def _in_order(self) -> Spread:
        if not self.min <= self.median <= self.max:
            raise ValueError(f"expected {self.min} <= {self.median} <= {self.max}")
        return self


class Row(Strict):
    """A mode and a category, in totals.

    Attributes:
        prompts: prompts of the category.
        differing: those whose text is not the baseline's.
        unstable: those whose text differs between repeats of the baseline itself, so that there
            is nothing to compare with. All figures are over the prompts that remain.
        checked: whether texts were compared; not at a temperature above 0.
        mean_accepted_length: None where no prompt may be counted.
        speed: generated tokens a second; None where no prompt may be counted, and for a replay
            where any may not: its wall time is of all of them.
        ratio: `speed` over that of the baseline, on the same prompts.
        request_ratio: of a replay: the baseline's time of single requests over the mode's, from
            sending to the last token, over the requests that count; each is paired with the same
            request, whose text is the same.
        latency_ms, first_token_ms: of single requests.
        accepted_by_position: rounds that accepted the n-th drafted token, over all rounds.
    """

    mode: str
    category: str
    prompts: Count
    differing: list[str]
    unstable: list[str]
    checked: bool
    tokens: Count
    rounds: Count
    drafted: Count
    accepted: Count
    mean_accepted_length: Length | None
    acceptance_rate: Share
    accepted_by_position: list[Share] | None
    speed: Spread | None
    ratio: Spread | None
    latency_ms: Spread | None
    first_token_ms: Spread | None
    request_ratio: Spread | None = None

    @property
    def counted(self) -> int:
        """Prompts that the figures are over."""
        return self.prompts - len(self.differing) - len(self.unstable)


class Head(Strict):
    """What every report begins with."""

    schema_version: Literal[1]
    provenance: Provenance
    hardware: Hardware


class ServerReport(Head):
    """`tasks`, `depth` and `replay`: requests to servers."""

    workload: Literal["tasks", "depth", "replay"]
    files: list[WorkloadFile]
    models: list[ModelFile]
    config: Config
    modes: Annotated[list[Mode], Field(min_length=1)]
    samples: Annotated[list[Sample], Field(min_length=1)]
    replays: list[Replay]
    summary: list[Row]

    @model_validator(mode="after")
    def _names_agree(self) -> ServerReport:
        modes = {mode.name for mode in self.modes}
        if len(modes) < len(self.modes):
            raise ValueError("two modes have one name, expected names that differ")
        used = {s.mode for s in self.samples} | {r.mode for r in self.summary}
        used |= {r.mode for r in self.replays} | {m.baseline for m in self.modes}
        if missing := used - modes:
            raise ValueError(f"modes {sorted(missing)} are used and not described")
        baselines = {m.baseline for m in self.modes}
        if drafting := {s.mode for s in self.samples if s.drafted and s.mode in baselines}:
            raise ValueError(f"baselines {sorted(drafting)} have drafted tokens")
        odd = {s.category for s in self.samples if not re.fullmatch("[0-9]{1,15}", s.category)}
        if self.workload == "depth" and odd:
            raise ValueError(f"depth has the categories {sorted(odd)}, expected tokens of context")
        return self

    @model_validator(mode="after")
    def _depths_have_all_tokens(self) -> ServerReport:
        """Answers of other lengths would make a curve of more than the depth."""
        for sample in self.samples if self.workload == "depth" else ():
            if sample.tokens != self.config.max_tokens:
                raise ValueError(
                    f"{sample.prompt} of {sample.mode} has {sample.tokens} tokens, expected "
                    f"{self.config.max_tokens} (config.max_tokens)"
                )
        return self

    @model_validator(mode="after")
    def _is_whole(self) -> ServerReport:
        """Every mode has every prompt once in each of `config.repeats`."""
        expected = self.config.repeats
        found: dict[tuple[str, str], list[int]] = {}
        for sample in self.samples:
            found.setdefault((sample.mode, sample.prompt), []).append(sample.repeat)
        for mode, prompt in itertools.product(self.modes, dict.fromkeys(p for _, p in found)):
            repeats = sorted(found.get((mode.name, prompt), []))
            # the length first: what a file calls its repeats may be any number
            if len(repeats) != expected or repeats != list(range(expected)):
                raise ValueError(
                    f"{mode.name} has the repeats {repeats!s:.60} of {prompt}, "
                    f"expected {expected} from 0 on (config.repeats)"
                )
        return self

    @model_validator(mode="after")
    def _replays_are_of_samples(self) -> ServerReport:
        """A replay has the requests and the tokens of its samples; each is there once."""
        left: dict[tuple[str, int], tuple[int, int]] = {}
        for sample in self.samples if self.workload == "replay" else ():
            requests, tokens = left.get((sample.mode, sample.repeat), (0, 0))
            left[sample.mode, sample.repeat] = (requests + 1, tokens + sample.tokens)
        for one in self.replays:
            expected = left.pop((one.mode, one.repeat), "none")
            if (one.requests, one.tokens) != expected:
                raise ValueError(
                    f"replay {one.repeat} of {one.mode} has {one.requests} requests and "
                    f"{one.tokens} tokens, the samples give {expected}"
                )
        for mode, repeat in left:
            raise ValueError(f"replay {repeat} of {mode} is missing, expected one for its samples")
        return self


class DraftCase(Strict):
    """A family's drafter of one size, random weights.

    `settings` has the sizes beyond the backbone's, which all families share.
    """

    name: str
    family: Literal["dspine", "dflash", "dflash2", "dspark"]
    shape: str
    type: str
    bytes: Count
    settings: dict[str, int]


class DraftSample(Strict):
    """One timed call."""

    case: str
    call: str
    rows: Positive
    repeat: Count
    ms: Time


class DraftRow(Strict):
    """The cost of one part; `how` says which calls it was made of."""

    shape: str
    family: str
    part: str
    rows: Positive
    ms: Spread
    how: str


class DraftReport(Head):
    """`draft`: the parts of one round."""

    workload: Literal["draft"]
    config: dict[str, int | str | bool]
    shapes: dict[str, dict[str, int]]
    cases: list[DraftCase]
    samples: Annotated[list[DraftSample], Field(min_length=1)]
    summary: list[DraftRow]


class ConvertSample(Strict):
    """One process of a conversion: `step` is the file it made, "all" for one that made them all."""

    side: Literal["ours", "peer"]
    step: str
    repeat: Count
    seconds: Time
    peak_rss: Count


class ConvertSummary(Strict):
    """`ratio` is our time over the peer's; `peak_rss` ours; errors are against published sizes."""

    ratio: Spread
    peak_rss: Count
    size_error: dict[str, Number]


class ConvertReport(Head):
    """`convert`: a checkpoint to files of several types."""

    workload: Literal["convert"]
    config: dict[str, int]
    sizes: dict[str, Count]
    samples: Annotated[list[ConvertSample], Field(min_length=1)]
    summary: ConvertSummary


class EngineSample(Strict):
    """One prompt by the engine and by llama-server; milliseconds of a round."""

    repeat: Count
    prompt: Count
    rounds: Count
    engine_ms: Time
    server_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    same_ids: bool
    same_rounds: bool

    @property
    def ratio(self) -> float:
        """Engine over server."""
        return self.engine_ms / self.server_ms


class EngineSummary(Strict):
    """`ratio` is engine over server, of neighbours in time; `quartiles` of all single ratios."""

    ratio: Spread
    quartiles: list[Number]
    engine_ms: Time
    server_ms: Time
    same_ids: bool
    same_rounds: bool


class EngineReport(Head):
    """`engine`: the same rounds in this process and in llama-server."""

    workload: Literal["engine"]
    models: list[ModelFile]
    config: dict[str, int]
    samples: Annotated[list[EngineSample], Field(min_length=1)]
    summary: EngineSummary


Report = ServerReport | DraftReport | ConvertReport | EngineReport
KINDS: dict[str, type[Report]] = {
    "tasks": ServerReport,
    "depth": ServerReport,
    "replay": ServerReport,
    "draft": DraftReport,
    "convert": ConvertReport,
    "engine": EngineReport,
}


def _text(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {first['msg']}{more}"


def _differences(one: Any, two: Any, where: str) -> Iterator[str]:
    """What `one` has otherwise than `two`, a line each; numbers up to rounding."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        for key in one:
            yield from _differences(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from _differences(a, b, f"{where}.{index}")
    elif isinstance(one, float) and isinstance(two, float):
        if not math.isclose(one, two, rel_tol=ROUNDING, abs_tol=ROUNDING):
            yield f"{where} is {one:g}, the samples give {two:g}"
    elif isinstance(one, list) and isinstance(two, list):
        yield f"{where} has {len(one)} entries, the samples give {len(two)}"
    elif one != two:
        yield f"{where} is {one!r}, the samples give {two!r}"


def _summary_of(report: Report) -> Strict | Sequence[Strict]:
    """The summary that the samples give."""
    # all of these import this module, and most of them all that makes models
    if isinstance(report, ServerReport):
        from dspine_bench.summary import summarize

        return summarize(report.modes, report.samples, report.replays)
    if isinstance(report, ConvertReport):
        from dspine_bench.convert import summarize as summarize_convert

        return summarize_convert(report.samples, report.sizes)
    if isinstance(report, EngineReport):
        from dspine_bench.engine import summarize as summarize_engine

        return summarize_engine(report.samples)
    from dspine_bench.draft import summary_of

    return summary_of(report)


def _plain(summary: Strict | Sequence[Strict]) -> Any:
    if isinstance(summary, Strict):
        return summary.model_dump(mode="json")
    return [row.model_dump(mode="json") for row in summary]


def _recomputed(report: Report, name: str) -> Report:
    """The report; BenchError where its summary is not that of its samples."""
    try:
        made = _plain(_summary_of(report))
    except ValidationError as error:
        raise BenchError(f"{name}: samples give no summary: {_text(error)}") from None
    except (ArithmeticError, LookupError, StopIteration, ValueError) as error:
        raise BenchError(f"{name}: samples give no summary: {error!r}") from None
    for found in _differences(_plain(report.summary), made, "summary"):
        raise BenchError(f"{name}: {found}")
    return report


def parse(text: str, name: str) -> Report:
    """A report from JSON; BenchError names the file and the field that is wrong.

    The summary is made again from the samples and must be the same.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BenchError(f"{name}: no JSON: {error}") from None
    except RecursionError:
        raise BenchError(f"{name}: JSON of too many levels, expected a result") from None
    if not isinstance(document, dict) or "schema_version" not in document:
        raise BenchError(f"{name}: no result of dspine-bench: schema_version is missing")
    found = document["schema_version"]
    if type(found) is not int or found != SCHEMA_VERSION:  # True and 1.0 equal 1
        raise BenchError(f"{name}: schema_version is {found!r:.60}, expected {SCHEMA_VERSION}")
    workload = document.get("workload")
    if not isinstance(workload, str) or workload not in KINDS:
        kinds = ", ".join(KINDS)
        raise BenchError(f"{name}: workload is {workload!r:.60}, expected one of {kinds}")
    try:
        report: Report = KINDS[workload].model_validate_json(text)
    except ValidationError as error:
        raise BenchError(f"{name}: {_text(error)}") from None
    return _recomputed(report, name)


def load(path: Path) -> Report:
    """Read a result file; BenchError where it cannot be read, or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BenchError(f"{path}: no UTF-8 text at byte {error.start}, expected JSON") from None
    return parse(text, str(path))


def save(report: Report, path: Path) -> None:
    """Check, then replace the file in one step."""
    text = json.dumps(report.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
    parse(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
