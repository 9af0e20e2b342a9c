"""The target in PyTorch: products of its dequantized weights, for text in bulk.

In bf16 on CPUs that multiply it faster than float32, about five times as fast as llama.cpp's Q4_1
products on one with AMX. `bulk.py compare` measures how often the two choose the same token.
Shapes: b sequences, t positions so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_pair.data import HIDDEN
from demo_pair.model import rope_tables, rotate
from demo_pair.target import load_target, quicker_type, split_halves

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
    """Keys and values [b, kv, capacity, d] a layer; they grow in steps."""

    def __init__(self, sequences: int, length: int) -> None:
        shape, dtype = (sequences, KV_HEADS, length, HEAD_DIM), quicker_type()
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)]

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def grow(self, length: int) -> None:
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                side[layer] = F.pad(old, (0, 0, 0, length - old.shape[2]))

    def fill(self, first: int, part: Cache) -> None:
        """Take over the positions of `part`, whose sequences stand here from `first` on."""
        rows = slice(first, first + len(part.keys[0]))
        for ours, theirs in ((self.keys, part.keys), (self.values, part.values)):
            for whole, some in zip(ours, theirs, strict=True):
                whole[rows, :, : part.length] = some

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but these."""
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                side[layer] = old[rows]


@dataclass(frozen=True)
class Reading:
    """What the target holds over t tokens of b sequences."""

    taps: Tensor  # [b, t, taps * hidden] float16
    finals: Tensor  # [b, t, hidden] float16, the normed rows that its head reads
    top_ids: Tensor  # [b, t, count] likeliest next tokens
    top_lp: Tensor  # [b, t, count] their log-probabilities


class Teacher:
    def __init__(self, path: Path, taps: tuple[int, ...]) -> None:
        tensors = load_target(path)
        self.taps, self.dtype = taps, quicker_type()
        self.layers = [self.weights_of(tensors, layer) for layer in range(LAYERS)]
        self.embed = tensors["token_embd.weight"]
        self.head = self.embed.to(self.dtype)
        self.norm = tensors["output_norm.weight"]

    def weights_of(self, tensors: dict[str, Tensor], layer: int) -> LayerWeights:
        def t(name: str) -> Tensor:
            return tensors[f"blk.{layer}.{name}.weight"]

        q, k = split_halves(t("attn_q"), HEADS), split_halves(t("attn_k"), KV_HEADS)
        return LayerWeights(
            t("attn_norm"),
            torch.cat([q, k, t("attn_v")]).to(self.dtype),
            t("attn_output").to(self.dtype),
            t("ffn_norm"),
            torch.cat([t("ffn_gate"), t("ffn_up")]).to(self.dtype),
            t("ffn_down").to(self.dtype),
        )

    @torch.inference_mode()
    def read(self, ids: Tensor, pos: int, cache: Cache, count: int) -> Reading:
        """The tokens ids [b, t] of all sequences from position `pos` on, into the cache; several
        only from the start. `count`: how many of the likeliest next tokens to tell."""
        x, taps = self.run(self.embed[ids], pos, cache)
        finals = self.normed(x)
        top_ids, top_lp = likeliest(F.linear(finals.flatten(0, 1), self.head), count)
        shape = (*ids.shape, count)
        return Reading(taps, finals.half(), top_ids.view(shape), top_lp.view(shape))

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), self.norm, EPS).to(self.dtype)

    def run(self, x: Tensor, pos: int, cache: Cache) -> tuple[Tensor, Tensor]:
        """Last rows and tapped rows of x [b, t, hidden], embeddings from position `pos` on."""
        tapped = []
        tables = rope_tables(torch.arange(pos, pos + x.shape[1]), HEAD_DIM, ROPE_THETA)
        for i, w in enumerate(self.layers):
            x = x + self.attend(i, w, x, pos, cache, tables)
            h = F.rms_norm(x, (HIDDEN,), w.ffn_norm, EPS).to(self.dtype)
            gate, up = F.linear(h, w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
            if i in self.taps:
                tapped.append(x.half())
        return x, torch.cat(tapped, dim=-1)

    def attend(
        self,
        i: int,
        w: LayerWeights,
        x: Tensor,
        pos: int,
        cache: Cache,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        b, t, _ = x.shape
        width = KV_HEADS * HEAD_DIM
        h = F.rms_norm(x, (HIDDEN,), w.attention_norm, EPS).to(self.dtype)
        q, k, v = F.linear(h, w.qkv).split([HEADS * HEAD_DIM, width, width], dim=-1)
        q = rotate(q.view(b, t, HEADS, HEAD_DIM), tables).transpose(1, 2)
        keys, values = (side[i][:, :, : pos + t] for side in (cache.keys, cache.values))
        keys[:, :, pos:] = rotate(k.view(b, t, KV_HEADS, HEAD_DIM), tables).transpose(1, 2)
        values[:, :, pos:] = v.view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=t > 1, enable_gqa=True)
        return F.linear(out.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM), w.output)


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
