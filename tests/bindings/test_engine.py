"""The engine against the recorded runs and against llama-server: same ids, same rounds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from dspine import Engine, FixedDepth, InvalidError, LoadError, Round, Server
from dspine_bench.golden_target import text_of
from support.drafters import RandomDrafter
from support.gguf_edit import rewrite
from support.golden import GOLDEN, Recorded, load_rounds
from support.server import Q8_CACHES, Files, exact, expected_counts, server
from support.workshop import Workshop

pytestmark = pytest.mark.native

N_PREDICT = 64
DEPTH = 7
# As support.workshop.EXACT.
EXACT: dict[str, Any] = {
    "n_ctx": 2048,
    "threads": 1,
    "flash_attn": "off",
    "type_k": "f32",
    "type_v": "f32",
    "draft_type_k": "f32",
    "draft_type_v": "f32",
}
STRINGS = (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
# Switches thinking the way Qwen3's does.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(files: Files) -> Iterator[Engine]:
    with Engine(*files, **EXACT) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(files: Files) -> Iterator[Engine]:
    with Engine(files[0], **EXACT) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafting(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with exact(tmp_path_factory.mktemp("logs"), files) as running:
        yield running


class Recorder:
    """A policy that drafts as deep as it may and keeps every round."""

    def __init__(self, depth: int = DEPTH) -> None:
        self.depth = depth
        self.rounds: list[Round] = []

    def next_depth(self) -> int:
        return self.depth

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        assert draft_ms >= 0 and verify_ms > 0
        self.rounds.append(round_)


def test_ids_and_rounds_are_the_recorded_ones(engine: Engine, recorded: Recorded) -> None:
    for run in recorded.runs:
        policy = Recorder()
        done = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0, n_draft=policy)
        assert done.tokens == run.plain
        assert done.text == text_of(run.plain)
        assert done.stop_reason == "limit"
        stats = done.stats
        expected = expected_counts(run, N_PREDICT, DEPTH)
        assert (stats.rounds, stats.drafted, stats.accepted) == expected
        assert sum(stats.drafted_at) == stats.drafted
        assert sum(stats.accepted_at) == stats.accepted
        depths = range(len(stats.drafted_at))
        assert stats.accepted_at == tuple(
            sum(r.accepted > i for r in policy.rounds) for i in depths
        )
        assert stats.prompt_tokens == len(run.prompt)
        assert stats.prompt_ms > 0 and stats.draft_ms > 0 and stats.verify_ms > 0
        for seen, expected_round in zip(policy.rounds[:-1], run.rounds, strict=False):
            assert seen.anchor_position == expected_round["anchor_position"]
            assert seen.accepted == expected_round["accepted"]


def test_without_a_drafter_the_ids_are_the_same(plain: Engine, recorded: Recorded) -> None:
    assert plain.n_draft == 0
    for run in recorded.runs:
        done = plain.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
        assert done.tokens == run.plain
        assert done.stats.mean_accepted_length == 1.0
        assert done.stats.acceptance_by_position == ()


@pytest.mark.e2e
def test_greedy_as_llama_server(engine: Engine, drafting: Server, recorded: Recorded) -> None:
    for run in recorded.runs:
        theirs = drafting.complete(run.prompt, N_PREDICT)
        ours = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
        assert ours.tokens == theirs.tokens and ours.text == theirs.text
        found = (ours.stats.rounds, ours.stats.drafted, ours.stats.accepted)
        assert found == (theirs.rounds, theirs.drafted, theirs.accepted)


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0.8},  # everything else by default
    {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9},
    {"repeat_penalty": 1.3, "repeat_last_n": 32, "frequency_penalty": 0.2},
    {"presence_penalty": 0.7, "ignore_eos": True},
]


@pytest.mark.e2e
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_sampled_as_llama_server(
    sampler: dict[str, Any],
    engine: Engine,
    plain: Engine,
    drafting: Server,
    recorded: Recorded,
) -> None:
    """The same seed gives the same ids and rounds, and without a drafter the same ids."""
    different = set()
    for seed in (1, 2**31 + 5):
        prompt = recorded.runs[0].prompt
        request = {**sampler, "seed": seed}
        body = {"temperature": 0.8, **request}  # complete() is greedy by default
        theirs = drafting.complete(prompt, N_PREDICT, **body)
        ours = engine.generate(prompt, max_tokens=N_PREDICT, **request)
        assert ours.tokens == theirs.tokens
        assert (ours.stats.drafted, ours.stats.accepted) == (theirs.drafted, theirs.accepted)
        assert plain.generate(prompt, max_tokens=N_PREDICT, **request).tokens == ours.tokens
        different.add(tuple(ours.tokens))
    assert len(different) == 2


@pytest.mark.e2e
def test_default_caches_as_llama_server(files: Files, recorded: Recorded, tmp_path: Path) -> None:
    """The engine's own defaults are quantized caches; so is what `dspine serve` starts."""
    with (
        server(tmp_path, files, *Q8_CACHES, "-t", "1", "-c", "2048") as running,
        Engine(*files, n_ctx=2048, threads=1) as engine,
    ):
        for run in recorded.runs:
            theirs = running.complete(run.prompt, N_PREDICT)
            ours = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
            assert ours.tokens == theirs.tokens
            assert ours.stats.accepted == theirs.accepted


@pytest.mark.e2e
def test_stop_text_as_llama_server(engine: Engine, drafting: Server, recorded: Recorded) -> None:
    """A stop text may begin and end inside tokens, and inside a round."""
    run = recorded.runs[0]
    whole = text_of(run.plain)
    for begin, end in ((30, 33), (41, 55), (0, 4), (len(whole) - 3, len(whole))):
        stop = whole[begin:end]
        theirs = drafting.complete(run.prompt, N_PREDICT, stop=[stop, "absent"])
        ours = engine.generate(
            run.prompt, max_tokens=N_PREDICT, temperature=0, stop=[stop, "absent"]
        )
        assert ours.text == theirs.text == whole[: whole.index(stop)]
        assert ours.tokens == theirs.tokens
        assert (ours.stop_reason, theirs.stop) == ("stop", "word")


@pytest.mark.e2e
def test_the_hybrid_pair_as_llama_server(workshop: Workshop, tmp_path: Path) -> None:
    files = workshop.e2e("e2e_hybrid", "f32", "draft_fit")
    runs = load_rounds(GOLDEN / "e2e_hybrid" / "rounds_fit.json").runs
    with exact(tmp_path, files) as running, Engine(*files, **EXACT) as engine:
        for run in runs:
            theirs = running.complete(run.prompt, N_PREDICT)
            ours = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
            assert ours.tokens == theirs.tokens
            assert (ours.stats.rounds, ours.stats.accepted) == (theirs.rounds, theirs.accepted)


@pytest.mark.e2e
def test_chat_template_as_llama_server(files: Files, tmp_path: Path) -> None:
    target = rewrite(
        files[0],
        tmp_path / "thinking.gguf",
        {"tokenizer.chat_template": (gguf.GGUFValueType.STRING, THINKING_TEMPLATE)},
    )
    messages = [
        {"role": "system", "content": "[1]"},
        {"role": "user", "content": "[2]é"},
        {"role": "assistant", "content": "[3]"},
        {"role": "user", "content": [{"type": "text", "text": "[4]"}]},
    ]
    with exact(tmp_path, (target, None)) as running, Engine(target, **EXACT) as engine:
        prompts = []
        for thinking in (True, False, None):
            chosen = {} if thinking is None else {"enable_thinking": thinking}
            body = {"messages": messages, "chat_template_kwargs": chosen}
            theirs = running.post("/apply-template", body)["prompt"]
            prompts.append(engine.apply_template(messages, thinking=thinking))
            assert prompts[-1] == theirs
            answer = engine.chat(messages, thinking=thinking, max_tokens=8, temperature=0)
            body |= {"max_tokens": 8, "temperature": 0, "cache_prompt": False}
            reply = running.post("/v1/chat/completions", body)["choices"][0]
            assert answer.text == reply["message"]["content"]
        assert prompts[1] == prompts[0] + "<think>\n\n</think>\n\n"
        end = engine.apply_template(messages, add_generation_prompt=False)
        assert end == prompts[0].removesuffix("<|im_start|>assistant\n")


def test_depth_can_be_chosen(engine: Engine, recorded: Recorded) -> None:
    run = recorded.runs[0]
    for depth in (0, 1, 3, DEPTH, 10**6):
        done = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0, n_draft=depth)
        assert done.tokens == run.plain
        assert len(done.stats.drafted_at) == min(depth, DEPTH)
    assert (done.stats.rounds, done.stats.accepted) == expected_counts(run, N_PREDICT, DEPTH)[::2]


def test_depth_of_an_engine(files: Files, recorded: Recorded) -> None:
    run = recorded.runs[0]
    for depth, deepest, used in ((3, 3, 3), (0, DEPTH, 0), (FixedDepth(2), DEPTH, 2)):
        with Engine(*files, **EXACT, n_draft=depth) as engine:
            assert engine.n_draft == deepest
            done = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
            assert done.tokens == run.plain and len(done.stats.drafted_at) == used
    with (
        pytest.warns(RuntimeWarning, match="n_draft 12 exceeds the drafter's block size - 1"),
        Engine(*files, **EXACT, n_draft=12) as engine,
    ):
        assert engine.n_draft == DEPTH


def test_a_policy_with_a_negative_depth_is_refused(engine: Engine, recorded: Recorded) -> None:
    class Wrong(FixedDepth):
        def next_depth(self) -> int:
            return -4

    with pytest.raises(InvalidError, match="gave -4"):
        engine.generate(recorded.runs[0].prompt, max_tokens=4, n_draft=Wrong(0))
    run = recorded.runs[0]
    assert engine.generate(run.prompt, max_tokens=4, temperature=0).tokens == run.plain[:4]


def test_an_engine_has_a_name_and_no_copies(engine: Engine) -> None:
    assert "n_draft 7" in repr(engine)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="open another one"):
            copier(engine)


def test_a_policy_that_learns_is_asked_every_round(engine: Engine, recorded: Recorded) -> None:
    class Falling(Recorder):
        def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
            super().observe(round_, draft_ms, verify_ms)
            self.depth = max(self.depth - 1, 0)

    run, policy = recorded.runs[0], Falling()
    done = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0, n_draft=policy)
    assert done.tokens == run.plain
    drafted = [len(r.drafted) for r in policy.rounds]
    assert drafted[:9] == [7, 6, 5, 4, 3, 2, 1, 0, 0]


def test_prompts_are_reused(engine: Engine, files: Files, recorded: Recorded) -> None:
    """As llama-server does: what the caches share with the prompt is not evaluated again."""
    run = recorded.runs[0]
    with Engine(*files, **EXACT) as fresh:
        first = fresh.generate(run.prompt, max_tokens=20, temperature=0)
        assert first.stats.prompt_reused == 0
        longer = [*run.prompt, *first.tokens, 5, 6, 7]
        again = fresh.generate(longer, max_tokens=20, temperature=0)
        assert again.stats.prompt_reused == len(run.prompt) + 19  # the newest was not evaluated
        same = fresh.generate(longer, max_tokens=20, temperature=0)
        assert same.stats.prompt_reused == len(longer) - 1
        without = fresh.generate(longer, max_tokens=20, temperature=0, cache_prompt=False)
        assert without.stats.prompt_reused == 0
    assert again.tokens == same.tokens == without.tokens
    assert again.stats.accepted == without.stats.accepted
    assert engine.generate(longer, max_tokens=20, temperature=0).tokens == without.tokens


def test_a_hybrid_target_reuses_only_what_it_continues(workshop: Workshop) -> None:
    """Its recurrent state cannot be cut back, so a shorter common prefix is evaluated again."""
    files = workshop.e2e("e2e_hybrid", "f32", "draft_fit")
    prompt = list(range(40, 60))
    with Engine(*files, **EXACT) as engine:
        first = engine.generate(prompt, max_tokens=20, temperature=0)
        longer = [*prompt, *first.tokens, 9]
        reused = engine.generate(longer, max_tokens=20, temperature=0)
        assert reused.stats.prompt_reused == len(prompt) + 19
        cut = engine.generate([*prompt, 9], max_tokens=20, temperature=0)
        assert cut.stats.prompt_reused == 0
        for ids, done in ((longer, reused), ([*prompt, 9], cut)):
            again = engine.generate(ids, max_tokens=20, temperature=0, cache_prompt=False)
            assert again.tokens == done.tokens


def test_a_window_that_moved_on_is_not_reused(workshop: Workshop) -> None:
    """A sliding drafter has dropped the rows before a prefix that is much shorter."""
    drafter = RandomDrafter(hidden=96, vocab=128, target_layers=4, windows=(0, 1), window=64)
    files = workshop.random(drafter)
    long = np.random.default_rng(1).integers(0, 128, 1500).tolist()
    short = [*long[:700], 5]
    drafts = []
    with Engine(*files, **EXACT) as engine:
        for before, reuse in ((short, False), (long, True)):
            engine.generate(before, max_tokens=4, temperature=0, cache_prompt=False)
            policy = Recorder()
            engine.generate(short, max_tokens=20, temperature=0, n_draft=policy, cache_prompt=reuse)
            drafts.append([r.drafted for r in policy.rounds])
    assert drafts[0] == drafts[1]


def test_the_context_edge(files: Files, plain: Engine, recorded: Recorded) -> None:
    """Prompt and answer fill the context, drafted or not, and an unlimited answer ends there."""
    prompt = (recorded.runs[0].prompt * 20)[:230]
    with Engine(*files, **{**EXACT, "n_ctx": 256}) as small:
        done = small.generate(prompt, temperature=0)
        assert done.stop_reason == "context" and len(done.tokens) == 256 - 230
        assert done.tokens == plain.generate(prompt, max_tokens=26, temperature=0).tokens
        huge = small.generate(prompt, temperature=0, max_tokens=10**30)
        assert huge.tokens == done.tokens
        full = small.generate([1] * 255, temperature=0)
        assert len(full.tokens) == 1 and full.stop_reason == "context"
        with pytest.raises(InvalidError, match="256 tokens does not fit a context of 256"):
            small.generate([1] * 256)
        with pytest.raises(InvalidError, match="larger n_ctx"):
            small.generate("[1]" * 10_000)


def test_an_end_token_ends_the_answer(files: Files, recorded: Recorded, tmp_path: Path) -> None:
    run = recorded.runs[0]
    at = next(i for i in range(8, 30) if run.plain[i] not in run.plain[:i])
    eos = run.plain[at]
    target = rewrite(
        files[0],
        tmp_path / "eos.gguf",
        {"tokenizer.ggml.eos_token_id": (gguf.GGUFValueType.UINT32, eos)},
    )
    with Engine(target, files[1], **EXACT) as engine:
        done = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0)
        assert done.tokens == run.plain[: at + 1] and done.stop_reason == "eos"
        on = engine.generate(run.prompt, max_tokens=N_PREDICT, temperature=0, ignore_eos=True)
        assert eos not in on.tokens and len(on.tokens) == N_PREDICT


def test_characters_are_never_cut(files: Files, recorded: Recorded, tmp_path: Path) -> None:
    """Tokens that hold parts of characters: whole ones come out, also for a stop text."""
    run = recorded.runs[0]
    ids = run.plain[:5]
    assert len(set(ids)) == 5
    texts = [f"[{i}]" for i in range(1024)]
    parts = ("a\\xf0\\x9f", "\\x98", "\\x80b\\xe2", "\\x82\\xac", "\\xff\\xe2\\x82")
    for token, part in zip(ids, parts, strict=True):
        texts[token] = part
    target = rewrite(files[0], tmp_path / "bytes.gguf", {"tokenizer.ggml.tokens": (STRINGS, texts)})
    with Engine(target, **EXACT) as engine:
        stream = engine.stream(run.prompt, max_tokens=5, temperature=0)
        pieces = [(p.text, p.tokens) for p in stream]
        # the last character never becomes complete
        assert [t for t, _ in pieces] == ["a", "", "😀b", "€", "\ufffd"]
        assert [i for _, ids in pieces for i in ids] == ids
        assert stream.result.text == "a😀b€\ufffd"
        stopped = engine.generate(run.prompt, max_tokens=5, temperature=0, stop="b€")
        assert stopped.text == "a😀" and stopped.tokens == ids[:4]
        assert engine.detokenize(ids[:2]) == "a\ufffd"
        assert engine.tokenize("a😀b€")[:1] == ids[:1]


def test_text_and_ids(engine: Engine) -> None:
    assert engine.tokenize("[1][20][300]") == [1, 20, 300]
    assert engine.tokenize("") == []
    assert engine.detokenize([1, 20, 300]) == "[1][20][300]"
    assert engine.detokenize([]) == ""
    long = list(np.random.default_rng(0).integers(0, 1024, 5000))
    assert engine.tokenize(engine.detokenize(long)) == long
    with pytest.raises(InvalidError, match="token 1024 is outside"):
        engine.detokenize([1024])


def test_a_text_prompt_is_its_ids(engine: Engine, recorded: Recorded) -> None:
    run = recorded.runs[0]
    done = engine.generate(text_of(run.prompt), max_tokens=20, temperature=0)
    assert done.tokens == run.plain[:20]
    assert engine.generate(np.array(run.prompt), max_tokens=20, temperature=0).text == done.text


def test_chat(engine: Engine, recorded: Recorded) -> None:
    run = recorded.runs[0]
    messages = [{"role": "user", "content": text_of(run.prompt)}]
    assert engine.apply_template(messages) == text_of(run.prompt)
    done = engine.chat(messages, max_tokens=20, temperature=0)
    assert done.tokens == run.plain[:20]
    with engine.chat(messages, max_tokens=20, temperature=0, stream=True) as stream:
        assert "".join(map(str, stream)) == done.text
    assert stream.result.tokens == done.tokens


def test_seeds(files: Files) -> None:
    with Engine(*files, **EXACT, seed=7) as engine:
        first = engine.generate([1, 2], max_tokens=20)
        assert engine.generate([1, 2], max_tokens=20, cache_prompt=False).tokens == first.tokens
        assert engine.generate([1, 2], max_tokens=20, seed=8).tokens != first.tokens
        fresh = {tuple(engine.generate([1, 2], max_tokens=20, seed=-1).tokens) for _ in range(3)}
        assert len(fresh) > 1


def test_the_file_recommends_a_sampler(files: Files, tmp_path: Path) -> None:
    """What llama-server takes from the target's file, the engine takes as well."""
    recommended = {"general.sampling.temp": (gguf.GGUFValueType.FLOAT32, 0.0)}
    target = rewrite(files[0], tmp_path / "recommends.gguf", recommended)
    with Engine(target, **EXACT) as engine:
        greedy = engine.generate([1, 2], max_tokens=20, temperature=0).tokens
        assert engine.generate([1, 2], max_tokens=20).tokens == greedy
        assert engine.generate([1, 2], max_tokens=20, temperature=1.5, seed=1).tokens != greedy


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -(10**20)}, "expected at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, expected an integer"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_p": 1.5}, "top_p must lie between 0 and 1"),
        ({"min_p": -0.1}, "min_p must lie"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"repeat_penalty": 0}, "penalty_repeat"),
        ({"repeat_last_n": -1}, "repeat_last_n is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"stop": ["a", ""]}, "empty text"),
        ({"stop": [3]}, "stop holds 3"),
        ({"n_draft": -1}, "n_draft is -1"),
        ({"n_draft": 2**31}, "n_draft is 2147483648"),
        ({"n_draft": "deep"}, "n_draft is 'deep'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], match: str, engine: Engine) -> None:
    with pytest.raises(InvalidError, match=match):
        engine.generate([1], **{"max_tokens": 2, **settings})
    assert len(engine.generate([1], max_tokens=2).tokens) == 2


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([1024], "token 1024 is outside the vocabulary"),
        ([-1], "token -1"),
        ([2**40], "does not fit 32 bits"),
        ([0.5], "integers"),
        ([[1], [2]], "flat list"),
        ("\ud800", "no Unicode text"),
        ([1] * 5000, "does not fit a context of 2048"),
        ("[1]" * 5000, "does not fit a context of 2048"),
    ],
)
def test_bad_prompts(prompt: Any, match: str, engine: Engine) -> None:
    with pytest.raises(InvalidError, match=match):
        engine.generate(prompt, max_tokens=2)
    assert len(engine.generate([1], max_tokens=2).tokens) == 2


def test_unknown_settings_are_named(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"unknown setting 'temprature'.*temperature"):
        engine.generate([1], temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "not empty"),
        (["hello"], "role and content"),
        ([{"role": "user", "content": {1, 2}}], "role and content"),
        ([{"content": "x"}], "refuses these messages"),
        (3, "role and content"),
    ],
)
def test_bad_messages(messages: Any, match: str, engine: Engine) -> None:
    with pytest.raises(InvalidError, match=match):
        engine.chat(messages, max_tokens=2)


def test_a_broken_template_is_refused(files: Files, tmp_path: Path) -> None:
    broken = {"tokenizer.chat_template": (gguf.GGUFValueType.STRING, "{% for m in %}{{")}
    target = rewrite(files[0], tmp_path / "broken.gguf", broken)
    with Engine(target, **EXACT) as engine:
        for _ in range(2):
            with pytest.raises(InvalidError, match="template of the target cannot be parsed"):
                engine.chat([{"role": "user", "content": "[1]"}], max_tokens=2)
        assert engine.generate([1], max_tokens=2).tokens


def test_files_that_do_not_load(files: Files, workshop: Workshop, tmp_path: Path) -> None:
    target, draft = files
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(target.read_bytes()[:5000])
    for arguments, match in (
        ((tmp_path / "absent.gguf",), "absent.gguf"),
        ((target, tmp_path / "absent.gguf"), "absent.gguf"),
        ((draft,), "this is a drafter, which generates nothing alone"),
        ((target, target), "no DSpine drafter"),
        ((workshop.e2e_target("e2e_hybrid"), draft), "does not fit"),
        ((cut,), "cut.gguf"),
        ((tmp_path,), "cannot be loaded"),
    ):
        with pytest.raises(LoadError, match=match):
            Engine(*arguments, **EXACT)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_ctx": -1}, "n_ctx"),
        ({"n_ctx": 2**40}, "does not fit 32 bits"),
        ({"type_k": "q9"}, "type_k is 'q9'"),
        ({"draft_type_v": "f99"}, "type_v_draft is 'f99'"),
        ({"flash_attn": "maybe"}, "flash_attn"),
        ({"n_draft": -2}, "n_draft is -2"),
        ({"n_draft": None}, "expected 'auto'"),
        ({"n_draft": "most"}, "expected 'auto'"),
        ({"seed": -5}, "seed is -5"),
        ({"n_batch": 0}, "at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str, files: Files) -> None:
    with pytest.raises(InvalidError, match=match):
        Engine(*files, **{**EXACT, **options})


def test_metadata(engine: Engine) -> None:
    pair = engine._pair
    assert pair.meta("general.architecture") == "qwen3"
    assert pair.meta("general.architecture", of_drafter=True) == "dflash"
    with pytest.raises(InvalidError, match="no metadata 'nothing'"):
        pair.meta("nothing")
