"""The drafter as a draft model of llama-cpp-python.

    from dspine import DraftModel
    import llama_cpp

    llm = llama_cpp.Llama(model_path="target.gguf", draft_model=DraftModel("drafter.gguf"))

llama-cpp-python gives a draft model the ids alone. This drafter needs more: the target's context,
whose hidden states it reads after every decode and whose head it borrows. A `DraftModel` therefore
attaches to its Llama: it makes Llama's constructor bind it (`_bind_in_constructor`), and has the
Llama's decoding done by the native library, which feeds the drafter in the same call.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dspine import _library as native
from dspine._errors import AbiError, InvalidError, LoadError
from dspine._pair import Pair, PairInfo, PairOptions, Stats, StrPath

LLAMA_LIB_ENV = "LLAMA_CPP_LIB_PATH"
KEEP_HEAD_ROWS = "dspine.keep_head_rows"  # asks the loader to keep the target's head readable
NO_DRAFT: npt.NDArray[np.intc] = np.empty(0, np.intc)


def _import_llama_cpp() -> Any:
    """llama_cpp on our library.

    Raises LoadError where it is absent, or where it runs another llama.cpp: two copies in one
    process cannot share a context.
    """
    loaded = native.library()
    if "llama_cpp" not in sys.modules:
        os.environ.setdefault(LLAMA_LIB_ENV, str(native.library_candidates()[0].parent))
    try:
        module: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise LoadError(
            f"DraftModel needs llama-cpp-python 0.3.36: pip install 'dspine[engine]' ({error})"
        ) from None
    except (OSError, RuntimeError) as error:  # it loads its library when it is imported
        raise LoadError(f"llama_cpp cannot load {os.environ.get(LLAMA_LIB_ENV)}: {error}") from None
    theirs = ctypes.cast(module.llama_cpp._lib.llama_decode, ctypes.c_void_p).value
    ours = ctypes.cast(loaded.llama_decode, ctypes.c_void_p).value
    if theirs != ours:
        folder = native.library_candidates()[0].parent
        raise AbiError(
            f"llama_cpp runs {module.llama_cpp._lib._name}, not the llama.cpp of dspine: import "
            f"DraftModel before llama_cpp, or set {LLAMA_LIB_ENV}={folder}"
        )
    return module


llama_cpp = _import_llama_cpp()

if TYPE_CHECKING:
    LlamaDraftModel = Any
else:
    from llama_cpp.llama_speculative import LlamaDraftModel


class DraftModel(LlamaDraftModel):  # type: ignore[misc]
    """A DSpine drafter for one `llama_cpp.Llama`, which owns it from then on.

    Loaded when the Llama is made, released when it is closed (or with `close`, before it). It
    serves one Llama at a time. Hybrid and recurrent targets are refused: llama-cpp-python's
    contexts cannot drop rejected tokens of those; `dspine.Engine` can.

    A Llama with a drafter keeps the logits of every position (`logits_all`), as it needs room for
    those of the drafted ones: n_ctx * vocabulary * 4 bytes, touched as far as the context is used.

    Args:
        path: the drafter GGUF.
        n_draft: tokens drafted a round; "auto" is the drafter's block size - 1.
        type_k, type_v: its cache types.
        n_gpu_layers: its layers on the GPU; -1 is all that fit.
        threads: its CPU threads; None is the Llama's number.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        n_draft: int | str = "auto",
        type_k: str = "q8_0",
        type_v: str = "q8_0",
        n_gpu_layers: int = -1,
        threads: int | None = None,
    ) -> None:
        if n_draft != "auto" and (not isinstance(n_draft, int) or n_draft < 1):
            raise InvalidError(
                f"n_draft is {n_draft!r}, expected 'auto' or an integer of 1 or more"
            )
        self._pair: Pair | None = None
        self._closed = False
        self._feed = _Feed()
        self._counts = _Counts()
        self._path = path
        self._settings: dict[str, Any] = {
            "n_draft": n_draft,
            "type_k": type_k,
            "type_v": type_v,
            "n_gpu_layers": n_gpu_layers,
            "threads": threads,
        }
        self._options = PairOptions(
            n_draft=n_draft if isinstance(n_draft, int) else None,
            type_k_draft=type_k,
            type_v_draft=type_v,
            n_gpu_layers_draft=n_gpu_layers,
            n_threads=threads,
        )
        _bind_in_constructor(llama_cpp.Llama)

    def __reduce__(self) -> Any:
        """A copy has the settings and no Llama."""
        return functools.partial(DraftModel, self._path, **self._settings), ()

    def bind(self, llama: Any) -> None:
        """Attach to a Llama that has evaluated nothing yet; its constructor does this.

        Needed only where `draft_model` is set on a finished Llama, which then has to be made with
        logits_all=True and kv_overrides={"dspine.keep_head_rows": True}.

        Raises LoadError where the drafter does not fit, InvalidError where either is in use.
        """
        if self._closed or (self._pair is not None and self._pair.closed):
            raise InvalidError(f"DraftModel({self._path}) is closed; make another one")
        if self._pair is not None:
            raise InvalidError(
                f"DraftModel({self._path}) serves another Llama; make one for each Llama"
            )
        if llama.context_params.embeddings:
            raise InvalidError("a Llama with embedding=True generates nothing to draft for")
        if llama.n_tokens:
            raise InvalidError("the Llama has evaluated tokens that the drafter did not see")
        context = llama._ctx
        self._pair = Pair.attach(
            ctypes.cast(context.ctx, ctypes.c_void_p).value or 0, self._path, self._options
        )
        self._feed = _Feed(llama.n_ctx())
        decode = context.decode
        context.decode = MethodType(functools.partial(_decode, weakref.ref(self), decode), context)
        # The last one in is the first one out: the drafter goes before the context it borrows, also
        # where the garbage collector takes both, in any order. Hence the pair, no weak reference.
        context._exit_stack.callback(_release, self._pair, context)

    def close(self) -> None:
        """Release the drafter; the Llama then needs another draft_model, or None."""
        self._closed = True
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def __del__(self) -> None:
        if getattr(self, "_pair", None) is not None:
            self.close()

    @property
    def info(self) -> PairInfo:
        """Sizes of the pair; raises InvalidError before it is attached."""
        return self._attached().info

    @property
    def stats(self) -> Stats:
        """Counts since it was attached, without times.

        The last round of each generation is missing: nobody says how it ended.
        """
        return self._counts.stats()

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Draft after the last of `input_ids` [n], whose others the Llama has evaluated.

        Returns at most n_draft ids; none where the drafter has not seen what the target has.
        """
        pair = self._attached()
        committed = len(input_ids) - 1
        if committed < 1 or not self._feed.keep(input_ids[:committed]):
            self._counts.draft(committed, 0)
            return NO_DRAFT
        pair.draft_truncate(0, committed)
        drafted = pair.draft(0, int(input_ids[-1]), committed)
        self._counts.draft(committed, len(drafted))
        return drafted.astype(np.intc)

    def _attached(self) -> Pair:
        if self._closed or (self._pair is not None and self._pair.closed):
            raise InvalidError(f"DraftModel({self._path}) is closed; set draft_model to None")
        if self._pair is None:
            raise InvalidError(
                f"DraftModel({self._path}) has no target: a drafter alone drafts nothing. Give it "
                "to llama_cpp.Llama(model_path=..., draft_model=...), or use dspine.Engine"
            )
        return self._pair

    def _evaluate(self, tokens: npt.NDArray[np.int32], position: int) -> None:
        """Decode for the Llama, and let the drafter see the rows."""
        pair = self._attached()
        pair.draft_truncate(0, self._feed.before(position))
        try:
            pair.target_decode(0, tokens, position)
        except BaseException:
            self._feed.clear()
            raise
        self._feed.add(tokens, position)
        self._counts.evaluated(position)


class _Feed:
    """Which ids the drafter has rows of: those at positions `start` to `end` - 1."""

    def __init__(self, n_ctx: int = 0) -> None:
        self._ids = np.zeros(n_ctx, np.int32)
        self.start = self.end = 0

    def clear(self) -> None:
        self.start = self.end = 0

    def before(self, position: int) -> int:
        """Where the drafter's cache has to be cut before rows come at `position`.

        After a gap (a restored state, an image) nothing of it can stay: rows must be consecutive.
        """
        return position if self.start <= position <= self.end else 0

    def add(self, tokens: npt.NDArray[np.int32], position: int) -> None:
        if not self.start <= position <= self.end:
            self.start = position
        self.end = position + len(tokens)
        self._ids[position : self.end] = tokens

    def keep(self, committed: npt.NDArray[np.intc]) -> bool:
        """Whether the rows up to there are of these ids; forgets what comes after."""
        n = len(committed)
        same = self.start < n <= self.end and np.array_equal(
            self._ids[self.start : n], committed[self.start :]
        )
        if same:
            self.end = n
        return bool(same)


class _Counts:
    """Rounds, from the positions at which drafts were asked for."""

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = 0
        self._open: tuple[int, int] | None = None  # position of the anchor, tokens drafted
        self._verified = False

    def evaluated(self, position: int) -> None:
        """The target evaluated rows from `position` on."""
        self._verified = self._open is not None and position == self._open[0]
        if not self._verified:
            self._open = None  # another generation has begun

    def draft(self, position: int, n_drafted: int) -> None:
        if self._open is not None and self._verified:
            anchor, drafted = self._open
            self.rounds += 1
            self.drafted += drafted
            self.accepted += position - anchor - 1
        self._open, self._verified = (position, n_drafted), False

    def stats(self) -> Stats:
        return Stats(self.rounds, self.drafted, self.accepted, 0.0, 0.0, 0.0)


def _decode(model_ref: weakref.ref[DraftModel], decode: Any, context: Any, batch: Any) -> None:
    """LlamaContext.decode of a Llama with a drafter."""
    model = model_ref()
    if model is None or model._pair is None or model._pair.closed:
        decode(batch)
        return
    raw = batch.batch
    tokens = np.ctypeslib.as_array(raw.token, (raw.n_tokens,)).astype(np.int32)
    model._evaluate(tokens, raw.pos[0])


def _release(pair: Pair, context: Any) -> None:
    context.__dict__.pop("decode", None)
    pair.close()


def _bind_in_constructor(llama_class: Any) -> None:
    """Let `Llama(draft_model=DraftModel(...))` bind it, and be made as a drafter needs it.

    The constructor is the one place where a draft model meets its Llama. Others pass unchanged.
    """
    original = llama_class.__init__
    if hasattr(original, "dspine_wraps"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("draft_model")
        if not isinstance(model, DraftModel):
            original(self, *args, **kwargs)
            return
        # Room for one row of logits a position: without, it fails past n_batch tokens.
        kwargs["logits_all"] = True
        kwargs["kv_overrides"] = {KEEP_HEAD_ROWS: True, **(kwargs.get("kv_overrides") or {})}
        original(self, *args, **kwargs)
        try:
            model.bind(self)
        except BaseException:
            self.close()
            raise

    init.dspine_wraps = original  # type: ignore[attr-defined]
    llama_class.__init__ = init
