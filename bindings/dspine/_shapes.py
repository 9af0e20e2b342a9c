"""Sizes of a target and of a drafter, from a GGUF header, as llama.cpp reads them at the pin."""

from __future__ import annotations

from dataclasses import dataclass

from dspine._headers import Header, HeaderError

LARGEST = 1 << 31
FOLDED = "transfer_folded.weight"  # the table of a drafter, where it holds no codes

# Period of the sliding-window pattern where the file has no pattern of its own, and whether the
# first layer of a period is the full one (the load_swa_pattern calls under src/models).
SWA_PERIOD: dict[str, tuple[int, bool]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "llama4": (4, False),
    "mellum": (4, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
}
# Architectures with recurrent layers, and those that can roll a few rows of them back
# (llm_arch_is_hybrid and llm_arch_supports_rs_rollback).
DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next"})
HYBRIDS = DELTA_NETS | {
    "jamba",
    "falcon-h1",
    "plamo2",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
}
ROLLS_BACK = frozenset({"qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe"})
# Four positions a token (llama_model_rope_type).
MROPE = frozenset({"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"})


@dataclass(frozen=True)
class Layer:
    """One decoder layer: attention heads and widths, feed-forward width, biases."""

    heads: int
    heads_kv: int
    head_k: int
    head_v: int
    n_ff: int
    swa: bool = False
    recurrent: bool = False
    has_kv: bool = True
    moe: bool = False
    fused_qkv: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False


@dataclass(frozen=True)
class Ssm:
    """Recurrent layers: `conv_state` and `state` are the F32 values kept a row and sequence."""

    d_conv: int
    d_inner: int
    d_state: int
    n_group: int
    dt_rank: int
    conv_state: int
    state: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: count, used per token, widths of one and of the shared ones."""

    count: int
    used: int
    n_ff: int
    shared_n_ff: int


@dataclass(frozen=True)
class ModelShape:
    """What the memory of a target depends on. `window` is 0 without sliding attention."""

    arch: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[Layer, ...]
    window: int
    period: int
    positions_per_token: int
    ssm: Ssm | None
    experts: Experts | None
    rolls_back: bool
    tied_head: bool


@dataclass(frozen=True)
class DraftShape:
    """What the memory of a drafter depends on.

    `taps` are input indices of target layers: l + 1 is the output of layer l. `rank` is 0, and
    with it `top_k` and `message`, for a drafter of the DFlash family that is no DSpine one.
    `folded`: the table holds messages, not codes.
    """

    n_embd: int
    n_vocab: int
    layers: tuple[Layer, ...]
    window: int
    block_size: int
    top_k: int
    rank: int
    message: int
    taps: tuple[int, ...]
    positions_per_token: int
    folded: bool


class _Reader:
    """Integers of one architecture's keys, or errors that name file and key."""

    def __init__(self, header: Header, arch: str) -> None:
        self.header, self.arch = header, arch

    def count(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        found = self.header.integer(f"{self.arch}.{name}", default)
        if not least <= found < LARGEST:
            self._bad(name, found, least)
        return found

    def each(self, name: str, layers: int, default: int | None = None) -> list[int]:
        """One number for each layer, of an array or of a single value."""
        key = f"{self.arch}.{name}"
        values = self.header.integers(key)
        if values is None:
            return [self.count(name, default)] * layers
        if len(values) < layers:
            raise HeaderError(
                f"{self.header.spec}: key {key!r} has {len(values)} values, expected {layers}"
            )
        for value in values:
            if not 0 <= value < LARGEST:
                self._bad(name, value, 0)
        return values[:layers]

    def _bad(self, name: str, found: int, least: int) -> None:
        raise HeaderError(
            f"{self.header.spec}: key '{self.arch}.{name}' is {found}, "
            f"expected {least} to {LARGEST - 1}"
        )


def vocabulary_size(header: Header, arch: str) -> int:
    """Tokens of the vocabulary, which is the length of the list where there is one."""
    count = header.array_length("tokenizer.ggml.tokens")
    found = count if count else header.integer(f"{arch}.vocab_size", 0)
    if not 0 < found < LARGEST:
        raise HeaderError(f"{header.spec}: no vocabulary (tokenizer.ggml.tokens is missing)")
    return found


def target_shape(header: Header) -> ModelShape:
    """Sizes of a target; HeaderError for a drafter or a header that lacks a size."""
    if header.kind != "target":
        raise HeaderError(f"{header.spec}: {header.describe_kind()}; a target is expected here")
    arch = header.architecture
    read = _Reader(header, arch)
    blocks = read.count("block_count", least=1)
    skipped = read.count("nextn_predict_layers", 0)
    if skipped >= blocks:
        read._bad("nextn_predict_layers", skipped, 0)
    layers = _layers(read, blocks - skipped)
    window = read.count("attention.sliding_window", 0)
    window = window if any(layer.swa for layer in layers) else 0
    return ModelShape(
        arch=arch,
        n_embd=read.count("embedding_length", least=1),
        n_vocab=vocabulary_size(header, arch),
        n_ctx_train=read.count("context_length", 0),
        layers=layers,
        window=window,
        period=_period(layers),
        positions_per_token=4 if arch in MROPE else 1,
        ssm=_ssm(read),
        experts=_experts(read),
        rolls_back=arch in ROLLS_BACK,
        tied_head="output.weight" not in header.tensor_names,
    )


def _layers(read: _Reader, count: int) -> tuple[Layer, ...]:
    header, arch = read.header, read.arch
    names = header.tensor_names
    heads = read.each("attention.head_count", count, 0)
    heads_kv = read.each("attention.head_count_kv", count, heads[0])
    n_ff = read.each("feed_forward_length", count, 0)
    per_head = read.count("embedding_length", least=1) // (max(heads) or 1)
    head_k = read.count("attention.key_length", per_head)
    head_v = read.count("attention.value_length", per_head)
    swa_k = read.count("attention.key_length_swa", head_k)
    swa_v = read.count("attention.value_length_swa", head_v)
    swa, recurrent = _swa(read, count), _recurrent(read, count, heads_kv)
    from_start = count - read.count("attention.shared_kv_layers", 0)

    def has(il: int, name: str) -> bool:
        return f"blk.{il}.{name}" in names

    return tuple(
        Layer(
            heads=heads[il],
            heads_kv=heads_kv[il],
            head_k=swa_k if swa[il] else head_k,
            head_v=swa_v if swa[il] else head_v,
            n_ff=n_ff[il],
            swa=swa[il],
            recurrent=recurrent[il],
            has_kv=il < from_start and not (arch in HYBRIDS and recurrent[il]),
            moe=has(il, "ffn_gate_inp.weight"),
            fused_qkv=not recurrent[il] and has(il, "attn_qkv.weight"),
            qk_norm=has(il, "attn_q_norm.weight"),
            qkv_bias=has(il, "attn_q.bias") or has(il, "attn_qkv.bias"),
            out_bias=has(il, "attn_output.bias"),
            ffn_bias=has(il, "ffn_up.bias"),
        )
        for il in range(count)
    )


def _swa(read: _Reader, count: int) -> list[bool]:
    key = f"{read.arch}.attention.sliding_window_pattern"
    if read.count("attention.sliding_window", 0) == 0:
        return [False] * count
    given = read.header.integers(key)
    if given is not None and len(given) >= count:
        return [bool(v) for v in given[:count]]
    period, dense_first = SWA_PERIOD.get(read.arch, (1, False))
    period = read.header.integer(key, period)
    if dense_first:
        return [period == 0 or il % period != 0 for il in range(count)]
    return [period == 0 or il % period < period - 1 for il in range(count)]


def _recurrent(read: _Reader, count: int, heads_kv: list[int]) -> list[bool]:
    if read.arch not in HYBRIDS:
        return [False] * count
    if read.arch not in DELTA_NETS:  # they mark a layer without attention by no heads
        return [h == 0 for h in heads_kv]
    given = read.header.integers(f"{read.arch}.attention.recurrent_layers")
    if given is not None and len(given) >= count:
        return [bool(v) for v in given[:count]]
    interval = read.count("full_attention_interval", 4, least=1)
    return [(il + 1) % interval != 0 for il in range(count)]


def _ssm(read: _Reader) -> Ssm | None:
    """Row sizes as n_embd_r and n_embd_s of src/llama-hparams.cpp."""
    if (short := read.count("shortconv.l_cache", 0)) > 0:
        width = read.count("embedding_length") * (short - 1)
        return Ssm(short, 0, 0, 0, 1, conv_state=width, state=0)
    d_inner, d_state = read.count("ssm.inner_size", 0), read.count("ssm.state_size", 0)
    if not d_inner:
        return None
    d_conv, n_group = read.count("ssm.conv_kernel", 0), read.count("ssm.group_count", 0)
    return Ssm(
        d_conv=d_conv,
        d_inner=d_inner,
        d_state=d_state,
        n_group=n_group,
        dt_rank=read.count("ssm.time_step_rank", 1, least=1),
        conv_state=max(d_conv - 1, 0) * (d_inner + 2 * n_group * d_state),
        state=d_state * d_inner,
    )


def _experts(read: _Reader) -> Experts | None:
    count = read.count("expert_count", 0)
    if not count:
        return None
    n_ff = read.header.integers(f"{read.arch}.feed_forward_length")
    dense = max(n_ff) if n_ff else read.count("feed_forward_length", 0)
    return Experts(
        count=count,
        used=read.count("expert_used_count", 1, least=1),
        n_ff=read.count("expert_feed_forward_length", dense),
        shared_n_ff=read.count("expert_shared_feed_forward_length", 0),
    )


def _period(layers: tuple[Layer, ...]) -> int:
    """After how many layers the kinds repeat; all of them where they do not."""
    kinds = [(a.swa, a.recurrent, a.moe, a.heads_kv, a.n_ff) for a in layers]
    for period in range(1, len(kinds)):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            return period
    return len(kinds)


def draft_shape(header: Header) -> DraftShape:
    """Sizes of a DSpine drafter, or of a DFlash one; HeaderError for any other file."""
    if header.architecture != "dflash":
        raise HeaderError(
            f"{header.spec}: {header.describe_kind()}; a DSpine drafter is expected here"
        )
    read = _Reader(header, "dflash")
    count = read.count("block_count", least=1)
    taps = header.integers("dflash.target_layers")
    if not taps:
        raise HeaderError(f"{header.spec}: key 'dflash.target_layers' is missing or empty")
    layers = _layers(read, count)
    is_dspine = header.kind == "drafter"
    sections = header.integers("dflash.rope.dimension_sections")
    return DraftShape(
        n_embd=read.count("embedding_length", least=1),
        n_vocab=vocabulary_size(header, "dflash"),
        layers=layers,
        window=read.count("attention.sliding_window", 0) if any(a.swa for a in layers) else 0,
        block_size=read.count("block_size", least=2),
        top_k=read.count("selector_top_k", least=1) if is_dspine else 0,
        rank=read.count("transfer_rank", least=1) if is_dspine else 0,
        message=read.count("message_size", least=1) if is_dspine else 0,
        taps=tuple(taps),
        positions_per_token=4 if sections and any(sections) else 1,
        folded=FOLDED in header.tensor_names,
    )
