"""Every Python example of README.md and bindings/README.md runs as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.workshop import Workshop

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    example
    for page in (ROOT / "README.md", ROOT / "bindings" / "README.md")
    for example in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, workshop: Workshop, tmp_path: Path) -> None:
    """In a directory that has the two files by the names of the README."""
    names = ("target.gguf", "drafter.gguf")
    for name, path in zip(names, workshop.e2e("e2e_qwen3", "f32"), strict=True):
        (tmp_path / name).symlink_to(path)
    if "llama_cpp" in EXAMPLES[number] and importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    # llama_cpp leaves files open, of which Python warns.
    warnings = "error::RuntimeWarning" if "llama_cpp" in EXAMPLES[number] else "error"
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", EXAMPLES[number]],
        cwd=tmp_path,
        # A small machine whose cores are taken waits long for its own threads.
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.strip()
