"""`dspine doctor`: findings, advice, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dspine import _doctor
from dspine._doctor import Check, Status, examine, knows_dspine
from dspine.cli import main

OURS = "version: 0.5.0-dev (build 0, commit 0c1e57098-dspine)\n"
USAGE = """--spec-draft-ubatch, -ubd N   physical batch size (default: 128 for DSpine, else as -ub)
--spec-type none,draft-dflash
"""


def script(place: Path, name: str, text: str) -> Path:
    """A shell script that stands for a program."""
    place.mkdir(exist_ok=True)
    path = place / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def server_script(version: str = OURS, usage: str = USAGE, devices: str = "  (none)") -> str:
    return (
        f"case $1 in --version) printf '%s' '{version}';; --help) printf '%s' '{usage}';; "
        f"--list-devices) printf 'Available devices:\\n%s\\n' '{devices}';; esac"
    )


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is both the native build and PATH."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("DSPINE_BIN_DIR", str(place))
    monkeypatch.setenv("PATH", f"{place}:/bin:/usr/bin")
    script(place, "llama-server", server_script())
    script(place, "nvidia-smi", "exit 9")
    return place


def found(name: str) -> list[Check]:
    return [check for check in examine() if check.name == name]


def only(name: str) -> Check:
    (check,) = found(name)
    return check


@pytest.mark.native
def test_the_real_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The build under test is whole: the server is ours, library and package fit together."""
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in ("Python", "packages", "interface version", "the server runs DSpine drafters"):
        assert text in out
    assert "broken" not in out


@pytest.mark.native
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and document["healthy"] is True
    names = {check["name"] for check in document["checks"]}
    assert {"Python", "packages", "library", "llama-server", "DSpine", "disk, here"} <= names
    for check in document["checks"]:
        assert set(check) == {"name", "status", "found", "advice"}
        assert check["status"] in {"ok", "note"}
        assert "\n" not in check["found"]


def test_a_stock_server_is_told(pretended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock = "version: 0.5.0-dev (build 0, commit 0c1e57098)\n"
    script(
        pretended, "llama-server", server_script(version=stock, usage="--spec-type draft-dflash")
    )
    check = only("DSpine")
    assert check.status is Status.BROKEN
    assert "does not know DSpine" in check.found and "DSPINE_BIN_DIR" in check.advice
    assert main(["doctor"]) == 1
    assert "-> it is a stock llama.cpp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "usage", "expected"),
    [
        (OURS, USAGE, True),
        (OURS.replace("-dspine", ""), USAGE, False),
        (OURS, USAGE.replace("--spec-draft-ubatch", "--other"), False),
        (OURS, USAGE.replace("draft-dflash", "draft-simple"), False),
        (OURS, USAGE.replace("for DSpine, ", ""), False),
        ("", "", False),
    ],
)
def test_the_probe(version: str, usage: str, expected: bool) -> None:
    assert knows_dspine(version, usage) is expected


def test_no_server(pretended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pretended / "llama-server").unlink()
    check = only("llama-server")
    assert check.status is Status.BROKEN
    assert str(pretended / "llama-server") in check.found and "make setup" in check.advice
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["healthy"] is False


@pytest.mark.parametrize(
    "text", ["echo cannot open shared object file >&2; exit 127", "kill -9 $$"]
)
def test_a_server_that_does_not_run(text: str, pretended: Path) -> None:
    script(pretended, "llama-server", text)
    check = only("llama-server")
    assert check.status is Status.BROKEN
    assert "--version ends with code" in check.found


def test_a_server_that_hangs(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "PROBE_TIMEOUT_S", 0.3)
    script(pretended, "llama-server", "exec sleep 30")
    assert "no answer after 0.3 s" in only("llama-server").found


def test_a_library_that_is_missing(
    pretended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path))
    check = only("library")
    assert check.status is Status.BROKEN
    assert "no such file" in check.found and check.advice
    (tmp_path / "libdspine.so").write_text("not a library")
    assert only("library").status is Status.BROKEN


def test_devices(pretended: Path) -> None:
    """Devices of the server, and the driver beside them."""
    devices = "  CUDA0: NVIDIA GeForce RTX 3090 (24124 MiB, 23800 MiB free)"
    script(pretended, "llama-server", server_script(devices=devices))
    script(pretended, "nvidia-smi", "echo 'NVIDIA GeForce RTX 3090, 570.1, 24576 MiB, 24000 MiB'")
    assert only("device").found == devices.strip()
    driver = only("NVIDIA driver")
    assert driver.status is Status.OK
    assert driver.found == "NVIDIA GeForce RTX 3090, driver 570.1, 24576 MiB, 24000 MiB free"
    assert found("devices") == []


def test_a_card_that_the_build_does_not_use(pretended: Path) -> None:
    script(pretended, "nvidia-smi", "echo 'NVIDIA GeForce RTX 3090, 570.1, 24576 MiB, 24000 MiB'")
    check = only("devices")
    assert check.status is Status.NOTE
    assert "though there is an NVIDIA card" in check.found and "DSPINE_CUDA=1" in check.advice


def test_a_driver_that_fails(pretended: Path) -> None:
    script(pretended, "nvidia-smi", "echo 'Failed to initialize NVML: Driver mismatch'; exit 18")
    check = only("NVIDIA driver")
    assert check.status is Status.NOTE
    assert "Driver mismatch" in check.found and check.advice
    assert only("devices").status is Status.OK


def test_little_disk(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(100 << 30, 99 << 30, 1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    for name in ("disk, hub cache", "disk, here"):
        check = only(name)
        assert check.status is Status.NOTE
        assert check.found.startswith("1.0 GiB free at ") and "HF_HOME" in check.advice


def test_missing_packages(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "PACKAGES", ("typer", "no-such-package-here"))
    check = only("packages")
    assert check.status is Status.BROKEN
    assert check.advice == "pip install no-such-package-here"


def test_a_check_that_fails_is_a_finding(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _odd() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(_doctor, "GROUPS", (_odd,))
    assert examine() == [
        Check("odd", Status.BROKEN, "ZeroDivisionError: oops", "please report this")
    ]
