"""Finds the programs of the native build, llama-server among them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dspine._errors import LoadError

BIN_DIR_ENV = "DSPINE_BIN_DIR"


def program_candidates(name: str) -> list[Path]:
    """Where a program may lie, in order: DSPINE_BIN_DIR, then the installed package.

    An override that is set is the only candidate: falling back would run another build than
    the one asked for.
    """
    file = f"{name}.exe" if sys.platform == "win32" else name
    if override := os.environ.get(BIN_DIR_ENV):
        return [Path(override).absolute() / file]
    return [Path(__file__).resolve().parent / "native" / "bin" / file]


def program(name: str) -> Path:
    """Path of a program of the native build, for instance "llama-server".

    Raises LoadError, which lists every path tried, where it is missing or cannot be executed.
    """
    tried: list[str] = []
    for path in program_candidates(name):
        if not path.is_file():
            tried.append(f"{path}: no such file")
        elif not os.access(path, os.X_OK):
            tried.append(f"{path}: not executable")
        else:
            return path
    raise LoadError(
        f"{name} cannot be run; tried {'; '.join(tried)} ({BIN_DIR_ENV} names the directory of "
        "another build; `make setup` builds and installs one)"
    )
