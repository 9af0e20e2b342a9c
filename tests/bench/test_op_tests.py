"""What bench/gpu.sh records of a run of test-ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspine_bench.op_tests import KEPT_LINES, main

CPU = "CPU: 60 of 60 cases equal, 0 not supported\n"
CUDA = "CUDA0: 58 of 60 cases equal, 2 not supported\n"


def test_runs_are_added_one_by_one(tmp_path: Path) -> None:
    out, log = tmp_path / "ops.json", tmp_path / "log"
    log.write_text("line\n" * 100 + CPU + CUDA)
    assert main([str(out), "plain", "0", "7", str(log), "/some/where/test-ops"]) == 0
    assert main([str(out), "memcheck", "9", "50", str(log), "tool", "a/test-ops", "6"]) == 0
    first, second = json.loads(out.read_text())["runs"]
    assert first["devices"]["CUDA0"] == {"equal": 58, "cases": 60, "unsupported": 2}
    assert first["devices"]["CPU"]["equal"] == 60
    assert first["command"] == ["test-ops"] and first["exit_code"] == 0 and first["seconds"] == 7
    assert second["command"] == ["tool", "test-ops", "6"] and second["exit_code"] == 9
    assert len(first["output"]) == KEPT_LINES and first["output"][-1] == CUDA.strip()


def test_a_gpu_that_computes_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text(CPU + "CUDA0: 0 of 60 cases equal, 60 not supported\n")
    assert main([str(tmp_path / "a.json"), "plain", "0", "7", str(log), "test-ops"]) == 1
    assert "plain: no device but the CPU" in capsys.readouterr().err
    log.write_text("== 1 failed, 40 passed, 2 warnings in 5.10s ==\n")
    assert main([str(tmp_path / "c.json"), "kernels", "1", "7", str(log), "python"]) == 0
    assert json.loads((tmp_path / "c.json").read_text())["runs"][0]["tests_passed"] == 40
    log.write_text(CPU)
    assert main([str(tmp_path / "b.json"), "plain-cpu", "0", "7", str(log), "test-ops"]) == 0
