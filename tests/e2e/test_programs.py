"""The other programs, and the loop in this process, on the same pairs and in the same rounds."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from dspine import Pair, PairOptions
from dspine_bench.golden_target import text_of, tokens_of
from support.golden import GOLDEN, Recorded, Run, load_rounds
from support.server import EXACT_DRAFT, EXACT_TARGET, run_program
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.e2e

N_PREDICT = 64
SHARE = 0.9  # of the recorded mean accepted length, for everything that is not exact
PAIRS = (("e2e_qwen3", "draft", "rounds"), ("e2e_hybrid", "draft_fit", "rounds_fit"))


def _whole(pair: Pair, run: Run) -> tuple[int, int]:
    """Rounds and accepted tokens of a run whose last draft is not capped; text checked."""
    limit = len(run.rounds)
    seen: list[object] = []
    done = pair.generate(
        run.prompt,
        2 * N_PREDICT,
        on_round=lambda r: len(seen.append(r) or seen) < limit,
    )
    assert done.tokens[:N_PREDICT].tolist() == run.plain[: len(done.tokens)]
    return done.stats.rounds, done.stats.accepted


def test_recorded_rounds_in_process(recorded: Recorded, workshop: Workshop) -> None:
    """Every round as recorded, the last one as well: the limit lies beyond it."""
    rounds = accepted = 0
    with Pair(*workshop.e2e("e2e_qwen3", "f32"), EXACT) as pair:
        for run in recorded.runs:
            done = pair.generate(run.prompt, N_PREDICT + recorded.block_size)
            assert done.tokens[:N_PREDICT].tolist() == run.plain
            for found, expected in zip(done.rounds, run.rounds, strict=False):
                assert found.anchor_position == expected["anchor_position"]
                assert found.anchor == expected["anchor_token"]
                assert list(found.drafted) == expected["drafted"]
                assert found.accepted == expected["accepted"]
                assert list(found.emitted) == expected["emitted"]
            n, a = _whole(pair, run)
            assert n == len(run.rounds)
            rounds, accepted = rounds + n, accepted + a
    assert (accepted + rounds) / rounds == pytest.approx(recorded.mean_accepted_length)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("cache", ["f32", "q8_0"])
def test_file_types_in_process(
    kind: str, cache: str, recorded: Recorded, workshop: Workshop
) -> None:
    """Lossless, and against the recorded mean itself: no draft is capped here."""
    options = EXACT
    if cache == "q8_0":
        names = ("type_k", "type_v", "type_k_draft", "type_v_draft")
        options = dataclasses.replace(EXACT, flash_attn="on", **dict.fromkeys(names, "q8_0"))
    rounds = accepted = 0
    with Pair(*workshop.e2e("e2e_qwen3", kind), options) as pair:
        for run in recorded.runs:
            n, a = _whole(pair, run)
            rounds, accepted = rounds + n, accepted + a
    mean = (accepted + rounds) / rounds
    print(f"{kind}, {cache} caches: mean accepted length {mean:.3f}")  # noqa: T201
    assert mean >= SHARE * recorded.mean_accepted_length


def test_defaults_in_process(recorded: Recorded, workshop: Workshop) -> None:
    with Pair(*workshop.e2e("e2e_qwen3", "bf16"), PairOptions(n_threads=1)) as pair:
        for run in recorded.runs:
            assert pair.generate(run.prompt, N_PREDICT).tokens.tolist() == run.plain


def _accepted(log: str) -> list[tuple[int, int]]:
    """(accepted, drafted) of every round in a debug log of llama-speculative-simple."""
    return [(int(a), int(n)) for a, n in re.findall(r"accepted (\d+)/(\d+) draft tokens", log)]


@pytest.mark.parametrize(("case", "draft", "rounds"), PAIRS)
@pytest.mark.parametrize("flags", [(), ("-ub", "16")])
def test_speculative_simple(
    case: str, draft: str, rounds: str, flags: tuple[str, ...], workshop: Workshop
) -> None:
    """It drafts after the last prompt token, so the first anchor belongs to its prompt."""
    target, drafter = workshop.e2e(case, "f32", draft)
    for run in load_rounds(GOLDEN / case / f"{rounds}.json").runs:
        prompt = [*run.prompt, run.plain[0]]
        done = run_program(
            "llama-speculative-simple",
            *("-m", target, "-md", drafter, *EXACT_TARGET, *EXACT_DRAFT, *flags),
            *("-p", text_of(prompt), "-n", str(N_PREDICT - 2), "--temp", "0", "-v"),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        tokens = tokens_of(done.stdout.strip())
        assert tokens[: len(prompt)] == prompt
        assert tokens[len(run.prompt) :][:N_PREDICT] == run.plain[: len(tokens) - len(run.prompt)]
        # up to the first draft that the limit cuts short
        found = list(itertools.takewhile(lambda pair: pair[1] == 7, _accepted(done.stderr)))
        expected = [(r["accepted"], 7) for r in run.rounds]
        common = min(len(found), len(expected) - 1)
        assert common >= len(expected) - 8 and found[:common] == expected[:common]


def test_speculative_simple_refuses_a_wrong_partner(workshop: Workshop) -> None:
    _, drafter = workshop.e2e("e2e_qwen3", "f32")
    other = workshop.random_target("qwen3", 96, 1024, 6)
    done = run_program("llama-speculative-simple", "-m", other, "-md", drafter, "-p", "[1][2]")
    assert done.returncode == 1
    assert "does not fit" in done.stderr and "hidden size" in done.stderr


def test_llama_cli(recorded: Recorded, workshop: Workshop) -> None:
    target, drafter = workshop.e2e("e2e_qwen3", "f32")
    run = recorded.runs[0]
    done = run_program(
        "llama-cli",
        *("-m", target, "-md", drafter, *EXACT_TARGET, *EXACT_DRAFT, "--temp", "0"),
        *("-st", "--simple-io", "-p", text_of(run.prompt), "-n", str(N_PREDICT)),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        line for line in done.stdout.splitlines() if line.startswith("[") and "t/s" not in line
    ]
    assert [tokens_of(line) for line in lines] == [run.plain]


def test_llama_cli_refuses_a_wrong_partner(workshop: Workshop) -> None:
    _, drafter = workshop.e2e("e2e_qwen3", "f32")
    other = workshop.random_target("qwen3", 96, 1024, 6)
    done = run_program("llama-cli", "-m", other, "-md", drafter, "-st", "-p", "[1]", "-n", "4")
    assert done.returncode > 0
    assert "hidden size" in done.stderr + done.stdout


def test_converted_by_the_command(workshop: Workshop, tmp_path: Path) -> None:
    """The files above come from the converter's function; this one from its command."""
    from dspine_convert.cli import main

    target, drafter = workshop.e2e("e2e_qwen3", "f32")
    source = GOLDEN / "e2e_qwen3" / "draft"
    arguments = [str(source), "--target", str(target), "-t", "f32", "-o", str(tmp_path), "-q"]
    assert main(arguments) == 0
    assert (tmp_path / drafter.name).read_bytes() == drafter.read_bytes()
