"""A target and its drafter, in this process: the building block of the engine."""

from __future__ import annotations

import ctypes
import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dspine import _library as native
from dspine import _terms
from dspine._errors import OK, InvalidError, error_of

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
IdsLike: TypeAlias = "Sequence[int] | npt.NDArray[Any]"
StrPath: TypeAlias = "str | os.PathLike[str]"

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# Values of DSPINE_STOP_*: an end-of-generation token, the limit, or a full context.
STOPS = {0: "", 1: "eos", 2: "limit", 3: "context"}
REUSE_PROMPT = 1  # DSPINE_REUSE_PROMPT
SPAWN = "start processes with the 'spawn' method of multiprocessing and open it there"
LOG_LEVELS = {"silent": 0, "error": 1, "warning": 2, "info": 3, "all": 4}


@dataclass(frozen=True)
class PairOptions:
    """How a pair is opened. None keeps the library's default.

    Attributes:
        n_ctx: tokens over all sequences; 0 takes the target's trained length. Default 4096.
        n_batch: tokens that one `target_decode` takes.
        n_ubatch: tokens that the target evaluates at once.
        n_seq: sequences that can be held at the same time.
        n_draft: tokens drafted a round; 0 or None is the drafter's block size - 1.
        n_draft_ubatch: rows that the drafter evaluates at once; raised to what `n_seq` needs.
        n_threads: 0 or None is llama.cpp's choice.
        n_gpu_layers, n_gpu_layers_draft: layers on the GPU; -1 is llama.cpp's choice.
        type_k, type_v, type_k_draft, type_v_draft: cache types, names of `CACHE_TYPES`.
        flash_attn: "auto", "off" or "on".
        p_min: a draft ends before the first token of lower confidence, 0 to 1; 0 never ends one.
        capture: keep the drafter's hidden rows for `Pair.tensor`, which is slow.
        logits_all: make room for the logits of every row of a `target_decode`. Default true; false
            limits that call to as many rows as one verification has, and needs less memory.
    """

    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_seq: int | None = None
    n_draft: int | None = None
    n_draft_ubatch: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    n_gpu_layers_draft: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    type_k_draft: str | None = None
    type_v_draft: str | None = None
    flash_attn: Literal["auto", "off", "on"] | None = None
    p_min: float | None = None
    capture: bool = False
    logits_all: bool | None = None

    def to_native(self) -> native.Params:
        """The C structure; raises InvalidError for a name or a number that C cannot hold."""
        params = native.Params()
        native.dspine_params_default(byref(params))
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            if name.startswith("type_"):
                value = _choice(name, value, CACHE_TYPES)
            elif name == "flash_attn":
                value = _choice(name, value, FLASH_ATTENTION)
            elif isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise InvalidError(f"{name} is {value}, which does not fit 32 bits")
            setattr(params, name, value)
        return params


@dataclass(frozen=True)
class PairInfo:
    """Sizes of an open pair; those of the drafter are 0 where there is none.

    Attributes:
        n_embd: hidden size of target and drafter.
        n_vocab: tokens of the target.
        n_layer_draft: layers of the drafter.
        n_taps: layer outputs of the target that the drafter reads, or those of `set_taps`.
        block_size: rows of a block as trained, the anchor included.
        n_draft: tokens drafted a round.
        top_k: candidates for each position of a draft.
        n_ctx: tokens over all sequences.
        n_ubatch_draft: rows that the drafter evaluates at once.
    """

    n_embd: int
    n_vocab: int
    n_layer_draft: int
    n_taps: int
    block_size: int
    n_draft: int
    top_k: int
    n_ctx: int
    n_ubatch_draft: int


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    Attributes:
        anchor_position: position of the anchor, the newest token before the round.
        anchor: its id.
        drafted: the drafted ids.
        accepted: how many of them the target agreed with.
        emitted: the accepted ids and one id of the target's own.
    """

    anchor_position: int
    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One step of a generation that was begun with `Pair.begin`.

    Attributes:
        emitted: the ids that it adds to the answer.
        round: the draft and its verification; None for a part of the prompt.
        n_prompt: tokens of the prompt that are evaluated.
        stop: "" while there is more, else a value of `STOPS`.
        draft_ms, verify_ms: milliseconds; 0 for a part of the prompt.
    """

    emitted: tuple[int, ...]
    round: Round | None
    n_prompt: int
    stop: str
    draft_ms: float
    verify_ms: float


@dataclass(frozen=True)
class Stats:
    """Counts and milliseconds of one generation.

    Attributes:
        rounds: drafts with their verifications; plain steps count as well.
        drafted: tokens that were drafted.
        accepted: drafted tokens that survived.
        prompt_ms, draft_ms, verify_ms: time for the prompt, for drafting, for verifying.
        prompt_tokens: length of the prompt.
        prompt_reused: tokens of the prompt that were in the cache.
        drafted_at: rounds that drafted the first, second, ... position.
        accepted_at: rounds that accepted it.
    """

    rounds: int
    drafted: int
    accepted: int
    prompt_ms: float
    draft_ms: float
    verify_ms: float
    prompt_tokens: int = 0
    prompt_reused: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a round, the target's own included; 1.0 is plain decoding."""
        return _terms.mean_accepted_length(self.accepted, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted out of drafted tokens; 0.0 where nothing was drafted."""
        return _terms.acceptance_rate(self.accepted, self.drafted)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Accepted out of drafted tokens at the first, second, ... position of a draft."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return tuple(accepted / drafted for accepted, drafted in pairs)


@dataclass(frozen=True)
class Generation:
    """What `Pair.generate` returns: ids `tokens` [n], the rounds in order, the counts."""

    tokens: Ids
    rounds: list[Round]
    stats: Stats


def set_log_level(level: str) -> None:
    """Let llama.cpp write to stderr: "silent" (the default), "error", "warning", "info", "all"."""
    native.dspine_set_log_level(_choice("level", level, LOG_LEVELS))


class Pair:
    """A target GGUF and, optionally, its DSpine drafter.

    A pair has one owner and serves one thread at a time: a call while another is running raises
    InvalidError. Threads and GPU state do not survive a fork: every call in a forked process raises
    InvalidError, and no pair can be opened there once one was opened in the parent. Use it as a
    context manager, or call `close`. Positions count from 0, sequences from 0 to n_seq - 1. Arrays
    that are returned are copies.

    Every method raises InvalidError for arguments that do not fit, DecodeError where llama.cpp
    fails, and InvalidError after `close`; what needs a drafter raises InvalidError without one.
    """

    _handle: c_void_p | None

    def __init__(
        self, target: StrPath, draft: StrPath | None = None, options: PairOptions | None = None
    ) -> None:
        """Load both files; raises LoadError when one cannot be loaded or they do not fit."""
        self._prepare()
        handle = c_void_p()
        params = (options or PairOptions()).to_native()
        call = f"open({os.fspath(target)!r}, {os.fspath(draft) if draft is not None else None!r})"
        _check(
            native.dspine_open(
                _path(target),
                None if draft is None else _path(draft),
                byref(params),
                byref(handle),
            ),
            call,
        )
        self._handle = handle
        self._info = self._read_info()

    def _prepare(self) -> None:
        """Fields that the rest relies on, set before the first call that can fail."""
        self._handle = None
        _refuse_after_fork()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._rows = 0  # of the last target_decode
        self._blocks = 0  # of the last draft
        self._raw = native.RawRound()  # of the last step
        self._raw_p = byref(self._raw)

    @classmethod
    def attach(cls, context: int, draft: StrPath, options: PairOptions | None = None) -> Pair:
        """A drafter beside a target context that someone else owns.

        Args:
            context: address of a llama_context of the llama.cpp that this package runs. It must
                outlive the pair; its sequence 0 is evaluated with `target_decode` alone.
            options: of it, only what concerns the drafter is read.

        Raises LoadError where the drafter does not fit, or the context cannot drop rejected tokens.
        """
        pair = cls.__new__(cls)
        pair._prepare()
        handle = c_void_p()
        params = (options or PairOptions()).to_native()
        _check(
            native.dspine_attach(c_void_p(context), _path(draft), byref(params), byref(handle)),
            f"attach({os.fspath(draft)!r})",
        )
        pair._handle = handle
        pair._info = pair._read_info()
        return pair

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is None:
            return
        if self._pid != os.getpid():
            self._handle = None  # the parent's; releasing it here would wait for threads it lost
        else:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2)
            self.close()

    def close(self) -> None:
        """Release both models. Calling it again does nothing; InvalidError while it is in use.

        In a forked process it only forgets them: they belong to the parent.
        """
        if self._handle is None:
            return
        if self._pid != os.getpid():
            self._handle = None
            return
        with self._in_use("close()"):
            handle, self._handle = self._handle, None
            native.dspine_close(handle)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the process was forked from the one that opened it."""
        return self._handle is None or self._pid != os.getpid()

    @property
    def info(self) -> PairInfo:
        """Sizes of the pair; available after `close` as well."""
        return self._info

    def truncate(self, seq: int, pos: int) -> None:
        """Forget everything of a sequence at and after a position, in target and drafter."""
        call = f"truncate(seq={seq}, pos={pos})"
        with self._in_use(call) as handle:
            _check(native.dspine_truncate(handle, _int32(seq, "seq"), _int32(pos, "pos")), call)

    def draft_truncate(self, seq: int, pos: int) -> None:
        """Forget everything of a sequence at and after a position, in the drafter alone."""
        call = f"draft_truncate(seq={seq}, pos={pos})"
        with self._in_use(call) as handle:
            _check(
                native.dspine_draft_truncate(handle, _int32(seq, "seq"), _int32(pos, "pos")), call
            )

    def target_decode(self, seq: int, tokens: IdsLike, pos0: int) -> None:
        """Evaluate `tokens` [n] on the target from position `pos0`; feeds the drafter as well."""
        ids = _ids(tokens, "tokens")
        call = f"target_decode(seq={seq}, {len(ids)} tokens, pos0={pos0})"
        with self._in_use(call) as handle:
            self._rows = 0
            _check(
                native.dspine_target_decode(
                    handle, _int32(seq, "seq"), _int32_p(ids), len(ids), _int32(pos0, "pos0")
                ),
                call,
            )
            self._rows = len(ids)

    def set_taps(self, layers: IdsLike) -> None:
        """Choose the rows of `target_taps`, of a pair without a drafter.

        Args:
            layers: input indices from 1 to the number of layers: l + 1 is the output of layer l.
        """
        ids = _ids(layers, "layers")
        call = f"set_taps({ids.tolist()})"
        with self._in_use(call) as handle:
            _check(native.dspine_set_taps(handle, _int32_p(ids), len(ids)), call)
            self._rows = 0
            self._info = replace(self._info, n_taps=len(ids))

    def target_logits(self) -> Floats:
        """Logits of the last `target_decode`: [n, n_vocab]."""
        out = np.empty((self._rows, self._info.n_vocab), np.float32)
        with self._in_use("target_logits()") as handle:
            _check(native.dspine_target_logits(handle, _float_p(out), out.size), "target_logits()")
        return out

    def target_taps(self) -> Floats:
        """Rows that the drafter reads, or those of `set_taps`, of the last `target_decode`.

        Returns [n, n_taps * n_embd].
        """
        out = np.empty((self._rows, self._info.n_taps * self._info.n_embd), np.float32)
        with self._in_use("target_taps()") as handle:
            _check(native.dspine_target_taps(handle, _float_p(out), out.size), "target_taps()")
        return out

    def draft_feed(self, seq: int, features: npt.ArrayLike, pos0: int) -> None:
        """Put features [n, n_taps * n_embd] into the drafter's cache, without the target."""
        rows: Floats = np.ascontiguousarray(features, np.float32)
        width = self._info.n_taps * self._info.n_embd
        call = f"draft_feed(seq={seq}, features {list(rows.shape)}, pos0={pos0})"
        if self._info.n_taps and (rows.ndim != 2 or rows.shape[1] != width):
            raise InvalidError(f"{call}: features must have the shape [n, {width}]")
        with self._in_use(call) as handle:
            _check(
                native.dspine_draft_feed(
                    handle, _int32(seq, "seq"), _float_p(rows), len(rows), _int32(pos0, "pos0")
                ),
                call,
            )

    def draft(self, seq: int, anchor: int, pos: int) -> Ids:
        """Draft after the token `anchor` at position `pos`; everything before must be fed.

        Returns at most n_draft ids. The drafter's cache is as before.
        """
        return self.draft_many([seq], [anchor], [pos])[0]

    def draft_many(self, seqs: IdsLike, anchors: IdsLike, positions: IdsLike) -> list[Ids]:
        """Draft for several sequences, in ascending order, in one batch; one array for each."""
        s, a, p = _ids(seqs, "seqs"), _ids(anchors, "anchors"), _ids(positions, "positions")
        call = f"draft(seqs={s.tolist()}, anchors={a.tolist()}, positions={p.tolist()})"
        if not len(s) == len(a) == len(p):
            raise InvalidError(f"{call}: the three lists must have equal lengths")
        out = np.zeros((len(s), max(self._info.n_draft, 1)), np.int32)
        n_out = np.zeros(max(len(s), 1), np.int32)
        with self._in_use(call) as handle:
            self._blocks = 0
            _check(
                native.dspine_draft_many(
                    handle,
                    _int32_p(s),
                    _int32_p(a),
                    _int32_p(p),
                    len(s),
                    _int32_p(out),
                    _int32_p(n_out),
                ),
                call,
            )
            self._blocks = len(s)
        return [row[:n].copy() for row, n in zip(out, n_out, strict=False)]

    def candidates(self, index: int = 0) -> tuple[Ids, Floats]:
        """Candidates and scores of block `index` of the last draft.

        Returns ids [n_draft, top_k] in no order, and scores [n_draft, top_k, top_k]: position,
        candidate before it, candidate.
        """
        depth, k = self._info.n_draft, self._info.top_k
        ids, scores = np.empty((depth, k), np.int32), np.empty((depth, k, k), np.float32)
        call = f"candidates(index={index})"
        with self._in_use(call) as handle:
            _check(
                native.dspine_draft_candidates(
                    handle, _int32(index, "index"), _int32_p(ids), _float_p(scores)
                ),
                call,
            )
        return ids, scores

    def tensor(self, name: str, layer: int = -1) -> Floats:
        """A tensor of the last draft, of a pair that was opened with `capture`.

        "dspine_pre_injection" and "dspine_post_injection" of a layer, "result_norm":
        [blocks, n_draft + 1, n_embd]; "result_output": [blocks, n_draft + 1, n_vocab].
        """
        width = self._info.n_vocab if name == "result_output" else self._info.n_embd
        out = np.empty((self._blocks, self._info.n_draft + 1, width), np.float32)
        call = f"tensor({name!r}, layer={layer})"
        with self._in_use(call) as handle:
            _check(
                native.dspine_draft_tensor(
                    handle, name.encode(), _int32(layer, "layer"), _float_p(out), out.size
                ),
                call,
            )
        return out

    def generate(
        self,
        prompt: IdsLike,
        n_predict: int,
        *,
        ignore_eog: bool = False,
        on_round: Callable[[Round], bool | None] | None = None,
    ) -> Generation:
        """Generate greedily after `prompt` [n >= 1] on a cleared sequence 0.

        Args:
            n_predict: at most so many ids.
            ignore_eog: go on after an end-of-generation token, which is kept either way.
            on_round: called after every round; False stops. What it raises ends the generation
                and is raised here.
        """
        ids = _ids(prompt, "prompt")
        call = f"generate(prompt of {len(ids)} tokens, n_predict={n_predict})"
        limit = _int32(n_predict, "n_predict")
        room = max(min(limit, self._info.n_ctx), 1)  # the context ends every generation
        out, n_out, raw = np.zeros(room, np.int32), c_int32(), native.RawStats()
        listener = _Listener(on_round)
        with self._in_use(call) as handle:
            self._rows = self._blocks = 0  # the loop overwrites both
            status = native.dspine_generate(
                handle,
                _int32_p(ids),
                len(ids),
                limit,
                ignore_eog,
                _int32_p(out),
                byref(n_out),
                byref(raw),
                listener.callback,
                None,
            )
            if listener.error is not None:
                raise listener.error
            _check(status, call)
        return Generation(out[: n_out.value].copy(), listener.rounds, _stats(raw))

    def sampling_default(self) -> native.Sampling:
        """llama.cpp's sampler settings, or those that the target's file recommends."""
        sampling = native.Sampling()
        with self._in_use("sampling_default()") as handle:
            _check(native.dspine_sampling_default(handle, byref(sampling)), "sampling_default()")
        return sampling

    def begin(
        self,
        prompt: IdsLike,
        n_predict: int = -1,
        *,
        sampling: native.Sampling | None = None,
        reuse_prompt: bool = True,
    ) -> None:
        """Begin a generation on sequence 0 that `step` continues; replaces one in progress.

        Args:
            prompt: ids [n >= 1], fewer than the context has.
            n_predict: at most so many ids; negative for as many as the context takes.
            sampling: changed values of `sampling_default`; None is greedy.
            reuse_prompt: keep what the caches share with the prompt, where they can be cut.
        """
        ids = _ids(prompt, "prompt")
        call = f"begin(prompt of {len(ids)} tokens, n_predict={n_predict})"
        with self._in_use(call) as handle:
            self._rows = self._blocks = 0
            _check(
                native.dspine_begin(
                    handle,
                    _int32_p(ids),
                    len(ids),
                    _int32(n_predict, "n_predict"),
                    REUSE_PROMPT if reuse_prompt else 0,
                    None if sampling is None else byref(sampling),
                ),
                call,
            )

    def step(self, n_draft: int = -1) -> Step:
        """Evaluate the next part of the prompt, or one round.

        Args:
            n_draft: draft at most so many tokens; negative is the pair's depth, 0 drafts nothing.

        Raises DecodeError where llama.cpp fails; the caches are empty then.
        """
        return _step(self.step_raw(n_draft))

    def step_raw(self, n_draft: int = -1) -> native.RawRound:
        """`step` for the engine's inner loop, which reads a part of it.

        Returns the pair's one structure: valid until its next call, in whatever thread.
        """
        handle = self._acquire("step()")
        try:
            status = native.dspine_step(handle, _int32(n_draft, "n_draft"), self._raw_p)
            if status != OK:
                _check(status, f"step(n_draft={n_draft})")
        finally:
            self._lock.release()
        return self._raw

    def stats(self) -> Stats:
        """Counts of the generation in progress, or of the last one."""
        raw = native.RawStats()
        with self._in_use("stats()") as handle:
            _check(native.dspine_get_stats(handle, byref(raw)), "stats()")
        return _stats(raw)

    def end(self) -> None:
        """End the generation in progress, if any; the caches stay for the next prompt."""
        with self._in_use("end()") as handle:
            _check(native.dspine_end(handle), "end()")

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Ids of a text.

        Args:
            add_special: add what the target's vocabulary puts around a text.
            parse_special: read the texts of control tokens as those tokens.
        """
        data = _utf8(text, "text")
        with self._in_use("tokenize()") as handle:
            ids = _filled(
                c_int32,
                lambda out, room, n: native.dspine_tokenize(
                    handle, data, len(data), add_special, parse_special, out, room, n
                ),
                "tokenize()",
            )
        return list(ids)

    def token_to_piece(self, token: int, *, special: bool = False) -> bytes:
        """Text of one id, which may be a part of a character.

        Args:
            special: give control tokens their text; else they have none.
        """
        with self._in_use(f"token_to_piece({token})") as handle:
            return _filled_bytes(
                lambda out, room, n: native.dspine_token_to_piece(
                    handle, _int32(token, "token"), special, out, room, n
                ),
                f"token_to_piece({token})",
            )

    def detokenize(self, tokens: IdsLike, *, special: bool = False) -> bytes:
        """Text of ids [n]; see `token_to_piece`."""
        ids = _ids(tokens, "tokens")
        call = f"detokenize({len(ids)} tokens)"
        with self._in_use(call) as handle:
            return _filled_bytes(
                lambda out, room, n: native.dspine_detokenize(
                    handle, _int32_p(ids), len(ids), special, out, room, n
                ),
                call,
            )

    def token_is_eog(self, token: int) -> bool:
        """Whether an id ends a generation."""
        ends = ctypes.c_bool()
        call = f"token_is_eog({token})"
        with self._in_use(call) as handle:
            _check(native.dspine_token_is_eog(handle, _int32(token, "token"), byref(ends)), call)
        return ends.value

    def apply_template(
        self, messages: str, *, add_generation_prompt: bool = True, thinking: bool | None = None
    ) -> str:
        """The target's own chat template for messages, JSON in and out.

        Args:
            messages: an array as in OpenAI's chat API.
            add_generation_prompt: end with the beginning of an answer.
            thinking: let the target think first, or not; None as llama-server does by default.

        Returns an object: "prompt", "stops" (texts that end the answer), "preserved" (control
        tokens that belong to the answer).
        """
        data = _utf8(messages, "messages")
        switch = -1 if thinking is None else int(thinking)
        with self._in_use("apply_template()") as handle:
            return _filled_bytes(
                lambda out, room, n: native.dspine_apply_template(
                    handle, data, len(data), add_generation_prompt, switch, out, room, n
                ),
                "apply_template()",
            ).decode("utf-8", "replace")

    def meta(self, key: str, *, of_drafter: bool = False) -> str:
        """A metadata value of the target's or the drafter's file, as text."""
        with self._in_use(f"meta({key!r})") as handle:
            return _filled_bytes(
                lambda out, room, n: native.dspine_model_meta(
                    handle, of_drafter, _utf8(key, "key"), out, room, n
                ),
                f"meta({key!r})",
            ).decode("utf-8", "replace")

    def _read_info(self) -> PairInfo:
        info = native.Info()
        _check(native.dspine_get_info(self._handle, byref(info)), "info")
        return PairInfo(**{name: getattr(info, name) for name in PairInfo.__dataclass_fields__})

    @contextmanager
    def _in_use(self, call: str) -> Iterator[c_void_p]:
        handle = self._acquire(call)
        try:
            yield handle
        finally:
            self._lock.release()

    def _acquire(self, call: str) -> c_void_p:
        """The handle, with the lock held."""
        if self._pid != os.getpid():
            raise InvalidError(
                f"{call}: opened in process {self._pid} and used in {os.getpid()}, which was "
                f"forked from it; {SPAWN}"
            )
        if not self._lock.acquire(blocking=False):
            raise InvalidError(
                f"{call}: the pair is in use; it serves one thread at a time and no call from "
                "its own callback"
            )
        handle = self._handle
        if handle is None:
            self._lock.release()
            raise InvalidError(f"{call}: the pair is closed")
        return handle


class _Listener:
    """Collects rounds from the native loop and keeps exceptions from crossing it."""

    def __init__(self, on_round: Callable[[Round], bool | None] | None) -> None:
        self.rounds: list[Round] = []
        self.error: BaseException | None = None
        self._on_round = on_round
        # Held here: the library calls it as long as the generation runs.
        self.callback = native.RoundFn(self._receive)

    def _receive(self, user: object, round_p: Any) -> bool:
        try:
            seen = to_round(round_p.contents)
            self.rounds.append(seen)
            return self._on_round is None or self._on_round(seen) is not False
        except BaseException as error:
            self.error = error
            return False


_opened_in: list[int] = []  # the process that first opened a pair


def _refuse_after_fork() -> None:
    """Raise InvalidError in a fork of a process that has opened pairs.

    The runtime of the parent's threads is copied as if they were there, and waits for them.
    """
    if not _opened_in:
        _opened_in.append(os.getpid())
    if _opened_in[0] != os.getpid():
        raise InvalidError(
            f"process {os.getpid()} was forked from {_opened_in[0]}, which has used the native "
            f"library; its threads are not here: {SPAWN}"
        )


def _check(status: int, call: str) -> None:
    if status != OK:
        text = (native.dspine_last_error() or b"").decode("utf-8", "replace")
        raise error_of(status, text, call)


def to_round(raw: native.RawRound) -> Round:
    """A copy of what the library says of a round."""
    return Round(
        anchor_position=raw.anchor_pos,
        anchor=raw.anchor,
        drafted=tuple(raw.drafted[: raw.n_drafted]),
        accepted=raw.n_accepted,
        emitted=tuple(raw.emitted[: raw.n_emitted]),
    )


def _step(raw: native.RawRound) -> Step:
    found = to_round(raw)
    return Step(
        emitted=found.emitted,
        round=found if found.anchor_position >= 0 else None,
        n_prompt=raw.n_prompt,
        stop=STOPS[raw.stop],
        draft_ms=raw.draft_us / 1000,
        verify_ms=raw.verify_us / 1000,
    )


def _filled(kind: Any, call: Callable[[Any, int, Any], int], name: str) -> Any:
    """Ask how many elements there are, then fetch them: a ctypes array of `kind`."""
    count = c_int32()
    _check(call(None, 0, byref(count)), name)
    out = (kind * max(count.value, 1))()
    _check(call(out, count.value, byref(count)), name)
    return out[: count.value]


def _filled_bytes(call: Callable[[Any, int, Any], int], name: str) -> bytes:
    data: bytes = _filled(ctypes.c_char, call, name)
    return data


def _utf8(text: str | bytes, name: str) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise InvalidError(f"{name} is {type(text).__name__}, expected a string")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"{name} is no Unicode text: {error.reason}") from None


def _stats(raw: native.RawStats) -> Stats:
    drafted_at = tuple(n for n in raw.drafted_at if n)  # no position before an undrafted one
    return Stats(
        rounds=raw.rounds,
        drafted=raw.drafted,
        accepted=raw.accepted,
        prompt_ms=raw.prompt_us / 1000,
        draft_ms=raw.draft_us / 1000,
        verify_ms=raw.verify_us / 1000,
        prompt_tokens=raw.prompt_tokens,
        prompt_reused=raw.prompt_reused,
        drafted_at=drafted_at,
        accepted_at=tuple(raw.accepted_at[: len(drafted_at)]),
    )


def _choice(name: str, value: str, choices: dict[str, int]) -> int:
    if value not in choices:
        raise InvalidError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return choices[value]


def _path(value: StrPath) -> bytes:
    encoded = os.fsencode(value)
    if b"\0" in encoded:
        raise InvalidError(f"{value!r} holds a NUL byte")
    return encoded


def _int32(value: int, name: str) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        raise InvalidError(f"{name} is {value!r}, expected an integer") from None
    if not -(2**31) <= index < 2**31:
        raise InvalidError(f"{name} is {value}, which does not fit 32 bits")
    return index


def _ids(values: IdsLike, name: str) -> Ids:
    """A C-contiguous int32 array; raises InvalidError where a value is no 32-bit integer."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidError(f"{name} must be a flat list of integers")
    if given.size and not (int(given.min()) >= -(2**31) and int(given.max()) < 2**31):
        raise InvalidError(f"{name} holds a value that does not fit 32 bits")
    return np.ascontiguousarray(given, np.int32)


def _int32_p(array: Ids) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(c_int32))


def _float_p(array: Floats) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
