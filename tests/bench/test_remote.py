"""Servers at a URL: what is refused, what is compared, what a result keeps of the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dspine_bench.cli import main
from dspine_bench.endpoints import Remote
from dspine_bench.provenance import environment, provenance, without_secrets
from dspine_bench.schema import ServerReport, load
from support.bench import FakeServer

Pair = tuple[FakeServer, FakeServer]


@pytest.fixture
def pair(fakes: Callable[[], FakeServer]) -> Pair:
    """A plain server and one that drafts."""
    plain, drafting = fakes(), fakes()
    drafting.drafts = True
    return plain, drafting


def run(pair: Pair, out: Path, *words: str, command: str = "tasks") -> int:
    urls = ["--url", pair[1].url, "--url-baseline", pair[0].url]
    return main([command, *urls, "-q", "--repeats", "1", "-n", "8", "-o", str(out), *words])


def result(out: Path, name: str = "tasks") -> ServerReport:
    found = load(out / f"{name}.json")
    assert isinstance(found, ServerReport)
    return found


def test_no_connection_is_used_twice(pair: Pair) -> None:
    """llama-server closes idle connections when it likes; a request may meet the closing."""
    with Remote(pair[0].url + "/v1/") as server:
        for _ in range(3):
            server.get("/props")
        server.post("/tokenize", {"content": "a b"})
    assert pair[0].connections == 4


CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
OTHER = CALL | {"function": {"name": "rm_rf", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("one", "two", "code"),
    [
        ({"tool_calls": [CALL]}, {"tool_calls": [CALL | {"id": "2"}]}, 0),
        ({"tool_calls": [CALL]}, {"tool_calls": [OTHER]}, 1),
        ({"tool_calls": [CALL]}, {}, 1),
        ({"reasoning_content": "a"}, {"reasoning_content": "b"}, 1),
        ({"content": None}, {"content": ""}, 0),
    ],
)
def test_chat_answers_are_compared_whole(
    pair: Pair, tmp_path: Path, one: dict[str, Any], two: dict[str, Any], code: int
) -> None:
    for server, message in zip(pair, (one, two), strict=True):
        server.routes -= {"/apply-template", "/completion"}
        server.message = message
    assert run(pair, tmp_path, "--quick") == code


def test_ids_are_not_compared_with_text(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].gives_ids = False
    assert run(pair, tmp_path, "--quick") == 1
    said = capsys.readouterr().err
    assert "plain: ids, server: text" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--kv", "f16"],
        ["--kv", "q8_0"],
        ["-fa", "off"],
        ["-fa", "on"],
        ["--flag=-t"],
        ["--server", "x"],
        ["-c", "77"],
    ],
)
def test_what_only_an_own_server_follows_is_refused(
    pair: Pair, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pair, tmp_path, *words) == 1
    assert "--url is a server that runs already: no --" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tasks", "replay"])
def test_a_prompt_that_does_not_fit_is_named_before_anything_is_measured(
    pair: Pair, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[0].n_ctx = 12
    assert run(pair, tmp_path, command=command) == 1
    said = capsys.readouterr().err
    assert "expected at most 11" in said and "-c" in said
    assert not any(path == "/completion" for server in pair for path, _ in server.requests)


def test_a_server_that_never_drafts_is_no_drafter(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].drafts = False
    assert run(pair, tmp_path, "--quick", "-n", "8") == 1
    said = capsys.readouterr().err
    assert f"--url {pair[1].url}: no drafted token in 8 answers" in said
    assert not list(tmp_path.iterdir())


def test_a_replay_needs_its_slots(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[0].slots, pair[1].slots = 4, 1
    assert run(pair, tmp_path, "--quick", "-n", "8", command="replay") == 1
    assert f"{pair[1].url} has 1 slots, expected 4: start it with -np 4" in capsys.readouterr().err
    assert run(pair, tmp_path, "--quick", "-n", "8", "-np", "1", command="replay") == 0
    modes = result(tmp_path, "replay").modes
    assert [mode.slots for mode in modes] == [4, 1]
    said = "the modes' slots differ, and ratios with them: plain 4, server 1"
    assert said in capsys.readouterr().err


def test_conversations_at_a_time_are_no_more_than_there_are(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pair, tmp_path, "--quick", "-n", "8", "-np", "500", command="replay") == 0
    report = result(tmp_path, "replay")
    said = f"{report.config.parallel} at a time, not 500: there are no more conversations"
    assert said in capsys.readouterr().err


def test_each_server_has_its_build_and_model(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of them make a ratio that is not the drafter's alone."""
    pair[0].build, pair[1].build = "b1", "b2"
    pair[0].model, pair[1].model = "/a/x.gguf", "/b/y.gguf"
    assert run(pair, tmp_path, "--quick", "-n", "8") == 0
    modes = result(tmp_path).modes
    assert [(mode.build, mode.model) for mode in modes] == [("b1", "x.gguf"), ("b2", "y.gguf")]
    said = capsys.readouterr().err
    page = (tmp_path / "report.html").read_text().replace("&#x27;", "'")
    for line in (
        "builds differ, and ratios with them: plain b1, server b2",
        "models differ, and ratios with them: plain x.gguf, server y.gguf",
    ):
        assert f"dspine-bench: the modes' {line}" in said and line in page
    pair[1].build, pair[1].model = "b1", "/c/x.gguf"
    assert run(pair, tmp_path, "--quick", "-n", "8") == 0
    assert "differ" not in capsys.readouterr().err


def test_every_depth_has_all_its_tokens(pair: Pair, tmp_path: Path) -> None:
    assert run(pair, tmp_path, "--depths", "0", command="depth") == 0
    *_, body = (body for path, body in pair[0].requests if path == "/completion")
    assert body["ignore_eos"] is True


def test_a_depth_whose_answer_is_cut_is_no_result(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pair[1].completion

    def short(body: dict) -> object:
        return answer(body | {"n_predict": 13})

    pair[1].completion = short  # type: ignore[method-assign]
    assert run(pair, tmp_path, "--depths", "0", "-n", "20", command="depth") == 1
    assert "depth-0: an answer of 13 tokens" in capsys.readouterr().err
    assert not (tmp_path / "depth.json").exists()


def test_a_depths_answer_must_fit_too(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[0].n_ctx = 10_000
    assert run(pair, tmp_path, "--depths", "0", "-n", "9999", command="depth") == 1
    assert "expected at most 1 (9999 are for the answer)" in capsys.readouterr().err


def test_secrets_are_kept_out(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [server.url.replace("//", "//me:hidden@") for server in reversed(pair)]
    words = ["--url", urls[0], "--url-baseline", urls[1], "--api-key", "hidden"]
    out = ["-q", "--quick", "--repeats", "1", "-n", "8", "-o", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["dspine-bench", "tasks", *words, *out])
    monkeypatch.setenv("LLAMA_API_KEY", "hidden")
    monkeypatch.setenv("LLAMA_ARG_THREADS", "3")
    assert main(["tasks", *words, *out]) == 0
    for path in tmp_path.iterdir():
        assert "hidden" not in path.read_text(), path.name
    made = result(tmp_path).provenance
    assert made.environment is not None and made.environment["LLAMA_ARG_THREADS"] == "3"
    assert made.command.count("***") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "s=3"],
        ["--api-key=s=3"],
        ["--flag=--api-key", "--flag=s=3"],
        ["--flag", "--api-key", "--flag", "s=3"],
        ["--flag=--api-key=s=3"],
        ["--url", "http://u:s=3@host:1/v1"],
    ],
)
def test_a_secret_in_any_place(words: list[str]) -> None:
    found = without_secrets(["a", *words, "-n", "8"])
    assert "s=3" not in " ".join(found)
    assert (found[0], found[-2:], len(found)) == ("a", ["-n", "8"], 3 + len(words))


def test_the_command_names_files_without_folders() -> None:
    words = ["/home/somebody/bin/dspine-bench", "tasks", "-m", "/home/somebody/t.gguf", "-n", "8"]
    assert provenance("b", words).command == ["dspine-bench", "tasks", "-m", "t.gguf", "-n", "8"]


def test_the_environment_names_files_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_LIB_DIR", "/home/somebody/lib")
    monkeypatch.setenv("DSPINE_FUSED", "0")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    found = environment()
    assert "LLAMA_CPP_LIB_PATH" not in found
    assert (found["DSPINE_LIB_DIR"], found["DSPINE_FUSED"]) == ("lib", "0")
    assert "HOME" not in found
