"""The target's side: vocabulary, shape and fingerprint, from a GGUF or from its header alone."""

from __future__ import annotations

import importlib.util
import mmap
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.checkpoint import open_file
from dspine_convert.errors import ConvertError, short
from dspine_convert.fingerprint import tokens_fnv1a64
from dspine_convert.gguf_format import Header, NeedMoreDataError, Value, data_end, read_header

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
        raise ConvertError(f"{where}: key {short(key)!r} is missing; is this a whole model's GGUF?")
    return header.values[key]


@contextmanager
def _named(where: str, key: str) -> Iterator[None]:
    """Put file and key before what a value's decoder says."""
    try:
        yield
    except ConvertError as error:
        raise ConvertError(f"{where}: key {short(key)!r}: {error}") from None


def _count(header: Header, key: str, where: str, *, least: int) -> int:
    """An integer that can be a size here; floats, negative and absurd numbers are refused."""
    value = _required(header, key, where)
    with _named(where, key):
        found = value.scalar()
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 31:
            raise ConvertError(f"is {short(repr(found))}, expected {least} or a larger integer")
    return found


def _optional_count(header: Header, key: str, where: str) -> int:
    return _count(header, key, where, least=0) if key in header.values else 0


def _layers(header: Header, arch: str, where: str) -> int:
    """Decoder layers. Multi-token-prediction layers count in block_count and are no tap's."""
    key = f"{arch}.nextn_predict_layers"
    blocks = _count(header, f"{arch}.block_count", where, least=1)
    extra = _optional_count(header, key, where)
    if extra >= blocks:
        raise ConvertError(
            f"{where}: key {short(key)!r}: is {extra}, not below block_count {blocks}"
        )
    return blocks - extra


def _text(header: Header, key: str, where: str) -> str:
    with _named(where, key):
        found = _required(header, key, where).scalar()
        if not isinstance(found, str) or not found:
            raise ConvertError(f"is {short(repr(found))}, expected text")
    return found


def _name(header: Header) -> str | None:
    """The target's name, which is only for people: what cannot be read is left out."""
    try:
        found = header.values["general.name"].scalar()
    except (KeyError, ConvertError):
        return None
    return found if isinstance(found, str) and found else None


def _vocabulary(header: Header, where: str) -> tuple[list[bytes], list[int] | None]:
    """Tokens and their types, if there are any."""
    stored = _required(header, TOKENS, where)
    with _named(where, TOKENS):
        tokens = stored.strings()
    types = None
    if TOKEN_TYPES in header.values:
        with _named(where, TOKEN_TYPES):
            types = header.values[TOKEN_TYPES].numbers()
            if len(types) != len(tokens):
                raise ConvertError(f"{len(tokens)} tokens but {len(types)} token types")
    return tokens, types


def from_header(header: Header, where: str) -> Target:
    """Take the target's facts from a parsed header; raises ConvertError naming file and key."""
    _required(header, "general.architecture", where)
    arch = _text(header, "general.architecture", where)
    if arch == "dflash":
        raise ConvertError(f"{where}: this is a drafter; --target takes the model it drafts for")
    if _optional_count(header, "split.no", where) > 0:
        raise ConvertError(f"{where}: a later part of a split GGUF; give its first part")
    tokens, types = _vocabulary(header, where)
    return Target(
        where=where,
        architecture=arch,
        name=_name(header),
        embedding_length=_count(header, f"{arch}.embedding_length", where, least=1),
        block_count=_layers(header, arch, where),
        vocab_size=len(tokens),
        tokens_fnv1a64=tokens_fnv1a64(tokens, types),
        uses_mrope=f"{arch}.rope.dimension_sections" in header.values,
        tokenizer={k: v for k, v in header.values.items() if k.startswith("tokenizer.ggml.")},
    )


def read_local_header(
    path: Path, *, with_tensors: bool = False, check_size: bool = False
) -> Header:
    """Parse the header of a GGUF file; raises ConvertError when it is damaged or cut short.

    With `check_size`, a file that ends before its tensors' data do is refused as well.
    """
    with ExitStack() as stack:
        fd = open_file(path, stack)
        size = os.fstat(fd).st_size
        if size == 0:
            raise ConvertError(f"{path}: empty file")
        area = stack.enter_context(mmap.mmap(fd, size, access=mmap.ACCESS_READ))
        view = stack.enter_context(memoryview(area))
        try:
            header = read_header(view, with_tensors=with_tensors)
            needed = data_end(view, header) if check_size else 0
        except NeedMoreDataError as error:
            raise ConvertError(
                f"{path}: truncated GGUF, its header needs at least {error.at_least} bytes and "
                f"the file has {size}"
            ) from None
        except ConvertError as error:
            raise ConvertError(f"{path}: {error}") from None
        if needed > size:
            raise ConvertError(
                f"{path}: truncated GGUF, its tensors need {needed} bytes and the file has {size}; "
                "download it again"
            )
        return header


def load_gguf(path: Path) -> Target:
    """Read a target from its GGUF file."""
    return from_header(read_local_header(path, check_size=True), str(path))


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
