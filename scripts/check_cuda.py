"""Compile native/cuda for four GPU generations, warnings as errors, and count what kernels use.

    check_cuda.py [--llama-cpp DIR] [--write]
    check_cuda.py [--llama-cpp DIR] --program FILE --arch 90 --library DIR

Registers, shared memory, stack and spills of each kernel are compared with
bench/results/cuda_resources.json; more registers, stack or spills than recorded are an error.
`--write` records them anew. Nothing is run: it takes nvcc, no GPU, and passes without nvcc, saying
so. The headers of cuBLAS, which upstream's own include, come from the toolkit or its package.
The second form links the kernels, for one architecture, into the program that runs single
operations on a GPU (tests/native/cuda_emulation); it needs libggml-base in DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "native"))

from prepare_upstream import Pin, cache_dir, locked, pip_commands  # noqa: E402

RECORD = ROOT / "bench" / "results" / "cuda_resources.json"
# Upstream builds Blackwell as 120a, for which it has instructions that 120 lacks.
ARCHITECTURES = {"86": "86", "89": "89", "90": "90", "120": "120a"}
CUBLAS = "nvidia-cublas"
CUBLAS_SERIES = "13.0"

# Upstream's own flags for its backend, then ours.
FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-DGGML_CUDA_USE_GRAPHS")
WARNINGS = "-Wall,-Wextra,-Wcast-qual,-Wextra-semi,-Wmissing-declarations"
STRICT = ("-Werror", "all-warnings", "-Xcompiler", WARNINGS)
LIMITED = ("registers", "stack", "spill_stores", "spill_loads")

Resources = dict[str, dict[str, dict[str, int]]]  # kernel -> architecture -> count


class CheckError(Exception):
    """Something a person can act on."""


class CannotCheckError(Exception):
    """What is missing here, so that nothing can be said."""


def find_nvcc() -> Path:
    """The CUDA compiler; CannotCheckError where there is none."""
    home = os.environ.get("CUDA_PATH", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if not found:
        raise CannotCheckError("nvcc not found")
    return Path(found).resolve()


def release(nvcc: Path) -> str:
    """Version of the compiler, such as 13.0."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    if not found:
        raise CheckError(f"{nvcc} --version names no release:\n{text}")
    return found[1]


def toolkit_headers(nvcc: Path) -> Path:
    return nvcc.parent.parent / "include"


def cublas_headers(nvcc: Path, cache: Path | None = None) -> Path:
    """Folder of cublas_v2.h: the toolkit's, or the package's unpacked into the cache."""
    if (toolkit_headers(nvcc) / "cublas_v2.h").is_file():
        return toolkit_headers(nvcc)
    cache = cache or cache_dir()
    place = cache / f"cublas-headers-{CUBLAS_SERIES}"
    with locked(cache / f"{place.name}.lock"):
        if not (place / "cublas_v2.h").is_file():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                unpack_headers(download_cublas(Path(folder)), Path(folder) / "include")
                shutil.rmtree(place, ignore_errors=True)
                (Path(folder) / "include").replace(place)
    return place


def download_cublas(into: Path) -> Path:
    """Fetch the package with the user's own client; CannotCheckError where that fails."""
    wanted = ["download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted += ["--only-binary=:all:", "--dest", str(into), f"{CUBLAS}=={CUBLAS_SERIES}.*"]
    problems = []
    for pip in pip_commands():
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        wheels = sorted(into.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        problems.append((done.stderr.strip() or "no wheel came").splitlines()[-1])
    reason = "; ".join(problems) or "no pip"
    raise CannotCheckError(f"{CUBLAS} {CUBLAS_SERIES} cannot be had for its headers: {reason}")


def unpack_headers(wheel: Path, place: Path) -> None:
    """Write the headers of a wheel, and nothing else, into one folder."""
    place.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/include/" in name and name.endswith(".h"):
                (place / Path(name).name).write_bytes(archive.read(name))
    if not (place / "cublas_v2.h").is_file():
        raise CheckError(f"{wheel.name} has no cublas_v2.h")


def base_command(nvcc: Path, cublas: Path, upstream: Path, architectures: list[str]) -> list[str]:
    """The compiler with its flags; what is included from elsewhere counts as system headers."""
    ggml = upstream / "ggml"
    command = [str(nvcc), *FLAGS, "-DDSPINE_CUDA_KERNELS"]
    for name in architectures:
        command += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
    for folder in (cublas, toolkit_headers(nvcc), ggml / "include", ggml / "src"):
        command += ["-isystem", str(folder)]
    for folder in (ROOT / "native" / "cuda", ROOT / "native" / "src"):
        command += ["-I", str(folder)]
    return command


def compile_command(nvcc: Path, cublas: Path, upstream: Path, source: Path, out: Path) -> list[str]:
    """One call for all architectures, which also prints what kernels use."""
    command = base_command(nvcc, cublas, upstream, list(ARCHITECTURES.values()))
    return [*command, *STRICT, "-Xptxas", "-v", "-c", str(source), "-o", str(out)]


def build_program(upstream: Path, library: Path, arch: str, out: Path) -> None:
    """Link the kernels, upstream's gather of rows and emulate.cpp into a program for one GPU."""
    nvcc = find_nvcc()
    tests = ROOT / "tests" / "native" / "cuda_emulation"
    name = ARCHITECTURES.get(arch, arch)
    command = base_command(nvcc, cublas_headers(nvcc), upstream, [name])
    sources = [
        tests / "emulate.cpp",
        tests / "on_gpu.cu",
        ROOT / "native" / "cuda" / "dspine-cuda.cu",
    ]
    sources.append(upstream / "ggml" / "src" / "ggml-cuda" / "getrows.cu")
    command += [str(source) for source in sources]
    # on the other machine the library lies beside the program
    command += ["-L", str(library), "-lggml-base", "-Xlinker", "-rpath=$ORIGIN", "-o", str(out)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise CheckError(f"{out.name} cannot be built:\n{done.stdout}")


def demangle(names: list[str]) -> dict[str, str]:
    """Kernel names as they are written, without return type and parameters."""
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    plain = [re.sub(r"^void |\(.*\)$", "", line) for line in done.stdout.splitlines()]
    return dict(zip(names, plain, strict=True))


def parse(log: str) -> Resources:
    """What ptxas -v says of each kernel and architecture."""
    short = {f"sm_{name}": plain for plain, name in ARCHITECTURES.items()}
    found: Resources = {}
    pattern = (
        r"Compiling entry function '(\S+)' for '(\w+)'\n.*\n"
        r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers(.*)"
    )
    for name, arch, stack, stores, loads, registers, rest in re.findall(pattern, log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found.setdefault(name, {})[short[arch]] = {
            "registers": int(registers),
            "shared": int(shared[1]) if shared else 0,
            "stack": int(stack),
            "spill_stores": int(stores),
            "spill_loads": int(loads),
        }
    names = demangle(list(found))
    return {names[name]: found[name] for name in sorted(found, key=lambda n: names[n])}


def compile_all(nvcc: Path, cublas: Path, upstream: Path) -> Resources:
    """Compile every source; CheckError with the compiler's words on any warning."""
    found: Resources = {}
    for source in sorted((ROOT / "native" / "cuda").glob("*.cu")):
        with tempfile.TemporaryDirectory() as folder:
            command = compile_command(nvcc, cublas, upstream, source, Path(folder) / "kernel.o")
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        if done.returncode:
            raise CheckError(f"{source.relative_to(ROOT)} does not compile:\n{done.stdout}")
        found |= parse(done.stdout)
    expected = set(ARCHITECTURES)
    if not found or any(set(of) != expected for of in found.values()):
        raise CheckError("ptxas did not report every kernel for every architecture")
    return found


def table(found: Resources) -> str:
    """One line per kernel; registers and shared memory per architecture."""
    width = max(len(name) for name in found)
    head = "".join(f"{'sm_' + arch:>16}" for arch in ARCHITECTURES)
    lines = [f"{'registers / bytes shared / spilled':<{width}}{head}"]
    for name, of in found.items():
        cells = (
            f"{c['registers']} / {c['shared']} / {c['spill_stores'] + c['spill_loads']}"
            for c in of.values()
        )
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def drift(found: Resources, recorded: Resources) -> list[str]:
    """Where a kernel needs more than recorded, or is not in the record."""
    problems = [f"{name}: not recorded" for name in found if name not in recorded]
    problems += [f"{name}: recorded, but gone" for name in recorded if name not in found]
    for name in found.keys() & recorded.keys():
        for arch, counts in found[name].items():
            before = recorded[name].get(arch, {})
            problems += [
                f"{name}, sm_{arch}: {counts[key]} {key.replace('_', ' ')}, {before[key]} recorded"
                for key in LIMITED
                if key in before and counts[key] > before[key]
            ]
            if not before:
                problems.append(f"{name}, sm_{arch}: not recorded")
    return sorted(problems)


def read_record(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        raise CheckError(f"cannot read {path.name}: {exc}; --write makes it") from exc


def check(upstream: Path, write: bool) -> str:
    """Compile, compare or record; return what to print."""
    nvcc = find_nvcc()
    if not (upstream / "ggml" / "src" / "ggml-cuda").is_dir():
        raise CheckError(f"{upstream} has no ggml/src/ggml-cuda: make setup, or --llama-cpp DIR")
    compiler = release(nvcc)
    found = compile_all(nvcc, cublas_headers(nvcc), upstream)
    pin = Pin.read(ROOT / "native" / "pin.json")
    text = f"nvcc {compiler}, llama.cpp {pin.llama_cpp_commit}\n{table(found)}"
    if write:
        record = {
            "nvcc": compiler,
            "llama_cpp_commit": pin.llama_cpp_commit,
            "flags": FLAGS,
            "kernels": found,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return text
    recorded = read_record(RECORD)
    if recorded["nvcc"] != compiler:
        return f"{text}\nnot compared: the record is of nvcc {recorded['nvcc']}"
    problems = drift(found, recorded["kernels"])
    if problems:
        raise CheckError("\n".join([f"{text}\nmore than recorded in {RECORD.name}:", *problems]))
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, default=ROOT / "build" / "llama.cpp")
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("--program", type=Path, help="build the program for a GPU")
    parser.add_argument("--arch", default="90", help="its compute capability, such as 86")
    parser.add_argument("--library", type=Path, default=ROOT / "build" / "bin")
    args = parser.parse_args(argv)
    try:
        if args.program:
            build_program(args.llama_cpp.resolve(), args.library, args.arch, args.program)
            return 0
        sys.stdout.write(f"{check(args.llama_cpp.resolve(), args.write)}\n")
    except CannotCheckError as exc:
        sys.stdout.write(f"check_cuda: skipped: {exc}\n")
    except CheckError as exc:
        sys.stderr.write(f"check_cuda: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
