"""The engine: a target and its drafter in this process, with text in and out."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from dspine import _tuned
from dspine._errors import InvalidError
from dspine._pair import (
    STOPS,
    IdsLike,
    Pair,
    PairInfo,
    PairOptions,
    Stats,
    StrPath,
    to_round,
)
from dspine._sampling import (
    DraftPolicy,
    FixedDepth,
    Request,
    Settings,
    check_depth,
    check_seed,
    read_settings,
)
from dspine._text import TextStream

if TYPE_CHECKING:
    from typing_extensions import Unpack

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        text: the answer, without the stop text that ended it.
        tokens: its ids, with an end-of-generation token or the ids of a stop text at the end.
        stop_reason: "eos", "stop" (a stop text), "limit" (max_tokens), "context" (full), or
            "aborted" (the stream was closed before its end).
        stats: counts and times.
    """

    text: str
    tokens: list[int]
    stop_reason: str
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """What one round adds to an answer; `text` may be empty, as whole characters are handed out."""

    text: str
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return self.text


class Engine:
    """A target GGUF and, optionally, its DSpine drafter: the loop that llama-server runs.

        with Engine("target.gguf", "drafter.gguf") as engine:
            print(engine.generate("Once upon a time", max_tokens=64).text)

    Nothing is evaluated in the background: every call works in the thread that makes it. While a
    call or a stream of one thread is open, another thread gets InvalidError. So does a forked
    process; one that is spawned can open an engine of its own. Closing is safe in any order: a
    stream whose engine is closed raises InvalidError.

    Args:
        target: path of the target GGUF.
        draft: path of the drafter GGUF; None decodes plainly.
        n_ctx: tokens of prompt and answer together; 0 is what the target was trained with.
        n_draft: tokens drafted a round. "auto" is what `dspine tune` stored for these files and
            cache types on this machine, else the drafter's block size - 1, which is also the most.
            A `DraftPolicy` is asked before every round.
        type_k, type_v: cache types of the target; draft_type_k, draft_type_v: of the drafter.
        n_gpu_layers, n_gpu_layers_draft: layers on the GPU; -1 is all that fit.
        threads: CPU threads; None is llama.cpp's choice.
        n_batch: tokens of a prompt that are evaluated in one call; n_ubatch: at once.
        flash_attn: "auto", "on" or "off"; quantized caches of values need it.
        seed: of calls that give none; None draws a new one for each.

    Raises LoadError when a file cannot be loaded or the two do not fit, InvalidError for an
    argument that is out of range, AbiError where library and package are of different builds.
    """

    def __init__(
        self,
        target: StrPath,
        draft: StrPath | None = None,
        *,
        n_ctx: int = 4096,
        n_draft: Literal["auto"] | int | DraftPolicy = "auto",
        type_k: str = "q8_0",
        type_v: str = "q8_0",
        draft_type_k: str = "q8_0",
        draft_type_v: str = "q8_0",
        n_gpu_layers: int = -1,
        n_gpu_layers_draft: int = -1,
        threads: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        seed: int | None = None,
    ) -> None:
        # Reentrant: the garbage collector may end another stream while it is held.
        self._claim_lock = threading.RLock()
        self._open_stream: weakref.ref[Stream] | None = None
        self._pieces: dict[int, bytes] = {}
        self._seed = check_seed(seed)
        cache_types = (type_k, type_v, draft_type_k, draft_type_v)
        chosen = _chosen_depth(n_draft, target, draft, cache_types)
        # 0 drafts nothing, but a later call may want to: the drafter keeps its own depth.
        depth = chosen if isinstance(chosen, int) and chosen > 0 else None
        options = PairOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_draft=depth,
            n_threads=threads,
            n_gpu_layers=n_gpu_layers,
            n_gpu_layers_draft=n_gpu_layers_draft,
            type_k=type_k,
            type_v=type_v,
            type_k_draft=draft_type_k,
            type_v_draft=draft_type_v,
            flash_attn=flash_attn,
            logits_all=False,
        )
        self._pair = Pair(target, draft, options)
        if depth is not None and 0 < self._pair.info.n_draft < depth:
            warnings.warn(
                f"n_draft {depth} exceeds the drafter's block size - 1, using "
                f"{self._pair.info.n_draft}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._policy = _policy(chosen, self._pair.info.n_draft)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"n_ctx {self.info.n_ctx}, n_draft {self.n_draft}"
        return f"<dspine.Engine, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("an Engine cannot be copied or pickled; open another one")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release both models and end an open stream. Calling it again does nothing.

        Raises InvalidError while another thread uses the engine.
        """
        self._claim("close()", None)
        self._pair.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._pair.closed

    @property
    def info(self) -> PairInfo:
        """Sizes of target and drafter."""
        return self._pair.info

    @property
    def n_draft(self) -> int:
        """The most tokens that a round can draft; 0 without a drafter."""
        return self._pair.info.n_draft

    @property
    def policy(self) -> DraftPolicy:
        """What chooses the depth of a round where a call says nothing."""
        return self._policy

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of a text; see `Pair.tokenize`."""
        return self._pair.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: IdsLike, *, special: bool = False) -> str:
        """Text of ids; `special` writes control tokens out. Incomplete characters are U+FFFD."""
        return self._pair.detokenize(tokens, special=special).decode("utf-8", "replace")

    def apply_template(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the target's own chat template makes of messages.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], as in OpenAI's chat API.
            thinking: let the target think first, or not, where its template can switch that; None
                is llama-server's default, which is on where it knows that the template can.
            add_generation_prompt: end with the beginning of an answer.
        """
        prompt: str = self._template(messages, thinking, add_generation_prompt)["prompt"]
        return prompt

    def generate(self, prompt: str | IdsLike, **settings: Unpack[Settings]) -> Result:
        """Continue a text or token ids.

        Args:
            prompt: a text, in which the texts of control tokens are those tokens, or ids [n >= 1].
            settings: see `Settings`.

        Raises InvalidError for a prompt that is empty or longer than the context, or a setting
        that is out of range; DecodeError where llama.cpp fails. The engine stays usable.
        """
        with self._begin("generate()", prompt, read_settings(settings), frozenset()) as stream:
            return stream.read()

    def stream(self, prompt: str | IdsLike, **settings: Unpack[Settings]) -> Stream:
        """The same piece by piece: an iterator that may be dropped at any moment."""
        return self._begin("stream()", prompt, read_settings(settings), frozenset())

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        stream: Literal[False] = False,
        **settings: Unpack[Settings],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        stream: Literal[True],
        **settings: Unpack[Settings],
    ) -> Stream: ...

    def chat(
        self,
        messages: Messages,
        *,
        thinking: bool | None = None,
        stream: bool = False,
        **settings: Unpack[Settings],
    ) -> Result | Stream:
        """Answer a conversation with the target's own chat template.

        Args:
            messages, thinking: see `apply_template`. Thinking is part of the text.
            stream: return a `Stream` instead of a `Result`.
            settings: see `Settings`.
        """
        request = read_settings(settings)
        template = self._template(messages, thinking, True)
        stops = (*request.stops, *template["stops"])
        request = Request(**{**vars(request), "stops": stops})
        preserved = frozenset(
            ids[0] for text in template["preserved"] if len(ids := self._special(text)) == 1
        )
        opened = self._begin("chat()", template["prompt"], request, preserved)
        if stream:
            return opened
        with opened:
            return opened.read()

    def _special(self, text: str) -> list[int]:
        return self.tokenize(text, add_special=False)

    def _template(
        self, messages: Messages, thinking: bool | None, generation: bool
    ) -> dict[str, Any]:
        try:
            text = json.dumps([dict(message) for message in messages])
        except (TypeError, ValueError) as error:
            raise InvalidError(
                f"messages must be a list of objects with role and content: {error}"
            ) from None
        made = self._pair.apply_template(text, add_generation_prompt=generation, thinking=thinking)
        answer: dict[str, Any] = json.loads(made)
        return answer

    def _begin(
        self, call: str, prompt: str | IdsLike, request: Request, preserved: frozenset[int]
    ) -> Stream:
        policy = self._policy if request.n_draft is None else _policy(request.n_draft, self.n_draft)
        stream = Stream(self, request, policy, preserved)
        self._claim(call, stream)
        try:
            ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
            sampling = request.to_native(self._pair.sampling_default(), self._seed)
            self._pair.begin(
                ids,
                -1 if request.max_tokens is None else request.max_tokens,
                sampling=sampling,
                reuse_prompt=request.cache_prompt,
            )
        except BaseException:
            stream.close()
            raise
        return stream

    def _claim(self, call: str, stream: Stream | None) -> None:
        """Make `stream` the open one; the one before it ends, unless another thread has it."""
        with self._claim_lock:
            before = self._open_stream() if self._open_stream else None
            if before is not None and before.busy_elsewhere():
                raise InvalidError(
                    f"{call}: another thread uses this engine; open an engine for each thread, or "
                    "let that thread close its stream first"
                )
            if before is not None:
                before.forget(f"{call} was called for the same engine")
            self._open_stream = weakref.ref(stream) if stream else None

    def _release(self, stream: Stream) -> None:
        """End the generation of a stream, if it is still the open one."""
        with self._claim_lock:
            if self._open_stream is None or self._open_stream() is not stream:
                return
            self._open_stream = None
        # In use, closed or forked: the next generation replaces this one anyway.
        with contextlib.suppress(InvalidError):
            self._pair.end()

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._pair.token_to_piece(token)
        return piece


class Stream(Iterator[Piece]):
    """An answer in the making: iterate, or `read` it to its end.

    It may be dropped, closed, or left by an exception at any moment; the engine is usable at once.
    Another call of the engine from the same thread ends it. Use it as a context manager where
    dropping should not wait for the garbage collector.
    """

    def __init__(
        self, engine: Engine, request: Request, policy: DraftPolicy, preserved: frozenset[int]
    ) -> None:
        self._engine: Engine | None = engine
        self._request = request
        self._policy = policy
        self._preserved = preserved
        self._thread = threading.current_thread()
        self._buffer = TextStream(request.stops)
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._reason = ""
        self._over = "the stream has ended"
        self._stats = Stats(0, 0, 0, 0.0, 0.0, 0.0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        """Run one round; StopIteration after the answer.

        Raises InvalidError where the engine was closed or has begun something else.
        """
        while True:
            if self._reason:
                if self._reason == "taken":
                    raise InvalidError(f"this stream is over: {self._over}")
                raise StopIteration
            piece = self._step()
            if piece.tokens or piece.text:
                return piece

    def read(self) -> Result:
        """Run to the end; the whole answer, with what was iterated before."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """End the generation. Calling it again does nothing."""
        engine = self._engine
        if engine is not None:
            self._end("aborted")

    @property
    def result(self) -> Result:
        """The answer so far; `stop_reason` is "" while there is more to come."""
        return Result("".join(self._texts), list(self._tokens), self._reason, self._current_stats())

    @property
    def stats(self) -> Stats:
        """Counts and times so far."""
        return self._current_stats()

    @property
    def n_tokens(self) -> int:
        """Ids of the answer so far."""
        return len(self._tokens)

    def busy_elsewhere(self) -> bool:
        """Whether another thread that still runs has this stream open."""
        mine = self._thread is threading.current_thread()
        return self._engine is not None and not mine and self._thread.is_alive()

    def forget(self, why: str) -> None:
        """The engine does something else from now on."""
        if self._engine is not None:
            self._stats = self._current_stats()
            self._engine = None
            self._reason, self._over = "taken", why

    def _current_stats(self) -> Stats:
        if self._engine is not None:
            with contextlib.suppress(InvalidError):
                self._stats = self._engine._pair.stats()
        return self._stats

    def _end(self, reason: str) -> None:
        engine = self._engine
        if engine is None:
            return
        self._current_stats()
        self._engine = None
        self._reason = reason
        engine._release(self)

    def _step(self) -> Piece:
        engine = self._engine
        if engine is None:
            raise StopIteration
        self._thread = threading.current_thread()
        policy = self._policy
        try:
            depth = policy.next_depth()
            if depth < 0:
                raise InvalidError(f"next_depth() of the policy gave {depth}, expected 0 or more")
            raw = engine._pair.step_raw(depth)
            emitted, stop = tuple(raw.emitted[: raw.n_emitted]), STOPS[raw.stop]
            if raw.anchor_pos >= 0 and not isinstance(policy, FixedDepth):
                policy.observe(to_round(raw), raw.draft_us / 1000, raw.verify_us / 1000)
            return self._take(engine, emitted, stop)
        except BaseException:
            self._end("aborted")
            raise

    def _take(self, engine: Engine, emitted: tuple[int, ...], stop: str) -> Piece:
        pieces = [self._text_of(engine, token) for token in emitted]
        if not self._request.stops:
            text = self._buffer.feed(b"".join(pieces))
        else:
            text, taken = self._until_stop(pieces)
            if self._buffer.stopped is not None:
                emitted, stop = emitted[:taken], "stop"
        self._tokens += emitted
        if stop:
            text += self._buffer.finish()
            self._end(stop)
        self._texts.append(text)
        return Piece(text, emitted)

    def _text_of(self, engine: Engine, token: int) -> bytes:
        if token in self._preserved:
            return engine._pair.token_to_piece(token, special=True)
        return engine._piece(token)

    def _until_stop(self, pieces: list[bytes]) -> tuple[str, int]:
        """Text up to a stop text, and how many tokens it took."""
        text = ""
        for taken, piece in enumerate(pieces, 1):
            text += self._buffer.feed(piece)
            if self._buffer.stopped is not None:
                return text, taken
        return text, len(pieces)


def _chosen_depth(
    n_draft: Any, target: StrPath, draft: StrPath | None, cache_types: tuple[str, ...]
) -> int | DraftPolicy | None:
    """What `n_draft` asks for; None is the drafter's block size - 1."""
    if n_draft == "auto":
        if draft is None:
            return None
        return _tuned.stored_depth(Path(target), Path(draft), cache_types)
    if isinstance(n_draft, str) or n_draft is None:
        raise InvalidError(f"n_draft is {n_draft!r}, expected 'auto', an integer or a DraftPolicy")
    return check_depth(n_draft)


def _policy(chosen: int | DraftPolicy | None, deepest: int) -> DraftPolicy:
    if chosen is None:
        return FixedDepth(deepest)
    return FixedDepth(min(chosen, deepest)) if isinstance(chosen, int) else chosen
