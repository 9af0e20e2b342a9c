"""Where a result comes from: machine, driver, files, pin, commit.

Run as a module it prints what llama.cpp can compute on: asked in a process of its own, since a
GPU keeps some memory for every process that has asked, and the servers need all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from ctypes import byref
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from dspine._headers import open_header

from dspine_bench.errors import BenchError
from dspine_bench.schema import Device, Hardware, ModelFile, Provenance

READ = re.compile(r"LLAMA_|GGML_|DSPINE_|CUDA_|OMP_|GOMP_|MKL_|OPENBLAS_|NVIDIA_")
SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
COMMIT_ENV = "DSPINE_BENCH_COMMIT"  # for a copy of the tree without its history
CHUNK = 1 << 24
LARGE = 1 << 16  # values; smaller tensors do not say what a file is
# what measuring itself writes is no change of what was measured
MEASURED = ("--", ".", ":!bench/results", ":!README.md")
PROBE_TIMEOUT_S = 60.0
SMI_FIELDS = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"
SMI = (f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader")


def _output(*command: str, folder: Path | None = None) -> str | None:
    """What a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def checkout(start: Path) -> Path | None:
    """The project's checkout around a folder; None outside it."""
    for place in (start, *start.parents):
        if (place / "native" / "pin.json").is_file():
            return place
    return None


def commit(start: Path) -> tuple[str | None, bool | None]:
    """Our commit, and whether the checkout differs from it; of `DSPINE_BENCH_COMMIT` if set.

    That variable holds the commit, with `-dirty` behind it where it was.
    """
    if given := os.environ.get(COMMIT_ENV, "").strip():
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    root = checkout(start)
    head = _output("git", "rev-parse", "HEAD", folder=root) if root else None
    if not head or root is None:
        return None, None
    status = _output("git", "status", "--porcelain", *MEASURED, folder=root)
    return head, None if status is None else bool(status)


def same_code(head: str, start: Path) -> bool:
    """Whether the checkout is what it was at a commit, up to what measuring itself writes."""
    root = checkout(start)
    if root is None:
        return False
    unchanged = _output("git", "diff", "--quiet", head, *MEASURED, folder=root) is not None
    return unchanged and not commit(start)[1]


def build_of_library() -> str:
    """What the native library says that it was built from."""
    from dspine import _library as native

    return (native.dspine_llama_build() or b"").decode("utf-8", "replace")


def pin_of(build: str) -> str:
    """llama.cpp's commit in a build's name ("b0-0c1e57098-dspine", "1234 (0c1e57098)")."""
    found = re.search(r"(?<![0-9a-f])[0-9a-f]{7,40}(?![0-9a-f])", build)
    return found[0] if found else "unknown"


def binaries() -> str | None:
    """SHA-256 of names and content of the native libraries and llama-server; None of nothing."""
    from dspine._library import library_candidates
    from dspine._programs import program_candidates

    libraries = [path for path in library_candidates() if path.is_file()]
    found = {path.name: path for path in program_candidates("llama-server") if path.is_file()}
    for path in libraries[:1]:
        found |= {one.name: one for one in path.parent.glob("*.so*")}
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name} {sha256(found[name])}\n".encode())
    return total.hexdigest() if found else None


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line whose API key and passwords in URLs are ***."""
    found: list[str] = []
    hide = False
    for word in words:
        if hide and word != "--flag":
            found.append("--flag=***" if word.startswith("--flag=") else "***")
            hide = False
            continue
        hide = hide or word in ("--api-key", "--flag=--api-key")
        found.append(public_url(re.sub(r"(--api-key=).*", r"\1***", word, flags=re.DOTALL)))
    return found


def without_folders(words: Sequence[str]) -> list[str]:
    """A command line with the files' names alone: folders tell of a person, not of a run."""
    return [_without_folder(word) for word in words]


def _without_folder(word: str) -> str:
    return Path(word).name if Path(word).is_absolute() else word


def public_url(text: str) -> str:
    """Text whose URL names no user and no password."""
    return re.sub(r"(https?://)[^/@\s]*@", r"\1", text)


def environment() -> dict[str, str]:
    """The variables that llama.cpp, its backends and this package read, but for secrets.

    Files are named without their folders. Where llama-cpp-python's library lies is left out: a
    part of this package sets it, and the hash of the build says more.
    """
    return {
        name: _without_folder(value)
        for name, value in sorted(os.environ.items())
        if READ.match(name) and not SECRET.search(name) and name != "LLAMA_CPP_LIB_PATH"
    }


def provenance(
    build: str,
    command: Sequence[str] | None = None,
    *,
    own: bool = True,
    program: Path | None = None,
    state: tuple[str | None, bool | None] | None = None,
) -> Provenance:
    """Of this run; `build` is what the measured program calls itself.

    `own`: whether it is ours; `program`: the file that it is else, where it is known. `state`: of
    the checkout, as `commit` told it before a run that takes long; else of now.
    """
    from dspine import __version__

    head, dirty = state or commit(Path.cwd())
    return Provenance(
        command=without_secrets(without_folders(sys.argv if command is None else command)),
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        version=__version__,
        commit=head,
        dirty=dirty,
        pin=pin_of(build),
        build=build,
        binaries=sha256(program) if program else binaries() if own else None,
        environment=environment(),
    )


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _devices() -> list[Device]:
    """In another process; empty where that fails, as then no server would start either."""
    text = _output(sys.executable, "-m", "dspine_bench.provenance")
    try:
        found: list[dict[str, Any]] = json.loads(text or "[]")
    except ValueError:
        return []
    return [Device(**one) for one in found]


def hardware() -> Hardware:
    """This machine."""
    smi = _output("nvidia-smi", *SMI)
    first = smi.splitlines()[0].split(",", 1) if smi else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Hardware(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cpu=_cpu(),
        cores=cores or 0,
        memory_bytes=_memory(),
        devices=_devices(),
        driver=first[0].strip() if first else None,
        limits=first[1].strip() if first and len(first) > 1 else None,
    )


def sha256(path: Path) -> str:
    """Of a whole file."""
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            total.update(chunk)
    return total.hexdigest()


def model_file(role: Literal["target", "drafter"], path: Path) -> ModelFile:
    """What a GGUF is; HeaderError where it is none."""
    header = open_header(str(path))
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        if len(tensor.shape) > 1 and tensor.nbytes >= LARGE:
            sizes[tensor.type] += tensor.nbytes
    try:
        digest = sha256(path)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None
    return ModelFile(
        role=role,
        name=path.name,
        bytes=path.stat().st_size,
        sha256=digest,
        architecture=header.architecture,
        type=sizes.most_common(1)[0][0] if sizes else "none",
    )


def pair_files(target: Path | None, drafters: Sequence[Path]) -> list[ModelFile]:
    """The GGUFs of a run, hashed."""
    found = [model_file("target", target)] if target else []
    return found + [model_file("drafter", path) for path in drafters]


def list_devices() -> list[dict[str, Any]]:
    """The devices of the native library, as fields of `Device`."""
    from dspine import _library as native

    found = []
    for index in range(native.dspine_device_count()):
        device = native.Device()
        if native.dspine_get_device(index, byref(device)) != 0:
            continue
        texts = {
            name: (getattr(device, name) or b"").decode("utf-8", "replace").strip()
            for name in ("name", "backend", "description")
        }
        found.append({**texts, "total_bytes": max(int(device.total_bytes), 0)})
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list_devices()) + "\n")
