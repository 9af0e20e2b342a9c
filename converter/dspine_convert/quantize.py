"""Number formats: exact float conversions in numpy, quantisation through libggml-base.

This is the only module that touches the native library. ctypes drops the interpreter lock
during a call, so row chunks quantise on all cores; each chunk's bytes depend on its rows alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dspine_convert.errors import ConvertError
from dspine_convert.target import package_dir

LIB_DIR_ENV = "DSPINE_LIB_DIR"
T = GGMLQuantizationType
PLAIN = (T.F32, T.F16, T.BF16)
F32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]  # raw float words, as stored
# Largest magnitude a type can take: block scales are F16, BF16 rounds up to infinity above this.
LARGEST = {T.F32: 3.5e38, T.BF16: 3.38e38}
LARGEST_OTHERWISE = 65_504.0

_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
_SIGN = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x8000_0000}
NUMPY_WORD: dict[str, Any] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
_SIGNED: dict[str, Any] = {"BF16": np.int16, "F16": np.int16, "F32": np.int32}


def largest_magnitude(words: npt.NDArray[Any], dtype: str) -> float | None:
    """Largest absolute value of raw float words, or None when any is NaN or infinite.

    Two maxima over the bit patterns do it without a temporary: floats of one sign order like
    integers, and NaN and infinity lie above every finite value.
    """
    sign, exponent = _SIGN[dtype], _EXPONENT[dtype]
    positive = max(int(words.view(_SIGNED[dtype]).max()), 0)
    unsigned = int(words.max())
    negative = unsigned - sign if unsigned >= sign else 0
    top = max(positive, negative)
    if top >= exponent:
        return None
    word = np.array([top], dtype=NUMPY_WORD[dtype])
    return float(to_f32(word, dtype)[0])


def to_f32(words: npt.NDArray[Any], dtype: str) -> F32Array:
    """Widen raw words to float32; exact for all three types, no copy for F32."""
    if dtype == "F32":
        return words.view(np.float32)
    if dtype == "F16":
        return words.view(np.float16).astype(np.float32)
    wide = words.astype(np.uint32)
    np.left_shift(wide, np.uint32(16), out=wide)
    return wide.view(np.float32)


def to_bf16(values: F32Array) -> npt.NDArray[np.uint16]:
    """Round finite float32 to BF16, to nearest and ties to even, bit for bit as ggml does."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: npt.NDArray[np.uint16] = ((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)).astype(
        np.uint16
    )
    return rounded


def library_names() -> tuple[str, ...]:
    """File names of ggml's base library on this system."""
    if sys.platform == "darwin":
        return ("libggml-base.dylib",)
    if sys.platform == "win32":
        return ("ggml-base.dll", "libggml-base.dll")
    return ("libggml-base.so",)


def library_paths() -> list[Path]:
    """Every place the native library is looked for, first match wins."""
    roots: list[Path] = []
    if value := os.environ.get(LIB_DIR_ENV):
        roots.append(Path(value))
    if package := package_dir("dspine"):
        roots.append(package / "native" / "lib")
    return [root / name for root in roots for name in library_names()]


class Quantizer:
    """ggml_quantize_chunk behind a check that library and format tables agree.

    Q4_K takes ggml 80 % of a conversion's time. Our build of the library has a function that makes
    the same bytes several times faster; a library without it works as well.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise ConvertError(f"{path}: cannot be used as ggml's library ({error})") from error
        for kind in (T.Q8_0, T.Q4_K, T.Q6_K, T.Q5_0):
            mine = GGML_QUANT_SIZES[kind]
            theirs = (self._lib.ggml_blck_size(int(kind)), self._lib.ggml_type_size(int(kind)))
            if mine != theirs:
                raise ConvertError(
                    f"{path}: {kind.name} has block and size {theirs}, expected {mine}"
                )
            self._lib.ggml_quantize_init(int(kind))

    def _declare(self) -> None:
        lib = self._lib
        # int64_t ggml_blck_size(enum ggml_type); size_t ggml_type_size(enum ggml_type)
        lib.ggml_blck_size.argtypes, lib.ggml_blck_size.restype = [ctypes.c_int], ctypes.c_int64
        lib.ggml_type_size.argtypes, lib.ggml_type_size.restype = [ctypes.c_int], ctypes.c_size_t
        # void ggml_quantize_init(enum ggml_type)
        lib.ggml_quantize_init.argtypes, lib.ggml_quantize_init.restype = [ctypes.c_int], None
        # size_t ggml_quantize_chunk(enum ggml_type, const float * src, void * dst,
        #     int64_t start, int64_t nrows, int64_t n_per_row, const float * imatrix)
        lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        # size_t dspine_quantize_q4_K(const float * src, void * dst, int64_t n_rows,
        #     int64_t n_per_row)
        self._fast_q4_k = getattr(lib, "dspine_quantize_q4_K", None)
        if self._fast_q4_k is not None:
            self._fast_q4_k.restype = ctypes.c_size_t
            self._fast_q4_k.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_int64,
                ctypes.c_int64,
            ]

    def chunk(self, kind: GGMLQuantizationType, rows: F32Array) -> ByteArray:
        """Quantise rows [n, width] (contiguous float32) to n rows of packed blocks."""
        n, width = rows.shape
        block, size = GGML_QUANT_SIZES[kind]
        out = np.empty(n * (width // block) * size, dtype=np.uint8)
        source, target = rows.ctypes.data, out.ctypes.data
        if kind is T.Q4_K and self._fast_q4_k is not None:
            done = self._fast_q4_k(source, target, n, width)
        else:
            done = self._lib.ggml_quantize_chunk(int(kind), source, target, 0, n, width, None)
        if done != out.nbytes:
            raise RuntimeError(
                f"quantising to {kind.name} wrote {done} bytes, expected {out.nbytes}"
            )
        return out


def load_quantizer() -> Quantizer:
    """Open the native library; the error lists every path tried."""
    paths = library_paths()
    asked = os.environ.get(LIB_DIR_ENV)
    for path in paths:
        if path.is_file():
            if asked and path.parent != Path(asked):  # another library than the one asked for
                raise ConvertError(
                    f"{LIB_DIR_ENV} is {asked}, which holds no {library_names()[0]}; "
                    f"set it right, or unset it to use {path}"
                )
            return Quantizer(path)
    listed = ", ".join(map(str, paths)) or "nowhere (package dspine is not installed)"
    raise ConvertError(
        f"quantising needs {library_names()[0]}; looked at: {listed}\n"
        f"install dspine, or set {LIB_DIR_ENV} to the directory of a llama.cpp build's libraries;"
        " types f32 and bf16 need none"
    )


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.data.cast("B")


def encode(
    words: npt.NDArray[Any],
    dtype: str,
    width: int,
    kind: GGMLQuantizationType,
    quantizer: Quantizer | None,
) -> memoryview:
    """Convert raw words of whole rows to the stored bytes of `kind`."""
    if kind.name == dtype:
        return as_bytes(words)
    values = to_f32(words, dtype)
    if kind is T.F32:
        return as_bytes(values)
    if kind is T.BF16:
        return as_bytes(to_bf16(values))
    if kind is T.F16:
        return as_bytes(values.astype(np.float16))
    if quantizer is None:
        raise RuntimeError(f"{kind.name} was planned without a native library")
    return as_bytes(quantizer.chunk(kind, values.reshape(-1, width)))
