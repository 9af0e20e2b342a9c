"""Do PyTorch and llama.cpp draft the same? Rounds on real text, both from the same tapped rows.

Give an F32 drafter: what is compared is the computation, not a quantization.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dspine import Pair, PairOptions
from torch import Tensor

from demo_pair.model import Drafter, load_checkpoint
from demo_pair.target import load_target
from demo_pair.texts import Text, texts_of


def walk(
    drafter: Drafter, embed: Tensor, taps: Tensor, anchor: int, other: list[int]
) -> tuple[list[int], float | None]:
    """PyTorch's draft after `taps` [c, taps * hidden]; and, where `other` leaves it first, by how
    much PyTorch prefers its own choice there. Infinite where the other is no candidate."""
    shape = drafter.shape
    ids = torch.full((1, 1, shape.block), shape.mask_token_id)
    ids[..., 0] = anchor
    where = torch.tensor([[len(taps)]])
    block = drafter(embed[ids], where, ids[..., 0], drafter.context(taps[None]))
    logits = drafter.norm(block.out[0, 0, 1:]) @ embed.T
    previous, drafted, gap = torch.tensor([anchor]), list[int](), None
    for row, candidates in enumerate(logits.topk(shape.top_k, dim=-1).indices):
        scores = embed[candidates] @ drafter.refine(block.last[0, 0, row + 1], previous[0])
        best = candidates[scores.argmax()]
        if gap is None and int(best) != other[row]:
            theirs = scores[candidates == other[row]]
            gap = float(scores.max() - theirs[0]) if len(theirs) else float("inf")
        drafted.append(int(best))
        previous = best[None]
    return drafted, gap


def rounds_of(pair: Pair, drafter: Drafter, embed: Tensor, text: Text, count: int) -> list[Any]:
    """`count` rounds at even distances in one text: None where both agree, else the gap."""
    tokens = text.prompt + text.continuation
    pair.truncate(0, 0)
    pair.target_decode(0, tokens, 0)
    taps = pair.target_taps()
    pair.truncate(0, 0)
    anchors = np.linspace(len(text.prompt), len(tokens) - 1, count, dtype=int)
    fed, found = 0, []
    for anchor in sorted(set(anchors.tolist())):
        pair.draft_feed(0, taps[fed:anchor], fed)
        fed = anchor
        theirs = pair.draft(0, tokens[anchor], anchor).tolist()
        some = torch.from_numpy(taps[:anchor])
        ours, gap = walk(drafter, embed, some, tokens[anchor], theirs)
        found.append(None if ours == theirs else gap)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True, help="the checkpoint as an F32 GGUF")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True, help="a folder of collect.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--each", type=int, default=5, help="rounds in a text")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    drafter = load_checkpoint(args.checkpoint).eval()
    embed = load_target(args.target)["token_embd.weight"]
    options = PairOptions(
        n_ctx=1024,
        n_batch=1024,
        n_threads=args.threads,
        type_k_draft="f32",
        type_v_draft="f32",
        flash_attn="off",
    )
    found: list[Any] = []
    with Pair(args.target, args.draft, options) as pair, torch.inference_mode():
        texts = list(texts_of(args.held_out / "texts.jsonl"))
        apart = max(len(texts) // args.texts, 1)  # they are sorted by category
        for text in texts[::apart][: args.texts]:
            found += rounds_of(pair, drafter, embed, text, args.each)
    # JSON has no infinity: null stands for "not among PyTorch's candidates".
    gaps = [gap if gap < float("inf") else None for gap in found if gap is not None]
    report = {"schema_version": 1, "rounds": len(found), "same": len(found) - len(gaps)}
    args.out.write_text(json.dumps(report | {"gaps": gaps}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
