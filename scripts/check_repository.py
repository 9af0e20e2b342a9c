"""Rules for what is committed: no big files, no path of one machine, no registry host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZE_LIMIT = 5 << 20
BIG_FILES_ALLOWED = ("tests/golden/", "bench/demo_pair/checkpoint/")

# Package clients know their registries; a host written here would bind the project to one.
RULES = {
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:work|root)/|(?<![\w.~-])/tmp/\w"),
    "a registry host": re.compile(
        r"\b(?:pythonhosted|pypi|npmjs|(?:deb|security)\.debian|proxy\.golang)\.(?:org|com)\b"
    ),
}


def tracked(root: Path) -> list[str]:
    """Files that git tracks or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sorted(name for name in set(listing.stdout.split("\0")) if (root / name).is_file())


def problems_in(root: Path, name: str) -> list[str]:
    path = root / name
    size = path.stat().st_size
    if size > SIZE_LIMIT and not name.startswith(BIG_FILES_ALLOWED):
        return [f"{name}: {size / (1 << 20):.1f} MiB, {SIZE_LIMIT >> 20} allowed"]
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return []
    found = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        found += [f"{name}:{number}: {what}" for what, rule in RULES.items() if rule.search(line)]
    return found


def main() -> int:
    names = [name for name in tracked(ROOT) if name]
    problems = [problem for name in names for problem in problems_in(ROOT, name)]
    sys.stderr.writelines(f"check_repository: {problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
