"""Tiny checkpoints and targets, made on the spot; no test here needs the network."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dspine_convert.cli import main
from dspine_convert.quantize import library_paths


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny drafter and its target."""

    hidden: int = 32
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    ffn: int = 48
    vocab: int = 96
    rank: int = 8
    message: int = 12
    taps: tuple[int, ...] = (0, 2, 4)
    top_k: int = 4
    block: int = 8
    target_layers: int = 6


TINY = Shape()
WIDE = Shape(hidden=256, layers=3, heads=4, head_dim=64, ffn=512, vocab=320, rank=256, message=64)
ITEM = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "BOOL": np.bool_,
    "F64": np.float64,
}


def tensor_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes as published, written out apart from the code under test."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    out: dict[str, tuple[int, ...]] = {}
    for n in range(s.layers):
        p = f"layers.{n}"
        out |= {
            f"{p}.input_layernorm.weight": (s.hidden,),
            f"{p}.post_attention_layernorm.weight": (s.hidden,),
            f"{p}.self_attn.q_proj.weight": (q, s.hidden),
            f"{p}.self_attn.k_proj.weight": (kv, s.hidden),
            f"{p}.self_attn.v_proj.weight": (kv, s.hidden),
            f"{p}.self_attn.o_proj.weight": (s.hidden, q),
            f"{p}.self_attn.q_norm.weight": (s.head_dim,),
            f"{p}.self_attn.k_norm.weight": (s.head_dim,),
            f"{p}.mlp.gate_proj.weight": (s.ffn, s.hidden),
            f"{p}.mlp.up_proj.weight": (s.ffn, s.hidden),
            f"{p}.mlp.down_proj.weight": (s.hidden, s.ffn),
            f"injection.readouts.{n}.weight": (s.rank, s.hidden),
            f"injection.writes.{n}.weight": (s.hidden, s.message),
        }
    gate = (s.message, s.rank)
    return out | {
        "fc.weight": (s.hidden, len(s.taps) * s.hidden),
        "hidden_norm.weight": (s.hidden,),
        "norm.weight": (s.hidden,),
        "injection.message.weight": gate,
        "injection.receiver_gate.weight": gate,
        "injection.predecessor_gate.weight": gate,
        "injection.bias": (s.message,),
        "transfer_codes": (s.vocab, s.rank),
    }


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values seeded by the tensor's name, exact in BF16 so that every float type holds them."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape).astype(np.float32) * np.float32(0.1)
    if name == "transfer_codes":  # rows of unit length, as the reference makes them
        values /= np.linalg.norm(values, axis=1, keepdims=True)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the words of a safetensors dtype."""
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(ITEM[dtype])


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> Path:
    """A plain writer of the format: dtype and words by name, in the given order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, words) in tensors.items():
        raw = words.tobytes()
        span = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(words.shape), "data_offsets": span}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def config_of(s: Shape) -> dict[str, Any]:
    """A config.json in the published layout."""
    return {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn,
        "vocab_size": s.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "layer_types": ["full_attention"] * s.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "num_target_layers": s.target_layers,
        "block_size": s.block,
        "dflash_config": {"mask_token_id": s.vocab - 1, "target_layer_ids": list(s.taps)},
        "dspine_config": {
            "transfer_rank": s.rank,
            "message_size": s.message,
            "top_k": s.top_k,
            "alignment_weight": 0.5,
        },
    }


@dataclass
class Draft:
    """A checkpoint to be written: change `tensors` or `config` first, then call write()."""

    directory: Path
    shape: Shape
    config: dict[str, Any]
    tensors: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)

    def write(self) -> Path:
        """Write config.json and model.safetensors; returns the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write_config()
        write_safetensors(self.directory / "model.safetensors", self.tensors)
        return self.directory

    def write_config(self) -> None:
        """Write config.json alone."""
        (self.directory / "config.json").write_text(json.dumps(self.config))

    def write_shards(self, count: int, *, index: bool) -> Path:
        """Write the tensors over several files."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write_config()
        names = list(self.tensors)
        weight_map: dict[str, str] = {}
        for part in range(count):
            file = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
            mine = names[part::count]
            write_safetensors(self.directory / file, {n: self.tensors[n] for n in mine})
            weight_map |= dict.fromkeys(mine, file)
        if index:
            text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
            (self.directory / "model.safetensors.index.json").write_text(text)
        return self.directory

    def rename(self, change: Callable[[str], str]) -> None:
        """Rename every tensor."""
        self.tensors = {change(name): value for name, value in self.tensors.items()}


def new_draft(directory: Path, shape: Shape = TINY, dtype: str = "BF16") -> Draft:
    """A whole, valid checkpoint of layout A, not yet written."""
    tensors = {n: (dtype, stored(weights(n, s), dtype)) for n, s in tensor_shapes(shape).items()}
    tensors["transfer_ready"] = ("BOOL", np.array(True))
    return Draft(directory, shape, config_of(shape), tensors)


def new_target(
    path: Path,
    shape: Shape = TINY,
    *,
    arch: str = "qwen3",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    types: list[int] | None = None,
    nextn: int = 0,
) -> Path:
    """A target's GGUF with metadata only."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny Target")
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.target_layers + nextn)
    if nextn:
        writer.add_uint32(f"{arch}.nextn_predict_layers", nextn)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"tök{i}" for i in range(shape.vocab)])
    writer.add_token_types(types or [1] * shape.vocab)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(False)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return new_draft(tmp_path / "tiny-dspine")


@pytest.fixture
def wide_draft(tmp_path: Path) -> Draft:
    return new_draft(tmp_path / "wide-dspine", WIDE)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return new_target(tmp_path / "target.gguf")


@pytest.fixture
def wide_target(tmp_path: Path) -> Path:
    return new_target(tmp_path / "wide-target.gguf", WIDE)


class Kit:
    """The builders, for tests that need more than one; a fixture because tests import nothing."""

    new_draft = staticmethod(new_draft)
    new_target = staticmethod(new_target)
    write_safetensors = staticmethod(write_safetensors)
    tensor_shapes = staticmethod(tensor_shapes)
    config_of = staticmethod(config_of)
    weights = staticmethod(weights)
    Shape = Shape
    TINY = TINY
    WIDE = WIDE


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line showed."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        shown = capsys.readouterr()
        return Outcome(code, shown.out, shown.err)

    return run


@pytest.fixture
def spawn() -> Callable[..., subprocess.Popen[str]]:
    """Start the command line as a process."""

    def start(*arguments: object, **keywords: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dspine_convert", *map(str, arguments)]
        environment = {**os.environ, **keywords.pop("env", {})}
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            **keywords,
        )

    return start


@pytest.fixture
def native_library() -> Path:
    """ggml's base library; the test is skipped where the converter would not find one."""
    for path in library_paths():
        if path.is_file():
            return path
    pytest.skip("libggml-base not found: set DSPINE_LIB_DIR, or install dspine")


@pytest.fixture
def llama_quantize(native_library: Path) -> Path:
    """llama-quantize of the library's build: beside it, in the package's bin, or on the path."""
    here = native_library.parent
    places = [here / "llama-quantize", here.parent / "bin" / "llama-quantize"]
    found = next((p for p in places if p.is_file()), None) or shutil.which("llama-quantize")
    if found is None:
        pytest.skip("llama-quantize not found beside libggml-base or on PATH")
    return Path(found)
