"""GGUF headers of models: metadata and the list of tensors; tensor data is never read.

A model is a local file, the first of several parts (`-00001-of-000NN.gguf`), or a name on the hub:
`OWNER/REPO`, `OWNER/REPO:FILE.gguf` or `OWNER/REPO:QUANT`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from dspine_convert.errors import ConvertError, short, some_names
from dspine_convert.gguf_format import (
    ALIGNMENT,
    ALIGNMENT_KEY,
    NeedMoreDataError,
    Value,
    ValueType,
    padded,
    read_header,
)
from dspine_convert.gguf_format import Header as FileHeader
from dspine_convert.gguf_format import TensorInfo as FileTensor
from dspine_convert.target import from_header, read_local_header

from dspine._errors import DspineError

__all__ = ["Header", "HeaderError", "Tensor", "check_partner", "open_header"]

HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<part>[^:]+))?")
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 1000
DEFAULT_QUANT = "Q4_K_M"  # llama.cpp's choice for a repository without a file name

_Decoded = TypeVar("_Decoded")
Kind = Literal["target", "drafter", "other drafter", "adapter", "projector", "vocabulary"]
_KINDS: dict[str, str] = {
    "target": "a language model",
    "drafter": "a DSpine drafter",
    "other drafter": "a drafter, but not a DSpine one",
    "adapter": "an adapter",
    "projector": "a multimodal projector",
    "vocabulary": "a file without tensors",
}
_DRAFTERS = frozenset({"dflash", "eagle3", "gemma4-assistant"})


class HeaderError(DspineError):
    """A file is no GGUF, is damaged, or is not the kind of model that is needed."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: `shape` in ggml order, `type` as ggml names it, `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int
    part: int = 0


@dataclass(frozen=True)
class Header:
    """What a GGUF file, or all parts of one, say about themselves.

    Attributes:
        spec: the name that the user gave.
        values: metadata of the first part by key.
        tensors: of all parts, in file order.
        file_bytes: size of all parts; 0 where a hub does not tell.
    """

    spec: str
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    file_bytes: int
    source: FileHeader = field(repr=False, compare=False)

    @functools.cached_property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(t.name for t in self.tensors)

    @property
    def architecture(self) -> str:
        """general.architecture; HeaderError where it is missing."""
        found = self.text("general.architecture")
        if not found:
            raise HeaderError(f"{self.spec}: key 'general.architecture' is missing")
        return found

    @functools.cached_property
    def kind(self) -> Kind:
        """What the file holds."""
        arch = self.architecture
        general = self.text("general.type")
        if arch == "dflash" and "dflash.transfer_rank" in self.values:
            return "drafter"
        if arch in _DRAFTERS:
            return "other drafter"
        if general == "adapter":
            return "adapter"
        if arch == "clip" or general == "mmproj":
            return "projector"
        return "target" if self.tensors else "vocabulary"

    def describe_kind(self) -> str:
        """The kind for a message: "this is a DSpine drafter"."""
        return f"this is {_KINDS[self.kind]}"

    def text(self, key: str) -> str | None:
        """A text value, or None where it is missing or is no text."""
        value = self.values.get(key)
        if value is None or value.type is not ValueType.STRING:
            return None
        return value.raw[8:].decode("utf-8", "replace")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value; HeaderError where it is missing without a default, or is none."""
        value = self.values.get(key)
        if value is None or value.type is ValueType.ARRAY:
            if default is not None:
                return default
            found = "missing" if value is None else "an array"
            raise HeaderError(f"{self.spec}: key {short(key)!r} is {found}, expected an integer")
        number = self._decoded(key, value.scalar)
        if isinstance(number, bool) or not isinstance(number, int):
            raise HeaderError(
                f"{self.spec}: key {short(key)!r} is {short(repr(number))}, expected an integer"
            )
        return number

    def integers(self, key: str) -> list[int] | None:
        """An array of integers or booleans, or None where the key is missing or holds one value."""
        value = self.values.get(key)
        if value is None or value.type is not ValueType.ARRAY:
            return None
        return self._decoded(key, value.numbers)

    def array_length(self, key: str) -> int:
        """Elements of an array; 0 where there is none."""
        value = self.values.get(key)
        return value.count if value is not None and value.type is ValueType.ARRAY else 0

    def _decoded(self, key: str, decode: Callable[[], _Decoded]) -> _Decoded:
        try:
            return decode()
        except ConvertError as error:
            raise HeaderError(f"{self.spec}: key {short(key)!r}: {error}") from None


def open_header(spec: str) -> Header:
    """Read the header of a model; HeaderError names what is wrong with it."""
    path = Path(spec)
    try:
        if path.exists() or path.is_symlink():
            return _join(spec, path.name, lambda name: _read_local(path.with_name(name)))
        match = HUB_NAME.fullmatch(spec)
        if match is None or (spec.endswith(".gguf") and ":" not in spec):
            raise HeaderError(
                f"{spec}: no such file, and not a hub name (OWNER/REPO, OWNER/REPO:FILE.gguf "
                "or OWNER/REPO:QUANT)"
            )
        repo = match["repo"]
        name = hub_file(repo, match["part"])
        return _join(spec, name, lambda part: _read_hub(repo, part))
    except ConvertError as error:
        raise HeaderError(str(error)) from None
    except OSError as error:
        raise HeaderError(f"{error.filename or spec}: {error.strerror or error}") from None


def _join(spec: str, name: str, read: Callable[[str], tuple[FileHeader, int]]) -> Header:
    """The header of a file, or of all parts of a split one, given the name of the first."""
    first, size = read(name)
    names = [name]
    match = PART.fullmatch(Path(name).name)
    declared = _count(first, "split.count", spec)
    if _count(first, "split.no", spec) > 0:
        raise HeaderError(f"{spec}: a later part of a split GGUF; give its first part")
    if declared > 1:
        if match is None or int(match["count"]) != declared or declared > MAX_PARTS:
            raise HeaderError(
                f"{spec}: the first of {short(str(declared))} parts, but its name does not end in "
                f"-00001-of-{declared:05d}.gguf"
            )
        folder = name[: -len(Path(name).name)]
        stem = match["stem"]
        names += [f"{folder}{stem}-{i:05d}-of-{declared:05d}.gguf" for i in range(2, declared + 1)]
    tensors = list(_tensors(first, spec, 0))
    for part, other in enumerate(names[1:], start=1):
        header, more = read(other)
        tensors += _tensors(header, other, part)
        size += more
    return Header(spec, first.values, tuple(tensors), size, first)


def _count(header: FileHeader, key: str, spec: str) -> int:
    value = header.values.get(key)
    found = 0 if value is None else value.scalar()
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise HeaderError(f"{spec}: key {key!r} is {short(repr(found))}, expected a count")
    return found


def _tensors(header: FileHeader, spec: str, part: int) -> list[Tensor]:
    """The tensors with sizes; HeaderError for a shape that a type cannot have."""
    alignment = _count(header, ALIGNMENT_KEY, spec) or ALIGNMENT
    start = header.data_start if alignment == ALIGNMENT else padded(header.data_start, alignment)
    out: list[Tensor] = []
    names: set[str] = set()
    for info in header.tensors:
        if info.name in names:
            raise HeaderError(f"{spec}: tensor {short(info.name)!r} appears twice")
        names.add(info.name)
        out.append(_tensor(info, start, part))
    return out


def _tensor(info: FileTensor, start: int, part: int) -> Tensor:
    return Tensor(
        info.name, info.shape, info.type.name.lower(), info.nbytes, start + info.offset, part
    )


def _read_local(path: Path) -> tuple[FileHeader, int]:
    header = read_local_header(path, with_tensors=True, check_size=True)
    return header, path.stat().st_size


def _read_hub(repo: str, name: str) -> tuple[FileHeader, int]:
    """Header and size of a file on the hub, from the cache where it is there."""
    from dspine_convert import hub

    cached = hub.cached_file(repo, name, None)
    if cached is not None:
        return _read_local(cached)
    # This settles whether the file can be read and is a GGUF, with the hub's own messages.
    values = hub.read_remote_header(repo, name, None)
    file = hub.RemoteFile(repo, name, None)
    wanted = values.infos_start + 256 * values.n_tensors + 4096
    while True:
        data = file.read(0, wanted)
        try:
            return read_header(memoryview(data)), file.size
        except NeedMoreDataError as error:
            if len(data) < wanted or error.at_least > hub.MAX_PIECE:
                raise HeaderError(f"{repo}:{name}: truncated GGUF") from None
            wanted = max(2 * wanted, error.at_least)


def hub_file(repo: str, part: str | None) -> str:
    """The file of a repository that a name or a quantization stands for."""
    if part is not None and part.endswith(".gguf"):
        return part
    names = [n for n in _hub_files(repo) if n.endswith(".gguf") and "mmproj" not in n.lower()]
    first = [
        n for n in names if (m := PART.fullmatch(Path(n).name)) is None or m["number"] == "00001"
    ]
    wanted = (part or DEFAULT_QUANT).lower()
    found = [
        n for n in first if re.search(rf"(?:^|[-_.]){re.escape(wanted)}(?:[-_.]|$)", n.lower())
    ]
    if part is None and not found and len(first) == 1:
        found = first
    if len(found) != 1:
        said = "no file" if not found else f"{len(found)} files"
        raise HeaderError(
            f"{repo}: {said} for {part or DEFAULT_QUANT!r}; name one as {repo}:FILE.gguf "
            f"(there: {some_names(first) or 'no GGUF'})"
        )
    return found[0]


def _hub_files(repo: str) -> list[str]:
    from dspine_convert import hub
    from huggingface_hub import HfApi

    if hub.is_offline():
        raise HeaderError(f"{repo}: HF_HUB_OFFLINE is set; name a cached file as {repo}:FILE.gguf")
    try:
        return list(HfApi().list_repo_files(repo))
    except Exception as error:  # the client's types differ between versions
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0][:300] if lines else type(error).__name__
        raise HeaderError(f"hub repository {repo!r}: {reason}") from error


def check_partner(target: Header, draft: Header) -> None:
    """Refuse a drafter of another target, by the facts that the loader compares.

    Raises HeaderError with the same words as native/src/dspine-pair.cpp.
    """
    try:
        facts = from_header(target.source, target.spec)
    except ConvertError as error:
        raise HeaderError(str(error)) from None
    compared: dict[str, tuple[str, str | int]] = {
        "architecture": ("architecture", facts.architecture),
        "embedding_length": ("hidden size", facts.embedding_length),
        "block_count": ("layer count", facts.block_count),
        "vocab_size": ("vocabulary size", facts.vocab_size),
        "tokens_fnv1a64": ("token list hash", facts.tokens_fnv1a64),
    }
    name = draft.text("dspine.target.name") or draft.text("dspine.target.architecture")
    for key, (what, found) in compared.items():
        full = f"dspine.target.{key}"
        if full not in draft.values:
            continue
        expected = draft.text(full) or draft.integer(full)
        if expected != found:
            raise HeaderError(
                f"{draft.spec}: it was converted for the target {short(str(name))!r} with {what} "
                f"{expected}, {target.spec} has {found}"
            )
