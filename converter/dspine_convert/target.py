"""The target's side: vocabulary, shape and fingerprint, from a GGUF or from its header alone."""

from __future__ import annotations

import importlib.util
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.checkpoint import open_file
from dspine_convert.errors import ConvertError
from dspine_convert.fingerprint import tokens_fnv1a64
from dspine_convert.gguf_format import Header, NeedMoreDataError, Value, read_header

LLAMA_CPP_ENV = "DSPINE_LLAMA_CPP_DIR"
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"

# Architectures whose graph publishes the last layer's output as well (llama.cpp 0c1e57098,
# src/models/{deepseek4,mimo2,nemotron-h}.cpp assign t_layer_inp[n_layer]); all others publish
# the inputs of layers 0 to n-1 only.
PUBLISHES_LAST_LAYER = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})


@dataclass(frozen=True)
class Target:
    """What conversion needs of the target. `tokenizer` holds tokenizer.ggml.* as stored."""

    where: str
    architecture: str
    name: str | None
    embedding_length: int
    block_count: int
    vocab_size: int
    tokens_fnv1a64: str
    uses_mrope: bool
    tokenizer: dict[str, Value]


def _required(header: Header, key: str, where: str) -> Value:
    if key not in header.values:
        raise ConvertError(f"{where}: key {key!r} is missing; is this a whole model's GGUF?")
    return header.values[key]


def _integer(header: Header, key: str, where: str) -> int:
    value = _required(header, key, where).scalar()
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConvertError(f"{where}: {key} is {value!r}, expected a positive integer")
    return value


def _optional_count(header: Header, key: str) -> int:
    value = header.values[key].scalar() if key in header.values else 0
    return int(value) if isinstance(value, (int, float)) else 0


def from_header(header: Header, where: str) -> Target:
    """Take the target's facts from a parsed header; raises ConvertError naming the key."""
    arch = _required(header, "general.architecture", where).scalar()
    if not isinstance(arch, str):
        raise ConvertError(f"{where}: general.architecture is not text")
    if arch == "dflash":
        raise ConvertError(f"{where}: this is a drafter; --target takes the model it drafts for")
    if _optional_count(header, "split.no") > 0:
        raise ConvertError(f"{where}: a later part of a split GGUF; give its first part")
    tokens = _required(header, TOKENS, where).strings()
    types = header.values[TOKEN_TYPES].numbers() if TOKEN_TYPES in header.values else None
    if types is not None and len(types) != len(tokens):
        raise ConvertError(f"{where}: {len(tokens)} tokens but {len(types)} token types")
    # Multi-token-prediction layers are counted in block_count and are no tap's business.
    layers = _integer(header, f"{arch}.block_count", where)
    layers -= _optional_count(header, f"{arch}.nextn_predict_layers")
    name = header.values.get("general.name")
    shown = name.scalar() if name is not None else None
    return Target(
        where=where,
        architecture=arch,
        name=shown if isinstance(shown, str) and shown else None,
        embedding_length=_integer(header, f"{arch}.embedding_length", where),
        block_count=layers,
        vocab_size=len(tokens),
        tokens_fnv1a64=tokens_fnv1a64(tokens, types),
        uses_mrope=f"{arch}.rope.dimension_sections" in header.values,
        tokenizer={k: v for k, v in header.values.items() if k.startswith("tokenizer.ggml.")},
    )


def read_local_header(path: Path, *, with_tensors: bool = False) -> Header:
    """Parse the header of a GGUF file; raises ConvertError when it is damaged or cut short."""
    with ExitStack() as stack:
        fd = open_file(path, stack)
        size = os.fstat(fd).st_size
        if size == 0:
            raise ConvertError(f"{path}: empty file")
        area = stack.enter_context(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        view = stack.enter_context(memoryview(area))
        try:
            return read_header(view, with_tensors=with_tensors)
        except NeedMoreDataError as error:
            raise ConvertError(
                f"{path}: truncated GGUF, its header needs at least {error.at_least} bytes and "
                f"the file has {size}"
            ) from None
        except ConvertError as error:
            raise ConvertError(f"{path}: {error}") from None


def load_gguf(path: Path) -> Target:
    """Read a target from its GGUF file."""
    return from_header(read_local_header(path), str(path))


def find_hf_converter() -> Path:
    """Locate the pinned llama.cpp's convert_hf_to_gguf.py; the error lists every path tried."""
    tried: list[Path] = []
    if value := os.environ.get(LLAMA_CPP_ENV):
        tried.append(Path(value) / "convert_hf_to_gguf.py")
    if root := package_dir("dspine"):
        tried.append(root / "native" / "llama.cpp" / "convert_hf_to_gguf.py")
    for path in tried:
        if path.is_file():
            return path
    listed = ", ".join(map(str, tried)) or "nowhere (package dspine is not installed)"
    raise ConvertError(
        f"a Hugging Face target needs llama.cpp's convert_hf_to_gguf.py; looked at: {listed}\n"
        f"set {LLAMA_CPP_ENV} to a llama.cpp source tree, or give the target's GGUF"
    )


def package_dir(name: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def load_hf_directory(directory: Path) -> Target:
    """Read a target from its Hugging Face directory, through llama.cpp's own vocabulary code."""
    if not (directory / "config.json").is_file():
        raise ConvertError(f"{directory}: no config.json; not a Hugging Face model directory")
    script = find_hf_converter()
    needed = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if needed:
        raise ConvertError(
            f"reading a Hugging Face target's vocabulary needs {' and '.join(needed)}: "
            f"pip install {' '.join(needed)}, or give the target's GGUF"
        )
    with tempfile.TemporaryDirectory(prefix="dspine-vocab-") as scratch:
        out = Path(scratch) / "vocab.gguf"
        command = [sys.executable, str(script), str(directory), "--vocab-only"]
        command += ["--outfile", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not out.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            last = lines[-1][:300] if lines else f"exit code {done.returncode}"
            raise ConvertError(
                f"{directory}: llama.cpp could not read the vocabulary: {last}\n"
                f"command: {shlex.join(command[1:4])[:400]}"
            )
        header = read_local_header(out)
    return from_header(header, str(directory))
