"""`draft`: what one round costs, by part, for DSpine and for the peers in the same binary.

Every timed call is one graph. What has no graph of its own is a difference of graphs, taken within
a repeat, so that a slow repeat is slow on both sides:

- the layers: a drafter of all layers less one of a single layer, scaled;
- the head, with embeddings and final norm: what remains of DFlash's graph;
- the adjacent injection: what DSpine adds to DFlash for each layer;
- the candidates: what DSpine adds regardless of the layers (its lattice cut to one position);
- the transition cache: the whole of DSpine less that.

The calls of a context are all alike, so that llama.cpp keeps its graph; in a round, where features
come between two blocks, it is built anew, for every family.

What "draft" contains differs. For DSpine it is the library's call: graph, walk, batch, cutting the
cache. For DFlash and DSpark: the graph with logits, top-k on the backend, the sampler. For DFlash2
the graph alone: llama.cpp walks its lattice as the library walks DSpine's, and that is not timed.

Not in these figures: copying features from the target's rows, building batches, the sampler of the
target.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dspine_bench.peers import (
    BLOCK,
    FAMILIES,
    SHAPES,
    Extras,
    Family,
    settings,
    write_drafter,
    write_target,
)
from dspine_bench.rawllama import BLOCK_SIZE, KEEP_HEAD_ROWS, Context, Model
from dspine_bench.runner import Progress
from dspine_bench.schema import DraftCase, DraftReport, DraftRow, DraftSample, Spread
from dspine_bench.synthetic import Shape

CUT = 2  # block size whose lattice has one position, so that no transition is scored
FEATURE_ROWS = (1, 4, 16)
QUICK_WIDTHS = (1, 2, 4, 8, 9, 16)


@dataclass(frozen=True)
class Choices:
    """What is measured: shapes by name, type of the weights, context before the block."""

    shapes: tuple[str, ...] = ("small", "mid")
    type: str = "q8_0"
    repeats: int = 5
    calls: int = 5  # of each kind, in each repeat
    context: int = 256
    widths: tuple[int, ...] = tuple(range(1, BLOCK + 1))
    threads: int = 0
    extras: Extras = field(default_factory=Extras)

    @property
    def n_threads(self) -> int:
        """All cores that this process may use, unless a number was given."""
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Call:
    """Something to time. `case` is the drafter's name, `call` what is done with it."""

    case: str
    call: str
    rows: int
    time: Callable[[], float]


@dataclass
class Measured:
    """What came out, over all shapes."""

    cases: list[DraftCase] = field(default_factory=list)
    samples: list[DraftSample] = field(default_factory=list)
    summary: list[DraftRow] = field(default_factory=list)


class Bench:
    """The models of one shape, and the calls on them. Files go to `folder`."""

    def __init__(self, name: str, shape: Shape, choices: Choices, folder: Path) -> None:
        self.name, self.shape, self.choices, self.folder = name, shape, choices, folder
        self.cases: list[DraftCase] = []
        self._stack = contextlib.ExitStack()
        self._room = choices.context + 2 * BLOCK + 64

    def __enter__(self) -> Bench:
        try:
            self._target_path = write_target(
                self.folder / f"target-{self.name}.gguf", self.shape, self.choices.type
            )
            self._target = self._open(Model(self._target_path, (KEEP_HEAD_ROWS, 1)), None)
            for begin in range(0, self.choices.context, BLOCK):
                self._target.keep(min(BLOCK, self.choices.context - begin), begin)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for path in self.folder.glob(f"*-{self.name}.gguf"):
            path.unlink()

    def _open(self, model: Model, other: Context | None, *, samples: bool = False) -> Context:
        made = Context(model, self._room, self.choices.n_threads, other, samples=samples)
        context: Context = self._stack.enter_context(made)
        if other is not None:
            width = self.shape.taps * self.shape.hidden
            for begin in range(0, self.choices.context, BLOCK):
                rows = min(BLOCK, self.choices.context - begin)
                context.features(rows, begin, width, keep=True)
        return context

    def _drafter(self, family: Family, layers: int) -> Path:
        """A drafter's file, and its entry in the report."""
        shape = replace(self.shape, layers=layers)
        short = "" if layers == self.shape.layers else f" {layers} layer"
        path = self.folder / f"{family}{short.replace(' ', '-')}-{self.name}.gguf"
        write_drafter(path, family, shape, self.choices.type, self.choices.extras)
        self.cases.append(
            DraftCase(
                name=f"{family}{short}",
                family=family,
                shape=self.name,
                type=self.choices.type,
                bytes=path.stat().st_size,
                settings=settings(family, shape, self.choices.extras) | {"layers": layers},
            )
        )
        return path

    def _block(self, context: Context, *, logits: bool) -> Callable[[], float]:
        return lambda: context.tokens(BLOCK, self.choices.context, logits=logits)

    def calls(self) -> list[Call]:
        """Load every drafter and list what is timed."""
        full = self.shape.layers
        calls: list[Call] = []
        for family in FAMILIES:
            path = self._drafter(family, full)
            graph = self._open(Model(path), self._target)
            calls.append(Call(family, "graph", BLOCK, self._block(graph, logits=False)))
            if family in ("dflash", "dspark"):
                calls += self._sampled(family, path)
            if family == "dspine":
                # a context of their own: llama.cpp would build the block's graph anew behind them
                calls += self._features(self._open(Model(path), self._target))
                cut = self._open(Model(path, (BLOCK_SIZE, CUT)), self._target)
                calls.append(Call("dspine", "cut", BLOCK, self._block(cut, logits=False)))
                calls += self._library(path)
        for family, override in (("dflash", ()), ("dspine", ((BLOCK_SIZE, CUT),))):
            path = self._drafter(family, 1)
            graph = self._open(Model(path, *override), self._target)
            name = "cut" if override else "graph"
            calls.append(Call(f"{family} 1 layer", name, BLOCK, self._block(graph, logits=False)))
        return calls + self._verifications()

    def _sampled(self, family: str, path: Path) -> list[Call]:
        """The block as the loop evaluates it, with logits, and the choice of the tokens."""
        context = self._open(Model(path), self._target, samples=True)
        whole = self._block(context, logits=True)

        def pick() -> float:
            whole()
            return context.pick(BLOCK)

        return [Call(family, "block", BLOCK, whole), Call(family, "walk", BLOCK, pick)]

    def _features(self, context: Context) -> list[Call]:
        width, at = self.shape.taps * self.shape.hidden, self.choices.context

        def feed(rows: int) -> Callable[[], float]:
            return lambda: context.features(rows, at, width, keep=False)

        return [Call("dspine", "context", rows, feed(rows)) for rows in FEATURE_ROWS]

    def _library(self, path: Path) -> list[Call]:
        """A draft by the library, all around the graph included."""
        from dspine import Pair, PairOptions

        options = PairOptions(
            n_ctx=self._room, n_threads=self.choices.n_threads, n_batch=BLOCK, logits_all=False
        )
        pair = self._stack.enter_context(Pair(self._target_path, path, options))
        at = self.choices.context
        for begin in range(0, at, BLOCK):
            pair.target_decode(0, [1] * min(BLOCK, at - begin), begin)

        def draft() -> float:
            begin = time.perf_counter()
            pair.draft(0, 1, at)
            return 1000 * (time.perf_counter() - begin)

        return [Call("dspine", "draft", BLOCK, draft)]

    def _verifications(self) -> list[Call]:
        at = self.choices.context

        def verify(rows: int) -> Callable[[], float]:
            return lambda: self._target.tokens(rows, at, logits=True)

        return [Call("target", "verify", rows, verify(rows)) for rows in self.choices.widths]


def time_calls(calls: Sequence[Call], choices: Choices, progress: Progress) -> list[DraftSample]:
    """Every call in turn, `calls` times in each repeat, after one turn that is dropped.

    Neighbours in time are different calls, as in a real round, and a disturbance hits all of them.
    """
    samples: list[DraftSample] = []
    for call in calls:
        call.time()
    total, done = choices.repeats * choices.calls, 0
    for repeat in range(choices.repeats):
        for _ in range(choices.calls):
            progress(done, total, f"repeat {repeat + 1}")
            at = (done * 7) % len(calls)  # no call is always behind the same other
            for call in [*calls[at:], *calls[:at]]:
                ms = call.time()
                samples.append(
                    DraftSample(
                        case=call.case, call=call.call, rows=call.rows, repeat=repeat, ms=ms
                    )
                )
            done += 1
    progress(total, total, "")
    return samples


Times = Mapping[tuple[str, str, int], Mapping[int, float]]  # case, call, rows -> repeat -> ms


def medians(samples: Sequence[DraftSample]) -> Times:
    """The median of each kind of call in each repeat."""
    found: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for sample in samples:
        by_repeat = found.setdefault((sample.case, sample.call, sample.rows), {})
        by_repeat.setdefault(sample.repeat, []).append(sample.ms)
    return {
        key: {repeat: statistics.median(ms) for repeat, ms in by_repeat.items()}
        for key, by_repeat in found.items()
    }


class Parts:
    """Rows of the summary from the medians of one shape."""

    def __init__(self, name: str, layers: int, times: Times) -> None:
        self._name, self._layers, self._times = name, layers, times
        self.rows: list[DraftRow] = []

    def _of(self, case: str, call: str, repeat: int, rows: int = BLOCK) -> float:
        return self._times[case, call, rows][repeat]

    def add(
        self, family: str, part: str, how: str, value: Callable[[int], float], rows: int = BLOCK
    ) -> None:
        """A row: `value` of every repeat."""
        repeats = sorted(next(iter(self._times.values())))
        values = [value(repeat) for repeat in repeats]
        ms = Spread(median=statistics.median(values), min=min(values), max=max(values))
        self.rows.append(
            DraftRow(shape=self._name, family=family, part=part, rows=rows, ms=ms, how=how)
        )

    def measured(self, family: str, part: str, case: str, call: str, rows: int = BLOCK) -> None:
        """A row that is one call."""
        how = f"one call: {call} of {case}"
        self.add(family, part, how, lambda repeat: self._of(case, call, repeat, rows), rows)

    def layers(self, repeat: int) -> float:
        """All layers of the backbone."""
        step = self._of("dflash", "graph", repeat) - self._of("dflash 1 layer", "graph", repeat)
        return step * self._layers / (self._layers - 1)

    def added(self, repeat: int, *, one_layer: bool) -> float:
        """What DSpine with a cut lattice adds to DFlash."""
        tail = " 1 layer" if one_layer else ""
        dspine = self._of(f"dspine{tail}", "cut", repeat)
        return dspine - self._of(f"dflash{tail}", "graph", repeat)

    def injection(self, repeat: int) -> float:
        """The injections of all layers."""
        step = self.added(repeat, one_layer=False) - self.added(repeat, one_layer=True)
        return step * self._layers / (self._layers - 1)


def summarize(name: str, layers: int, samples: Sequence[DraftSample]) -> list[DraftRow]:
    """The parts of a round, by family, for one shape."""
    parts = Parts(name, layers, medians(samples))
    graph = parts._of
    for family in FAMILIES:
        parts.add(family, "layers", "dflash of all layers less one layer, scaled", parts.layers)
        parts.add(
            family,
            "head",
            "dflash less its layers",
            lambda r: graph("dflash", "graph", r) - parts.layers(r),
        )
    _add_dspine(parts)
    _add_peers(parts)
    for rows in FEATURE_ROWS:
        parts.measured("dspine", "context injection", "dspine", "context", rows)
    for key in parts._times:
        if key[1] == "verify":
            parts.measured("target", "verify", "target", "verify", key[2])
    return parts.rows


def summary_of(report: DraftReport) -> list[DraftRow]:
    """The rows that a report's samples give; LookupError where calls are missing."""
    rows = []
    for name, sizes in report.shapes.items():
        tail = f", {name}"
        samples = [
            s.model_copy(update={"case": s.case.removesuffix(tail)})
            for s in report.samples
            if s.case.endswith(tail)
        ]
        rows += summarize(name, sizes["layers"], samples)
    return rows


def _add_peers(parts: Parts) -> None:
    graph = parts._of
    parts.add(
        "dflash2",
        "convolutions, selector",
        "dflash2 less dflash",
        lambda r: graph("dflash2", "graph", r) - graph("dflash", "graph", r),
    )
    parts.add(
        "dspark",
        "Markov head",
        "dspark less dflash",
        lambda r: graph("dspark", "graph", r) - graph("dflash", "graph", r),
    )
    for family in ("dflash", "dspark"):
        parts.add(
            family,
            "walk",
            "logits, the backend's choice of candidates, and the sampler",
            lambda r, f=family: (  # type: ignore[misc]
                graph(f, "block", r) + graph(f, "walk", r) - graph(f, "graph", r)
            ),
        )
        parts.add(
            family,
            "draft",
            "block and walk",
            lambda r, f=family: graph(f, "block", r) + graph(f, "walk", r),  # type: ignore[misc]
        )
    parts.measured("dflash2", "draft", "dflash2", "graph")


def _add_dspine(parts: Parts) -> None:
    graph = parts._of
    parts.add(
        "dspine",
        "adjacent injection",
        "what dspine adds to dflash for each layer, scaled",
        parts.injection,
    )
    parts.add(
        "dspine",
        "candidates",
        "what dspine with a lattice of one position adds to dflash, less the injection",
        lambda r: parts.added(r, one_layer=False) - parts.injection(r),
    )
    parts.add(
        "dspine",
        "transition cache",
        "dspine less dspine with a lattice of one position",
        lambda r: graph("dspine", "graph", r) - graph("dspine", "cut", r),
    )
    parts.add(
        "dspine",
        "walk",
        "the library's draft less its graph: walk, batch, cutting the cache",
        lambda r: graph("dspine", "draft", r) - graph("dspine", "graph", r),
    )
    parts.measured("dspine", "draft", "dspine", "draft")


def run(choices: Choices, folder: Path, progress: Progress) -> Measured:
    """Measure every shape; the files are removed again."""
    folder.mkdir(parents=True, exist_ok=True)
    result = Measured()
    for name in choices.shapes:
        shape = SHAPES[name]
        with Bench(name, shape, choices, folder) as bench:
            calls = bench.calls()
            samples = time_calls(calls, choices, progress)
        result.cases += bench.cases
        # samples name the shape too: the same drafters exist in every shape
        result.samples += [
            sample.model_copy(update={"case": f"{sample.case}, {name}"}) for sample in samples
        ]
        result.summary += summarize(name, shape.layers, samples)
    return result
