"""Any order of closing, dropped streams, exceptions, threads, forks, and no growth."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dspine import Engine, InvalidError
from support.server import Files

pytestmark = pytest.mark.native

PROMPT = list(range(20, 40))
OPTIONS: dict[str, Any] = {
    "n_ctx": 512,
    "threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    "draft_type_k": "f32",
    "draft_type_v": "f32",
}
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def expected(files: Files) -> list[int]:
    """Of a fresh engine."""
    with Engine(*files, **OPTIONS) as engine:
        return engine.generate(PROMPT, **GREEDY).tokens


@pytest.fixture
def engine(files: Files) -> Iterator[Engine]:
    with Engine(*files, **OPTIONS) as opened:
        yield opened


def test_a_stream_dropped_half_way_fifty_times(engine: Engine, expected: list[int]) -> None:
    for i in range(50):
        stream = engine.stream([*PROMPT[: i % 20], 7], max_tokens=100, temperature=0.5 * (i % 3))
        for _ in range(i % 5):
            next(stream)
        if i % 3 == 0:
            stream.close()
        elif i % 3 == 1:
            del stream  # else the next one takes over
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_leaving_a_loop_ends_the_stream(engine: Engine, expected: list[int]) -> None:
    seen = 0
    for piece in engine.stream(PROMPT, **GREEDY):
        seen += len(piece.tokens)
        if seen > 5:
            break
    assert engine.generate(PROMPT, **GREEDY).tokens == expected
    with engine.stream(PROMPT, **GREEDY) as stream:
        first = next(stream)
    assert stream.result.stop_reason == "aborted"
    assert stream.result.tokens == list(first.tokens) == expected[: len(first.tokens)]
    assert stream.result.stats.prompt_tokens == len(PROMPT)
    with pytest.raises(StopIteration):
        next(stream)


def test_an_exception_inside_a_stream(engine: Engine, expected: list[int]) -> None:
    with pytest.raises(KeyError, match="mine"):
        for _ in engine.stream(PROMPT, **GREEDY):
            raise KeyError("mine")
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_an_exception_inside_a_policy(engine: Engine, expected: list[int]) -> None:
    class Broken:
        def next_depth(self) -> int:
            return 3

        def observe(self, *_: object) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(PROMPT, n_draft=Broken(), **GREEDY)
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_another_call_takes_over(engine: Engine, expected: list[int]) -> None:
    stream = engine.stream(PROMPT, **GREEDY)
    next(stream)
    assert engine.generate(PROMPT, **GREEDY).tokens == expected
    with pytest.raises(InvalidError, match=r"over: generate\(\) was called"):
        next(stream)
    stream.close()
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_closing_in_any_order(files: Files) -> None:
    engine = Engine(*files, **OPTIONS)
    stream = engine.stream(PROMPT, **GREEDY)
    next(stream)
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(InvalidError, match="over: close"):
        next(stream)
    stream.close()
    for call in (
        lambda: engine.generate(PROMPT),
        lambda: engine.stream(PROMPT),
        lambda: engine.tokenize("[1]"),
        lambda: engine.detokenize([1]),
        lambda: engine.chat([{"role": "user", "content": "[1]"}]),
    ):
        with pytest.raises(InvalidError, match="closed"):
            call()
    assert engine.info.block_size == 8


def test_two_engines_in_one_process(files: Files, expected: list[int]) -> None:
    with Engine(*files, **OPTIONS) as one, Engine(files[0], **OPTIONS) as two:
        streams = [engine.stream(PROMPT, **GREEDY) for engine in (one, two)]
        for _ in range(3):
            for stream in streams:
                next(stream)
        assert [stream.read().tokens for stream in streams] == [expected, expected]


def test_a_forgotten_engine_warns_and_is_released(files: Files) -> None:
    engine = Engine(*files, **OPTIONS)
    next(engine.stream(PROMPT, **GREEDY))
    cycle: dict[str, Any] = {"engine": engine, "stream": engine.stream(PROMPT, **GREEDY)}
    next(cycle["stream"])
    cycle["self"] = cycle
    with pytest.warns(ResourceWarning, match="never closed"):
        del engine, cycle
        gc.collect()


def test_another_thread_gets_an_exception(engine: Engine, expected: list[int]) -> None:
    found: list[object] = []

    def use() -> None:
        for call in (lambda: engine.generate([1], max_tokens=2), engine.close):
            try:
                found.append(call())
            except InvalidError as error:
                found.append(str(error))

    def run() -> None:
        worker = threading.Thread(target=use)
        worker.start()
        worker.join()

    stream = engine.stream(PROMPT, **GREEDY)
    tokens = list(next(stream).tokens)
    run()
    assert len(found) == 2 and all("another thread uses this engine" in str(f) for f in found)
    for piece in stream:
        tokens += piece.tokens
    assert tokens == expected
    found.clear()
    run()  # nothing is open any more: it may generate, and close
    assert found[0].tokens and found[1] is None  # type: ignore[attr-defined]


def test_a_stream_of_a_thread_that_ended_is_taken_over(engine: Engine, expected: list[int]) -> None:
    kept: list[Any] = []

    def leave() -> None:
        kept.append(engine.stream(PROMPT, **GREEDY))
        next(kept[0])

    worker = threading.Thread(target=leave)
    worker.start()
    worker.join()
    assert engine.generate(PROMPT, **GREEDY).tokens == expected


def test_many_threads_never_crash(engine: Engine, expected: list[int]) -> None:
    done: list[list[int]] = []
    refused: list[str] = []
    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        for _ in range(20):
            try:
                done.append(engine.generate(PROMPT, **GREEDY).tokens)
            except InvalidError as error:
                refused.append(str(error))

    workers = [threading.Thread(target=use) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(done) + len(refused) == 80 and done and refused
    assert all(tokens == expected for tokens in done)
    assert all("thread" in text for text in refused)


def _python(script: str, files: Files, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(path) for path in files]
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", script, *paths, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


FORK = """
import os, sys
import dspine

options = dict(n_ctx=256, threads=2)
engine = dspine.Engine(*sys.argv[1:], **options)
before = engine.generate([1, 2, 3], max_tokens=8, temperature=0).tokens
stream = engine.stream([1, 2], max_tokens=50)
next(stream)
child = os.fork()
if child == 0:
    calls = {
        "generate": lambda: engine.generate([1], max_tokens=2),
        "stream": lambda: engine.stream([1]),
        "next": lambda: stream.__next__(),
        "tokenize": lambda: engine.tokenize("[1]"),
        "open": lambda: dspine.Engine(*sys.argv[1:], **options),
    }
    for name, call in calls.items():
        try:
            call()
            print("no error:", name)
        except dspine.InvalidError as error:
            print(name, "spawn" in str(error))
    engine.close()
    del engine, stream
    sys.exit(7)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
print("parent", engine.generate([1, 2, 3], max_tokens=8, temperature=0).tokens == before)
engine.close()
"""


def test_a_fork_is_refused(files: Files) -> None:
    done = _python(FORK, files)
    lines = done.stdout.splitlines()
    names = ("generate", "stream", "next", "tokenize", "open")
    # The stream was taken over by the refused calls before it.
    assert lines[:2] + lines[3:5] == [f"{n} True" for n in names if n != "next"], done.stderr
    assert lines[2].startswith("next ")
    assert lines[5:] == ["child 7", "parent True"]
    assert done.returncode == 0 and done.stderr == ""


GROWTH = """
import resource, sys
import dspine

def kilobytes():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize() // 1024

sizes = []
for _ in range(280):
    with dspine.Engine(*sys.argv[1:], n_ctx=256, threads=1) as engine:
        engine.generate([1, 2, 3], max_tokens=4)
        next(engine.stream("[1][2]", max_tokens=50))
    sizes.append(kilobytes())
print(min(sizes[240:]) - min(sizes[140:180]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc to read the size from")
def test_opening_and_closing_does_not_grow(files: Files) -> None:
    """One pair of these files is 3 MB: a leak of any part of it would show, a hundred times.

    The allocator itself grows by some MB at first and keeps more or less of it from one moment to
    the next, hence the late start and the minima.
    """
    done = _python(GROWTH, files)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3072
