"""Output files that exist whole or not at all: temporary file, fsync, rename."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.errors import ConvertError
from dspine_convert.plan import Plan, PlannedFile
from dspine_convert.stream import write_all

SPARE_BYTES = 16 << 20
FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Pending:
    """One output being written under its temporary name."""

    planned: PlannedFile
    final: Path
    temporary: Path
    fd: int


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def check_outputs(plan: Plan, directory: Path, inputs: Iterable[Path], *, force: bool) -> None:
    """Refuse outputs that exist, that are inputs, or that the disk cannot hold."""
    if directory.exists() and not directory.is_dir():
        raise ConvertError(f"{directory}: not a directory")
    sources = list(inputs)
    for planned in plan.files:
        path = directory / planned.file_name
        if any(_same(path, source) for source in sources):
            raise ConvertError(f"{path}: output = input; choose another -o or --name")
        if os.path.lexists(path) and not force:
            raise ConvertError(f"{path}: exists already; --force overwrites it")
        if path.is_dir():
            raise ConvertError(f"{path}: is a directory")
    needed = sum(f.nbytes for f in plan.files) + SPARE_BYTES
    free = shutil.disk_usage(_existing_parent(directory.absolute())).free
    if needed > free:
        raise ConvertError(
            f"{directory}: disk full: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
        )


def _same(path: Path, source: Path) -> bool:
    if path.exists() and source.exists():
        return path.samefile(source)
    return path.absolute() == source.absolute()


def _open_temporary(path: Path, stack: ExitStack) -> int:
    """Open and lock the temporary file; a leftover of a killed run is taken over."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be created ({error.strerror})") from error
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConvertError(f"{path}: another conversion is writing this file") from None
    except OSError:  # a file system without locks; the name alone must do
        pass
    stack.callback(_remove, path)
    return fd


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


def _make_directory(directory: Path, stack: ExitStack) -> None:
    """Create the output directory; a failure later removes what this created, if still empty."""
    created: list[Path] = []
    path = directory.absolute()
    while not path.exists():
        created.append(path)
        path = path.parent
    directory.mkdir(parents=True, exist_ok=True)

    def undo() -> None:
        with suppress(OSError):
            for item in created:
                item.rmdir()

    stack.callback(undo)


@contextmanager
def pending_outputs(plan: Plan, directory: Path) -> Iterator[tuple[Pending, ...]]:
    """Open all outputs under temporary names, with headers written and sizes set.

    Whatever is still temporary at the end is removed, and so is a directory made for nothing.
    """
    with ExitStack() as stack:
        _make_directory(directory, stack)
        pending: list[Pending] = []
        for planned in plan.files:
            final = directory / planned.file_name
            temporary = directory / f".{planned.file_name}.part"
            fd = _open_temporary(temporary, stack)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, planned.nbytes)
            write_all(fd, memoryview(planned.header), 0)
            pending.append(Pending(planned, final, temporary, fd))
        yield tuple(pending)


@contextmanager
def background_flush(pending: Iterable[Pending]) -> Iterator[None]:
    """Push written data to the disk while the cores still work, so that fsync is short."""
    stop = threading.Event()
    fds = [item.fd for item in pending]

    def flush() -> None:
        while not stop.wait(FLUSH_SECONDS):
            for fd in fds:
                # The final fsync reports errors; here they would only end a helper.
                with suppress(OSError):
                    os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)

    thread = threading.Thread(target=flush, name="flush", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def commit(pending: Iterable[Pending], *, force: bool) -> list[Path]:
    """Make the finished files durable, then give all of them their final names."""
    items = list(pending)
    for item in items:
        os.fsync(item.fd)
    for item in items:
        if os.path.lexists(item.final) and not force:
            raise ConvertError(f"{item.final}: appeared meanwhile; --force overwrites it")
    for item in items:
        item.temporary.replace(item.final)
    for directory in {item.final.parent for item in items}:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return [item.final for item in items]
