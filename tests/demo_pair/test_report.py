"""The demo pair's README has the figures of its results, and notices others."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from dspine_bench.errors import BenchError
from dspine_bench.figures import BEGIN, END, put

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair.report import LINES, render  # noqa: E402

FOLDER = ROOT / "bench" / "demo_pair"
MEASURED = [
    name
    for name in dict.fromkeys(name for names, _ in LINES for name in names)
    if (FOLDER / "results" / f"{name}.json").is_file()
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in MEASURED:
        shutil.copy(FOLDER / "results" / f"{name}.json", tmp_path)
    return tmp_path


def test_every_result_is_told(results: Path) -> None:
    whole = render(results)
    for name in MEASURED:
        kept = (results / f"{name}.json").read_bytes()
        (results / f"{name}.json").unlink()
        assert len(render(results)) < len(whole), name
        (results / f"{name}.json").write_bytes(kept)


def test_totals_are_added_then_divided(results: Path) -> None:
    path = results / "greedy_q8_0.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    (found,) = result["drafters"].values()
    found["code"] |= {"accepted": 30, "rounds": 10}
    found["json"] |= {"accepted": 0, "rounds": 20}
    found["all"]["diverged"] = [{"prompt": "Hello", "token": 7, "margin": 0.00123}]
    path.write_text(json.dumps(result), encoding="utf-8")
    text = render(results)
    assert "Code and JSON together: 2.00." in text and "| 79 of 80 |" in text
    assert "at token 7 of “Hello”, where its two likeliest tokens are 0.0012 apart" in text


def test_another_figure_is_noticed(results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n", encoding="utf-8")
    with pytest.raises(BenchError, match="differs from its results"):
        put(render(results), readme, check=True)
    put(render(results), readme, check=False)
    put(render(results), readme, check=True)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"a\n{BEGIN}\n") and text.endswith(f"{END}\nb\n") and "old" not in text
    edited = json.loads((results / "parts.json").read_text(encoding="utf-8"))
    edited["modes"]["full"]["all"]["mean_accepted_length"] += 1
    (results / "parts.json").write_text(json.dumps(edited), encoding="utf-8")
    with pytest.raises(BenchError, match="differs"):
        put(render(results), readme, check=True)
