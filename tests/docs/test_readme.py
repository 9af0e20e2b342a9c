"""What the README tells a person to type exists: targets, programs, flags, files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.native_build import program

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Every command of the README's bash blocks, as words; `a && b` counts as two."""
    lines: list[str] = []
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    found: list[list[str]] = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            at = words.index("&&")
            found.append(words[:at])
            words = words[at + 1 :]
        if words:
            found.append(words)
    return found


def flags(words: list[str]) -> set[str]:
    return {w for w in words if w.startswith("-") and not w.lstrip("-").isdigit()}


def of(name: str) -> list[list[str]]:
    chosen = [c for c in commands() if Path(c[0]).name == name]
    assert chosen, f"the README no longer shows {name}"
    return chosen


def test_every_command_is_known() -> None:
    known = {"make", "source", "dspine-convert", "dspine", "dspine-bench", "llama-server", "curl"}
    assert {Path(c[0]).name for c in commands()} <= known


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in of("make"):
        assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), command


def test_converter_flags_exist() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "dspine_convert", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout
    for command in of("dspine-convert"):
        assert all(re.search(rf"{re.escape(f)}\b", page) for f in flags(command)), command


@pytest.mark.parametrize("command", [*of("dspine"), *of("dspine-bench")], ids=" ".join)
def test_dspine_flags_exist(command: list[str]) -> None:
    module = command[0].replace("-", "_")
    page = subprocess.run(
        [sys.executable, "-m", module, command[1], "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout
    assert all(re.search(rf"(?<![\w-]){re.escape(f)}\b", page) for f in flags(command))


@pytest.mark.native
def test_server_flags_exist() -> None:
    page = subprocess.run(
        [program("llama-server"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    offered = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", page))
    for command in of("llama-server"):
        assert flags(command) <= offered


def test_request_is_json() -> None:
    for command in of("curl"):
        body = json.loads(command[command.index("-d") + 1])
        assert body["messages"][0]["role"] == "user"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
