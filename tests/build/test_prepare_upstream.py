"""prepare_upstream.py on a tiny archive: no network, no compiler."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import prepare_upstream as prep
import pytest

FILES = {
    "CMakeLists.txt": "project(tiny)\n",
    "src/a.cpp": "int a() {\n    return 1;\n}\n",
    "src/b.cpp": "int b() {\n    return 2;\n}\n",
    "docs/skipped.md": "not needed\n",
}

HOOK = """\
Why: a call into our code.

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,3 +1,4 @@
 int a() {
+    dspine_call();
     return 1;
 }
"""

BAD_HOOK = HOOK.replace("     return 1;", "     return 7;")


@dataclass
class Bench:
    """A pin, its archive in a cache, a folder of hooks and a build folder."""

    root: Path

    @property
    def pin(self) -> Path:
        return self.root / "pin.json"

    @property
    def hooks(self) -> Path:
        return self.root / "hooks"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def final(self) -> Path:
        return self.build / "llama.cpp"

    def pack(self, members: dict[str, str], kind: bytes = tarfile.REGTYPE) -> None:
        archive = self.root / "cache" / "tiny-1.tar.gz"
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:gz") as tar:
            for name, text in members.items():
                info = tarfile.TarInfo(name)
                info.type, info.size = kind, len(text) if kind == tarfile.REGTYPE else 0
                info.linkname = "" if kind == tarfile.REGTYPE else "../../../outside"
                tar.addfile(info, io.BytesIO(text.encode()))
        facts = {"package": "tiny", "version": "1", "archive": archive.name}
        facts |= {"sha256": prep.sha256_of(archive), "vendored": "vendor/llama.cpp"}
        self.pin.write_text(json.dumps({**facts, "llama_cpp_commit": "abc"}))

    def hook(self, name: str, text: str) -> None:
        (self.hooks / name).write_text(text)

    def prepare(self, checkout: Path | None = None) -> str:
        return prep.prepare(
            self.build,
            pin_file=self.pin,
            hooks=self.hooks,
            cache=self.root / "cache",
            checkout=checkout,
        )

    def contents(self) -> dict[str, str]:
        paths = (path for path in self.final.rglob("*") if path.is_file())
        return {path.relative_to(self.final).as_posix(): path.read_text() for path in paths}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.hooks.mkdir()
    made.pack({f"tiny-1/vendor/llama.cpp/{name}": text for name, text in FILES.items()})
    return made


def test_unpacks_only_the_vendored_tree_and_applies_hooks(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    found = bench.contents()
    assert set(found) == {"CMakeLists.txt", "src/a.cpp", "src/b.cpp"}
    assert "dspine_call();" in found["src/a.cpp"]


def test_second_run_does_nothing(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    (bench.root / "cache" / "tiny-1.tar.gz").unlink()  # so any work would fail
    assert "up to date" in bench.prepare()


def test_changed_hook_rewrites_only_the_files_it_touches(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    before = {path: path.stat().st_mtime_ns for path in bench.final.rglob("*.*")}
    bench.hook("0001-call.patch", HOOK.replace("dspine_call", "dspine_other"))
    assert "1 files written, 0 deleted" in bench.prepare()
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert [path.name for path in changed] == ["a.cpp"]


def test_withdrawn_hook_leaves_upstream_as_it_was(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    (bench.hooks / "0001-call.patch").unlink()
    bench.prepare()
    assert bench.contents()["src/a.cpp"] == FILES["src/a.cpp"]


def test_file_gone_from_upstream_is_deleted_but_the_built_ui_is_kept(bench: Bench) -> None:
    bench.prepare()
    (bench.final / "old").mkdir()
    (bench.final / "old" / "gone.cpp").write_text("x")
    ui = bench.final / "tools" / "ui" / "dist" / "index.html"
    ui.parent.mkdir(parents=True)
    ui.write_text("ui")
    bench.hook("0001-call.patch", HOOK)
    assert "1 deleted" in bench.prepare()
    assert not (bench.final / "old").exists()
    assert ui.read_text() == "ui"


def test_one_failing_hook_leaves_nothing_of_the_others(bench: Bench) -> None:
    bench.prepare()
    bench.hook("0001-call.patch", HOOK)
    bench.hook("0002-bad.patch", BAD_HOOK)
    with pytest.raises(
        prep.PrepareError, match=r"0002-bad\.patch does not apply to the pin tiny 1"
    ):
        bench.prepare()
    assert bench.contents()["src/a.cpp"] == FILES["src/a.cpp"]
    assert not list(bench.build.glob("staging-*"))


def test_hooks_apply_inside_another_repository(bench: Bench) -> None:
    """Without the ceiling `git apply` skips every file here, and exits 0."""
    subprocess.run(["git", "init", "--quiet"], cwd=bench.root, check=True)
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    assert "dspine_call();" in bench.contents()["src/a.cpp"]


def test_hooks_apply_under_a_git_hooks_environment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=bench.root, check=True)
    monkeypatch.setenv("GIT_DIR", str(bench.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(bench.root))
    bench.hook("0001-call.patch", HOOK)
    bench.prepare()
    assert "dspine_call();" in bench.contents()["src/a.cpp"]


def test_a_hook_that_leaves_no_marker_is_refused(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK.replace("dspine_call", "other_call"))
    with pytest.raises(prep.PrepareError, match=r"left no 'dspine' in src/a\.cpp"):
        bench.prepare()
    assert not bench.final.exists()


def test_wrong_hash_is_named_with_the_pin(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads(bench.pin.read_text())
    bench.pin.write_text(json.dumps({**facts, "sha256": "0" * 64}))
    wrong = (bench.root / "cache" / "tiny-1.tar.gz").read_bytes()

    def download(pin: prep.Pin, into: Path) -> Path:
        (into / pin.archive).write_bytes(wrong)
        return into / pin.archive

    monkeypatch.setattr(prep, "download", download)
    with pytest.raises(prep.PrepareError, match=r"pin tiny 1 .*(?s:.*)expected SHA-256 0000"):
        bench.prepare()
    assert not bench.final.exists()


def test_damaged_cache_is_downloaded_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = bench.root / "cache" / "tiny-1.tar.gz"
    good = archive.read_bytes()
    archive.write_bytes(good[:100])

    def download(pin: prep.Pin, into: Path) -> Path:
        (into / pin.archive).write_bytes(good)
        return into / pin.archive

    monkeypatch.setattr(prep, "download", download)
    bench.prepare()
    assert archive.read_bytes() == good


@pytest.mark.parametrize("name", ["tiny-1/vendor/llama.cpp/../../../evil", "/evil", "../evil"])
def test_member_that_leaves_the_folder_is_refused(bench: Bench, name: str) -> None:
    bench.pack({name: "x"})
    with pytest.raises(prep.PrepareError, match="unsafe member"):
        bench.prepare()
    assert not list(bench.root.rglob("evil"))


def test_link_member_is_refused(bench: Bench) -> None:
    bench.pack({"tiny-1/vendor/llama.cpp/link": ""}, kind=tarfile.SYMTYPE)
    with pytest.raises(prep.PrepareError, match="no file"):
        bench.prepare()


def test_archive_without_llama_cpp_is_refused(bench: Bench) -> None:
    bench.pack({"tiny-1/README.md": "x"})
    with pytest.raises(prep.PrepareError, match=r"holds no vendor/llama\.cpp"):
        bench.prepare()


def test_local_checkout_is_copied_and_not_changed(bench: Bench) -> None:
    checkout = bench.root / "mine"
    for name, text in {**FILES, "ggml/CMakeLists.txt": "x\n", "build/junk": "x"}.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    bench.hook("0001-call.patch", HOOK)
    bench.prepare(checkout)
    assert "dspine_call();" in bench.contents()["src/a.cpp"]
    assert not (bench.final / "build").exists()
    assert (checkout / "src" / "a.cpp").read_text() == FILES["src/a.cpp"]
    (checkout / "src" / "b.cpp").write_text("int b();\n")
    bench.prepare(checkout)
    assert bench.contents()["src/b.cpp"] == "int b();\n"


def test_what_is_no_checkout_is_refused(bench: Bench) -> None:
    with pytest.raises(prep.PrepareError, match=r"no llama\.cpp checkout"):
        bench.prepare(bench.root / "hooks")


def test_runs_at_once_do_not_collide(bench: Bench) -> None:
    bench.hook("0001-call.patch", HOOK)
    lines: list[str] = []
    threads = [threading.Thread(target=lambda: lines.append(bench.prepare())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("up to date" in line for line in lines) == [False] + [True] * 5


def test_command_line_says_what_failed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.hook("0001-bad.patch", BAD_HOOK)
    paths = {"--build-dir": bench.build, "--pin": bench.pin, "--hooks": bench.hooks}
    paths["--cache"] = bench.root / "cache"
    argv = [str(part) for pair in paths.items() for part in pair]
    assert prep.main(argv) == 1
    assert "0001-bad.patch does not apply to the pin tiny 1" in capsys.readouterr().err
