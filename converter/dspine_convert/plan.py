"""The plan: every tensor's type, size and place, and all metadata, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from dspine_convert import __version__
from dspine_convert.checkpoint import SourceTensor, read_at
from dspine_convert.config import DraftConfig
from dspine_convert.errors import ConvertError, short
from dspine_convert.gguf_format import (
    TensorInfo,
    Value,
    ValueType,
    header_bytes,
    make_array,
    make_value,
    padded,
    tensor_bytes,
)
from dspine_convert.names import Kind, Mapped, Resolution
from dspine_convert.target import PUBLISHES_LAST_LAYER, Target

T = GGMLQuantizationType
QUANTIZATION_VERSION = 2
ARCH = "dflash"


class OutputType(str, Enum):
    """The file types that can be asked for."""

    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_K_M = "q4_k_m"


# File type number and the type of an ordinary weight.
_FILE_TYPES: dict[OutputType, tuple[LlamaFileType, GGMLQuantizationType]] = {
    OutputType.F32: (LlamaFileType.ALL_F32, T.F32),
    OutputType.BF16: (LlamaFileType.MOSTLY_BF16, T.BF16),
    OutputType.Q8_0: (LlamaFileType.MOSTLY_Q8_0, T.Q8_0),
    OutputType.Q4_K_M: (LlamaFileType.MOSTLY_Q4_K_M, T.Q4_K),
}
# What llama-quantize takes where a row is no multiple of the block; F16 if that fails as well.
_FALLBACK = {T.Q4_K: T.Q5_0, T.Q6_K: T.Q8_0}
_MORE_BITS = ("attn_v.weight", "ffn_down.weight")


@dataclass(frozen=True)
class Provenance:
    """Where the checkpoint came from; `repo` and `revision` only for the hub."""

    name: str
    repo: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of one output file; `info.offset` counts from the start of the data."""

    mapped: Mapped
    info: TensorInfo


@dataclass(frozen=True)
class PlannedFile:
    """One output file: its header is final, its tensors' places are known."""

    type: OutputType
    file_name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    values: dict[str, Value]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        last = self.tensors[-1].info
        return len(self.header) + padded(last.offset + last.nbytes)


@dataclass(frozen=True)
class Plan:
    """All output files of one run, and what the user should know about them."""

    files: tuple[PlannedFile, ...]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def input_layer(reference_id: int) -> int:
    """Output of decoder layer k is the input of layer k + 1, which is how llama.cpp counts."""
    return reference_id + 1


def use_more_bits(layer: int, n_layers: int) -> bool:
    """llama-quantize's rule for the layers whose attn_v and ffn_down get Q6_K in Q4_K_M."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def stored_type(
    mapped: Mapped, kind: OutputType, n_layers: int
) -> tuple[GGMLQuantizationType, bool]:
    """The stored type of a tensor, and whether its width forced a fallback."""
    if mapped.kind is Kind.NORM or kind is OutputType.F32:
        return T.F32, False
    if mapped.kind is Kind.BRIDGE:
        return T.BF16, False
    wanted = _FILE_TYPES[kind][1]
    more = mapped.layer is not None and use_more_bits(mapped.layer, n_layers)
    if kind is OutputType.Q4_K_M and more and mapped.gguf.endswith(_MORE_BITS):
        wanted = T.Q6_K
    width = mapped.shape[-1]
    if width % GGML_QUANT_SIZES[wanted][0] == 0:
        return wanted, False
    other = _FALLBACK.get(wanted, wanted)
    return (other if width % GGML_QUANT_SIZES[other][0] == 0 else T.F16), True


def check_partner(config: DraftConfig, target: Target) -> None:
    """Refuse a drafter and a target that do not belong together, naming both numbers."""
    if config.hidden_size != target.embedding_length:
        raise ConvertError(
            f"hidden_size is {config.hidden_size}, the target's is {target.embedding_length} "
            f"({target.where}: {short(target.architecture)}.embedding_length)"
        )
    if config.vocab_size != target.vocab_size:
        raise ConvertError(
            f"vocab_size is {config.vocab_size}, the target has {target.vocab_size} tokens "
            f"({target.where}: tokenizer.ggml.tokens)"
        )
    layers = target.block_count
    blocks = f"{target.where}: {short(target.architecture)}.block_count"
    if config.num_target_layers not in (None, layers):
        raise ConvertError(
            f"num_target_layers is {config.num_target_layers}, the target has {layers} layers "
            f"({blocks})"
        )
    outside = [k for k in config.target_layer_ids if k >= layers]
    if outside:
        raise ConvertError(
            f"target_layer_ids {list(config.target_layer_ids)}: {outside[0]} is outside the "
            f"target's layers 0 to {layers - 1} ({blocks})"
        )
    if layers - 1 in config.target_layer_ids and target.architecture not in PUBLISHES_LAST_LAYER:
        raise ConvertError(
            f"target_layer_ids taps the target's last layer {layers - 1}, whose output llama.cpp "
            f"does not publish for architecture {target.architecture!r}"
        )


def check_ready(ready: SourceTensor | None, *, reference_pair: bool) -> tuple[str, ...]:
    """Refuse an untrained checkpoint; returns notes."""
    if ready is None:
        note = "no transfer_ready flag in the checkpoint; its codes are taken as trained"
        return () if reference_pair else (note,)
    if ready.dtype not in ("BOOL", "U8") or ready.nbytes != 1:
        raise ConvertError(
            f"{ready.path.name}: {ready.name} is {ready.dtype} {list(ready.shape)}, "
            "expected one BOOL"
        )
    if read_at(ready.fd, 1, ready.offset, ready.path) != b"\x01":
        raise ConvertError(
            f"{ready.path.name}: transfer_ready is false: the codes are not final, this checkpoint "
            "is untrained\ntake a finished checkpoint"
        )
    return ()


def _text(value: str) -> Value:
    return make_value(ValueType.STRING, value)


def _u32(value: int) -> Value:
    return make_value(ValueType.UINT32, value)


def _f32(value: float) -> Value:
    return make_value(ValueType.FLOAT32, value)


def _general(kind: OutputType, config: DraftConfig, source: Provenance) -> dict[str, Value]:
    values = {
        "general.architecture": _text(ARCH),
        "general.type": _text("model"),
        "general.name": _text(source.name),
        "general.file_type": _u32(int(_FILE_TYPES[kind][0])),
        "general.quantization_version": _u32(QUANTIZATION_VERSION),
        "general.source.name": _text(source.repo or source.name),
    }
    if source.repo:
        url = f"https://huggingface.co/{source.repo}"
        values["general.source.url"] = _text(url)
        values["general.source.repo_url"] = _text(url)
        values["general.source.revision"] = _text(source.revision or "")
    values["dspine.converter.version"] = _text(__version__)
    values["dspine.config.sha256"] = _text(config.sha256)
    return values


def _backbone(config: DraftConfig) -> dict[str, Value]:
    return {
        f"{ARCH}.block_count": _u32(config.n_layers),
        f"{ARCH}.context_length": _u32(config.context_length),
        f"{ARCH}.embedding_length": _u32(config.hidden_size),
        f"{ARCH}.feed_forward_length": _u32(config.ffn_size),
        f"{ARCH}.attention.head_count": _u32(config.n_heads),
        f"{ARCH}.attention.head_count_kv": _u32(config.n_kv_heads),
        f"{ARCH}.attention.key_length": _u32(config.head_dim),
        f"{ARCH}.attention.value_length": _u32(config.head_dim),
        f"{ARCH}.attention.layer_norm_rms_epsilon": _f32(config.rms_eps),
        f"{ARCH}.attention.causal": make_value(ValueType.BOOL, True),
        f"{ARCH}.vocab_size": _u32(config.vocab_size),
    }


def _rope(config: DraftConfig, target: Target) -> dict[str, Value]:
    values = {
        f"{ARCH}.rope.freq_base": _f32(config.rope_theta),
        f"{ARCH}.rope.dimension_count": _u32(config.head_dim),
    }
    if target.uses_mrope:  # the drafter turns on the first position only
        sections = [config.head_dim // 2, 0, 0, 0]
        values[f"{ARCH}.rope.dimension_sections"] = make_array(ValueType.INT32, sections)
    scaling = config.rope_scaling
    if scaling is None:
        return values
    values[f"{ARCH}.rope.scaling.type"] = _text(scaling.kind)
    values[f"{ARCH}.rope.scaling.factor"] = _f32(scaling.factor)
    if scaling.original_context is not None:
        values[f"{ARCH}.rope.scaling.original_context_length"] = _u32(scaling.original_context)
    if scaling.beta_fast is not None and scaling.beta_slow is not None:
        values[f"{ARCH}.rope.scaling.yarn_beta_fast"] = _f32(scaling.beta_fast)
        values[f"{ARCH}.rope.scaling.yarn_beta_slow"] = _f32(scaling.beta_slow)
    return values


def _drafting(config: DraftConfig, resolution: Resolution) -> dict[str, Value]:
    layers = [input_layer(k) for k in config.target_layer_ids]
    values = {
        f"{ARCH}.block_size": _u32(config.block_size),
        f"{ARCH}.target_layers": make_array(ValueType.INT32, layers),
        f"{ARCH}.selector_top_k": _u32(config.top_k),
        f"{ARCH}.transfer_rank": _u32(resolution.rank),
        f"{ARCH}.message_size": _u32(resolution.message),
    }
    if any(m.matrices for m in resolution.mapped):
        values["dspine.folded"] = make_value(ValueType.BOOL, True)
    if config.sliding_window is not None:
        values[f"{ARCH}.attention.sliding_window"] = _u32(config.sliding_window)
        pattern = make_array(ValueType.BOOL, config.layer_is_sliding)
        values[f"{ARCH}.attention.sliding_window_pattern"] = pattern
    return values


def _partner(config: DraftConfig, target: Target) -> dict[str, Value]:
    values = {"dspine.target.architecture": _text(target.architecture)}
    if target.name:
        values["dspine.target.name"] = _text(target.name)
    values["dspine.target.embedding_length"] = _u32(target.embedding_length)
    values["dspine.target.block_count"] = _u32(target.block_count)
    values["dspine.target.vocab_size"] = _u32(target.vocab_size)
    values["dspine.target.tokens_fnv1a64"] = _text(target.tokens_fnv1a64)
    values.update(target.tokenizer)
    values["tokenizer.ggml.mask_token_id"] = _u32(config.mask_token_id)
    return values


def _plan_tensors(
    mapped: Iterable[Mapped], kind: OutputType, n_layers: int
) -> tuple[tuple[PlannedTensor, ...], tuple[str, ...]]:
    planned: list[PlannedTensor] = []
    notes: list[str] = []
    offset = 0
    for item in mapped:
        stored, fell_back = stored_type(item, kind, n_layers)
        if fell_back:
            width = item.shape[-1]
            notes.append(f"{kind.value}: {item.gguf} is {width} wide, stored as {stored.name}")
        shape = item.shape[::-1]
        planned.append(PlannedTensor(item, TensorInfo(item.gguf, shape, stored, offset)))
        offset = padded(offset + tensor_bytes(stored, shape))
    return tuple(planned), tuple(notes)


def build_plan(
    config: DraftConfig,
    resolution: Resolution,
    target: Target,
    source: Provenance,
    types: Iterable[OutputType],
) -> Plan:
    """Plan every output file; reads nothing and raises ConvertError for a wrong partner."""
    check_partner(config, target)
    files: list[PlannedFile] = []
    for kind in types:
        tensors, notes = _plan_tensors(resolution.mapped, kind, config.n_layers)
        values = _general(kind, config, source) | _backbone(config) | _rope(config, target)
        values |= _drafting(config, resolution) | _partner(config, target)
        header = header_bytes(values, (t.info for t in tensors))
        name = f"{source.name}-{kind.value.upper()}.gguf"
        files.append(PlannedFile(kind, name, header, tensors, values, notes))
    notes = tuple(dict.fromkeys([*config.notes, *resolution.notes]))
    return Plan(tuple(files), resolution.dropped, notes)
