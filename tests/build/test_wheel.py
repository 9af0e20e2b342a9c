"""What the wheel holds, built as `make setup` does, from a finished tree with nothing in it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("converter/dspine_convert", "bindings/dspine", "bench/dspine_bench")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the wheel's files."""
    if shutil.which("cmake") is None or importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("the wheel is built with cmake and scikit-build-core")
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    (tree / "cmake_install.cmake").write_text("# a build that installs nothing\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
        env={**os.environ, "DSPINE_PREBUILT": str(tree), "TMPDIR": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(made).namelist())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_there(package: str, wheel: set[str]) -> None:
    folder = ROOT / package
    modules = {str(path.relative_to(folder.parent)) for path in folder.rglob("*.py")}
    assert modules and modules <= wheel


def test_the_prompts_are_there(wheel: set[str]) -> None:
    files = {f"dspine_bench/data/{p.name}" for p in (ROOT / "bench/dspine_bench/data").iterdir()}
    assert len(files) >= 4 and files <= wheel


def test_the_programs_have_names(wheel: set[str]) -> None:
    assert any(name.endswith("entry_points.txt") for name in wheel)
    assert not any(name.startswith(("tests/", "demo_pair/")) for name in wheel)
