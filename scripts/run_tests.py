"""Run pytest and ctest; both always run, and their closing lines are printed together.

Arguments go to pytest. Exit code 0 only if both passed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stream(command: Sequence[str], folder: Path, closing: re.Pattern[str]) -> tuple[int, str]:
    """Run a program, pass its output on, and return its code and its closing line."""
    last = ""
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            if closing.search(line):
                last = line.strip()
    return process.returncode, last


def main(arguments: Sequence[str]) -> int:
    pytest_closing = re.compile(r"\d+ (passed|failed|error|skipped|deselected).* in |no tests ran")
    ctest_closing = re.compile(r"tests passed, .* out of|No tests were found")
    pytest = [sys.executable, "-m", "pytest", *arguments]
    runs = (
        ("pytest", pytest, ROOT, pytest_closing),
        ("ctest", ["ctest", "--output-on-failure"], ROOT / "build", ctest_closing),
    )
    results = [(name, *stream(command, folder, line)) for name, command, folder, line in runs]
    sys.stdout.write("\n")
    for name, code, last in results:
        sys.stdout.write(f"{last or f'{name} printed no summary'}\n")
        if code:
            sys.stderr.write(f"{name} failed (exit {code})\n")
    return 1 if any(code for _, code, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
