"""The target in PyTorch: bf16 products of its dequantized weights, for text in bulk.

llama.cpp's Q4_1 products run at about 400 rows a second and core here; bf16 products on a CPU
with AMX at about five times that. `bulk.py compare` measures how often the two choose the same
token. Shapes: b sequences, t positions so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_pair.data import HIDDEN
from demo_pair.model import rope_tables, rotate
from demo_pair.target import load_target, split_halves

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
ROPE_THETA, EPS = 100000.0, 1e-5
GROUP = 256  # columns of the head whose maximum is looked at first


@dataclass(frozen=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Cache:
    """Keys and values [b * kv, capacity, d] a layer.

    The tensors stay whole: a product with a slice of them would copy it first. They grow in
    steps instead, and positions that are not written yet are masked.
    """

    def __init__(self, sequences: int, length: int) -> None:
        shape = (sequences * KV_HEADS, length, HEAD_DIM)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]

    def grow(self, length: int) -> None:
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                side[layer] = F.pad(old, (0, 0, 0, length - old.shape[1]))

    def fill(self, first: int, part: Cache) -> None:
        """Take over the positions of `part`, whose sequences stand here from `first` on."""
        rows = slice(first * KV_HEADS, first * KV_HEADS + len(part.keys[0]))
        for ours, theirs in ((self.keys, part.keys), (self.values, part.values)):
            for whole, some in zip(ours, theirs, strict=True):
                whole[rows, : part.length] = some

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        heads = (rows[:, None] * KV_HEADS + torch.arange(KV_HEADS)).flatten()
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                side[layer] = old[heads]


class Teacher:
    def __init__(self, path: Path, taps: tuple[int, ...]) -> None:
        tensors = load_target(path)
        self.taps = taps
        self.layers = [self.weights_of(tensors, layer) for layer in range(LAYERS)]
        self.embed = tensors["token_embd.weight"]
        self.head = self.embed.bfloat16()
        self.norm = tensors["output_norm.weight"]

    @staticmethod
    def weights_of(tensors: dict[str, Tensor], layer: int) -> LayerWeights:
        def t(name: str) -> Tensor:
            return tensors[f"blk.{layer}.{name}.weight"]

        q, k = split_halves(t("attn_q"), HEADS), split_halves(t("attn_k"), KV_HEADS)
        return LayerWeights(
            t("attn_norm"),
            torch.cat([q, k, t("attn_v")]).bfloat16(),
            t("attn_output").bfloat16(),
            t("ffn_norm"),
            torch.cat([t("ffn_gate"), t("ffn_up")]).bfloat16(),
            t("ffn_down").bfloat16(),
        )

    @torch.inference_mode()
    def step(self, ids: Tensor, pos: int, cache: Cache) -> tuple[Tensor, Tensor]:
        """One position of every sequence, all at `pos`; ids [b].

        Returns logits [b, vocabulary] in bf16 and tapped rows [b, taps * hidden] in float16.
        """
        x, tapped = self.run(self.embed[ids[:, None]], pos, cache)
        normed = F.rms_norm(x[:, 0], (HIDDEN,), self.norm, EPS).bfloat16()
        return F.linear(normed, self.head), tapped[:, 0]

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: Cache) -> Tensor:
        """The first positions of all sequences, ids [b, t]: tapped rows [b, t, taps * hidden]."""
        return self.run(self.embed[ids], 0, cache)[1]

    @torch.inference_mode()
    def finish(self, rows: Tensor) -> Tensor:
        """Normed last rows [t, hidden] of a whole sequence, from the last tap's rows."""
        x, _ = self.run(rows.float()[None], 0, Cache(1, len(rows)), self.taps[-1] + 1)
        return F.rms_norm(x[0], (HIDDEN,), self.norm, EPS)

    def run(self, x: Tensor, pos: int, cache: Cache, first: int = 0) -> tuple[Tensor, Tensor]:
        """Layers from `first` on over x [b, t, hidden]."""
        tapped = [x.new_empty(*x.shape[:2], 0, dtype=torch.half)]
        tables = rope_tables(torch.arange(pos, pos + x.shape[1]), HEAD_DIM, ROPE_THETA)
        for i, w in list(enumerate(self.layers))[first:]:
            x = x + self.attend(i, w, x, pos, cache, tables)
            h = F.rms_norm(x, (HIDDEN,), w.ffn_norm, EPS).bfloat16()
            gate, up = F.linear(h, w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
            if i in self.taps:
                tapped.append(x.half())
        return x, torch.cat(tapped, dim=-1)

    @staticmethod
    def attend(
        i: int, w: LayerWeights, x: Tensor, pos: int, cache: Cache, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Many positions only from the start (pos 0); later one at a time."""
        b, t, _ = x.shape
        width = KV_HEADS * HEAD_DIM
        h = F.rms_norm(x, (HIDDEN,), w.attention_norm, EPS).bfloat16()
        q, k, v = F.linear(h, w.qkv).split([HEADS * HEAD_DIM, width, width], dim=-1)
        q = rotate(q.view(b, t, HEADS, HEAD_DIM), tables)
        k = rotate(k.view(b, t, KV_HEADS, HEAD_DIM), tables).transpose(1, 2)
        v = v.view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        keys, values = cache.keys[i], cache.values[i]
        keys.view(b, KV_HEADS, -1, HEAD_DIM)[:, :, pos : pos + t] = k
        values.view(b, KV_HEADS, -1, HEAD_DIM)[:, :, pos : pos + t] = v
        if t > 1:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True
            )
            return F.linear(out.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM), w.output)
        q = q.view(b * KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) * HEAD_DIM**-0.5
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores[..., pos + 1 :] = -torch.inf
        out = torch.bmm(scores.softmax(dim=-1), values)
        return F.linear(out.view(b, 1, HEADS * HEAD_DIM), w.output)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest ids of each row [b, count], best first, and their log-probabilities."""
    # A few rows at a time: their float32 copies stay in the core's own memory.
    found = [likeliest_of(some, count) for some in logits.split(8)]
    return torch.cat([ids for ids, _ in found]), torch.cat([lp for _, lp in found])


def likeliest_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best lie in the `count` groups of columns with the best maxima."""
    b, vocabulary = logits.shape
    logits = logits.float()
    grouped = logits.view(b, vocabulary // GROUP, GROUP)
    groups = grouped.amax(dim=-1).topk(count, dim=-1).indices
    inside = grouped.gather(1, groups[..., None].expand(-1, -1, GROUP)).flatten(1)
    values, places = inside.topk(count, dim=-1)
    ids = groups.gather(1, places // GROUP) * GROUP + places % GROUP
    return ids, values - logits.logsumexp(dim=-1, keepdim=True)
