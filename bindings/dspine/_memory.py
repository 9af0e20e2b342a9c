"""The memory plan: what a target and its drafter need on a device, from their headers alone.

Every term follows llama.cpp at the pin and the flags of llama-server:

- weights: the tensors that are loaded (src/llama-model.cpp). The token embeddings stay on the
  host; a tied head is a second copy of them on a GPU; multi-token-prediction layers are skipped.
- key-value caches: rows of the cache types for each cell, layer and stream; sliding layers have
  (window + ubatch) cells (src/llama-kv-cache.cpp, src/llama-kv-cache-iswa.cpp).
- recurrent state: F32 rows for each sequence, one and one for each drafted token
  (src/llama-memory-recurrent.cpp).
- compute: the peak of the graph allocator, for the graph that llama.cpp reserves (`_graph`).
- overhead: one constant for what no header tells.

Sizes are bytes, contexts are tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dspine._errors import InvalidError
from dspine._graph import padded
from dspine._headers import Header, HeaderError, Tensor
from dspine._model_graphs import EXACT, Cache, Run, draft_peak, target_peak
from dspine._packing import packed_bytes
from dspine._shapes import DraftShape, Layer, ModelShape, draft_shape, target_shape

__all__ = [
    "CACHE_TYPES",
    "Component",
    "Device",
    "Lever",
    "Plan",
    "PlanRequest",
    "make_plan",
]

MIB = 1 << 20
GPU, RAM = "GPU", "RAM"
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
CELLS = 256  # contexts are padded to this (src/llama-context.cpp)
N_BATCH = 2048  # llama-server's -b
DRAFT_UBATCH = 128  # native/src/dspine-common.cpp
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
LARGEST = (1 << 31) - 1
MATRIX_ROW_PADDING = 512  # of quantized tensors in a CUDA buffer
# CUDA context, kernels, memory pools and the margin that the driver keeps: the only number here
# that is fitted, to the largest contexts that were published for a 24 GB card. They fix the sum
# of it and the target's weights, 17.2 GiB; the size of that target's file was not published.
CUDA_OVERHEAD = 2005 * MIB
# Beside its buffers the server's process takes 30 to 200 MiB: code, vocabulary, HTTP threads.
RAM_OVERHEAD = 256 * MIB
# Tensors of the input layer, which llama.cpp keeps on the host.
INPUT_TENSORS = frozenset(
    {
        "token_embd.weight",
        "per_layer_token_embd.weight",
        "position_embd.weight",
        "token_types.weight",
        "token_embd_norm.weight",
        "token_embd_norm.bias",
    }
)


@dataclass(frozen=True)
class Device:
    """Where everything goes: a GPU, or the machine's memory.

    `free_bytes` is None where it is not known, as for a card that is only named. Without a GPU
    `cpu_features` decide which weights are kept a second time (`_packing`).
    """

    name: str
    total_bytes: int
    free_bytes: int | None = None
    is_gpu: bool = True
    cpu_features: frozenset[str] = frozenset()

    @property
    def room(self) -> int:
        """Bytes that may be used."""
        return self.total_bytes if self.free_bytes is None else self.free_bytes


@dataclass(frozen=True)
class PlanRequest:
    """A configuration of llama-server.

    Attributes:
        n_ctx: tokens over all slots; None: the most that fits.
        n_draft: tokens drafted a round; None: the drafter's block size - 1.
        n_parallel: slots.
        n_ubatch: rows of a ubatch of the target.
        n_ubatch_draft: of the drafter; None: 128 for DSpine, else as n_ubatch.
        type_k, type_v, type_k_draft, type_v_draft: names of `CACHE_TYPES`.
        flash_attn: flash attention in both.
        kv_unified: one cache for all slots.
        swa_full: sliding layers have as many cells as the others.
    """

    n_ctx: int | None = None
    n_draft: int | None = None
    n_parallel: int = 1
    n_ubatch: int = 512
    n_ubatch_draft: int | None = None
    type_k: str = "q8_0"
    type_v: str = "q8_0"
    type_k_draft: str = "q8_0"
    type_v_draft: str = "q8_0"
    flash_attn: bool = True
    kv_unified: bool = False
    swa_full: bool = False


@dataclass(frozen=True)
class Component:
    """One term of a plan; `place` is "GPU" or "RAM"."""

    name: str
    bytes: int
    place: str


@dataclass(frozen=True)
class Lever:
    """One change of the configuration.

    Attributes:
        name: what is changed.
        flags: llama-server's words for it; empty where it is another file.
        saved_bytes: on the device at the plan's context.
        largest_n_ctx: that fits with it; None where none does.
    """

    name: str
    flags: str
    saved_bytes: int
    largest_n_ctx: int | None


class _Models(NamedTuple):
    """What a plan takes from the two headers."""

    target: ModelShape
    target_weights: _Weights
    target_weights_kept: _Weights  # with a head of which rows can be gathered
    draft: DraftShape | None
    draft_weights: _Weights
    draft_as_q4_k_m: _Weights | None  # None where it would not be smaller


class _Weights(NamedTuple):
    """Bytes of tensors by place.

    `device` and `host` with a GPU; without one the `mapped` part of the file, and the `packed`
    copies that the CPU's kernels use.
    """

    device: int
    host: int
    mapped: int
    packed: int


@dataclass(frozen=True)
class Plan:
    """The memory of one configuration on one device.

    Attributes:
        request: with every default filled in.
        device: what it is planned for.
        components: the terms, in the order in which they are allocated.
        estimated: the compute terms are of an architecture whose graph is not modelled.
        notes: what was changed or assumed, a sentence each.
    """

    request: PlanRequest
    device: Device
    components: tuple[Component, ...]
    estimated: bool
    notes: tuple[str, ...]
    _models: _Models = field(repr=False)

    @property
    def n_ctx(self) -> int:
        """Tokens over all slots, padded as llama.cpp does."""
        return _cells(self.request)[1]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        place = GPU if self.device.is_gpu else RAM
        return sum(c.bytes for c in self.components if c.place == place)

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return self.device_bytes <= self.device.room

    @functools.cached_property
    def largest_n_ctx(self) -> int | None:
        """The largest context that fits, at most what the target was trained for; None: none."""
        return _largest(self._models, self.request, self.device)

    @property
    def trained_n_ctx(self) -> int:
        """The context, over all slots, that the target was trained for: more is never proposed."""
        return _trained(self._models, self.request)

    @functools.cached_property
    def levers(self) -> tuple[Lever, ...]:
        """What each change would give, the most helpful first."""
        return _levers(self)


def make_plan(target: Header, draft: Header | None, request: PlanRequest, device: Device) -> Plan:
    """Plan the memory of a configuration.

    Args:
        target, draft: from `open_header`.
        request: the configuration; without n_ctx the largest context that fits is planned, or
            the smallest where none does.
        device: a GPU that holds all layers, or the machine's memory.

    Raises HeaderError for a file of the wrong kind, InvalidError for settings out of range.
    """
    models = _models(target, draft, device.cpu_features)
    checked, notes = _checked(models, request)
    if checked.n_ctx is None:
        largest = _largest(models, checked, device)
        step = CELLS if checked.kv_unified else CELLS * checked.n_parallel
        checked = replace(checked, n_ctx=largest or step)
    is_dspine = models.draft is None or models.draft.rank > 0
    estimated = models.target.arch not in EXACT or not is_dspine
    components = _components(models, checked, device)
    notes += _context_notes(models, request, checked)
    return Plan(checked, device, components, estimated, notes, models)


def _context_notes(models: _Models, asked: PlanRequest, checked: PlanRequest) -> tuple[str, ...]:
    """What is to be said of a context that was asked for."""
    if asked.n_ctx is None:
        return ()
    total = _cells(checked)[1]
    notes = []
    if total != asked.n_ctx:
        notes.append(f"-c {asked.n_ctx} is rounded up to {total}")
    trained = _trained(models, checked)
    if total > trained:
        notes.append(f"-c {total} is more than the {trained} that the target was trained for")
    return tuple(notes)


def _models(target: Header, draft: Header | None, features: frozenset[str]) -> _Models:
    shape = target_shape(target)
    plain, kept = (
        _weights(target.tensors, len(shape.layers), features, tied=shape.tied_head, keep_head=keep)
        for keep in (False, True)
    )
    if draft is None:
        return _Models(shape, plain, kept, None, _Weights(0, 0, 0, 0), None)
    drafts = draft_shape(draft)
    if drafts.n_embd != shape.n_embd:
        raise HeaderError(
            f"{draft.spec}: hidden size {drafts.n_embd}, {target.spec} has {shape.n_embd}"
        )
    if drafts.taps and not all(0 < tap <= len(shape.layers) for tap in drafts.taps):
        raise HeaderError(
            f"{draft.spec}: reads the inputs of layers {', '.join(map(str, drafts.taps))}, "
            f"{target.spec} has 1 to {len(shape.layers)}"
        )
    count = len(drafts.layers)
    draft_weights = _weights(draft.tensors, count, features)
    small = _weights(
        tuple(_as_q4_k_m(t, count) for t in draft.tensors), count, features, tied=False
    )
    smaller = small if small.device < 0.95 * draft_weights.device else None
    return _Models(shape, plain, kept, drafts, draft_weights, smaller)


def _as_q4_k_m(tensor: Tensor, n_layers: int) -> Tensor:
    """A tensor of a drafter as dspine-convert stores it in a Q4_K_M file."""
    if tensor.type not in ("f32", "f16", "bf16", "q8_0") or len(tensor.shape) < 2:
        return tensor
    if "inject_" in tensor.name or tensor.shape[0] % 256:
        return tensor
    layer = _layer_of(tensor.name)
    more = layer >= 7 * n_layers // 8 or layer < n_layers // 8
    more = more or (layer - n_layers // 8) % 3 == 2
    wide = more and tensor.name.endswith(("attn_v.weight", "ffn_down.weight"))
    kind = GGMLQuantizationType.Q6_K if wide else GGMLQuantizationType.Q4_K
    block, size = GGML_QUANT_SIZES[kind]
    return replace(tensor, type=kind.name.lower(), nbytes=prod(tensor.shape) // block * size)


def _weights(
    tensors: Iterable[Tensor],
    n_layers: int,
    features: frozenset[str],
    *,
    tied: bool = False,
    keep_head: bool = False,
) -> _Weights:
    """Bytes of the tensors that are loaded: `n_layers` layers and what is in none.

    With `keep_head` the output projection is not packed: a DSpine drafter gathers its rows.
    """
    device = host = packed = 0
    mapped: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if _layer_of(tensor.name) >= n_layers:
            continue
        is_input = tensor.name in INPUT_TENSORS
        shared = tied and tensor.name == "token_embd.weight"
        if is_input:
            host += tensor.nbytes
        if not is_input or shared:
            device += padded(tensor.nbytes + _row_padding(tensor), 128)
        name = "output.weight" if shared else tensor.name
        kept = keep_head and name == "output.weight"
        loaded = replace(tensor, name=name) if shared else tensor
        copy = 0 if kept else packed_bytes(loaded, features)
        packed += copy
        if not copy or shared:
            # llama.cpp counts the file from the first to the last tensor that it maps
            first, last = mapped.get(tensor.part, (tensor.offset, 0))
            end = tensor.offset + tensor.nbytes
            mapped[tensor.part] = (min(first, tensor.offset), max(last, end))
    return _Weights(device, host, sum(b - a for a, b in mapped.values()), packed)


def _layer_of(name: str) -> int:
    """The number in "blk.N.…", -1 for a tensor of no layer."""
    head, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if head == "blk" and number.isdecimal() else -1


def _row_padding(tensor: Tensor) -> int:
    """Bytes that CUDA adds to a quantized tensor whose rows are no multiple of 512."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type.upper()]]
    over = tensor.shape[0] % MATRIX_ROW_PADDING
    return (MATRIX_ROW_PADDING - over) // block * size if block > 1 and over else 0


def _checked(models: _Models, request: PlanRequest) -> tuple[PlanRequest, tuple[str, ...]]:
    """The request with its defaults filled in, as llama-server would, and what was changed."""
    _check_numbers(request)
    notes: list[str] = []
    draft = models.draft
    depth = 0
    if draft is not None:
        deepest = draft.block_size - 1
        depth = deepest if request.n_draft is None else request.n_draft
        if depth > deepest:
            notes.append(f"n_draft {depth} exceeds the block size, {deepest} is used")
            depth = deepest
    elif request.n_draft:
        notes.append("without a drafter nothing is drafted")
    # a recurrent target verifies all rows of a slot in one ubatch (native/src/dspine-common.cpp)
    ubatch = max(request.n_ubatch, depth + 2) if depth else request.n_ubatch
    if ubatch > request.n_ubatch:
        notes.append(f"n_ubatch {request.n_ubatch} cannot hold a verification, {ubatch} is used")
    block = request.n_parallel * (depth + 1)
    default = DRAFT_UBATCH if draft is not None and draft.rank else ubatch
    draft_ubatch = request.n_ubatch_draft or default
    if draft is not None and draft_ubatch < block:
        draft_ubatch = block
        notes.append(f"the drafter's ubatch holds a draft of every slot: {block} rows")
    _check_types(models, request)
    checked = replace(request, n_draft=depth, n_ubatch=ubatch, n_ubatch_draft=draft_ubatch)
    return checked, tuple(notes)


def _check_numbers(request: PlanRequest) -> None:
    limits: tuple[tuple[str, int | None, int, int], ...] = (
        ("n_ctx", request.n_ctx, 1, LARGEST),
        ("n_draft", request.n_draft, 0, LARGEST),
        ("n_parallel", request.n_parallel, 1, MAX_SEQUENCES),
        ("n_ubatch", request.n_ubatch, 1, LARGEST),
        ("n_ubatch_draft", request.n_ubatch_draft, 1, LARGEST),
    )
    for name, value, least, most in limits:
        if value is not None and not least <= value <= most:
            raise InvalidError(f"{name} is {value}, expected {least} to {most}")


def _check_types(models: _Models, request: PlanRequest) -> None:
    """Refuse cache types that llama.cpp does not have, or not for these heads."""
    sides: tuple[tuple[str, str, ModelShape | DraftShape | None], ...] = (
        ("type_k", request.type_k, models.target),
        ("type_v", request.type_v, models.target),
        ("type_k_draft", request.type_k_draft, models.draft),
        ("type_v_draft", request.type_v_draft, models.draft),
    )
    for name, kind, shape in sides:
        if kind not in CACHE_TYPES:
            raise InvalidError(f"{name} is {kind!r}, expected one of {', '.join(CACHE_TYPES)}")
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
        if block > 1 and name.startswith("type_v") and not request.flash_attn:
            raise InvalidError(f"{name} is {kind}: a quantized V cache needs flash attention")
        for layer in shape.layers if shape else ():
            head = layer.head_k if name.startswith("type_k") else layer.head_v
            if layer.has_kv and head % block:
                raise InvalidError(
                    f"{name} is {kind}: its blocks of {block} do not divide the head width {head}"
                )


def _cells(request: PlanRequest) -> tuple[int, int]:
    """Cells of one stream, and tokens over all (src/llama-context.cpp)."""
    total = padded(request.n_ctx or CELLS, CELLS)
    if request.kv_unified:
        return total, total
    each = padded(total // request.n_parallel, CELLS)
    return each, each * request.n_parallel


def _row_bytes(kind: str, width: int) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return width // block * size


def _kv_bytes(layers: tuple[Layer, ...], caches: tuple[Cache, Cache | None]) -> int:
    """Bytes of the caches of full and of sliding layers."""
    total = 0
    for layer in layers:
        cache = caches[1] if layer.swa and caches[1] else caches[0]
        if layer.has_kv:
            row = _row_bytes(cache.type_k, layer.head_k * layer.heads_kv)
            row += _row_bytes(cache.type_v, layer.head_v * layer.heads_kv)
            total += row * cache.cells * cache.streams
    return total


def _caches(
    request: PlanRequest, window: int, ubatch: int, types: tuple[str, str]
) -> tuple[Cache, Cache | None]:
    """Caches of full and of sliding layers; the second is None without a window."""
    cells, _ = _cells(request)
    streams = 1 if request.kv_unified else request.n_parallel
    full = Cache(cells, streams, *types)
    if not window:
        return full, None
    sequences = request.n_parallel if request.kv_unified else 1
    sliding = padded(min(cells, window * sequences + ubatch), CELLS)
    return full, replace(full, cells=cells if request.swa_full else sliding)


class _Sides(NamedTuple):
    """What the two contexts reserve."""

    target: Run
    draft: Run | None


def _runs(models: _Models, request: PlanRequest, on_device: bool) -> _Sides:
    """The graphs that are reserved: as many rows as a ubatch has (src/llama-context.cpp)."""
    depth, slots = request.n_draft or 0, request.n_parallel
    _, n_ctx = _cells(request)
    ubatch = min(n_ctx, max(N_BATCH, slots * (depth + 1)), request.n_ubatch)
    shape, draft = models.target, models.draft
    full, window = _caches(request, shape.window, ubatch, (request.type_k, request.type_v))
    target = Run(
        tokens=padded(ubatch, slots),
        sequences=slots,
        outputs=min(ubatch, slots * (depth + 1)),
        full=full,
        window=window,
        rows=depth + 1 if shape.rolls_back else 1,
        taps=tuple(sorted(draft.taps)) if draft and depth else (),
        flash=request.flash_attn,
        on_device=on_device,
    )
    if draft is None or not depth:
        return _Sides(target, None)
    ubatch = min(n_ctx, request.n_ubatch_draft or DRAFT_UBATCH)
    types = (request.type_k_draft, request.type_v_draft)
    full, window = _caches(request, draft.window, ubatch, types)
    tokens = padded(ubatch, slots)
    reserved = replace(target, tokens=tokens, outputs=tokens, full=full, window=window)
    return _Sides(target, replace(reserved, rows=1, taps=()))


def _components(models: _Models, request: PlanRequest, device: Device) -> tuple[Component, ...]:
    gpu = device.is_gpu
    place = GPU if gpu else RAM
    sides = _runs(models, request, gpu)
    parts = _target_parts(models, request, sides.target, place)
    if sides.draft is not None and models.draft is not None:
        parts += _draft_parts(models.draft, models.draft_weights, sides.draft, place)
    host = _host_outputs(models, request)
    parts.append(Component("outputs", host, RAM))
    if gpu:
        parts.append(Component("CUDA context, pools, margin", CUDA_OVERHEAD, GPU))
    else:
        parts.append(Component("server process", RAM_OVERHEAD, RAM))
    return tuple(c for c in parts if c.bytes)


def _target_parts(models: _Models, request: PlanRequest, run: Run, place: str) -> list[Component]:
    shape, weights = models.target, models.target_weights
    if models.draft is not None and models.draft.rank and request.n_draft:
        weights = models.target_weights_kept
    on_gpu = place == GPU
    tapped = target_peak(shape, run)
    compute = tapped.device if on_gpu else tapped.host
    # each tap is an output, which keeps its rows until the end of the graph
    taps = min(len(run.taps) * 4 * shape.n_embd * run.tokens, compute)
    recurrent = sum(layer.recurrent for layer in shape.layers)
    state = 0
    if shape.ssm is not None:
        state = 4 * (shape.ssm.conv_state + shape.ssm.state)
    parts = [
        Component("target weights", weights.device if on_gpu else weights.mapped, place),
        Component("target KV cache", _kv_bytes(shape.layers, (run.full, run.window)), place),
        Component("recurrent state", recurrent * state * run.rows * request.n_parallel, place),
        Component("target compute", compute - taps, place),
        Component("taps", taps, place),
    ]
    if not on_gpu:
        parts.insert(1, Component("target weights, packed", weights.packed, place))
    else:
        parts.append(Component("token embeddings", weights.host, RAM))
        parts.append(Component("target compute, host", tapped.host, RAM))
    return parts


def _draft_parts(shape: DraftShape, weights: _Weights, run: Run, place: str) -> list[Component]:
    on_gpu = place == GPU
    scratch = draft_peak(shape, run)
    parts = [
        Component("drafter weights", weights.device if on_gpu else weights.mapped, place),
        Component("drafter KV cache", _kv_bytes(shape.layers, (run.full, run.window)), place),
        Component("drafter compute", scratch.device if on_gpu else scratch.host, place),
    ]
    if on_gpu:
        parts.append(Component("drafter compute, host", scratch.host, RAM))
    else:
        parts.insert(1, Component("drafter weights, packed", weights.packed, place))
    return parts


def _host_outputs(models: _Models, request: PlanRequest) -> int:
    """Copies of outputs that the host keeps (llama_context::output_reserve): logits, taps, rows
    of the drafter's lattice. A tap has a row for each token of a batch."""
    shape, draft = models.target, models.draft
    depth = request.n_draft or 0
    rows = request.n_parallel * (depth + 1)
    values = rows * shape.n_vocab
    if draft is not None and depth:
        batch = min(_cells(request)[1], max(N_BATCH, rows))
        values += len(draft.taps) * shape.n_embd * batch
        values += rows * draft.n_vocab + shape.n_embd * batch
    return 4 * values


def _used(models: _Models, request: PlanRequest, device: Device) -> int:
    place = GPU if device.is_gpu else RAM
    return sum(c.bytes for c in _components(models, request, device) if c.place == place)


def _largest(models: _Models, request: PlanRequest, device: Device) -> int | None:
    """The largest context that fits; None where not even the smallest does."""
    step = CELLS if request.kv_unified else CELLS * request.n_parallel
    most = _trained(models, request) // step

    def over(steps: int) -> int:
        return _used(models, replace(request, n_ctx=steps * step), device) - device.room

    steps = _last_below_zero(over, most)
    return None if steps is None else steps * step


def _trained(models: _Models, request: PlanRequest) -> int:
    """Trained context of every slot together, in whole cells."""
    return padded(models.target.n_ctx_train or 1 << 20, CELLS) * request.n_parallel


def _last_below_zero(function: Callable[[int], int], most: int) -> int | None:
    """The largest of 1 to `most` where a rising, nearly linear function is not above zero.

    In turn by the last two points, by the neighbour of the bound that moved, and by halving.
    """
    low, high = 1, most
    points = [(high, function(high)), (low, function(low))]
    if points[0][1] <= 0:
        return high
    if points[1][1] > 0:
        return None
    turn = 0
    while high - low > 1:
        (x0, y0), (x1, y1) = points[-2:]
        guess = (low + high) // 2
        if turn % 3 == 0 and y1 != y0:
            guess = x1 - y1 * (x1 - x0) // (y1 - y0)
        elif turn % 3 == 1:
            guess = low + 1 if x1 == low else high - 1
        guess = min(max(guess, low + 1), high - 1)
        points.append((guess, function(guess)))
        if points[-1][1] <= 0:
            low = guess
        else:
            high = guess
        turn += 1
    return low


def _levers(plan: Plan) -> tuple[Lever, ...]:
    request, models, device = plan.request, plan._models, plan.device
    used = plan.device_bytes

    def lever(name: str, flags: str, changed: PlanRequest, other: _Models) -> Lever:
        saved = used - _used(other, changed, device)
        return Lever(name, flags, saved, _largest(other, changed, device))

    found = [
        lever(name, flags, replace(request, **change), models)
        for name, flags, change in _changes(request)
    ]
    if models.draft_as_q4_k_m is not None and request.n_draft:
        smaller = models._replace(draft_weights=models.draft_as_q4_k_m)
        found.append(lever("drafter as Q4_K_M", "", request, smaller))
    found = [one for one in found if one.saved_bytes > 0]
    return tuple(sorted(found, key=lambda one: (-(one.largest_n_ctx or 0), -one.saved_bytes)))


def _changes(request: PlanRequest) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Settings that would take less memory: a name, llama-server's flags, the fields."""
    depth = request.n_draft or 0
    for fewer in (7, 3):
        if depth > fewer:
            yield f"{fewer} drafts a round", f"--spec-draft-n-max {fewer}", {"n_draft": fewer}
            break
    if depth:
        yield "no drafter", "--spec-draft-n-max 0", {"n_draft": 0}
    if request.n_ubatch > 128:
        yield "ubatch of 128", "-ub 128", {"n_ubatch": 128}
    if depth and (request.n_ubatch_draft or 0) > DRAFT_UBATCH:
        flags = f"--spec-draft-ubatch {DRAFT_UBATCH}"
        yield "drafter's ubatch of 128", flags, {"n_ubatch_draft": DRAFT_UBATCH}
    if request.n_parallel > 1:
        yield "one slot", "-np 1", {"n_parallel": 1}
    if request.flash_attn:
        kind = "q4_0" if {request.type_k, request.type_v} <= set(_NARROW) else "q8_0"
        fields = {"type_k": kind, "type_v": kind}
        flags = f"-ctk {kind} -ctv {kind}"
        yield f"{kind} cache of the target", flags, fields


_NARROW = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
