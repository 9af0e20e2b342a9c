"""The stored depth of a pair: found again, ignored when damaged, never half written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dspine import Engine, InvalidError, _tuned
from support.workshop import Workshop

Q8 = ("q8_0",) * 4  # K and V of target and drafter


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setattr(_tuned, "machine", lambda: "a machine")
    return home


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(b"GGUF" + bytes(3_000_000))
    draft.write_bytes(b"GGUF" + bytes(1000))
    return target, draft


def test_a_stored_depth_is_found(files: tuple[Path, Path], config: Path) -> None:
    assert _tuned.stored_depth(*files, Q8) is None
    path = _tuned.store_depth(*files, 7, "q8_0", tokens_per_second=12.5)
    assert path == config / "dspine" / "depths.json"
    assert _tuned.stored_depth(*files, Q8) == 7
    _tuned.store_depth(*files, 0, "q8_0")
    assert _tuned.stored_depth(*files, Q8) == 0
    assert [p.name for p in path.parent.iterdir()] == ["depths.json"]


def test_it_belongs_to_the_files_and_the_machine(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = files
    _tuned.store_depth(target, draft, 7, "q8_0")
    moved = Path(shutil.copy(target, tmp_path / "renamed.gguf"))
    assert _tuned.stored_depth(moved, draft, Q8) == 7
    assert _tuned.stored_depth(draft, target, Q8) is None
    with moved.open("ab") as stream:
        stream.write(b"\0")
    assert _tuned.stored_depth(moved, draft, Q8) is None
    moved.write_bytes(b"x" + target.read_bytes()[1:])
    assert _tuned.stored_depth(moved, draft, Q8) is None
    assert _tuned.stored_depth(tmp_path / "absent", draft, Q8) is None
    monkeypatch.setattr(_tuned, "machine", lambda: "another machine")
    assert _tuned.stored_depth(target, draft, Q8) is None


def test_it_belongs_to_the_cache_type(files: tuple[Path, Path]) -> None:
    _tuned.store_depth(*files, 7, "q8_0")
    _tuned.store_depth(*files, 3, "f16")
    assert _tuned.stored_depth(*files, Q8) == 7
    assert _tuned.stored_depth(*files, ["f16"] * 4) == 3
    assert _tuned.stored_depth(*files, ["f32"] * 4) is None
    assert _tuned.stored_depth(*files, ["q8_0", "f16", "q8_0", "q8_0"]) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"version": 1, "depths": {}}', '{"version": 2, "depths": 3}', "\xff"],
)
def test_a_damaged_file_is_ignored_with_a_line(
    content: str, files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = _tuned.tuned_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    assert _tuned.stored_depth(*files, Q8) is None
    (line,) = caplog.messages
    assert line.startswith(f"{path}: ignored, ") and "\n" not in line
    _tuned.store_depth(*files, 5, "q8_0")
    assert _tuned.stored_depth(*files, Q8) == 5


def test_a_damaged_file_is_one_line_on_stderr(files: tuple[Path, Path]) -> None:
    """As a program shows it: no category, no line of a source file."""
    path = _tuned.tuned_path()
    path.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from dspine._tuned import stored_depth"
    code += "; stored_depth(*map(Path, sys.argv[1:]), ['q8_0'])"
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, check=True
    )
    assert done.stderr == f"{path}: ignored, it cannot be read: Is a directory\n"


@pytest.mark.parametrize("value", ["7", -1, True, None, 1.5])
def test_a_value_that_is_no_depth_is_ignored(value: object, files: tuple[Path, Path]) -> None:
    path = _tuned.store_depth(*files, 7, "q8_0")
    content = json.loads(path.read_text())
    next(iter(content["depths"].values()))["n_draft"] = value
    path.write_text(json.dumps(content))
    assert _tuned.stored_depth(*files, Q8) is None


def test_a_failed_write_leaves_the_old_file(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _tuned.store_depth(*files, 7, "q8_0")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_tuned.os, "fsync", fail)
    with pytest.raises(OSError, match=r"disk full: '.*/dspine/depths\.json'"):
        _tuned.store_depth(*files, 5, "q8_0")
    assert _tuned.stored_depth(*files, Q8) == 7
    assert [p.name for p in path.parent.iterdir()] == ["depths.json"]
    with pytest.raises(InvalidError, match="depth is -1"):
        _tuned.store_depth(*files, -1, "q8_0")


@pytest.mark.native
def test_the_engine_takes_it(workshop: Workshop) -> None:
    files = workshop.e2e("e2e_qwen3", "f32")
    _tuned.store_depth(*files, 3, "q8_0")
    with Engine(*files, n_ctx=256, threads=1) as engine:
        assert engine.n_draft == 3
        done = engine.generate([1, 2, 3], max_tokens=20)
        assert len(done.stats.drafted_at) == 3
    _tuned.store_depth(*files, 0, "q8_0")  # measured: better without
    with Engine(*files, n_ctx=256, threads=1) as engine:
        assert engine.generate([1, 2, 3], max_tokens=20).stats.drafted == 0
    with Engine(*files, n_ctx=256, threads=1, n_draft=7) as engine:
        assert engine.n_draft == 7
