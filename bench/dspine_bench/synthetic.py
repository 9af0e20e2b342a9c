"""A DSpine checkpoint of the true 27B drafter shape, filled with seeded noise.

Nobody can ship 4 GB of weights for a benchmark, and speed and size do not depend on the values:
`python -m dspine_bench.synthetic DIR` writes the checkpoint (Hugging Face layout, BF16) and a
target GGUF that has the metadata and the vocabulary of the target, and no tensors.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import numpy.typing as npt
import typer

CHUNK = 1 << 22  # values generated at a time: bounds memory


@dataclass(frozen=True)
class Shape:
    """Dimensions of a drafter; the defaults are those of the published 27B one."""

    hidden: int = 5120
    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 17408
    vocab: int = 248320
    rank: int = 1024
    message: int = 512
    taps: int = 5
    target_layers: int = 64

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as the reference saves them (PyTorch order)."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            layer = f"layers.{i}."
            shapes |= {
                layer + "input_layernorm.weight": (h,),
                layer + "post_attention_layernorm.weight": (h,),
                layer + "self_attn.q_proj.weight": (q, h),
                layer + "self_attn.k_proj.weight": (kv, h),
                layer + "self_attn.v_proj.weight": (kv, h),
                layer + "self_attn.o_proj.weight": (h, q),
                layer + "self_attn.q_norm.weight": (self.head_dim,),
                layer + "self_attn.k_norm.weight": (self.head_dim,),
                layer + "mlp.gate_proj.weight": (self.ffn, h),
                layer + "mlp.up_proj.weight": (self.ffn, h),
                layer + "mlp.down_proj.weight": (h, self.ffn),
                f"injection.readouts.{i}.weight": (self.rank, h),
                f"injection.writes.{i}.weight": (h, self.message),
            }
        return shapes | {
            "fc.weight": (h, self.taps * h),
            "hidden_norm.weight": (h,),
            "norm.weight": (h,),
            "injection.message.weight": (self.message, self.rank),
            "injection.receiver_gate.weight": (self.message, self.rank),
            "injection.predecessor_gate.weight": (self.message, self.rank),
            "injection.bias": (self.message,),
            "transfer_codes": (self.vocab, self.rank),
        }

    def config(self) -> dict[str, Any]:
        """The flat config.json that goes with the tensors."""
        step = self.target_layers // self.taps
        return {
            "architectures": ["DSpineDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": 16,
            "dflash_config": {
                "mask_token_id": self.vocab - 1,
                "target_layer_ids": [1 + i * step for i in range(self.taps)],
            },
            "dspine_config": {
                "transfer_rank": self.rank,
                "message_size": self.message,
                "top_k": 16,
            },
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "layer_types": ["sliding_attention"] * (self.layers - 1) + ["full_attention"],
            "max_position_embeddings": 262144,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
            "sliding_window": 2048,
            "use_sliding_window": True,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Truncate; rounding would change nothing that is measured here."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _fill(name: str, shape: tuple[int, ...]) -> Any:
    """Yield the bytes of one BF16 tensor, the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    scale = np.float32(shape[-1] ** -0.5)
    if name.endswith("norm.weight"):
        yield np.full(prod(shape), 0x3F80, np.uint16).tobytes()  # 1.0
        return
    left = prod(shape)
    while left:
        n = min(left, CHUNK // shape[-1] * shape[-1])  # whole rows
        rows = rng.standard_normal((n // shape[-1], shape[-1]), np.float32)
        if name == "transfer_codes":
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)  # unit length, as published
        else:
            rows *= scale
        yield _to_bf16(rows).tobytes()
        left -= n


def write_checkpoint(folder: Path, shape: Shape) -> Path:
    """Write config.json and model.safetensors into `folder`; return the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    header: dict[str, Any] = {}
    offset = 0
    for name, dims in shape.tensors().items():
        size = 2 * prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, offset + size]}
        offset += size
    header["transfer_ready"] = {"dtype": "BOOL", "shape": [], "data_offsets": [offset, offset + 1]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, dims in shape.tensors().items():
            for chunk in _fill(name, dims):
                out.write(chunk)
        out.write(b"\x01")
    return path


def write_target_header(path: Path, shape: Shape) -> Path:
    """Write a GGUF with what a converter reads of a target: metadata and vocabulary."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name("synthetic 27B target")
    writer.add_block_count(shape.target_layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_context_length(262144)
    writer.add_vocab_size(shape.vocab)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"<{i}>" for i in range(shape.vocab)])
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocab)
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main(folder: Annotated[Path, typer.Argument(help="where to write about 4.1 GB")]) -> None:
    """Write the synthetic 27B drafter and the header of its target."""
    shape = Shape()
    typer.echo(write_checkpoint(folder / "drafter", shape))
    typer.echo(write_target_header(folder / "target-header.gguf", shape))


if __name__ == "__main__":
    typer.run(main)
