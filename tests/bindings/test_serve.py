"""`dspine serve`: what it chooses, prints, refuses and starts; signals and exit codes."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dspine._address import free_port
from dspine._errors import InvalidError
from dspine._flags import FILE_FLAGS, PLACEMENT_FLAGS, SPELLINGS, FlagError, merge
from dspine._launch import Choices, Launch, prepare
from dspine._memory import Device
from dspine._programs import program
from dspine.cli import main
from support.hub import COMMIT, Hub
from support.server import Files
from support.stand_in import Dspine, StandIn, run
from support.workshop import Workshop

CARD = Device("a card", 24 << 30, 24 << 30, is_gpu=True)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """llama-server is a program that records how it was called."""
    made = StandIn(tmp_path / "bin", "llama-server")
    monkeypatch.setenv("DSPINE_BIN_DIR", str(made.path.parent))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return made


def launch(files: Files | tuple[Path, None], *extra: str, **choices: object) -> Launch:
    given = {"port": 8080, "device": CARD, **choices}
    return prepare(
        Path("llama-server"),
        str(files[0]),
        None if files[1] is None else str(files[1]),
        Choices(extra=extra, **given),
    )


def pairs(words: tuple[str, ...] | list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def printed(files: Files, *words: object, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What `dspine serve --print` writes to its two outputs."""
    capsys.readouterr()
    code = main(["serve", "-m", str(files[0]), "-md", str(files[1]), *map(str, words)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out, shown.err


def test_the_chosen_command(files: Files) -> None:
    made = launch(files)
    expected = (
        f"llama-server -m {files[0]} -md {files[1]} -c 2048 -np 1 -ngl 999 -fa on -ctk q8_0 "
        "-ctv q8_0 --spec-draft-n-max 7 -ngld 999 -ctkd q8_0 -ctvd q8_0 --host 127.0.0.1 "
        "--port 8080"
    )
    assert shlex.join(made.command) == expected
    assert made.address.url == "http://127.0.0.1:8080"
    assert "drafting 7 tokens a round (block size 8 - 1)" in made.notes
    assert any(note.startswith("context 2048: takes ") for note in made.notes)


def test_without_a_drafter(files: Files) -> None:
    made = launch((files[0], None))
    assert shlex.join(made.command) == (
        f"llama-server -m {files[0]} -c 2048 -np 1 -ngl 999 -fa on -ctk q8_0 -ctv q8_0 "
        "--host 127.0.0.1 --port 8080"
    )


def test_without_a_gpu_nothing_is_offloaded(files: Files) -> None:
    made = launch(files, device=Device("RAM", 8 << 30, 8 << 30, is_gpu=False))
    assert not {"-ngl", "-ngld"} & set(made.command)


@pytest.mark.parametrize(
    ("given", "replaced"),
    [
        (["-c", "512"], "-c"),
        (["--ctx-size", "512"], "-c"),
        (["--ctx_size", "512"], "-c"),
        (["-np", "2"], "-np"),
        (["--flash-attn", "auto"], "-fa"),
        (["--cache-type-v", "f16"], "-ctv"),
        (["--cache-type-k", "f16"], "-ctk"),
        (["--spec-draft-type-k", "f16"], "-ctkd"),
        (["--cache-type-v-draft", "f16"], "-ctvd"),
        (["--spec-draft-n-max", "3"], "--spec-draft-n-max"),
        (["--n-gpu-layers", "all"], "-ngl"),
        (["--spec-draft-ngl", "999"], "-ngld"),
        (["--host", "0.0.0.0"], "--host"),
        (["--port", "9"], "--port"),
    ],
)
def test_a_flag_of_the_users_wins(given: list[str], replaced: str, files: Files) -> None:
    """It stands where the user put it, once, and the chosen one is gone."""
    made = launch(files, *given)
    words = list(made.command)
    assert words[-len(given) :] == given
    spellings = next(s for s in SPELLINGS.values() if s[0] == replaced)
    assert sum(word.replace("_", "-") in spellings for word in words) == 1
    default = launch(files)
    kept = [p for p in zip(default.command[1::2], default.command[2::2], strict=False)]
    for flag, value in kept:
        if flag not in (replaced, "-c"):
            assert (flag, value) in pairs(words)


def test_the_address_follows_the_user(files: Files) -> None:
    made = launch(files, "--port", "9", "--host", "::", "--api-prefix", "/x", "--api-key", "k")
    assert made.address.url == "http://[::1]:9/x"
    assert made.api_key == "k"


def test_the_plan_follows_the_user(files: Files) -> None:
    """What stands after -- is planned for, not what was chosen."""
    n_ctx = 1 << 19

    def planned(*words: str, size: int = n_ctx) -> float:
        (note,) = [n for n in launch(files, *words, n_ctx=size).notes if n.startswith("context")]
        return float(note.split(" takes ")[1].split()[0])

    usual = planned()
    assert planned("-ctk", "f32", "-ctv", "f32") > usual
    assert planned("-ctkd", "f32", "-ctvd", "f32") > usual
    assert planned("-c", str(2 * n_ctx)) > usual
    assert planned("-c", str(n_ctx), size=2 * n_ctx) == usual
    assert planned("-fa", "off") > usual
    assert ("-c", "0") in pairs(launch(files, "-c", "0").command)
    assert "context 2048" in " ".join(launch(files, "-c", "0").notes)


def test_without_flash_attention(files: Files) -> None:
    """A quantized V cache needs it: the chosen one gives way to llama-server's."""
    words = launch(files, "-fa", "off").command
    assert not {"-ctv", "-ctvd"} & set(words)
    assert {("-ctk", "q8_0"), ("-ctkd", "q8_0")} <= pairs(words)
    made = launch(files, flash_attn="off", cache_type="f32").command
    assert {("-ctv", "f32"), ("-ctvd", "f32"), ("-fa", "off")} <= pairs(made)


@pytest.mark.parametrize("words", [("-ngl", "2"), ("-ot", "x=CPU"), ("--cpu-moe",)])
def test_no_plan_where_it_does_not_apply(words: tuple[str, ...], files: Files) -> None:
    made = launch(files, *words)
    assert any(note.startswith("no memory plan: ") for note in made.notes)
    assert "-c" not in made.command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-m", "x"), "-m cannot stand after --; give the file with -m"),
        (("--model-draft", "x"), "give the file with -md"),
        (("-hf", "a/b"), "-hf cannot stand after --"),
        (("-fa",), "-fa needs a value"),
        (("-c", "many"), "-c many: expected an integer"),
    ],
)
def test_refused_words(words: tuple[str, ...], message: str, files: Files) -> None:
    with pytest.raises(FlagError, match=re.escape(message)):
        launch(files, *words)


def test_values_are_not_taken_for_flags() -> None:
    """A value that is spelled like a flag stays a value."""
    flags = merge({"n_ctx": 5, "host": "h"}, ["--host", "-c"])
    assert flags.words == ("-c", "5", "--host", "-c")
    assert flags.settings == {"n_ctx": "5", "host": "-c"}
    assert flags.dropped == ("host",)


def test_what_does_not_fit(files: Files) -> None:
    small = Device("a small card", 3 << 30, (2 << 30) + (80 << 20), is_gpu=True)
    with pytest.raises(Exception, match=r"needs .* GiB, a small card has 2.1 GiB\nfits: "):
        launch(files, device=small, n_ctx=1 << 20)
    made = launch(files, device=small, n_ctx=1 << 20, force=True)
    assert ("-c", str(1 << 20)) in pairs(made.command)
    assert any(note.endswith("started all the same") for note in made.notes)
    tiny = Device("a tiny card", 1 << 20, 1 << 20, is_gpu=True)
    with pytest.raises(Exception, match=r"no context fits; --force"):
        launch(files, device=tiny)


def test_the_stored_depth(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspine._tuned import store_depth

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store_depth(*files, 3, "q8_0")
    made = launch(files)
    assert ("--spec-draft-n-max", "3") in pairs(made.command)
    assert any("3 tokens a round, as dspine tune chose" in note for note in made.notes)
    assert ("--spec-draft-n-max", "5") in pairs(launch(files, n_draft=5).command)
    words = launch(files, "--spec-draft-n-max", "2").command
    assert ("--spec-draft-n-max", "2") in pairs(words) and words.count("--spec-draft-n-max") == 1
    # measured with q8_0 caches: it says nothing about others, however they are asked for
    for other in (
        launch(files, cache_type="f16"),
        launch(files, "-ctk", "f16"),
        launch(files, "-fa", "off"),
    ):
        assert ("--spec-draft-n-max", "7") in pairs(other.command)


@pytest.fixture(scope="module")
def offered() -> dict[str, tuple[str, ...]]:
    """Spellings of every option by each of them, from the server's own --help."""
    page = subprocess.run(
        [program("llama-server"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, tuple[str, ...]] = {}
    for line in page.splitlines():
        # "-c,    --ctx-size N        text": the spellings end where the text or a value begins
        head = re.match(r"(?:(?:, +)?--?[A-Za-z][\w.-]*)+", line)
        if head is not None:
            spellings = tuple(re.findall(r"--?[A-Za-z][\w.-]*", head[0]))
            found |= dict.fromkeys(spellings, spellings)
    return found


@pytest.mark.native
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_flag_is_the_servers(name: str, offered: dict[str, tuple[str, ...]]) -> None:
    """Every flag that is ever passed or read exists, with these spellings and no others."""
    assert len(offered) > 200
    spellings = SPELLINGS[name]
    assert set(offered[spellings[0]]) == set(spellings)


@pytest.mark.native
@pytest.mark.parametrize("flag", sorted({*FILE_FLAGS, *PLACEMENT_FLAGS}))
def test_every_flag_that_is_watched_is_the_servers(
    flag: str, offered: dict[str, tuple[str, ...]]
) -> None:
    assert flag in offered


@pytest.mark.native
def test_the_whole_command_is_the_servers(
    files: Files, offered: dict[str, tuple[str, ...]]
) -> None:
    for pair in (files, (files[0], None)):
        flags = launch(pair).command[1::2]
        assert all(flag in offered for flag in flags)


def test_print(stand_in: StandIn, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--debug", "--json", "--", "--metrics"]  # untouched, though two are words of ours
    out, err = printed(files, "--print", "--", *rest, capsys=capsys)
    words = shlex.split(out)
    assert out.count("\n") == 1
    assert words[0] == str(stand_in.path)
    assert words[1:5] == ["-m", str(files[0]), "-md", str(files[1])]
    assert words[-4:] == rest and ("--port", "8080") in pairs(words)
    assert "drafting 7 tokens" in err
    assert stand_in.calls == []


def test_the_card_to_plan_for(
    stand_in: StandIn, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = printed(files, "--print", "--gpu", "24G", capsys=capsys)
    assert {("-ngl", "999"), ("-ngld", "999")} <= pairs(shlex.split(out))
    assert "of a GPU with 24G" in err
    assert main(["serve", "-m", str(files[0]), "--print", "--gpu", "1M"]) == 1
    assert "a GPU with 1M has 0.0 GiB\nno context fits" in capsys.readouterr().err


def test_several_cards(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspine._devices.detect", lambda: [CARD, Device("another", 1, 1)])
    made = launch(files, device=None)
    assert "2 GPUs, planned for the first alone: a card" in made.notes


def test_print_quotes_for_a_shell(
    stand_in: StandIn, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "a b'c.gguf"
    odd.symlink_to(files[0])
    out, _ = printed((odd, files[1]), "--print", "--", "--alias", "$(x)", capsys=capsys)
    assert str(odd) in shlex.split(out) and "'$(x)'" in out


def test_what_is_printed_is_what_runs(stand_in: StandIn, files: Files) -> None:
    port = free_port()
    arguments = ("serve", "-m", files[0], "-md", files[1], "--port", port, "-c", "512")
    code, out, _ = run(*arguments, "--print", "--", "--metrics")
    assert code == 0
    started = Dspine(*arguments, "--", "--metrics")
    started.wait_for("ready after")
    started.signal(signal.SIGTERM)
    code, stdout, err = started.end()
    assert (code, stdout) == (0, "")
    assert shlex.split(out)[1:] == stand_in.argv
    assert out in err
    assert f"at http://127.0.0.1:{port}" in err
    assert "stand-in: listening" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("code", ["0", "77"])
def test_signals_go_on_and_the_code_comes_back(
    number: signal.Signals, code: str, stand_in: StandIn, files: Files
) -> None:
    started = Dspine("serve", "-m", files[0], "--port", free_port(), STAND_IN_CODE=code)
    started.wait_for("ready after")
    started.signal(number)
    ended, _, err = started.end()
    assert ended == int(code)
    assert [c["signal"] for c in stand_in.calls if "signal" in c] == [number]
    assert f"stand-in: signal {int(number)}" in err
    assert "Traceback" not in err


def test_a_signal_while_loading(stand_in: StandIn, files: Files) -> None:
    started = Dspine("serve", "-m", files[0], "--port", free_port(), STAND_IN="hang")
    started.wait_for("still loading")
    started.signal(signal.SIGINT)
    code, _, _ = started.end()
    assert code == 0
    assert {"signal": signal.SIGINT} in stand_in.calls


@pytest.mark.parametrize("code", [1, 2, 77])
def test_a_server_that_dies_while_loading(code: int, stand_in: StandIn, files: Files) -> None:
    ended, out, err = run("serve", "-m", files[0], "--port", free_port(), STAND_IN=f"die {code}")
    assert (ended, out) == (code, "")
    tail = err[err.rindex("dspine: ") :]
    assert tail.startswith(f"dspine: llama-server ended with code {code} while loading; its last")
    assert "line 9" in tail and "line 2" in tail and "line 1\n" not in tail


def test_a_server_that_is_killed(stand_in: StandIn, files: Files) -> None:
    started = Dspine("serve", "-m", files[0], "--port", free_port())
    started.wait_for("ready after")
    pid = int(subprocess.check_output(["pgrep", "-P", str(started.process.pid)]))
    os.kill(pid, signal.SIGKILL)
    code, _, err = started.end()
    assert code == 128 + 9
    assert "llama-server was killed by signal 9; its last lines:" in err


def test_a_server_that_is_never_ready(stand_in: StandIn, files: Files) -> None:
    arguments = ("serve", "-m", files[0], "--port", free_port(), "--timeout", "1.5")
    code, _, err = run(*arguments, STAND_IN="hang")
    assert code == 1
    assert "llama-server was not ready after 1.5 s and was ended; its last lines:" in err
    assert err.rstrip().endswith("stand-in: still loading")
    assert {"signal": signal.SIGTERM} in stand_in.calls


def test_the_server_goes_with_its_launcher(stand_in: StandIn, files: Files) -> None:
    """Even one that is killed leaves no server behind that holds the card."""
    started = Dspine("serve", "-m", files[0], "--port", free_port())
    started.wait_for("ready after")
    started.signal(signal.SIGKILL)
    assert started.end()[0] == -9
    for _ in range(100):
        if {"signal": signal.SIGTERM} in stand_in.calls:
            return
        time.sleep(0.05)
    pytest.fail("the server still runs")


def test_nohup_is_respected(stand_in: StandIn, files: Files) -> None:
    """A signal that the parent had ignored stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = Dspine("serve", "-m", files[0], "--port", free_port())
    finally:
        signal.signal(signal.SIGHUP, before)
    started.wait_for("ready after")
    started.signal(signal.SIGHUP)
    time.sleep(0.3)
    assert started.process.poll() is None
    started.signal(signal.SIGTERM)
    assert started.end()[0] == 0
    assert [c["signal"] for c in stand_in.calls if "signal" in c] == [signal.SIGTERM]


def test_port_in_use(stand_in: StandIn, files: Files) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("serve", "-m", files[0], "--port", port)
    assert code == 1
    assert f"dspine: port {port} of 127.0.0.1 is in use; --port N chooses another" in err
    assert stand_in.calls == []


def test_log_file(stand_in: StandIn, files: Files, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    started = Dspine("serve", "-m", files[0], "--port", free_port(), "--log", log)
    started.wait_for("ready after")
    started.signal(signal.SIGTERM)
    code, _, err = started.end()
    assert code == 0
    assert "stand-in: listening" in log.read_text() and "stand-in: listening" not in err
    code, _, err = run("serve", "-m", files[0], "--port", free_port(), "--log", tmp_path)
    assert code == 1 and f"--log {tmp_path}" in err


def test_refused_files(
    stand_in: StandIn,
    files: Files,
    workshop: Workshop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, draft = files
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(draft.read_bytes()[:300_000])
    other = workshop.random_target("qwen3", 128, 512, 6)
    for model, drafter, message in (
        (tmp_path / "absent.gguf", draft, "absent.gguf: no such file"),
        (tmp_path, draft, "a directory, expected a GGUF file"),
        (text, draft, "text.gguf: not a GGUF file"),
        (target, cut, "cut.gguf: truncated GGUF"),
        (draft, target, "-m .*: this is a DSpine drafter, expected the target"),
        (target, target, "-md .*: this is a language model, expected a DSpine drafter"),
        (other, draft, "vocabulary size 1024, .* has 512"),
        (target, checkpoint, "dspine-convert .*checkpoint --target"),
    ):
        code = main(["serve", "-m", str(model), "-md", str(drafter)])
        shown = capsys.readouterr()
        assert (code, shown.out) == (1, ""), message
        assert re.search(message, shown.err), (message, shown.err)
        assert "Traceback" not in shown.err and shown.err.count("\n") <= 3
    assert stand_in.calls == []


def test_flags_after_the_dashes_are_usage(
    stand_in: StandIn, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["-m", "x"], ["-c"], ["--port", "x"]):
        assert main(["serve", "-m", str(files[0]), "--", *words]) == 2
        assert "Invalid value for '--'" in capsys.readouterr().err


@pytest.mark.e2e
def test_the_real_server(files: Files, recorded_prompt: list[int]) -> None:
    """From the command line to an answer, and an orderly end."""
    port = free_port()
    started = Dspine("serve", "-m", files[0], "-md", files[1], "--port", port, "--", "-t", "1")
    started.wait_for("ready after")
    body = {"prompt": recorded_prompt, "n_predict": 32, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/completion", json=body, trust_env=False).json()
    assert answer["timings"]["draft_n_accepted"] > 0
    started.signal(signal.SIGTERM)
    code, out, err = started.end()
    assert (code, out) == (0, "")
    assert "cleaning up before exit" in err


@pytest.mark.e2e
def test_the_real_server_refuses_a_flag(files: Files) -> None:
    code, _, err = run("serve", "-m", files[0], "--port", free_port(), "--", "--nonsense")
    assert code == 1
    assert err.rstrip().endswith("error: invalid argument: --nonsense")
    assert "llama-server ended with code 1 while loading" in err


@pytest.fixture(scope="module")
def recorded_prompt() -> list[int]:
    from support.golden import GOLDEN, load_rounds

    return load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json").runs[0].prompt


def test_bad_numbers(files: Files) -> None:
    for name in ("n_ctx", "n_parallel"):
        with pytest.raises(InvalidError, match=f"{name} is 0"):
            launch(files, **{name: 0})


REPO = "someone/Tiny-GGUF"
DRAFT_REPO = "someone/Tiny-DSpine-GGUF"


@pytest.fixture
def hub(files: Files) -> Iterator[Hub]:
    made = Hub()
    made.files[REPO] = {"Tiny-F32.gguf": files[0], "mmproj-F32.gguf": files[1]}
    made.files[DRAFT_REPO] = {"tiny-BF16.gguf": files[1], "tiny-Q8_0.gguf": files[1]}
    made.files["someone/Tiny-DSpine"] = {"config.json": files[0], "model.safetensors": files[0]}
    yield made
    made.close()


def test_hub_names(hub: Hub, stand_in: StandIn, files: Files, tmp_path: Path) -> None:
    """--print reads headers only and names the place; serving downloads to that place."""
    arguments = ("serve", "-m", f"{REPO}:Tiny-F32.gguf", "-md", f"{DRAFT_REPO}:Q8_0")
    environment = hub.environment(tmp_path / "hf")
    port = free_port()
    code, out, err = run(*arguments, "--port", port, "--print", **environment)
    assert code == 0, err
    cache = tmp_path / "hf" / "hub"
    expected = [
        cache / "models--someone--Tiny-GGUF" / "snapshots" / COMMIT / "Tiny-F32.gguf",
        cache / "models--someone--Tiny-DSpine-GGUF" / "snapshots" / COMMIT / "tiny-Q8_0.gguf",
    ]
    words = shlex.split(out)
    assert {("-m", str(expected[0])), ("-md", str(expected[1]))} <= pairs(words)
    assert not list(cache.rglob("*.gguf")) and stand_in.calls == []
    started = Dspine(*arguments, "--port", port, **environment)
    started.wait_for("ready after")
    started.signal(signal.SIGTERM)
    assert started.end()[0] == 0
    assert stand_in.argv == words[1:]
    for path, source in zip(expected, files, strict=True):
        assert path.read_bytes() == source.read_bytes()
    hub.log.clear()
    names = ("-m", f"{REPO}:Tiny-F32.gguf", "-md", f"{DRAFT_REPO}:tiny-Q8_0.gguf")
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    code, again, err = run("serve", *names, "--port", port, "--print", **offline)
    assert (code, again) == (0, out), err
    assert hub.log == []


def test_a_file_in_the_cache(stand_in: StandIn, files: Files, tmp_path: Path) -> None:
    """A directory in the layout of the hub's cache is enough, without any hub."""
    folder = tmp_path / "hf" / "hub" / "models--someone--Tiny-GGUF"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "Tiny-F32.gguf").write_bytes(files[0].read_bytes())
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    arguments = ("serve", "-m", f"{REPO}:Tiny-F32.gguf", "--print")
    code, out, err = run(*arguments, **environment)
    assert code == 0, err
    assert ("-m", str(snapshot / "Tiny-F32.gguf")) in pairs(shlex.split(out))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-m", "someone/nothing"), "someone/nothing"),
        (("-m", f"{REPO}:Q2_K"), "no file for 'Q2_K'"),
        (("-m", f"{REPO}:absent.gguf"), "absent.gguf"),
        (("-m", REPO, "-md", "someone/Tiny-DSpine"), "dspine-convert someone/Tiny-DSpine"),
        (("-m", f"{DRAFT_REPO}:Q8_0"), "this is a DSpine drafter, expected the target"),
    ],
)
def test_hub_names_that_lead_nowhere(
    words: tuple[str, ...], message: str, hub: Hub, stand_in: StandIn, tmp_path: Path
) -> None:
    code, out, err = run("serve", *words, **hub.environment(tmp_path / "hf"))
    assert (code, out) == (1, "")
    assert message in err and "Traceback" not in err and err.count("\n") <= 3
    assert stand_in.calls == []


def test_no_hub(stand_in: StandIn, hub: Hub, tmp_path: Path) -> None:
    environment = {**hub.environment(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:1"}
    code, _, err = run("serve", "-m", f"{REPO}:Tiny-F32.gguf", **environment)
    assert code == 1
    assert f"{REPO}:Tiny-F32.gguf" in err and "Traceback" not in err
