"""Mean accepted length in PyTorch, by replaying greedy rounds over recorded continuations.

In greedy mode the target's text does not depend on the drafter, so a recorded continuation
decides what would have been accepted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo_pair.data import Corpus, Sequence
from demo_pair.model import Drafter, load_checkpoint
from demo_pair.target import load_target

MODES = ("full", "no_injection", "argmax_walk")


@dataclass
class Tally:
    rounds: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=lambda: [0] * 15)  # accepted at depth >= i + 1

    @property
    def mean_accepted_length(self) -> float:
        return (self.accepted + self.rounds) / max(self.rounds, 1)

    def add(self, accepted: int) -> None:
        self.rounds += 1
        self.accepted += accepted
        for depth in range(accepted):
            self.reached[depth] += 1


def drafts(
    drafter: Drafter,
    embed: Tensor,
    anchors: Tensor,
    tokens: Tensor,
    context: list[tuple[Tensor, Tensor]],
    mode: str,
) -> Tensor:
    """Draft once for each sequence: anchors and tokens [b] to drafted ids [b, block - 1]."""
    shape = drafter.shape
    ids = torch.full((len(tokens), 1, shape.block), shape.mask_token_id)
    ids[:, 0, 0] = tokens
    inject = mode != "no_injection"
    block = drafter(embed[ids], anchors[:, None], tokens[:, None], context, None, inject)
    logits = drafter.norm(block.out[:, 0, 1:]) @ embed.T
    if mode == "argmax_walk":
        return logits.argmax(dim=-1)
    candidates = logits.topk(shape.top_k, dim=-1).indices
    previous, out = tokens, []
    for row in range(shape.block - 1):
        refined = drafter.refine(block.last[:, 0, row + 1], previous)
        scores = (embed[candidates[:, row]] @ refined[..., None])[..., 0]
        previous = candidates[:, row].gather(1, scores.argmax(dim=-1)[:, None])[:, 0]
        out.append(previous)
    return torch.stack(out, dim=1)


def accepted_of(drafted: list[int], true: list[int]) -> int:
    count = 0
    for ours, theirs in zip(drafted, true, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


@torch.inference_mode()
def replay(
    drafter: Drafter, embed: Tensor, corpus: Corpus, chosen: list[Sequence], limit: int, mode: str
) -> dict[str, Tally]:
    """Tallies by category over the first `limit` tokens of the chosen sequences."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    ends = [min(s.length, s.prompt + limit) for s in chosen]
    all_tokens = [corpus.rows(s, "tokens")[:e].tolist() for s, e in zip(chosen, ends, strict=True)]
    anchors = np.array([[e - 1] for e in ends])
    context = drafter.context(corpus.batch(chosen, anchors, drafter.shape.block).taps.float())
    at = [s.prompt for s in chosen]
    while live := [i for i, e in enumerate(ends) if at[i] < e - 1]:
        where = torch.tensor([at[i] for i in live])
        first = torch.tensor([all_tokens[i][at[i]] for i in live])
        some = [(k[live], v[live]) for k, v in context]
        drafted = drafts(drafter, embed, where, first, some, mode).tolist()
        for i, draft in zip(live, drafted, strict=True):
            count = accepted_of(draft, all_tokens[i][at[i] + 1 :])
            tallies[chosen[i].category].add(count)
            at[i] += count + 1
    return dict(tallies)


def evaluate(
    drafter: Drafter, embed: Tensor, corpus: Corpus, each: int, limit: int, mode: str = "full"
) -> dict[str, Tally]:
    """`each` sequences of every category, and "all"."""
    groups: dict[str, list[Sequence]] = defaultdict(list)
    for seq in corpus.sequences:
        if len(groups[seq.category]) < each:
            groups[seq.category].append(seq)
    chosen = [seq for category in sorted(groups) for seq in groups[category]]
    found = replay(drafter, embed, corpus, chosen, limit, mode)
    total = Tally()
    for tally in found.values():
        total.rounds += tally.rounds
        total.accepted += tally.accepted
        total.reached = [a + b for a, b in zip(total.reached, tally.reached, strict=True)]
    return {"all": total, **found}


def as_json(tallies: dict[str, Tally]) -> dict[str, Any]:
    out = {}
    for name, tally in tallies.items():
        depths = [round(count / max(tally.rounds, 1), 4) for count in tally.reached]
        out[name] = {
            "rounds": tally.rounds,
            "accepted": tally.accepted,
            "mean_accepted_length": round(tally.mean_accepted_length, 4),
            "accepted_to_depth": depths,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="The drafter with and without its parts.")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True, help="a folder of collect.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--limit", type=int, default=192)
    args = parser.parse_args()
    drafter = load_checkpoint(args.checkpoint).eval()
    shape = drafter.shape
    embed = load_target(args.target)["token_embd.weight"]
    width = len(shape.target_layer_ids) * shape.hidden
    corpus = Corpus([args.held_out], width)
    report = {"schema_version": 1, "each": args.each, "limit": args.limit, "modes": {}}
    for mode in MODES:
        found = evaluate(drafter, embed, corpus, args.each, args.limit, mode)
        report["modes"][mode] = as_json(found)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
