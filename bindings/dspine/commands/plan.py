"""`dspine plan`."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspine._memory import Plan

MIB = 1 << 20
MARGIN = 40  # columns of a component's name

# The options, one by one; the types carry their help.
_TargetArg = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="GGUF file, or OWNER/REPO[:FILE or :QUANT] on the hub."),
]
_DraftArg = Annotated[str | None, typer.Argument(metavar="DRAFT", help="The drafter's, likewise.")]
_GpuOpt = Annotated[
    str | None,
    typer.Option(
        metavar="GPU",
        help="Plan for this memory (24G, 24576M), or for a GPU of this machine: its index, a part "
        "of its name, or 'detected'. Default: the first GPU, else the machine's memory.",
    ),
]
_DepthOpt = Annotated[
    int | None, typer.Option(help="Tokens drafted a round. Default: block size - 1.")
]
_ContextOpt = Annotated[
    int | None,
    typer.Option("-c", "--ctx-size", help="Tokens of context. Default: the most that fits."),
]
_CacheOpt = Annotated[str, typer.Option(help="Type of all key-value caches.")]
_DraftCacheOpt = Annotated[
    str | None, typer.Option(help="Of the drafter's. Default: as --cache-type.")
]
_SlotsOpt = Annotated[int, typer.Option("-np", "--parallel", help="Slots.")]
_UbatchOpt = Annotated[int, typer.Option("-ub", "--ubatch-size", help="Rows of a ubatch.")]
_DraftUbatchOpt = Annotated[
    int | None,
    typer.Option("-ubd", "--spec-draft-ubatch", help="Rows of the drafter's. Default: 128."),
]
_FlashOpt = Annotated[bool, typer.Option(help="Flash attention.")]
_JsonOpt = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]


def plan(
    target: _TargetArg,
    draft: _DraftArg = None,
    gpu: _GpuOpt = None,
    n_draft: _DepthOpt = None,
    n_ctx: _ContextOpt = None,
    cache_type: _CacheOpt = "q8_0",
    cache_type_draft: _DraftCacheOpt = None,
    n_parallel: _SlotsOpt = 1,
    n_ubatch: _UbatchOpt = 512,
    n_ubatch_draft: _DraftUbatchOpt = None,
    flash_attn: _FlashOpt = True,
    json: _JsonOpt = False,
) -> None:
    """Say how much memory a pair needs, and the largest context that fits.

    Reads the headers of the files only. Ends with code 1 where the configuration does not fit.
    """
    from dspine._devices import select
    from dspine._headers import check_partner, open_header
    from dspine._memory import PlanRequest, make_plan

    headers = open_header(target), None if draft is None else open_header(draft)
    kind_draft = cache_type_draft or cache_type
    request = PlanRequest(
        n_ctx, n_draft, n_parallel, n_ubatch, n_ubatch_draft, cache_type, cache_type,
        kind_draft, kind_draft, flash_attn,
    )  # fmt: skip
    made = make_plan(*headers, request, select(gpu))
    if headers[1] is not None:
        check_partner(headers[0], headers[1])
    typer.echo(json_format.dumps(as_document(made), indent=2) if json else as_text(made))
    if not made.fits:
        raise typer.Exit(1)


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan for --json; sizes in bytes."""
    from dspine.cli import SCHEMA_VERSION

    device = plan.device
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": plan.fits,
        "n_ctx": plan.n_ctx,
        "largest_n_ctx": plan.largest_n_ctx,
        "device_bytes": plan.device_bytes,
        "estimated": plan.estimated,
        "device": {
            **vars(device),
            "cpu_features": sorted(device.cpu_features),
            "room_bytes": device.room,
        },
        "request": vars(plan.request),
        "components": [vars(c) for c in plan.components],
        "levers": [vars(lever) for lever in plan.levers],
        "notes": list(plan.notes),
    }


def as_text(plan: Plan) -> str:
    """The table, the verdict and the levers."""
    lines = [_device_line(plan), "", f"{'component':<{MARGIN}} {'MiB':>9}  place"]
    for part in plan.components:
        lines.append(f"{part.name:<{MARGIN}} {part.bytes / MIB:>9.1f}  {part.place}")
    place = "GPU" if plan.device.is_gpu else "RAM"
    lines.append(f"{f'total, {place}':<{MARGIN}} {plan.device_bytes / MIB:>9.1f}")
    lines += ["", *(f"note: {note}" for note in plan.notes)]
    if plan.estimated:
        lines.append("note: the graph of this architecture is not modelled; compute is estimated")
    lines.append(_verdict(plan))
    if plan.levers:
        lines += ["", f"{'with':<{MARGIN}} {'MiB less':>9}  largest -c"]
        for lever in plan.levers:
            largest = lever.largest_n_ctx or "none fits"
            flags = f"  ({lever.flags})" if lever.flags else ""
            name = f"{lever.name:<{MARGIN}} {lever.saved_bytes / MIB:>9.1f}"
            lines.append(f"{name}  {largest}{flags}")
    return "\n".join(lines)


def _device_line(plan: Plan) -> str:
    device = plan.device
    if not device.is_gpu:
        free = f", {device.room / MIB:.0f} MiB available"
        return f"no GPU: planned for {device.name}{free}"
    known = "free" if device.free_bytes is not None else "in all"
    return f"planned for {device.name}, {device.room / MIB:.0f} MiB {known}"


def _verdict(plan: Plan) -> str:
    """One line: whether it fits, and up to which context."""
    free = (plan.device.room - plan.device_bytes) / MIB
    largest = plan.largest_n_ctx
    limit = f"largest -c that fits: {largest}" if largest else "no context fits"
    if largest == plan.trained_n_ctx:
        limit = f"all of the {largest} that the target was trained for fit"
    if plan.fits:
        return f"fits: -c {plan.n_ctx}, {free:.0f} MiB to spare; {limit}"
    return f"does not fit: -c {plan.n_ctx} lacks {-free:.0f} MiB; {limit}"
