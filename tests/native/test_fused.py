"""The fused operations: drafts equal the composed graph's, from fewer kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafters import RandomDrafter
from support.golden import UNIT_CASES, load_case
from support.native_build import directory
from support.workshop import Workshop

pytestmark = pytest.mark.native

TESTS = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # of the largest score: the two sum in another order

FIVE_LAYERS = RandomDrafter(hidden=320, vocab=160, target_layers=4, layers=5, block=16, top_k=16)


def _round(files: tuple[Path, Path], rows: int, blocks: int = 1, *, fused: bool) -> dict[str, Any]:
    """What support.one_round prints, in a process of its own."""
    env = {**os.environ, "DSPINE_FUSED": "1" if fused else "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "support.one_round", *map(str, files), str(rows), str(blocks)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _assert_equal(files: tuple[Path, Path], rows: int, blocks: int = 1) -> None:
    fused = _round(files, rows, blocks, fused=True)
    composed = _round(files, rows, blocks, fused=False)
    assert fused["operations"].get("DSPINE_GATE"), fused["operations"]
    assert fused["operations"].get("DSPINE_CACHE") == 1, fused["operations"]
    assert not any("DSPINE" in op for op in composed["operations"]), composed["operations"]
    for found, expected in zip(fused["blocks"], composed["blocks"], strict=True):
        assert found["ids"] == expected["ids"]
        assert found["drafted"] == expected["drafted"]
        scores = np.array(expected["scores"])
        np.testing.assert_allclose(
            found["scores"], scores, rtol=0, atol=TOLERANCE * np.abs(scores).max()
        )


def test_kernels_of_a_round(workshop: Workshop) -> None:
    """A draft of five layers launches at most 160 kernels; composed it is 235."""
    files = workshop.random(FIVE_LAYERS)
    fused = _round(files, 16, fused=True)["operations"]
    composed = _round(files, 16, fused=False)["operations"]
    total, before = sum(fused.values()), sum(composed.values())
    print(f"kernels of a round: {total} fused, {before} composed")  # noqa: T201
    assert fused["DSPINE_GATE"] == 5
    assert fused["DSPINE_CACHE"] == 1
    assert total <= 160, fused
    assert before > 200, composed


@pytest.mark.parametrize("fused", [True, False])
def test_results_lie_at_cache_lines(fused: bool, workshop: Workshop) -> None:
    """Off them products take a quarter more on AMX: no tensor of a few ids comes first."""
    made = dataclasses.replace(FIVE_LAYERS, hidden=1024, rank=256, message=128)
    assert _round(workshop.random(made), 16, fused=fused)["unaligned"] == 0


@pytest.mark.parametrize("name", UNIT_CASES)
def test_golden_case(name: str, workshop: Workshop) -> None:
    _assert_equal(workshop.unit(name, "f32"), load_case(name).rows)


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_quantized_golden_case(kind: str, workshop: Workshop) -> None:
    """The bridge in BF16: what goes into a product is rounded alike."""
    _assert_equal(workshop.unit("b16_k16", kind), 16, blocks=3)


@pytest.mark.parametrize(
    ("change", "rows", "blocks"),
    [
        ({"block": 2, "top_k": 1}, 2, 1),
        ({"block": 3, "top_k": 2}, 3, 4),
        ({"block": 16, "top_k": 16, "hidden": 320}, 16, 8),
        ({"rank": 37, "message": 23}, 8, 2),
        ({"block": 16}, 5, 3),
    ],
)
def test_random_drafter(change: dict[str, Any], rows: int, blocks: int, workshop: Workshop) -> None:
    small = RandomDrafter(hidden=96, vocab=128, target_layers=4)
    _assert_equal(workshop.random(dataclasses.replace(small, **change)), rows, blocks)


# -- the operations alone ---------------------------------------------------------------------


def _program() -> Path:
    """Built for ctest and not installed: it lies beside the tree's libraries."""
    places = (directory("bin"), TESTS.parent / "build" / "bin")
    found = [path / "test-ops" for path in places if (path / "test-ops").is_file()]
    if not found:
        pytest.skip(f"test-ops is in none of {', '.join(map(str, places))}")
    return found[0]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_program(), *arguments], capture_output=True, text=True, check=False)


@functools.cache
def _head_types() -> tuple[str, ...]:
    # these take seconds to prepare their grids, in every process; ctest runs them
    slow = ("iq1", "iq2", "iq3")
    return tuple(t for t in _run("--types").stdout.split() if not t.startswith(slow))


@st.composite
def _cases(draw: st.DrawFn) -> list[str]:
    head = draw(st.sampled_from(_head_types()))
    block = 256 if head.endswith("K") or head.startswith(("tq", "iq4_xs")) else 128
    top_k = draw(st.integers(1, 16))
    rows = draw(st.integers(2, 16))
    widths = st.integers(1, 200) | st.integers(1, 8).map(lambda n: 32 * n)
    case = {
        "head": head,
        "bridge": draw(st.sampled_from(["f32", "f16", "bf16"])),
        "hidden": block * (-(-top_k * (top_k + 1) // block) + draw(st.integers(0, 3))),
        "rank": draw(widths),
        "message": draw(widths),
        "top_k": top_k,
        "rows": rows,
        "scored": draw(st.integers(1, rows)),
        "blocks": draw(st.integers(1, 8)),
        "vocab": draw(st.integers(16, 120)),
        "strided": draw(st.integers(0, 1)),
        "seed": draw(st.integers(1, 2**30)),
    }
    return [f"{key}={value}" for key, value in case.items()]


@settings(max_examples=40)
@given(case=_cases())
def test_random_operation(case: list[str]) -> None:
    done = _run("--case", *case)
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_named() -> None:
    done = _run("--case", "width=3")
    assert done.returncode == 2
    assert "width=3" in done.stderr
