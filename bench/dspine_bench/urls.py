"""What is known of servers that others started, and of where they run."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from dspine_bench.schema import Mode, Report, ServerReport


def from_urls(report: Report) -> bool:
    """Whether others started the servers."""
    return isinstance(report, ServerReport) and any(mode.url for mode in report.modes)


def device_text(report: Report) -> str:
    """What computed; for servers of others, what asked them."""
    machine = report.hardware
    device = ", ".join(d.description for d in machine.devices) or machine.cpu
    return f"asked from {device}" if from_urls(report) else device


def is_far(url: str | None) -> bool:
    """Whether a URL leads to a machine that need not be the client's."""
    if url is None:
        return False
    host = urlsplit(url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host != "localhost"


def far_servers(report: Report) -> frozenset[tuple[bool, str | None]]:
    """URLs on machines that are not known, each with whether it is a baseline's.

    None stands for modes on the client's machine; empty where all of them are.
    """
    modes = report.modes if isinstance(report, ServerReport) else []
    far = {(m.name == m.baseline, m.url if is_far(m.url) else None) for m in modes}
    return frozenset(far if any(url for _, url in far) else ())


def unlike(modes: Sequence[Mode]) -> list[str]:
    """A line each for what differs but the drafter: the ratio is then not the drafter's alone."""
    builds = {m.name: m.build for m in modes if m.build != "unknown"}
    found: dict[str, dict[str, str | int | None]] = {
        "builds": {**builds},
        "models": {m.name: m.model for m in modes},
        "slots": {m.name: m.slots for m in modes},
        "contexts of a slot": {m.name: m.slot_context for m in modes},
    }
    known = {what: {m: v for m, v in of.items() if v is not None} for what, of in found.items()}
    return [
        f"the modes' {what} differ, and ratios with them: "
        + ", ".join(f"{name} {value}" for name, value in values.items())
        for what, values in known.items()
        if len(set(values.values())) > 1
    ]
