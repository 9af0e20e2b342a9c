"""The numpy reference against the golden vectors: what judges must be judged first."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.checkpoint import read_safetensors
from support.golden import GOLDEN, UNIT_CASES, load_case
from support.reference import Reference

# The recordings are float32 with sums in another order; float64 differs from them by 1.3e-5.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", UNIT_CASES)
def test_reference_reproduces_a_unit_case(name: str) -> None:
    case = load_case(name)
    weights = read_safetensors(case.weights)
    reference = Reference(weights, case.config, case.embed, case.head)
    found = reference.draft(case.features, case.anchor, case.rows)
    for tensor in ("pre_injection", "post_injection", "final_hidden", "logits", "scores"):
        np.testing.assert_allclose(
            getattr(found, tensor), case.expected[tensor], rtol=0, atol=TOLERANCE, err_msg=tensor
        )
    assert found.candidates.tolist() == case.expected["candidates"].tolist()
    assert found.drafted.tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize(
    ("case", "draft", "record", "rounds"),
    [
        ("e2e_qwen3", "draft", "first_round", "rounds"),
        ("e2e_hybrid", "draft", "first_round", "rounds"),
        ("e2e_hybrid", "draft_fit", "first_round_fit", "rounds_fit"),
    ],
)
def test_reference_reproduces_first_rounds(case: str, draft: str, record: str, rounds: str) -> None:
    folder = GOLDEN / case
    target = read_safetensors(folder / "target" / "model.safetensors")
    embed = target["model.embed_tokens.weight"]
    reference = Reference(
        read_safetensors(folder / draft / "model.safetensors"),
        json.loads((folder / draft / "config.json").read_text()),
        embed,
        target.get("lm_head.weight", embed),
    )
    expected = read_safetensors(folder / f"{record}.safetensors")
    for i, prompt in enumerate(json.loads((folder / f"{rounds}.json").read_text())["prompts"]):
        if f"prompt{i}.scores" not in expected:
            continue
        found = reference.draft(expected[f"prompt{i}.target_hidden"], prompt["first_token"], rows=8)
        for tensor in ("final_hidden", "scores"):
            np.testing.assert_allclose(
                getattr(found, tensor), expected[f"prompt{i}.{tensor}"], rtol=0, atol=TOLERANCE
            )
        assert found.drafted.tolist() == expected[f"prompt{i}.drafted"].tolist()
        assert found.candidates.tolist() == expected[f"prompt{i}.candidates"].tolist()
