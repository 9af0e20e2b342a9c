"""Is the text still the target's at temperature 1? One drafted place, many samples, chi-square.

    python -m demo_pair.distribution --server llama-server --target T.gguf --draft D.gguf \\
        --texts FILE --out F

The prompt ends where the target's next token is certain (top_p leaves one candidate) and the one
after it is open. That second token is drafted and verified, so its distribution over many seeds
shows what verification makes of the target's own, which the library computes from the logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dspine import Pair, PairOptions, Server
from dspine_bench.llama_server import plain_server
from scipy.stats import chisquare

from demo_pair.evaluate import SAMPLED
from demo_pair.texts import texts_of

TOP_K, TOP_P = SAMPLED["top_k"], SAMPLED["top_p"]
# The certain token, the tested one, and one more: the only draft is of the tested token.
N_PREDICT = 3
ENDS = {0, 2}  # <|endoftext|> and <|im_end|>, which ignore_eos bans
LEAST_ACCEPTED = 0.9  # of the samples that are the drafted token
LEAST_EXPECTED = 5  # samples of a cell, the usual rule; rarer tokens are counted together


@dataclass(frozen=True)
class Place:
    """Prompt ids up to the certain token, the distribution of the token after it, and the one
    that the drafter drafts there."""

    prompt: list[int]
    certain: int
    expected: dict[int, float]
    drafted: int


def kept(logits: npt.NDArray[np.float32]) -> dict[int, float]:
    """Token probabilities after top_k and top_p at temperature 1."""
    best = np.argsort(-logits)[:TOP_K]
    p = np.exp(logits[best].astype(np.float64) - logits[best[0]])
    p /= p.sum()
    count = int(np.searchsorted(np.cumsum(p), TOP_P)) + 1
    p = p[:count] / p[:count].sum()
    return {int(token): float(value) for token, value in zip(best, p, strict=False)}


def find_place(target: Path, draft: Path, texts: Path) -> Place:
    """The first place whose open token is drafted with a probability of 0.2 to 0.8."""
    options = PairOptions(n_ctx=1024, n_batch=1024, n_threads=1)
    with Pair(target, draft, options) as pair:
        for text in texts_of(texts):
            tokens = text.prompt + text.continuation
            pair.truncate(0, 0)
            pair.target_decode(0, tokens, 0)
            logits = pair.target_logits()
            for at in range(len(text.prompt), len(tokens) - 2):
                certain, after = kept(logits[at - 1]), kept(logits[at])
                if len(certain) > 1 or tokens[at] not in certain or len(after) < 5:
                    continue
                if ENDS & {tokens[at], *after}:
                    continue
                pair.truncate(0, at)
                drafted = int(pair.draft(0, tokens[at], at)[0])
                if 0.2 < after.get(drafted, 0.0) < 0.8:
                    return Place(tokens[:at], tokens[at], after, drafted)
                pair.target_decode(0, tokens[at:], at)
    raise SystemExit(f"{texts}: no fitting place in these texts")


def sample(server: Server, place: Place, count: int, parallel: int) -> tuple[Counter[int], int]:
    """The tested token of `count` seeds, and how many of them came from an accepted draft."""

    def one(seed: int) -> tuple[int, int]:
        settings = {**SAMPLED, "seed": seed, "return_tokens": True, "cache_prompt": True}
        body = {"prompt": place.prompt, "n_predict": N_PREDICT, "ignore_eos": True, **settings}
        reply = server.post("/completion", body)
        tokens = reply["tokens"]
        if tokens[0] != place.certain:
            raise SystemExit(f"seed {seed}: {tokens[0]} where only {place.certain} is possible")
        return tokens[1], int(reply["timings"].get("draft_n_accepted", 0) > 0)

    with ThreadPoolExecutor(parallel) as pool:
        results = list(pool.map(one, range(1, count + 1)))
    return Counter(token for token, _ in results), sum(hit for _, hit in results)


def compare(seen: Counter[int], expected: dict[int, float]) -> dict[str, Any]:
    """Pearson's chi-square over the kept tokens; a token outside of them is an error of its own."""
    total = sum(seen.values())
    rare = [t for t, p in expected.items() if p * total < LEAST_EXPECTED]
    cells = [[t] for t in expected if t not in rare] + ([rare] if rare else [])
    observed = [sum(seen[t] for t in cell) for cell in cells]
    wanted = [sum(expected[t] for t in cell) * total for cell in cells]
    outside = total - sum(observed)
    if outside:
        return {"samples": total, "outside": outside, "p_value": 0.0}
    result = chisquare(observed, wanted)
    return {
        "samples": total,
        "outside": 0,
        "cells": len(cells),
        "observed": observed,
        "expected": [round(value, 1) for value in wanted],
        "chi_square": round(float(result.statistic), 4),
        "p_value": round(float(result.pvalue), 4),
    }


def verified(hits: int, drafted: int) -> dict[str, int]:
    """Counts for the report; SystemExit where samples of the drafted token were not drafted."""
    if not drafted or hits < LEAST_ACCEPTED * drafted:
        raise SystemExit(
            f"{hits} accepted drafts in {drafted} samples of the drafted token: too few of them "
            "went through a verification for the test to say anything"
        )
    return {"drafted_token_samples": drafted, "accepted_drafts": hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="texts.jsonl of collect.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    place = find_place(args.target, args.draft, args.texts)
    slots = args.parallel
    flags = ["-np", str(slots), "-c", str(1024 * slots), "-t", str(args.threads)]
    report: dict[str, Any] = {"schema_version": 1, "n_predict": N_PREDICT, "parallel": slots}
    with (
        tempfile.TemporaryDirectory() as folder,
        plain_server(args.target, args.draft, flags, Path(folder) / "log", args.server) as server,
    ):
        seen, hits = sample(server, place, args.samples, slots)
    report |= compare(seen, place.expected) | verified(hits, seen[place.drafted])
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stderr.write(f"p = {report['p_value']} over {report['samples']} samples\n")


if __name__ == "__main__":
    main()
