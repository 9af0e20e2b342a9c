"""Count what the hooks do to upstream: the less, the easier the next pin.

All patches together may add 150 lines. They may change or remove 10, and each such line is
listed in its patch's header, in backquotes, with the reason after a colon:

    Changed: `if (n > 4) {`: the bound grows with the block size
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HOOKS = Path(__file__).resolve().parent.parent / "native" / "hooks"
ADDED_LIMIT = 150
CHANGED_LIMIT = 10


@dataclass(frozen=True)
class Hook:
    """One patch, as far as it is counted."""

    name: str
    header: str
    added: int
    removed: tuple[str, ...]

    def problems(self) -> list[str]:
        """What the header fails to explain."""
        found = []
        if not self.header.strip():
            found.append(f"{self.name}: no header that says why")
        reasons = dict(re.findall(r"^Changed: `(.+)`:[ ]*(\S.*)$", self.header, re.MULTILINE))
        listed = {" ".join(line.split()) for line in reasons}
        for line in self.removed:
            if " ".join(line.split()) not in listed:
                found.append(f"{self.name}: changes a line that its header does not list: {line}")
        return found


def parse(name: str, text: str) -> Hook:
    """Split a patch into its header and its added and removed lines."""
    start = re.search(r"^(diff --git |--- )", text, re.MULTILINE)
    header = text[: start.start()] if start else text
    added, removed, in_hunk = 0, [], False
    for line in text[len(header) :].splitlines():
        # Only inside a hunk: the file lines also begin with plus and minus signs.
        if line.startswith(("diff --git ", "@@ ")):
            in_hunk = line.startswith("@@ ")
        elif in_hunk and line == "-- ":
            in_hunk = False  # the signature that format-patch appends
        elif in_hunk and line.startswith("+"):
            added += 1
        elif in_hunk and line.startswith("-"):
            removed.append(line[1:].strip())
    return Hook(name, header, added, tuple(removed))


def check(folder: Path) -> tuple[str, list[str]]:
    """Return the totals as one line, and every problem."""
    hooks = [parse(p.name, p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.patch"))]
    added, changed = sum(h.added for h in hooks), sum(len(h.removed) for h in hooks)
    problems = [problem for hook in hooks for problem in hook.problems()]
    if added > ADDED_LIMIT:
        problems.append(f"{added} added lines, {ADDED_LIMIT} allowed")
    if changed > CHANGED_LIMIT:
        problems.append(f"{changed} changed or removed lines, {CHANGED_LIMIT} allowed")
    line = (
        f"{len(hooks)} hooks: {added} of {ADDED_LIMIT} added lines, "
        f"{changed} of {CHANGED_LIMIT} changed or removed"
    )
    return line, problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hooks", type=Path, default=HOOKS)
    line, problems = check(parser.parse_args(argv).hooks)
    sys.stdout.write(f"{line}\n")
    sys.stderr.writelines(f"check_hooks: {problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
