"""The drafting depth that was measured to be best for a pair of files on this machine.

One JSON file below the user's configuration directory. A pair is known by the size, the first and
the last megabyte of its files, which hold metadata and weights, so that it may be moved or renamed
while a drafter that was trained again is another one. A depth holds
for one type of all caches, as other types take other time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import byref
from pathlib import Path
from typing import Any

from dspine import _library as native
from dspine._errors import DspineError, InvalidError

# Format 1 did not tell cache types apart and may have been measured with flags of the user's: it is
# ignored, as nothing in it says for which server a depth holds.
FORMAT_VERSION = 2
END_BYTES = 1 << 20  # at both ends of a file

# Not Python's warnings, which would show a line of this file: it is not the caller's fault.
_log = logging.getLogger("dspine")


def tuned_path() -> Path:
    """The file: $XDG_CONFIG_HOME/dspine/depths.json, or below ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification ignores a path that is not absolute.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".config"
    return root / "dspine" / "depths.json"


def stored_depth(target: Path, draft: Path, cache_types: Collection[str]) -> int | None:
    """Tokens to draft a round, as stored for these files on this machine; None where nothing is.

    A stored file that cannot be read is ignored, with a line in the log "dspine" (on stderr where
    nobody set up logging). A model file that is not there is ignored too: who opens it says so
    better.

    Args:
        cache_types: of K and V, of target and drafter, for instance "q8_0". Where they differ there
            is nothing stored: `dspine tune` measures with one for all.
    """
    entries = _read(tuned_path())
    if not entries or len(set(cache_types)) != 1:
        return None
    try:
        entry = entries.get(_key(target, draft, next(iter(cache_types))))
    except OSError:
        return None
    depth = entry.get("n_draft") if isinstance(entry, dict) else None
    valid = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0
    return depth if valid else None


def check_writable() -> None:
    """Raises OSError, naming the file, where `store_depth` could not write it."""
    path = tuned_path()
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def store_depth(target: Path, draft: Path, depth: int, cache_type: str, **facts: Any) -> Path:
    """Store the depth for these files on this machine; returns the file that holds it.

    Args:
        depth: tokens drafted a round, 0 or more.
        cache_type: of all caches, with which it was measured.
        facts: JSON values that are stored beside it, for people.

    Raises InvalidError for a negative depth, OSError, naming it, for a file that cannot be read or
    written.
    """
    if depth < 0:
        raise InvalidError(f"depth is {depth}, expected 0 or more")
    path = tuned_path()
    entries = _read(path)
    entries[_key(target, draft, cache_type)] = {
        "n_draft": depth,
        "cache_type": cache_type,
        "target": target.name,
        "draft": draft.name,
        "machine": machine(),
        **facts,
    }
    _write(path, {"version": FORMAT_VERSION, "depths": entries})
    return path


@functools.cache
def machine() -> str:
    """The devices that llama.cpp can compute on, by name: a depth holds for these alone."""
    names = []
    try:
        for index in range(native.dspine_device_count()):
            device = native.Device()
            if native.dspine_get_device(index, byref(device)) == 0:
                names.append((device.description or b"").decode("utf-8", "replace").strip())
    except DspineError:
        names = []
    return ", ".join(names) or f"{platform.machine()} {platform.processor()}".strip()


def _key(target: Path, draft: Path, cache_type: str) -> str:
    total = hashlib.sha256(f"{machine()}\0{cache_type}".encode())
    for path in (target, draft):
        size = path.stat().st_size
        with path.open("rb") as stream:
            ends = stream.read(END_BYTES)
            stream.seek(max(size - END_BYTES, 0))
            ends += stream.read(END_BYTES)
        total.update(f"\0{size}\0".encode() + hashlib.sha256(ends).digest())
    return total.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    """The stored choices by key; none where the file is absent or, as is logged, unusable."""
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        _log.warning("%s: ignored, it cannot be read: %s", path, error.strerror or error)
    except ValueError as error:
        _log.warning("%s: ignored, %s; dspine tune writes it anew", path, error)
    return {}


def _parse(text: str) -> dict[str, Any]:
    """The stored choices by key; ValueError for anything else."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"expected format {FORMAT_VERSION}, found {version}")
    depths = content.get("depths")
    if not isinstance(depths, dict):
        raise ValueError(f"depths: expected an object, found {type(depths).__name__}")
    return depths


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step, so that a reader sees the old content or the new one."""
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream, indent=1, sort_keys=True)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError inside names `path`, not a folder above it or a temporary file beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
