"""Totals, medians, ratios and the comparison of texts."""

from __future__ import annotations

import pytest
from dspine_bench.schema import Replay, Row, ServerReport
from dspine_bench.summary import judge, median_speed, paired_ratio, summarize
from dspine_bench.terminal import equal_text, ratio_text, request_text
from support.bench import DRAFT, PLAIN, report_of, sample


def row(report: ServerReport, mode: str, category: str = "all") -> Row:
    return next(r for r in report.summary if (r.mode, r.category) == (mode, category))


def test_totals_are_added_then_divided() -> None:
    """A long slow answer and a short fast one: the mean of the two rates would be 550."""
    samples = [
        sample("plain", "chat-1", 0, 1000.0, tokens=100),
        sample("plain", "chat-2", 0, 10.0, tokens=10),
    ]
    assert median_speed(samples, True) == pytest.approx(1000 * 110 / 1010)


def test_one_disturbed_request_changes_nothing() -> None:
    calm = [sample("plain", p, r, 1000.0) for r in range(5) for p in ("chat-1", "code-1")]
    disturbed = [
        s.model_copy(update={"generated_ms": 9000.0})
        if (s.repeat, s.prompt) == (3, "code-1")
        else s
        for s in calm
    ]
    assert median_speed(disturbed, True) == median_speed(calm, True) == pytest.approx(100.0)


def test_ratio_and_counts(report: ServerReport) -> None:
    found = row(report, "draft")
    assert found.ratio is not None and found.ratio.median == pytest.approx(1002 / 502)
    assert found.ratio.min <= found.ratio.median <= found.ratio.max
    assert found.mean_accepted_length == pytest.approx((60 + 39) / 39)
    assert found.acceptance_rate == pytest.approx(0.5)
    assert found.accepted_by_position == pytest.approx([30 / 39, 20 / 39, 10 / 39])
    plain = row(report, "plain")
    assert plain.mean_accepted_length == 1.0 and plain.accepted_by_position is None
    assert plain.ratio is not None and plain.ratio.median == 1.0


def test_other_text_has_no_speed(report: ServerReport) -> None:
    changed = [
        s.model_copy(update={"digest": "other"})
        if (s.mode, s.prompt, s.repeat) == ("draft", "chat-1", 2)
        else s
        for s in report.samples
    ]
    bad = report_of(changed)
    chat = row(bad, "draft", "chat")
    assert chat.differing == ["chat-1"] and chat.speed is None and chat.ratio is None
    # the rest is compared on the prompts that remain, on both sides
    code = row(bad, "draft", "code")
    assert code.differing == [] and code.ratio is not None
    everything = row(bad, "draft")
    assert everything.differing == ["chat-1"] and everything.ratio is not None
    assert row(report_of(report.samples), "draft").differing == []


def test_an_unstable_baseline_proves_nothing(report: ServerReport) -> None:
    samples = [
        s.model_copy(update={"digest": f"{s.repeat}"}) if s.prompt == "chat-1" else s
        for s in report.samples
    ]
    verdict = judge(samples, DRAFT)
    assert verdict.unstable == {"chat-1"} and not verdict.differing


def test_sampled_texts_are_not_compared(report: ServerReport) -> None:
    modes = tuple(m.model_copy(update={"temperature": 1.0}) for m in (PLAIN, DRAFT))
    samples = [s.model_copy(update={"digest": f"{s.mode}{s.repeat}"}) for s in report.samples]
    found = summarize(modes, samples)
    assert not any(r.checked or r.differing for r in found)
    assert all(r.speed for r in found)


def test_without_server_times_both_sides_use_the_clients(report: ServerReport) -> None:
    samples = [
        s.model_copy(update={"generated_ms": 0.0}) if s.mode == "draft" else s
        for s in report.samples
    ]
    found = row(report_of(samples), "draft")
    assert found.ratio is not None and found.ratio.median == pytest.approx(1008 / 508)


def test_what_slows_two_neighbours_changes_no_ratio(report: ServerReport) -> None:
    """A machine whose speed changes from repeat to repeat."""
    slow = {0: 1.0, 1: 1.9, 2: 1.3, 3: 1.0, 4: 1.6}
    samples = [
        s.model_copy(update={"generated_ms": s.generated_ms * slow[s.repeat]})
        for s in report.samples
    ]
    quiet, noisy = row(report, "draft"), row(report_of(samples), "draft")
    assert quiet.ratio is not None and noisy.ratio is not None
    assert noisy.ratio.median == pytest.approx(quiet.ratio.median, rel=1e-3)


def test_one_disturbed_request_changes_no_ratio(report: ServerReport) -> None:
    samples = [
        s.model_copy(update={"generated_ms": 9 * s.generated_ms})
        if (s.mode, s.repeat) == ("draft", 2)
        else s
        for s in report.samples
    ]
    quiet, found = row(report, "draft"), row(report_of(samples), "draft")
    assert quiet.ratio is not None and found.ratio is not None
    assert found.ratio.median == pytest.approx(quiet.ratio.median, rel=0.01)
    assert found.ratio.min < 0.2 * found.ratio.median


def test_only_repeats_of_both_are_paired(report: ServerReport) -> None:
    mine = [s for s in report.samples if s.mode == "draft"]
    base = [s for s in report.samples if s.mode == "plain" and s.repeat != 4]
    slow = [
        s.model_copy(update={"generated_ms": 99 * s.generated_ms}) if s.repeat == 4 else s
        for s in mine
    ]
    assert paired_ratio(slow, base, True) == paired_ratio(mine, base, True)
    assert paired_ratio(mine, [s for s in base if s.repeat > 4], True) is None


def test_replay_is_all_tokens_over_wall_time(report: ServerReport) -> None:
    replays = [
        Replay(mode=mode, repeat=r, requests=3, tokens=300, wall_ms=wall)
        for r in range(5)
        for mode, wall in (("plain", 900.0), ("draft", 300.0 + r))
    ]
    found = summarize((PLAIN, DRAFT), report.samples, replays)
    draft = next(r for r in found if r.mode == "draft" and r.category == "all")
    assert draft.speed is not None and draft.speed.median == pytest.approx(300 / 0.302)
    assert draft.ratio is not None and draft.ratio.max == pytest.approx(3.0)
    assert draft.latency_ms is not None and draft.latency_ms.median == pytest.approx(508.0)
    bad = [s.model_copy(update={"digest": "x"}) if s.mode == "draft" else s for s in report.samples]
    other = summarize((PLAIN, DRAFT), bad, replays)
    assert all(r.speed is None for r in other if r.mode == "draft")


def wobbling(report: ServerReport, other: dict[str, str]) -> ServerReport:
    """The baseline's chat-1 changes between repeats; `other`: digest of a mode's chat-1."""
    return report_of(
        [
            s.model_copy(update={"digest": other.get(s.mode, f"{s.repeat}")})
            if s.prompt == "chat-1"
            else s
            for s in report.samples
        ]
    )


def test_unstable_prompts_are_in_no_figure(report: ServerReport) -> None:
    found = wobbling(report, {})
    for mode in ("plain", "draft"):
        chat = row(found, mode, "chat")
        assert chat.speed is None and chat.ratio is None and chat.mean_accepted_length is None
        assert equal_text(chat) == "not compared (1 of 1 unstable)" and not chat.differing
    assert equal_text(row(found, "draft")) == "yes (1 of 3 unstable: not compared)"
    assert row(found, "draft").tokens == 2 * 5 * 100


def test_a_text_of_no_repeat_differs_from_an_unstable_baseline(report: ServerReport) -> None:
    found = row(wobbling(report, {"draft": "of no repeat"}), "draft", "chat")
    assert found.differing == ["chat-1"] and not found.unstable and found.speed is None
    assert equal_text(found) == "1 of 1 differ"
    assert row(wobbling(report, {"draft": "3"}), "draft", "chat").differing == []


def test_a_row_says_what_it_is_over(report: ServerReport) -> None:
    samples = [
        s.model_copy(update={"digest": "x", "accepted": 0, "generated_ms": 1.0})
        if (s.mode, s.prompt) == ("draft", "code-1")
        else s
        for s in report.samples
    ]
    found = row(report_of(samples), "draft")
    assert ratio_text(found, 5).endswith(" over 2 of 3 prompts")
    whole = row(report, "draft")
    assert found.mean_accepted_length == whole.mean_accepted_length
    assert found.acceptance_rate == whole.acceptance_rate
    assert found.ratio is not None and whole.ratio is not None
    assert found.ratio.median == pytest.approx(whole.ratio.median)
    assert ratio_text(whole, 5) == "2.00 (1.99-2.00)" and ratio_text(whole, 1) == "2.00"


REPLAYS = [
    Replay(mode=mode, repeat=r, requests=3, tokens=300, wall_ms=900.0)
    for r in range(5)
    for mode in ("plain", "draft")
]


def test_an_unstable_replay_has_no_speed(report: ServerReport) -> None:
    found = summarize((PLAIN, DRAFT), wobbling(report, {}).samples, REPLAYS)
    chosen = [r for r in found if r.category == "all"]
    assert len(chosen) == 2 and all(r.speed is None and r.ratio is None for r in chosen)


def test_requests_of_a_replay_are_paired(report: ServerReport) -> None:
    """The wall time is of all requests; a request's own is reported where its texts are equal."""
    whole = summarize((PLAIN, DRAFT), report.samples, REPLAYS)
    draft = next(r for r in whole if (r.mode, r.category) == ("draft", "all"))
    assert draft.ratio is not None and draft.ratio.median == 1.0
    assert draft.request_ratio is not None
    assert draft.request_ratio.median == pytest.approx(1008 / 508)
    # the request that changes takes ten times as long, and is in no figure
    slow = [
        s.model_copy(update={"wall_ms": 10 * s.wall_ms})
        if (s.mode, s.prompt) == ("draft", "chat-1")
        else s
        for s in wobbling(report, {}).samples
    ]
    found = next(
        r
        for r in summarize((PLAIN, DRAFT), slow, REPLAYS)
        if (r.mode, r.category) == ("draft", "all")
    )
    assert found.ratio is None and found.request_ratio == draft.request_ratio
    assert request_text(found, 5).endswith(" over 2 of 3 prompts")
    assert all(r.request_ratio is None for r in summarize((PLAIN, DRAFT), report.samples))


def test_counters_of_others_are_not_used(report: ServerReport) -> None:
    samples = [s.model_copy(update={"accepted_at": [999]}) for s in report.samples]
    assert row(report_of(samples), "draft").accepted_by_position is None
