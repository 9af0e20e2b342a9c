"""Finds the programs and the library under test: an override, else the installed package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

PROGRAMS = ("llama-server", "llama-speculative-simple", "llama-cli", "llama-quantize")


def _packaged(part: str) -> Path | None:
    spec = importlib.util.find_spec("dspine")
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) / "native" / part if places else None


def directory(part: str) -> Path:
    """The directory of "bin" or "lib"; it need not exist."""
    override = os.environ.get(f"DSPINE_{part.upper()}_DIR")
    packaged = _packaged(part)
    return Path(override) if override else packaged or Path("dspine is not installed")


def program(name: str) -> Path:
    """Path of a program of the native build; FileNotFoundError where it is not built."""
    path = directory("bin") / name
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not built; DSPINE_BIN_DIR names another directory")
    return path


def why_missing() -> str | None:
    """Why the native tests cannot run here, or None."""
    missing = [p for p in PROGRAMS if not (directory("bin") / p).is_file()]
    if missing:
        return f"no native build: {directory('bin')} lacks {', '.join(missing)} (make setup)"
    libraries = list(directory("lib").glob("*dspine.*"))
    return None if libraries else f"no native build: no dspine library in {directory('lib')}"
