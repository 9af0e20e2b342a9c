"""The one place that reads a checkpoint's config.json; nothing later touches the raw dict."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspine_convert.checkpoint import parse_json, read_small
from dspine_convert.errors import ConvertError, short, some_names

ARCHITECTURES = ("DSpineDraftModel",)
MODEL_TYPES = ("qwen3", "dspine")
ACTIVATIONS = ("silu",)
ROPE_TYPES = ("default", "linear", "yarn")
LAYER_KINDS = ("full_attention", "sliding_attention")
REFERENCE_BLOCK_SIZE = 16  # what the reference pair runs with, whatever its config says
REFERENCE_TOP_K = 16
MAX_VOCAB = 1 << 24  # candidate ids travel as floats, exact below this
_U31 = (1 << 31) - 1
_MISSING = object()


@dataclass(frozen=True)
class RopeScaling:
    """Position scaling as stored; `original_context` and the betas belong to yarn."""

    kind: str
    factor: float
    original_context: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's settings after checks. Rank, message size and top_k may come from shapes."""

    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    transfer_rank: int | None
    message_size: int | None
    top_k: int
    sliding_window: int | None
    layer_is_sliding: tuple[bool, ...]
    is_causal: bool
    num_target_layers: int | None
    reference_pair: bool
    sha256: str
    notes: tuple[str, ...]


class _Fields:
    """Typed look-ups in a raw config; places are dotted paths, all that exist must agree."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def fail(self, key: str, message: str) -> ConvertError:
        return ConvertError(f"{self.where}: {key} {message}")

    def at(self, place: str) -> Any:
        node: Any = self.raw
        for part in place.split("."):
            if not isinstance(node, dict) or part not in node:
                return _MISSING
            node = node[part]
        return _MISSING if node is None else node

    def find(self, *places: str) -> tuple[str, Any]:
        """The first place that holds a value; raises when two places disagree."""
        present = [(p, v) for p in places if (v := self.at(p)) is not _MISSING]
        if not present:
            return places[0], _MISSING
        for place, value in present[1:]:
            if value != present[0][1]:
                raise self.fail(
                    place, f"is {value!r} but {present[0][0]} is {present[0][1]!r}"[:300]
                )
        return present[0]

    def integer(self, *places: str, low: int = 1, high: int = _U31) -> int:
        value = self.maybe_integer(*places, low=low, high=high)
        if value is None:
            raise self.fail(" or ".join(places), "is missing")
        return value

    def maybe_integer(self, *places: str, low: int = 1, high: int = _U31) -> int | None:
        place, value = self.find(*places)
        if value is _MISSING:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(place, f"is {value!r:.80}, expected an integer")
        if not low <= value <= high:
            raise self.fail(place, f"is {str(value)[:24]}, expected {low} to {high}")
        return value

    def number(self, *places: str, default: float | None = None) -> float:
        place, value = self.find(*places)
        if value is _MISSING and default is not None:
            return default
        if value is _MISSING:
            raise self.fail(" or ".join(places), "is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.fail(place, f"is {value!r:.80}, expected a number")
        # The upper end is float32's: that is how GGUF stores it.
        if not 0 < value < 3.4e38:
            raise self.fail(place, f"is {str(value)[:20]}, expected a positive finite number")
        return float(value)

    def boolean(self, *places: str, default: bool = False) -> bool:
        place, value = self.find(*places)
        if value is _MISSING:
            return default
        if not isinstance(value, bool):
            raise self.fail(place, f"is {value!r:.80}, expected true or false")
        return value

    def text(self, place: str) -> str | None:
        value = self.at(place)
        if value is _MISSING:
            return None
        if not isinstance(value, str):
            raise self.fail(place, f"is {value!r:.80}, expected text")
        return value


def load_config(path: Path, *, reference_pair: bool) -> DraftConfig:
    """Read and check a config file; `reference_pair` selects the rules of layout B.

    Raises ConvertError, naming the key, for anything missing, contradictory or unsupported.
    """
    data = read_small(path)
    config = parse_config(parse_json(data, str(path)), str(path), reference_pair=reference_pair)
    return replace(config, sha256=hashlib.sha256(data).hexdigest())


def _unwrap(raw: Any, where: str) -> dict[str, Any]:
    """The flat settings, which the reference pair may nest under "config"."""
    if not isinstance(raw, dict):
        raise ConvertError(f"{where}: not a JSON object")
    inner = raw.get("config")
    if not isinstance(inner, dict):
        return raw
    outer = {k: v for k, v in raw.items() if k != "config"}
    for key in outer.keys() & inner.keys():
        if outer[key] != inner[key]:
            raise ConvertError(
                f"{where}: config.{short(key)} is {inner[key]!r:.80} but {short(key)} beside it "
                f"is {outer[key]!r:.80}"
            )
    return raw if "hidden_size" in raw else {**outer, **inner}


# What training leaves in dspine_config; a drafter runs without it.
_TRAINING_KEYS = ("candidate_mass_threshold", "ce_weight")
_TRAINING_PREFIXES = ("alignment_", "replacement_")
_RUNNING_KEYS = ("transfer_rank", "message_size", "top_k")


def _unknown_settings(f: _Fields) -> list[str]:
    """A note on keys of dspine_config that nothing here reads: a newer format would have some."""
    settings = f.at("dspine_config")
    if settings is _MISSING:
        return []
    if not isinstance(settings, dict):
        raise f.fail("dspine_config", f"is {settings!r:.80}, expected an object")
    known = {*_TRAINING_KEYS, *_RUNNING_KEYS, *(key for key, _ in _NEUTRAL)}
    unknown = [k for k in settings if k not in known and not k.startswith(_TRAINING_PREFIXES)]
    if not unknown:
        return []
    return [f"dspine_config holds keys that are not known here and ignored: {some_names(unknown)}"]


def _check_family(f: _Fields, reference_pair: bool) -> None:
    names = f.at("architectures")
    if names is _MISSING and not reference_pair:
        raise f.fail("architectures", f"is missing, expected {list(ARCHITECTURES)}")
    if names is not _MISSING and (
        not isinstance(names, list) or not any(n in ARCHITECTURES for n in names)
    ):
        raise f.fail("architectures", f"is {names!r:.120}, supported: {list(ARCHITECTURES)}")
    for key, supported in (("model_type", MODEL_TYPES), ("hidden_act", ACTIVATIONS)):
        value = f.text(key)
        if value is not None and value not in supported:
            raise f.fail(key, f"is {value!r:.80}, supported: {', '.join(supported)}")


# Settings that change the mathematics and are not implemented: key, the value that changes nothing.
_NEUTRAL: tuple[tuple[str, object], ...] = (
    ("attention_bias", False),
    ("mlp_bias", False),
    ("rope_is_neox_style", True),
    ("partial_rotary_factor", 1.0),
    ("rope_parameters.partial_rotary_factor", 1.0),
    ("rope_scaling.partial_rotary_factor", 1.0),
    ("draft_vocab_size", None),
    ("output_multiplier", 1.0),
    ("final_logit_softcapping", 0.0),
    ("input_embedding_scale", 1.0),
    ("attention_value_scale", 1.0),
    ("quantization_config", None),
)
_OTHER_FAMILY = ("conv_kernel_size", "conv_group_size", "selector_rank", "markov_rank")


def _check_unsupported(f: _Fields, vocab: int) -> None:
    for key, neutral in _NEUTRAL:
        for place in (key, f"dflash_config.{key}", f"dspine_config.{key}"):
            value = f.at(place)
            if value is _MISSING or value == neutral:
                continue
            if key == "draft_vocab_size" and value == vocab:
                continue
            raise f.fail(place, f"is {value!r:.80}, only {neutral!r} is supported")
    for key in _OTHER_FAMILY:
        if f.at(f"dflash_config.{key}") is not _MISSING:
            raise f.fail(f"dflash_config.{key}", "belongs to another drafter family, not DSpine")


def _rope_dict(f: _Fields, kinds: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The rope settings, wherever they stand; per-layer-kind settings must be one and the same."""
    place, value = f.find("rope_parameters", "rope_scaling")
    if value is _MISSING:
        return place, {}
    if not isinstance(value, dict):
        raise f.fail(place, f"is {value!r:.80}, expected an object")
    if not any(kind in value for kind in LAYER_KINDS):
        return place, value
    used = [value.get(kind) for kind in dict.fromkeys(kinds)]
    if not all(isinstance(u, dict) and u == used[0] for u in used):
        both = " and ".join(dict.fromkeys(kinds))
        raise f.fail(place, f"differs between {both}; one set for all layers is supported")
    first = used[0]
    return place, first if isinstance(first, dict) else {}


def _rope(f: _Fields, kinds: tuple[str, ...], context: int) -> tuple[float, RopeScaling | None]:
    place, rope = _rope_dict(f, kinds)
    r = _Fields({"rope_theta": f.at("rope_theta"), "rope": rope}, f.where)
    if r.raw["rope_theta"] is _MISSING:
        del r.raw["rope_theta"]
    theta = r.number("rope_theta", "rope.rope_theta")
    _, kind = r.find("rope.rope_type", "rope.type")
    if kind is _MISSING and r.at("rope.factor") is not _MISSING:
        raise f.fail(f"{place}.factor", "is set without a rope_type that says what it scales")
    if kind is _MISSING or kind == "default":
        return theta, None
    if kind not in ROPE_TYPES:
        raise f.fail(f"{place}.rope_type", f"is {kind!r:.80}, supported: {', '.join(ROPE_TYPES)}")
    factor = r.number("rope.factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    return theta, _yarn(r, place, factor, context)


def _yarn(r: _Fields, place: str, factor: float, context: int) -> RopeScaling:
    """Yarn as llama.cpp computes it: magnitude 1 + 0.1 ln(factor), integer correction range."""
    for key in ("mscale", "mscale_all_dim", "extrapolation_factor"):
        if r.at(f"rope.{key}") is not _MISSING:
            raise r.fail(f"{place}.{key}", "is set, which is not supported for yarn")
    if r.boolean("rope.truncate", default=True) is False:
        raise r.fail(f"{place}.truncate", "is false, only true is supported")
    usual = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    attention = r.number("rope.attention_factor", "rope.attn_factor", default=usual)
    if abs(attention - usual) > 1e-6:
        raise r.fail(f"{place}.attention_factor", f"is {attention:g}, only {usual:g} is supported")
    original = r.maybe_integer("rope.original_max_position_embeddings")
    fast = r.number("rope.beta_fast", default=32.0)
    slow = r.number("rope.beta_slow", default=1.0)
    return RopeScaling("yarn", factor, original or context, fast, slow)


def _layer_kinds(f: _Fields, n_layers: int) -> tuple[tuple[str, ...] | None, int | None]:
    kinds = f.at("layer_types")
    if kinds is not _MISSING:
        if not isinstance(kinds, list) or len(kinds) != n_layers:
            raise f.fail("layer_types", f"is not a list of num_hidden_layers = {n_layers} names")
        for kind in kinds:
            if kind not in LAYER_KINDS:
                supported = ", ".join(LAYER_KINDS)
                raise f.fail("layer_types", f"holds {kind!r:.80}, supported: {supported}")
    f.boolean("dflash_config.use_swa", "use_sliding_window")  # where both stand, they agree
    if f.boolean("dflash_config.use_swa"):
        window = f.integer("dflash_config.swa_window_size", "sliding_window")
        return ("sliding_attention",) * n_layers, window
    if not f.boolean("use_sliding_window"):
        return None if kinds is _MISSING else tuple(kinds), None
    if kinds is _MISSING:  # transformers' own rule for Qwen3
        first = f.maybe_integer("max_window_layers", low=0)
        first = 28 if first is None else first
        kinds = [LAYER_KINDS[i >= first] for i in range(n_layers)]
    if "sliding_attention" not in kinds:
        return tuple(kinds), None
    return tuple(kinds), f.integer("sliding_window")


def _block(f: _Fields, reference_pair: bool) -> tuple[int, list[str]]:
    stored = f.maybe_integer("block_size", "dflash_config.block_size", low=2, high=1024)
    if reference_pair:
        if stored not in (None, REFERENCE_BLOCK_SIZE):
            note = f"block_size {stored} in the config of a reference pair: 16 is used"
            return REFERENCE_BLOCK_SIZE, [note]
        return REFERENCE_BLOCK_SIZE, []
    if stored is None:
        raise f.fail("block_size", "is missing, at the top level and in dflash_config")
    return stored, []


def _target_layers(f: _Fields) -> tuple[int, ...]:
    """Reference ids: id k is the output of decoder layer k (llama.cpp counts inputs: k + 1)."""
    place, value = f.find("dflash_config.target_layer_ids", "target_layer_ids")
    if value is _MISSING or value == []:
        raise f.fail(place, "is missing or empty")
    if not isinstance(value, list) or len(value) > 256:
        raise f.fail(place, f"is {value!r:.80}, expected a short list of layer ids")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 65_536:
            raise f.fail(place, f"holds {item!r:.40}, which is not a layer id")
    if len(set(value)) != len(value):
        raise f.fail(place, f"is {value!r:.120}: an id is repeated")
    return tuple(value)


def _shapes(f: _Fields) -> dict[str, int]:
    hidden = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    kv = f.maybe_integer("num_key_value_heads") or heads
    if heads % kv:
        raise f.fail("num_attention_heads", f"is {heads}, not a multiple of {kv} key/value heads")
    head_dim = f.maybe_integer("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise f.fail("head_dim", f"is missing and {hidden} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    if head_dim % 2:
        raise f.fail("head_dim", f"is {head_dim}, rope needs an even number")
    return {
        "hidden_size": hidden,
        "n_layers": f.integer("num_hidden_layers", high=512),
        "n_heads": heads,
        "n_kv_heads": kv,
        "head_dim": head_dim,
        "ffn_size": f.integer("intermediate_size"),
        "vocab_size": f.integer("vocab_size", high=MAX_VOCAB),
        "context_length": f.integer("max_position_embeddings"),
    }


def _rms_eps(f: _Fields) -> float:
    value = f.number("rms_norm_eps", default=1e-6)
    if not 1e-12 <= value <= 1e-2:
        raise f.fail("rms_norm_eps", f"is {value:g}, expected 1e-12 to 0.01")
    return value


def _check_values(f: _Fields, c: DraftConfig) -> None:
    if c.mask_token_id >= c.vocab_size:
        raise f.fail(
            "mask_token_id", f"is {c.mask_token_id}, outside the vocabulary of {c.vocab_size}"
        )
    if c.top_k > c.vocab_size:
        raise f.fail("top_k", f"is {c.top_k}, larger than the vocabulary of {c.vocab_size}")
    needed = c.top_k * (c.top_k + 1)
    if c.hidden_size < needed:
        raise f.fail(
            "hidden_size",
            f"is {c.hidden_size}; top_k {c.top_k} packs K·(K+1) = {needed} values into one row",
        )
    if c.sliding_window and c.sliding_window < c.block_size and not c.is_causal:
        raise f.fail(
            "sliding_window",
            f"is {c.sliding_window}, smaller than the block of {c.block_size}; "
            "that is supported with is_causal: true only",
        )


def _notes(f: _Fields, kinds: tuple[str, ...], window: int | None) -> list[str]:
    """What the user should know although it is no reason to refuse."""
    notes = _unknown_settings(f)
    if window is None and "sliding_attention" in kinds:
        notes.append("layer_types names sliding layers, use_sliding_window is not true: all full")
    if f.boolean("tie_word_embeddings"):
        notes.append("tie_word_embeddings is ignored: embeddings and head are the target's")
    return notes


def parse_config(raw: Any, where: str, *, reference_pair: bool) -> DraftConfig:
    """Turn a decoded config into a DraftConfig; raises ConvertError naming key and value.

    `reference_pair`: the codes are apart or named as in layout B. A dspine_config says that this
    is layout A all the same, whatever file the codes are in.
    """
    f = _Fields(_unwrap(raw, where), where)
    reference_pair = reference_pair and f.at("dspine_config") is _MISSING
    _check_family(f, reference_pair)
    shapes = _shapes(f)
    _check_unsupported(f, shapes["vocab_size"])
    kinds, window = _layer_kinds(f, shapes["n_layers"])
    kinds = kinds or ("full_attention",) * shapes["n_layers"]
    theta, scaling = _rope(f, kinds, shapes["context_length"])
    block, notes = _block(f, reference_pair)
    notes += _notes(f, kinds, window)
    top_k = f.maybe_integer("dspine_config.top_k", "top_k", high=1024)
    if top_k is None and not reference_pair:
        raise f.fail("dspine_config.top_k", "is missing")
    sliding = tuple(window is not None and kind == "sliding_attention" for kind in kinds)
    config = DraftConfig(
        **shapes,
        rms_eps=_rms_eps(f),
        rope_theta=theta,
        rope_scaling=scaling,
        block_size=block,
        mask_token_id=f.integer("dflash_config.mask_token_id", "mask_token_id", low=0),
        target_layer_ids=_target_layers(f),
        transfer_rank=f.maybe_integer("dspine_config.transfer_rank", "transfer_rank"),
        message_size=f.maybe_integer("dspine_config.message_size", "message_size"),
        top_k=top_k or REFERENCE_TOP_K,
        sliding_window=window if any(sliding) else None,
        layer_is_sliding=sliding,
        is_causal=f.boolean("is_causal", "dflash_config.causal"),
        num_target_layers=f.maybe_integer("num_target_layers", "dflash_config.num_target_layers"),
        reference_pair=reference_pair,
        sha256="",
        notes=tuple(notes),
    )
    _check_values(f, config)
    return config
