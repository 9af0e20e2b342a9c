"""Say everything that this machine lacks at once, before anything starts.

Exit code 0: ready; 1: something is missing, each thing named with what to do about it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_RANGE = ((3, 10), (3, 13))
CMAKE_MINIMUM = (3, 18)
GIB = 1 << 30

# Measured peaks, rounded up: archive, sources and objects (the CUDA backend needs most of
# it) in the cache; the virtual environment, with torch, in the checkout.
CACHE_BYTES = 3 * GIB
CHECKOUT_BYTES = 2 * GIB


def run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str] | None:
    """Run a program; None when it does not exist."""
    try:
        return subprocess.run(
            list(command), input=text, capture_output=True, text=True, check=False
        )
    except OSError:
        return None


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:2])) -> list[str]:
    low, high = PYTHON_RANGE
    problems = []
    if not low <= version[:2] <= high:
        problems.append(
            f"Python 3.10 to 3.13: this is {'.'.join(map(str, version))}; "
            "name another with `make PYTHON=python3.12 ...`"
        )
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        problems.append("the Python modules venv and ensurepip (Debian: apt install python3-venv)")
    return problems


def check_compiler(variable: str, default: str, language: str, source: str) -> list[str]:
    """Compile a few lines: a compiler without its standard library is found out too."""
    command = os.environ.get(variable, default).split()
    flags = ["-x", language, "-fsyntax-only", "-"]
    if language == "c++":
        flags = ["-std=c++17", *flags]
    done = run([*command, *flags], source)
    if done is None:
        return [
            f"a {language.upper()} compiler, `{' '.join(command)}` (apt install build-essential)"
        ]
    if done.returncode:
        why = next(
            (line for line in done.stderr.splitlines() if "error" in line), "no reason given"
        )
        return [f"a working {language.upper()} compiler: `{' '.join(command)}` says {why.strip()}"]
    return []


def check_cmake() -> list[str]:
    done = run(["cmake", "--version"])
    wanted = ".".join(map(str, CMAKE_MINIMUM))
    if done is None or done.returncode:
        return [f"cmake {wanted} or newer (apt install cmake)"]
    match = re.search(r"(\d+)\.(\d+)", done.stdout)
    if not match or (int(match[1]), int(match[2])) < CMAKE_MINIMUM:
        return [f"cmake {wanted} or newer: found {done.stdout.splitlines()[0]}"]
    return []


def check_programs() -> list[str]:
    problems = []
    if not shutil.which("ninja") and not shutil.which("make"):
        problems.append("ninja or make (apt install ninja-build)")
    if not shutil.which("git"):
        problems.append("git, which applies the hooks (apt install git)")
    return problems


def check_cuda() -> list[str]:
    """Only what can be told before CMake looks: the value, and the compiler that it insists on."""
    wish = os.environ.get("DSPINE_CUDA", "")
    if wish not in ("", "0", "1"):
        return [f"a DSPINE_CUDA of 0 (CPU), 1 (CUDA) or nothing (look for it): it is {wish!r}"]
    cuda = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))
    if wish != "1" or shutil.which("nvcc") or (cuda / "bin" / "nvcc").is_file():
        return []
    return ["nvcc, as DSPINE_CUDA=1 insists on CUDA (0 builds for the CPU)"]


def existing_parent(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_disk(needs: Sequence[tuple[Path, int]]) -> list[str]:
    """Compare needs with free space, adding up those that share a file system."""
    per_device: dict[int, tuple[Path, int]] = {}
    for path, size in needs:
        folder = existing_parent(path)
        device = folder.stat().st_dev
        first, total = per_device.get(device, (folder, 0))
        per_device[device] = (first, total + size)
    problems = []
    for folder, size in per_device.values():
        free = shutil.disk_usage(folder).free
        if free < size:
            problems.append(f"disk: {size / GIB:.1f} GiB free at {folder}, {free / GIB:.1f} there")
        if not os.access(folder, os.W_OK):
            problems.append(f"write access to {folder}")
    return problems


def disk_needs(*, native: bool) -> list[tuple[Path, int]]:
    """What is still to be written: a finished tree or environment needs only a little."""
    if not native:
        return [(ROOT, GIB // 2)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspine"
    built = any(cache.glob("build-*/bin/llama-server"))
    stamps = ROOT / ".venv" / "dspine-stamps.json"
    installed = stamps.is_file() and '"wheel"' in stamps.read_text(encoding="utf-8")
    return [
        (cache, GIB // 2 if built else CACHE_BYTES),
        (ROOT, GIB // 4 if installed else CHECKOUT_BYTES),
    ]


def find_problems(*, native: bool = True) -> list[str]:
    problems = check_python()
    if sys.platform not in ("linux", "darwin"):
        problems.append(f"Linux or macOS: this is {sys.platform}")
    if native:
        problems += check_compiler("CC", "cc", "c", "#include <stdlib.h>\n")
        problems += check_compiler("CXX", "c++", "c++", "#include <filesystem>\n")
        problems += check_cmake()
        problems += check_programs()
        problems += check_cuda()
    return problems + check_disk(disk_needs(native=native))


def notes() -> list[str]:
    """Things worth knowing that stop nothing."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.is_file():
        return []
    return [
        "Python headers are not installed; they are needed only if a dependency has no wheel "
        "for this machine (Debian: apt install python3-dev)"
    ]


def report(*, native: bool = True) -> bool:
    """Print what is missing; True when nothing is."""
    problems = find_problems(native=native)
    if problems:
        sys.stderr.write("This machine lacks:\n")
        sys.stderr.writelines(f"  - {problem}\n" for problem in problems)
        return False
    for note in notes():
        sys.stdout.write(f"note: {note}\n")
    return True


if __name__ == "__main__":
    sys.exit(0 if report(native="--no-native" not in sys.argv[1:]) else 1)
