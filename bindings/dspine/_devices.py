"""The devices of this machine and their memory, and what `--gpu` means."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from dspine._errors import DspineError, InvalidError
from dspine._memory import MIB, Device
from dspine._packing import cpu_features

__all__ = ["detect", "detect_gpus", "machine_memory", "select"]

TIMEOUT_S = 20
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[GM])(?:i?B)?", re.IGNORECASE)
# "  CUDA0: NVIDIA GeForce RTX 3090 (24135 MiB, 23869 MiB free)"
LISTED = re.compile(r"\s*(?P<id>\w+): (?P<name>.+) \((?P<total>\d+) MiB, (?P<free>\d+) MiB free\)")
LARGEST_GIB = 1 << 20
DETECTED = "detected"
MEMINFO = Path("/proc/meminfo")


def detect() -> list[Device]:
    """GPUs in the driver's order; without one, the machine's memory; empty if that is unknown."""
    gpus = detect_gpus()
    if gpus:
        return gpus
    memory = machine_memory()
    return [] if memory is None else [memory]


def detect_gpus() -> list[Device]:
    """The GPUs that nvidia-smi knows, else those that llama-server can use."""
    return _from_nvidia_smi() or _from_llama_server()


def _output_of(command: list[str]) -> str | None:
    """Standard output of a program, or None where it cannot be run or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _from_nvidia_smi() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,memory.total,memory.free"
    text = _output_of([program, query, "--format=csv,noheader,nounits"])
    devices: list[Device] = []
    for line in (text or "").splitlines():
        name, _, rest = line.strip().rpartition(", ")[0].rpartition(", ")
        free = line.rpartition(", ")[2].strip()
        if name and rest.isdecimal() and free.isdecimal():
            devices.append(Device(name, int(rest) * MIB, int(free) * MIB))
    return devices


def _from_llama_server() -> list[Device]:
    from dspine._programs import program

    try:
        server = program("llama-server")
    except DspineError:
        return []
    found = [LISTED.fullmatch(line) for line in (_list_devices(server) or "").splitlines()]
    return [
        Device(m["name"], int(m["total"]) * MIB, int(m["free"]) * MIB)
        for m in found
        # accelerators that work in the machine's own memory are no place for weights
        if m is not None and not m["id"].startswith(("CPU", "BLAS"))
    ]


def _list_devices(server: Path) -> str | None:
    return _output_of([str(server), "--list-devices"])


def machine_memory() -> Device | None:
    """The machine's memory, what programs may still take of it; None where it is unknown."""
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None
    return Device("this machine's memory", total, free, is_gpu=False, cpu_features=cpu_features())


def _meminfo(key: str) -> int | None:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def select(spec: str | None) -> Device:
    """The device that `--gpu` names.

    Args:
        spec: a size ("24G", "24576M"), an index or a part of a detected GPU's name, "detected",
            or None for the first GPU, else the machine's memory.

    Raises InvalidError for anything else, DspineError where nothing is detected.
    """
    if spec is not None and (match := SIZE.fullmatch(spec.strip())):
        return _sized(spec.strip(), match)
    if spec is None:
        devices = detect()
        if not devices:
            raise DspineError("no device was found; name its memory, for instance --gpu 24G")
        return devices[0]
    gpus = detect_gpus()
    if not gpus:
        raise DspineError(
            f"--gpu {spec}: this is no size such as 24G, and no GPU was detected here"
            if spec != DETECTED
            else "--gpu detected: no GPU was detected here; name its memory, such as --gpu 24G"
        )
    if spec == DETECTED:
        return gpus[0]
    if spec.isdecimal() and int(spec) < len(gpus):
        return gpus[int(spec)]
    # "3090" is a name, "2" an index that does not exist
    named = [d for d in gpus if len(spec) >= 3 and spec.lower() in d.name.lower()]
    if not named:
        there = ", ".join(f"{i}: {d.name}" for i, d in enumerate(gpus))
        raise InvalidError(f"--gpu {spec}: expected a size such as 24G, or one of {there}")
    return named[0]


def _sized(spec: str, match: re.Match[str]) -> Device:
    """A card of which only the memory is known."""
    unit = 1024 * MIB if match["unit"].upper() == "G" else MIB
    number = float(match["number"])
    if not 0 < number * unit <= LARGEST_GIB * 1024 * MIB:
        raise InvalidError(f"--gpu {spec}: expected a size above 0 and up to {LARGEST_GIB}G")
    return Device(f"a GPU with {spec}", int(number * unit))
