"""Output files that exist whole or not at all: temporary file, fsync, rename."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dspine_convert.errors import ConvertError, Interrupted
from dspine_convert.plan import Plan, PlannedFile
from dspine_convert.signals import signals_held
from dspine_convert.stream import write_all

SPARE_BYTES = 16 << 20
FLUSH_SECONDS = 1.0
OPEN_TRIES = 100


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
    for place in (directory, *directory.parents):
        if place.is_symlink() and not place.exists():
            raise ConvertError(f"-o {directory}: {place} is a broken link to {place.readlink()}")
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
    for _ in range(OPEN_TRIES):
        with ExitStack() as attempt:
            fd = _open_and_lock(path, attempt)
            # Between open and lock another run may have given this very file its final name:
            # writing to it now would damage a finished output.
            if _is_at(fd, path):
                attempt.callback(_remove, path, fd)
                stack.callback(attempt.pop_all().close)
                return fd
    raise ConvertError(f"{path}: is replaced by others again and again; choose another -o")


def _open_and_lock(path: Path, stack: ExitStack) -> int:
    # O_NONBLOCK: a pipe in the place of the file must not hang the open.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be created ({error.strerror})") from error
    stack.callback(os.close, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConvertError(f"{path}: cannot be written, it is there and is no regular file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConvertError(f"{path}: another conversion is writing this file") from None
    except OSError:  # a file system without locks; the name alone must do
        pass
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """True when `path` names the file that is open as `fd`."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _remove(path: Path, fd: int) -> None:
    # After the rename, the temporary name may belong to another run already.
    if _is_at(fd, path):
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


def commit(pending: Iterable[Pending], written: list[Path], *, force: bool) -> None:
    """Make the finished files durable, then give all of them their final names.

    `written` gets every final name that exists, whatever happens after. A signal waits until
    all files have theirs, and only then raises Interrupted.
    """
    items = list(pending)
    for item in items:
        os.fsync(item.fd)
    for item in items:
        if os.path.lexists(item.final) and not force:
            raise ConvertError(f"{item.final}: appeared meanwhile; --force overwrites it")
    with signals_held() as arrived:
        for item in items:
            item.temporary.replace(item.final)
            written.append(item.final)
    if arrived:
        raise Interrupted
    for directory in {item.final.parent for item in items}:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
