"""Measure drafters on the held-out prompts through llama-server; JSON to a file.

    python -m demo_pair.evaluate --server llama-server --target T.gguf --draft D.gguf --out F

Greedily, or with `--sampled` at temperature 1, top_p 0.95 and top_k 20. A greedy run answers with
the target alone first: its text is what every drafter's run must equal. Needs the folder
`bench` on the import path; `--positions` also needs the native library (bindings) and replays the
prompts there for acceptance by position.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspine import Completion, Server
from dspine._terms import acceptance_rate, mean_accepted_length
from dspine_bench.llama_server import plain_server

from demo_pair.prompts import Prompt, held_out

SCHEMA = 1
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {
    "samplers": ["top_k", "top_p", "temperature"],
    "temperature": 1.0,
    "top_p": 0.95,
    "top_k": 20,
    "seed": 1,
}


@dataclass
class Counts:
    """mean_accepted_length counts the target's own token of a round: plain decoding is 1.0."""

    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    milliseconds: float = 0.0
    diverged: list[dict[str, Any]] = field(default_factory=list)

    def add(self, done: Completion) -> None:
        self.prompts += 1
        self.tokens += len(done.tokens)
        self.rounds += done.rounds
        self.drafted += done.drafted
        self.accepted += done.accepted
        self.milliseconds += done.generated_ms

    def summary(self) -> dict[str, Any]:
        length = mean_accepted_length(self.accepted, self.rounds)
        rate = acceptance_rate(self.accepted, self.drafted)
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted_length": round(length, 4),
            "acceptance_rate": round(rate, 4),
            "tokens_per_second": round(1000 * self.tokens / max(self.milliseconds, 1e-9), 2),
            "diverged": self.diverged,
        }


def note(message: str) -> None:
    sys.stderr.write(message + "\n")


def chosen_prompts(each: int) -> list[Prompt]:
    taken: dict[str, int] = defaultdict(int)
    out = []
    for prompt in held_out():
        taken[prompt.category] += 1
        if taken[prompt.category] <= each:
            out.append(prompt)
    return out


def prompt_ids(server: Server, prompt: Prompt) -> list[int]:
    """The prompt under the target's chat template, as token ids."""
    messages = [{"role": "user", "content": prompt.text}]
    shaped = server.post("/apply-template", {"messages": messages})["prompt"]
    body = {"content": shaped, "add_special": True, "parse_special": True}
    ids: list[int] = server.post("/tokenize", body)["tokens"]
    return ids


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first differing token, which one of them may lack; None where they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def margin(server: Server, ids: list[int]) -> float:
    """Gap between the target's two likeliest next tokens, in log-probability."""
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    best = server.post("/completion", body)["completion_probabilities"][0]["top_logprobs"]
    return float(best[0]["logprob"] - best[1]["logprob"])


def run_one(
    args: argparse.Namespace, draft: Path | None, logs: Path
) -> list[tuple[Prompt, list[int], Completion]]:
    """Every prompt once, on a fresh server."""
    flags = ["-c", "2048", "-np", "1", "-t", str(args.threads), *args.flag]
    settings = SAMPLED if args.sampled else GREEDY
    results = []
    log = logs / f"{draft.stem if draft else 'plain'}.log"
    with plain_server(args.target, draft, flags, log, args.server) as server:
        for prompt in chosen_prompts(args.each):
            ids = prompt_ids(server, prompt)
            done = server.complete(ids, args.n_predict, **settings)
            results.append((prompt, ids, done))
    return results


def compare(
    args: argparse.Namespace, draft: Path, plain: dict[str, list[int]], logs: Path
) -> dict[str, Any]:
    """Counts by category of one drafter, and where its text left the target's."""
    counts: dict[str, Counts] = defaultdict(Counts)
    apart = []
    for prompt, ids, done in run_one(args, draft, logs):
        for name in ("all", prompt.category):
            counts[name].add(done)
        # Sampled text is another by design: the draws follow the rounds.
        where = None if args.sampled else first_difference(plain[prompt.text], done.tokens)
        if where is not None:
            apart.append((prompt, where, ids + plain[prompt.text][:where]))
    flags = ["-c", "2048", "-np", "1", *args.flag]
    if apart:
        log = logs / "margins.log"
        with plain_server(args.target, None, flags, log, args.server) as server:
            for prompt, where, ids in apart:
                entry = {"prompt": prompt.text, "token": where, "margin": margin(server, ids)}
                for name in ("all", prompt.category):
                    counts[name].diverged.append(entry)
    return {name: count.summary() for name, count in counts.items()}


def positions(args: argparse.Namespace, draft: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Share of rounds whose draft was accepted at least to each depth, by the library's loop."""
    from dspine import Pair, PairOptions

    reached: list[int] = []
    rounds = 0
    with Pair(args.target, draft, PairOptions(n_ctx=2048, n_threads=args.threads)) as pair:
        reached = [0] * pair.info.n_draft
        for ids in prompts:
            for one in pair.generate(ids, args.n_predict).rounds:
                rounds += 1
                for depth in range(one.accepted):
                    reached[depth] += 1
    return {"rounds": rounds, "accepted_to_depth": [round(r / max(rounds, 1), 4) for r in reached]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=10, help="prompts of each category")
    parser.add_argument("--n-predict", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--positions", action="store_true")
    parser.add_argument("--sampled", action="store_true", help="temperature 1 instead of greedy")
    parser.add_argument("--flag", action="append", default=[], help="one more server argument")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    mode = "temperature 1, top_p 0.95, top_k 20" if args.sampled else "greedy"
    report: dict[str, Any] = {
        "schema_version": SCHEMA,
        "command": [Path(part).name for part in sys.argv],
        "machine": f"{platform.machine()} {platform.system()}",
        "config": {"n_predict": args.n_predict, "each": args.each, "mode": mode},
        "drafters": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        alone = run_one(args, None, logs)
        plain = {prompt.text: done.tokens for prompt, _, done in alone}
        total = Counts()
        for _, _, done in alone:
            total.add(done)
        report["plain"] = total.summary()
        for draft in args.draft:
            found = compare(args, draft, plain, logs)
            report["drafters"][draft.stem] = found
            note(f"{draft.stem}: {found['all']['mean_accepted_length']}")
            if args.positions:
                report["drafters"][draft.stem]["positions"] = positions(
                    args, draft, [ids for _, ids, _ in alone]
                )
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
