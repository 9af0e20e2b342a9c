"""bench/gpu.sh: which Python it takes, and which folders it packs into."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A pack whose programs are stand-ins, for a Python that starts nothing: every part fails."""
    folder = tmp_path / "pack"
    (folder / "bin").mkdir(parents=True)
    programs = {
        folder / "bin" / "llama-server": "echo none",
        folder / "bin" / "test-ops": "exit 1",
        tmp_path / "python": f'[ "$1" = -c ] && echo {MINE}',
    }
    for path, body in programs.items():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    with tarfile.open(folder / "packed.tar.xz", "w:xz") as packed:
        packed.add(folder / "bin", "bin")
    (folder / "packed-for").write_text(f"{MINE}\n")
    return folder


def test_an_earlier_runs_results_do_not_pass_for_this_ones(stand_ins: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = ("ops", "tasks", "draft-small", "draft-small-composed", "draft-mid")
    env = {"OUT": str(out), "PYTHON": str(tmp_path / "python")}
    for verb, left in (("dry", {"draft-mid"}), ("run", set[str]())):
        for name in names:
            (out / f"{name}.json").touch()
        done = gpu(verb, stand_ins, **env, SHAPES="small mid")
        assert done.returncode == 1
        assert {path.stem for path in out.glob("*.json")} == left, verb


def test_packing_leaves_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "bin").mkdir()
    done = gpu("pack", tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} is not empty and holds no earlier pack" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "mine.txt"]
