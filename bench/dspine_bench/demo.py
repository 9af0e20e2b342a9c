"""`make demo`: converts a small drafter, serves it beside its target, compares with plain decoding.

The pair is the end-to-end case under tests/golden: a trained Qwen3 of six layers and a drafter
for it, both data without a tokenizer, so the texts are ids in brackets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.convert import Options, run
from dspine_convert.errors import ConvertError
from dspine_convert.plan import OutputType
from rich.console import Console
from rich.table import Table

from dspine_bench.golden_target import text_of, write_qwen3_target
from dspine_bench.llama_server import Completion, LlamaServer, ServerExitError

CASE = Path("e2e_qwen3")
N_PREDICT = 64
TYPES = (OutputType.BF16, OutputType.Q8_0, OutputType.F32)
# Exact arithmetic: F32 caches without flash attention. One thread, as the models are tiny.
TARGET_FLAGS = ("-c", "2048", "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32")
DRAFT_FLAGS = ("-ctkd", "f32", "-ctvd", "f32")


class DemoError(Exception):
    """What stands in the way, in one line."""


@dataclass(frozen=True)
class Outcome:
    """One prompt, answered without and with the drafter."""

    prompt: list[int]
    plain: Completion
    drafted: Completion

    @property
    def equal(self) -> bool:
        """Both answers have the same ids."""
        return self.plain.tokens == self.drafted.tokens


def find_golden(given: Path | None) -> Path:
    """The directory of the golden cases: as given, or tests/golden of this or an outer directory.

    Raises DemoError naming every place that was looked at.
    """
    here = Path.cwd()
    places = [given] if given else [p / "tests" / "golden" for p in (here, *here.parents)]
    for place in places:
        if (place / CASE / "target" / "model.safetensors").is_file():
            return place
    raise DemoError(
        f"the golden models are not in {', '.join(map(str, places))}; run this inside the "
        "repository, or name the directory with --golden DIR"
    )


def find_server() -> Path:
    """llama-server of DSPINE_BIN_DIR or of the installed package; DemoError where it is not."""
    override = os.environ.get("DSPINE_BIN_DIR")
    spec = importlib.util.find_spec("dspine")
    packaged = list(spec.submodule_search_locations or []) if spec else []
    places = [Path(override)] if override else [Path(p) / "native" / "bin" for p in packaged]
    for place in places:
        if (place / "llama-server").is_file():
            return place / "llama-server"
    listed = ", ".join(map(str, places)) or "nowhere: package dspine is not installed"
    raise DemoError(f"llama-server is not built (looked at {listed}); run make setup")


def convert(golden: Path, target: Path, out: Path) -> list[Path]:
    """Convert the drafter to every type of `TYPES`; the files in that order."""
    source = golden / CASE / "draft"
    options = Options(
        source=str(source),
        target=str(target),
        types=TYPES,
        directory=out,
        name=f"{CASE}-drafter",
        force=True,
        quiet=True,
    )
    return run(options).paths


def serve(
    server: Path, target: Path, draft: Path | None, prompts: Sequence[list[int]], log: Path
) -> list[Completion]:
    """Answer the prompts with one server, with the drafter or without."""
    arguments: list[str | Path] = ["-m", target, *TARGET_FLAGS]
    if draft is not None:
        arguments += ["-md", draft, *DRAFT_FLAGS]
    with LlamaServer(server, arguments, log) as running:
        return [running.complete(prompt, N_PREDICT) for prompt in prompts]


def show_outcome(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Both token lists of the first prompt, and a row for each prompt."""
    first = outcomes[0]
    console.print("\n[bold]prompt 1[/]", text_of(first.prompt), sep="\n", highlight=False)
    for name, answer in (("without drafter", first.plain), ("with drafter", first.drafted)):
        console.print(f"[bold]{name}[/]", highlight=False)
        console.print(text_of(answer.tokens), markup=False, highlight=False)
    table = Table(title="\nGreedy decoding, with and without the drafter")
    for column in ("prompt", "tokens", "equal", "rounds", "drafted", "accepted", "mean length"):
        table.add_column(column, justify="right")
    for number, outcome in enumerate(outcomes, 1):
        answer = outcome.drafted
        table.add_row(
            str(number),
            str(len(answer.tokens)),
            "[green]yes[/]" if outcome.equal else "[red]NO[/]",
            f"{answer.rounds} (plain {outcome.plain.rounds})",
            str(answer.drafted),
            str(answer.accepted),
            f"{answer.mean_accepted_length:.2f}",
        )
    console.print(table)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | int | bool]:
    """The totals. Mean accepted length: tokens a round, plain decoding is 1.0."""
    rounds = sum(outcome.drafted.rounds for outcome in outcomes)
    accepted = sum(outcome.drafted.accepted for outcome in outcomes)
    return {
        "equal": all(outcome.equal for outcome in outcomes),
        "tokens": sum(len(outcome.drafted.tokens) for outcome in outcomes),
        "rounds": rounds,
        "drafted": sum(outcome.drafted.drafted for outcome in outcomes),
        "accepted": accepted,
        "mean_accepted_length": round((accepted + rounds) / rounds, 4) if rounds else 1.0,
    }


def demonstrate(golden: Path, out: Path, console: Console) -> bool:
    """Run everything; True where all answers are equal and drafting saved rounds."""
    server = find_server()
    out.mkdir(parents=True, exist_ok=True)
    target = write_qwen3_target(golden / CASE / "target", out / f"{CASE}-target-F32.gguf")
    drafters = convert(golden, target, out)
    recorded = json.loads((golden / CASE / "rounds.json").read_text())["prompts"]
    prompts: list[list[int]] = [entry["prompt"] for entry in recorded]
    plain_log, draft_log = out / "server-plain.log", out / "server-drafter.log"
    plain = serve(server, target, None, prompts, plain_log)
    f32 = drafters[TYPES.index(OutputType.F32)]
    drafted = serve(server, target, f32, prompts, draft_log)
    outcomes = [Outcome(*parts) for parts in zip(prompts, plain, drafted, strict=True)]
    show_outcome(console, outcomes)
    totals = summary(outcomes)
    console.print(
        f"[bold]{totals['tokens']} tokens in {totals['rounds']} rounds, mean accepted length "
        f"{totals['mean_accepted_length']:.2f}[/] (plain decoding is 1.00)\n",
        highlight=False,
    )
    result = out / "demo.json"
    result.write_text(json.dumps(totals, indent=1) + "\n")
    for path in (target, *drafters, plain_log, draft_log, result):
        console.print(f"{path}  {path.stat().st_size:,} bytes", highlight=False, soft_wrap=True)
    return bool(totals["equal"]) and totals["mean_accepted_length"] > 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where the answers are equal, 1 where they differ or something is missing."""
    parser = argparse.ArgumentParser(prog="python -m dspine_bench.demo", description=__doc__)
    parser.add_argument("--golden", type=Path, metavar="DIR", help="directory of the golden cases")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", default=Path("demo-out"))
    options = parser.parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    try:
        good = demonstrate(find_golden(options.golden), options.output, console)
    except (DemoError, ConvertError, ServerExitError, OSError) as error:
        errors.print(f"demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    if not good:
        errors.print("demo: the answers with and without the drafter differ", style="red")
        return 1
    console.print("\n[green]The texts are equal.[/]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
