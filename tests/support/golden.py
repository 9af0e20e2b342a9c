"""The golden cases under tests/golden, whose README states their conventions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.checkpoint import read_safetensors

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
UNIT_CASES = ("full_attn", "short_block", "sliding", "b16_k16")


@dataclass(frozen=True)
class Case:
    """A unit case: one block drafted from given features.

    `weights` is the drafter's safetensors file and `config` its own parsed config.json; some
    cases share weights and target with another one.
    """

    name: str
    facts: dict[str, Any]
    config: dict[str, Any]
    config_path: Path
    weights: Path
    embed: np.ndarray
    head: np.ndarray
    expected: dict[str, np.ndarray]

    @property
    def rows(self) -> int:
        """Rows of the block, the anchor included."""
        return int(self.facts["block_rows"])

    @property
    def anchor(self) -> int:
        """Id of the anchor; its position is the number of context rows."""
        return int(self.facts["anchor_token_id"])

    @property
    def features(self) -> np.ndarray:
        """[n_context, n_taps * hidden]."""
        return self.expected["target_hidden"]


def load_case(name: str) -> Case:
    """Read a unit case, following `weights_shared_with`."""
    folder = GOLDEN / name
    facts = json.loads((folder / "case.json").read_text())
    owner = GOLDEN / (facts["weights_shared_with"] or name)
    target = read_safetensors(owner / "target.safetensors")
    config_path = folder / "draft" / "config.json"
    return Case(
        name=name,
        facts=facts,
        config=json.loads(config_path.read_text()),
        config_path=config_path,
        weights=owner / "draft" / "model.safetensors",
        embed=target["embed_tokens.weight"],
        head=target["lm_head.weight"],
        expected=read_safetensors(folder / "expected.safetensors"),
    )


@dataclass(frozen=True)
class Run:
    """A recorded greedy run of one prompt."""

    prompt: list[int]
    plain: list[int]  # plain greedy decoding
    rounds: list[dict[str, Any]]  # anchor_position, anchor_token, drafted, accepted, emitted


@dataclass(frozen=True)
class Recorded:
    """A rounds*.json file."""

    runs: list[Run]
    mean_accepted_length: float
    block_size: int


def load_rounds(path: Path) -> Recorded:
    """Read a rounds*.json file."""
    content = json.loads(path.read_text())
    runs = [Run(p["prompt"], p["plain_greedy"], p["rounds"]) for p in content["prompts"]]
    return Recorded(runs, content["mean_accepted_length"], content["block_size"])
