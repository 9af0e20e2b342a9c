"""The hook budget, the pre-flight, the repository rules and the Makefile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import build_native
import check_docs
import check_hooks
import check_repository
import preflight
import pytest

ROOT = Path(__file__).resolve().parents[2]

PATCH = """\
Why: the block may be longer.

Changed: `if (n > 4) {`: the bound is the block size

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,4 +1,5 @@
 int a(int n) {
-    if (n > 4) {
+    if (n > dspine_block()) {
+        dspine_call();
         return 1;
     }
"""


def write_hooks(folder: Path, *texts: str) -> Path:
    for number, text in enumerate(texts, 1):
        (folder / f"{number:04}-x.patch").write_text(text)
    return folder


def test_hook_budget_counts_added_and_changed_lines(tmp_path: Path) -> None:
    line, problems = check_hooks.check(write_hooks(tmp_path, PATCH))
    assert line == "1 hooks: 2 of 150 added lines, 1 of 10 changed or removed"
    assert problems == []


def test_changed_line_must_be_listed_with_a_reason(tmp_path: Path) -> None:
    bare = PATCH.replace("the bound is the block size", "")
    _, problems = check_hooks.check(write_hooks(tmp_path, bare))
    assert problems == ["0001-x.patch: changes a line that its header does not list: if (n > 4) {"]


def test_patch_without_header_is_refused(tmp_path: Path) -> None:
    _, problems = check_hooks.check(write_hooks(tmp_path, PATCH[PATCH.index("diff") :]))
    assert "0001-x.patch: no header that says why" in problems


def test_hook_budget_is_over_all_patches(tmp_path: Path) -> None:
    many = PATCH + "".join(f"+    dspine_{i}();\n" for i in range(100))
    _, problems = check_hooks.check(write_hooks(tmp_path, many, many))
    assert "204 added lines, 150 allowed" in problems


def test_hook_budget_limits_changed_lines(tmp_path: Path) -> None:
    many = PATCH + "-    if (n > 4) {\n" * 10
    _, problems = check_hooks.check(write_hooks(tmp_path, many))
    assert problems == ["11 changed or removed lines, 10 allowed"]


def preflight_with_path(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(folder), "HOME": str(folder)}
    command = [sys.executable, str(ROOT / "scripts" / "preflight.py")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def fake_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_preflight_names_everything_at_once(tmp_path: Path) -> None:
    done = preflight_with_path(tmp_path)
    assert done.returncode == 1
    for word in ("a C compiler", "a C++ compiler", "cmake 3.18", "ninja or make", "git"):
        assert word in done.stderr


def test_preflight_accepts_what_it_needs(tmp_path: Path) -> None:
    for name in ("cc", "c++", "ninja", "git"):
        fake_program(tmp_path, name, "exit 0")
    fake_program(tmp_path, "cmake", "echo cmake version 3.25.1")
    done = preflight_with_path(tmp_path)
    # Disk and Python are this machine's; only what the fake programs cover is judged.
    for word in ("compiler", "cmake", "ninja", "git"):
        assert word not in done.stderr


def test_preflight_sees_an_old_cmake_and_a_broken_compiler(tmp_path: Path) -> None:
    fake_program(tmp_path, "cmake", "echo cmake version 3.7.2")
    fake_program(tmp_path, "cc", "echo '<stdin>:1: fatal error: stdlib.h missing' >&2; exit 1")
    done = preflight_with_path(tmp_path)
    assert "cmake 3.18 or newer: found cmake version 3.7.2" in done.stderr
    assert "fatal error: stdlib.h missing" in done.stderr


@pytest.mark.parametrize(
    ("wish", "text"), [("banana", "'banana'"), ("1", "nvcc"), ("0", None), ("", None)]
)
def test_preflight_reads_the_cuda_wish(
    wish: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPINE_CUDA", wish)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = preflight.check_cuda()
    assert (text in problems[0]) if text else not problems


@pytest.mark.parametrize("version", [(3, 9), (3, 14)])
def test_preflight_refuses_other_pythons(version: tuple[int, int]) -> None:
    assert "Python 3.10 to 3.13" in preflight.check_python(version)[0]


def test_preflight_adds_up_needs_on_one_disk(tmp_path: Path) -> None:
    needs = [(tmp_path / "a", 1 << 60), (tmp_path / "b", 1 << 60)]
    problems = preflight.check_disk(needs)
    assert len(problems) == 1
    assert f"{2 * (1 << 30):.1f} GiB free" in problems[0]


def test_repository_rules_find_paths_and_hosts(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    lines = ['x = "/' + 'root/x"', 'y = "/' + 'tmp/y"', "https://py" + "pi.org/z", "tests/tmp/fine"]
    path.write_text("\n".join(lines))
    assert check_repository.problems_in(tmp_path, "a.py") == [
        "a.py:1: a path of one machine",
        "a.py:2: a path of one machine",
        "a.py:3: a registry host",
    ]


def test_repository_rules_limit_size(tmp_path: Path) -> None:
    with (tmp_path / "big.bin").open("wb") as stream:
        stream.truncate(6 << 20)
    assert "6.0 MiB, 5 allowed" in check_repository.problems_in(tmp_path, "big.bin")[0]


def test_subcommands_are_read_from_help() -> None:
    text = "Usage: x\n\nCommands:\n  plan   Show memory.\n  serve  Start.\n\nOther:\n  no\n"
    assert check_docs.subcommands(text) == ["plan", "serve"]


def test_ui_without_npm_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "build_ui.py"), "--check"]
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs npm" in done.stderr


@pytest.mark.parametrize(
    "target", ["help", "setup", "demo", "test", "check", "bench", "ui", "clean"]
)
def test_makefile_target_stands(target: str) -> None:
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_times_follow_content_between_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same content: the recorded time. Other content: new, even if the file is older."""
    record = tmp_path / "record.json"
    for name in ("one", "two"):
        (tmp_path / name / "native").mkdir(parents=True)
        (tmp_path / name / "CMakeLists.txt").write_text("same")
        (tmp_path / name / "native" / "x.cpp").write_text(name)
    monkeypatch.setattr(build_native, "ROOT", tmp_path / "one")
    build_native.settle_times(record)
    same, other = tmp_path / "two" / "CMakeLists.txt", tmp_path / "two" / "native" / "x.cpp"
    os.utime(other, (1, 1))
    monkeypatch.setattr(build_native, "ROOT", tmp_path / "two")
    build_native.settle_times(record)
    first = tmp_path / "one"
    assert same.stat().st_mtime_ns == (first / "CMakeLists.txt").stat().st_mtime_ns
    assert other.stat().st_mtime_ns >= (first / "native" / "x.cpp").stat().st_mtime_ns


def test_checkout_link_is_replaced_but_a_real_folder_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "build"
    build_native.point(link, tmp_path / "a")
    build_native.point(link, tmp_path / "b")
    assert link.readlink() == tmp_path / "b"
    folder = tmp_path / "real"
    folder.mkdir()
    build_native.point(folder, tmp_path / "b")
    assert folder.is_dir() and not folder.is_symlink()
    assert "left alone" in capsys.readouterr().out
