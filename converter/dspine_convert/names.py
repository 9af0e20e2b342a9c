"""The declared table of tensors, and the resolution of checkpoint names to its rows.

Every source tensor ends as mapped or as dropped for a stated reason; anything else raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from dspine_convert.checkpoint import SourceTensor
from dspine_convert.config import DraftConfig
from dspine_convert.errors import ConvertError, short, some_names

FLOAT_DTYPES = ("BF16", "F16", "F32")
PREFIXES = ("draft_model.", "model.")


class Kind(Enum):
    """How a tensor's stored type follows from the file's type."""

    NORM = "always F32"
    WEIGHT = "quantised"
    BRIDGE = "BF16, or F32 in an F32 file"


@dataclass(frozen=True)
class Row:
    """One expected tensor. `shape` in checkpoint order, letters as in Sizes; {n} is a layer."""

    source: str
    gguf: str
    shape: tuple[str, ...]
    kind: Kind
    aliases: tuple[str, ...] = ()


# Leading module names seen or foreseen for the injection; the first is the published one.
_MODULES = ("injection", "code_bridge", "bridge", "adjacent_injection")


def _bridge(leaves: tuple[str, ...], gguf: str, shape: tuple[str, ...], kind: Kind) -> Row:
    names = [f"{module}.{leaf}" for module in _MODULES for leaf in leaves]
    return Row(names[0], gguf, shape, kind, tuple(names[1:]))


def _layer(source: str, gguf: str, *shape: str) -> Row:
    kind = Kind.NORM if len(shape) == 1 else Kind.WEIGHT
    return Row(f"layers.{{n}}.{source}.weight", f"blk.{{n}}.{gguf}.weight", shape, kind)


LAYER_ROWS: tuple[Row, ...] = (
    _layer("input_layernorm", "attn_norm", "H"),
    _layer("self_attn.q_proj", "attn_q", "Q", "H"),
    _layer("self_attn.k_proj", "attn_k", "K", "H"),
    _layer("self_attn.v_proj", "attn_v", "K", "H"),
    _layer("self_attn.o_proj", "attn_output", "H", "Q"),
    _layer("self_attn.q_norm", "attn_q_norm", "D"),
    _layer("self_attn.k_norm", "attn_k_norm", "D"),
    _layer("post_attention_layernorm", "ffn_norm", "H"),
    _layer("mlp.gate_proj", "ffn_gate", "F", "H"),
    _layer("mlp.up_proj", "ffn_up", "F", "H"),
    _layer("mlp.down_proj", "ffn_down", "H", "F"),
    _bridge(
        ("readouts.{n}.weight", "readouts.{n}", "readout.{n}.weight", "readout.{n}"),
        "blk.{n}.inject_readout.weight",
        ("R", "H"),
        Kind.BRIDGE,
    ),
    _bridge(
        ("writes.{n}.weight", "writes.{n}", "write.{n}.weight", "write.{n}"),
        "blk.{n}.inject_write.weight",
        ("H", "M"),
        Kind.BRIDGE,
    ),
)
GLOBAL_ROWS: tuple[Row, ...] = (
    Row("fc.weight", "fc.weight", ("H", "T"), Kind.WEIGHT),
    Row("hidden_norm.weight", "enc.output_norm.weight", ("H",), Kind.NORM),
    Row("norm.weight", "output_norm.weight", ("H",), Kind.NORM),
    Row(
        "transfer_codes",
        "transfer_codes.weight",
        ("V", "R"),
        Kind.WEIGHT,
        (
            "transfer_codes.weight",
            "codes",
            "codes.weight",
            *(f"{m}.{leaf}" for m in _MODULES for leaf in ("transfer_codes", "codes")),
            *(f"{m}.{leaf}.weight" for m in _MODULES for leaf in ("transfer_codes", "codes")),
        ),
    ),
    _bridge(("message.weight", "message"), "inject_message.weight", ("M", "R"), Kind.BRIDGE),
    _bridge(
        ("receiver_gate.weight", "receiver_gate", "receiver.weight"),
        "inject_gate_receiver.weight",
        ("M", "R"),
        Kind.BRIDGE,
    ),
    _bridge(
        ("predecessor_gate.weight", "predecessor_gate", "predecessor.weight"),
        "inject_gate_predecessor.weight",
        ("M", "R"),
        Kind.BRIDGE,
    ),
    _bridge(("bias", "gate_bias", "gate.bias"), "inject_gate.bias", ("M",), Kind.NORM),
)
CODES = "transfer_codes"
CODES_OF_PAIR = ("codes", "codes.weight")  # the spelling of layout B
READY = ("transfer_ready", *(f"{m}.transfer_ready" for m in _MODULES))
# Dropped tensors: pattern of the bare name, shape that is expected or None, the reason.
DROPPED: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    (r"embed_tokens\.weight", ("V", "H"), "the target's token embeddings are used"),
    (r"lm_head\.weight", ("V", "H"), "the target's output head is used"),
    (r"(layers\.\d+\.self_attn\.)?rotary_emb\.(original_)?inv_freq", None, "follows from config"),
)


@dataclass(frozen=True)
class Mapped:
    """A resolved row: the source tensor, its GGUF name, and the layer if it has one.

    `shape` is that of the result. It is the source's unless rows are folded, which multiplies
    them by `matrices`.
    """

    source: SourceTensor
    canonical: str
    gguf: str
    kind: Kind
    layer: int | None
    shape: tuple[int, ...]
    matrices: tuple[Mapped, ...] = ()


@dataclass(frozen=True)
class Resolution:
    """The whole checkpoint accounted for; `rank` and `message` as the tensors have them."""

    mapped: tuple[Mapped, ...]
    dropped: tuple[tuple[str, str], ...]
    rank: int
    message: int
    notes: tuple[str, ...]


@dataclass
class _Work:
    """Names still open on both sides while resolving."""

    rows: dict[str, tuple[Row, int | None]]
    found: dict[str, SourceTensor] = field(default_factory=dict)
    unresolved: list[SourceTensor] = field(default_factory=list)
    dropped: list[tuple[SourceTensor, str, tuple[str, ...] | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, canonical: str, tensor: SourceTensor) -> None:
        if canonical in self.found:
            other, name = short(self.found[canonical].name), short(tensor.name)
            raise ConvertError(f"duplicate tensor: {other!r} and {name!r} are {canonical}")
        self.found[canonical] = tensor


def bare_name(name: str) -> str:
    """A source name without the prefixes that some exports add."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def expected_rows(n_layers: int) -> dict[str, tuple[Row, int | None]]:
    """Canonical source name to its row and layer, in the order of the GGUF file."""
    rows: dict[str, tuple[Row, int | None]] = {row.source: (row, None) for row in GLOBAL_ROWS}
    for n in range(n_layers):
        rows.update({row.source.format(n=n): (row, n) for row in LAYER_ROWS})
    return rows


def is_codes(name: str) -> bool:
    """True for every known spelling of the codes."""
    row = next(row for row in GLOBAL_ROWS if row.source == CODES)
    return bare_name(name) in (row.source, *row.aliases)


def is_reference_pair(names: list[str]) -> bool:
    """True when the codes carry the name of layout B."""
    bare = {bare_name(name) for name in names}
    return CODES not in bare and any(name in bare for name in CODES_OF_PAIR)


def _alias_table(rows: dict[str, tuple[Row, int | None]]) -> dict[str, str]:
    table: dict[str, str] = {}
    for canonical, (row, layer) in rows.items():
        for alias in row.aliases:
            table[alias if layer is None else alias.format(n=layer)] = canonical
    return table


def _by_name(
    work: _Work, tensors: dict[str, SourceTensor], explicit: dict[str, str]
) -> SourceTensor | None:
    """Settle what names alone can settle; returns the tensor of the ready flag."""
    aliases, ready = _alias_table(work.rows), None
    for name, tensor in tensors.items():
        bare = bare_name(name)
        if name in explicit:
            work.take(explicit[name], tensor)
        elif bare in work.rows or bare in aliases:
            work.take(bare if bare in work.rows else aliases[bare], tensor)
        elif bare in READY:
            if ready is not None:
                raise ConvertError(f"duplicate tensor: {short(ready.name)!r} and {short(name)!r}")
            ready = tensor
        elif drop := next((d for d in DROPPED if re.fullmatch(d[0], bare)), None):
            work.dropped.append((tensor, drop[2], drop[1]))
        else:
            work.unresolved.append(tensor)
    return ready


def _check_map(
    explicit: dict[str, str],
    tensors: dict[str, SourceTensor],
    rows: dict[str, tuple[Row, int | None]],
) -> None:
    absent = [name for name in explicit if name not in tensors]
    if absent:
        raise ConvertError(f"--tensor-map names tensors that are absent: {some_names(absent)}")
    unknown = [name for name in explicit.values() if name not in rows]
    if unknown:
        raise ConvertError(f"--tensor-map maps to unknown names: {some_names(unknown)}")


def _sizes(work: _Work, config: DraftConfig) -> dict[str, int]:
    """Dimension letters to numbers; R and M from tensors where the config lacks them."""
    sizes = {
        "H": config.hidden_size,
        "Q": config.n_heads * config.head_dim,
        "K": config.n_kv_heads * config.head_dim,
        "D": config.head_dim,
        "F": config.ffn_size,
        "T": config.hidden_size * len(config.target_layer_ids),
        "V": config.vocab_size,
    }
    known = {"R": config.transfer_rank, "M": config.message_size}
    for letter, value in known.items():
        if value is None:
            value = _size_from_shapes(work, letter)
        sizes[letter] = value
    return sizes


def _size_from_shapes(work: _Work, letter: str) -> int:
    for canonical, tensor in work.found.items():
        shape = work.rows[canonical][0].shape
        if letter in shape and len(tensor.shape) == len(shape):
            return tensor.shape[shape.index(letter)]
    what = {"R": "transfer rank", "M": "message size"}[letter]
    raise ConvertError(
        f"the {what} is neither in the config nor in a tensor of a known name; "
        f"unresolved: {some_names(t.name for t in work.unresolved) or 'none'}\n"
        "name the injection tensors with --tensor-map FILE"
    )


def _layer_of(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(\d{1,6})(?:\.|$)", name)
    return int(match[1]) if match else None


def _by_shape(work: _Work, sizes: dict[str, int]) -> None:
    """Settle the rest by shape and layer number, only where exactly one pairing is possible."""
    missing = {c: rl for c, rl in work.rows.items() if c not in work.found}
    choices: dict[str, list[str]] = {}
    for tensor in work.unresolved:
        layer = _layer_of(bare_name(tensor.name))
        choices[tensor.name] = [
            canonical
            for canonical, (row, n) in missing.items()
            if n == layer and tuple(sizes[d] for d in row.shape) == tensor.shape
        ]
    for tensor in list(work.unresolved):
        options = choices[tensor.name]
        if not options:
            continue
        rivals = [name for name, others in choices.items() if set(others) & set(options)]
        if len(options) > 1 or len(rivals) > 1:
            raise ConvertError(
                f"cannot tell tensors of shape {list(tensor.shape)} apart: {some_names(rivals)}\n"
                f"each may be any of: {some_names(options)}\n"
                "say which is which with --tensor-map FILE"
            )
        work.take(options[0], tensor)
        work.unresolved.remove(tensor)
        work.notes.append(f"{short(tensor.name)} taken as {options[0]}, by shape and layer")


def _check_complete(work: _Work, sizes: dict[str, int]) -> None:
    if CODES not in work.found:
        raise ConvertError(
            "transfer_codes are missing and cannot be computed again: the trained weights depend "
            "on them\ntake the packaged checkpoint, or give their file with --codes FILE"
        )
    missing = [name for name in work.rows if name not in work.found]
    extra = [t.name for t in work.unresolved]
    if missing:
        hint = f"\nnot understood: {some_names(extra)}" if extra else ""
        raise ConvertError(f"missing tensors: {some_names(missing)}{hint}")
    if extra:
        raise ConvertError(
            f"extra tensors that DSpine does not have: {some_names(extra)}\n"
            "nothing is dropped silently; another drafter family, or num_hidden_layers too small?"
        )
    for canonical, tensor in work.found.items():
        _check_tensor(canonical, tensor, work.rows[canonical][0].shape, sizes)
    for tensor, _, shape in work.dropped:
        if shape is not None:
            _check_tensor(bare_name(tensor.name), tensor, shape, sizes)


def _check_tensor(
    canonical: str, tensor: SourceTensor, letters: tuple[str, ...], sizes: dict[str, int]
) -> None:
    expected = tuple(sizes[d] for d in letters)
    where = f"{tensor.path.name}: tensor {short(tensor.name)!r}"
    if canonical == "fc.weight" and tensor.shape != expected and len(tensor.shape) == 2:
        raise ConvertError(
            f"{where} has width {tensor.shape[1]}, expected taps x hidden size = "
            f"{sizes['T'] // sizes['H']} x {sizes['H']} = {sizes['T']} ({list(tensor.shape)} found)"
        )
    if tensor.shape != expected:
        raise ConvertError(
            f"{where} has shape {list(tensor.shape)}, expected {list(expected)} "
            f"({' x '.join(letters)})"
        )
    if tensor.dtype not in FLOAT_DTYPES:
        raise ConvertError(f"{where} is {tensor.dtype}, supported: {', '.join(FLOAT_DTYPES)}")


def resolve(
    tensors: dict[str, SourceTensor], config: DraftConfig, explicit: dict[str, str]
) -> tuple[Resolution, SourceTensor | None]:
    """Account for every tensor of the checkpoint; also returns the ready flag's tensor.

    `explicit` maps source names to canonical ones and wins over every rule. Raises ConvertError
    for missing, extra, duplicate, misshapen or indistinguishable tensors.
    """
    rows = expected_rows(config.n_layers)
    _check_map(explicit, tensors, rows)
    work = _Work(rows)
    ready = _by_name(work, tensors, explicit)
    sizes = _sizes(work, config)
    _by_shape(work, sizes)
    _check_complete(work, sizes)
    mapped = tuple(
        Mapped(
            work.found[canonical],
            canonical,
            row.gguf if layer is None else row.gguf.format(n=layer),
            row.kind,
            layer,
            work.found[canonical].shape,
        )
        for canonical, (row, layer) in rows.items()
    )
    dropped = tuple((t.name, reason) for t, reason, _ in work.dropped)
    return Resolution(mapped, dropped, sizes["R"], sizes["M"], tuple(work.notes)), ready
