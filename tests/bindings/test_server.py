"""dspine.Server: the real llama-server on the trained pair, and stand-ins for what goes wrong."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dspine import InvalidError, LoadError
from dspine._address import Address, ServerError, check_free, free_port
from dspine._client import RequestError
from dspine._headers import HeaderError
from dspine._process import ServerExitError, ServerTimeoutError, last_lines, shell_code
from dspine._programs import program
from dspine._server import Server
from dspine_bench.golden_target import text_of, tokens_of
from support.golden import Recorded
from support.server import EXACT_DRAFT, EXACT_TARGET, Files, expected_counts
from support.stand_in import StandIn
from support.workshop import Workshop

N_PREDICT = 64
DEPTH = 7
EXACT = (*EXACT_TARGET, *EXACT_DRAFT)


@pytest.fixture(scope="module")
def running(files: Files) -> Server:
    with Server(*files, extra=EXACT, defaults={"cache_prompt": False}) as server:
        yield server


def alive(pid: int) -> bool:
    """A process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "bin", "llama-server")


@pytest.fixture
def pretended(stand_in: StandIn, files: Files):
    """A Server whose program is the stand-in."""

    def make(**options: object) -> Server:
        return Server(*files, executable=stand_in.path, timeout_s=30, **options)

    return make


@pytest.mark.e2e
def test_recorded_rounds(running: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        done = running.complete(run.prompt, N_PREDICT)
        assert done.tokens == run.plain
        assert done.generated == N_PREDICT and done.stop == "limit"
        counts = (done.rounds, done.drafted, done.accepted)
        assert counts == expected_counts(run, N_PREDICT, DEPTH)
        assert done.mean_accepted_length == (done.accepted + done.rounds) / done.rounds
        assert done.acceptance_rate == done.accepted / done.drafted
        assert done.tokens_per_second > 0 and done.prompt_ms > 0


@pytest.mark.e2e
def test_texts_and_chat(running: Server, recorded: Recorded) -> None:
    run = recorded.runs[1]
    text = text_of(run.prompt)
    assert tokens_of(running.complete(text, N_PREDICT).text) == run.plain
    answer = running.chat([{"role": "user", "content": text}], N_PREDICT)
    assert tokens_of(answer.text) == run.plain
    assert answer.accepted > 0 and answer.stop == "length"
    counts = expected_counts(run, N_PREDICT, DEPTH)
    assert (answer.rounds, answer.drafted, answer.accepted) == counts


@pytest.mark.e2e
def test_streams(running: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        whole = running.complete(run.prompt, N_PREDICT)
        with running.stream(run.prompt, N_PREDICT) as stream:
            assert stream.result is None
            pieces = list(stream)
        assert len(pieces) > 1
        result = stream.result
        assert result is not None
        assert "".join(pieces) == result.text == whole.text
        assert (result.tokens, result.stop) == (run.plain, "limit")
        assert (result.rounds, result.drafted) == (whole.rounds, whole.drafted)
    messages = [{"role": "user", "content": text_of(recorded.runs[1].prompt)}]
    stream = running.stream(messages, N_PREDICT)
    assert tokens_of("".join(stream)) == recorded.runs[1].plain
    assert stream.result is not None and stream.result.accepted > 0


@pytest.mark.e2e
def test_dropped_streams(running: Server, recorded: Recorded) -> None:
    """Closed, left by an exception, forgotten: the slot is free again at once."""
    run = recorded.runs[0]
    expected = running.complete(run.prompt, N_PREDICT)
    for _ in range(10):
        stream = running.stream(run.prompt, 1800)
        next(stream)
        stream.close()
        assert list(stream) == []
        with pytest.raises(ZeroDivisionError), running.stream(run.prompt, 1800) as stream:
            next(stream)
            raise ZeroDivisionError
        forgotten = running.stream(run.prompt, 1800)
        next(forgotten)
        del forgotten
        running.stream(run.prompt, 1800)
    started = time.monotonic()
    done = running.complete(run.prompt, N_PREDICT)
    assert time.monotonic() - started < 5
    assert (done.tokens, done.rounds) == (expected.tokens, expected.rounds)


@pytest.mark.e2e
def test_requests_from_threads(running: Server, recorded: Recorded) -> None:
    runs = recorded.runs * 3
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda run: running.complete(run.prompt, N_PREDICT).tokens, runs))
    assert done == [run.plain for run in runs]


@pytest.mark.e2e
def test_refused_requests(running: Server) -> None:
    with pytest.raises(RequestError, match=r"/completion: .*prompt") as caught:
        running.post("/completion", {"prompt": 5})
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="/absent: File Not Found") as caught:
        running.get("/absent")
    assert caught.value.status == 404
    with pytest.raises(RequestError, match="exceeds the available context size"):
        running.complete([1] * 4000, 1)
    with pytest.raises(RequestError):
        running.stream([1] * 4000, 1)
    assert running.get("/health") == '{"status":"ok"}'


@pytest.mark.e2e
def test_what_is_chosen(files: Files, tmp_path: Path) -> None:
    """q8_0 caches for both, flash attention, the file's depth, one slot, a context that fits."""
    log = tmp_path / "server.log"
    with Server(*files, log=log) as server:
        words = list(server.command)
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.pid is not None and alive(server.pid)
        assert server.complete("[1][2]", 8).generated == 8
        text = server.log
    pairs = set(itertools.pairwise(words))
    assert {("-ctk", "q8_0"), ("-ctv", "q8_0"), ("-ctkd", "q8_0"), ("-ctvd", "q8_0")} <= pairs
    assert {("-fa", "on"), ("-np", "1"), ("--spec-draft-n-max", "7"), ("-c", "2048")} <= pairs
    assert words[0] == str(program("llama-server"))
    assert "n_slots = 1, n_ctx_slot = 2048" in text
    assert log.read_text().startswith(text)
    assert "drafting 7 tokens a round (block size 8 - 1)" in server.notes


@pytest.mark.e2e
def test_settings_left_to_the_server(files: Files) -> None:
    options = {"n_draft": None, "n_parallel": None, "cache_type": None, "flash_attn": None}
    with Server(*files, gpu_layers=None, extra=EXACT, **options) as server:
        assert not {"-np", "-ngl", "--spec-draft-n-max"} & set(server.command)
        assert server.command.count("-ctk") == 1
        assert "dspine: using 1 slot" in server.log


@pytest.mark.e2e
def test_without_a_drafter(files: Files, recorded: Recorded) -> None:
    run = recorded.runs[0]
    with Server(files[0], extra=EXACT_TARGET) as server:
        done = server.complete(run.prompt, N_PREDICT)
    assert done.tokens == run.plain
    assert (done.drafted, done.mean_accepted_length) == (0, 1.0)
    assert not {"-md", "-ctkd", "--spec-draft-n-max"} & set(server.command)


@pytest.mark.e2e
def test_start_and_stop_again(files: Files) -> None:
    server = Server(*files, extra=EXACT)
    for _ in range(2):
        assert server.start() is server
        pid = server.pid
        with pytest.raises(InvalidError, match="running already"):
            server.start()
        assert server.stop() == 0
        assert pid is not None and not alive(pid)
        assert server.pid is None and server.stop() is None
        assert "cleaning up before exit" in server.log
    with pytest.raises(InvalidError, match="does not run"):
        server.complete("x", 1)
    with pytest.raises(InvalidError, match="does not run"):
        _ = server.url


@pytest.mark.e2e
def test_api_key_prefix_and_host(files: Files) -> None:
    """What the user adds is followed: the key is sent, the prefix and the port are used."""
    port = free_port()
    extra = (*EXACT, "--api-key", "secret", "--api_prefix", "/here", "--port", str(port))
    with Server(*files, host="0.0.0.0", extra=extra) as server:
        assert server.url == f"http://127.0.0.1:{port}/here"
        assert server.complete("[1]", 2).generated == 2
        assert server.command.count("--port") == 1


@pytest.mark.e2e
def test_unix_socket(files: Files, tmp_path: Path) -> None:
    with Server(*files, host=str(tmp_path / "s.sock"), extra=EXACT) as server:
        assert server.complete("[1]", 2).generated == 2


@pytest.mark.e2e
def test_a_server_that_dies_during_a_request(files: Files, recorded: Recorded) -> None:
    with Server(*files, extra=EXACT) as server:
        stream = server.stream(recorded.runs[0].prompt, 1800)
        next(stream)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerExitError, match="llama-server was killed by signal 9") as caught:
            list(stream)
        assert caught.value.code == -9
        with pytest.raises(ServerExitError, match="its last lines"):
            server.complete("[1]", 1)


@pytest.mark.e2e
def test_dying_while_loading(files: Files, tmp_path: Path) -> None:
    """The real server's own reason is quoted. The checks before it are switched off here."""
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[1].read_bytes()[:300_000])
    with pytest.raises(ServerExitError, match=r"cut\.gguf") as caught:
        Server(files[0], cut, force=True, extra=EXACT).start()
    assert caught.value.code == 1
    assert str(caught.value).startswith("llama-server ended with code 1; its last lines:\n  ")
    with pytest.raises(ServerExitError, match="invalid argument: --nonsense"):
        Server(*files, extra=("--nonsense",)).start()


def test_last_lines_are_quoted(pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN", "die 7")
    with pytest.raises(ServerExitError) as caught:
        pretended().start()
    assert caught.value.code == 7
    text = str(caught.value)
    assert text.startswith("llama-server ended with code 7; its last lines:")
    assert "line 9" in text and "line 2" in text and "line 1\n" not in text
    assert "line 0" in caught.value.log


def test_a_server_that_is_never_ready(
    stand_in: StandIn, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "hang")
    server = Server(*files, executable=stand_in.path, timeout_s=1.5)
    with pytest.raises(ServerTimeoutError, match=r"not ready after 1.5 s and was ended; its last"):
        server.start()
    assert "still loading" in server.log
    assert server.pid is None
    assert {"signal": signal.SIGTERM} in stand_in.calls


def test_an_exception_while_it_loads_ends_it(pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C above all."""
    monkeypatch.setenv("STAND_IN", "hang")
    pids: list[int] = []

    def interrupted(http: object) -> bool:
        assert server.pid is not None
        pids.append(server.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr("dspine._client.is_ready", interrupted)
    server = pretended()  # kept, so that no finalizer ends it
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.pid is None
    assert len(pids) == 1 and not alive(pids[0])


def test_its_own_group(pretended, stand_in: StandIn) -> None:
    """A terminal's Ctrl-C reaches the script alone, which then ends the server in order."""
    with pretended():
        pass
    started = next(call for call in stand_in.calls if "argv" in call)
    assert started["group"] != os.getpgrp()
    assert [c["signal"] for c in stand_in.calls if "signal" in c] == [signal.SIGTERM]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_forgotten_server_is_ended(pretended) -> None:
    server = pretended().start()
    pid = server.pid
    assert pid is not None and alive(pid)
    del server
    gc.collect()
    assert not alive(pid)


def test_forgetting_it_warns(pretended) -> None:
    server = pretended().start()
    with pytest.warns(ResourceWarning, match="was never stopped"):
        del server
        gc.collect()


SCRIPT = """
import os, sys
from dspine._server import Server
server = Server({target!r}, {draft!r}, executable={program!r}).start()
print(server.pid, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    ["pass", "raise ValueError", "sys.exit(3)"]
    + [f"os.kill(os.getpid(), {number})" for number in (2, 15, 9)],
)
def test_it_ends_with_the_interpreter(end: str, stand_in: StandIn, files: Files) -> None:
    target, draft = map(str, files)
    text = SCRIPT.format(target=target, draft=draft, program=str(stand_in.path), end=end)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    deadline = time.monotonic() + 10  # of a killed process the kernel ends it, when it can
    while alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(done.stdout)), done.stderr


def test_a_fork_does_not_end_it(pretended) -> None:
    """A child that runs the finalizers at its end leaves the server to its parent."""
    with pretended() as server:
        child = os.fork()
        if child == 0:
            try:
                assert server._finalizer is not None
                server._finalizer()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert server.pid is not None and alive(server.pid)
        assert server.get("/health") == ""


def test_port_in_use(files: Files, stand_in: StandIn) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is in use; --port N"):
            Server(*files, executable=stand_in.path, port=port).start()
    assert stand_in.calls == []


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_hosts_that_are_not_ours(host: str) -> None:
    with pytest.raises(ServerError, match=f"--host {host}"):
        check_free(Address(host, 8080))


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (Address("0.0.0.0", 80), "http://127.0.0.1:80"),
        (Address("::", 80), "http://[::1]:80"),
        (Address("::1", 80), "http://[::1]:80"),
        (Address("a.b, c.d", 8080, "/x"), "http://a.b:8080/x"),
        (Address("/run/s.sock", 8080), "http://localhost"),
        (Address("localhost", 443, tls=True), "https://localhost:443"),
    ],
)
def test_urls(address: Address, url: str) -> None:
    assert address.url == url


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_bad_ports(port: int) -> None:
    with pytest.raises(InvalidError, match="expected 1 to 65535"):
        Address("127.0.0.1", port)


def test_missing_program(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_BIN_DIR", str(tmp_path))
    with pytest.raises(LoadError, match=r"llama-server: no such file .*DSPINE_BIN_DIR"):
        Server(*files).start()
    (tmp_path / "llama-server").write_text("not a program")
    with pytest.raises(LoadError, match="not executable"):
        Server(*files).start()
    (tmp_path / "llama-server").chmod(0o755)
    with pytest.raises(ServerError, match="cannot be started"):
        Server(*files).start()


def test_files_are_checked_before_it_starts(
    files: Files, stand_in: StandIn, workshop: Workshop, tmp_path: Path
) -> None:
    target, draft = files
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    other = workshop.random_target("qwen3", 96, 1024, 6)
    for bad, message in (
        ((tmp_path / "absent.gguf", draft), "absent.gguf: no such file"),
        ((target, tmp_path / "absent.gguf"), "absent.gguf: no such file"),
        ((tmp_path, draft), "a directory, expected a GGUF file"),
        ((text, draft), "text.gguf: not a GGUF file"),
        ((draft, target), "this is a DSpine drafter, expected the target"),
        ((target, target), "this is a language model, expected a DSpine drafter"),
        ((other, draft), "with hidden size 128, .* has 96"),
    ):
        with pytest.raises(HeaderError, match=message):
            Server(*bad, executable=stand_in.path).start()
    assert stand_in.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_draft": -1}, "n_draft is -1"),
        ({"n_parallel": 0}, "n_parallel is 0"),
        ({"cache_type": "q9"}, "type_k is 'q9'"),
        ({"extra": ("-m", "x.gguf")}, "-m cannot stand after --"),
        ({"extra": ("-c",)}, "-c needs a value"),
        ({"extra": ("--port", "http")}, "--port http: expected an integer"),
    ],
)
def test_bad_settings(options: dict[str, object], message: str, pretended) -> None:
    with pytest.raises(InvalidError, match=message):
        pretended(**options).start()


def test_what_does_not_fit_is_refused(pretended, stand_in: StandIn) -> None:
    with pytest.raises(ServerError, match=r"needs .* GiB, .* has .*\nfits: -c 2048") as caught:
        pretended(n_ctx=1 << 30).start()
    assert "--force starts all the same" in str(caught.value)
    assert stand_in.calls == []
    with pretended(n_ctx=1 << 30, force=True) as server:
        assert any("started all the same" in note for note in server.notes)
    assert stand_in.argv[stand_in.argv.index("-c") + 1] == str(1 << 30)


def test_log_in_a_place_that_is_none(pretended, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="No such file or directory"):
        pretended(log=tmp_path / "absent" / "x.log").start()


def test_words_of_exit_codes() -> None:
    assert [shell_code(code) for code in (0, 1, 77, -2, -15)] == [0, 1, 77, 130, 143]
    assert last_lines("a\n\n b \n\nc\n", 2) == [" b", "c"]
