"""`python -m dspine_bench.demo`: what `make demo` runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dspine_bench import demo
from dspine_bench.llama_server import Completion
from support.golden import GOLDEN
from support.native_build import directory

pytestmark = pytest.mark.e2e


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspine_bench.demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
        check=False,
    )


def test_demo(tmp_path: Path) -> None:
    done = _run(GOLDEN.parent, "-o", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    totals = json.loads((tmp_path / "demo.json").read_text())
    assert totals["equal"] and totals["tokens"] == 256
    assert totals["mean_accepted_length"] > 5.0
    for kind in ("BF16", "Q8_0", "F32"):
        name = f"e2e_qwen3-drafter-{kind}.gguf"
        assert (tmp_path / name).is_file() and name in done.stdout
    assert "mean accepted length 5.14" in done.stdout


def test_golden_models_missing(tmp_path: Path) -> None:
    done = _run(tmp_path, "--golden", "elsewhere")
    assert done.returncode == 1
    assert "elsewhere" in done.stderr and "--golden" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_outside_the_repository(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 1 and "run this inside the repository" in done.stderr


def test_different_answers_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(server: Path, target: Path, draft: Path | None, prompts: list, log: Path) -> list:
        log.write_text("")
        return [Completion([1, 2, 3 if draft else 4], "", 2, 1, 0, "limit") for _ in prompts]

    monkeypatch.setattr(demo, "serve", serve)
    monkeypatch.setenv("DSPINE_BIN_DIR", str(directory("bin")))
    assert demo.main(["--golden", str(GOLDEN), "-o", str(tmp_path)]) == 1
