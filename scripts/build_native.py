"""Build the native part in a tree that lives in the cache and outlasts this checkout.

    build_native.py [-- COMMAND ...]

The tree is `~/.cache/dspine/build-<key>`; `build` in the checkout points at it. Any checkout
with the same pin, compiler and CUDA wish shares it, so a fresh clone builds only what differs.
COMMAND runs afterwards with DSPINE_PREBUILT set to the tree, before the lock is let go.

CMake binds a tree to one source path, hence the `checkout` link inside the tree: it is that
path, and it points at whichever checkout builds now.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "native"))

from prepare_upstream import Pin, PrepareError, cache_dir, sha256_of  # noqa: E402


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# -- which tree -------------------------------------------------------------------------------


def first_line(command: list[str]) -> str:
    """First line that a program prints, or its absence, for use in the key."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "absent"
    return next(iter(done.stdout.splitlines()), "")


def cpu_features() -> str:
    """What -march=native depends on; a cache may be shared by unlike machines."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def tree_key() -> str:
    """Name the build tree after everything that would make its objects useless to another."""
    pin = Pin.read(ROOT / "native" / "pin.json")
    facts = [
        platform.machine(),
        cpu_features(),
        first_line([os.environ.get("CC", "cc"), "--version"]),
        first_line([os.environ.get("CXX", "c++"), "--version"]),
        shutil.which("nvcc") or "no nvcc",
        os.environ.get("DSPINE_CUDA", "auto"),
        os.environ.get("DSPINE_LLAMA_CPP_DIR", ""),
        os.environ.get("CMAKE_ARGS", ""),
        "ninja" if shutil.which("ninja") else "make",
    ]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    return f"{pin.version}-{digest[:10]}"


def tree_path() -> Path:
    return cache_dir() / f"build-{tree_key()}"


# -- locking and links ------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one build at a time into a tree, and say so when waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {path.with_suffix('')}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to `target`, replacing an older link in one step."""
    if link.is_symlink() and link.readlink() == target:
        return
    if link.exists() and not link.is_symlink():
        say(f"{link} is not a link of ours and is left alone; the build is in {target}")
        return
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)


# -- modification times -----------------------------------------------------------------------


def own_sources() -> list[Path]:
    """Files of this checkout that the build reads."""
    found = [ROOT / "CMakeLists.txt"]
    found += [path for path in (ROOT / "native").rglob("*") if path.is_file()]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def settle_times(record: Path) -> None:
    """Make modification times say what content says, for all that this tree built before.

    Times alone mislead when checkouts share a tree: in a fresh clone everything looks new, and
    in an older one a different file looks already built. So a file with the recorded content
    gets its recorded time, and one with other content gets the present.
    """
    known: dict[str, list[str | int]] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(record.read_text(encoding="utf-8"))
    current: dict[str, list[str | int]] = {}
    for path in own_sources():
        name, digest = path.relative_to(ROOT).as_posix(), sha256_of(path)
        old_digest, old_time = known.get(name, ["", 0])
        if old_digest == digest and path.stat().st_mtime_ns != old_time:
            os.utime(path, ns=(int(old_time), int(old_time)))
        elif old_digest != digest and known:
            path.touch()
        current[name] = [digest, path.stat().st_mtime_ns]
    record.write_text(json.dumps(current, indent=1), encoding="utf-8")


# -- build ------------------------------------------------------------------------------------


def configure_command(tree: Path) -> list[str]:
    # Not the virtual environment's Python: that one goes away with its checkout.
    python = getattr(sys, "_base_executable", None) or sys.executable
    command = ["cmake", "-S", str(tree / "checkout"), "-B", str(tree)]
    command += [f"-DPython3_EXECUTABLE={python}", "-Wno-dev"]
    if shutil.which("ninja"):
        command += ["-G", "Ninja"]
    return command + shlex.split(os.environ.get("CMAKE_ARGS", ""))


def configure(tree: Path) -> None:
    """Run CMake once per set of arguments; later changes are noticed by the build itself."""
    command = configure_command(tree)
    stamp, text = tree / "dspine-configured", "\n".join(command)
    ready = (tree / "CMakeCache.txt").is_file() and stamp.is_file()
    local = os.environ.get("DSPINE_LLAMA_CPP_DIR")
    if ready and not local and stamp.read_text(encoding="utf-8") == text:
        return
    stamp.unlink(missing_ok=True)
    subprocess.run(command, check=True)
    stamp.write_text(text, encoding="utf-8")


def compile_tree(tree: Path) -> None:
    """Build, passing the output on without one piece of upstream's advice.

    Its build step for the web UI warns at every run that none is embedded and tells where to
    download one. That is our choice, and `report` states it in one line.
    """
    command = ["cmake", "--build", str(tree), "--parallel", str(os.cpu_count() or 1)]
    advice = False
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            if re.match(r"CMake Warning at .*/ui-assets\.cmake", line):
                advice = True
            elif advice and line.strip() and not line.startswith("  "):
                advice = False
            if not advice:
                sys.stdout.write(line)
                sys.stdout.flush()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def report(tree: Path) -> None:
    """Print what was built, also when nothing had to be."""
    say(f"native build: {tree}")
    with contextlib.suppress(OSError):
        for line in (tree / "dspine-choices.txt").read_text(encoding="utf-8").splitlines():
            say(f"  {line}")
    with_ui = (tree / "llama.cpp" / "tools" / "ui" / "dist" / "index.html").is_file()
    say(
        f"  web UI: {'built from the pinned source' if with_ui else 'left out (make ui builds it)'}"
    )


def build(tree: Path) -> None:
    """Bring the tree up to date with this checkout. The caller holds the lock."""
    tree.mkdir(parents=True, exist_ok=True)
    point(tree / "checkout", ROOT)
    settle_times(tree / "dspine-sources.json")
    configure(tree)
    compile_tree(tree)
    point(ROOT / "build", tree)
    report(tree)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print-tree", action="store_true", help="only print the tree's path")
    parser.add_argument("command", nargs="*", help="run with the finished tree")
    args = parser.parse_args(argv)
    try:
        tree = tree_path()
        if args.print_tree:
            say(str(tree))
            return 0
        with locked(tree.with_name(f"{tree.name}.lock")):
            build(tree)
            if args.command:
                env = {**os.environ, "DSPINE_PREBUILT": str(tree)}
                return subprocess.run(args.command, env=env, check=False).returncode
    except PrepareError as exc:
        sys.stderr.write(f"build_native: {exc}\n")
        return 1
    except subprocess.CalledProcessError as exc:
        sys.stderr.write(f"build_native: {shlex.join(exc.cmd)} failed ({exc.returncode})\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
