"""Compare docs/cli.md with what the programs' --help prints; --write makes it anew."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cli.md"
PACKAGES = ("converter", "bindings", "bench")

# Plain text of a fixed width, whatever the terminal and the versions of the help's painters.
PLAIN = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "TERM": "dumb", "NO_COLOR": "1"}
PLAIN |= {"TYPER_USE_RICH": "0", "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in PACKAGES)}

RUNNER = (
    "import sys; from {module} import {function} as run; sys.argv[0] = {name!r}; sys.exit(run())"
)


def programs() -> dict[str, tuple[str, str]]:
    """Console scripts of pyproject.toml whose package stands: name -> module, function."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.search(r"^\[project\.scripts\]\n((?:[^\[\n].*\n|\n)*)", text, re.MULTILINE)
    found = re.findall(r'^([\w-]+) = "([\w.]+):(\w+)"', table[1] if table else "", re.MULTILINE)
    return {
        name: (module, function)
        for name, module, function in found
        if any((ROOT / p / f"{module.replace('.', '/')}.py").is_file() for p in PACKAGES)
    }


def help_text(name: str, module: str, function: str, *command: str) -> str:
    """Return `name command --help`, run from the checkout and not from what is installed."""
    code = RUNNER.format(name=name, module=module, function=function)
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        cwd=ROOT,
        env={**os.environ, **PLAIN},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} {' '.join(command)} --help failed:\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def subcommands(text: str) -> list[str]:
    """Names listed under `Commands:`."""
    listed = re.search(r"^Commands:\n((?:  .*\n?)*)", text, re.MULTILINE)
    return re.findall(r"^  ([\w-]+)", listed[1], re.MULTILINE) if listed else []


def render() -> str:
    parts = ["# Command line", "", "Made from `--help` by `scripts/check_docs.py --write`."]
    for name, where in programs().items():
        pages = [("", help_text(name, *where))]
        pages += [(sub, help_text(name, *where, sub)) for sub in subcommands(pages[0][1])]
        for sub, text in pages:
            parts += ["", f"## `{f'{name} {sub}'.strip()}`", "", "```text", text, "```"]
    return "\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    if not programs():
        sys.stdout.write("no program stands yet, nothing to document\n")
        return 0
    try:
        wanted = render()
    except RuntimeError as exc:
        sys.stderr.write(f"check_docs: {exc}\n")
        return 1
    if args.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    found = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if found == wanted:
        return 0
    name = PAGE.relative_to(ROOT)
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), str(name), "--help")
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.write(f"check_docs: {name} is out of date; run scripts/check_docs.py --write\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
