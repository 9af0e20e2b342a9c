"""The drafter's whole forward pass in numpy, float64, written from the method's formulas.

It imports nothing of the project, and computes every row one way: the slow one. Symbols are
those of the method: H hidden size, R transfer rank, M message size, K candidates, B block rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Settings:
    """What the arithmetic needs of a config.json."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_factor: float
    top_k: int
    mask_id: int
    windows: tuple[int | None, ...]  # of each layer; None sees everything
    window_in_block: bool  # the window also bounds rows of the block

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Settings:
        """Take the settings from a parsed config.json."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        sliding = config.get("use_sliding_window")
        flash = config["dflash_config"]
        return Settings(
            n_layers=config["num_hidden_layers"],
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            eps=config["rms_norm_eps"],
            rope_theta=config.get("rope_theta") or rope["rope_theta"],
            rope_factor=rope.get("factor", 1.0),
            top_k=config["dspine_config"]["top_k"],
            mask_id=flash["mask_token_id"],
            windows=tuple(
                config["sliding_window"] if sliding and kind == "sliding_attention" else None
                for kind in kinds
            ),
            window_in_block=bool(config.get("is_causal", flash.get("causal", False))),
        )


@dataclass(frozen=True)
class Draft:
    """Everything a block produces. B rows; the first is the anchor's.

    pre_injection, post_injection [L, B, H]; final_hidden [B, H]; logits [B, V];
    candidates [B-1, K] by falling logit; scores [B-1, K, K]; drafted [B-1].
    """

    pre_injection: Array
    post_injection: Array
    final_hidden: Array
    logits: Array
    candidates: Array
    scores: Array
    drafted: Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS normalisation of the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: Array, positions: Array, theta: float, factor: float) -> Array:
    """Rotate [n, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = (positions / factor)[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


class Reference:
    """A drafter with the embeddings and the head of its target."""

    def __init__(
        self, weights: Mapping[str, Array], config: Mapping[str, Any], embed: Array, head: Array
    ) -> None:
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.s = Settings.from_config(config)
        self.embed = np.asarray(embed, np.float64)
        self.head = np.asarray(head, np.float64)
        self.codes = self.w["transfer_codes"]
        self.rank = self.codes.shape[1]

    def draft(self, features: Array, anchor: int, rows: int, first_position: int = 0) -> Draft:
        """Draft one block after a context.

        Args:
            features: [n, taps * H], the rows of positions first_position.. of the target.
            anchor: id of the newest token; it stands at position first_position + n.
            rows: B, the anchor included.
        """
        features = np.asarray(features, np.float64)
        context = rms_norm(
            features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.s.eps
        )
        positions = first_position + np.arange(len(context) + rows)
        ids = [anchor] + [self.s.mask_id] * (rows - 1)
        h = self.embed[ids]
        before, after = [], []
        for layer in range(self.s.n_layers):
            h = self._decoder_layer(layer, h, context, positions)
            before.append(h)
            h = self._inject(layer, h, anchor)
            after.append(h)
        final = rms_norm(h, self.w["norm.weight"], self.s.eps)
        logits = final @ self.head.T
        order = np.argsort(-logits[1:], axis=-1, kind="stable")
        candidates = order[:, : self.s.top_k]
        scores = self._scores(before[-1], candidates, anchor)
        return Draft(
            np.stack(before),
            np.stack(after),
            final,
            logits,
            candidates,
            scores,
            walk(candidates, scores),
        )

    def _decoder_layer(self, layer: int, h: Array, context: Array, positions: Array) -> Array:
        w = lambda name: self.w[f"layers.{layer}.{name}.weight"]  # noqa: E731
        x = rms_norm(h, w("input_layernorm"), self.s.eps)
        h = h + self._attention(layer, x, context, positions) @ w("self_attn.o_proj").T
        x = rms_norm(h, w("post_attention_layernorm"), self.s.eps)
        gate = x @ w("mlp.gate_proj").T
        up = x @ w("mlp.up_proj").T
        return h + (gate / (1 + np.exp(-gate)) * up) @ w("mlp.down_proj").T

    def _heads(self, layer: int, which: str, x: Array, positions: Array) -> Array:
        """Queries or keys [n, heads, head_dim]: normalised per head, then rotated."""
        prefix = f"layers.{layer}.self_attn.{which}"
        heads = (x @ self.w[f"{prefix}_proj.weight"].T).reshape(len(x), -1, self.s.head_dim)
        heads = rms_norm(heads, self.w[f"{prefix}_norm.weight"], self.s.eps)
        return rope(heads, positions, self.s.rope_theta, self.s.rope_factor)

    def _attention(self, layer: int, x: Array, context: Array, positions: Array) -> Array:
        everything = np.concatenate((context, x))
        q = self._heads(layer, "q", x, positions[len(context) :])
        k = self._heads(layer, "k", everything, positions)
        v = everything @ self.w[f"layers.{layer}.self_attn.v_proj.weight"].T
        v = v.reshape(len(everything), -1, self.s.head_dim)
        group = self.s.n_heads // self.s.n_kv_heads
        visible = self._visible(layer, len(context), len(x))
        out = np.empty((len(x), self.s.n_heads, self.s.head_dim))
        for head in range(self.s.n_heads):
            logits = q[:, head] @ k[:, head // group].T / np.sqrt(self.s.head_dim)
            logits = np.where(visible, logits, -np.inf)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[:, head] = weights @ v[:, head // group]
        return out.reshape(len(x), -1)

    def _visible(self, layer: int, n_context: int, rows: int) -> Array:
        q = n_context + np.arange(rows)[:, None]
        p = np.arange(n_context + rows)[None, :]
        visible = p <= q
        window = self.s.windows[layer]
        if window is not None:
            inside = q - p < window
            visible &= inside if self.s.window_in_block else inside | (p >= n_context)
        return visible

    def _feature(self, layer: int, h: Array) -> Array:
        a = h @ self.w[f"injection.readouts.{layer}.weight"].T
        length = np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-12)
        return np.sqrt(self.rank) * a / length

    def _write(self, layer: int, h: Array, receiver: Array, predecessor: Array) -> Array:
        gate = (
            self.w["injection.receiver_gate.weight"] @ receiver
            + self.w["injection.predecessor_gate.weight"] @ predecessor
            + self.w["injection.bias"]
        )
        message = self.w["injection.message.weight"] @ predecessor
        scale = np.linalg.norm(h) / np.sqrt(len(h))
        out = self.w[f"injection.writes.{layer}.weight"] @ (message / (1 + np.exp(-gate)))
        return h + scale * out

    def _code(self, token: int) -> Array:
        return np.sqrt(self.rank) * self.codes[token]

    def _inject(self, layer: int, h: Array, anchor: int) -> Array:
        features = self._feature(layer, h)
        out = h.copy()
        for row in range(1, len(h)):
            predecessor = self._code(anchor) if row == 1 else features[row - 1]
            out[row] = self._write(layer, h[row], features[row], predecessor)
        return out

    def _scores(self, last: Array, candidates: Array, anchor: int) -> Array:
        """The transition cache from the last layer's pre-injection rows [B, H]."""
        layer = self.s.n_layers - 1
        features = self._feature(layer, last)
        scores = np.empty((len(candidates), self.s.top_k, self.s.top_k))
        for i, ids in enumerate(candidates):
            before = [anchor] * self.s.top_k if i == 0 else candidates[i - 1]
            for k, token in enumerate(before):
                refined = self._write(layer, last[i + 1], features[i + 1], self._code(token))
                refined = rms_norm(refined, self.w["norm.weight"], self.s.eps)
                scores[i, k] = self.head[ids] @ refined
        return scores


def walk(candidates: Array, scores: Array) -> Array:
    """The best candidate given the one chosen before it, position by position: ids [B-1]."""
    drafted, k = [], 0
    for ids, table in zip(candidates, scores, strict=True):
        k = int(np.argmax(table[k]))
        drafted.append(int(ids[k]))
    return np.array(drafted, np.int64)
