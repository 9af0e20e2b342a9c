"""The servers that are measured: our own, started here, or any llama-server at a URL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from dspine._address import ServerError
from dspine._client import (
    CONNECT_TIMEOUT_S,
    NO_IDLE_CONNECTIONS,
    Completion,
    RequestError,
    Requests,
)

from dspine_bench.errors import BenchError
from dspine_bench.prompts import Conversation, without_tools

REQUEST_TIMEOUT_S = 1800.0  # a long prompt on a CPU
POSITION = re.compile(
    r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\d+)', re.M
)
NO_SUCH_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class Answer:
    """One answer, as the server and the clock of this process saw it.

    `compared` says what `digest` was made of. `accepted_at` is None where the server does not
    tell, `first_token_ms` where the answer was not read as a stream.
    """

    done: Completion
    prompt_tokens: int
    accepted_at: list[int] | None
    first_token_ms: float | None
    wall_ms: float
    digest: str
    compared: Literal["ids", "text"]


class Remote(Requests):
    """A server at a URL, which somebody else started; a client's `/v1` behind it is left out."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.defaults = {}
        self._http = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            limits=NO_IDLE_CONNECTIONS,
        )

    def _session(self) -> httpx.Client:
        return self._http

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()


class Endpoint:
    """What a workload asks of a server, whatever it can and cannot."""

    def __init__(self, server: Requests) -> None:
        self.server = server
        self.props = self._props()
        self.renders = self._can_render()
        self._counts = self._positions() is not None

    def _props(self) -> dict[str, Any]:
        with contextlib.suppress(RequestError, ValueError):
            found = json.loads(self.server.get("/props"))
            return found if isinstance(found, dict) else {}
        return {}

    def _can_render(self) -> bool:
        """Whether templates can be applied apart, so that ids can be asked for."""
        try:
            self.server.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})
        except RequestError as error:
            if error.status in NO_SUCH_ROUTE:
                return False
            raise
        return True

    @property
    def build(self) -> str:
        """What the server calls itself."""
        return str(self.props.get("build_info") or "unknown")

    @property
    def model(self) -> str | None:
        """The file that the server says it has loaded, without its folder."""
        path = self.props.get("model_path")
        return re.split(r"[\\/]", path)[-1] if isinstance(path, str) and path else None

    @property
    def slots(self) -> int | None:
        """Requests that it works on at a time; None where it is not told."""
        found = self.props.get("total_slots")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def slot_context(self) -> int | None:
        """Tokens that one request may fill, prompt and answer; None where it is not told."""
        found = (self.props.get("default_generation_settings") or {}).get("n_ctx")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def takes_tools(self) -> bool:
        """Whether the template knows tools and calls."""
        caps = self.props.get("chat_template_caps") or {}
        return bool(caps.get("supports_tools") and caps.get("supports_tool_calls"))

    def _positions(self) -> list[int] | None:
        try:
            text = self.server.get("/metrics")
        except ServerError:
            return None
        return positions_of(text)

    def thinks(self) -> bool:
        """Whether the template has a thinking mode that can be switched."""
        if not self.renders:
            return False
        talk = Conversation("probe", "", [{"role": "user", "content": "a"}])
        return self.render(talk, thinking=True) != self.render(talk, thinking=False)

    def _chat_body(self, talk: Conversation, thinking: bool | None) -> dict[str, Any]:
        plain = talk if self.takes_tools else without_tools(talk)
        body: dict[str, Any] = {"messages": [dict(m) for m in plain.messages]}
        if plain.tools:
            body["tools"] = list(plain.tools)
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        return body

    def render(self, talk: Conversation, *, thinking: bool | None = None) -> str:
        """The prompt that the template makes."""
        answer = self.server.post("/apply-template", self._chat_body(talk, thinking))
        return str(answer["prompt"])

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        ids = self.server.post("/tokenize", {"content": text, "parse_special": True})["tokens"]
        return list(ids)

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        stream: bool = False,
        positions: bool = True,
        **settings: Any,
    ) -> Answer:
        """Continue a prompt; `settings` are fields of /completion.

        Without `positions` the counters of the draft positions are left alone: they are the
        server's, and of no single request while others run.
        """
        before = self._before(positions)
        begin = time.perf_counter()
        first: float | None = None
        if stream:
            with self.server.stream(prompt, max_tokens, **settings) as pieces:
                for _ in pieces:
                    first = first or 1000 * (time.perf_counter() - begin)
                done = pieces.result
            if done is None:
                raise BenchError("the server ended an answer before its last piece")
        else:
            done = self.server.complete(prompt, max_tokens, **settings)
        return self._answer(done, before, first, 1000 * (time.perf_counter() - begin))

    def chat(
        self, talk: Conversation, max_tokens: int, *, positions: bool = True, **settings: Any
    ) -> Answer:
        """The same through the chat route, for a server that cannot render templates apart."""
        before = self._before(positions)
        body = self._chat_body(talk, settings.pop("thinking", None))
        messages = body.pop("messages")
        begin = time.perf_counter()
        done = self.server.chat(messages, max_tokens, **{**body, **settings})
        return self._answer(done, before, None, 1000 * (time.perf_counter() - begin))

    def _before(self, wanted: bool) -> list[int] | None:
        return self._positions() if self._counts and wanted else None

    def _answer(
        self, done: Completion, before: list[int] | None, first: float | None, wall: float
    ) -> Answer:
        after = None if before is None else self._positions()
        timings = done.answer.get("timings") or {}
        cached = int(timings.get("cache_n", 0))
        usage = (done.answer.get("usage") or {}).get("prompt_tokens", 0)
        ids = bool(done.tokens)
        data = json.dumps(done.tokens if ids else said(done))
        return Answer(
            done=done,
            prompt_tokens=int(timings["prompt_n"]) + cached if "prompt_n" in timings else usage,
            accepted_at=None if after is None or before is None else grown(before, after),
            first_token_ms=first,
            wall_ms=wall,
            digest=hashlib.sha256(data.encode()).hexdigest(),
            compared="ids" if ids else "text",
        )


def said(done: Completion) -> list[Any]:
    """All that an answer says without its ids: text, reasoning, and calls of tools.

    The ids of calls are left out: servers draw them.
    """
    choices = done.answer.get("choices") or [{}]
    message = choices[0].get("message") or {}
    calls = [call.get("function") for call in message.get("tool_calls") or []]
    return [done.text, message.get("reasoning_content") or "", calls]


def positions_of(metrics: str) -> list[int]:
    """Accepted tokens by draft position in the text of /metrics.

    Empty before the first draft, as llama-server leaves the counters out until then.
    """
    found = {int(position): int(count) for position, count in POSITION.findall(metrics)}
    return [found.get(i, 0) for i in range(max(found, default=-1) + 1)]


def grown(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What was added to counters; new positions begin at 0."""
    padded = [*before, *[0] * (len(after) - len(before))]
    return [b - a for a, b in zip(padded, after, strict=True)]
