"""Single evaluations of a drafter or a target through llama.h, to be timed.

The declarations are those of llama-cpp-python, on the library of this package. This goes below
`dspine.Pair` because a pair takes DSpine drafters alone, and because its calls do several things:
here a call is one graph.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dspine_bench.errors import BenchError

ALL_LAYERS = 999
N_UBATCH = 128
MAX_ROWS = 16  # of a call whose logits are read
KEEP_HEAD_ROWS = b"dspine.keep_head_rows"
BLOCK_SIZE = b"dflash.block_size"
OVERRIDE_INT, OVERRIDE_BOOL = 0, 2  # LLAMA_KV_OVERRIDE_TYPE_*
CANDIDATES = 10  # what common/speculative.cpp samples a draft from

Override = tuple[bytes, int]


@functools.cache
def api() -> Any:
    """llama_cpp.llama_cpp on our library, quiet; BenchError where it is absent."""
    from dspine import DspineError

    try:
        from dspine._draft_model import llama_cpp
    except DspineError as error:
        raise BenchError(f"draft: {error}") from None
    from dspine import set_log_level

    set_log_level("error")
    module = llama_cpp.llama_cpp
    module.llama_backend_init()
    return module


class Model:
    """A loaded GGUF; `overrides` replace metadata of it, as (key, value)."""

    def __init__(self, path: Path, *overrides: Override) -> None:
        self._api = api()
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS
        entries = (self._api.llama_model_kv_override * (len(overrides) + 1))()
        for entry, (key, value) in zip(entries, overrides, strict=False):
            entry.key = key
            if key == KEEP_HEAD_ROWS:
                entry.tag, entry.value.val_bool = OVERRIDE_BOOL, bool(value)
            else:
                entry.tag, entry.value.val_i64 = OVERRIDE_INT, value
        if overrides:
            params.kv_overrides = entries
        self.handle = self._api.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise BenchError(f"{path}: llama.cpp cannot load it")

    def close(self) -> None:
        """Release it, after its contexts."""
        if self.handle:
            self._api.llama_model_free(self.handle)
            self.handle = None


class Context:
    """A context of a model; of a drafter beside its target's, whose embeddings it borrows.

    Args:
        samples: choose the likeliest tokens on the backend, as the loop does for DFlash and DSpark.
        params: fields of `llama_context_params` that are set beside those named above.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_threads: int,
        other: Context | None = None,
        *,
        causal: bool = True,
        samples: bool = False,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self._api = lib = api()
        self._model = model
        self.handle: Any = None
        wanted = lib.llama_context_default_params()
        wanted.n_ctx = n_ctx
        wanted.n_batch = wanted.n_ubatch = N_UBATCH
        wanted.n_threads = wanted.n_threads_batch = n_threads
        wanted.no_perf = True
        wanted.n_outputs_max = wanted.n_outputs_max_per_seq = MAX_ROWS
        wanted.ctx_other = other.handle if other else None
        for field, value in (params or {}).items():
            setattr(wanted, field, value)
        self.handle = lib.llama_init_from_model(model.handle, wanted)
        if not self.handle:
            raise BenchError("llama.cpp cannot make a context")
        lib.llama_set_causal_attn(self.handle, causal)
        self._memory = lib.llama_get_memory(self.handle)
        self._chain = self._sampler() if samples else None
        self._picker = lib.llama_sampler_init_greedy() if samples else None

    def _sampler(self) -> Any:
        chain = self._api.llama_sampler_chain_init(self._api.llama_sampler_chain_default_params())
        self._api.llama_sampler_chain_add(chain, self._api.llama_sampler_init_top_k(CANDIDATES))
        if not self._api.llama_set_sampler(self.handle, 0, chain):
            self._api.llama_sampler_free(chain)  # this backend cannot: the picker takes all logits
            return None
        return chain

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the context, and the model that it was made of."""
        if not self.handle:
            return
        if self._chain:
            self._api.llama_set_sampler(self.handle, 0, None)
        for sampler in (self._chain, self._picker):
            if sampler:
                self._api.llama_sampler_free(sampler)
        self._api.llama_free(self.handle)
        self.handle = None
        self._model.close()

    def _batch(self, rows: int, pos0: int, *, logits: bool, width: int = 0) -> Any:
        """A batch of `rows` positions of sequence 0, with room for embeddings of `width`."""
        batch = self._api.llama_batch_init(rows, width, 1)
        batch.n_tokens = rows
        for i in range(rows):
            batch.pos[i] = pos0 + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = logits
        return batch

    def _timed(self, batch: Any, what: str) -> float:
        """Milliseconds until the result is there."""
        self._api.llama_synchronize(self.handle)
        begin = time.perf_counter()
        code = self._api.llama_decode(self.handle, batch)
        self._api.llama_synchronize(self.handle)
        spent = 1000 * (time.perf_counter() - begin)
        if code != 0:
            raise BenchError(f"{what}: llama.cpp could not evaluate it ({code})")
        return spent

    def tokens(self, rows: int, pos0: int, *, logits: bool, token: int = 1) -> float:
        """Evaluate `rows` ids at pos0 and forget them again; milliseconds."""
        batch = self._batch(rows, pos0, logits=logits)
        for i in range(rows):
            batch.token[i] = token + i
        spent = self._timed(batch, f"{rows} tokens at {pos0}")
        self._api.llama_batch_free(batch)
        self._api.llama_memory_seq_rm(self._memory, 0, pos0, -1)
        return spent

    def keep(self, rows: int, pos0: int) -> None:
        """Evaluate ids that stay in the cache."""
        batch = self._batch(rows, pos0, logits=False)
        for i in range(rows):
            batch.token[i] = 1 + (pos0 + i) % 100
        self._timed(batch, f"{rows} tokens at {pos0}")
        self._api.llama_batch_free(batch)

    def features(self, rows: int, pos0: int, width: int, *, keep: bool) -> float:
        """Put rows of target features [rows, width] into a drafter's cache; milliseconds."""
        batch = self._batch(rows, pos0, logits=False, width=width)
        data = np.random.default_rng(pos0).standard_normal(rows * width, np.float32)
        ctypes.memmove(batch.embd, data.ctypes.data, data.nbytes)
        spent = self._timed(batch, f"{rows} feature rows at {pos0}")
        self._api.llama_batch_free(batch)
        if not keep:
            self._api.llama_memory_seq_rm(self._memory, 0, pos0, -1)
        return spent

    def pick(self, rows: int) -> float:
        """Choose the tokens of the last block's rows 1 to `rows` - 1; milliseconds."""
        begin = time.perf_counter()
        for row in range(1, rows):
            self._api.llama_sampler_sample(self._picker, self.handle, row)
        return 1000 * (time.perf_counter() - begin)
