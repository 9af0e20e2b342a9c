"""bench/gpu.sh: which Python it takes, and which folders it packs into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MINE = f"{sys.version_info.major}.{sys.version_info.minor}"


def gpu(verb: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(ROOT / "bench" / "gpu.sh"), verb, str(folder)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return subprocess.run(
        words, env={**clean, **env}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack for a Python that does not exist, whose archive is none: nothing runs from it."""
    (tmp_path / "packed.tar.xz").touch()
    (tmp_path / "packed-for").write_text("3.99\n")
    return tmp_path


def test_the_python_it_needs_is_named_first(pack: Path) -> None:
    for env in ({}, {"PYTHON": sys.executable}):
        done = gpu("run", pack, **env)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"gpu.sh: {pack} is packed for Python 3.99, ")
        assert line.endswith(": name one with PYTHON=/path/to/python3.99")
    assert f"{sys.executable} is {MINE}" in line


def test_a_python_of_the_packed_version_is_taken(pack: Path) -> None:
    """It comes as far as the archive."""
    (pack / "packed-for").write_text(f"{MINE}\n")
    assert "packed.tar.xz cannot be unpacked" in gpu("run", pack, PYTHON=sys.executable).stderr


@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "python").exists(), reason="no .venv")
def test_a_dry_run_without_it_takes_the_checkouts_own(pack: Path) -> None:
    done = gpu("dry", pack)
    assert ".venv and its packages, not the carried ones" in done.stdout
    assert "packed.tar.xz cannot be unpacked" in done.stderr


def test_packing_leaves_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "bin").mkdir()
    done = gpu("pack", tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} is not empty and holds no earlier pack" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "mine.txt"]
