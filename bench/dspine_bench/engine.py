"""Engine against llama-server on one pair: same work, milliseconds a round, as JSON.

    python -m dspine_bench.engine TARGET DRAFT [--repeats N] [--json FILE]

Both sides run the same prompts with the same files, threads and caches. They take turns, so that
what else the machine does falls on both; the median of the ratios of neighbours is reported. A
round is counted from the end of the prompt: the server's own timing of the answer, and the
engine's wall clock without the prompt's milliseconds. Load, tokenizing and HTTP are not timed on
the server's side; text is made on both.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from dspine import DspineError, Engine, Server

from dspine_bench.errors import BenchError
from dspine_bench.llama_server import plain_server
from dspine_bench.provenance import build_of_library, hardware, pair_files, provenance
from dspine_bench.schema import EngineReport, EngineSample, EngineSummary, Spread, save

Side = tuple[list[int], int, float]  # ids, rounds, milliseconds of all rounds


def _of_engine(engine: Engine, prompt: list[int], n: int) -> Side:
    begin = time.perf_counter()
    done = engine.generate(prompt, max_tokens=n, temperature=0, cache_prompt=False)
    spent = 1000 * (time.perf_counter() - begin) - done.stats.prompt_ms
    return done.tokens, done.stats.rounds, spent


def _of_server(server: Server, prompt: list[int], n: int) -> Side:
    done = server.complete(prompt, n)
    return done.tokens, done.rounds, done.generated_ms


def compare(
    engine: Engine, server: Server, prompts: Sequence[list[int]], n: int, repeats: int
) -> list[EngineSample]:
    """Run every prompt `repeats` times on both sides, in turns; the first turn is a warm-up."""
    samples = []
    for repeat in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            if repeat % 2:
                ours = _of_engine(engine, prompt, n)
                theirs = _of_server(server, prompt, n)
            else:
                theirs = _of_server(server, prompt, n)
                ours = _of_engine(engine, prompt, n)
            if repeat:
                samples.append(_sample(repeat, index, ours, theirs))
    return samples


def _sample(repeat: int, prompt: int, ours: Side, theirs: Side) -> EngineSample:
    return EngineSample(
        repeat=repeat,
        prompt=prompt,
        rounds=ours[1],
        engine_ms=ours[2] / max(ours[1], 1),
        server_ms=theirs[2] / max(theirs[1], 1),
        same_ids=ours[0] == theirs[0],
        same_rounds=ours[1] == theirs[1],
    )


def summarize(samples: Sequence[EngineSample]) -> EngineSummary:
    """Median ratio with the extremes of whole repeats, and whether both sides did the same."""
    by_repeat: dict[int, list[float]] = {}
    for sample in samples:
        by_repeat.setdefault(sample.repeat, []).append(sample.ratio)
    ratios = [sample.ratio for sample in samples]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    middle = statistics.median(ratios)
    single = [statistics.median(found) for found in by_repeat.values()]
    return EngineSummary(
        ratio=Spread(median=middle, min=min(middle, *single), max=max(middle, *single)),
        quartiles=[quartiles[0], quartiles[2]],
        engine_ms=statistics.median(s.engine_ms for s in samples),
        server_ms=statistics.median(s.server_ms for s in samples),
        same_ids=all(s.same_ids for s in samples),
        same_rounds=all(s.same_rounds for s in samples),
    )


def random_prompts(n_vocab: int, count: int, length: int) -> list[list[int]]:
    """Prompts of random ids: the same for the same sizes."""
    rng = random.Random(0)
    return [[rng.randrange(n_vocab) for _ in range(length)] for _ in range(count)]


def measure(
    target: Path,
    draft: Path,
    prompts: Sequence[list[int]] | None = None,
    *,
    n_predict: int = 96,
    repeats: int = 5,
    threads: int = 1,
    n_ctx: int = 2048,
) -> EngineReport:
    """Both sides in turn; four prompts of random ids where none are given."""
    flags = ["-c", str(n_ctx), "-t", str(threads), "-fa", "on"]
    for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        flags += [flag, "q8_0"]
    machine, models = hardware(), pair_files(target, [draft])
    with (
        tempfile.TemporaryDirectory(prefix="dspine-engine-") as folder,
        plain_server(target, draft, flags, Path(folder) / "server.log") as server,
        Engine(target, draft, n_ctx=n_ctx, threads=threads, flash_attn="on") as engine,
    ):
        ids = prompts or random_prompts(engine.info.n_vocab, 4, 64)
        samples = compare(engine, server, ids, n_predict, repeats)
    return EngineReport(
        schema_version=1,
        provenance=provenance(build_of_library()),
        hardware=machine,
        workload="engine",
        models=models,
        config={"n_predict": n_predict, "repeats": repeats, "threads": threads, "n_ctx": n_ctx},
        samples=samples,
        summary=summarize(samples),
    )


def read_prompts(path: Path) -> list[list[int]]:
    """Lists of ids from JSON; BenchError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BenchError(f"{path}: no JSON: {error}") from None
    if not found or not isinstance(found, list):
        raise BenchError(f"{path}: expected a list of lists of ids")
    for index, ids in enumerate(found):
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise BenchError(f"{path}: prompt {index}: expected a list of ids")
    return found


def main(
    target: Annotated[Path, typer.Argument(help="the target GGUF")],
    draft: Annotated[Path, typer.Argument(help="its drafter")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON list of lists of ids; random ids by default")
    ] = None,
    n_predict: Annotated[int, typer.Option(min=8)] = 96,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    n_ctx: Annotated[int, typer.Option(min=256)] = 2048,
    output: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """Measure the engine's overhead per round over llama-server."""
    try:
        report = measure(
            target,
            draft,
            read_prompts(prompts) if prompts else None,
            n_predict=n_predict,
            repeats=repeats,
            threads=threads,
            n_ctx=n_ctx,
        )
        if output:
            save(report, output)
    except DspineError as error:
        typer.echo(f"engine: {error}", err=True)
        raise typer.Exit(1) from None
    shown = report.summary if output else report
    typer.echo(json.dumps(shown.model_dump(mode="json"), indent=1))


if __name__ == "__main__":
    typer.run(main)
