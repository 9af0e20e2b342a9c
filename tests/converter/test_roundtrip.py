"""Convert, read back with the gguf package, compare names, shapes, types and values."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine_convert.plan import use_more_bits
from gguf.quants import dequantize

T = gguf.GGMLQuantizationType
GLOBAL = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "transfer_codes": "transfer_codes.weight",
    "injection.message.weight": "inject_message.weight",
    "injection.receiver_gate.weight": "inject_gate_receiver.weight",
    "injection.predecessor_gate.weight": "inject_gate_predecessor.weight",
    "injection.bias": "inject_gate.bias",
}
LAYER = {
    "layers.{n}.input_layernorm.weight": "attn_norm",
    "layers.{n}.post_attention_layernorm.weight": "ffn_norm",
    "layers.{n}.self_attn.q_proj.weight": "attn_q",
    "layers.{n}.self_attn.k_proj.weight": "attn_k",
    "layers.{n}.self_attn.v_proj.weight": "attn_v",
    "layers.{n}.self_attn.o_proj.weight": "attn_output",
    "layers.{n}.self_attn.q_norm.weight": "attn_q_norm",
    "layers.{n}.self_attn.k_norm.weight": "attn_k_norm",
    "layers.{n}.mlp.gate_proj.weight": "ffn_gate",
    "layers.{n}.mlp.up_proj.weight": "ffn_up",
    "layers.{n}.mlp.down_proj.weight": "ffn_down",
    "injection.readouts.{n}.weight": "inject_readout",
    "injection.writes.{n}.weight": "inject_write",
}


def expected_names(layers: int) -> dict[str, str]:
    out = dict(GLOBAL)
    for n in range(layers):
        out |= {s.format(n=n): f"blk.{n}.{g}.weight" for s, g in LAYER.items()}
    return out


def read(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def by_name(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in read(path).tensors}


def values_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)


def check_exact(path: Path, kit, shape, source_dtype: str) -> None:
    tensors = by_name(path)
    names = expected_names(shape.layers)
    assert set(tensors) == set(names.values())
    for source, expected in kit.tensor_shapes(shape).items():
        tensor = tensors[names[source]]
        assert tuple(reversed(tensor.shape.tolist())) == expected, source
        np.testing.assert_array_equal(values_of(tensor), kit.weights(source, expected))


@pytest.mark.parametrize("source", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_values_are_exact(tmp_path, kit, cli, target, source, kind):
    draft = kit.new_draft(tmp_path / "d", dtype=source)
    if source == "F16":  # keep what F16 can hold
        draft.tensors = {
            n: (d, (np.round(w.astype(np.float32) * 64) / 64).astype(w.dtype) if d == "F16" else w)
            for n, (d, w) in draft.tensors.items()
        }
    result = cli(draft.write(), "--target", target, "-t", kind, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    path = Path(result.out.strip())
    assert path.name == f"d-{kind.upper()}.gguf"
    if source != "F16":
        check_exact(path, kit, draft.shape, source)
        return
    tensors = by_name(path)
    for name, gguf_name in expected_names(draft.shape.layers).items():
        words = draft.tensors[name][1].astype(np.float32)
        np.testing.assert_array_equal(values_of(tensors[gguf_name]), words)


def test_file_types_and_the_bridge(wide_draft, wide_target, cli, tmp_path, native_library, kit):
    kinds = ["f32", "bf16", "q8_0", "q4_k_m"]
    types = [a for k in kinds for a in ("-t", k)]
    result = cli(wide_draft.write(), "--target", wide_target, *types, "-o", tmp_path / "o", "-q")
    assert result.code == 0, result.err
    paths = [Path(line) for line in result.out.split()]
    weight = {"f32": T.F32, "bf16": T.BF16, "q8_0": T.Q8_0, "q4_k_m": T.Q4_K}
    number = {"f32": 0, "bf16": 32, "q8_0": 7, "q4_k_m": 15}
    for kind, path in zip(kinds, paths, strict=True):
        reader = read(path)
        assert reader.get_field("general.file_type").contents() == number[kind]
        for tensor in reader.tensors:
            bridge = T.F32 if kind == "f32" else T.BF16
            if len(tensor.shape) == 1:
                expected = T.F32
            elif "inject_" in tensor.name:
                expected = bridge
            elif kind == "q4_k_m" and tensor.name in (
                "blk.2.attn_v.weight",  # layer 2 of 3: the last eighth and every third
                "blk.2.ffn_down.weight",
            ):
                expected = T.Q6_K
            else:
                expected = weight[kind]
            assert tensor.tensor_type == expected, tensor.name


def test_matches_llama_quantize(wide_draft, wide_target, cli, tmp_path, llama_quantize):
    """Our quantised bytes are those that llama-quantize makes of our BF16 file."""
    types = ("-t", "bf16", "-t", "q8_0", "-t", "q4_k_m")
    result = cli(wide_draft.write(), "--target", wide_target, *types, "-o", tmp_path, "-q")
    base, *ours = [Path(line) for line in result.out.split()]
    for path, name in zip(ours, ("Q8_0", "Q4_K_M"), strict=True):
        theirs = tmp_path / f"theirs-{name}.gguf"
        command = [llama_quantize, base, theirs, name, "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        upstream = by_name(theirs)
        if any(t.tensor_type != T.BF16 for n, t in upstream.items() if "inject_readout" in n):
            pytest.skip(f"{llama_quantize} lacks the hook that leaves inject_* alone")
        for tensor_name, tensor in by_name(path).items():
            assert tensor.tensor_type == upstream[tensor_name].tensor_type, tensor_name
            assert tensor.data.tobytes() == upstream[tensor_name].data.tobytes(), tensor_name


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (1, {0}),
        (2, {1}),
        (3, {2}),
        (5, {2, 4}),
        (8, {0, 3, 6, 7}),
        (16, {0, 1, 4, 7, 10, 13, 14, 15}),
    ],
)
def test_layers_with_more_bits(layers, more):
    """Worked out by hand from llama-quantize's rule."""
    assert {n for n in range(layers) if use_more_bits(n, layers)} == more


def test_narrow_rows_fall_back_as_llama_quantize_does(draft, target, cli, tmp_path, native_library):
    result = cli(draft.write(), "--target", target, "-t", "q4_k_m", "-o", tmp_path / "o")
    assert result.code == 0, result.err
    tensors = by_name(Path(result.out.strip()))
    assert tensors["fc.weight"].tensor_type == T.Q5_0  # 96 wide: no 256, but 32
    assert tensors["transfer_codes.weight"].tensor_type == T.F16  # 8 wide
    assert tensors["blk.0.attn_v.weight"].tensor_type == T.Q5_0
    assert tensors["blk.1.attn_v.weight"].tensor_type == T.Q8_0  # Q6_K by layer, then Q8_0
    assert "note: q4_k_m: transfer_codes.weight is 8 wide, stored as F16" in result.err


def test_metadata(draft, target, cli, tmp_path):
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    fields = {n: f.contents() for n, f in read(Path(result.out.strip())).fields.items()}
    expected = {
        "general.architecture": "dflash",
        "general.name": "tiny-dspine",
        "general.quantization_version": 2,
        "dflash.block_count": 2,
        "dflash.context_length": 4096,
        "dflash.embedding_length": 32,
        "dflash.feed_forward_length": 48,
        "dflash.attention.head_count": 2,
        "dflash.attention.head_count_kv": 1,
        "dflash.attention.key_length": 16,
        "dflash.attention.value_length": 16,
        "dflash.attention.causal": True,
        "dflash.vocab_size": 96,
        "dflash.rope.freq_base": 1000000.0,
        "dflash.rope.dimension_count": 16,
        "dflash.block_size": 8,
        "dflash.selector_top_k": 4,
        "dflash.transfer_rank": 8,
        "dflash.message_size": 12,
        "dspine.target.architecture": "qwen3",
        "dspine.target.name": "Tiny Target",
        "dspine.target.embedding_length": 32,
        "dspine.target.block_count": 6,
        "dspine.target.vocab_size": 96,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.mask_token_id": 95,
    }
    assert {k: fields.get(k) for k in expected} == expected
    assert fields["tokenizer.ggml.tokens"][7] == "tök7"
    assert fields["tokenizer.ggml.merges"] == ["a b", "c d"]
    assert "dflash.attention.sliding_window" not in fields
    assert "dflash.rope.dimension_sections" not in fields
    assert len(fields["dspine.config.sha256"]) == 64
    assert fields["dspine.converter.version"]


def test_layer_ids_are_stored_as_inputs(draft, target, cli, tmp_path):
    """Output of layer k is the input of layer k + 1: (0, 2, 4) is stored as (1, 3, 5)."""
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    field = read(Path(result.out.strip())).get_field("dflash.target_layers")
    assert field.contents() == [1, 3, 5]
    assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]


def test_sliding_layers(draft, target, cli, tmp_path):
    draft.config |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
    }
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    reader = read(Path(result.out.strip()))
    assert reader.get_field("dflash.attention.sliding_window").contents() == 64
    pattern = reader.get_field("dflash.attention.sliding_window_pattern")
    assert pattern.contents() == [True, False]


def test_mrope_target(draft, kit, cli, tmp_path):
    target = kit.new_target(
        tmp_path / "m.gguf",
        arch="qwen35",
        change=lambda w: w.add_rope_dimension_sections([2, 1, 1, 0]),
    )
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    field = read(Path(result.out.strip())).get_field("dflash.rope.dimension_sections")
    assert field.contents() == [8, 0, 0, 0]


def test_yarn(draft, target, cli, tmp_path):
    draft.config["rope_parameters"] = {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    reader = read(Path(result.out.strip()))
    assert reader.get_field("dflash.rope.scaling.type").contents() == "yarn"
    assert reader.get_field("dflash.rope.scaling.factor").contents() == 4.0
    assert reader.get_field("dflash.rope.scaling.original_context_length").contents() == 1024


def test_layout_b(tmp_path, kit, cli, target):
    """A reference pair: codes apart, config nested, block size 16 whatever it says."""
    shape = kit.Shape(hidden=288, rank=8)
    assert shape.hidden > 16 * 17  # top_k is 16 here
    draft = kit.new_draft(tmp_path / "pair", shape, "F32")
    codes = draft.tensors.pop("transfer_codes")
    del draft.tensors["transfer_ready"]
    del draft.config["dspine_config"], draft.config["architectures"]
    draft.config = {"config": draft.config, "step": 10}
    directory = draft.write()
    apart = kit.write_safetensors(tmp_path / "codes.safetensors", {"codes": codes})
    wide = kit.new_target(tmp_path / "t.gguf", shape)
    seen = []
    for source in (directory, directory / "model.safetensors"):
        out = tmp_path / f"out{len(seen)}"
        result = cli(source, "--codes", apart, "--target", wide, "-t", "f32", "-o", out)
        assert result.code == 0, result.err
        assert "block_size 8 in the config of a reference pair: 16 is used" in result.err
        path = Path(result.out.strip())
        check_exact(path, kit, shape, "F32")
        reader = read(path)
        assert reader.get_field("dflash.block_size").contents() == 16
        assert reader.get_field("dflash.selector_top_k").contents() == 16
        assert reader.get_field("dflash.transfer_rank").contents() == 8
        assert reader.get_field("dflash.message_size").contents() == 12
        seen.append(path.read_bytes())
    assert seen[0] == seen[1]
    apart.replace(directory / "codes.safetensors")  # beside the weights, found by itself
    result = cli(directory, "--target", wide, "-t", "f32", "-o", tmp_path / "out3")
    assert result.code == 0, result.err
    assert Path(result.out.strip()).read_bytes() == seen[0]


@pytest.mark.parametrize("index", [True, False])
def test_shards(draft, target, cli, tmp_path, index, kit):
    result = cli(draft.write_shards(3, index=index), "--target", target, "-o", tmp_path / "o")
    assert result.code == 0, result.err
    check_exact(Path(result.out.strip()), kit, draft.shape, "BF16")


def test_symlinked_hub_cache(draft, target, cli, tmp_path, kit):
    draft.write_shards(2, index=True)
    cache = tmp_path / "models--someone--Tiny-DSpine"
    snapshot = cache / "snapshots" / "0123abc"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for n, path in enumerate(sorted(draft.directory.iterdir())):
        blob = cache / "blobs" / f"blob{n}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    result = cli(snapshot, "--target", target, "-o", tmp_path / "o")
    assert result.code == 0, result.err
    path = Path(result.out.strip())
    assert path.name == "Tiny-DSpine-BF16.gguf"
    check_exact(path, kit, draft.shape, "BF16")
    reader = read(path)
    url = reader.get_field("general.source.url").contents()
    assert url == "https://huggingface.co/someone/Tiny-DSpine"
    assert reader.get_field("general.source.revision").contents() == "0123abc"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bytes_whatever_the_threads(threads, kit, cli, tmp_path, native_library, monkeypatch):
    monkeypatch.setattr("dspine_convert.stream.CHUNK_ELEMENTS", 1000)
    target = kit.new_target(tmp_path / "t.gguf", kit.WIDE)
    draft = kit.new_draft(tmp_path / "same", kit.WIDE).write()
    types = [a for k in ("f32", "bf16", "q8_0", "q4_k_m") for a in ("-t", k)]
    shown = []
    for n, count in ((1, 1), (2, threads)):
        args = ("--target", target, *types, "-o", tmp_path / f"o{n}", "--threads", count, "-q")
        result = cli(draft, *args)
        assert result.code == 0, result.err
        shown.append([Path(p).read_bytes() for p in result.out.split()])
    assert shown[0] == shown[1]


def test_published_sizes(tmp_path, kit, cli):
    """The 27B shape from headers alone: 4.06, 2.20 and 1.26 GB within one per cent."""
    shape = kit.Shape(
        hidden=5120, layers=5, heads=32, kv_heads=8, head_dim=128, ffn=17408, vocab=248320,
        rank=1024, message=512, taps=(1, 16, 31, 46, 61), top_k=16, block=16, target_layers=64,
    )  # fmt: skip
    directory = tmp_path / "big"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(kit.config_of(shape)))
    header, at = {}, 0
    for name, dims in kit.tensor_shapes(shape).items():
        size = 2 * int(np.prod(dims))
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    header["transfer_ready"] = {"dtype": "BOOL", "shape": [], "data_offsets": [at, at + 1]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:  # sparse: no data is needed
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(at, os.SEEK_CUR)
        file.write(b"\1")
    target = kit.new_target(tmp_path / "t.gguf", shape)
    types = ("-t", "bf16", "-t", "q8_0", "-t", "q4_k_m")
    result = cli(directory, "--target", target, *types, "--dry-run", "--json")
    assert result.code == 0, result.err
    sizes = [f["bytes"] for f in json.loads(result.out)["files"]]
    for found, published in zip(sizes, (4.06e9, 2.20e9, 1.26e9), strict=True):
        assert abs(found / published - 1) < 0.01, (found, published)


def test_q8_0_error_is_small(wide_draft, wide_target, cli, tmp_path, native_library, kit):
    result = cli(wide_draft.write(), "--target", wide_target, "-t", "q8_0", "-o", tmp_path / "o")
    tensors = by_name(Path(result.out.strip()))
    for source, name in expected_names(kit.WIDE.layers).items():
        expected = kit.weights(source, kit.tensor_shapes(kit.WIDE)[source])
        error = np.linalg.norm(values_of(tensors[name]) - expected) / np.linalg.norm(expected)
        assert error < 0.01, name  # 8 bits over blocks of 32: about 0.5 %


def test_codes_apart_in_layout_a(draft, target, cli, tmp_path, kit):
    """--codes alone does not make a reference pair: a dspine_config keeps its own block size."""
    codes = draft.tensors.pop("transfer_codes")
    apart = kit.write_safetensors(tmp_path / "codes.safetensors", {"codes": codes})
    args = ("--codes", apart, "--target", target, "-o", tmp_path / "o")
    result = cli(draft.write(), *args)
    assert result.code == 0, result.err
    reader = read(Path(result.out.strip()))
    assert reader.get_field("dflash.block_size").contents() == 8
    assert reader.get_field("dflash.selector_top_k").contents() == 4
    del draft.config["dspine_config"]["top_k"]
    result = cli(draft.write(), *args, "--force")
    assert result.code == 1
    assert "dspine_config.top_k is missing" in result.err


@pytest.mark.parametrize("name", ["codes", "transfer_codes"])
def test_codes_twice(draft, target, cli, tmp_path, kit, name):
    codes = {name: draft.tensors["transfer_codes"]}
    apart = kit.write_safetensors(tmp_path / "more.safetensors", codes)
    result = cli(draft.write(), "--codes", apart, "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "model.safetensors" in result.err
    assert "more.safetensors" in result.err
    assert "transfer_codes" in result.err


def test_unknown_settings_are_noted(draft, target, cli, tmp_path):
    settings = {"alignment_warmup_steps": 5, "candidate_mass_threshold": 0.1, "ce_weight": 0.1}
    settings |= {"replacement_layers": 3}
    draft.config["dspine_config"] |= settings
    args = ("--target", target, "-o", tmp_path / "o", "--force")
    assert "note: " not in cli(draft.write(), *args).err
    draft.config["dspine_config"]["gate"] = "softmax"
    note = "note: dspine_config holds keys that are not known here and ignored: gate"
    assert note in cli(draft.write(), *args).err
