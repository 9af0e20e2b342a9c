"""Prefixes, aliases, resolution by shape, and the explicit map."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest


def converted(result) -> dict[str, bytes]:
    assert result.code == 0, result.err
    reader = gguf.GGUFReader(Path(result.out.strip()))
    return {t.name: t.data.tobytes() for t in reader.tensors}


@pytest.fixture
def plain(draft, target, cli, tmp_path):
    """The tensors of the unchanged checkpoint."""
    return converted(cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "plain"))


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "draft_model.model."])
def test_prefixes(plain, draft, target, cli, tmp_path, prefix):
    draft.rename(lambda n: n if n == "transfer_ready" else prefix + n)
    found = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o")
    assert converted(found) == plain


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("injection.", "code_bridge."),
        ("transfer_codes", "transfer_codes.weight"),
        ("transfer_codes", "injection.transfer_codes"),
        ("injection.readouts.", "injection.readout."),
        ("injection.message.weight", "code_bridge.message"),
        ("injection.bias", "code_bridge.gate_bias"),
    ],
)
def test_aliases(plain, draft, target, cli, tmp_path, old, new):
    draft.rename(lambda n: n.replace(old, new))
    found = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o")
    assert converted(found) == plain


def test_unknown_names_by_shape_and_layer(plain, draft, target, cli, tmp_path):
    draft.rename(lambda n: n.replace("injection.readouts.", "strange.reader."))
    draft.rename(lambda n: n.replace("injection.writes.", "strange.writer."))
    found = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o")
    assert converted(found) == plain
    assert "strange.reader.1.weight taken as injection.readouts.1.weight" in found.err


def test_equal_shapes_are_never_guessed(draft, target, cli, tmp_path):
    draft.rename(
        lambda n: n.replace("receiver_gate", "gate_a").replace("predecessor_gate", "gate_b")
    )
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "cannot tell tensors of shape [12, 8] apart" in result.err
    for word in ("gate_a", "gate_b", "receiver_gate.weight", "--tensor-map"):
        assert word in result.err


def test_tensor_map(plain, draft, target, cli, tmp_path):
    draft.rename(
        lambda n: n.replace("receiver_gate", "gate_a").replace("predecessor_gate", "gate_b")
    )
    explicit = tmp_path / "map.json"
    explicit.write_text(
        json.dumps(
            {
                "injection.gate_a.weight": "injection.receiver_gate.weight",
                "injection.gate_b.weight": "injection.predecessor_gate.weight",
            }
        )
    )
    args = ("--target", target, "-t", "f32", "-o", tmp_path / "o", "--tensor-map", explicit)
    assert converted(cli(draft.write(), *args)) == plain


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"nothing": "fc.weight"}, "names tensors that are absent: nothing"),
        ({"fc.weight": "fc"}, "maps to unknown names: fc"),
        ({"norm.weight": "hidden_norm.weight"}, "duplicate tensor"),
        (["fc.weight"], "expected a JSON object"),
        ({"fc.weight": 3}, "expected a JSON object"),
    ],
)
def test_bad_tensor_map(draft, target, cli, tmp_path, content, message):
    (tmp_path / "map.json").write_text(json.dumps(content))
    args = ("--target", target, "-o", tmp_path / "o", "--tensor-map", tmp_path / "map.json")
    result = cli(draft.write(), *args)
    assert result.code == 1
    assert message in result.err


def test_dropped_with_a_reason(plain, draft, target, cli, tmp_path):
    table = np.zeros((draft.shape.vocab, draft.shape.hidden), np.float32)
    draft.tensors["model.embed_tokens.weight"] = ("F32", table)
    draft.tensors["lm_head.weight"] = ("F32", table)
    draft.tensors["rotary_emb.inv_freq"] = ("F32", np.ones(8, np.float32))
    result = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o")
    assert converted(result) == plain
    assert "dropped model.embed_tokens.weight: the target's token embeddings are used" in result.err
    assert "dropped lm_head.weight: the target's output head is used" in result.err


def test_sizes_from_shapes(plain, draft, target, cli, tmp_path):
    """Without transfer_rank and message_size in the config, the tensors say them."""
    del (
        draft.config["dspine_config"]["transfer_rank"],
        draft.config["dspine_config"]["message_size"],
    )
    result = cli(draft.write(), "--target", target, "-t", "f32", "-o", tmp_path / "o")
    assert converted(result) == plain
