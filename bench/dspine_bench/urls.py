"""What is known of servers that others started, and of where they run."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from dspine_bench.schema import Mode, Report, ServerReport

# What all modes should have in common: its name in a sentence, and the field of `Mode`.
ALIKE = {
    "builds": "build",
    "models": "model",
    "slots": "slots",
    "contexts of a slot": "slot_context",
}


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
    lines = []
    for what, field in ALIKE.items():
        told = ((mode.name, getattr(mode, field)) for mode in modes)
        known = {name: value for name, value in told if value not in (None, "unknown")}
        if len(set(known.values())) > 1:
            each = ", ".join(f"{name} {value}" for name, value in known.items())
            lines.append(f"the modes' {what} differ, and ratios with them: {each}")
    return lines
