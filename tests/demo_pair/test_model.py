"""The trainer's drafter equals the public reference on its recorded vectors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
safetensors = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair.model import Drafter, RMSNorm, Shape  # noqa: E402

# Float32 on both sides, differing only in the order of sums.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def golden_drafter(folder: Path) -> Drafter:
    """A recorded drafter, whose config has the reference's spelling."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        target_layers=config["num_target_layers"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        block=config["block_size"],
        top_k=config["dspine_config"]["top_k"],
        rank=config["dspine_config"]["transfer_rank"],
        message=config["dspine_config"]["message_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        eps=config["rms_norm_eps"],
    )
    tensors = safetensors.load_file(folder / "model.safetensors")
    tensors.pop("transfer_ready")
    drafter = Drafter(shape)
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})
    return drafter.eval()


@pytest.fixture(scope="module", params=["full_attn", "b16_k16"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Inputs, expected tensors and what our drafter computes from the inputs."""
    folder = GOLDEN / request.param
    facts = json.loads((folder / "case.json").read_text())
    expected = safetensors.load_file(folder / "expected.safetensors")
    target = safetensors.load_file(folder / "target.safetensors")
    drafter = golden_drafter(folder / "draft")
    embed = target["embed_tokens.weight"].float()
    ids = torch.full((1, 1, facts["block_rows"]), facts["mask_token_id"])
    ids[..., 0] = facts["anchor_token_id"]
    with torch.inference_mode():
        context = drafter.context(expected["target_hidden"].float()[None])
        where = torch.tensor([[facts["n_context"]]])
        block = drafter(embed[ids], where, ids[..., 0], context)
    head = target["lm_head.weight"].float()
    return {"drafter": drafter, "block": block, "expected": expected, "head": head, "facts": facts}


def test_last_layer_rows(case: dict[str, Any]) -> None:
    block, expected = case["block"], case["expected"]
    torch.testing.assert_close(block.last[0, 0], expected["pre_injection"][-1], **TOLERANCE)
    torch.testing.assert_close(block.out[0, 0], expected["post_injection"][-1], **TOLERANCE)


def test_layer_features(case: dict[str, Any]) -> None:
    ours = torch.stack([feature[0, 0] for feature in case["block"].features])
    torch.testing.assert_close(ours, case["expected"]["layer_features"], **TOLERANCE)


def test_walk(case: dict[str, Any]) -> None:
    """The refined walk drafts what the reference drafts."""
    drafter, block, head = case["drafter"], case["block"], case["head"]
    previous = torch.tensor([case["facts"]["anchor_token_id"]])
    drafted = []
    with torch.inference_mode():
        for row, candidates in enumerate(case["expected"]["candidates"].long()):
            refined = drafter.refine(block.last[:, 0, row + 1], previous)
            previous = candidates[(head[candidates] @ refined[0]).argmax()][None]
            drafted.append(int(previous))
    assert drafted == case["expected"]["drafted"].tolist()


def test_norm_and_its_gradient_are_torchs_own() -> None:
    torch.manual_seed(4)
    norm, x = RMSNorm(24, 1e-5), torch.randn(3, 5, 24, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    given = torch.randn(x.shape)
    theirs = torch.nn.functional.rms_norm(x, (24,), norm.weight, 1e-5)
    expected = torch.autograd.grad(theirs, [x, norm.weight], given)
    ours = norm(x)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad(ours, [x, norm.weight], given), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16
