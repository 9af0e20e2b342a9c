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

from demo_pair.model import rope_tables, rotate
from demo_pair.target import load_target, split_halves

HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN = 9, 3, 64, 30, 576
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
    """Keys and values [b, kv, t, d] a layer; `keep` drops sequences."""

    def __init__(self, sequences: int, length: int) -> None:
        shape = (sequences, KV_HEADS, length, HEAD_DIM)
        self.keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]

    def keep(self, rows: Tensor, used: int) -> None:
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                # The first rows are overwritten in place: what is kept only moves up.
                for new, at in enumerate(rows.tolist()):
                    if new != at:
                        old[new, :, :used] = old[at, :, :used]
                side[layer] = old[: len(rows)]


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
        """One position of every sequence, all at `pos`.

        Returns logits [b, vocabulary] in bf16 and tapped rows [b, taps * hidden] in float16.
        """
        x = self.embed[ids]
        tapped = []
        tables = rope_tables(torch.tensor(pos), HEAD_DIM, ROPE_THETA)
        for i, w in enumerate(self.layers):
            x = x + self.attend(i, w, x, pos, cache, tables)
            h = F.rms_norm(x, (HIDDEN,), w.ffn_norm, EPS).bfloat16()
            gate, up = F.linear(h, w.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w.down)
            if i in self.taps:
                tapped.append(x.half())
        normed = F.rms_norm(x, (HIDDEN,), self.norm, EPS).bfloat16()
        return F.linear(normed, self.head), torch.cat(tapped, dim=-1)

    @staticmethod
    def attend(
        i: int, w: LayerWeights, x: Tensor, pos: int, cache: Cache, tables: tuple[Tensor, Tensor]
    ) -> Tensor:
        b, width = len(x), KV_HEADS * HEAD_DIM
        h = F.rms_norm(x, (HIDDEN,), w.attention_norm, EPS).bfloat16()
        q, k, v = F.linear(h, w.qkv).split([HEADS * HEAD_DIM, width, width], dim=-1)
        q = rotate(q.view(b, HEADS, HEAD_DIM), tables)
        keys, values = cache.keys[i], cache.values[i]
        keys[:, :, pos] = rotate(k.view(b, KV_HEADS, HEAD_DIM), tables)
        values[:, :, pos] = v.view(b, KV_HEADS, HEAD_DIM)
        q = q.view(b, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) * HEAD_DIM**-0.5
        weights = (q @ keys[:, :, : pos + 1].transpose(-1, -2)).softmax(dim=-1)
        return F.linear((weights @ values[:, :, : pos + 1]).reshape(b, HEADS * HEAD_DIM), w.output)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest ids of each row [b, count], best first, and their log-probabilities.

    The `count` best lie in the `count` groups of columns with the best maxima.
    """
    b, vocabulary = logits.shape
    grouped = logits.view(b, vocabulary // GROUP, GROUP)
    groups = grouped.amax(dim=-1).topk(count, dim=-1).indices
    inside = grouped.gather(1, groups[..., None].expand(-1, -1, GROUP)).flatten(1).float()
    values, places = inside.topk(count, dim=-1)
    ids = groups.gather(1, places // GROUP) * GROUP + places % GROUP
    return ids, values - logits.float().logsumexp(dim=-1, keepdim=True)
