"""native/cuda compiles without a warning, and its kernels need no more than is recorded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import check_cuda  # noqa: E402

UPSTREAM = ROOT / "build" / "llama.cpp"

LOG = """\
ptxas info    : 88 bytes gmem
ptxas info    : Compiling entry function '_Z5plainILb1EEvi' for 'sm_86'
ptxas info    : Function properties for _Z5plainILb1EEvi
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 256 bytes smem, 448 bytes cmem[0]
ptxas info    : Compile time = 70.926 ms
ptxas info    : Compiling entry function '_Z5plainILb1EEvi' for 'sm_120a'
ptxas info    : Function properties for _Z5plainILb1EEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""
COUNTS = {"registers": 40, "shared": 256, "stack": 16, "spill_stores": 4, "spill_loads": 8}


@pytest.mark.native
def test_compiles_without_a_warning_and_within_the_record() -> None:
    try:
        check_cuda.find_nvcc()
        print(check_cuda.check(UPSTREAM, write=False))  # noqa: T201
    except check_cuda.CannotCheckError as missing:
        pytest.skip(str(missing))


def test_a_warning_is_an_error(tmp_path: Path) -> None:
    try:
        nvcc = check_cuda.find_nvcc()
    except check_cuda.CannotCheckError as missing:
        pytest.skip(str(missing))
    source = tmp_path / "unused.cu"
    for text, word in (
        ("__global__ void kernel(int * out) { int unused; *out = 1; }", "unused"),
        ("static int never(int x) { return x; }", "never"),
    ):
        source.write_text(f"{text}\n")
        command = check_cuda.compile_command(nvcc, tmp_path, tmp_path, source, tmp_path / "x.o")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode and word in done.stdout + done.stderr


def test_counts_are_read_from_the_compiler() -> None:
    found = check_cuda.parse(LOG)
    assert found["plain<true>"]["86"] == COUNTS
    assert found["plain<true>"]["120"] == {**dict.fromkeys(COUNTS, 0), "registers": 32}


@pytest.mark.parametrize("more", ["registers", "stack", "spill_stores", "spill_loads"])
def test_more_than_recorded_is_an_error(more: str) -> None:
    recorded = {"kernel": {"86": COUNTS}}
    found = {"kernel": {"86": {**COUNTS, more: COUNTS[more] + 1}}}
    (problem,) = check_cuda.drift(found, recorded)
    assert problem.startswith("kernel, sm_86: ") and more.split("_")[-1] in problem
    assert not check_cuda.drift(recorded, recorded)
    assert not check_cuda.drift({"kernel": {"86": {**COUNTS, more: 0}}}, recorded)


def test_the_record_names_every_kernel() -> None:
    recorded = {"gone": {"86": COUNTS}}
    assert check_cuda.drift({"new": {"86": COUNTS}}, recorded) == [
        "gone: recorded, but gone",
        "new: not recorded",
    ]


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert check_cuda.main([]) == 0
    assert capsys.readouterr().out == "check_cuda: skipped: nvcc not found\n"


def test_headers_come_out_of_the_package(tmp_path: Path) -> None:
    wheel = tmp_path / "cublas.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia/cu13/include/cublas_v2.h", "// header")
        archive.writestr("nvidia/cu13/lib/libcublas.so.13", "library")
    check_cuda.unpack_headers(wheel, tmp_path / "include")
    assert [path.name for path in (tmp_path / "include").iterdir()] == ["cublas_v2.h"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia/cu13/include/other.h", "")
    with pytest.raises(check_cuda.CheckError, match=r"cublas\.whl has no cublas_v2\.h"):
        check_cuda.unpack_headers(wheel, tmp_path / "none")
