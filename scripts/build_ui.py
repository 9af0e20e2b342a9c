"""Build llama.cpp's web UI from the pinned source with npm.

The result is put where upstream's own build looks first, so the next build embeds it. A second
run with the same sources does nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from build_native import locked, say, tree_path
from prepare_upstream import sha256_of


def fingerprint(source: Path) -> str:
    """Hash of the UI's sources, without what is built from them."""
    total = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and name.parts[0] != "dist":
            total.update(f"{name}\0{sha256_of(path)}\0".encode())
    return total.hexdigest()


def npm_build(work: Path, dist: Path) -> None:
    env = {**os.environ, "LLAMA_UI_OUT_DIR": str(dist), "LLAMA_BUILD_NUMBER": "0"}
    for arguments in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        say(f"npm {' '.join(arguments)}")
        subprocess.run(["npm", *arguments], cwd=work, env=env, check=True)
    if not (dist / "index.html").is_file():
        raise FileNotFoundError(f"npm wrote no {dist / 'index.html'}")


def build(tree: Path) -> None:
    """Build in a scratch folder: npm's modules take 700 MB that nobody needs afterwards."""
    source, stamp = tree / "llama.cpp" / "tools" / "ui", tree / "dspine-ui"
    wanted, dist = fingerprint(source), source / "dist"
    if dist.is_dir() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        say("web UI: up to date")
        return
    with tempfile.TemporaryDirectory(dir=tree, prefix="ui-") as folder:
        work = Path(folder) / "ui"
        shutil.copytree(source, work, ignore=shutil.ignore_patterns("dist"))
        npm_build(work, work / "dist")
        shutil.rmtree(dist, ignore_errors=True)
        (work / "dist").rename(dist)
    stamp.write_text(wanted, encoding="utf-8")
    say("web UI built; the next build puts it into llama-server")


def main(arguments: list[str]) -> int:
    if not shutil.which("npm"):
        sys.stderr.write("make ui needs npm, which is not installed; the server works without\n")
        return 1
    if "--check" in arguments:
        return 0
    tree = tree_path()
    try:
        with locked(tree.with_name(f"{tree.name}.lock")):
            build(tree)
    except (subprocess.CalledProcessError, OSError) as exc:
        sys.stderr.write(f"build_ui: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
