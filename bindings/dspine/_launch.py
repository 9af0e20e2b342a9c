"""Chooses llama-server's flags for a target and a drafter, and the context that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspine._address import LOOPBACK, Address, ServerError, free_port
from dspine._errors import DspineError, InvalidError
from dspine._flags import PLACEMENT_FLAGS, SPELLINGS, Flags, merge, normal, settings_of
from dspine._headers import Header, HeaderError
from dspine._models import Model, check_pair, open_model

if TYPE_CHECKING:
    from dspine._memory import Device, Plan, PlanRequest

Models = tuple[Model, "Model | None"]

CACHE_TYPE = "q8_0"
ALL_LAYERS = 999  # more than any model has
OFF = ("off", "0", "false", "disabled")  # llama.cpp's words for it
FLOAT_TYPES = ("f32", "f16", "bf16")
N_UBATCH = 512  # llama-server's own
GIB = 1 << 30


@dataclass(frozen=True)
class Choices:
    """What the user asked for. None leaves a setting to llama-server, except of `n_ctx`.

    Attributes:
        n_ctx: tokens of context over all slots; None: the largest that the plan says fits.
        n_draft: tokens drafted a round; "auto": the stored choice, else block size - 1.
        n_parallel: slots.
        cache_type: of K and V, of target and drafter.
        flash_attn: "on", "off" or "auto". On a CPU plain attention is up to twice as fast for the
            rows of a draft, but rounds by their number: greedy texts then differ from plain
            decoding's in places.
        gpu_layers: layers of target and drafter on the GPU.
        host, port: where it listens; port 0 is a free one.
        extra: words of llama-server's command line; they win over everything above.
        force: start what the plan says does not fit, and leave the check of the files to the
            server.
        device: plan for this one instead of what is found.
    """

    n_ctx: int | None = None
    n_draft: int | Literal["auto"] | None = "auto"
    n_parallel: int | None = 1
    cache_type: str | None = CACHE_TYPE
    flash_attn: str | None = "on"
    gpu_layers: int | None = ALL_LAYERS
    host: str = LOOPBACK
    port: int = 0
    extra: tuple[str, ...] = ()
    force: bool = False
    device: Device | None = None


@dataclass(frozen=True)
class Launch:
    """A command, where it will listen, and why it is as it is.

    Attributes:
        command: program and arguments.
        address: where it will listen.
        api_key: what clients must send, or None.
        notes: what was chosen and why, a sentence each.
    """

    command: tuple[str, ...]
    address: Address
    api_key: str | None
    notes: tuple[str, ...]


def prepare(
    executable: Path,
    target: str,
    draft: str | None,
    choices: Choices,
    *,
    fetch: bool = True,
) -> Launch:
    """Choose everything and build the command.

    Args:
        executable: llama-server.
        target, draft: GGUF files or hub names.
        fetch: download hub files; without it the command names where they will lie.

    Raises HeaderError for files that are not what they should be or do not belong together,
    ServerError for what does not fit the device, InvalidError for settings out of range.
    """
    _check(choices)
    notes: list[str] = []
    models = (
        _open(target, "-m", choices.force, notes),
        None if draft is None else _open(draft, "-md", choices.force, notes),
    )
    if not choices.force:
        check_pair(*models)
    device = choices.device or _device(choices.force, notes)
    settings = _settings(choices, models, device, notes)
    settings["n_ctx"] = _context(models, settings, choices, device, notes)
    # The download comes last: everything that can be refused has been by now.
    files = {"model": models[0].path(fetch=fetch)}
    if models[1] is not None:
        files["draft_model"] = models[1].path(fetch=fetch)
    flags = merge({**files, **settings}, choices.extra)
    notes += [f"{SPELLINGS[name][0]} as given after --" for name in flags.dropped]
    words = (str(executable), *flags.words)
    return Launch(words, _address(flags), flags.settings.get("api_key"), tuple(notes))


def _open(spec: str, flag: str, force: bool, notes: list[str]) -> Model:
    try:
        return open_model(spec, flag)
    except HeaderError as error:
        if not force:
            raise
        notes.append(str(error))
        return Model(spec, None)


def _check(choices: Choices) -> None:
    for name, value, least in (
        ("n_ctx", choices.n_ctx, 1),
        ("n_draft", choices.n_draft, 0),
        ("n_parallel", choices.n_parallel, 1),
    ):
        if isinstance(value, int) and not least <= value < 1 << 31:
            raise InvalidError(f"{name} is {value}, expected {least} or more")


def _settings(
    choices: Choices, models: Models, device: Device | None, notes: list[str]
) -> dict[str, object]:
    """Everything but the files, in the order it is written; the context is to be filled in."""
    kind = choices.cache_type
    # A server without a GPU only warns about the flag, eight lines for each.
    layers = choices.gpu_layers if device is None or device.is_gpu else None
    host, port = _listening(choices)
    settings: dict[str, object] = {
        "n_ctx": None,
        "n_parallel": choices.n_parallel,
        "gpu_layers": layers,
        "flash_attn": choices.flash_attn,
        "type_k": kind,
        "type_v": kind,
    }
    if models[1] is not None:
        settings |= {
            "n_draft": None,
            "gpu_layers_draft": layers,
            "type_k_draft": kind,
            "type_v_draft": kind,
        }
    _drop_quantized_v(settings, choices, notes)
    if models[1] is not None:
        types = _cache_types(settings, choices)
        settings["n_draft"] = _depth(choices, models[0], models[1], types, notes)
    return settings | {"host": host, "port": port}


def _drop_quantized_v(settings: dict[str, object], choices: Choices, notes: list[str]) -> None:
    """Without flash attention llama.cpp has no quantized V caches: leave those to the server."""
    flash = settings_of(choices.extra).get("flash_attn", choices.flash_attn)
    if flash not in OFF or choices.cache_type in (None, *FLOAT_TYPES):
        return
    for name in ("type_v", "type_v_draft"):
        settings.pop(name, None)
    notes.append(f"V caches are f16, not {choices.cache_type}, without flash attention")


def _cache_types(settings: Mapping[str, object], choices: Choices) -> list[str]:
    """Of K and V of target and drafter, as the server will have them; f16 is its own choice."""
    kind = merge(settings, choices.extra).settings.get
    return [kind(name, "f16") for name in ("type_k", "type_v", "type_k_draft", "type_v_draft")]


def _listening(choices: Choices) -> tuple[str, int]:
    """Host and port; a free one is looked for only where the user gives none."""
    given = settings_of(choices.extra)
    host = given.get("host", choices.host)
    if choices.port or "port" in given:
        return host, choices.port
    one = Address(host).first_host
    return host, free_port(one if one and not one.endswith(".sock") else LOOPBACK)


def _depth(
    choices: Choices, target: Model, draft: Model, cache_types: list[str], notes: list[str]
) -> int | None:
    """The depth to write, None to leave it to the server; a sentence says where it comes from."""
    if choices.n_draft != "auto":
        return choices.n_draft
    if "n_draft" in settings_of(choices.extra):
        return None
    block = draft.header.integer("dflash.block_size", 0) if draft.header else 0
    stored = _stored_depth(target.local(), draft.local(), cache_types)
    if stored is not None and 0 <= stored < block:
        notes.append(f"drafting {stored} tokens a round, as dspine tune chose for this pair")
        return stored
    if block < 2:  # no DSpine file: it was forced, and the server may know better
        return None
    notes.append(f"drafting {block - 1} tokens a round (block size {block} - 1)")
    return block - 1


def _stored_depth(target: Path | None, draft: Path | None, cache_types: list[str]) -> int | None:
    if target is None or draft is None:
        return None
    from dspine._tuned import stored_depth

    return stored_depth(target, draft, cache_types)


def _context(
    models: Models,
    settings: Mapping[str, object],
    choices: Choices,
    device: Device | None,
    notes: list[str],
) -> int | None:
    """The context to write, by the memory plan; None to leave it to the server.

    Raises ServerError for what does not fit, unless it is forced.
    """
    flags = merge({**settings, "n_ctx": choices.n_ctx}, choices.extra)
    why = _unplannable(flags, choices)
    plan = None if why or device is None else _plan(models, flags, device, choices.force, notes)
    if why:
        notes.append(f"no memory plan: {why}")
    if plan is None:
        return choices.n_ctx
    if not plan.fits:
        if not choices.force:
            raise ServerError(_misfit(plan))
        notes.append(f"{_needs(plan)}: started all the same")
    notes.extend(plan.notes)
    size = f"{plan.device_bytes / GIB:.1f} of {plan.device.room / GIB:.1f} GiB"
    guess = "; its compute part is estimated for this architecture" if plan.estimated else ""
    notes.append(f"context {plan.n_ctx}: takes {size} of {plan.device.name}{guess}")
    return plan.n_ctx


def _unplannable(flags: Flags, choices: Choices) -> str | None:
    """Why the plan does not describe this command: it assumes everything on one device."""
    for word in choices.extra:
        if normal(word) in PLACEMENT_FLAGS:
            return f"{word} places weights by hand"
    layers = flags.settings.get("gpu_layers")
    if layers not in (None, "all", "auto", str(ALL_LAYERS)):
        return f"{SPELLINGS['gpu_layers'][0]} {layers} keeps layers off the GPU"
    return None


def _request(flags: Flags, models: tuple[Header, Header | None]) -> PlanRequest:
    from dspine._memory import PlanRequest

    target, draft = models
    n_ctx = flags.number("n_ctx")
    if n_ctx == 0:  # llama-server's word for the context the target was trained with
        n_ctx = target.integer(f"{target.architecture}.context_length", 0) or None
    slots = flags.number("n_parallel") or -1
    auto = slots < 0 and draft is None  # then llama-server has four slots with one cache
    kind = flags.settings.get
    return PlanRequest(
        n_ctx=n_ctx,
        n_draft=flags.number("n_draft") if draft is not None else None,
        n_parallel=4 if auto else max(slots, 1),
        n_ubatch=flags.number("n_ubatch") or N_UBATCH,
        n_ubatch_draft=flags.number("n_ubatch_draft"),
        type_k=kind("type_k", "f16"),
        type_v=kind("type_v", "f16"),
        type_k_draft=kind("type_k_draft", "f16"),
        type_v_draft=kind("type_v_draft", "f16"),
        flash_attn=kind("flash_attn", "auto") not in OFF,
        kv_unified=auto or flags.has("-kvu", "--kv-unified"),
        swa_full=flags.has("--swa-full"),
    )


def _device(force: bool, notes: list[str]) -> Device | None:
    """The device that everything goes to; without a GPU the machine's memory."""
    from dspine._devices import detect

    found = detect()
    if not found and not force:
        raise ServerError("no device and no memory size was found; --force starts without a plan")
    if len(found) > 1:
        notes.append(f"{len(found)} GPUs, planned for the first alone: {found[0].name}")
    return found[0] if found else None


def _plan(
    models: Models, flags: Flags, device: Device, force: bool, notes: list[str]
) -> Plan | None:
    """The memory plan; None where there is none and the start is forced."""
    from dspine._memory import make_plan

    target, draft = models[0].header, models[1].header if models[1] else None
    if target is None or (models[1] is not None and draft is None):
        return None  # a note tells why
    try:
        return make_plan(target, draft, _request(flags, (target, draft)), device)
    except DspineError as error:
        if not force:
            raise
        notes.append(f"no memory plan: {error}")
        return None


def _needs(plan: Plan) -> str:
    return (
        f"-c {plan.n_ctx} needs {plan.device_bytes / GIB:.1f} GiB, {plan.device.name} has "
        f"{plan.device.room / GIB:.1f} GiB"
    )


def _misfit(plan: Plan) -> str:
    """What does not fit, and what would help."""
    ways = [] if plan.largest_n_ctx is None else [f"-c {plan.largest_n_ctx}"]
    ways += [
        f"{lever.name}{f' ({lever.flags})' if lever.flags else ''}: -c {lever.largest_n_ctx}"
        for lever in plan.levers
        if (lever.largest_n_ctx or 0) > (plan.largest_n_ctx or 0)
    ][:2]
    fits = f"fits: {'; '.join(ways)}" if ways else "no context fits"
    return f"{_needs(plan)}\n{fits}; --force starts all the same"


def _address(flags: Flags) -> Address:
    port = flags.number("port")
    if port is None:
        raise InvalidError("the command has no --port")
    return Address(
        flags.settings.get("host", LOOPBACK),
        port,
        flags.settings.get("api_prefix", ""),
        "tls" in flags.settings,
    )
