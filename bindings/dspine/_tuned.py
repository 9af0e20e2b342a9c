"""The drafting depth that was measured to be best for a pair of files on this machine.

One JSON file below the user's configuration directory. A pair is known by the size and the first
megabyte of its files, which holds their metadata, so that it may be moved or renamed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
import warnings
from ctypes import byref
from pathlib import Path
from typing import Any

from dspine import _library as native
from dspine._errors import DspineError, InvalidError

FORMAT_VERSION = 1
HEAD_BYTES = 1 << 20


def tuned_path() -> Path:
    """The file: $XDG_CONFIG_HOME/dspine/depths.json, or below ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification ignores a path that is not absolute.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".config"
    return root / "dspine" / "depths.json"


def stored_depth(target: Path, draft: Path) -> int | None:
    """Tokens to draft a round, as stored for these files on this machine; None where nothing is.

    A stored file that cannot be read is ignored with a warning, and so is a model file that is not
    there: who opens it says so better.
    """
    entries = _read(tuned_path())
    if not entries:
        return None
    try:
        entry = entries.get(_key(target, draft))
    except OSError:
        return None
    depth = entry.get("n_draft") if isinstance(entry, dict) else None
    valid = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0
    return depth if valid else None


def store_depth(target: Path, draft: Path, depth: int, **facts: Any) -> Path:
    """Store the depth for these files on this machine; returns the file that holds it.

    Args:
        depth: tokens drafted a round, 0 or more.
        facts: JSON values that are stored beside it, for people.

    Raises InvalidError for a negative depth, OSError where a file cannot be read or written.
    """
    if depth < 0:
        raise InvalidError(f"depth is {depth}, expected 0 or more")
    path = tuned_path()
    entries = _read(path)
    entries[_key(target, draft)] = {
        "n_draft": depth,
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


def _key(target: Path, draft: Path) -> str:
    total = hashlib.sha256(machine().encode())
    for path in (target, draft):
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
        total.update(f"\0{path.stat().st_size}\0".encode() + hashlib.sha256(head).digest())
    return total.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"{path}: ignored, it cannot be read: {error}", RuntimeWarning, stacklevel=3)
        return {}
    depths = content.get("depths") if isinstance(content, dict) else None
    if not isinstance(depths, dict) or content.get("version") != FORMAT_VERSION:
        warnings.warn(
            f"{path}: ignored, no depths of format {FORMAT_VERSION}", RuntimeWarning, stacklevel=3
        )
        return {}
    return depths


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step, so that a reader sees the old content or the new one."""
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
