"""llama-server on the trained Qwen3 pair: same text, in the recorded rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dspine import Server, ServerExitError
from dspine_bench.golden_target import text_of, token_text, tokens_of
from support.golden import Recorded
from support.server import (
    EXACT_TARGET,
    ONE_THREAD,
    Q8_CACHES,
    Files,
    exact,
    expected_counts,
    run_program,
    server,
)
from support.workshop import Workshop

pytestmark = pytest.mark.e2e

N_PREDICT = 64
SHARE = 0.9  # of the recorded mean accepted length, for everything that is not exact
# Where a request's last draft is capped, so is its mean: the recorded 5.45 becomes 5.14.
DEPTH = 7


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def plain(files: Files, logs: Path) -> Server:
    """The server without a drafter."""
    with exact(logs, (files[0], None)) as running:
        yield running


@pytest.fixture(scope="module")
def drafting(files: Files, logs: Path) -> Server:
    """The server with the F32 drafter, one slot, everything by default."""
    with exact(logs, files, "--metrics") as running:
        yield running


def _all(running: Server, recorded: Recorded) -> float:
    """Run every recorded prompt; the text must be the recorded one. Mean accepted length."""
    rounds = accepted = 0
    for run in recorded.runs:
        done = running.complete(run.prompt, N_PREDICT)
        assert done.tokens == run.plain
        rounds += done.rounds
        accepted += done.accepted
    return (accepted + rounds) / rounds


def _expected_mean(recorded: Recorded) -> float:
    counts = [expected_counts(run, N_PREDICT, DEPTH) for run in recorded.runs]
    rounds, _, accepted = (sum(values) for values in zip(*counts, strict=True))
    return (accepted + rounds) / rounds


def test_without_a_drafter(plain: Server, recorded: Recorded) -> None:
    assert _all(plain, recorded) == 1.0
    assert "dspine" not in plain.log


def test_recorded_rounds(drafting: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        done = drafting.complete(run.prompt, N_PREDICT)
        assert done.tokens == run.plain
        counts = (done.rounds, done.drafted, done.accepted)
        assert counts == expected_counts(run, N_PREDICT, DEPTH)


def test_defaults_are_logged(drafting: Server) -> None:
    """No --spec-type, no depth, no slot count was given."""
    log = drafting.log
    assert "drafting 7 tokens a round (block size 8 - 1" in log
    assert "dspine: using 1 slot" in log
    assert "n_slots = 1" in log
    assert "mean len" in log or drafting.complete([1, 2], 20)


def test_text_prompts_and_chat(drafting: Server, recorded: Recorded) -> None:
    run = recorded.runs[1]
    text = drafting.complete(text_of(run.prompt), N_PREDICT).text
    assert tokens_of(text) == run.plain
    body = {
        "messages": [{"role": "user", "content": text_of(run.prompt)}],
        "max_tokens": N_PREDICT,
        "temperature": 0,
    }
    answer = drafting.post("/v1/chat/completions", body)
    assert tokens_of(answer["choices"][0]["message"]["content"]) == run.plain
    assert answer["timings"]["draft_n_accepted"] > 0


def test_metrics(drafting: Server, recorded: Recorded) -> None:
    done = drafting.complete(recorded.runs[0].prompt, N_PREDICT)
    lines = [line.split() for line in drafting.get("/metrics").splitlines() if line[:1] != "#"]
    values = {name.partition(":")[2]: float(value) for name, value in lines}
    assert values["spec_decode_num_draft_tokens_total"] >= done.drafted > 0


def test_streaming(drafting: Server, recorded: Recorded) -> None:
    run = recorded.runs[2]
    with drafting.stream(run.prompt, N_PREDICT) as answer:
        pieces = list(answer)
    assert len(pieces) > 1 and answer.result is not None
    assert answer.result.tokens == run.plain == tokens_of("".join(pieces))


def test_a_dropped_request_leaves_the_slot_usable(drafting: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        with drafting.stream(run.prompt, 1500) as answer:
            next(answer)
        assert drafting.complete(run.prompt, N_PREDICT).tokens == run.plain


@pytest.mark.parametrize("n_predict", [1, 2, 3, 8, 9, 10, 33])
def test_short_limits(n_predict: int, drafting: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        done = drafting.complete(run.prompt, n_predict)
        assert done.tokens == run.plain[:n_predict]
        assert done.stop == "limit"


def test_prompt_cache(drafting: Server, plain: Server, recorded: Recorded) -> None:
    """The same prompt again, a longer one, and one that shares a beginning."""
    run = recorded.runs[0]
    fresh = drafting.complete(run.prompt, N_PREDICT, cache_prompt=True)
    again = drafting.complete(run.prompt, N_PREDICT, cache_prompt=True)
    assert fresh.tokens == again.tokens == run.plain
    assert again.cached > 0
    assert again.rounds == expected_counts(run, N_PREDICT, DEPTH)[0]
    grown = run.prompt + run.plain[:40]
    longer = drafting.complete(grown, N_PREDICT, cache_prompt=True)
    assert longer.cached > len(run.prompt)
    assert longer.tokens == plain.complete(grown, N_PREDICT).tokens
    assert longer.rounds == drafting.complete(grown, N_PREDICT).rounds
    drafting.complete(run.prompt, 2, cache_prompt=True)
    branch = run.prompt[:20] + recorded.runs[1].prompt[:9]
    forked = drafting.complete(branch, N_PREDICT, cache_prompt=True)
    assert forked.cached > 0
    assert forked.tokens == plain.complete(branch, N_PREDICT).tokens
    assert forked.rounds == drafting.complete(branch, N_PREDICT).rounds


def test_stop_words(drafting: Server, plain: Server, recorded: Recorded) -> None:
    """A stop word inside an accepted draft ends the text where plain decoding ends it."""
    for run in recorded.runs:
        for index in (1, 5, 20, 40):
            stop = {"stop": [token_text(run.plain[index]) + token_text(run.plain[index + 1])]}
            with_drafter = drafting.complete(run.prompt, N_PREDICT, **stop)
            without = plain.complete(run.prompt, N_PREDICT, **stop)
            assert with_drafter.text == without.text
            assert with_drafter.stop == without.stop == "word"


def test_temperature(drafting: Server, plain: Server, recorded: Recorded) -> None:
    """With a seed, the sampler draws the same numbers for the same tokens."""
    for seed in (1, 2, 3):
        settings = {"temperature": 1.0, "seed": seed}
        prompt = recorded.runs[0].prompt
        first = drafting.complete(prompt, N_PREDICT, **settings)
        assert first.tokens == drafting.complete(prompt, N_PREDICT, **settings).tokens
        assert first.tokens == plain.complete(prompt, N_PREDICT, **settings).tokens
        assert len(first.tokens) == N_PREDICT


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_k_m"])
def test_file_types(kind: str, workshop: Workshop, recorded: Recorded, logs: Path) -> None:
    with exact(logs, workshop.e2e("e2e_qwen3", kind)) as running:
        mean = _all(running, recorded)
    print(f"{kind}: mean accepted length {mean:.3f}")  # noqa: T201
    assert mean >= SHARE * _expected_mean(recorded)


@pytest.mark.parametrize("flags", [Q8_CACHES, ("-fa", "on"), ("-ctkd", "q8_0", "-fa", "on")])
def test_caches(flags: tuple[str, ...], files: Files, recorded: Recorded, logs: Path) -> None:
    with server(logs, files, *ONE_THREAD, *flags) as running:
        mean = _all(running, recorded)
    print(f"{' '.join(flags)}: mean accepted length {mean:.3f}")  # noqa: T201
    assert mean >= SHARE * _expected_mean(recorded)


@pytest.mark.parametrize("flags", [(), ("-kvu",), ("-ub", "16"), ("-ubd", "8")])
def test_four_slots_at_once(
    flags: tuple[str, ...], files: Files, recorded: Recorded, logs: Path
) -> None:
    with (
        exact(logs, files, "-np", "4", "-c", "8192", *flags) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        # Twice as many requests as slots, so that slots start while others draft.
        runs = recorded.runs * 2
        done = list(pool.map(lambda run: running.complete(run.prompt, N_PREDICT), runs))
        if "-ubd" in flags:
            assert "--spec-draft-ubatch 8 cannot hold one draft of 4 slot(s) x 8 rows" in (
                running.log
            )
    for run, answer in zip(runs, done, strict=True):
        assert answer.tokens == run.plain
        counts = (answer.rounds, answer.drafted, answer.accepted)
        assert counts == expected_counts(run, N_PREDICT, DEPTH)


@pytest.mark.parametrize(
    ("batch", "ubatch"), [("8", "8"), ("16", "16"), ("32", "8"), ("32", "3"), ("512", "64")]
)
def test_batch_sizes(
    batch: str, ubatch: str, files: Files, plain: Server, recorded: Recorded, logs: Path
) -> None:
    long = [token for run in recorded.runs for token in run.prompt] * 4
    with exact(logs, files, "-b", batch, "-ub", ubatch) as running:
        assert _all(running, recorded) == pytest.approx(_expected_mean(recorded))
        assert running.complete(long, 32).tokens == plain.complete(long, 32).tokens


@pytest.mark.parametrize(("depth", "used"), [("1", 1), ("3", 3), ("64", 7)])
def test_depth(depth: str, used: int, files: Files, recorded: Recorded, logs: Path) -> None:
    with exact(logs, files, "--spec-draft-n-max", depth) as running:
        mean = _all(running, recorded)
        done = running.complete(recorded.runs[0].prompt, N_PREDICT)
        log = running.log
    assert 1.0 < mean <= used + 1
    assert done.drafted <= used * done.rounds
    if depth == "64":
        assert "--spec-draft-n-max 64 exceeds the block size 8, using 7" in log
        assert mean == pytest.approx(_expected_mean(recorded))


def test_depth_zero_drafts_nothing(files: Files, recorded: Recorded, logs: Path) -> None:
    with exact(logs, files, "--spec-draft-n-max", "0") as running:
        assert _all(running, recorded) == 1.0
        assert "--spec-draft-n-max 0" in running.log


def test_shortest_draft_is_clamped(files: Files, recorded: Recorded, logs: Path) -> None:
    with exact(logs, files, "--spec-draft-n-min", "64") as running:
        assert _all(running, recorded) > 1.0
        assert "--spec-draft-n-min 64 exceeds the block size 8, using 7" in running.log


@pytest.mark.parametrize("flags", [("-ngl", "0"), ("-ngl", "2"), ("-ngl", "999", "-ngld", "0")])
def test_layers_on_devices(
    flags: tuple[str, ...], files: Files, recorded: Recorded, logs: Path
) -> None:
    with exact(logs, files, *flags) as running:
        assert _all(running, recorded) >= SHARE * _expected_mean(recorded)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_quantized_targets(
    kind: str, files: Files, recorded: Recorded, logs: Path, tmp_path: Path
) -> None:
    """Weights and head that the CPU backend repacks; the drafter is for the same token list."""
    target = tmp_path / "target.gguf"
    head = ("--output-tensor-type", "q4_0") if kind == "Q4_0" else ()
    made = run_program("llama-quantize", *head, files[0], target, kind, "1")
    assert made.returncode == 0, made.stderr[-1000:]
    answers = []
    for draft in (None, files[1]):
        with exact(logs, (target, draft)) as running:
            answers.append([running.complete(run.prompt, N_PREDICT) for run in recorded.runs])
    for plain, drafted in zip(*answers, strict=True):
        assert drafted.tokens == plain.tokens
    assert sum(a.accepted for a in answers[1]) > sum(a.rounds for a in answers[1])


def test_p_min(files: Files, recorded: Recorded, logs: Path) -> None:
    """A higher threshold drafts less, and more of what it drafts is accepted."""
    rates, drafted = [], []
    for p_min in ("0", "0.5", "0.9"):
        with exact(logs, files, "--spec-draft-p-min", p_min) as running:
            done = [running.complete(run.prompt, N_PREDICT) for run in recorded.runs]
        assert [d.tokens for d in done] == [run.plain for run in recorded.runs]
        drafted.append(sum(d.drafted for d in done))
        rates.append(sum(d.accepted for d in done) / drafted[-1])
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[-1]
    assert rates == sorted(rates) and rates[-1] > rates[0]


def test_context_edge(files: Files, recorded: Recorded, logs: Path) -> None:
    """The context fills up in the middle of a block; both servers end at the same token."""
    prompt = (recorded.runs[0].prompt * 8)[:200]
    answers = []
    for pair in (files, (files[0], None)):
        with exact(logs, pair, "-c", "256", "--no-context-shift") as running:
            answers.append(running.complete(prompt, 500))
            assert (
                running.complete(recorded.runs[1].prompt, 20).tokens
                == (recorded.runs[1].plain[:20])
            )
    assert answers[0].tokens == answers[1].tokens
    assert 40 <= len(answers[0].tokens) <= 57
    assert answers[0].stop == answers[1].stop == "limit"


def _refused(root: Path, files: Files, *flags: str | Path) -> str:
    """Start a server that must refuse; the lines that say why."""
    running = exact(root, files, *flags)
    with pytest.raises(ServerExitError) as caught:
        running.start()
    running.stop()
    assert caught.value.code > 0, "ended by a signal"
    return caught.value.log


@pytest.mark.parametrize("kind", ["draft-simple", "draft-eagle3", "draft-mtp", "draft-dspark"])
def test_wrong_type(kind: str, files: Files, logs: Path) -> None:
    log = _refused(logs, files, "--spec-type", kind)
    lines = [line for line in log.splitlines() if kind in line and "DSpine" in line]
    lines = lines or [line for line in log.splitlines() if kind in line and "drafter" in line]
    assert len(lines) == 1 and files[1].name in lines[0]


def test_right_type(files: Files, recorded: Recorded, logs: Path) -> None:
    for kind in ("draft-dflash", "ngram-simple,draft-dflash", "ngram-simple"):
        with exact(logs, files, "--spec-type", kind) as running:
            assert _all(running, recorded) > 3.0


def test_wrong_partner(workshop: Workshop, files: Files, logs: Path) -> None:
    other = workshop.random_target("qwen3", 96, 1024, 6)
    assert "hidden size" in _refused(logs, (other, files[1]))
    same_width = workshop.random_target("qwen3", 128, 512, 6)
    assert "vocabulary size" in _refused(logs, (same_width, files[1]))
    assert "layer count" in _refused(logs, (workshop.random_target("qwen3", 128, 1024), files[1]))


def test_damaged_drafter(files: Files, logs: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[1].read_bytes()[:300_000])
    assert "cut.gguf" in _refused(logs, (files[0], cut))
    assert "absent.gguf" in _refused(logs, (files[0], tmp_path / "absent.gguf"))


def test_default_caches_and_threads(files: Files, recorded: Recorded, logs: Path) -> None:
    """As a person starts it: F16 caches, automatic flash attention, all threads."""
    with server(logs, files, "-c", "2048") as running:
        run = recorded.runs[0]
        done = running.complete(run.prompt, N_PREDICT)
    assert done.tokens == run.plain
    assert done.rounds <= expected_counts(run, N_PREDICT, DEPTH)[0] / SHARE


def test_exact_flags_are_what_the_exact_tests_assume() -> None:
    assert EXACT_TARGET[EXACT_TARGET.index("-fa") + 1] == "off"


def test_a_batch_too_small_for_all_slots(files: Files, recorded: Recorded, logs: Path) -> None:
    """Eight slots verify 64 rows at once: -b 16 is raised, with a line that says so."""
    with exact(logs, files, "-np", "8", "-c", "8192", "-b", "16", "-ub", "9") as running:
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda run: running.complete(run.prompt, N_PREDICT), recorded.runs * 3)
            )
        assert "using -b 64 -ub 9" in running.log
    assert [a.tokens for a in answers] == [run.plain for run in recorded.runs * 3]


def test_saved_slots_keep_the_draft(files: Files, recorded: Recorded, tmp_path: Path) -> None:
    """A restored slot drafts as it did; without the drafter's file it says so and still answers."""
    run, other = recorded.runs[0], recorded.runs[1]
    flags = ("--slot-save-path", tmp_path)
    longer = run.prompt + run.plain[:20]
    with exact(tmp_path, files, *flags) as running:
        before = running.complete(longer, 40, cache_prompt=True)
        running.post("/slots/0?action=save", {"filename": "a"})
        running.complete(other.prompt, N_PREDICT, cache_prompt=True)
        running.post("/slots/0?action=restore", {"filename": "a"})
        after = running.complete(longer, 40, cache_prompt=True)
        assert after.tokens == before.tokens and after.cached > 0
        assert after.accepted == before.accepted
        (tmp_path / "a.draft").unlink()
        running.post("/slots/0?action=restore", {"filename": "a"})
        assert running.complete(longer, 40, cache_prompt=True).tokens == before.tokens
        assert "start without the restored prompt" in running.log
