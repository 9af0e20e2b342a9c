"""Target GGUFs for the tests: the golden Qwen3.5 model, and small random models by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dspine_bench.golden_target import add_common, add_vocabulary, finish

from support.checkpoint import read_safetensors


def seeded(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Weights that depend on the tensor's name, so that adding one leaves the others as they are.

    Norms (`..._norm`) lie around 1; matrices keep the variance of their input.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    values = rng.standard_normal(shape)
    if "norm" in name:
        return (1 + 0.1 * values).astype(np.float32)
    return (values / np.sqrt(shape[-1])).astype(np.float32)


@dataclass(frozen=True)
class Shape:
    """Sizes of a random target."""

    hidden: int
    vocab: int
    layers: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    ffn: int = 64

    def config(self) -> dict[str, Any]:
        """The sizes under their Hugging Face names."""
        return {
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0},
        }


def _layer_tensors(shape: Shape, arch: str, layer: int) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (shape.hidden,),
        "attn_q.weight": (q, shape.hidden),
        "attn_k.weight": (kv, shape.hidden),
        "attn_v.weight": (kv, shape.hidden),
        "attn_output.weight": (shape.hidden, q),
        "ffn_norm.weight": (shape.hidden,),
        "ffn_gate.weight": (shape.ffn, shape.hidden),
        "ffn_up.weight": (shape.ffn, shape.hidden),
        "ffn_down.weight": (shape.hidden, shape.ffn),
    }
    if arch == "qwen3":
        tensors |= {
            "attn_q_norm.weight": (shape.head_dim,),
            "attn_k_norm.weight": (shape.head_dim,),
        }
    if arch == "qwen2":
        tensors |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    return {f"blk.{layer}.{name}": size for name, size in tensors.items()}


def write_random_target(
    path: Path,
    arch: str,
    shape: Shape,
    embed: np.ndarray | None = None,
    head: np.ndarray | None = None,
    name: str = "random",
) -> Path:
    """A target of arch llama, qwen3 or qwen2 (which publishes no layer inputs), F32.

    `embed` and `head` [vocab, hidden] replace the random ones.
    """
    sizes = {"output_norm.weight": (shape.hidden,)}
    for layer in range(shape.layers):
        sizes |= _layer_tensors(shape, arch, layer)
    tensors = {key: seeded(key, size) for key, size in sizes.items()}
    rows = (shape.vocab, shape.hidden)
    tensors["token_embd.weight"] = seeded("token_embd", rows) if embed is None else embed
    tensors["output.weight"] = seeded("output", rows) if head is None else head
    writer = gguf.GGUFWriter(path, arch)
    add_common(writer, shape.config(), name)
    writer.add_rope_dimension_count(shape.head_dim)
    add_vocabulary(writer, shape.vocab)
    finish(writer, tensors)
    return path


def write_mrope_target(path: Path, shape: Shape) -> Path:
    """A random qwen35 target whose layers are all full attention: M-RoPE without recurrence."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"output_norm.weight": (shape.hidden,)}
    for layer in range(shape.layers):
        sizes |= {
            f"blk.{layer}.{name}": size
            for name, size in {
                "attn_norm.weight": (shape.hidden,),
                "post_attention_norm.weight": (shape.hidden,),
                "attn_q.weight": (2 * q, shape.hidden),
                "attn_k.weight": (kv, shape.hidden),
                "attn_v.weight": (kv, shape.hidden),
                "attn_output.weight": (shape.hidden, q),
                "attn_q_norm.weight": (shape.head_dim,),
                "attn_k_norm.weight": (shape.head_dim,),
                "ffn_gate.weight": (shape.ffn, shape.hidden),
                "ffn_up.weight": (shape.ffn, shape.hidden),
                "ffn_down.weight": (shape.hidden, shape.ffn),
            }.items()
        }
    tensors = {key: seeded(key, size) for key, size in sizes.items()}
    tensors["token_embd.weight"] = seeded("token_embd", (shape.vocab, shape.hidden))
    tensors["output.weight"] = seeded("output", (shape.vocab, shape.hidden))
    config = shape.config() | {
        "layer_types": ["full_attention"] * shape.layers,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    writer = gguf.GGUFWriter(path, "qwen35")
    add_common(writer, config, "mrope")
    _add_qwen35(writer, config)
    add_vocabulary(writer, shape.vocab)
    finish(writer, tensors)
    return path


def _add_qwen35(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys of gated delta net layers and of M-RoPE, as llama.cpp's own converter sets them."""
    rope = config["rope_parameters"]
    inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(inner)
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array("qwen35.attention.recurrent_layers", recurrent)
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


_QWEN35_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


def _tiled(x: np.ndarray, axis: int, config: Mapping[str, Any], width: int) -> np.ndarray:
    """Value heads of `width` from grouped by key head to tiled, which is how ggml broadcasts."""
    k_heads = config["linear_num_key_heads"]
    per_key = config["linear_num_value_heads"] // k_heads
    shape = x.shape
    split = (*shape[:axis], k_heads, per_key, width, *shape[axis + 1 :])
    return x.reshape(split).swapaxes(axis, axis + 1).reshape(shape)


def _qwen35_tensor(name: str, x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """The value of a tensor as llama.cpp stores it."""
    width = config["linear_value_head_dim"]
    queries_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if name in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        x = x.reshape(len(x), -1)
        return np.concatenate((x[:queries_keys], _tiled(x[queries_keys:], 0, config, width)))
    if name == "linear_attn.in_proj_z.weight":
        return _tiled(x, 0, config, width)
    if name in ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"):
        return _tiled(x, 0, config, 1)
    if name == "linear_attn.out_proj.weight":
        return _tiled(x, 1, config, width)
    if name == "linear_attn.A_log":
        return -np.exp(_tiled(x, 0, config, 1))
    if name == "linear_attn.dt_bias":
        return _tiled(x, 0, config, 1)
    # These norms multiply by 1 + weight; the one of the delta net does not.
    if "norm" in name and name != "linear_attn.norm.weight":
        return x + 1
    return x


def write_qwen35_target(directory: Path, path: Path) -> Path:
    """The F32 GGUF of a Hugging Face Qwen3.5 text model without a tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for name, x in read_safetensors(directory / "model.safetensors").items():
        if name == "model.embed_tokens.weight":
            tensors["token_embd.weight"] = x
        elif name == "lm_head.weight":
            tensors["output.weight"] = x
        elif name == "model.norm.weight":
            tensors["output_norm.weight"] = x + 1
        else:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            stored = f"blk.{layer}.{_QWEN35_NAMES[rest]}"
            tensors[stored] = _qwen35_tensor(rest, x, config).astype(np.float32)
    writer = gguf.GGUFWriter(path, "qwen35")
    add_common(writer, config, directory.parent.name)
    _add_qwen35(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    finish(writer, tensors)
    return path
