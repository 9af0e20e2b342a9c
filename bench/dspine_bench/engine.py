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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from dspine import Engine, Server

from dspine_bench.llama_server import plain_server

SCHEMA_VERSION = 1

Side = tuple[list[int], int, float]  # ids, rounds, milliseconds of all rounds


@dataclass(frozen=True)
class Sample:
    """One prompt on both sides, one after the other."""

    repeat: int
    prompt: int
    rounds: int
    engine_ms: float  # a round
    server_ms: float
    same_ids: bool
    same_rounds: bool

    @property
    def ratio(self) -> float:
        """Engine over server."""
        return self.engine_ms / self.server_ms


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
) -> list[Sample]:
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


def _sample(repeat: int, prompt: int, ours: Side, theirs: Side) -> Sample:
    return Sample(
        repeat=repeat,
        prompt=prompt,
        rounds=ours[1],
        engine_ms=ours[2] / max(ours[1], 1),
        server_ms=theirs[2] / max(theirs[1], 1),
        same_ids=ours[0] == theirs[0],
        same_rounds=ours[1] == theirs[1],
    )


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Median ratio with its quartiles, and whether both sides did the same."""
    ratios = [s.ratio for s in samples]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "samples": len(samples),
        "engine_over_server_median": statistics.median(ratios),
        "engine_over_server_quartiles": [quartiles[0], quartiles[2]],
        "engine_ms_a_round_median": statistics.median(s.engine_ms for s in samples),
        "server_ms_a_round_median": statistics.median(s.server_ms for s in samples),
        "same_ids": all(s.same_ids for s in samples),
        "same_rounds": all(s.same_rounds for s in samples),
    }


def random_prompts(n_vocab: int, count: int, length: int) -> list[list[int]]:
    """Prompts of random ids: the same for the same sizes."""
    rng = random.Random(0)
    return [[rng.randrange(n_vocab) for _ in range(length)] for _ in range(count)]


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
    flags = ["-c", str(n_ctx), "-t", str(threads), "-fa", "on"]
    for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        flags += [flag, "q8_0"]
    with (
        tempfile.TemporaryDirectory(prefix="dspine-engine-") as folder,
        plain_server(target, draft, flags, Path(folder) / "server.log") as server,
        Engine(target, draft, n_ctx=n_ctx, threads=threads, flash_attn="on") as engine,
    ):
        ids = (
            json.loads(prompts.read_text())
            if prompts
            else random_prompts(engine.info.n_vocab, 4, 64)
        )
        samples = compare(engine, server, ids, n_predict, repeats)
    document = {
        "schema_version": SCHEMA_VERSION,
        "config": {"n_predict": n_predict, "repeats": repeats, "threads": threads, "n_ctx": n_ctx},
        "summary": summary(samples),
        "samples": [asdict(s) | {"ratio": s.ratio} for s in samples],
    }
    text = json.dumps(document, indent=1)
    if output:
        output.write_text(text + "\n", encoding="utf-8")
    typer.echo(json.dumps(document["summary"], indent=1) if output else text)


if __name__ == "__main__":
    typer.run(main)
