"""The command line on servers that answer by rule: what is asked, in which order, what is kept."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dspine_bench import request
from dspine_bench.cli import main
from dspine_bench.endpoints import Endpoint, grown, positions_of
from dspine_bench.errors import BenchError
from dspine_bench.golden_bench import write_pair
from dspine_bench.prompts import Conversation
from dspine_bench.request import Flags, longest, modes_of, settings_of
from dspine_bench.schema import ServerReport, load
from support.bench import FakeServer
from support.golden import GOLDEN

Make = Callable[[], FakeServer]
Pair = tuple[FakeServer, FakeServer]


@pytest.fixture
def pair(fakes: Make) -> Pair:
    """A plain server and one with a drafter that is twice as fast."""
    plain, drafting = fakes(), fakes()
    drafting.drafts, drafting.ms_per_token = True, 1.0
    return plain, drafting


def run(pair: Pair, out: Path, *words: str, command: str = "tasks") -> int:
    urls = ["--url", pair[1].url, "--url-baseline", pair[0].url]
    return main([command, *urls, "-q", "-o", str(out), *words])


def result(out: Path, name: str = "tasks") -> ServerReport:
    found = load(out / f"{name}.json")
    assert isinstance(found, ServerReport)
    return found


def completions(server: FakeServer) -> list[dict]:
    return [body for path, body in server.requests if path == "/completion"]


def test_tasks(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pair, tmp_path, "--quick", "-n", "20") == 0
    report = result(tmp_path)
    rows = {(r.mode, r.category): r for r in report.summary}
    row = rows["server", "all"]
    assert row.ratio is not None and row.ratio.median == pytest.approx(2.0)
    assert (row.prompts, row.tokens, row.accepted) == (8, 8 * 5 * 20, 8 * 5 * 10)
    # what the counters of /metrics grew by, over all rounds
    assert row.accepted_by_position == pytest.approx([5 / 9, 5 / 9])
    assert rows["plain", "all"].accepted_by_position is None
    assert report.provenance.pin == "abcdef012" and report.models == []
    assert {s.compared for s in report.samples} == {"ids"}
    shown = capsys.readouterr().out
    assert "2.00 (2.00-2.00)" in shown and (tmp_path / "report.html").is_file()


def test_order_and_fairness(pair: Pair, tmp_path: Path) -> None:
    """Both servers get the same requests; every repeat asks all of them; the warm-up is dropped."""
    assert run(pair, tmp_path, "--quick", "-n", "20", "--warmup", "2") == 0
    plain, drafting = (completions(server) for server in pair)
    assert plain == drafting
    assert len(plain) == 2 + 8 * 5
    assert all(body["cache_prompt"] is False and body["temperature"] == 0 for body in plain)
    report = result(tmp_path)
    assert len(report.samples) == 2 * 8 * 5
    order = [(s.repeat, s.prompt, s.mode) for s in report.samples]
    for first, second in zip(order[::2], order[1::2], strict=True):
        assert first[:2] == second[:2] and first[2] != second[2], "the modes take turns"
    assert {mode for _, _, mode in order[::2]} == {"plain", "server"}, "neither is always first"


def test_other_text_fails(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair[1].shift = 1
    assert run(pair, tmp_path, "--quick", "-n", "20") == 1
    report = result(tmp_path)
    row = next(r for r in report.summary if (r.mode, r.category) == ("server", "all"))
    assert len(row.differing) == 8 and row.speed is None and row.ratio is None
    captured = capsys.readouterr()
    assert "not reported" in captured.out and "8 of 8 differ" in captured.out
    assert "differ from plain decoding" in captured.err
    assert run(pair, tmp_path, "--quick", "-n", "20", "--temperature", "1") == 0


@pytest.mark.parametrize("command", ["tasks", "replay"])
@pytest.mark.parametrize("whole", [0, 2])
def test_an_interrupt_keeps_whole_repeats(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, whole: int
) -> None:
    """In a file of its own: an earlier result stays."""
    assert run(pair, tmp_path, "--quick", "-n", "8", command=command) == 0
    asked = len(completions(pair[1])) - 1  # in five repeats; the warm-up is one more
    before = result(tmp_path, command)
    answer, calls = pair[1].completion, itertools.count()

    def interrupting(body: dict) -> object:
        if next(calls) == 1 + whole * asked // 5 + 2:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(body)

    pair[1].completion = interrupting  # type: ignore[method-assign]
    capsys.readouterr()
    assert run(pair, tmp_path, "--quick", "-n", "8", command=command) == 130
    assert result(tmp_path, command) == before
    kept, err = tmp_path / f"{command}-interrupted.json", capsys.readouterr().err
    said = [line for line in err.splitlines() if "interrupted" in line]
    assert kept.is_file() == bool(whole)
    if not whole:
        assert said == ["dspine-bench: interrupted"]
        return
    assert said == [f"dspine-bench: interrupted: 2 of 5 repeats are in {kept}"]
    found = load(kept)
    assert isinstance(found, ServerReport) and found.config.repeats == 2
    assert len(found.samples) * 5 == len(before.samples) * 2
    assert len(found.replays) * 5 == len(before.replays) * 2


def test_an_interrupt_that_cannot_keep_is_one_still(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, answer = itertools.count(), pair[1].completion

    def interrupting(body: dict) -> object:
        if next(calls) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return answer(body)

    def full(report: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    pair[1].completion = interrupting  # type: ignore[method-assign]
    monkeypatch.setattr(request, "save", full)
    assert run(pair, tmp_path, "--quick", "-n", "8") == 130
    assert "tasks-interrupted.json: No space left on device" in capsys.readouterr().err


def test_a_seed_for_every_repeat(pair: Pair, tmp_path: Path) -> None:
    assert run(pair, tmp_path, "--quick", "-n", "8", "--temperature", "0.8") == 0
    seeds = [body.get("seed") for body in completions(pair[0])[1:]]
    assert len(set(seeds)) == 5 and None not in seeds


def test_thinking(pair: Pair, tmp_path: Path) -> None:
    assert run(pair, tmp_path, "--quick", "-n", "8", "--thinking", "on") == 1
    for server in pair:
        server.template_thinks = True
    assert run(pair, tmp_path, "--quick", "-n", "8", "--thinking", "both") == 0
    names = {r.category for r in result(tmp_path).summary}
    assert {"chat", "chat, thinking"} <= names
    prompts = {body["prompt"] for body in completions(pair[1])}
    assert any(p.endswith("<think>") for p in prompts) and not all("<think>" in p for p in prompts)


def test_a_server_without_templates(pair: Pair, tmp_path: Path) -> None:
    """Any OpenAI-compatible server: texts are compared, and there may be no counters."""
    for server in pair:
        server.routes -= {"/apply-template", "/metrics", "/completion", "/props"}
    assert run(pair, tmp_path, "--quick", "-n", "8") == 0
    report = result(tmp_path)
    assert {s.compared for s in report.samples} == {"text"}
    assert all(r.accepted_by_position is None for r in report.summary)
    assert all(r.ratio is not None for r in report.summary)


def test_replay(pair: Pair, tmp_path: Path) -> None:
    assert run(pair, tmp_path, "-n", "8", "-np", "3", "--repeats", "2", command="replay") == 0
    report = result(tmp_path, "replay")
    assert len(report.replays) == 4 and report.config.parallel == 3
    assert {r.requests for r in report.replays} == {41}
    assert all(s.first_token_ms is not None and s.accepted_at is None for s in report.samples)
    row = next(r for r in report.summary if r.mode == "server")
    assert row.latency_ms is not None and row.first_token_ms is not None
    assert len({s.prompt for s in report.samples}) == 41
    body = completions(pair[0])[-1]
    assert body["cache_prompt"] is True and body["stream"] is True


def test_depth(pair: Pair, tmp_path: Path) -> None:
    assert run(pair, tmp_path, "-n", "8", "--depths", "0,300", command="depth") == 0
    lengths = sorted({len(body["prompt"].split()) for body in completions(pair[0])[1:]})
    assert len(lengths) == 2 and lengths[0] < 60
    # the fake server's tokens are words; the text ends within a paragraph of what was asked
    assert abs(lengths[1] - lengths[0] - 300) < 60
    assert {r.category for r in result(tmp_path, "depth").summary} == {"0", "300", "all"}


def test_json(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pair, tmp_path, "--quick", "-n", "8", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "tasks.json").read_text())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["tasks"], 1, "--target and --drafter, or --url"),
        (["tasks", "--url", "http://a:1"], 1, "--url-baseline"),
        (["tasks", "-m", "absent.gguf", "-md", "b.gguf"], 1, "absent.gguf: no such file"),
        (["tasks", "--url", "ftp://a", "--url-baseline", "http://b:1"], 1, "ftp://a"),
        (["tasks", "--url", "http://127.0.0.1:1", "--url-baseline", "http://127.0.0.1:1"], 1, "1"),
        (["tasks", "--sweep", "n-draft=0"], 1, "--target"),
        (["tasks", "--url", "http://a:99999", "--url-baseline", "http://b:1"], 1, "a:99999: exp"),
        (["tasks", "--repeats", "0"], 2, "--repeats"),
        (["tasks", "-fa", "maybe"], 2, "on, off or auto"),
        (["tasks", "-o", __file__], 1, "is no folder"),
        (["all", "-o", f"{__file__}/x"], 1, "is no folder"),
        (["draft", "-o", __file__], 1, "is no folder"),
        (["record", "-o", __file__], 1, "is no folder"),
        (["record", "everything"], 1, "everything: no part of record"),
        (["convert", "run", "--quantize", "absent"], 1, "--quantize absent: no such file"),
        (["tasks", "--interleave", "never"], 2, "interleave"),
        (["depth", "--depths", "a"], 2, "--depths"),
        (["draft", "--shape", "huge"], 1, "small, mid, medium, 27b"),
        (["draft", "--type", "q1"], 1, "q8_0"),
        (["nothing"], 2, "nothing"),
        (["compare", "absent.json", "absent.json"], 1, "absent.json"),
        (["report"], 1, "bench-out"),
        (["all", "-m", "a.gguf"], 1, "belong together"),
    ],
)
def test_errors(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name in ("tasks", "depth", "replay", "draft", "convert", "compare", "table", "report"):
        assert name in shown


def test_counters() -> None:
    assert positions_of("nothing of the kind") == []
    text = (
        "# HELP llamacpp:spec_decode_num_accepted_tokens_per_pos_total x\n"
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4\n'
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9\n'
    )
    assert positions_of(text) == [9, 4]
    assert grown([9], [10, 3]) == [1, 3] and grown([], [2]) == [2]


def test_a_baseline_that_wobbles_hides_no_wrong_text(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, drafting = pair
    answer, calls = plain.completion, itertools.count()

    def wobble(body: dict) -> object:
        plain.shift = next(calls) % 2
        return answer(body)

    plain.completion = wobble  # type: ignore[method-assign, assignment]
    drafting.shift = 50
    words = ["--prompts", str(one_prompt(tmp_path)), "-n", "8", "--warmup", "0"]
    assert run(pair, tmp_path / "out", *words) == 1
    assert "1 of 1 differ" in capsys.readouterr().out
    drafting.shift = 0
    assert run(pair, tmp_path / "out", *words) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "not compared" in shown and "(1 of 1 unstable)" in shown and "2.00" not in shown


def one_prompt(folder: Path) -> Path:
    path = folder / "mine.jsonl"
    talk = {"id": "a", "category": "b", "messages": [{"role": "user", "content": "a"}]}
    path.write_text(json.dumps(talk))
    return path


def test_a_baseline_that_drafts_is_refused(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[0].drafts = True
    assert run(pair, tmp_path / "out", "--quick", "-n", "8") == 1
    said = capsys.readouterr().err
    assert f"--url-baseline {pair[0].url}: the server has drafted 8 tokens" in said
    assert not (tmp_path / "out").exists()


def test_one_server_for_both_is_named(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run((pair[0], pair[0]), tmp_path, "--quick", "-n", "8", "--repeats", "1")
    said = capsys.readouterr().err
    assert "are the same server" in said and "1 repeat: too few to publish" in said
    run(pair, tmp_path, "--quick", "-n", "8")
    assert "are the same server" not in capsys.readouterr().err


def test_the_servers_model_is_recorded(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Endpoint, "_props", lambda _: {"model_path": "/a/b/m.gguf", "build_info": "b1"}
    )
    assert run(pair, tmp_path, "--quick", "-n", "8", "--repeats", "1") == 0
    assert {mode.model for mode in result(tmp_path).modes} == {"m.gguf"}


def test_counts_that_cannot_be(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].timings = lambda n, prompt: {  # type: ignore[method-assign]
        "prompt_n": prompt, "predicted_n": n, "predicted_ms": 1.0,
        "draft_n": 1, "draft_n_accepted": 3,
    }  # fmt: skip
    assert run(pair, tmp_path, "--quick", "-n", "8") == 1
    assert "accepted 3 of 1 drafted" in capsys.readouterr().err


def test_a_depth_that_the_drafter_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = write_pair(GOLDEN, tmp_path)
    files = ["tasks", "-m", str(pair.target), "-md", str(pair.draft), "-o", str(tmp_path / "out")]
    assert main([*files, "--sweep", "n-draft=3,999"]) == 1
    assert "--sweep n-draft=999: draft.gguf drafts at most 7 tokens" in capsys.readouterr().err
    flags = Flags(target=pair.target, drafters=(pair.draft,), sweep="n-draft=3")
    assert modes_of(flags)[-1].n_draft == 3
    own = modes_of(replace(flags, sweep=None))[-1]
    assert (own.name, own.n_draft) == ("draft", 7), "its own depth is in the result"


def test_quantized_caches_need_flash_attention() -> None:
    """llama.cpp has none for V without it, and dspine would leave them f16."""
    here = Path(__file__)
    flags = Flags(target=here, drafters=(here,), flash_attn="off")
    with pytest.raises(BenchError, match="--flash-attn off: the caches cannot be q8_0, expected"):
        modes_of(flags)
    with pytest.raises(BenchError, match="cannot be q4_0, expected --kv with one of f32, f16"):
        modes_of(replace(flags, caches=("f16", "q4_0")))


def test_a_depth_that_leaves_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(GOLDEN, tmp_path)
    files = ["depth", "-m", str(pair.target), "-md", str(pair.draft), "-o", str(tmp_path / "out")]
    assert main([*files, "-n", "999999"]) == 1
    assert "-n 999999: no depth is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "instead"),
    [("--spec-draft-n-max", "--sweep"), ("-ctk", "--kv"), ("--flash-attn", "-fa"), ("-c", "-c")],
)
def test_a_flag_that_the_modes_set(word: str, instead: str) -> None:
    here = Path(__file__)
    with pytest.raises(BenchError, match=rf"--flag .*{word}.*; give {instead}"):
        modes_of(Flags(target=here, drafters=(here,), extra=(word, "15")))


def test_the_context_holds_ones_own_prompts() -> None:
    flags = Flags(interleave="repeat", max_tokens=24)
    assert settings_of(flags, "tasks", []).n_ctx == settings_of(flags, "tasks", [], prompt=9).n_ctx
    long = Conversation("a", "b", [{"role": "user", "content": "word " * 4000}])
    assert settings_of(flags, "tasks", [], prompt=longest([long])).n_ctx >= 8000


def test_threads() -> None:
    flags = Flags(threads=3, extra=("--x",), interleave="repeat")
    assert settings_of(flags, "tasks", []).extra == ("-t", "3", "--x")
    with pytest.raises(BenchError, match="--threads"):
        modes_of(Flags(url="http://a:1", url_baseline="http://b:1", threads=3))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("<!doctype html>\n<html><p>Hello</html>", "gave no answer of a llama-server"),
        ({"text": "a"}, "gave no answer of a llama-server: KeyError('content')"),
        ({"content": "a", "stop_type": "x", "timings": {"predicted_n": "many"}}, "no answer of"),
    ],
)
def test_a_url_that_leads_elsewhere(
    answer: object, said: str, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair[1].completion = lambda body: answer  # type: ignore[method-assign]
    assert run(pair, tmp_path / "out", "--quick", "-n", "8") == 1
    shown = capsys.readouterr().err
    assert said in shown and pair[1].url in shown and "internal error" not in shown
    assert len(shown.strip().splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_web_server_is_named(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "<!DOCTYPE HTML>\n<html>\n<p>501</p></html>"
    pair[0].post = lambda handler: pair[0].send(handler, page, 501)  # type: ignore[method-assign]
    assert run(pair, tmp_path / "out", "--quick") == 1
    shown = capsys.readouterr().err
    assert f"{pair[0].url} answers with a web page, expected a llama-server" in shown
    assert len(shown.strip().splitlines()) == 1


def test_names_are_no_markup(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = one_prompt(tmp_path)
    talk = json.loads(path.read_text()) | {
        "id": "\u00fc <b>",
        "category": "[/x] \u043c\u0438\u0440",
    }
    path.write_text(json.dumps(talk, ensure_ascii=False), encoding="utf-8")
    assert run(pair, tmp_path / "out", "--prompts", str(path), "-n", "8") == 0
    assert "[/x] \u043c\u0438\u0440" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "[/x] \u043c\u0438\u0440" in page and "<b>" not in page.partition("<table>")[2][:2000]


def test_an_error_does_not_wait_for_the_other_conversations(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an interrupt does not."""
    answer, calls, released = pair[0].completion, itertools.count(), threading.Event()

    def slow(body: dict) -> object:
        number = next(calls)
        if number == 1:  # the warm-up comes first
            return {"no": "answer"}
        if number > 1:
            released.wait(60)
        return answer(body)

    pair[0].completion = slow  # type: ignore[method-assign]
    begin = time.monotonic()
    assert run(pair, tmp_path / "out", "-n", "8", "-np", "4", command="replay") == 1
    assert "has no tokens" in capsys.readouterr().err
    assert time.monotonic() - begin < 50
    released.set()
    assert next(calls) <= 6, "queued conversations were begun"
