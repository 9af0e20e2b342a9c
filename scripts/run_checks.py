"""Run every check that needs no native build; all run, and the failing ones are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The packages of the checkout, which nothing has installed when only the tools stand.
PACKAGES = os.pathsep.join(str(ROOT / name) for name in ("converter", "bindings", "bench"))

CHECKS = {
    "style": ("-m", "ruff", "check", "."),
    "format": ("-m", "ruff", "format", "--check", "."),
    "types": ("-m", "mypy"),
    "hook budget": ("scripts/check_hooks.py",),
    "generated docs": ("scripts/check_docs.py",),
    "README figures": ("bench/dspine_bench/figures.py", "--check"),
    "demo pair README": ("-m", "demo_pair.report", "--check"),
    "repository rules": ("scripts/check_repository.py",),
}


def main() -> int:
    failed = []
    for name, arguments in CHECKS.items():
        sys.stdout.write(f"[check] {name}\n")
        sys.stdout.flush()
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": PACKAGES}
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    sys.stdout.write(f"[check] failed: {', '.join(failed)}\n" if failed else "[check] all passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
