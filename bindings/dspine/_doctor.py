"""What `dspine doctor` looks at: is everything here that serving a pair needs?"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dspine._errors import AbiError, DspineError
from dspine._programs import program

GIB = 1 << 30
LOW_DISK = 10 * GIB  # a small target, its drafter, and the halves of a download
PROBE_TIMEOUT_S = 60.0  # the first use of a GPU driver may take long
PACKAGES = ("typer", "rich", "httpx", "gguf", "numpy", "huggingface_hub", "safetensors")
REBUILD = "run `make setup`, or install the wheel again"


class Status(str, Enum):
    """OK: fine. NOTE: works, but. BROKEN: something that is needed does not work."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: how it is.
        found: what was found, one line.
        advice: what to do about it; empty where nothing is to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def _python() -> Iterator[Check]:
    yield Check("Python", Status.OK, f"{platform.python_version()} ({sys.executable})")
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        yield Check("packages", Status.BROKEN, f"missing: {', '.join(missing)}", advice)
    else:
        yield Check("packages", Status.OK, ", ".join(found))


def _library() -> Iterator[Check]:
    from dspine import _library as native

    try:
        loaded, path = native.open_library()
        native.bind(loaded, path)
    except AbiError as error:
        yield Check("library", Status.BROKEN, str(error), REBUILD)
        return
    except DspineError as error:
        yield Check("library", Status.BROKEN, str(error), REBUILD)
        return
    yield Check("library", Status.OK, f"{path}, interface version {native.ABI_VERSION}")


def _pinned() -> str | None:
    """The llama.cpp commit that the package was built from; it lies beside its scripts."""
    path = Path(__file__).resolve().parent / "native" / "llama.cpp" / "pin.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["llama_cpp_commit"])
    except (OSError, ValueError, KeyError):
        return None  # a source tree, or another build


def probe(*command: str | Path) -> tuple[int, str]:
    """Run a program to its end: exit code and everything it wrote; DspineError if it cannot."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise DspineError(f"{command[0]}: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise DspineError(f"{command[0]}: no answer after {PROBE_TIMEOUT_S:g} s") from None
    return done.returncode, done.stdout.decode(errors="replace")


def knows_dspine(version: str, usage: str) -> bool:
    """True for a llama-server of ours, from what --version and --help print.

    The build marks its commit with "-dspine" when all hooks are applied, and one of the hooks
    adds --spec-draft-ubatch, with a default for DSpine.
    """
    marked = re.search(r"commit \w+-dspine\b", version) is not None
    option = usage.partition("--spec-draft-ubatch")[2][:400]
    return marked and "DSpine" in option and "draft-dflash" in usage


def _server() -> Iterator[Check]:
    try:
        path = program("llama-server")
        code, version = probe(path, "--version")
        usage = probe(path, "--help")[1]
    except DspineError as error:
        yield Check("llama-server", Status.BROKEN, str(error), REBUILD)
        return
    if code != 0:
        found = f"{path} --version ends with code {code}: {version.strip()[-300:]}"
        yield Check("llama-server", Status.BROKEN, found, REBUILD)
        return
    yield from _version(path, version)
    if knows_dspine(version, usage):
        yield Check("DSpine", Status.OK, "the server runs DSpine drafters")
    else:
        advice = "it is a stock llama.cpp: unset DSPINE_BIN_DIR, or " + REBUILD
        yield Check("DSpine", Status.BROKEN, f"{path} does not know DSpine drafters", advice)
    yield from _devices(path)


def _version(path: Path, version: str) -> Iterator[Check]:
    line = next((line for line in version.splitlines() if line.startswith("version")), "no version")
    yield Check("llama-server", Status.OK, f"{path}, {line}")
    pinned = _pinned()
    if pinned is not None and pinned not in line:
        found = f"the package is for {pinned}, the server is another build"
        yield Check("llama.cpp pin", Status.NOTE, found, "unset DSPINE_BIN_DIR to use its own")
    elif pinned is not None:
        yield Check("llama.cpp pin", Status.OK, pinned)


def _devices(server: Path) -> Iterator[Check]:
    """Devices as the server names them, with their memory; and NVIDIA's own view beside it."""
    code, text = probe(server, "--list-devices")
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    devices = [line for line in lines if re.match(r"\w+: .*\(\d+ MiB", line)]
    if code != 0:
        found = f"--list-devices ends with code {code}: {text.strip()[-300:]}"
        yield Check("devices", Status.BROKEN, found, "is the GPU driver installed and running?")
    for line in devices:
        yield Check("device", Status.OK, line)
    cards = list(_nvidia())
    yield from cards
    if not devices and code == 0:
        card = any(check.status is Status.OK for check in cards)
        advice = "DSPINE_CUDA=1 make setup builds for it (needs nvcc)" if card else ""
        note = Status.NOTE if card else Status.OK
        found = "none but the CPU" + (", though there is an NVIDIA card" if card else "")
        yield Check("devices", note, found, advice)


def _nvidia() -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    fields = "name,driver_version,memory.total,memory.free"
    try:
        code, text = probe(tool, f"--query-gpu={fields}", "--format=csv,noheader")
    except DspineError as error:
        code, text = 1, str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code != 0 or not lines:
        found = f"nvidia-smi fails: {lines[-1] if lines else 'no card listed'}"
        yield Check("NVIDIA driver", Status.NOTE, found, "check the driver; reboot after an update")
        return
    for line in lines:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4:
            name, driver, total, free = parts
            line = f"{name}, driver {driver}, {total}, {free} free"
        yield Check("NVIDIA driver", Status.OK, line)


def _disk() -> Iterator[Check]:
    from huggingface_hub import constants

    for what, path in (("hub cache", Path(constants.HF_HUB_CACHE)), ("here", Path.cwd())):
        place = next((p for p in (path, *path.parents) if p.is_dir()), Path("/"))
        try:
            free = shutil.disk_usage(place).free
        except OSError as error:
            yield Check(f"disk, {what}", Status.NOTE, f"{path}: {error.strerror or error}")
            continue
        low = free < LOW_DISK
        advice = "make room, or set HF_HOME to another disk" if low else ""
        found = f"{free / GIB:.1f} GiB free at {path}"
        yield Check(f"disk, {what}", Status.NOTE if low else Status.OK, found, advice)


GROUPS: tuple[Callable[[], Iterator[Check]], ...] = (_python, _library, _server, _disk)


def examine() -> list[Check]:
    """Run every check; one that fails unexpectedly is a finding too."""
    found: list[Check] = []
    for group in GROUPS:
        try:
            found += group()
        except Exception as error:
            name = group.__name__.strip("_")
            text = f"{type(error).__name__}: {error}"
            found.append(Check(name, Status.BROKEN, text, "please report this"))
    return found
