"""The C interface of dspine (native/capi/dspine.h), declared once and checked when it is loaded.

Nothing is loaded on import, so that what needs no library (help, headers, memory plans) starts at
once and works without one. The first call of any function, whichever it is, finds the library,
compares the interface version, resolves every declared function and compares the size of every
shared structure; only then does it run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from dspine._errors import AbiError, LoadError

ABI_VERSION = 2
MAX_POSITIONS = 64  # DSPINE_MAX_POSITIONS
LIB_DIR_ENV = "DSPINE_LIB_DIR"

Pointer = Any  # what ctypes.byref, a ctypes array or a pointer is; there is no common public type

int32_p = POINTER(c_int32)
float_p = POINTER(c_float)


class Params(Structure):
    """struct dspine_params: how a pair is opened."""

    _fields_ = (
        ("size", c_uint32),
        ("n_ctx", c_int32),
        ("n_batch", c_int32),
        ("n_ubatch", c_int32),
        ("n_seq", c_int32),
        ("n_draft", c_int32),
        ("n_draft_ubatch", c_int32),
        ("n_threads", c_int32),
        ("n_gpu_layers", c_int32),
        ("n_gpu_layers_draft", c_int32),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("type_k_draft", c_int32),
        ("type_v_draft", c_int32),
        ("flash_attn", c_int32),
        ("p_min", c_float),
        ("capture", c_bool),
        ("logits_all", c_bool),
    )


class Sampling(Structure):
    """struct dspine_sampling: how tokens are chosen."""

    _fields_ = (
        ("size", c_uint32),
        ("seed", c_uint32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("typical_p", c_float),
        ("penalty_last_n", c_int32),
        ("penalty_repeat", c_float),
        ("penalty_freq", c_float),
        ("penalty_present", c_float),
        ("ignore_eos", c_bool),
    )


class Info(Structure):
    """struct dspine_info: sizes of an open pair."""

    _fields_ = (
        ("n_embd", c_int32),
        ("n_vocab", c_int32),
        ("n_layer_draft", c_int32),
        ("n_taps", c_int32),
        ("block_size", c_int32),
        ("n_draft", c_int32),
        ("top_k", c_int32),
        ("n_ctx", c_int32),
        ("n_ubatch_draft", c_int32),
    )


class RawStats(Structure):
    """struct dspine_stats: counts and times of one generation."""

    _fields_ = (
        ("prompt_tokens", c_int64),
        ("prompt_reused", c_int64),
        ("rounds", c_int64),
        ("drafted", c_int64),
        ("accepted", c_int64),
        ("prompt_us", c_int64),
        ("draft_us", c_int64),
        ("verify_us", c_int64),
        ("drafted_at", c_int64 * MAX_POSITIONS),
        ("accepted_at", c_int64 * MAX_POSITIONS),
    )


class RawRound(Structure):
    """struct dspine_round: one step of a generation, valid until the next call for the pair."""

    _fields_ = (
        ("anchor_pos", c_int32),
        ("anchor", c_int32),
        ("drafted", int32_p),
        ("n_drafted", c_int32),
        ("n_accepted", c_int32),
        ("emitted", int32_p),
        ("n_emitted", c_int32),
        ("n_prompt", c_int32),
        ("stop", c_int32),
        ("draft_us", c_int64),
        ("verify_us", c_int64),
    )


class Device(Structure):
    """struct dspine_device: something that llama.cpp can compute on."""

    _fields_ = (
        ("name", c_char_p),
        ("description", c_char_p),
        ("backend", c_char_p),
        ("total_bytes", c_int64),
        ("free_bytes", c_int64),
        ("type", c_int32),
    )


# typedef bool (*dspine_round_fn)(void * user, const dspine_round * round);
RoundFn = CFUNCTYPE(c_bool, c_void_p, POINTER(RawRound))


class Prototype(NamedTuple):
    """Types of one C function."""

    restype: Any
    argtypes: tuple[Any, ...]


PROTOTYPES: dict[str, Prototype] = {}

_Declared = TypeVar("_Declared", bound=Callable[..., Any])


def _native(restype: Any, *argtypes: Any) -> Callable[[_Declared], _Declared]:
    """Declare a C function by a stub of the same name; calling the stub calls the library."""

    def declare(stub: _Declared) -> _Declared:
        name = stub.__name__
        PROTOTYPES[name] = Prototype(restype, argtypes)

        @functools.wraps(stub)
        def call(*args: Any) -> Any:
            return getattr(library(), name)(*args)

        return cast(_Declared, call)

    return declare


# int32_t dspine_abi_version(void);
@_native(c_int32)
def dspine_abi_version() -> int:
    raise NotImplementedError


# uint32_t dspine_params_size(void);
@_native(c_uint32)
def dspine_params_size() -> int:
    raise NotImplementedError


# uint32_t dspine_sampling_size(void);
@_native(c_uint32)
def dspine_sampling_size() -> int:
    raise NotImplementedError


# uint32_t dspine_info_size(void);
@_native(c_uint32)
def dspine_info_size() -> int:
    raise NotImplementedError


# uint32_t dspine_stats_size(void);
@_native(c_uint32)
def dspine_stats_size() -> int:
    raise NotImplementedError


# uint32_t dspine_round_size(void);
@_native(c_uint32)
def dspine_round_size() -> int:
    raise NotImplementedError


# uint32_t dspine_device_size(void);
@_native(c_uint32)
def dspine_device_size() -> int:
    raise NotImplementedError


# const char * dspine_last_error(void);
@_native(c_char_p)
def dspine_last_error() -> bytes | None:
    raise NotImplementedError


# void dspine_set_log_level(int32_t level);
@_native(None, c_int32)
def dspine_set_log_level(level: int) -> None:
    raise NotImplementedError


# const char * dspine_llama_build(void);
@_native(c_char_p)
def dspine_llama_build() -> bytes:
    raise NotImplementedError


# const char * dspine_system_info(void);
@_native(c_char_p)
def dspine_system_info() -> bytes:
    raise NotImplementedError


# int32_t dspine_device_count(void);
@_native(c_int32)
def dspine_device_count() -> int:
    raise NotImplementedError


# dspine_status dspine_get_device(int32_t index, dspine_device * device);
@_native(c_int32, c_int32, POINTER(Device))
def dspine_get_device(index: int, device: Pointer) -> int:
    raise NotImplementedError


# void dspine_params_default(dspine_params * params);
@_native(None, POINTER(Params))
def dspine_params_default(params: Pointer) -> None:
    raise NotImplementedError


# dspine_status dspine_open(const char * target, const char * draft, const dspine_params * params,
#                           dspine_pair ** out);
@_native(c_int32, c_char_p, c_char_p, POINTER(Params), POINTER(c_void_p))
def dspine_open(target: bytes, draft: bytes | None, params: Pointer, out: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_attach(void * target, const char * draft, const dspine_params * params,
#                             dspine_pair ** out);
@_native(c_int32, c_void_p, c_char_p, POINTER(Params), POINTER(c_void_p))
def dspine_attach(target: c_void_p, draft: bytes, params: Pointer, out: Pointer) -> int:
    raise NotImplementedError


# void dspine_close(dspine_pair * pair);
@_native(None, c_void_p)
def dspine_close(pair: c_void_p | None) -> None:
    raise NotImplementedError


# dspine_status dspine_get_info(const dspine_pair * pair, dspine_info * info);
@_native(c_int32, c_void_p, POINTER(Info))
def dspine_get_info(pair: c_void_p | None, info: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_truncate(dspine_pair * pair, int32_t seq, int32_t pos);
@_native(c_int32, c_void_p, c_int32, c_int32)
def dspine_truncate(pair: c_void_p | None, seq: int, pos: int) -> int:
    raise NotImplementedError


# dspine_status dspine_draft_truncate(dspine_pair * pair, int32_t seq, int32_t pos);
@_native(c_int32, c_void_p, c_int32, c_int32)
def dspine_draft_truncate(pair: c_void_p | None, seq: int, pos: int) -> int:
    raise NotImplementedError


# dspine_status dspine_target_decode(dspine_pair * pair, int32_t seq, const int32_t * tokens,
#                                    int32_t n, int32_t pos0);
@_native(c_int32, c_void_p, c_int32, int32_p, c_int32, c_int32)
def dspine_target_decode(
    pair: c_void_p | None, seq: int, tokens: Pointer, n: int, pos0: int
) -> int:
    raise NotImplementedError


# dspine_status dspine_set_taps(dspine_pair * pair, const int32_t * layers, int32_t n);
@_native(c_int32, c_void_p, int32_p, c_int32)
def dspine_set_taps(pair: c_void_p | None, layers: Pointer, n: int) -> int:
    raise NotImplementedError


# dspine_status dspine_target_logits(dspine_pair * pair, float * out, int64_t count);
@_native(c_int32, c_void_p, float_p, c_int64)
def dspine_target_logits(pair: c_void_p | None, out: Pointer, count: int) -> int:
    raise NotImplementedError


# dspine_status dspine_target_taps(dspine_pair * pair, float * out, int64_t count);
@_native(c_int32, c_void_p, float_p, c_int64)
def dspine_target_taps(pair: c_void_p | None, out: Pointer, count: int) -> int:
    raise NotImplementedError


# dspine_status dspine_draft_feed(dspine_pair * pair, int32_t seq, const float * features,
#                                 int32_t n, int32_t pos0);
@_native(c_int32, c_void_p, c_int32, float_p, c_int32, c_int32)
def dspine_draft_feed(pair: c_void_p | None, seq: int, features: Pointer, n: int, pos0: int) -> int:
    raise NotImplementedError


# dspine_status dspine_draft(dspine_pair * pair, int32_t seq, int32_t anchor, int32_t pos,
#                            int32_t * out, int32_t * n_out);
@_native(c_int32, c_void_p, c_int32, c_int32, c_int32, int32_p, int32_p)
def dspine_draft(
    pair: c_void_p | None, seq: int, anchor: int, pos: int, out: Pointer, n_out: Pointer
) -> int:
    raise NotImplementedError


# dspine_status dspine_draft_many(dspine_pair * pair, const int32_t * seqs, const int32_t * anchors,
#                                 const int32_t * positions, int32_t n, int32_t * out,
#                                 int32_t * n_out);
@_native(c_int32, c_void_p, int32_p, int32_p, int32_p, c_int32, int32_p, int32_p)
def dspine_draft_many(
    pair: c_void_p | None,
    seqs: Pointer,
    anchors: Pointer,
    positions: Pointer,
    n: int,
    out: Pointer,
    n_out: Pointer,
) -> int:
    raise NotImplementedError


# dspine_status dspine_draft_candidates(dspine_pair * pair, int32_t index, int32_t * candidates,
#                                       float * scores);
@_native(c_int32, c_void_p, c_int32, int32_p, float_p)
def dspine_draft_candidates(
    pair: c_void_p | None, index: int, candidates: Pointer, scores: Pointer
) -> int:
    raise NotImplementedError


# dspine_status dspine_draft_tensor(dspine_pair * pair, const char * name, int32_t layer,
#                                   float * out, int64_t count);
@_native(c_int32, c_void_p, c_char_p, c_int32, float_p, c_int64)
def dspine_draft_tensor(
    pair: c_void_p | None, name: bytes, layer: int, out: Pointer, count: int
) -> int:
    raise NotImplementedError


# dspine_status dspine_generate(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt,
#                               int32_t n_predict, bool ignore_eog, int32_t * out, int32_t * n_out,
#                               dspine_stats * stats, dspine_round_fn on_round, void * user);
@_native(
    c_int32,
    c_void_p,
    int32_p,
    c_int32,
    c_int32,
    c_bool,
    int32_p,
    int32_p,
    POINTER(RawStats),
    RoundFn,
    c_void_p,
)
def dspine_generate(
    pair: c_void_p | None,
    prompt: Pointer,
    n_prompt: int,
    n_predict: int,
    ignore_eog: bool,
    out: Pointer,
    n_out: Pointer,
    stats: Pointer,
    on_round: Pointer,
    user: None,
) -> int:
    raise NotImplementedError


# dspine_status dspine_sampling_default(const dspine_pair * pair, dspine_sampling * sampling);
@_native(c_int32, c_void_p, POINTER(Sampling))
def dspine_sampling_default(pair: c_void_p | None, sampling: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_begin(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt,
#                            int32_t n_predict, uint32_t flags, const dspine_sampling * sampling);
@_native(c_int32, c_void_p, int32_p, c_int32, c_int32, c_uint32, POINTER(Sampling))
def dspine_begin(
    pair: c_void_p | None,
    prompt: Pointer,
    n_prompt: int,
    n_predict: int,
    flags: int,
    sampling: Pointer,
) -> int:
    raise NotImplementedError


# dspine_status dspine_step(dspine_pair * pair, int32_t n_draft, dspine_round * round);
@_native(c_int32, c_void_p, c_int32, POINTER(RawRound))
def dspine_step(pair: c_void_p | None, n_draft: int, round_p: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_get_stats(const dspine_pair * pair, dspine_stats * stats);
@_native(c_int32, c_void_p, POINTER(RawStats))
def dspine_get_stats(pair: c_void_p | None, stats: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_end(dspine_pair * pair);
@_native(c_int32, c_void_p)
def dspine_end(pair: c_void_p | None) -> int:
    raise NotImplementedError


# dspine_status dspine_tokenize(const dspine_pair * pair, const char * text, int32_t n_text,
#                               bool add_special, bool parse_special, int32_t * out,
#                               int32_t capacity, int32_t * n_out);
@_native(c_int32, c_void_p, c_char_p, c_int32, c_bool, c_bool, int32_p, c_int32, int32_p)
def dspine_tokenize(
    pair: c_void_p | None,
    text: bytes,
    n_text: int,
    add_special: bool,
    parse_special: bool,
    out: Pointer,
    capacity: int,
    n_out: Pointer,
) -> int:
    raise NotImplementedError


# dspine_status dspine_token_to_piece(const dspine_pair * pair, int32_t token, bool special,
#                                     char * out, int32_t capacity, int32_t * n_out);
@_native(c_int32, c_void_p, c_int32, c_bool, c_char_p, c_int32, int32_p)
def dspine_token_to_piece(
    pair: c_void_p | None, token: int, special: bool, out: Pointer, capacity: int, n_out: Pointer
) -> int:
    raise NotImplementedError


# dspine_status dspine_detokenize(const dspine_pair * pair, const int32_t * tokens, int32_t n,
#                                 bool special, char * out, int32_t capacity, int32_t * n_out);
@_native(c_int32, c_void_p, int32_p, c_int32, c_bool, c_char_p, c_int32, int32_p)
def dspine_detokenize(
    pair: c_void_p | None,
    tokens: Pointer,
    n: int,
    special: bool,
    out: Pointer,
    capacity: int,
    n_out: Pointer,
) -> int:
    raise NotImplementedError


# dspine_status dspine_token_is_eog(const dspine_pair * pair, int32_t token, bool * out);
@_native(c_int32, c_void_p, c_int32, POINTER(c_bool))
def dspine_token_is_eog(pair: c_void_p | None, token: int, out: Pointer) -> int:
    raise NotImplementedError


# dspine_status dspine_apply_template(dspine_pair * pair, const char * messages,
#                                     int32_t n_messages, bool add_generation_prompt,
#                                     int32_t thinking, char * out, int32_t capacity,
#                                     int32_t * n_out);
@_native(c_int32, c_void_p, c_char_p, c_int32, c_bool, c_int32, c_char_p, c_int32, int32_p)
def dspine_apply_template(
    pair: c_void_p | None,
    messages: bytes,
    n_messages: int,
    add_generation_prompt: bool,
    thinking: int,
    out: Pointer,
    capacity: int,
    n_out: Pointer,
) -> int:
    raise NotImplementedError


# dspine_status dspine_model_meta(const dspine_pair * pair, bool of_drafter, const char * key,
#                                 char * out, int32_t capacity, int32_t * n_out);
@_native(c_int32, c_void_p, c_bool, c_char_p, c_char_p, c_int32, int32_p)
def dspine_model_meta(
    pair: c_void_p | None,
    of_drafter: bool,
    key: bytes,
    out: Pointer,
    capacity: int,
    n_out: Pointer,
) -> int:
    raise NotImplementedError


SIZES: dict[str, type[Structure]] = {
    "dspine_params": Params,
    "dspine_sampling": Sampling,
    "dspine_info": Info,
    "dspine_stats": RawStats,
    "dspine_round": RawRound,
    "dspine_device": Device,
}


def _library_name() -> str:
    if sys.platform == "win32":
        return "dspine.dll"
    return "libdspine.dylib" if sys.platform == "darwin" else "libdspine.so"


def library_candidates() -> list[Path]:
    """Where the library may lie, in order: DSPINE_LIB_DIR, then the installed package.

    An override that is set is the only candidate: falling back would run another build than
    the one asked for.
    """
    name = _library_name()
    if override := os.environ.get(LIB_DIR_ENV):
        return [Path(override) / name]
    return [Path(__file__).resolve().parent / "native" / "lib" / name]


def open_library() -> tuple[ctypes.CDLL, Path]:
    """The library as it lies on disk, not yet checked; LoadError lists every path tried."""
    tried: list[str] = []
    for path in library_candidates():
        if not path.is_file():
            tried.append(f"{path}: no such file")
            continue
        try:
            return ctypes.CDLL(str(path)), path
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise LoadError(
        f"the native library of dspine cannot be loaded; tried {'; '.join(tried)} "
        f"({LIB_DIR_ENV} names the directory of another build)"
    )


def _check_version(loaded: ctypes.CDLL, path: Path) -> None:
    # First: another version may lack functions, and its number says more than their names.
    try:
        version = loaded.dspine_abi_version()
    except AttributeError:
        raise AbiError(f"{path}: no library of dspine, it has no dspine_abi_version") from None
    if version != ABI_VERSION:
        raise AbiError(
            f"{path}: interface version {version}, this package expects {ABI_VERSION}; "
            "library and package come from different builds (install one wheel, or point "
            f"{LIB_DIR_ENV} to the build that belongs to this package)"
        )


def _check_sizes(loaded: ctypes.CDLL, path: Path) -> None:
    for name, structure in SIZES.items():
        found, expected = getattr(loaded, f"{name}_size")(), ctypes.sizeof(structure)
        if found != expected:
            raise AbiError(
                f"{path}: struct {name} has {found} bytes in the library and {expected} in this "
                f"package (interface version {ABI_VERSION} in both)"
            )


def bind(loaded: ctypes.CDLL, path: Path) -> None:
    """Check the interface and set the types of every declared function.

    Raises AbiError naming both versions, the function that is missing, or both sizes.
    """
    _check_version(loaded, path)
    for name, prototype in PROTOTYPES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise AbiError(f"{path}: the library has no function {name}") from None
        function.restype = prototype.restype
        function.argtypes = prototype.argtypes
    _check_sizes(loaded, path)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded and checked library; raises LoadError or AbiError."""
    loaded, path = open_library()
    bind(loaded, path)
    return loaded
