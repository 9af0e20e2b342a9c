"""A thin client of a running llama-server: completions, chats, streams, with draft counts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from dspine import _terms
from dspine._address import Address, ServerError

# A request ends when the text does, which may take long; connecting may not.
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 600.0

Json = dict[str, Any]


class RequestError(ServerError):
    """The server refused a request; `status` is its HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: the generated text.
        tokens: its ids, where the server was asked for them (`complete` does); else empty.
        generated: tokens generated, an end-of-text token counted.
        drafted: tokens drafted, 0 without a drafter.
        accepted: drafted tokens that survived.
        cached: prompt tokens that were taken from the cache.
        prompt_ms: time of the prompt, in milliseconds.
        generated_ms: time of the generated tokens, in milliseconds.
        stop: why it ended: "limit", "eos" or "word"; of a chat "length", "stop" or "tool_calls".
        answer: the whole answer as the server sent it.
    """

    text: str
    tokens: list[int]
    generated: int
    drafted: int
    accepted: int
    cached: int
    prompt_ms: float
    generated_ms: float
    stop: str
    answer: Json = field(repr=False, default_factory=dict)

    @property
    def rounds(self) -> int:
        """Verifications: each emits what it accepted and one token; the first is the prompt's.

        One too few where an answer ends with the last token of a wholly accepted draft: what
        llama.cpp samples after that end is counted by nobody.
        """
        return max(self.generated - 1 - self.accepted, 0)

    @property
    def mean_accepted_length(self) -> float:
        """(accepted + rounds) / rounds: tokens a round; plain decoding is 1.0."""
        return _terms.mean_accepted_length(self.accepted, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0.0 where nothing was drafted."""
        return _terms.acceptance_rate(self.accepted, self.drafted)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, without the prompt's time."""
        return self.generated / self.generated_ms * 1000 if self.generated_ms > 0 else 0.0


def completion_of(answer: Json, text: str, tokens: list[int], stop: str) -> Completion:
    """A Completion with the counts of `answer["timings"]`."""
    timings: Json = answer.get("timings") or {}
    return Completion(
        text=text,
        tokens=tokens,
        generated=timings.get("predicted_n", len(tokens)),
        drafted=timings.get("draft_n", 0),
        accepted=timings.get("draft_n_accepted", 0),
        cached=timings.get("cache_n", 0),
        prompt_ms=timings.get("prompt_ms", 0.0),
        generated_ms=timings.get("predicted_ms", 0.0),
        stop=stop,
        answer=answer,
    )


Explain = Callable[[], contextlib.AbstractContextManager[None]]


class Stream(Iterator[str]):
    """The pieces of an answer as they come; it may be dropped half-way.

    Close it, use it as a context manager, or simply forget it: the server then stops generating.
    """

    def __init__(self, response: httpx.Response, chat: bool, explain: Explain) -> None:
        self._response = response
        # The generator knows the box and not this object: without a cycle, a forgotten stream
        # is closed at once.
        self._box: list[Completion] = []
        self._pieces = _pieces(response, chat, explain, self._box)

    @property
    def result(self) -> Completion | None:
        """The whole answer once the last piece was taken, None before."""
        return self._box[0] if self._box else None

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Stop reading. Calling it again does nothing."""
        with contextlib.suppress(ValueError):  # another thread is waiting for a piece
            self._pieces.close()
        self._response.close()


def _pieces(
    response: httpx.Response, chat: bool, explain: Explain, box: list[Completion]
) -> Generator[str, None, None]:
    text, stop, tokens, last = "", "", list[int](), Json()
    with explain(), contextlib.closing(response):
        for event in _events(response):
            last = event
            piece, stop = _chat_piece(event, stop) if chat else _piece(event, stop)
            tokens += event.get("tokens") or []
            text += piece
            if piece:
                yield piece
    box.append(completion_of(last, text, tokens, stop))


def _events(response: httpx.Response) -> Iterator[Json]:
    """The JSON objects of a stream of server-sent events."""
    for line in response.iter_lines():
        name, _, data = line.partition(":")
        if name not in ("data", "error") or data.strip() == "[DONE]":
            continue
        event: Json = json.loads(data)
        if name == "error" or "error" in event:
            raise RequestError(_message(event), response.status_code)
        yield event


def _piece(event: Json, stop: str) -> tuple[str, str]:
    return event.get("content") or "", event.get("stop_type") or stop


def _chat_piece(event: Json, stop: str) -> tuple[str, str]:
    piece = ""
    for choice in event.get("choices") or []:
        piece += (choice.get("delta") or {}).get("content") or ""
        stop = choice.get("finish_reason") or stop
    return piece, stop


def _message(answer: Any) -> str:
    """The server's own words in an answer that says that something failed."""
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or answer)[:300]


def _body_text(response: httpx.Response) -> str:
    try:
        return _message(response.json())
    except ValueError:
        return response.text.strip()[:300] or response.reason_phrase


# A new connection for each request: llama-server closes idle ones when it likes, and a request that
# meets the closing fails.
NO_IDLE_CONNECTIONS = httpx.Limits(max_keepalive_connections=0)


def connect(address: Address, api_key: str | None, timeout_s: float | None) -> httpx.Client:
    """A client of the address, with nothing in between: no proxies of the environment."""
    path = address.socket_path
    return httpx.Client(
        base_url=address.url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
        limits=NO_IDLE_CONNECTIONS,
        # A certificate for the server's public name is none for the loopback interface.
        verify=not address.tls,
        transport=httpx.HTTPTransport(uds=path) if path else None,
    )


class Requests:
    """Requests to a llama-server; a subclass says over which connection.

    Attributes:
        defaults: fields added to the body of every completion and chat, for instance
            {"cache_prompt": False}.
    """

    defaults: dict[str, Any]

    def _session(self) -> httpx.Client:
        raise NotImplementedError

    def _lost(self, error: Exception) -> ServerError:
        """The error for a connection that failed."""
        return ServerError(f"{self._session().base_url}: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the HTTP client raises into one of this package's errors."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            text = f"{error.request.url.path}: {_body_text(error.response)}"
            raise RequestError(text, error.response.status_code) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._lost(error) from error

    def get(self, path: str) -> str:
        """GET a path and return the text; RequestError for an error status."""
        with self._explained():
            return self._session().get(path).raise_for_status().text

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST JSON and return the parsed answer; RequestError for an error status."""
        with self._explained():
            return self._session().post(path, json=dict(body)).raise_for_status().json()

    def post_stream(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """POST JSON; the open answer, to be read line by line and closed."""
        with self._explained():
            session = self._session()
            request = session.build_request("POST", path, json=dict(body))
            response = session.send(request, stream=True)
            if response.is_error:
                response.read()
                response.raise_for_status()
            return response

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = -1,
        *,
        temperature: float = 0.0,
        **settings: Any,
    ) -> Completion:
        """Continue a text or token ids.

        Args:
            prompt: text, or ids.
            max_tokens: at most so many tokens; -1 until the text ends or the context is full.
            temperature: 0 is greedy.
            settings: further fields of /completion, for instance top_p, top_k, seed, stop.
        """
        body = self._completion_body(prompt, max_tokens, temperature) | settings
        answer = self.post("/completion", body)
        return completion_of(
            answer, answer["content"], answer.get("tokens") or [], answer["stop_type"]
        )

    def _completion_body(
        self, prompt: str | Sequence[int], max_tokens: int, temperature: float
    ) -> Json:
        given = prompt if isinstance(prompt, str) else np.asarray(prompt).tolist()
        body = {"prompt": given, "n_predict": max_tokens, "temperature": temperature}
        return {"return_tokens": True} | self.defaults | body

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int = -1,
        *,
        temperature: float = 0.0,
        **settings: Any,
    ) -> Completion:
        """Answer a conversation, with the target's own chat template.

        Args:
            messages: [{"role": "user", "content": "…"}, …].
            max_tokens, temperature, settings: as `complete`, with the fields of
                /v1/chat/completions.
        """
        body = self._chat_body(messages, max_tokens, temperature) | settings
        answer = self.post("/v1/chat/completions", body)
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        return completion_of(answer, text, [], choice.get("finish_reason") or "")

    def _chat_body(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int, temperature: float
    ) -> Json:
        given = [dict(message) for message in messages]
        return self.defaults | {
            "messages": given,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        max_tokens: int = -1,
        *,
        temperature: float = 0.0,
        **settings: Any,
    ) -> Stream:
        """As `complete`, or as `chat` for a list of messages, piece by piece."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        make: Any = self._chat_body if chat else self._completion_body
        body = make(prompt, max_tokens, temperature) | {"stream": True} | settings
        path = "/v1/chat/completions" if chat else "/completion"
        return Stream(self.post_stream(path, body), chat, self._explained)


def is_ready(session: httpx.Client) -> bool:
    """True when /health says so; False while the model loads or nobody listens."""
    try:
        return session.get("/health", timeout=CONNECT_TIMEOUT_S).is_success
    except httpx.HTTPError:
        return False
