"""Greedy runs of the trained pair under tests/golden, by file type and cache type, as JSON.

The counts are deterministic on one machine; there are no times in them. The README's table is
made from the committed file by `dspine_bench.figures`.
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from dspine import Pair, PairOptions
from dspine._terms import mean_accepted_length
from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType

from dspine_bench.golden_target import write_qwen3_target

TYPES = (OutputType.F32, OutputType.BF16, OutputType.Q8_0, OutputType.Q4_K_M)
CACHES = ("f32", "q8_0")
N_PREDICT = 64


def _options(cache: str) -> PairOptions:
    # tight comparisons run without flash attention; quantized caches need it
    return PairOptions(
        n_ctx=1024,
        n_threads=1,
        flash_attn="off" if cache == "f32" else "on",
        type_k=cache,
        type_v=cache,
        type_k_draft=cache,
        type_v_draft=cache,
    )


def measure(target: Path, draft: Path, prompts: list[list[int]], cache: str) -> dict[str, Any]:
    """Totals over the prompts: tokens, rounds, drafted, accepted, and whether ids are equal."""
    options = _options(cache)
    with Pair(target, None, options) as plain:
        expected = [plain.generate(p, N_PREDICT, ignore_eog=True).tokens.tolist() for p in prompts]
    with Pair(target, draft, options) as pair:
        runs = [pair.generate(p, N_PREDICT, ignore_eog=True) for p in prompts]
    rounds = sum(r.stats.rounds for r in runs)
    accepted = sum(r.stats.accepted for r in runs)
    return {
        "tokens": sum(len(r.tokens) for r in runs),
        "rounds": rounds,
        "drafted": sum(r.stats.drafted for r in runs),
        "accepted": accepted,
        "mean_accepted_length": round(mean_accepted_length(accepted, rounds), 3),
        "lossless": [r.tokens.tolist() for r in runs] == expected,
    }


def measure_all(golden: Path, folder: Path) -> list[dict[str, Any]]:
    """Every file type with every cache type."""
    case = golden / "e2e_qwen3"
    prompts = [p["prompt"] for p in json.loads((case / "rounds.json").read_text())["prompts"]]
    target = write_qwen3_target(case / "target", folder / "target.gguf")
    options = Options(
        source=str(case / "draft"), target=str(target), types=TYPES, directory=folder, quiet=True
    )
    drafts = run(options).paths
    return [
        {"type": t.name, "cache": cache} | measure(target, draft, prompts, cache)
        for t, draft in zip(TYPES, drafts, strict=True)
        for cache in CACHES
    ]


def main(
    golden: Annotated[Path, typer.Option(help="the golden cases")] = Path("tests/golden"),
    output: Annotated[Path | None, typer.Option("--json", help="write the result there")] = None,
) -> None:
    """Measure the golden pair and print the result."""
    with tempfile.TemporaryDirectory(prefix="dspine-golden-") as folder:
        results = measure_all(golden, Path(folder))
    machine = {"system": platform.system(), "machine": platform.machine(), "threads": 1}
    text = json.dumps({"schema_version": 1, "machine": machine, "results": results}, indent=1)
    if output:
        output.write_text(text + "\n")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
