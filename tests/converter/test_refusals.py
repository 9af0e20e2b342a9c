"""Each refusal: exit code 1, at most three lines that name what and why, nothing left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Change = Callable[[Any], None]


def config_edit(path: str, value: Any) -> Change:
    """Set a config key by its dotted path; None deletes it."""

    def change(draft: Any) -> None:
        *parents, last = path.split(".")
        node = draft.config
        for parent in parents:
            node = node[parent]
        if value is None:
            del node[last]
        else:
            node[last] = value

    return change


def reshape(name: str, shape: tuple[int, ...]) -> Change:
    def change(draft: Any) -> None:
        draft.tensors[name] = ("F32", np.ones(shape, np.float32))

    return change


def spoil(name: str, value: float, at: tuple[int, ...], dtype: str = "F32") -> Change:
    def change(draft: Any) -> None:
        _, words = draft.tensors[name]
        values = np.full(words.shape, 0.5, np.float32)
        values[at] = value
        if dtype == "BF16":
            stored = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            stored = values.astype(dtype.lower().replace("f", "float"))
        draft.tensors[name] = (dtype, stored)

    return change


def drop(name: str) -> Change:
    return lambda draft: draft.tensors.pop(name)


def add(name: str, shape: tuple[int, ...]) -> Change:
    return reshape(name, shape)


def not_ready(draft: Any) -> None:
    draft.tensors["transfer_ready"] = ("BOOL", np.array(False))


def zero_codes(draft: Any) -> None:
    dtype, words = draft.tensors["transfer_codes"]
    draft.tensors["transfer_codes"] = (dtype, np.zeros_like(words))


def small_window(draft: Any) -> None:
    draft.config |= {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 4,
        "use_sliding_window": True,
    }


def rope(**keys: Any) -> Change:
    return config_edit("rope_parameters", {"rope_theta": 10000.0, **keys})


GATE = "injection.message.weight"
CASES: dict[str, tuple[Change, str]] = {
    "missing tensor": (
        drop("layers.1.mlp.up_proj.weight"),
        "missing tensors: layers.1.mlp.up_proj",
    ),
    "missing bias": (drop("injection.bias"), "missing tensors: injection.bias"),
    "extra tensor": (add("confidence_head.proj.weight", (1, 32)), "extra tensors"),
    "extra layer": (add("layers.2.self_attn.q_proj.weight", (32, 32)), "extra tensors"),
    "duplicate by prefix": (add("model.norm.weight", (32,)), "duplicate tensor"),
    "duplicate by alias": (add("code_bridge.bias", (12,)), "duplicate tensor"),
    "misshapen": (reshape("norm.weight", (31,)), "has shape [31], expected [32]"),
    "misshapen embeddings": (add("embed_tokens.weight", (95, 32)), "expected [96, 32]"),
    "fc width": (reshape("fc.weight", (32, 64)), "taps x hidden size = 3 x 32 = 96"),
    "rank unlike config": (config_edit("dspine_config.transfer_rank", 16), "expected"),
    "message unlike config": (config_edit("dspine_config.message_size", 16), "expected [32, 16]"),
    "dtype": (
        lambda d: d.tensors.update({"norm.weight": ("F64", np.ones(32))}),
        "is F64, supported: BF16, F16, F32",
    ),
    "NaN": (spoil("fc.weight", float("nan"), (3, 5)), "'fc.weight' holds NaN at [3, 5]"),
    "NaN in BF16": (spoil(GATE, float("nan"), (2, 1), "BF16"), f"'{GATE}' holds NaN at [2, 1]"),
    "Inf in F16": (spoil(GATE, float("inf"), (0, 7), "F16"), f"'{GATE}' holds Inf at [0, 7]"),
    "-Inf in a norm": (spoil("norm.weight", -float("inf"), (9,)), "holds Inf at [9]"),
    "untrained": (not_ready, "transfer_ready is false"),
    "codes missing": (drop("transfer_codes"), "transfer_codes are missing"),
    "codes all zero": (zero_codes, "transfer_codes are all zero"),
    "mask id": (config_edit("dflash_config.mask_token_id", 96), "outside the vocabulary of 96"),
    "mask id missing": (config_edit("dflash_config.mask_token_id", None), "is missing"),
    "layer id outside": (config_edit("dflash_config.target_layer_ids", [0, 2, 6]), "6 is outside"),
    "last layer": (config_edit("dflash_config.target_layer_ids", [0, 2, 5]), "last layer 5"),
    "layer id repeated": (config_edit("dflash_config.target_layer_ids", [0, 2, 2]), "repeated"),
    "layer ids empty": (config_edit("dflash_config.target_layer_ids", []), "missing or empty"),
    "layer id negative": (config_edit("dflash_config.target_layer_ids", [-1, 0, 1]), "holds -1"),
    "architecture": (
        config_edit("architectures", ["DFlash2DraftModel"]),
        "supported: ['DSpineDraftModel']",
    ),
    "architecture missing": (config_edit("architectures", None), "architectures is missing"),
    "model type": (config_edit("model_type", "gemma4"), "model_type is 'gemma4'"),
    "activation": (config_edit("hidden_act", "gelu"), "hidden_act is 'gelu', supported: silu"),
    "attention bias": (config_edit("attention_bias", True), "attention_bias is True"),
    "rope type": (rope(rope_type="longrope", factor=2.0), "rope_type is 'longrope', supported:"),
    "rope theta missing": (config_edit("rope_parameters", {"rope_type": "default"}), "rope_theta"),
    "yarn magnitude": (
        rope(rope_type="yarn", factor=4.0, attention_factor=2.0),
        "attention_factor",
    ),
    "rope factor without type": (rope(factor=4.0), "rope_parameters.factor is set without"),
    "eps tiny": (config_edit("rms_norm_eps", 1e-60), "rms_norm_eps is 1e-60, expected"),
    "eps large": (config_edit("rms_norm_eps", 0.5), "rms_norm_eps is 0.5, expected"),
    "windows disagree": (
        config_edit("dflash_config.use_swa", True),
        "use_sliding_window is False but dflash_config.use_swa is True",
    ),
    "settings no object": (config_edit("dspine_config", [1]), "expected an object"),
    "partial rotary": (config_edit("partial_rotary_factor", 0.25), "partial_rotary_factor is 0.25"),
    "softcap": (config_edit("final_logit_softcapping", 30.0), "final_logit_softcapping is 30.0"),
    "other family": (config_edit("dflash_config.selector_rank", 8), "another drafter family"),
    "hidden size for top_k": (config_edit("dspine_config.top_k", 6), "K·(K+1) = 42"),
    "top_k missing": (config_edit("dspine_config.top_k", None), "dspine_config.top_k is missing"),
    "vocabulary too large": (config_edit("vocab_size", (1 << 24) + 1), "expected 1 to 16777216"),
    "block of one": (config_edit("block_size", 1), "block_size is 1, expected 2 to"),
    "block missing": (config_edit("block_size", None), "block_size is missing"),
    "block contradicts": (config_edit("dflash_config.block_size", 4), "is 4 but block_size is 8"),
    "window under the block": (small_window, "smaller than the block of 8"),
    "layer kinds": (config_edit("layer_types", ["full_attention", "linear"]), "holds 'linear'"),
    "layer kinds count": (config_edit("layer_types", ["full_attention"]), "layer_types is not"),
    "head counts": (config_edit("num_key_value_heads", 3), "not a multiple of 3"),
    "text for a number": (config_edit("hidden_size", "32"), "expected an integer"),
    "true for a number": (config_edit("hidden_size", True), "expected an integer"),
    "target layers": (config_edit("num_target_layers", 8), "the target has 6 layers"),
    "key missing": (config_edit("intermediate_size", None), "intermediate_size is missing"),
}


def check_refused(result: Any, message: str, out: Any = None) -> None:
    assert result.code == 1, (result.code, result.err)
    assert result.out == ""
    assert message in result.err
    text = result.err[result.err.index("dspine-convert: ") :]
    assert text.count("\n") <= 3
    assert "Traceback" not in result.err
    if out is not None:
        assert not out.exists()


@pytest.mark.parametrize("case", CASES)
def test_refusal(draft, target, cli, tmp_path, case):
    change, message = CASES[case]
    change(draft)
    out = tmp_path / "new" / "out"
    result = cli(draft.write(), "--target", target, "-o", out)
    check_refused(result, message, out)
    assert not out.parent.exists()


def test_untouched_checkpoint_passes(draft, target, cli, tmp_path):
    """The cases above fail for their change alone."""
    assert cli(draft.write(), "--target", target, "-o", tmp_path / "o").code == 0


def test_window_under_the_block_with_is_causal(draft, target, cli, tmp_path):
    small_window(draft)
    draft.config["is_causal"] = True
    assert cli(draft.write(), "--target", target, "-o", tmp_path / "o").code == 0


def test_last_layer_where_it_is_published(draft, kit, cli, tmp_path):
    draft.config["dflash_config"]["target_layer_ids"] = [0, 2, 5]
    target = kit.new_target(tmp_path / "n.gguf", arch="nemotron_h")
    assert cli(draft.write(), "--target", target, "-o", tmp_path / "o").code == 0


def test_too_large_for_a_quantised_type(draft, target, cli, tmp_path):
    spoil("layers.0.mlp.up_proj.weight", 1e6, (1, 1))(draft)
    directory = draft.write()
    assert cli(directory, "--target", target, "-t", "bf16", "-o", tmp_path / "o").code == 0
    spoil("layers.0.mlp.up_proj.weight", 3.4e38, (1, 1))(draft)
    draft.write()
    result = cli(directory, "--target", target, "-t", "bf16", "-o", tmp_path / "p")
    check_refused(result, "too large for BF16")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden", 64, "hidden_size is 32, the target's is 64"),
        ("vocab", 100, "vocab_size is 96, the target has 100 tokens"),
    ],
)
def test_wrong_partner(draft, kit, cli, tmp_path, field, value, message):
    shape = kit.Shape(**{field: value})
    target = kit.new_target(tmp_path / "other.gguf", shape)
    check_refused(cli(draft.write(), "--target", target, "-o", tmp_path / "o"), message)


def test_no_weights(draft, target, cli, tmp_path):
    draft.directory.mkdir()
    draft.write_config()
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "no weights (no *.safetensors file)", tmp_path / "o")


def test_empty_weights(draft, target, cli, tmp_path):
    draft.tensors.clear()
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    check_refused(result, "no weights (the files hold no tensor)")


def test_no_config(draft, target, cli, tmp_path):
    (draft.write() / "config.json").unlink()
    check_refused(cli(draft.directory, "--target", target, "-o", tmp_path / "o"), "no config.json")


def test_config_elsewhere(draft, target, cli, tmp_path):
    (draft.write() / "config.json").rename(tmp_path / "settings.json")
    args = ("--target", target, "-o", tmp_path / "o", "--config", tmp_path / "settings.json")
    assert cli(draft.directory, *args).code == 0


def test_absent_shard_of_the_index(draft, target, cli, tmp_path):
    draft.write_shards(3, index=True)
    (draft.directory / "model-00002-of-00003.safetensors").unlink()
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "names the shard 'model-00002-of-00003.safetensors', which is absent")


def test_absent_shard_without_index(draft, target, cli, tmp_path):
    draft.write_shards(3, index=False)
    (draft.directory / "model-00003-of-00003.safetensors").unlink()
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "model-00003-of-00003.safetensors is absent (1 of 3 missing)")


def test_index_that_disagrees(draft, target, cli, tmp_path):
    draft.write_shards(2, index=True)
    index = draft.directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["norm.weight"]
    index.write_text(json.dumps(content))
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "index.json lacks: norm.weight")
    content["weight_map"] |= {"norm.weight": "../outside.safetensors"}
    index.write_text(json.dumps(content))
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "not a plain file name")


def test_duplicate_across_shards(draft, target, cli, tmp_path, kit):
    draft.write()
    tensors = {"norm.weight": draft.tensors["norm.weight"]}
    kit.write_safetensors(draft.directory / "more.safetensors", tensors)
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "'norm.weight' stands in model.safetensors and in more.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_broken_symlink(draft, target, cli, tmp_path, name):
    path = draft.write() / name
    path.unlink()
    path.symlink_to("../blobs/gone")
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "broken symbolic link to ../blobs/gone")


def test_source_and_target_absent(draft, target, cli, tmp_path):
    result = cli("./nothing/here/x", "--target", target, "-o", tmp_path / "o")
    check_refused(result, "no such file or directory, and not a hub repository id")
    result = cli(draft.write(), "--target", tmp_path / "no.gguf", "-o", tmp_path / "o")
    check_refused(result, "no such GGUF file or directory")


def test_unreadable_file(draft, target, cli, tmp_path):
    path = draft.write() / "model.safetensors"
    path.unlink()
    os.mkfifo(path)  # a careless open would wait here for ever
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "not a regular file")
    path.unlink()
    path.mkdir()
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    check_refused(result, "not a regular file")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_codes_are_of_unit_length(draft, target, cli, tmp_path, monkeypatch, dtype, kit):
    """The first bad row is named, however the work was cut and whatever was done first."""
    monkeypatch.setattr("dspine_convert.stream.CHUNK_ELEMENTS", 16)
    draft = kit.new_draft(tmp_path / "d", dtype=dtype)
    whole = kit.weights("transfer_codes", (96, 8))

    def store(values: np.ndarray) -> None:
        values = values.astype(np.float32)
        words = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else values
        draft.tensors["transfer_codes"] = (dtype, words)

    args = ("--target", target, "-o", tmp_path / "o", "--force")
    for scale, row, found in ((0.5, 41, "0.4"), (3.0, 0, ""), (0.0, 95, "0,"), (1.05, 7, "1.0")):
        values = whole.copy()
        values[row] *= scale
        values[95] *= scale
        store(values)
        result = cli(draft.write(), *args)
        assert result.code == 1
        assert f"transfer_codes: row {row} has length {found}" in result.err
        assert not (tmp_path / "o").exists()
    store(whole * np.float32(1.01))  # rounding makes such differences
    assert cli(draft.write(), *args).code == 0


def test_nested_config_that_disagrees(draft, target, cli, tmp_path):
    inner = dict(draft.config)
    for outer in ({"hidden_size": 64}, {"block_size": 16}):
        draft.config = {"config": inner, **outer}
        result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
        (key,) = outer
        check_refused(result, f"config.{key} is ", tmp_path / "o")
        assert f"but {key} beside it is {outer[key]}" in result.err
