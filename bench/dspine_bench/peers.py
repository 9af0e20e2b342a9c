"""Random drafters of four families on one backbone, and a random target for them.

DFlash, DFlash2, DSpark and DSpine share the same decoder layers, `fc` and norms; each adds its own
tensors. The values are noise of a sensible size: the time of a graph does not depend on them. A
chunk of noise is written again and again, since drawing two thousand million values would take
longer than the measurement.

The sizes that are not the backbone's are assumptions where no drafter of that size is published;
they go into the report.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from dspine_bench.errors import BenchError
from dspine_bench.golden_target import LAYER_NAMES, add_vocabulary
from dspine_bench.synthetic import Shape

Family = Literal["dspine", "dflash", "dflash2", "dspark"]
FAMILIES: tuple[Family, ...] = ("dspine", "dflash", "dflash2", "dspark")
Sizes = dict[str, tuple[int, ...]]  # in numpy's order: rows first

TOP_K = 16
BLOCK = 16
TARGET_LAYERS = 8  # of the random target; a tap is the input of layer 1 or later
CHUNK_BLOCKS = 1 << 12  # rows of noise, each of one quantization block
SCALE = 0.02

SHAPES = {
    "small": Shape(576, 3, 9, 3, 64, 1536, 49152, 128, 96, 5, TARGET_LAYERS),
    "mid": Shape(1024, 5, 16, 8, 64, 3072, 32768, 256, 128, 5, TARGET_LAYERS),
    "medium": Shape(2048, 5, 16, 8, 128, 6144, 151936, 512, 256, 5, TARGET_LAYERS),
    "27b": replace(Shape(), target_layers=TARGET_LAYERS),
}
# name on the command line -> type of the large matrices
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
}


@dataclass(frozen=True)
class Extras:
    """Sizes of the peers' own parts.

    DFlash2's kernel is the shortest that is a convolution, so that no peer is made slow. llama.cpp
    allots 12 graph nodes a tensor to it, 1024 at least, and aborts beyond: with five layers at 4.
    """

    conv_kernel: int = 2
    conv_group: int = 64
    selector_rank: int = 256
    markov_rank: int = 256


def settings(family: Family, shape: Shape, extras: Extras) -> dict[str, int]:
    """The sizes that a family adds."""
    return {
        "dspine": {"rank": shape.rank, "message": shape.message, "top_k": TOP_K},
        "dflash": {},
        "dflash2": {
            "conv_kernel": extras.conv_kernel,
            "conv_group": extras.conv_group,
            "selector_rank": extras.selector_rank,
            "top_k": TOP_K,
        },
        "dspark": {"markov_rank": extras.markov_rank},
    }[family]


def _layer(shape: Shape, index: int, *, qk_norm: bool = True) -> Sizes:
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "input_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "post_attention_layernorm": (h,),
        "mlp.gate_proj": (shape.ffn, h),
        "mlp.up_proj": (shape.ffn, h),
        "mlp.down_proj": (h, shape.ffn),
    }
    return {f"blk.{index}.{LAYER_NAMES[name]}.weight": size for name, size in sizes.items()}


def _own(family: Family, shape: Shape, extras: Extras) -> Sizes:
    """The tensors that a family adds to the backbone."""
    h, v, r, m = shape.hidden, shape.vocab, shape.rank, shape.message
    sizes: Sizes = {}
    if family == "dspine":
        for i in range(shape.layers):
            sizes[f"blk.{i}.inject_readout.weight"] = (r, h)
            sizes[f"blk.{i}.inject_write.weight"] = (h, m)
        for name in ("inject_message", "inject_gate_receiver", "inject_gate_predecessor"):
            sizes[f"{name}.weight"] = (m, r)
        sizes |= {"inject_gate.bias": (m,), "transfer_codes.weight": (v, r)}
    if family == "dflash2":
        wide = 2 * extras.conv_kernel * (h // extras.conv_group)
        for i in range(shape.layers):
            for part in ("attn", "ffn"):
                sizes[f"blk.{i}.{part}_conv_base"] = (2, extras.conv_kernel, h)
                sizes[f"blk.{i}.{part}_conv_proj.weight"] = (wide, h)
        sizes["selector_predecessor.weight"] = (v, extras.selector_rank)
        sizes["selector_successor.weight"] = (v, extras.selector_rank)
        sizes["selector_hidden.weight"] = (extras.selector_rank, h)
    if family == "dspark":
        sizes["markov_w1.weight"] = sizes["markov_w2.weight"] = (v, extras.markov_rank)
        sizes["conf_proj.weight"] = (1, h + extras.markov_rank)
    return sizes


def drafter_sizes(family: Family, shape: Shape, extras: Extras) -> Sizes:
    """Every tensor of a drafter."""
    sizes: Sizes = {}
    for i in range(shape.layers):
        sizes |= _layer(shape, i)
    h = shape.hidden
    sizes |= {"fc.weight": (h, shape.taps * h), "enc.output_norm.weight": (h,)}
    return sizes | {"output_norm.weight": (h,)} | _own(family, shape, extras)


def target_sizes(shape: Shape) -> Sizes:
    """Every tensor of the random target."""
    sizes: Sizes = {"token_embd.weight": (shape.vocab, shape.hidden)}
    for i in range(shape.target_layers):
        sizes |= _layer(shape, i)
    return sizes | {
        "output_norm.weight": (shape.hidden,),
        "output.weight": (shape.vocab, shape.hidden),
    }


def _kind(name: str, size: tuple[int, ...], kind: str) -> gguf.GGMLQuantizationType:
    """The type of a tensor: vectors and convolutions F32, the code bridge BF16, as converted."""
    if len(size) != 2 or name.startswith("conf_proj"):
        return gguf.GGMLQuantizationType.F32
    if "inject_" in name:
        return gguf.GGMLQuantizationType.BF16
    wanted = TYPES[kind]
    if name == "output.weight" and kind == "q4_k":
        wanted = gguf.GGMLQuantizationType.Q6_K  # the head of a Q4_K_M file
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    if size[1] % block == 0:
        return wanted
    # as llama-quantize: a row that is no whole number of blocks gets a type of smaller ones
    q8 = gguf.GGMLQuantizationType.Q8_0
    return q8 if size[1] % gguf.GGML_QUANT_SIZES[q8][0] == 0 else gguf.GGMLQuantizationType.F32


@functools.cache
def _noise(kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Bytes of some blocks of noise."""
    rng = np.random.default_rng(zlib.crc32(kind.name.encode()))
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16):
        values = rng.standard_normal(CHUNK_BLOCKS * 32, np.float32) * np.float32(SCALE)
        words = values.view(np.uint32)
        is_bf16 = kind is gguf.GGMLQuantizationType.BF16
        data: npt.NDArray[Any] = (words >> 16).astype(np.uint16) if is_bf16 else words
        return data.view(np.uint8)
    blocks = rng.integers(0, 256, (CHUNK_BLOCKS, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    # The scale is a float16: a block begins with it, in Q4_K with that of the minima behind it; in
    # Q6_K it stands last. Divided by the spread of what it is multiplied by.
    place, spread = {
        gguf.GGMLQuantizationType.Q8_0: (slice(0, 2), 73),
        gguf.GGMLQuantizationType.Q4_K: (slice(0, 4), 300),
        gguf.GGMLQuantizationType.Q6_K: (slice(-2, None), 1365),
    }[kind]
    scales = np.full(len(range(blocks.shape[1])[place]) // 2, SCALE / spread, np.float16)
    blocks[:, place] = scales.view(np.uint8)
    return blocks.reshape(-1)


def _bytes_of(size: tuple[int, ...], kind: gguf.GGMLQuantizationType, name: str) -> Any:
    """The raw bytes of a tensor, as rows."""
    if name.endswith("norm.weight"):
        return np.ones(size, np.float32)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    wanted = prod(size) // n_values * n_bytes
    data = np.resize(_noise(kind), wanted)
    if kind is gguf.GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(size)
    return data.reshape(*size[:-1], size[-1] // n_values * n_bytes)


def _write_tensors(writer: gguf.GGUFWriter, sizes: Sizes, kind: str) -> None:
    """Headers first, then one tensor at a time, so that memory holds one."""
    kinds = {name: _kind(name, size, kind) for name, size in sizes.items()}
    for name, size in sizes.items():
        n_values, n_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        nbytes = prod(size) // n_values * n_bytes
        is_f32 = kinds[name] is gguf.GGMLQuantizationType.F32
        dtype = np.dtype(np.float32 if is_f32 else np.uint8)
        raw = None if is_f32 else kinds[name]
        shown = size if is_f32 else (*size[:-1], size[-1] // n_values * n_bytes)
        writer.add_tensor_info(name, shown, dtype, nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size in sizes.items():
        writer.write_tensor_data(_bytes_of(size, kinds[name], name))
    writer.close()


def _common(writer: gguf.GGUFWriter, shape: Shape, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    add_vocabulary(writer, shape.vocab)


def write_target(path: Path, shape: Shape, kind: str) -> Path:
    """A random target of the drafters' hidden size and vocabulary."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("random target")
    _common(writer, shape, shape.target_layers)
    _write_tensors(writer, target_sizes(shape), kind)
    return path


def write_drafter(path: Path, family: Family, shape: Shape, kind: str, extras: Extras) -> Path:
    """A random drafter; BenchError for a shape that the family cannot have."""
    if family in ("dspine", "dflash2") and shape.hidden < TOP_K * (TOP_K + 1):
        raise BenchError(f"{family}: hidden size {shape.hidden} cannot hold {TOP_K}*({TOP_K}+1)")
    if family == "dflash2" and shape.hidden % extras.conv_group:
        raise BenchError(f"dflash2: hidden size {shape.hidden} is no multiple of its groups")
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_name(f"random {family}")
    _common(writer, shape, shape.layers)
    writer.add_uint32("dflash.block_size", BLOCK)
    step = max((shape.target_layers - 1) // shape.taps, 1)
    writer.add_array("dflash.target_layers", [1 + i * step for i in range(shape.taps)])
    writer.add_bool("dflash.attention.causal", True)
    writer.add_uint32("tokenizer.ggml.mask_token_id", shape.vocab - 1)
    sizes = settings(family, shape, extras)
    if "top_k" in sizes:
        writer.add_uint32("dflash.selector_top_k", TOP_K)
    if family == "dspine":
        writer.add_uint32("dflash.transfer_rank", shape.rank)
        writer.add_uint32("dflash.message_size", shape.message)
    if family == "dflash2":
        writer.add_uint32("dflash.conv_kernel_size", extras.conv_kernel)
        writer.add_uint32("dflash.conv_group_size", extras.conv_group)
        writer.add_uint32("dflash.selector_rank", extras.selector_rank)
    if family == "dspark":
        # its block begins with the anchor as the others' do: equal rows, equal drafts
        writer.add_bool("dflash.sample_from_anchor", False)
    _write_tensors(writer, drafter_sizes(family, shape, extras), kind)
    return path
