"""llama-server and the other programs, with the settings of the end-to-end tests."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

from dspine import Server
from dspine_bench.llama_server import plain_server

from support.golden import Run
from support.native_build import program

Serve = Callable[..., Server]
Files = tuple[Path, Path]

# As support.workshop.EXACT. One thread: on models of this size threads only wait for each other.
EXACT_TARGET = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", "1", "-c", "2048")
EXACT_DRAFT = ("-ctkd", "f32", "-ctvd", "f32")
Q8_CACHES = ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "-ctkd", "q8_0", "-ctvd", "q8_0")
ONE_THREAD = ("-t", "1", "-c", "2048")

_numbers = itertools.count()


def server(root: Path, files: Files | tuple[Path, None], *flags: str | Path) -> Server:
    """A server that is not yet started, for a target and a drafter or None."""
    target, draft = files
    log = root / f"{next(_numbers)}.log"
    return plain_server(target, draft, flags, log, program("llama-server"))


def exact(root: Path, files: Files | tuple[Path, None], *flags: str | Path) -> Server:
    """The same with F32 caches and without flash attention; later flags win."""
    draft_flags = EXACT_DRAFT if files[1] is not None else ()
    return server(root, files, *EXACT_TARGET, *draft_flags, *flags)


def run_program(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; text goes to standard output, the log to standard error."""
    return subprocess.run(
        [program(name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


def expected_counts(run: Run, n_predict: int, depth: int) -> tuple[int, int, int]:
    """Rounds, drafted and accepted tokens that a recorded run has under a limit.

    The recording drafts whole blocks; a program drafts no more than it may still emit.
    """
    emitted, rounds, drafted, accepted = 1, 0, 0, 0
    for recorded in run.rounds:
        if emitted >= n_predict:
            break
        room = min(depth, n_predict - emitted - 1)
        rounds += 1
        drafted += room
        accepted += min(recorded["accepted"], room)
        emitted += min(recorded["accepted"], room) + 1
    return rounds, drafted, accepted
