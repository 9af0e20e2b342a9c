"""Files appear whole or not at all: interrupts, kills, full disks, and who may overwrite what."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dspine_convert.write import SPARE_BYTES


@pytest.fixture
def slow(tmp_path, kit):
    """A checkpoint of about 200 MB (sparse on disk), so that a signal hits the middle."""
    shape = kit.Shape(hidden=1024, layers=2, ffn=24_000, vocab=96)
    directory = tmp_path / "slow"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(kit.config_of(shape)))
    header, at = {}, 0
    for name, dims in kit.tensor_shapes(shape).items():
        size = 2
        for n in dims:
            size *= n
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return directory, kit.new_target(tmp_path / "slow-target.gguf", shape)


def wait_for_writing(process, out: Path, enough: int = 1 << 20) -> None:
    """Until a temporary file has taken real space."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in out.glob(".*.part") if out.exists() else ():
            if path.stat().st_blocks * 512 > enough:
                return
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    raise AssertionError("nothing was written")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_leaves_nothing(slow, spawn, tmp_path, number):
    source, target = slow
    out = tmp_path / "out"
    process = spawn(source, "--target", target, "-t", "f32", "-o", out, "--threads", 1)
    wait_for_writing(process, out)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted; nothing was left behind" in err
    assert "Traceback" not in err
    assert not out.exists()


def test_kill_leaves_no_final_name(slow, spawn, tmp_path, cli):
    source, target = slow
    out = tmp_path / "out"
    args = (source, "--target", target, "-t", "f32", "-t", "bf16", "-o", out)
    process = spawn(*args, "--threads", 1)
    wait_for_writing(process, out)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    left = sorted(p.name for p in out.iterdir())
    assert left == [".slow-BF16.gguf.part", ".slow-F32.gguf.part"]
    # The next run takes the leftovers over; this one fails at its end, and so removes them.
    assert "all zero" in cli(*args).err
    assert list(out.iterdir()) == []


def test_two_runs_do_not_mix(slow, spawn, tmp_path, cli):
    source, target = slow
    out = tmp_path / "out"
    args = (source, "--target", target, "-t", "f32", "-o", out)
    process = spawn(*args, "--threads", 1)
    try:
        wait_for_writing(process, out)
        os.kill(process.pid, signal.SIGSTOP)
        result = cli(*args)
        assert result.code == 1
        assert "another conversion is writing this file" in result.err
        assert (out / ".slow-F32.gguf.part").exists()
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_file_size_limit(slow, spawn, tmp_path):
    """The kernel refuses in the middle of writing."""
    source, target = slow
    out = tmp_path / "out"
    limit = 5 << 20

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    args = (source, "--target", target, "-o", out)
    process = spawn(*args, preexec_fn=limited)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert "disk full" in err
    assert not out.exists()


def test_disk_fills_in_the_middle(draft, target, cli, tmp_path, monkeypatch):
    real, calls = os.pwrite, []

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr("os.pwrite", pwrite)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "disk full" in result.err
    assert "internal error" not in result.err
    assert not (tmp_path / "o").exists()


def test_free_space_is_checked_first(draft, target, cli, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": SPARE_BYTES})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "disk full" in result.err
    assert "GB free" in result.err
    assert not (tmp_path / "o").exists()


def test_existing_output(draft, target, cli, tmp_path):
    out = tmp_path / "o"
    first = cli(draft.write(), "--target", target, "-o", out)
    path = Path(first.out.strip())
    path.write_text("mine")
    again = cli(draft.directory, "--target", target, "-o", out)
    assert again.code == 1
    assert "exists already; --force overwrites it" in again.err
    assert path.read_text() == "mine"
    assert cli(draft.directory, "--target", target, "-o", out, "--force").code == 0
    assert path.read_bytes()[:4] == b"GGUF"
    assert [p.name for p in out.iterdir()] == [path.name]


def test_one_existing_of_two_stops_both(draft, target, cli, tmp_path):
    out = tmp_path / "o"
    cli(draft.write(), "--target", target, "-t", "bf16", "-o", out)
    result = cli(draft.directory, "--target", target, "-t", "f32", "-t", "bf16", "-o", out)
    assert result.code == 1
    assert [p.name for p in out.iterdir()] == ["tiny-dspine-BF16.gguf"]


def test_output_is_input(draft, kit, cli, tmp_path):
    target = kit.new_target(tmp_path / "tiny-dspine-BF16.gguf")
    before = target.read_bytes()
    result = cli(draft.write(), "--target", target, "-o", tmp_path, "--force")
    assert result.code == 1
    assert "output = input" in result.err
    assert target.read_bytes() == before


def test_output_links_to_the_input(draft, target, cli, tmp_path):
    out = tmp_path / "o"
    out.mkdir()
    (draft.write() / "model.safetensors").exists()
    (out / "tiny-dspine-BF16.gguf").symlink_to(draft.directory / "model.safetensors")
    result = cli(draft.directory, "--target", target, "-o", out, "--force")
    assert result.code == 1
    assert "output = input" in result.err


def test_output_directory_is_a_file(draft, target, cli, tmp_path):
    (tmp_path / "o").write_text("")
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "not a directory" in result.err


def test_failure_keeps_what_was_there(draft, target, cli, tmp_path):
    """With --force, an old file survives a run that fails."""
    out = tmp_path / "o"
    path = Path(cli(draft.write(), "--target", target, "-o", out).out.strip())
    old = path.read_bytes()
    dtype, words = draft.tensors["norm.weight"]
    words = words.copy()
    words[-1] = 0x7FC0
    draft.tensors["norm.weight"] = (dtype, words)
    result = cli(draft.write(), "--target", target, "-o", out, "--force")
    assert result.code == 1
    assert path.read_bytes() == old
    assert [p.name for p in out.iterdir()] == [path.name]


def test_source_shrinks_while_reading(draft, target, cli, tmp_path, monkeypatch):
    real = os.preadv

    def preadv(fd, buffers, offset):
        return 0 if offset > 4000 else real(fd, buffers, offset)

    monkeypatch.setattr("os.preadv", preadv)
    result = cli(draft.write(), "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "truncated while reading" in result.err


def test_a_finished_file_is_not_taken_for_a_temporary_one(draft, kit, target, cli, tmp_path):
    """Another run renames its file between our open and our lock: that file is not ours."""
    import fcntl

    out = tmp_path / "o"
    first = Path(cli(draft.write(), "--target", target, "-o", out).out.strip())
    finished = first.read_bytes()
    part = out / f".{first.name}.part"
    first.rename(part)  # the other run, just before its rename
    real, locked = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not locked:
            part.rename(first)
        locked.append(fd)
        real(fd, operation)

    other = kit.new_draft(tmp_path / "other")
    other.tensors["norm.weight"] = ("F32", np.full(32, 0.5, np.float32))
    args = (other.write(), "--target", target, "-o", out, "--name", "tiny-dspine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcntl.flock", flock)
        result = cli(*args)
    assert result.code == 1
    assert "appeared meanwhile" in result.err
    assert len(locked) == 2
    assert first.read_bytes() == finished
    assert [p.name for p in out.iterdir()] == [first.name]


def test_the_next_runs_temporary_file_stays(draft, target, cli, tmp_path, monkeypatch):
    """After our rename the temporary name may be another run's."""
    import dspine_convert.convert as convert_module

    real = convert_module.commit

    def commit(pending, written, *, force):
        real(pending, written, force=force)
        pending[0].temporary.write_text("the next run's")

    monkeypatch.setattr(convert_module, "commit", commit)
    out = tmp_path / "o"
    assert cli(draft.write(), "--target", target, "-o", out).code == 0
    assert (out / ".tiny-dspine-BF16.gguf.part").read_text() == "the next run's"


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_something_else_in_the_temporary_place(draft, target, cli, tmp_path, kind):
    out = tmp_path / "o"
    out.mkdir()
    part = out / ".tiny-dspine-BF16.gguf.part"
    if kind == "pipe":
        os.mkfifo(part)
    elif kind == "directory":
        part.mkdir()
    else:
        part.symlink_to(tmp_path / "elsewhere")
    result = cli(draft.write(), "--target", target, "-o", out)
    assert result.code == 1
    assert str(part) in result.err
    assert "internal error" not in result.err
    assert os.path.lexists(part)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_between_two_renames(draft, target, cli, tmp_path, monkeypatch, number):
    """All outputs get their names, and the message says that they are there."""
    real, renamed = Path.replace, []

    def replace(self: Path, to: Path) -> Path:
        done = real(self, to)
        renamed.append(to)
        if len(renamed) == 1:
            os.kill(os.getpid(), number)
        return done

    monkeypatch.setattr(Path, "replace", replace)
    out = tmp_path / "o"
    args = ("--target", target, "-t", "f32", "-t", "bf16", "-o", out)
    before = signal.signal(number, lambda *arrived: None)  # a miss must not end the tests
    try:
        result = cli(draft.write(), *args)
    finally:
        signal.signal(number, before)
    assert result.code == 130
    assert "nothing was left behind" not in result.err
    assert f"complete and in place: {out / 'tiny-dspine-F32.gguf'}, " in result.err
    names = ["tiny-dspine-BF16.gguf", "tiny-dspine-F32.gguf"]
    assert sorted(p.name for p in out.iterdir()) == names


def test_second_rename_fails(draft, target, cli, tmp_path, monkeypatch):
    real, renamed = Path.replace, []

    def replace(self: Path, to: Path) -> Path:
        renamed.append(to)
        if len(renamed) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return real(self, to)

    monkeypatch.setattr(Path, "replace", replace)
    out = tmp_path / "o"
    args = ("--target", target, "-t", "f32", "-t", "bf16", "-o", out)
    result = cli(draft.write(), *args)
    assert result.code == 1
    assert "nothing was left behind" not in result.err
    assert f"complete and in place: {out / 'tiny-dspine-F32.gguf'}" in result.err
    assert [p.name for p in out.iterdir()] == ["tiny-dspine-F32.gguf"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_result_cannot_be_printed(draft, target, tmp_path):
    """The files stay, and nothing says otherwise."""
    out = tmp_path / "o"
    command = [sys.executable, "-m", "dspine_convert", draft.write(), "--target", target]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*map(str, command), "-o", str(out), "-q"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    path = out / "tiny-dspine-BF16.gguf"
    assert done.returncode == 1
    assert "nothing was left behind" not in done.stderr
    assert f"standard output: No space left on device; complete and in place: {path}" in done.stderr
    assert path.is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_stderr_is_full(draft, target, tmp_path):
    out = tmp_path / "o"
    command = [sys.executable, "-m", "dspine_convert", draft.write(), "--target", target]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*map(str, command), "-o", str(out)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert Path(done.stdout.strip()).is_file()


def test_dangling_link_as_directory(draft, target, cli, tmp_path):
    (tmp_path / "o").symlink_to("nowhere")
    for directory in (tmp_path / "o", tmp_path / "o" / "below"):
        result = cli(draft.write(), "--target", target, "-o", directory)
        assert result.code == 1
        assert f"{tmp_path / 'o'} is a broken link to nowhere" in result.err
