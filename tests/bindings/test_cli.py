"""The command line as a whole: help, exit codes, streams, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dspine import __version__
from dspine.cli import main
from dspine_convert.errors import ExitCode
from support.stand_in import run

COMMANDS = ["plan", "inspect", "serve", "chat", "generate", "tune", "doctor"]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_no_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    assert "Usage: dspine" in out
    for name in COMMANDS:
        assert f"\n  {name} " in out, name


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, command, flag)
    assert (code, err) == (0, "")
    assert f"Usage: dspine {command}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, f"dspine {__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("--nonsense",),
        ("serve",),
        ("serve", "-m", "x", "--nonsense"),
        ("serve", "-m", "x", "stray"),
        ("serve", "-m", "x", "-c", "0"),
        ("serve", "-m", "x", "--port", "70000"),
        ("serve", "-m", "x", "--engine", "other"),
        ("serve", "-m", "x", "--cache-type", "q9"),
        ("doctor", "extra"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == ExitCode.USAGE
    assert out == ""
    assert err.startswith("dspine: ") and "--help" in err and err.count("\n") == 1


def test_an_expected_failure_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = call(capsys, "serve", "-m", tmp_path / "absent.gguf")
    assert (code, out) == (1, "")
    assert "absent.gguf" in err and "Traceback" not in err


def _break_doctor(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr("dspine._doctor.examine", broken)


def test_a_bug_is_three(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_doctor(monkeypatch, ZeroDivisionError("oops"))
    code, _, err = call(capsys, "doctor")
    assert code == ExitCode.BUG
    assert "ZeroDivisionError: oops" in err and "Traceback" not in err
    code, _, err = call(capsys, "doctor", "--debug")
    assert code == ExitCode.BUG
    assert "Traceback" in err


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_doctor(monkeypatch, KeyboardInterrupt())
    code, out, err = call(capsys, "doctor")
    assert (code, out) == (ExitCode.INTERRUPTED, "")
    assert err == "dspine: interrupted\n"


def test_errors_are_json_where_results_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _break_doctor(monkeypatch, OSError(5, "Input/output error", "/dev/x"))
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 1
    document = json.loads(out)
    assert document["error"] == "/dev/x: Input/output error"
    assert document["exit_code"] == 1


def test_words_after_the_dashes_are_not_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """--debug and --json of another program change nothing here."""
    path = tmp_path / "absent.gguf"
    code, out, err = call(capsys, "serve", "-m", path, "--", "--debug", "--json")
    assert (code, out) == (1, "")
    assert "Traceback" not in err


def test_help_imports_nothing_slow() -> None:
    """The pages of help come at once."""
    slow = ("huggingface_hub", "matplotlib", "llama_cpp", "httpx", "safetensors")
    code = (
        "import sys; from dspine.cli import main; main(['--help']); "
        f"print([m for m in {slow} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dspine", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "standard output" in done.stderr and "Traceback" not in done.stderr


def test_as_a_module() -> None:
    code, out, err = run("--version")
    assert (code, out, err) == (0, f"dspine {__version__}\n", "")
