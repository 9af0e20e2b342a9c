"""Files with the true headers of the published 27B pair, and holes where their data would be."""

from __future__ import annotations

import json
import os
import struct
from math import prod
from pathlib import Path

import gguf
import numpy as np
from dspine_bench.synthetic import Shape
from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

LAYERS, HIDDEN, FFN, VOCAB = 64, 5120, 17408, 248320
HEADS, KV_HEADS, HEAD = 24, 4, 256
K_HEADS, V_HEADS, STATE, CONV = 16, 48, 128, 4
WINDOW = 8192  # of the published drafter

Sizes = dict[str, tuple[int, ...]]


def _ffn(prefix: str) -> Sizes:
    return {
        f"{prefix}.ffn_gate.weight": (HIDDEN, FFN),
        f"{prefix}.ffn_down.weight": (FFN, HIDDEN),
        f"{prefix}.ffn_up.weight": (HIDDEN, FFN),
        f"{prefix}.attn_norm.weight": (HIDDEN,),
        f"{prefix}.post_attention_norm.weight": (HIDDEN,),
    }


def _attention(prefix: str) -> Sizes:
    return {
        f"{prefix}.attn_q.weight": (HIDDEN, 2 * HEADS * HEAD),
        f"{prefix}.attn_k.weight": (HIDDEN, KV_HEADS * HEAD),
        f"{prefix}.attn_v.weight": (HIDDEN, KV_HEADS * HEAD),
        f"{prefix}.attn_output.weight": (HEADS * HEAD, HIDDEN),
        f"{prefix}.attn_q_norm.weight": (HEAD,),
        f"{prefix}.attn_k_norm.weight": (HEAD,),
    }


def _delta_net(prefix: str) -> Sizes:
    inner = V_HEADS * STATE
    channels = 2 * K_HEADS * STATE + inner
    return {
        f"{prefix}.attn_qkv.weight": (HIDDEN, channels),
        f"{prefix}.attn_gate.weight": (HIDDEN, inner),
        f"{prefix}.ssm_conv1d.weight": (CONV, channels),
        f"{prefix}.ssm_dt.bias": (V_HEADS,),
        f"{prefix}.ssm_a": (V_HEADS,),
        f"{prefix}.ssm_beta.weight": (HIDDEN, V_HEADS),
        f"{prefix}.ssm_alpha.weight": (HIDDEN, V_HEADS),
        f"{prefix}.ssm_norm.weight": (STATE,),
        f"{prefix}.ssm_out.weight": (inner, HIDDEN),
    }


def target_tensors() -> Sizes:
    """Names and shapes, in ggml order, of the 27B target with its MTP layer."""
    sizes: Sizes = {
        "token_embd.weight": (HIDDEN, VOCAB),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (HIDDEN, VOCAB),
    }
    for layer in range(LAYERS + 1):
        prefix = f"blk.{layer}"
        attends = layer == LAYERS or layer % 4 == 3
        sizes |= _ffn(prefix) | (_attention(prefix) if attends else _delta_net(prefix))
    return sizes | {
        f"blk.{LAYERS}.nextn.eh_proj.weight": (2 * HIDDEN, HIDDEN),
        f"blk.{LAYERS}.nextn.enorm.weight": (HIDDEN,),
        f"blk.{LAYERS}.nextn.hnorm.weight": (HIDDEN,),
        f"blk.{LAYERS}.nextn.shared_head_norm.weight": (HIDDEN,),
    }


def _stored_type(name: str, shape: tuple[int, ...]) -> Type:
    """llama-quantize's Q4_K_M, with more bits for the attention of the delta net layers.

    Uploaders of these models store them so, and the published contexts only fit together with
    the overhead of `dspine._memory` for a file of about this size: 15.6 GiB on the device.
    """
    layer = int(name.split(".")[1]) if name.startswith("blk.") else -1
    more = layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2
    if len(shape) == 1 or "conv1d" in name:
        return Type.F32
    if name.endswith(("ssm_alpha.weight", "ssm_beta.weight")):
        return Type.Q8_0
    if name.endswith("attn_gate.weight"):
        return Type.Q5_K
    if name == "output.weight" or name.endswith(("attn_qkv.weight", "attn_k.weight")):
        return Type.Q6_K
    if name.endswith(("attn_v.weight", "ffn_down.weight")) and more:
        return Type.Q6_K
    return Type.Q4_K


def write_holes(writer: gguf.GGUFWriter, path: Path, tensors: Sizes, types: list[Type]) -> Path:
    """Write the header of `writer` with these tensors; the rest of the file is a hole."""
    total = 0
    for (name, shape), kind in zip(tensors.items(), types, strict=True):
        block, size = GGML_QUANT_SIZES[kind]
        nbytes = prod(shape) // block * size
        writer.add_tensor_info(name, list(shape[::-1]), np.dtype(np.float32), nbytes, kind)
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    os.truncate(path, start + total)
    return path


def write_target(path: Path) -> Path:
    """The 27B target as Q4_K_M, 16 GB long, of which the header is stored."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name("synthetic 27B target")
    writer.add_block_count(LAYERS + 1)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_context_length(262144)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(64)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(K_HEADS)
    writer.add_ssm_time_step_rank(V_HEADS)
    writer.add_ssm_inner_size(V_HEADS * STATE)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges([])
    tensors = target_tensors()
    return write_holes(writer, path, tensors, [_stored_type(*item) for item in tensors.items()])


def write_drafters(folder: Path, target: Path, *types: str) -> dict[str, Path]:
    """Headers of the published drafter's shape, as dspine-convert plans them, by type."""
    shape = Shape()
    source = folder / "drafter"
    source.mkdir(parents=True, exist_ok=True)
    # the published file's cache is as large at any context: all its layers slide
    slides = {"layer_types": ["sliding_attention"] * shape.layers, "sliding_window": WINDOW}
    (source / "config.json").write_text(json.dumps(shape.config() | slides))
    _checkpoint_header(source / "model.safetensors", shape)
    options = Options(
        source=str(source),
        target=str(target),
        types=tuple(OutputType(t) for t in types),
        directory=folder,
        dry_run=True,
        quiet=True,
    )
    made: dict[str, Path] = {}
    for file in run(options).plan.files:
        path = folder / f"drafter-{file.type.value}.gguf"
        path.write_bytes(file.header)
        os.truncate(path, file.nbytes)
        made[file.type.value] = path
    return made


def write_dflash2(path: Path) -> Path:
    """A DFlash2 drafter of the same backbone, 1.17 GB: its selector instead of the codes."""
    shape = Shape()
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_vocab_size(VOCAB)
    writer.add_uint32("dflash.block_size", 16)
    writer.add_uint32("dflash.attention.sliding_window", WINDOW)
    writer.add_array("dflash.attention.sliding_window_pattern", [True] * shape.layers)
    writer.add_array("dflash.target_layers", [2, 14, 26, 38, 50])
    sizes: Sizes = {"fc.weight": (shape.taps * HIDDEN, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(shape.layers):
        sizes |= {
            f"blk.{layer}.{name}.weight": size
            for name, size in {
                "attn_q": (HIDDEN, q),
                "attn_k": (HIDDEN, kv),
                "attn_v": (HIDDEN, kv),
                "attn_output": (q, HIDDEN),
                "ffn_gate": (HIDDEN, FFN),
                "ffn_up": (HIDDEN, FFN),
                "ffn_down": (FFN, HIDDEN),
            }.items()
        }
    # what the published file has beside the backbone is not known; its size is
    backbone = sum(prod(size) for size in sizes.values()) * 9 // 16
    rest = (1_170_000_000 - backbone) * 16 // 9 // 256 // 256
    sizes["selector.weight"] = (256, rest * 256)
    types = [Type.F32 if len(size) == 1 else Type.Q4_K for size in sizes.values()]
    return write_holes(writer, path, sizes, types)


def _checkpoint_header(path: Path, shape: Shape) -> None:
    """A BF16 checkpoint of the shape without its data, but for the flag that says it is trained."""
    header: dict[str, object] = {}
    offset = 0
    for name, dims in shape.tensors().items():
        end = offset + 2 * prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, end]}
        offset = end
    header["transfer_ready"] = {"dtype": "BOOL", "shape": [], "data_offsets": [offset, offset + 1]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.seek(offset, os.SEEK_CUR)
        out.write(b"\x01")


def write_small(
    path: Path,
    *,
    arch: str = "llama",
    layers: int = 2,
    window: int = 0,
    tied: bool = False,
    parts: int = 0,
) -> Path:
    """A small target of any dense architecture, with holes for data; in `parts` files if asked.

    Returns the path of the first file.
    """
    hidden, ffn, vocab, head = 128, 256, 512, 64
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(131072)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    if window:
        writer.add_sliding_window(window)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(vocab)])
    sizes: Sizes = {"token_embd.weight": (hidden, vocab), "output_norm.weight": (hidden,)}
    if not tied:
        sizes["output.weight"] = (hidden, vocab)
    for layer in range(layers):
        sizes |= {
            f"blk.{layer}.{name}.weight": size
            for name, size in {
                "attn_norm": (hidden,),
                "attn_q": (hidden, 2 * head),
                "attn_k": (hidden, head),
                "attn_v": (hidden, head),
                "attn_output": (2 * head, hidden),
                "ffn_norm": (hidden,),
                "ffn_gate": (hidden, ffn),
                "ffn_up": (hidden, ffn),
                "ffn_down": (ffn, hidden),
            }.items()
        }
    if not parts:
        return write_holes(writer, path, sizes, [Type.F32] * len(sizes))
    return _write_parts(writer, path, sizes, parts)


def _write_parts(writer: gguf.GGUFWriter, path: Path, sizes: Sizes, parts: int) -> Path:
    """Split files as llama-gguf-split names them; every part says how many there are."""
    names = list(sizes)
    first = path
    for part in range(parts):
        file = path.with_name(f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf")
        if part == 0:
            first = writer.path = file
        else:
            writer = gguf.GGUFWriter(file, "")
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(sizes))
        mine = {name: sizes[name] for name in names[part::parts]}
        write_holes(writer, file, mine, [Type.F32] * len(mine))
    return first
