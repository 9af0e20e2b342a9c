"""`dspine serve --engine`: the published commands of SGLang and vLLM, on stand-ins."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from dspine._address import ServerError, free_port
from dspine._engines import (
    HINTS,
    SGLANG_VERSION,
    Engine,
    EngineChoices,
    prepare_engine,
)
from dspine._errors import InvalidError
from dspine.cli import main
from support.stand_in import Dspine, StandIn, run

PAIR = ("Qwen/Qwen3.8-27B", "someone/Qwen3.8-27B-DSpine")
# As published for SGLang 0.5.22, written out apart from the code under test.
PUBLISHED = shlex.split("""
sglang serve --model-path Qwen/Qwen3.8-27B
--speculative-draft-model-path someone/Qwen3.8-27B-DSpine --speculative-algorithm DSPINE
--speculative-num-draft-tokens 16 --speculative-draft-attention-backend fa3
--enable-linear-replayssm-spec
--attention-backend fa3 --linear-attn-backend triton --dtype bfloat16 --mamba-ssm-dtype float32
--mamba-radix-cache-strategy extra_buffer --max-mamba-cache-size 64 --mem-fraction-static 0.80
--context-length 131072 --max-running-requests 8 --cuda-graph-max-bs-decode 8
--sampling-backend flashinfer --reasoning-parser qwen3 --tool-call-parser qwen3_coder
--host 127.0.0.1 --port 30000
""")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH holds what a test puts into this directory, and nothing else."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    return place


def sglang(*extra: str, **choices: object) -> list[str]:
    given = EngineChoices(extra=extra, **choices)
    return list(prepare_engine(Engine.SGLANG, PAIR, given, must_exist=False).command)


def pairs(words: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def test_the_published_command() -> None:
    assert sglang() == PUBLISHED


def test_without_a_drafter() -> None:
    made = prepare_engine(Engine.SGLANG, (PAIR[0], None), EngineChoices(), must_exist=False)
    assert not [word for word in made.command if "speculative" in word or "replay" in word]
    assert ("--model-path", PAIR[0]) in pairs(list(made.command))


def test_own_options() -> None:
    words = sglang(n_ctx=4096, n_draft=7, n_parallel=2, host="0.0.0.0", port=99)
    assert {
        ("--context-length", "4096"),
        ("--speculative-num-draft-tokens", "8"),
        ("--max-running-requests", "2"),
        ("--host", "0.0.0.0"),
        ("--port", "99"),
    } <= pairs(words)
    assert len(words) == len(PUBLISHED)


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        (["--mem-fraction-static", "0.9"], "--mem-fraction-static"),
        (["--mem-fraction-static=0.9"], "--mem-fraction-static"),
        (["--mamba-scheduler-strategy", "no_buffer"], "--mamba-radix-cache-strategy"),
        (["--cuda-graph-max-bs", "4"], "--cuda-graph-max-bs-decode"),
        (["--port", "99"], "--port"),
    ],
)
def test_a_flag_of_the_users_wins(given: list[str], replaced: str) -> None:
    words = sglang(*given)
    assert words[-len(given) :] == given
    assert replaced not in words[: -len(given)]
    assert len(words) == len(PUBLISHED) - 2 + len(given)


def test_the_address_follows_the_user() -> None:
    extra = ("--host=0.0.0.0", "--port", "99")
    made = prepare_engine(Engine.SGLANG, PAIR, EngineChoices(port=5, extra=extra), must_exist=False)
    assert made.address.url == "http://127.0.0.1:99"
    assert set(made.notes) == {"--host as given after --", "--port as given after --"}


def test_vllm_serves_the_target() -> None:
    choices = EngineChoices(n_ctx=4096, n_parallel=2)
    made = prepare_engine(Engine.VLLM, (PAIR[0], None), choices, must_exist=False)
    assert shlex.join(made.command) == (
        f"vllm serve {PAIR[0]} --host 127.0.0.1 --port 8000 --max-model-len 4096 --max-num-seqs 2"
    )


def test_vllm_has_no_method_for_these_drafters() -> None:
    with pytest.raises(InvalidError, match="vLLM publishes no method for DSpine drafters"):
        prepare_engine(Engine.VLLM, PAIR, EngineChoices(), must_exist=False)
    with pytest.raises(InvalidError, match="--n-draft"):
        prepare_engine(Engine.VLLM, (PAIR[0], None), EngineChoices(n_draft=7), must_exist=False)
    config = '{"method": "custom_class", "num_speculative_tokens": 15}'
    extra = ("--speculative-config", config)
    made = prepare_engine(Engine.VLLM, PAIR, EngineChoices(extra=extra), must_exist=False)
    assert made.command[-2:] == extra
    assert PAIR[1] not in made.command
    assert any("-md" in note for note in made.notes)


@pytest.mark.parametrize("engine", [Engine.SGLANG, Engine.VLLM])
def test_refused_where_it_is_absent(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServerError, match="neither on PATH nor importable; install it"):
        prepare_engine(engine, (PAIR[0], None), EngineChoices())
    assert main(["serve", "--engine", engine.value, "-m", PAIR[0]]) == 1
    shown = capsys.readouterr()
    assert HINTS[engine] in shown.err and "Traceback" not in shown.err


def test_print_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine", "sglang", "-m", PAIR[0], "-md", PAIR[1], "--print"]) == 0
    assert shlex.split(capsys.readouterr().out) == PUBLISHED


def test_a_module_without_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is installed in this Python, whose programs are not on PATH."""
    for name in ("sglang", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = prepare_engine(Engine.SGLANG, PAIR, EngineChoices())
    assert made.command[:3] == (sys.executable, "-m", "sglang.launch_server")
    made = prepare_engine(Engine.VLLM, (PAIR[0], None), EngineChoices())
    start = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", PAIR[0])
    assert made.command[:5] == start


def test_another_version_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "sglang-0.4.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = prepare_engine(Engine.SGLANG, PAIR, EngineChoices(), must_exist=False)
    assert any(SGLANG_VERSION in note and "0.4.0" in note for note in made.notes)


@pytest.mark.parametrize("flag", ["-m", "-md"])
def test_what_is_no_checkpoint(flag: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for name, message in (
        (str(file), "expected a Hugging Face checkpoint"),
        ("absent.gguf", "expected a Hugging Face checkpoint"),
        (str(empty), "no config.json"),
        ("a/b/c", "neither a directory nor a hub repository"),
        ("", "neither a directory nor a hub repository|no config.json"),
    ):
        pair = (name, None) if flag == "-m" else (PAIR[0], name)
        with pytest.raises(InvalidError, match=f"^{flag} .*({message})"):
            prepare_engine(Engine.SGLANG, pair, EngineChoices(), must_exist=False)
    (empty / "config.json").write_text("{}")
    pair = (str(empty), None) if flag == "-m" else (PAIR[0], str(empty))
    prepare_engine(Engine.SGLANG, pair, EngineChoices(), must_exist=False)


@pytest.mark.parametrize("words", [("--cache-type", "q8_0"), ("--force",)])
def test_options_of_llama_server_only(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--engine", "sglang", "-m", PAIR[0], *words]) == 2
    assert f"'{words[0]}': it is for llama-server only" in capsys.readouterr().err


def test_a_whole_run(nothing_installed: Path) -> None:
    """Started, waited for, ended by a signal, its code passed on."""
    engine = StandIn(nothing_installed, "sglang")
    port = free_port()
    arguments = ("serve", "--engine", "sglang", "-m", PAIR[0], "-md", PAIR[1], "--port", port)
    started = Dspine(*arguments, "--", "--tp", "2", STAND_IN_CODE="5")
    started.wait_for("ready after")
    started.signal(signal.SIGINT)
    code, out, _ = started.end()
    assert (code, out) == (5, "")
    assert engine.argv == [*PUBLISHED[1:-1], str(port), "--tp", "2"]
    assert {"signal": signal.SIGINT} in engine.calls


def test_an_engine_that_dies(nothing_installed: Path) -> None:
    StandIn(nothing_installed, "vllm")
    arguments = ("serve", "--engine", "vllm", "-m", PAIR[0], "--port", free_port())
    code, _, err = run(*arguments, STAND_IN="die 9", PATH=os.environ["PATH"])
    assert code == 9
    assert "vllm ended with code 9 while loading" in err and "line 9" in err
