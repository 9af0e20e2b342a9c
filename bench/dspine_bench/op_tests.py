"""Adds a run of test-ops, or of pytest, to a file: `op_tests OUT NAME CODE SECONDS LOG COMMAND...`.

Exit code 1 where test-ops computed nothing but on the CPU, unless NAME ends with "-cpu", and where
pytest passed nothing.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
KEPT_LINES = 40

# What test-ops prints of each device at its end.
SUMMARY = re.compile(r"(\S+): (\d+) of (\d+) cases equal, (\d+) not supported")
# What pytest prints in its last line.
PASSED = re.compile(r"\b(\d+) passed\b.* in ")


def read_run(name: str, code: int, seconds: int, log: str, command: list[str]) -> dict[str, Any]:
    """One run as it is recorded: devices by name, and the last lines of its output."""
    lines = log.splitlines()
    counts = [found for line in lines if (found := SUMMARY.fullmatch(line))]
    passed = [int(found[1]) for line in lines if (found := PASSED.search(line))]
    return {
        "name": name,
        # of files the names only: folders are those of one machine
        "command": [Path(word).name if "/" in word else word for word in command],
        "exit_code": code,
        "seconds": seconds,
        "devices": {
            c[1]: {"equal": int(c[2]), "cases": int(c[3]), "unsupported": int(c[4])} for c in counts
        },
        "tests_passed": sum(passed),
        "output": lines[-KEPT_LINES:],
    }


def append(path: Path, run: dict[str, Any]) -> None:
    """Write the run behind those that the file already has."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    text = json.dumps({"schema_version": SCHEMA_VERSION, "runs": [*runs, run]}, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    out, name, code, seconds, log, *command = sys.argv[1:] if argv is None else argv
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    run = read_run(name, int(code), int(seconds), text, command)
    append(Path(out), run)
    computed = any(d["equal"] for n, d in run["devices"].items() if n != "CPU")
    if name.endswith("-cpu") or computed or run["tests_passed"]:
        return 0
    sys.stderr.write(f"{name}: no device but the CPU computed anything\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
