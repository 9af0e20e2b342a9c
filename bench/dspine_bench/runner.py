"""Runs a workload in all modes, interleaved, and keeps every sample.

With `request`, all servers run side by side and every prompt goes to each of them in turn: what
disturbs the machine disturbs all modes alike. Where they do not fit together, `repeat` starts one
server at a time and goes through the modes once for every repeat.

Every repeat has servers of its own, but for those at a URL. Where a process's memory lies is drawn
once, at its start, and moves its speed by up to a tenth: repeats on one server would agree with
each other, and not with the next run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from dspine import DspineError
from dspine._client import Requests
from dspine._server import Server

from dspine_bench.endpoints import REQUEST_TIMEOUT_S, Endpoint, Remote
from dspine_bench.errors import BenchError
from dspine_bench.modes import ModeSpec
from dspine_bench.prompts import Conversation
from dspine_bench.provenance import public_url, without_folders, without_secrets
from dspine_bench.schema import Mode, Replay, Sample, WorkloadFile

Interleave = Literal["request", "repeat"]
WARMUP_TOKENS = 16
WARMUP = Conversation("warm-up", "", [{"role": "user", "content": "Count from one to twenty."}])
# Copies of the weights that may stand side by side, as a share of the free memory.
ROOM = 0.7


@dataclass(frozen=True)
class Settings:
    """What all modes have in common; see schema.Config.

    `executable` is another llama-server than the package's; `flash_attn` as llama-server takes it.
    """

    repeats: int = 5
    warmup: int = 1
    max_tokens: int = 1024
    n_ctx: int = 4096
    parallel: int = 1
    quick: bool = False
    interleave: Interleave = "request"
    extra: tuple[str, ...] = ()
    flash_attn: str = "on"
    executable: Path | None = None
    api_key: str | None = None


@dataclass
class Result:
    """Samples as they came, and what the servers said of themselves."""

    samples: list[Sample] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)
    served: dict[str, str | None] = field(default_factory=dict)
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    build: str = "unknown"

    def first(self, repeats: int) -> Result:
        """The samples of the first `repeats` alone."""
        return replace(
            self,
            samples=[sample for sample in self.samples if sample.repeat < repeats],
            replays=[one for one in self.replays if one.repeat < repeats],
        )


class Unit(Protocol):
    """What is measured at once: a prompt, or a whole replay."""

    def run(self, endpoint: Endpoint, mode: ModeSpec, repeat: int, result: Result) -> None:
        """Measure, and add to the result."""


class Workload(Protocol):
    """A kind of work."""

    files: list[WorkloadFile]

    @property
    def name(self) -> Literal["tasks", "depth", "replay"]:
        """What it is called in the report."""

    def prepare(self, endpoint: Endpoint) -> list[Unit]:
        """Make the units, with the template and the vocabulary of a server."""


Progress = Callable[[int, int, str], None]  # done, of how many, what


@contextlib.contextmanager
def open_endpoint(target: Path | None, mode: ModeSpec, settings: Settings) -> Iterator[Endpoint]:
    """Start the mode's server, or connect to the one at its URL; the command is in `.server`."""
    if mode.url is not None:
        with Remote(mode.url, settings.api_key) as server:
            with _explained(mode):
                endpoint = Endpoint(server)
            yield endpoint
        return
    if target is None:
        raise BenchError("a target is needed, or --url and --url-baseline")
    with Server(
        target,
        mode.drafter,
        n_ctx=settings.n_ctx,
        n_draft=mode.n_draft if mode.drafter else None,
        n_parallel=settings.parallel,
        cache_type=mode.cache_type,
        flash_attn=settings.flash_attn,
        extra=(*settings.extra, "--metrics"),
        request_timeout_s=REQUEST_TIMEOUT_S,
        executable=settings.executable,
    ) as server:
        yield Endpoint(server)


def _command(server: Requests) -> list[str]:
    """The command line; the port is free to differ, and files are named without their folders."""
    if not isinstance(server, Server):
        return []
    words = without_secrets(without_folders(server.command))
    if "--port" in words:
        words[words.index("--port") + 1] = "PORT"
    return words


@contextlib.contextmanager
def _explained(mode: ModeSpec) -> Iterator[None]:
    """Name the mode in an error, in one line; a URL may lead to anything."""
    try:
        yield
    except DspineError as error:
        text = str(error)
        if mode.url and "<html" in text.lower():
            text = f"{mode.url} answers with a web page, expected a llama-server"
        raise BenchError(f"{mode.name}: {public_url(text)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if mode.url is None:
            raise
        raise BenchError(
            f"{mode.name}: {public_url(mode.url)} gave no answer of a llama-server: "
            + " ".join(repr(error).split())
        ) from error


def _warm_up(endpoint: Endpoint, count: int) -> None:
    for _ in range(count):
        if endpoint.renders:
            endpoint.complete(endpoint.render(WARMUP), WARMUP_TOKENS, cache_prompt=False)
        else:
            endpoint.chat(WARMUP, WARMUP_TOKENS)


def _rotated(modes: Sequence[ModeSpec], by: int) -> list[ModeSpec]:
    """No mode is always the first after another: each begins in turn."""
    at = by % len(modes)
    return [*modes[at:], *modes[:at]]


class Runner:
    """One run of one workload."""

    def __init__(
        self, target: Path | None, modes: Sequence[ModeSpec], settings: Settings, progress: Progress
    ) -> None:
        self._target, self._modes, self._settings = target, modes, settings
        self._progress = progress
        self._done = 0
        self._units: list[Unit] | None = None
        self._compared: dict[str, str] = {}  # "ids" or "text", by mode
        self.result = Result()

    @property
    def whole_repeats(self) -> int:
        """Repeats that all modes have gone through; none begins before the last one ended."""
        return self._done // (len(self._units or ()) * len(self._modes) or 1)

    def run(self, workload: Workload) -> Result:
        """All repeats of all modes; what a server cannot do raises BenchError or ServerError."""
        if self._settings.interleave == "request":
            self._side_by_side(workload)
        else:
            self._in_turn(workload)
        return self.result

    @contextlib.contextmanager
    def _open(self, workload: Workload, mode: ModeSpec) -> Iterator[Endpoint]:
        with open_endpoint(self._target, mode, self._settings) as endpoint:
            for other in self._modes:
                if other.server == mode.server:
                    self.result.commands[other.name] = _command(endpoint.server)
                    self.result.served[other.name] = endpoint.model if mode.url else None
                    self.result.endpoints[other.name] = endpoint
            _refuse_few_slots(mode, endpoint, self._settings.parallel)
            with _explained(mode):
                if self._units is None:
                    self.result.build = endpoint.build
                    self._units = workload.prepare(endpoint)
                _warm_up(endpoint, self._settings.warmup)
            yield endpoint

    def _side_by_side(self, workload: Workload) -> None:
        every = range(self._settings.repeats)
        others = any(mode.url is not None for mode in self._modes)
        for repeats in [every] if others else [[repeat] for repeat in every]:
            with contextlib.ExitStack() as stack:
                open_now: dict[tuple[object, ...], Endpoint] = {}
                for mode in self._modes:
                    if mode.server not in open_now:
                        open_now[mode.server] = stack.enter_context(self._open(workload, mode))
                for repeat in repeats:
                    self._ask_in_turn(open_now, repeat)

    def _ask_in_turn(self, open_now: dict[tuple[object, ...], Endpoint], repeat: int) -> None:
        for number, unit in enumerate(self._units or ()):
            for mode in _rotated(self._modes, repeat + number):
                self._measure(unit, open_now[mode.server], mode, repeat)

    def _in_turn(self, workload: Workload) -> None:
        for repeat in range(self._settings.repeats):
            groups: dict[tuple[object, ...], list[ModeSpec]] = {}
            for mode in _rotated(self._modes, repeat):
                groups.setdefault(mode.server, []).append(mode)
            for modes in groups.values():
                with self._open(workload, modes[0]) as endpoint:
                    for unit in self._units or ():
                        for mode in modes:
                            self._measure(unit, endpoint, mode, repeat)

    def _measure(self, unit: Unit, endpoint: Endpoint, mode: ModeSpec, repeat: int) -> None:
        total = len(self._units or ()) * len(self._modes) * self._settings.repeats
        self._progress(self._done, total, mode.name)
        have = len(self.result.samples)
        with _explained(mode):
            unit.run(endpoint, mode, repeat, self.result)
        fresh = self.result.samples[have:]
        if mode.name == mode.baseline:
            _refuse_drafts(mode, fresh)
        elif unit is (self._units or [unit])[-1]:
            _refuse_idle(mode, [s for s in self.result.samples if s.mode == mode.name])
        self._compared[mode.name] = fresh[0].compared
        _refuse_other_kind(mode, self._compared)
        self._done += 1
        self._progress(self._done, total, mode.name)


def _refuse_drafts(mode: ModeSpec, samples: Sequence[Sample]) -> None:
    """A baseline that drafts is no plain decoding."""
    drafted = sum(sample.drafted for sample in samples)
    if drafted:
        who = f"--url-baseline {public_url(mode.url)}" if mode.url else mode.name
        raise BenchError(
            f"{who}: the server has drafted {drafted} tokens, expected one without a drafter"
        )


def _refuse_idle(mode: ModeSpec, samples: Sequence[Sample]) -> None:
    """A drafter that never drafts would be reported as one that gains nothing."""
    long = [sample for sample in samples if sample.tokens > 2]  # shorter ones need no draft
    if long and not any(sample.drafted for sample in samples):
        who = f"--url {public_url(mode.url)}" if mode.url else mode.name
        raise BenchError(
            f"{who}: no drafted token in {len(long)} answers (timings.draft_n), expected a server "
            "with a drafter"
        )


def _refuse_few_slots(mode: ModeSpec, endpoint: Endpoint, parallel: int) -> None:
    """Requests that wait for each other are not `parallel` at a time."""
    if mode.url is not None and endpoint.slots is not None and endpoint.slots < parallel:
        raise BenchError(
            f"{mode.name}: {public_url(mode.url)} has {endpoint.slots} slots, expected {parallel}: "
            f"start it with -np {parallel}, or give --parallel {endpoint.slots}"
        )


def _refuse_other_kind(mode: ModeSpec, compared: Mapping[str, str]) -> None:
    """Ids are compared with ids, and text with text."""
    kinds = {name: compared.get(name) for name in (mode.baseline, mode.name)}
    if None not in kinds.values() and len(set(kinds.values())) > 1:
        found = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        raise BenchError(
            f"the servers' answers cannot be compared ({found}): one gives token ids and the "
            "other does not, expected llama-servers that both do, or both do not"
        )


def described(modes: Sequence[ModeSpec], result: Result) -> list[Mode]:
    """The modes as the report names them."""
    return [_described(mode, result, result.endpoints[mode.name]) for mode in modes]


def _described(mode: ModeSpec, result: Result, endpoint: Endpoint) -> Mode:
    return Mode(
        name=mode.name,
        baseline=mode.baseline,
        drafter=mode.drafter.name if mode.drafter else None,
        n_draft=mode.n_draft,
        cache_type=mode.cache_type,
        temperature=mode.temperature,
        url=None if mode.url is None else public_url(mode.url),
        command=result.commands[mode.name],
        model=result.served[mode.name],
        build=endpoint.build,
        slots=endpoint.slots,
        slot_context=endpoint.slot_context,
    )


def choose_interleave(target: Path | None, modes: Sequence[ModeSpec]) -> Interleave:
    """`request` where all servers fit side by side, by the size of their files."""
    if target is None:
        return "request"
    from dspine._devices import detect

    servers = {mode.server: mode for mode in modes}.values()
    need = sum(
        target.stat().st_size + (mode.drafter.stat().st_size if mode.drafter else 0)
        for mode in servers
    )
    found = detect()
    return "request" if not found or need <= ROOM * found[0].room else "repeat"
