"""The native drafter against the vectors of the public reference, F32, flash attention off."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from dspine import DecodeError, InvalidError, Pair
from support.checkpoint import read_safetensors
from support.compare import aligned_scores, worst_errors
from support.golden import GOLDEN, UNIT_CASES, load_case, load_rounds
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

TOLERANCE = 1e-4  # the golden README's; float32 sums in another order reach 2e-5
CAPTURE = dataclasses.replace(EXACT, capture=True)


@pytest.mark.parametrize("name", UNIT_CASES)
def test_unit_case(name: str, workshop: Workshop) -> None:
    case = load_case(name)
    target, draft = workshop.unit(name, "f32")
    options = dataclasses.replace(CAPTURE, n_draft=case.rows - 1)
    with Pair(target, draft, options) as pair:
        pair.draft_feed(0, case.features, 0)
        drafted = pair.draft(0, case.anchor, len(case.features))
        errors = worst_errors(pair, SimpleNamespace(**case.expected))
    print(name, {key: f"{value:.1e}" for key, value in errors.items()})  # noqa: T201
    assert max(errors.values()) < TOLERANCE, errors
    assert drafted.tolist() == case.expected["drafted"].tolist()


def test_the_injection_matters(workshop: Workshop) -> None:
    """Guards the guard: without the injection the golden drafts differ."""
    case = load_case("full_attn")
    without = case.expected["drafted_no_injection"].tolist()
    target, draft = workshop.unit("full_attn", "f32")
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        assert pair.draft(0, case.anchor, len(case.features)).tolist() != without


@pytest.mark.parametrize("name", ["full_attn", "sliding"])
def test_every_depth_is_a_prefix(name: str, workshop: Workshop) -> None:
    case = load_case(name)
    target, draft = workshop.unit(name, "f32")
    for depth in range(1, case.rows):
        with Pair(target, draft, dataclasses.replace(EXACT, n_draft=depth)) as pair:
            assert pair.info.n_draft == depth
            pair.draft_feed(0, case.features, 0)
            drafted = pair.draft(0, case.anchor, len(case.features))
        assert drafted.tolist() == case.expected["drafted"][:depth].tolist()


@pytest.mark.parametrize("name", UNIT_CASES)
def test_a_draft_leaves_the_cache_as_it_was(name: str, workshop: Workshop) -> None:
    case = load_case(name)
    target, draft = workshop.unit(name, "f32")
    with Pair(target, draft, EXACT) as pair:
        half = len(case.features) // 2
        pair.draft_feed(0, case.features[:half], 0)
        pair.draft(0, case.anchor, half)  # its rows must be gone before the next feed
        pair.draft_feed(0, case.features[half:], half)
        first = pair.draft(0, case.anchor, len(case.features))
        ids, scores = pair.candidates()
        second = pair.draft(0, case.anchor, len(case.features))
        again_ids, again = pair.candidates()
    if case.rows == pair.info.block_size:
        assert first.tolist() == case.expected["drafted"].tolist()
    assert second.tolist() == first.tolist()
    assert (ids == again_ids).all() and (scores == again).all()


def test_truncation_forgets_features(workshop: Workshop) -> None:
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    n = len(case.features)
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, case.features[: n - 4], 0)
        pair.draft_feed(0, 3 * case.features[:8], n - 4)  # a draft that was rejected
        pair.truncate(0, n - 4)
        pair.draft_feed(0, case.features[n - 4 :], n - 4)
        drafted = pair.draft(0, case.anchor, n)
    assert drafted.tolist() == case.expected["drafted"].tolist()


def test_many_sequences_draft_as_one_does(workshop: Workshop) -> None:
    """Unequal contexts and anchors in one batch; the ubatch default is raised to hold them."""
    case = load_case("b16_k16")
    target, draft = workshop.unit("b16_k16", "f32")
    lengths, anchors = [50, 17, 33, 1], [case.anchor, 3, 77, 410]
    options = dataclasses.replace(EXACT, n_seq=4, n_draft_ubatch=16)
    single, tables = [], []
    with Pair(target, draft, options) as pair:
        assert pair.info.n_ubatch_draft >= 4 * 16
        for seq, n in enumerate(lengths):
            pair.draft_feed(seq, case.features[:n], 0)
        for seq, n in enumerate(lengths):
            single.append(pair.draft(seq, anchors[seq], n).tolist())
            tables.append(pair.candidates())
        many = [d.tolist() for d in pair.draft_many(range(4), anchors, lengths)]
        for index, (ids, scores) in enumerate(tables):
            found = aligned_scores(ids, *pair.candidates(index))
            np.testing.assert_allclose(found, scores, rtol=0, atol=TOLERANCE)
        some = [d.tolist() for d in pair.draft_many([1, 3], [3, 410], [17, 1])]
    assert many == single
    assert some == [single[1], single[3]]
    assert single[0] == case.expected["drafted"].tolist()


@pytest.mark.parametrize(
    ("name", "draft_name", "record", "rounds"),
    [
        ("e2e_qwen3", "draft", "first_round", "rounds"),
        ("e2e_hybrid", "draft", "first_round", "rounds"),
        ("e2e_hybrid", "draft_fit", "first_round_fit", "rounds_fit"),
    ],
)
def test_first_rounds(
    name: str, draft_name: str, record: str, rounds: str, workshop: Workshop
) -> None:
    """Taps of the target first, then the draft from them."""
    expected = read_safetensors(GOLDEN / name / f"{record}.safetensors")
    prompts = json.loads((GOLDEN / name / f"{rounds}.json").read_text())["prompts"]
    target, draft = workshop.e2e(name, "f32", draft_name)
    with Pair(target, draft, CAPTURE) as pair:
        for i, prompt in enumerate(prompts):
            if f"prompt{i}.scores" not in expected:
                continue
            pair.truncate(0, 0)
            pair.target_decode(0, prompt["prompt"], 0)
            taps = pair.target_taps()
            np.testing.assert_allclose(
                taps, expected[f"prompt{i}.target_hidden"], rtol=0, atol=TOLERANCE
            )
            assert pair.target_logits()[-1].argmax() == prompt["first_token"]
            drafted = pair.draft(0, prompt["first_token"], len(prompt["prompt"]))
            final = pair.tensor("result_norm")[0]
            np.testing.assert_allclose(
                final, expected[f"prompt{i}.final_hidden"], rtol=0, atol=TOLERANCE
            )
            scores = aligned_scores(expected[f"prompt{i}.candidates"], *pair.candidates())
            np.testing.assert_allclose(
                scores, expected[f"prompt{i}.scores"], rtol=0, atol=TOLERANCE
            )
            assert drafted.tolist() == expected[f"prompt{i}.drafted"].tolist()


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(8, 8), (16, 4), (32, 3), (512, 512)])
def test_long_prompts_in_small_batches(n_batch: int, n_ubatch: int, workshop: Workshop) -> None:
    """However the prompt is cut, the rounds are the recorded ones."""
    run = load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json").runs[0]
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    options = dataclasses.replace(EXACT, n_batch=n_batch, n_ubatch=n_ubatch, n_draft_ubatch=8)
    with Pair(target, draft, options) as pair:
        prompt = run.prompt * 3  # longer than the draft context's ubatch
        long = pair.generate(prompt, 24).tokens.tolist()
        short = pair.generate(run.prompt, 64)
    assert short.tokens.tolist() == run.plain
    for found, recorded in zip(short.rounds[:-1], run.rounds[:-1], strict=True):
        assert list(found.drafted) == recorded["drafted"]
        assert found.accepted == recorded["accepted"]
    with Pair(target, None, EXACT) as plain:
        assert plain.generate(prompt, 24).tokens.tolist() == long


def test_feeding_more_rows_than_the_ubatch(workshop: Workshop) -> None:
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    options = dataclasses.replace(EXACT, n_draft_ubatch=1)
    with Pair(target, draft, options) as pair:
        assert pair.info.n_ubatch_draft == case.rows
        pair.draft_feed(0, case.features, 0)
        drafted = pair.draft(0, case.anchor, len(case.features))
    assert drafted.tolist() == case.expected["drafted"].tolist()


def test_sequences_of_the_target(workshop: Workshop) -> None:
    """Prompts of unequal length in their own sequences; each drafts its recorded first round."""
    runs = load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json").runs
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    with Pair(target, draft, dataclasses.replace(EXACT, n_seq=4, n_ctx=2048)) as pair:
        for seq, run in enumerate(runs):
            pair.target_decode(seq, run.prompt, 0)
            assert pair.target_logits()[-1].argmax() == run.plain[0]
        lengths = [len(run.prompt) for run in runs]
        drafted = pair.draft_many(range(4), [run.plain[0] for run in runs], lengths)
    assert [d.tolist() for d in drafted] == [run.rounds[0]["drafted"] for run in runs]


@pytest.mark.parametrize("position", [0, 10, 22, 24, 30, 10**6])
def test_a_draft_must_follow_what_was_fed(position: int, workshop: Workshop) -> None:
    """A wrong position is an error, never an empty draft, and costs no cached row."""
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        with pytest.raises((InvalidError, DecodeError)):
            pair.draft(0, case.anchor, position)
        drafted = pair.draft(0, case.anchor, len(case.features))
    assert drafted.tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize("start", [0, 4, 24, 100])
def test_features_must_follow_what_was_fed(start: int, workshop: Workshop) -> None:
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        with pytest.raises((InvalidError, DecodeError)):
            pair.draft_feed(0, case.features[:2], start)
        drafted = pair.draft(0, case.anchor, len(case.features))
    assert drafted.tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 0.0])
def test_strange_features_draft_tokens_of_the_vocabulary(value: float, workshop: Workshop) -> None:
    case = load_case("full_attn")
    target, draft = workshop.unit("full_attn", "f32")
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, np.full_like(case.features, value), 0)
        drafted = pair.draft(0, case.anchor, len(case.features))
    assert len(drafted) == 7 and drafted.min() >= 0 and drafted.max() < len(case.head)
