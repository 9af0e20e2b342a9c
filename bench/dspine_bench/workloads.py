"""`tasks`, `depth` and `replay`: what they ask, and what they keep of an answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal

from dspine_bench.endpoints import Answer, Endpoint
from dspine_bench.errors import BenchError
from dspine_bench.modes import ModeSpec
from dspine_bench.prompts import THINKING, Conversation, LongText, decisions
from dspine_bench.runner import Result, Unit
from dspine_bench.schema import Replay, Sample, WorkloadFile

SEED = 20260917  # of sampled answers; the repeat is added, so that repeats differ
DEPTH_ROOM = 512  # tokens of a depth prompt beyond its text: template, question, last paragraph


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt, or the conversation where the server renders itself.

    `rendered` None: the chat route is used.
    """

    id: str
    category: str
    talk: Conversation
    rendered: str | None
    thinking: bool | None = None


def sample_of(answer: Answer, prompt: Prompt, mode: ModeSpec, repeat: int) -> Sample:
    """What is kept of an answer; BenchError for counts that cannot be."""
    done = answer.done
    if done.generated < 1:
        raise BenchError(
            f"{prompt.id}: the answer has no tokens, or the server does not count them "
            "(timings.predicted_n), as a llama-server does"
        )
    if done.accepted > done.drafted:
        raise BenchError(
            f"{prompt.id}: the server accepted {done.accepted} of {done.drafted} drafted tokens"
        )
    return Sample(
        mode=mode.name,
        repeat=repeat,
        prompt=prompt.id,
        category=prompt.category,
        prompt_tokens=answer.prompt_tokens,
        cached=done.cached,
        tokens=done.generated,
        rounds=done.rounds,
        drafted=done.drafted,
        accepted=done.accepted,
        accepted_at=answer.accepted_at if done.drafted else None,
        prompt_ms=float(done.prompt_ms),
        generated_ms=float(done.generated_ms),
        first_token_ms=answer.first_token_ms,
        wall_ms=answer.wall_ms,
        stop=done.stop,
        digest=answer.digest,
        compared=answer.compared,
    )


def request(
    endpoint: Endpoint, prompt: Prompt, mode: ModeSpec, repeat: int, max_tokens: int, **more: Any
) -> Answer:
    """One answer to a prompt."""
    settings: dict[str, Any] = {"temperature": mode.temperature, **more}
    if mode.temperature > 0:
        settings["seed"] = SEED + repeat
    if prompt.rendered is None:
        settings.pop("stream", None)
        return endpoint.chat(prompt.talk, max_tokens, thinking=prompt.thinking, **settings)
    return endpoint.complete(prompt.rendered, max_tokens, **settings)


def check_fits(endpoint: Endpoint, prompt: Prompt, answer: int = 1) -> None:
    """BenchError for a prompt that a server will refuse, before anything is measured.

    `answer`: tokens that the context must hold beside it.
    """
    room = endpoint.slot_context
    if prompt.rendered is None or room is None:
        return
    length, most = len(endpoint.tokenize(prompt.rendered)), room - answer
    if length > most:
        beside = f" ({answer} are for the answer)" if answer > 1 else ""
        raise BenchError(
            f"{prompt.id}: a prompt of {length} tokens, expected at most {most}{beside}: the "
            f"context of a request is {room}, give -c"
        )


def rendered(endpoint: Endpoint, talk: Conversation, thinking: bool | None = None) -> str | None:
    """The prompt's text, None where the server has no route for it."""
    return endpoint.render(talk, thinking=thinking) if endpoint.renders else None


@dataclass(frozen=True)
class Single:
    """One prompt, one answer; `ignore_eos`: of `max_tokens`, whatever its end."""

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = False

    def run(self, endpoint: Endpoint, mode: ModeSpec, repeat: int, result: Result) -> None:
        """Measure one request; the prompt cache is off, so that every repeat does the same work."""
        settings = {"cache_prompt": False} | ({"ignore_eos": True} if self.ignore_eos else {})
        answer = request(endpoint, self.prompt, mode, repeat, self.max_tokens, **settings)
        sample = sample_of(answer, self.prompt, mode, repeat)
        if self.ignore_eos and sample.tokens != self.max_tokens:
            raise BenchError(
                f"{self.prompt.id}: an answer of {sample.tokens} tokens ({sample.stop}), expected "
                f"{self.max_tokens}, whatever its end"
            )
        result.samples.append(sample)


class Tasks:
    """Short prompts by category; twice where the template has a thinking mode."""

    name: Literal["tasks"] = "tasks"

    def __init__(
        self,
        talks: Sequence[Conversation],
        file: WorkloadFile,
        max_tokens: int,
        thinking: str,
        *,
        optional: bool = True,
    ) -> None:
        self.files = [file]
        self._talks, self._max_tokens, self._thinking = talks, max_tokens, thinking
        self._optional = optional

    def _modes(self, endpoint: Endpoint) -> list[bool | None]:
        has = endpoint.thinks()
        if not self._optional and not has:
            raise BenchError(f"--thinking {self._thinking}: the template has no thinking mode")
        chosen: dict[str, list[bool | None]] = {"on": [True], "off": [False], "both": [False, True]}
        return chosen[self._thinking] if has else [None]

    def prepare(self, endpoint: Endpoint) -> list[Unit]:
        """Render every prompt."""
        units: list[Unit] = []
        for thinking in self._modes(endpoint):
            tail = THINKING if thinking else ""
            for talk in self._talks:
                text = rendered(endpoint, talk, thinking)
                prompt = Prompt(talk.id + tail, talk.category + tail, talk, text, thinking)
                check_fits(endpoint, prompt)
                units.append(Single(prompt, self._max_tokens))
        return units


class Depth:
    """A long text of so many tokens, and its continuation."""

    name: Literal["depth"] = "depth"

    def __init__(
        self, text: LongText, file: WorkloadFile, depths: Sequence[int], max_tokens: int
    ) -> None:
        self.files = [file]
        self._text, self._depths, self._max_tokens = text, depths, max_tokens

    def prepare(self, endpoint: Endpoint) -> list[Unit]:
        """Find the number of paragraphs for every depth, by the server's own tokenizer."""
        if not endpoint.renders:
            raise BenchError("depth: the server has no /apply-template, which this needs")
        cycle = len(self._text.paragraphs)
        size = len(endpoint.tokenize(self._text.text(cycle))) / cycle
        thinking = False if endpoint.thinks() else None
        units: list[Unit] = []
        for depth in self._depths:
            text = self._text.text(round(depth / size)) if depth else self._text.intro
            talk = Conversation(
                f"depth-{depth}",
                str(depth),
                [{"role": "user", "content": f"{text}\n\n{self._text.question}"}],
            )
            prompt = Prompt(talk.id, talk.category, talk, rendered(endpoint, talk, thinking))
            check_fits(endpoint, prompt, self._max_tokens)
            units.append(Single(prompt, self._max_tokens, ignore_eos=True))
        return units


@dataclass(frozen=True)
class WholeReplay:
    """All conversations, some at a time; each one's requests in order."""

    talks: Sequence[Sequence[Prompt]]
    parallel: int
    max_tokens: int

    def run(self, endpoint: Endpoint, mode: ModeSpec, repeat: int, result: Result) -> None:
        """Replay once; the wall time is from the first request to the last answer."""

        stop = threading.Event()

        def replay(prompts: Sequence[Prompt]) -> list[Sample]:
            left = itertools.takewhile(lambda _: not stop.is_set(), prompts)
            return [self._one(endpoint, prompt, mode, repeat) for prompt in left]

        pool = ThreadPoolExecutor(self.parallel)
        begin = time.perf_counter()
        try:
            jobs = [pool.submit(replay, prompts) for prompts in self.talks]
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            wall = 1000 * (time.perf_counter() - begin)
            for job in done:
                job.result()
            found = [sample for job in jobs for sample in job.result()]
        finally:
            # neither an error nor an interrupt waits for the other answers
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        result.samples += found
        tokens = sum(sample.tokens for sample in found)
        result.replays.append(
            Replay(mode=mode.name, repeat=repeat, requests=len(found), tokens=tokens, wall_ms=wall)
        )

    def _one(self, endpoint: Endpoint, prompt: Prompt, mode: ModeSpec, repeat: int) -> Sample:
        settings = {"cache_prompt": True, "stream": True, "positions": False}
        answer = request(endpoint, prompt, mode, repeat, self.max_tokens, **settings)
        return sample_of(answer, prompt, mode, repeat)


class ReplayAll:
    """Recorded conversations of agents."""

    name: Literal["replay"] = "replay"

    def __init__(
        self,
        talks: Sequence[Conversation],
        file: WorkloadFile,
        parallel: int,
        max_tokens: int,
    ) -> None:
        self.files = [file]
        self._talks, self._parallel, self._max_tokens = talks, parallel, max_tokens

    def prepare(self, endpoint: Endpoint) -> list[Unit]:
        """Render every prefix."""
        thinking = False if endpoint.thinks() else None
        prompts = [
            [
                Prompt(one.id, "replay", one, rendered(endpoint, one, thinking), thinking)
                for one in decisions(talk)
            ]
            for talk in self._talks
        ]
        for talk in prompts:
            check_fits(endpoint, talk[-1])
        return [WholeReplay(prompts, self._parallel, self._max_tokens)]
