"""`dspine chat` and `dspine generate` over pipes, and Ctrl-C inside an answer."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dspine import Engine, Round, _chat
from dspine._chat import Chat
from dspine._tuned import store_depth
from dspine_bench.golden_target import text_of
from support.golden import GOLDEN, Run, load_rounds
from support.server import Files

pytestmark = pytest.mark.native

SMALL = ("-c", "1024", "-t", "1", "--cache-type", "f32")
OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "threads": 1,
    "type_k": "f32",
    "type_v": "f32",
    "draft_type_k": "f32",
    "draft_type_v": "f32",
}


@pytest.fixture(scope="module")
def run() -> Run:
    return load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json").runs[0]


@pytest.fixture(scope="module")
def engine(files: Files) -> Iterator[Engine]:
    with Engine(*files, **OPTIONS) as opened:
        yield opened


def _dspine(
    files: Files, command: str, *arguments: str, stdin: str | bytes = ""
) -> subprocess.CompletedProcess[str]:
    pair = ("-m", str(files[0]), "-md", str(files[1]))
    done = subprocess.run(
        [sys.executable, "-m", "dspine", command, *pair, *SMALL, *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=120,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def test_generate(files: Files, run: Run, tmp_path: Any) -> None:
    """From an argument, a file and standard input: the text alone on stdout."""
    prompt, expected = text_of(run.prompt), text_of(run.plain[:20]) + "\n"
    greedy = ("-n", "20", "--temp", "0")
    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    for arguments, stdin in (((prompt,), ""), (("-f", str(file)), ""), ((), prompt)):
        done = _dspine(files, "generate", *greedy, *arguments, stdin=stdin)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
        assert "20 tokens" in done.stderr and "accepted a round" in done.stderr


def test_generate_json(files: Files, run: Run) -> None:
    done = _dspine(files, "generate", text_of(run.prompt), "-n", "20", "--temp", "0", "--json")
    document = json.loads(done.stdout)
    assert document["tokens"] == run.plain[:20] and document["stop_reason"] == "limit"
    stats = document["stats"]
    mean = (stats["accepted"] + stats["rounds"]) / stats["rounds"]
    assert stats["mean_accepted_length"] == mean
    assert len(stats["acceptance_by_position"]) == len(stats["drafted_at"]) == 7
    stopped = _dspine(
        files, "generate", text_of(run.prompt), "--temp", "0", "--stop", "]", "-n", "9", "--json"
    )
    assert json.loads(stopped.stdout)["text"] == f"[{run.plain[0]}"


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "text"),
    [
        ((), "", 1, "the prompt is empty"),
        ((), b"\xff", 1, "standard input: no UTF-8 text at byte 0"),
        (("x", "-f", "y"), "", 2, "not both"),
        (("-f", "/no/such/file"), "", 1, "/no/such/file"),
        (("x", "-n", "0"), "", 2, "-n"),
        (("x", "--temp", "-1"), "", 2, "--temp"),
        (("x", "--frequency"), "", 2, "--frequency"),
        (("x", "--cache-type", "q9"), "", 1, "q9"),
        (("[1]" * 2000,), "", 1, "does not fit a context of 1024"),
    ],
)
def test_generate_refuses(
    arguments: tuple[str, ...], stdin: str | bytes, code: int, text: str, files: Files
) -> None:
    done = _dspine(files, "generate", *arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_piped_conversation(files: Files, engine: Engine, run: Run) -> None:
    """The second answer continues the first; after /clear nothing is left of it."""
    first, second = text_of(run.prompt), "[7][8]"
    lines = f"{first}\n\n{second}\n/stats\n/nonsense\n/clear\n{second}\n/exit\n{first}\n"
    done = _dspine(files, "chat", "-n", "12", "--temp", "0", stdin=lines)
    assert done.returncode == 0, done.stderr
    greedy: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    one = engine.generate(first, **greedy).text
    two = engine.generate(first + one + second, **greedy).text
    three = engine.generate(second, **greedy).text
    assert done.stdout.splitlines() == [one, two, three]
    for text in ("mean accepted length", "by position", "unknown command /nonsense", "(a new"):
        assert text in done.stderr
    ended = _dspine(files, "chat", "-n", "12", "--temp", "0", stdin=first)  # no newline, no /exit
    assert (ended.returncode, ended.stdout.splitlines()) == (0, [one])


def test_a_message_that_does_not_fit_is_refused(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(engine, {"max_tokens": 4, "temperature": 0})
    chat.run(io.StringIO("[1]" * 600 + "\n[2]\n"))
    out, err = capsys.readouterr()
    assert "does not fit a context of 512" in err and "/clear" in err
    assert out.strip() == engine.generate("[2]", max_tokens=4, temperature=0).text


def test_a_message_of_other_bytes_is_refused(files: Files) -> None:
    """The next one is answered; the exit code tells a script that one was not."""
    done = _dspine(files, "chat", "-n", "4", "--temp", "0", stdin=b"[1]\xff\xfe\n[2]\n")
    assert done.returncode == 1
    assert "no UTF-8 text at byte 3 of this message" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_a_pair_that_was_tuned_to_plain_decoding_says_so(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store_depth(*files, 0, "f32")
    done = _dspine(files, "generate", "[1]", "-n", "4", "--temp", "0")
    assert "not drafting: dspine tune" in done.stderr and "--n-draft" in done.stderr
    asked = _dspine(files, "generate", "[1]", "-n", "4", "--temp", "0", "--n-draft", "3")
    assert "not drafting" not in asked.stderr


def test_a_full_context_is_named(files: Files) -> None:
    done = _dspine(files, "generate", "[1]", "-c", "64", "--temp", "0")
    assert "a context of 256, not 64" in done.stderr
    assert "255 tokens, the context is full" in done.stderr


class Interrupting:
    """A policy that presses Ctrl-C after some rounds."""

    def __init__(self) -> None:
        self.left = 2

    def next_depth(self) -> int:
        return 2

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_answer_not_the_program(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    policy = Interrupting()
    with Engine(*files, **OPTIONS, n_draft=policy) as engine:
        chat = Chat(engine, {"max_tokens": 60, "temperature": 0})
        chat.run(io.StringIO("[1][2]\n[3]\n"))
        cut, whole = capsys.readouterr().out.splitlines()
        expected = engine.generate("[1][2]", max_tokens=60, temperature=0).text
        assert expected.startswith(cut) and 0 < len(cut) < len(expected)
        again = engine.generate("[1][2]" + cut + "[3]", max_tokens=60, temperature=0)
        assert whole == again.text
    assert signal.getsignal(signal.SIGINT) is before


def test_the_status_is_for_terminals(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal whole lines stay and the status goes; a pipe gets the text alone."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with _chat.shown() as show:
        show("one\ntw", "12.0 tok/s")
        show("o", "13.0 tok/s")
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "tok/s" not in line] == ["one", "two"]
