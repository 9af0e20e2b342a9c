"""Several sequences on a recurrent target, rolled back as a verification does: nothing leaks.

Runs on llama.h alone, through llama-cpp-python's declarations and our library, in a process of
its own: the declarations choose their library when they are imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.native_build import directory
from support.workshop import Workshop

pytestmark = pytest.mark.native
SCRIPT = Path(__file__).parents[1] / "support" / "recurrent_stress.py"


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_rollback_stays_in_its_sequence(seed: int, unified: bool, workshop: Workshop) -> None:
    target = workshop.e2e_target("e2e_hybrid")
    done = subprocess.run(
        [sys.executable, SCRIPT, target, str(seed), str(int(unified))],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(directory("lib"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
