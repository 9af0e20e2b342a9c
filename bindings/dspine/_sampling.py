"""Settings of one generation: how tokens are chosen, and where the answer ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from dspine import _library as native
from dspine._errors import InvalidError

if TYPE_CHECKING:
    from dspine._pair import Round

RANDOM_SEED = 2**32 - 1  # another one for each generation


@runtime_checkable
class DraftPolicy(Protocol):
    """Chooses how many tokens each round drafts, and may learn from what came of it."""

    def next_depth(self) -> int:
        """Tokens that the next round drafts at most; 0 drafts nothing."""

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        """What the round gave, and the milliseconds of its two parts."""


@dataclass(frozen=True)
class FixedDepth:
    """The policy that always drafts the same number of tokens."""

    depth: int

    def next_depth(self) -> int:
        """The depth."""
        return self.depth

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        """Learns nothing."""


class Settings(TypedDict, total=False):
    """Keyword arguments of `Engine.generate`, `stream` and `chat`; all may be left out.

    max_tokens: at most so many ids; None for as many as the context takes.
    stop: text, or several, before which the answer ends.
    n_draft: tokens drafted a round at most, 0 for none, or a `DraftPolicy`; None is the engine's.
    cache_prompt: keep what the caches share with the last prompt and answer. As in llama-server,
        the last bits of the logits then depend on what was evaluated together.
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. typical_p: 1 is
        off. repeat_penalty: 1 is off; frequency_penalty, presence_penalty: 0 is off; all three
        look at the last repeat_last_n tokens. ignore_eos: never sample an end-of-generation token.
    seed: from 0 to 2**32 - 1; the same seed gives the same answer. None is the engine's.

    What is left out of these is llama.cpp's default, or what the target's file recommends.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    n_draft: int | DraftPolicy | None
    cache_prompt: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    seed: int | None


# Our names, which are those of llama-server's requests, and the fields of struct dspine_sampling.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
    "frequency_penalty": "penalty_freq",
    "presence_penalty": "penalty_present",
    "ignore_eos": "ignore_eos",
    "seed": "seed",
}
_INTEGERS = ("top_k", "repeat_last_n", "seed")


@dataclass(frozen=True)
class Request:
    """Checked settings.

    Attributes:
        max_tokens: None for no limit.
        stops: texts that end the answer.
        n_draft: None for the engine's own.
        cache_prompt: reuse the common prefix.
        sampling: fields of struct dspine_sampling that were given.
    """

    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    n_draft: int | DraftPolicy | None = None
    cache_prompt: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)

    def to_native(self, defaults: native.Sampling, seed: int | None) -> native.Sampling:
        """`defaults` with the given values, and `seed` where the request has none."""
        if seed is not None:
            defaults.seed = seed
        for name, value in self.sampling.items():
            setattr(defaults, name, value)
        return defaults


def read_settings(settings: Settings) -> Request:
    """Check what can be checked without a model.

    Raises InvalidError for a value that no generation can have, TypeError for an unknown name.
    """
    unknown = sorted(set(settings) - set(Settings.__annotations__))
    if unknown:
        known = ", ".join(Settings.__annotations__)
        raise TypeError(f"unknown setting {unknown[0]!r}, expected some of: {known}")
    given: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
    sampling = {_FIELDS[k]: _sampling_value(k, v) for k, v in given.items() if k in _FIELDS}
    return Request(
        max_tokens=_max_tokens(given.get("max_tokens")),
        stops=read_stops(given.get("stop", ())),
        n_draft=check_depth(given.get("n_draft")),
        cache_prompt=bool(given.get("cache_prompt", True)),
        sampling=sampling,
    )


def check_depth(value: Any) -> int | DraftPolicy | None:
    """A depth that is not negative, or a policy, or None; raises InvalidError for anything else."""
    if value is None or isinstance(value, DraftPolicy):
        return value
    depth = _integer("n_draft", value)
    if not 0 <= depth < 2**31:
        raise InvalidError(f"n_draft is {depth}, expected 0 (no drafting) or more")
    return depth


def check_seed(value: Any) -> int | None:
    """A seed, or None; -1 is llama.cpp's name for another one each time."""
    if value is None:
        return None
    seed = _integer("seed", value)
    if seed == -1:
        return RANDOM_SEED
    if not 0 <= seed < 2**32:
        raise InvalidError(f"seed is {seed}, expected 0 to {2**32 - 1}, or -1 for a new one")
    return seed


def read_stops(value: Any) -> tuple[str, ...]:
    """Stop texts as a tuple; raises InvalidError for an empty one, or for what is no text."""
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str):
            raise InvalidError(f"stop holds {stop!r}, expected text")
        if not stop:
            raise InvalidError("stop holds an empty text, which would end every answer at once")
    return stops


def _max_tokens(value: Any) -> int | None:
    if value is None:
        return None
    limit = _integer("max_tokens", value)
    if limit < 1:
        raise InvalidError(f"max_tokens is {limit}, expected at least 1 (None for no limit)")
    return min(limit, 2**31 - 1)  # no context holds more


def _sampling_value(name: str, value: Any) -> Any:
    if name == "ignore_eos":
        return bool(value)
    if name == "seed":
        return check_seed(value)
    if name in _INTEGERS:
        number = _integer(name, value)
        if not 0 <= number < 2**31:
            raise InvalidError(f"{name} is {number}, expected 0 or more")
        return number
    try:
        real = float(value)
    except (TypeError, ValueError):
        raise InvalidError(f"{name} is {value!r}, expected a number") from None
    if not math.isfinite(real):
        raise InvalidError(f"{name} is {value!r}, expected a finite number")
    return real


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidError(f"{name} is {value!r}, expected an integer") from None
