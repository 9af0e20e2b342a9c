"""From samples to rows: totals are added, then divided; medians with the extremes.

A prompt's time is the median over the repeats of milliseconds a token, times its tokens; prompts
are then added. So a disturbance of one request changes nothing, and a long answer weighs more than
a short one, as it does for its reader. `min` and `max` are of whole repeats.

For a ratio the prompt's time is the baseline's, times the median over the repeats of the mode's
milliseconds a token over the baseline's: two requests of one repeat are neighbours, and what slows
a machine for longer than a request slows both. A ratio is therefore not exactly that of the speeds.

Texts must be those of the baseline at temperature 0, or their speed is in no figure. Where the
baseline itself gives different texts in different repeats (requests that share a batch, in
quantized arithmetic) there is nothing to compare with: such prompts are unstable, and in no figure
either. A mode that gave none of the baseline's texts differs, unstable or not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dspine._terms import acceptance_rate, mean_accepted_length

from dspine_bench.schema import ALL, Mode, Replay, Row, Sample, Spread

Key = tuple[str, int]  # prompt, repeat


@dataclass(frozen=True)
class Verdict:
    """What the comparison of texts found, by prompt; no prompt is in both sets."""

    differing: frozenset[str]
    unstable: frozenset[str]
    checked: bool

    def counts(self, prompt: str) -> bool:
        """Whether the speed of a prompt may be reported."""
        return prompt not in self.differing and prompt not in self.unstable


def spread(values: Sequence[float]) -> Spread | None:
    """Median and extremes; None of nothing."""
    if not values:
        return None
    return Spread(median=statistics.median(values), min=min(values), max=max(values))


def judge(samples: Sequence[Sample], mode: Mode) -> Verdict:
    """Compare a mode's texts with those of its baseline."""
    if mode.temperature > 0:
        return Verdict(frozenset(), frozenset(), False)
    base: dict[str, set[str]] = {}
    mine: dict[str, set[str]] = {}
    for sample in samples:
        if sample.mode == mode.baseline:
            base.setdefault(sample.prompt, set()).add(sample.digest)
        if sample.mode == mode.name:
            mine.setdefault(sample.prompt, set()).add(sample.digest)
    unstable = {prompt for prompt, digests in base.items() if len(digests) > 1}
    differing = {
        prompt
        for prompt, digests in mine.items()
        if (digests.isdisjoint(base[prompt]) if prompt in unstable else digests != base.get(prompt))
    }
    return Verdict(frozenset(differing), frozenset(unstable - differing), True)


def uses_server_clock(samples: Iterable[Sample]) -> bool:
    """Both sides of a ratio are timed by one clock: the server's where every answer has it."""
    return all(s.generated_ms > 0 or s.tokens <= 1 for s in samples)


def _time(sample: Sample, server_clock: bool) -> float:
    return sample.generated_ms if server_clock else sample.wall_ms


def _pace(sample: Sample, server_clock: bool) -> float:
    """Milliseconds a token."""
    return _time(sample, server_clock) / sample.tokens


def _by_prompt(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The answers that have tokens."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.tokens > 0:
            found.setdefault(sample.prompt, []).append(sample)
    return found


def median_speed(samples: Sequence[Sample], server_clock: bool) -> float | None:
    """Tokens a second: tokens added, over the prompts' median times added."""
    tokens = milliseconds = 0.0
    for mine in _by_prompt(samples).values():
        mean = statistics.fmean(s.tokens for s in mine)
        tokens += mean
        milliseconds += mean * statistics.median(_pace(s, server_clock) for s in mine)
    return 1000 * tokens / milliseconds if milliseconds else None


def by_repeat(samples: Sequence[Sample], server_clock: bool) -> dict[int, float]:
    totals: dict[int, tuple[int, float]] = {}
    for sample in samples:
        tokens, milliseconds = totals.get(sample.repeat, (0, 0.0))
        spent = milliseconds + _time(sample, server_clock)
        totals[sample.repeat] = (tokens + sample.tokens, spent)
    return {r: 1000 * tokens / ms for r, (tokens, ms) in totals.items() if ms}


def paired_ratio(
    mine: Sequence[Sample], base: Sequence[Sample], server_clock: bool
) -> float | None:
    """The baseline's time over the mode's for the mode's tokens; None without a common repeat."""
    against = _by_prompt(base)
    time = time_base = 0.0
    for prompt, own in _by_prompt(mine).items():
        paces = {s.repeat: _pace(s, server_clock) for s in against.get(prompt, [])}
        slower = [_pace(s, server_clock) / paces[s.repeat] for s in own if paces.get(s.repeat)]
        if slower:
            alone = statistics.fmean(s.tokens for s in own) * statistics.median(paces.values())
            time_base += alone
            time += alone * statistics.median(slower)
    return time_base / time if time else None


def by_pairs(rates: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Ratios of the repeats that both have."""
    return [rate / base[repeat] for repeat, rate in rates.items() if repeat in base]


def _around(median: float | None, values: Iterable[float]) -> Spread | None:
    """A spread around a median that was not taken of the values themselves."""
    found = [*values] if median is None else [median, *values]
    if median is None or not found:
        return None
    return Spread(median=median, min=min(found), max=max(found))


def _speeds(
    mine: Sequence[Sample], base: Sequence[Sample], clock: bool
) -> tuple[Spread | None, Spread | None]:
    """Speed, and its ratio to the baseline's on the same prompts."""
    rates, rates_base = by_repeat(mine, clock), by_repeat(base, clock)
    speed = _around(median_speed(mine, clock), rates.values())
    return speed, _around(paired_ratio(mine, base, clock), by_pairs(rates, rates_base))


def replay_rates(replays: Iterable[Replay], mode: str) -> dict[int, float]:
    """Output tokens a second of wall time, by repeat."""
    return {r.repeat: 1000 * r.tokens / r.wall_ms for r in replays if r.mode == mode and r.wall_ms}


def _replay_speeds(replays: Sequence[Replay], mode: Mode) -> tuple[Spread | None, Spread | None]:
    """Output tokens over wall time of whole replays; repeats are paired."""
    mine, base = replay_rates(replays, mode.name), replay_rates(replays, mode.baseline)
    return spread([*mine.values()]), spread(by_pairs(mine, base))


def _positions(samples: Sequence[Sample], rounds: int) -> list[float] | None:
    """Rounds that accepted the n-th drafted token, over all rounds; None where unknown."""
    known = [s.accepted_at for s in samples if s.accepted_at is not None]
    if len(known) < len(samples) or not rounds:
        return None
    width = max((len(k) for k in known), default=0)
    totals = [sum(k[i] for k in known if i < len(k)) for i in range(width)]
    # counters that others' requests moved too are of no use
    if not any(totals) or not all(0 <= total <= rounds for total in totals):
        return None
    return [total / rounds for total in totals]


def row(
    mode: Mode,
    category: str,
    samples: Mapping[str, Sequence[Sample]],
    verdict: Verdict,
    replays: Sequence[Replay] = (),
) -> Row:
    """One row; `samples` of this category by mode; `replays` set the speed where there are some."""
    prompts = list(dict.fromkeys(s.prompt for s in samples[mode.name]))
    counted = [p for p in prompts if verdict.counts(p)]
    mine, base = (
        [s for s in samples[name] if s.prompt in counted] for name in (mode.name, mode.baseline)
    )
    request_ratio = None
    if not replays:
        speed, ratio = _speeds(mine, base, uses_server_clock([*mine, *base]))
    else:  # a wall time has no part without the requests that do not count; requests have
        speed, ratio = _replay_speeds(replays, mode) if counted == prompts else (None, None)
        _, request_ratio = _speeds(mine, base, False)
    rounds, drafted, accepted = (
        sum(getattr(s, name) for s in mine) for name in ("rounds", "drafted", "accepted")
    )
    return Row(
        mode=mode.name,
        category=category,
        prompts=len(prompts),
        differing=[p for p in prompts if p in verdict.differing],
        unstable=sorted(verdict.unstable.intersection(prompts)),
        checked=verdict.checked,
        tokens=sum(s.tokens for s in mine),
        rounds=rounds,
        drafted=drafted,
        accepted=accepted,
        mean_accepted_length=mean_accepted_length(accepted, rounds) if mine else None,
        acceptance_rate=acceptance_rate(accepted, drafted),
        accepted_by_position=_positions(mine, rounds),
        speed=speed,
        ratio=ratio,
        latency_ms=spread([s.wall_ms for s in mine]),
        first_token_ms=spread([s.first_token_ms for s in mine if s.first_token_ms is not None]),
        request_ratio=request_ratio,
    )


def summarize(
    modes: Sequence[Mode], samples: Sequence[Sample], replays: Sequence[Replay] = ()
) -> list[Row]:
    """Every mode in every category, and in all together."""
    categories = list(dict.fromkeys(s.category for s in samples))
    names = categories if len(categories) == 1 else [*categories, ALL]
    rows = []
    for mode in modes:
        verdict = judge(samples, mode)
        for category in names:
            chosen = [s for s in samples if category in (ALL, s.category)]
            by_mode = {m.name: [s for s in chosen if s.mode == m.name] for m in modes}
            if by_mode[mode.name]:
                rows.append(row(mode, category, by_mode, verdict, replays))
    return rows
