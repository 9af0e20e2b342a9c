"""Drafter files for the tests: golden checkpoints and random ones, through dspine-convert."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType
from safetensors.numpy import save_file

from support.golden import Case
from support.targets import seeded


def convert(
    source: Path, target: Path, out: Path, *types: str, fold: bool = False
) -> dict[str, Path]:
    """Convert a checkpoint directory; returns the files by type ("f32", "bf16", ...)."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = tuple(OutputType(t) for t in types or ("f32",))
    options = Options(
        source=str(source), target=str(target), types=wanted, directory=out, fold=fold
    )
    paths = run(Options(**{**vars(options), "quiet": True, "force": True})).paths
    return dict(zip(types or ("f32",), paths, strict=True))


def unit_checkpoint(case: Case, folder: Path) -> Path:
    """A checkpoint directory of a unit case, whose weights may lie in another case's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(case.config_path, folder / "config.json")
    shutil.copy(case.weights, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class RandomDrafter:
    """Sizes and settings of a random drafter."""

    hidden: int
    vocab: int
    target_layers: int
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 48
    rank: int = 24
    message: int = 12
    top_k: int = 4
    block: int = 8
    taps: tuple[int, ...] = (0, 2)
    windows: tuple[int, ...] = ()  # layers that slide
    window: int | None = None
    rope: tuple[tuple[str, Any], ...] = (("rope_theta", 10000.0), ("rope_type", "default"))
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """The config.json of the published layout."""
        kinds = ["full_attention"] * self.layers
        for layer in self.windows:
            kinds[layer] = "sliding_attention"
        return {
            "architectures": ["DSpineDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": self.block,
            "dflash_config": {
                "mask_token_id": self.vocab - 1,
                "target_layer_ids": list(self.taps),
            },
            "dspine_config": {
                "message_size": self.message,
                "top_k": self.top_k,
                "transfer_rank": self.rank,
            },
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "is_causal": True,
            "intermediate_size": self.ffn,
            "layer_types": kinds,
            "max_position_embeddings": 8192,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": 1e-6,
            "rope_parameters": dict(self.rope),
            "sliding_window": self.window,
            "use_sliding_window": bool(self.windows),
            "vocab_size": self.vocab,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """Random weights under the published names."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.hidden, len(self.taps) * self.hidden),
            "hidden_norm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
            "injection.message.weight": (self.message, self.rank),
            "injection.receiver_gate.weight": (self.message, self.rank),
            "injection.predecessor_gate.weight": (self.message, self.rank),
            "injection.bias": (self.message,),
            "transfer_codes": (self.vocab, self.rank),
        }
        for layer in range(self.layers):
            parts: dict[str, tuple[int, ...]] = {
                "input_layernorm": (self.hidden,),
                "post_attention_layernorm": (self.hidden,),
                "self_attn.q_proj": (q, self.hidden),
                "self_attn.k_proj": (kv, self.hidden),
                "self_attn.v_proj": (kv, self.hidden),
                "self_attn.o_proj": (self.hidden, q),
                "self_attn.q_norm": (self.head_dim,),
                "self_attn.k_norm": (self.head_dim,),
                "mlp.gate_proj": (self.ffn, self.hidden),
                "mlp.up_proj": (self.ffn, self.hidden),
                "mlp.down_proj": (self.hidden, self.ffn),
            }
            sizes |= {f"layers.{layer}.{k}.weight": v for k, v in parts.items()}
            sizes[f"injection.readouts.{layer}.weight"] = (self.rank, self.hidden)
            sizes[f"injection.writes.{layer}.weight"] = (self.hidden, self.message)
        weights = {name: seeded(name, size, self.seed) for name, size in sizes.items()}
        codes = weights["transfer_codes"]
        weights["transfer_codes"] = codes / np.linalg.norm(codes, axis=1, keepdims=True)
        weights["transfer_ready"] = np.array(True)
        return weights

    def write(self, folder: Path) -> Path:
        """Write the checkpoint directory."""
        write_checkpoint(folder, self.config(), self.weights())
        return folder


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]
) -> None:
    """config.json and model.safetensors, as published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors")
