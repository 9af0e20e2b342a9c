"""The checkpoints of tests/golden, exactly as published by the reference."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    "full_attn": "draft",
    "short_block": "draft",
    "sliding": "draft",
    "b16_k16": "draft",
    "e2e_qwen3": "draft",
    "e2e_hybrid": "draft",
    "e2e_hybrid/fit": "draft_fit",
}
RENAMED = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "transfer_codes": "transfer_codes.weight",
    "injection.message.weight": "inject_message.weight",
    "injection.bias": "inject_gate.bias",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "injection.readouts.0.weight": "blk.0.inject_readout.weight",
    "injection.writes.0.weight": "blk.0.inject_write.weight",
}


def source_values(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    out = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name == "__metadata__" or entry["dtype"] == "BOOL":
            continue
        begin, end = (8 + length + n for n in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            words = np.frombuffer(raw[begin:end], np.uint16).astype(np.uint32) << 16
            out[name] = words.view(np.float32).reshape(entry["shape"])
        else:
            out[name] = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"])
    return out


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoint(case, kit, cli, tmp_path):
    source = GOLDEN / case.split("/")[0] / CASES[case]
    weights = source / "model.safetensors"
    if not weights.is_file():  # some cases differ from full_attn in their config alone
        weights = GOLDEN / "full_attn" / "draft" / "model.safetensors"
    if not (source / "config.json").is_file() or not weights.is_file():
        pytest.skip(f"{source} holds no whole checkpoint")
    directory = tmp_path / "draft"
    directory.mkdir()
    (directory / "config.json").symlink_to(source / "config.json")
    (directory / "model.safetensors").symlink_to(weights)
    config = json.loads((source / "config.json").read_text())
    shape = kit.Shape(
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        target_layers=config["num_target_layers"],
    )
    target = kit.new_target(tmp_path / "t.gguf", shape)
    args = ("--target", target, "-t", "f32", "-o", tmp_path / "o", "--name", "golden", "--verify")
    result = cli(directory, *args)
    assert result.code == 0, result.err
    reader = gguf.GGUFReader(result.out.strip())
    found = {t.name: dequantize(t.data, t.tensor_type).reshape(-1) for t in reader.tensors}
    values = source_values(weights)
    assert len(found) == len(values)
    for name, gguf_name in RENAMED.items():
        np.testing.assert_array_equal(found[gguf_name], values[name].reshape(-1), err_msg=name)
    taps = config["dflash_config"]["target_layer_ids"]
    assert reader.get_field("dflash.target_layers").contents() == [k + 1 for k in taps]
    assert reader.get_field("dflash.block_size").contents() == config["block_size"]
    if config["use_sliding_window"]:
        window = reader.get_field("dflash.attention.sliding_window").contents()
        assert window == config["sliding_window"]
