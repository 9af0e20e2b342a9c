"""Safetensors checkpoints: every header field is checked before a byte of data is trusted."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from dspine_convert.errors import ConvertError, short, some_names

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_JSON_BYTES = 64 << 20
ITEM_SIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.safetensors$")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the checkpoint; `shape` in file order, `offset` from the start of `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    fd: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors by their names in the files, and the files themselves."""

    tensors: dict[str, SourceTensor]
    files: tuple[Path, ...]


def parse_json(data: bytes, where: str) -> Any:
    """Decode JSON; raises ConvertError for bad text, repeated keys or absurd nesting."""

    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise ConvertError(f"{where}: {short(key)!r} appears twice")
            out[key] = value
        return out

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "nested too deeply"
        raise ConvertError(f"{where}: not valid JSON ({reason})") from error


def read_small(path: Path) -> bytes:
    """Read a JSON file's bytes, at most 64 MiB of them."""
    if path.is_symlink() and not path.exists():
        raise ConvertError(f"{path}: broken symbolic link to {path.readlink()}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConvertError(f"{path}: not a regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConvertError(f"{path}: {path.stat().st_size} bytes is too large for JSON here")
        return path.read_bytes()
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: Path) -> Any:
    """Read and decode a JSON file; raises ConvertError for what is not one."""
    return parse_json(read_small(path), str(path))


def read_at(fd: int, size: int, offset: int, path: Path) -> bytes:
    """Read exactly `size` bytes; raises ConvertError when the file is shorter."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(fd, size, offset)
        if not part:
            raise ConvertError(f"{path}: truncated, {size} bytes missing at offset {offset}")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)


def is_natural(value: object) -> bool:
    """True for a non-negative int below 2^63 (bool is an int in Python, and is not one here)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(name: str, entry: Any, path: Path, fd: int, start: int, size: int) -> SourceTensor:
    where = f"{path.name}: tensor {short(name)!r}"
    if not isinstance(entry, dict):
        raise ConvertError(f"{where}: header entry is not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise ConvertError(f"{where}: dtype {dtype!r:.80}; known: {', '.join(ITEM_SIZE)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_natural, shape)):
        raise ConvertError(f"{where}: shape {str(shape)[:80]} is not a short list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not all(map(is_natural, span)):
        raise ConvertError(f"{where}: data_offsets {str(span)[:80]} is not [begin, end]")
    begin, end = span
    expected = prod(shape) * ITEM_SIZE[dtype]
    if end - begin != expected:
        raise ConvertError(
            f"{where}: shape {shape} of {dtype} needs {expected} bytes, "
            f"data_offsets span {end - begin}"
        )
    if end > size:
        raise ConvertError(
            f"{where}: data ends at byte {end}, the file holds {size}; it is truncated, "
            "download it again"
        )
    return SourceTensor(name, dtype, tuple(shape), path, fd, start + begin, expected)


def _check_layout(path: Path, tensors: Iterable[SourceTensor], start: int, size: int) -> None:
    """No two tensors overlap, nothing lies between them, nothing follows them."""
    ordered = sorted(tensors, key=lambda t: (t.offset, t.nbytes))
    for left, right in pairwise(ordered):
        pair = f"{short(left.name)!r} and {short(right.name)!r}"
        if left.offset + left.nbytes > right.offset:
            raise ConvertError(f"{path.name}: {pair} overlap")
        if left.offset + left.nbytes < right.offset:
            raise ConvertError(f"{path.name}: bytes between {pair}")
    first = ordered[0].offset if ordered else start
    last = ordered[-1].offset + ordered[-1].nbytes if ordered else start
    if first != start or last != start + size:
        raise ConvertError(
            f"{path.name}: tensors fill bytes {first - start} to {last - start} of {size}"
        )


def open_file(path: Path, stack: ExitStack) -> int:
    """Open a regular file for reading, closed with `stack`; a broken link gets its own words."""
    if path.is_symlink() and not path.exists():
        raise ConvertError(
            f"{path}: broken symbolic link to {path.readlink()}; download the file again"
        )
    try:
        # O_NONBLOCK: a pipe in the place of a file must not hang the open.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be opened ({error.strerror})") from error
    stack.callback(os.close, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConvertError(f"{path}: not a regular file")
    return fd


def read_shard(path: Path, stack: ExitStack) -> dict[str, SourceTensor]:
    """Read and check one file's header. The descriptor stays open until `stack` closes."""
    fd = open_file(path, stack)
    total = os.fstat(fd).st_size
    if total < 8:
        raise ConvertError(f"{path}: {total} bytes is too short for a safetensors file")
    length = int.from_bytes(read_at(fd, 8, 0, path), "little")
    if length > MAX_HEADER_BYTES or length > total - 8:
        raise ConvertError(
            f"{path}: header of {length} bytes in a file of {total}; truncated, or not safetensors"
        )
    header = parse_json(read_at(fd, length, 8, path), f"{path.name} header")
    if not isinstance(header, dict):
        raise ConvertError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    start, size = 8 + length, total - 8 - length
    found = {name: _entry(name, entry, path, fd, start, size) for name, entry in header.items()}
    _check_layout(path, found.values(), start, size)
    return found


def _shards_by_name(directory: Path) -> list[Path]:
    """All *.safetensors of a directory; a numbered set must be complete."""
    paths = sorted(p for p in directory.iterdir() if p.name.endswith(".safetensors"))
    sets: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := _SHARD.match(path.name):
            key = (match["stem"], int(match["total"]))
            sets.setdefault(key, set()).add(int(match["part"]))
    for (stem, total), parts in sets.items():
        missing = [n for n in range(1, min(total, 10_000) + 1) if n not in parts]
        if missing:
            raise ConvertError(
                f"{directory}: shard {stem}-{missing[0]:05d}-of-{total:05d}.safetensors is absent"
                f" ({len(missing)} of {total} missing)"
            )
    if not paths:
        raise ConvertError(f"{directory}: no weights (no *.safetensors file)")
    return paths


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConvertError(f"{index}: no 'weight_map' object")
    for name, shard in found.items():
        if not isinstance(shard, str) or not shard or set(shard) & set("/\\\0"):
            raise ConvertError(
                f"{index}: {short(name)!r} names shard {shard!r:.120}, not a plain file name"
            )
    return found


def _merge(shards: Iterable[dict[str, SourceTensor]]) -> dict[str, SourceTensor]:
    merged: dict[str, SourceTensor] = {}
    for shard in shards:
        for name, tensor in shard.items():
            if name in merged:
                both = f"{merged[name].path.name} and in {tensor.path.name}"
                raise ConvertError(f"tensor {short(name)!r} stands in {both}")
            merged[name] = tensor
    return merged


def _open_indexed(directory: Path, index: Path, stack: ExitStack) -> Checkpoint:
    weight_map = _weight_map(index)
    shards: dict[str, dict[str, SourceTensor]] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not path.exists() and not path.is_symlink():
            raise ConvertError(f"{index.name} names the shard {short(shard)!r}, which is absent")
        shards[shard] = read_shard(path, stack)
    lost = [n for n, s in weight_map.items() if n not in shards[s]]
    if lost:
        raise ConvertError(f"{index.name} lists tensors that its shards lack: {some_names(lost)}")
    merged = _merge(shards.values())
    extra = [name for name in merged if name not in weight_map]
    if extra:
        raise ConvertError(f"shards hold tensors that {index.name} lacks: {some_names(extra)}")
    return Checkpoint(merged, tuple(directory / shard for shard in shards))


def open_checkpoint(source: Path, codes: Path | None, stack: ExitStack) -> Checkpoint:
    """Open a directory or a single file, and the separate codes file of layout B if given.

    Raises ConvertError for anything missing, truncated, repeated or inconsistent.
    """
    extra = read_shard(codes, stack) if codes is not None else {}
    if not source.is_dir():
        main = Checkpoint(read_shard(source, stack), (source,))
    elif (index := source / INDEX_NAME).exists() or index.is_symlink():
        main = _open_indexed(source, index, stack)
    else:
        paths = _shards_by_name(source)
        if codes is not None:  # the codes file may lie beside the weights
            paths = [p for p in paths if not (p.exists() and p.samefile(codes))]
        main = Checkpoint(_merge(read_shard(p, stack) for p in paths), tuple(paths))
    files = main.files if codes is None else (*main.files, codes)
    return _not_empty(Checkpoint(_merge([main.tensors, extra]), files), source)


def _not_empty(checkpoint: Checkpoint, source: Path) -> Checkpoint:
    if not checkpoint.tensors:
        raise ConvertError(f"{source}: no weights (the files hold no tensor)")
    return checkpoint
