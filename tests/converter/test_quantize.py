"""Number formats against plain references that share nothing with the code under test."""

from __future__ import annotations

import numpy as np
import pytest
from dspine_convert.quantize import Quantizer, encode, largest_magnitude, to_bf16, to_f32
from gguf import GGMLQuantizationType as T
from gguf.quants import quantize


def nearest_even(bits: int) -> int:
    """BF16 of finite float32 bits, by the definition of round to nearest, ties to even."""
    low, high = bits & 0xFFFF, bits >> 16
    if low > 0x8000 or (low == 0x8000 and high & 1):
        high += 1
    return high


def test_bf16_rounding():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 0x7F7F_0000, 4000, dtype=np.uint32)
    ties = (rng.integers(0, 0x7F7F, 500, dtype=np.uint32) << 16) | np.uint32(0x8000)
    bits = np.concatenate([bits, ties, ties - 1, ties + 1, [0, 1, 0x7F7F_0000]]).astype(np.uint32)
    bits = np.concatenate([bits, bits | np.uint32(0x8000_0000)])
    expected = [nearest_even(int(b)) for b in bits]
    np.testing.assert_array_equal(to_bf16(bits.view(np.float32)), expected)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_bad_value_is_seen(dtype):
    word = np.uint32 if dtype == "F32" else np.uint16
    exponent, sign = {
        "BF16": (0x7F80, 0x8000),
        "F16": (0x7C00, 0x8000),
        "F32": (0x7F80_0000, 0x8000_0000),
    }[dtype]
    for bad in (
        exponent,
        exponent + 1,
        exponent | sign,
        sign | (exponent + 1),
        sign * 2 - 1,
        sign - 1,
    ):
        for at in (0, 7, 62):
            words = np.arange(63, dtype=word)
            words[::2] |= word(sign)
            assert largest_magnitude(words, dtype) is not None
            words[at] = bad
            assert largest_magnitude(words, dtype) is None


@pytest.mark.parametrize("values", [[0.0], [-0.0], [-3.0, 2.0], [3.0, -2.0], [-1e-3, -2e-3]])
def test_largest_magnitude(values):
    words = np.array(values, np.float32).view(np.uint32)
    assert largest_magnitude(words, "F32") == np.abs(np.array(values, np.float32)).max()


def test_widening_is_exact():
    every = np.arange(1 << 16, dtype=np.uint16)
    finite16 = every[(every & 0x7C00) != 0x7C00]
    expected = finite16.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(to_f32(finite16, "F16"), expected)
    finite = every[(every & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(to_bf16(to_f32(finite, "BF16")), finite)


def rows_of(seed: int, rows: int = 24, width: int = 512) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def test_q8_0_is_the_format(native_library):
    """gguf-py's own Q8_0 gives the same bytes."""
    rows = rows_of(2)
    rows[3] = 0.0
    found = Quantizer(native_library).chunk(T.Q8_0, rows)
    np.testing.assert_array_equal(found, quantize(rows, T.Q8_0).reshape(-1))


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_K, T.Q6_K, T.Q5_0])
def test_rows_are_independent(native_library, kind):
    """Any cut into rows gives the bytes of the whole."""
    quantizer, rows = Quantizer(native_library), rows_of(3)
    whole = quantizer.chunk(kind, rows).tobytes()
    parts = b"".join(quantizer.chunk(kind, rows[i : i + 5]).tobytes() for i in range(0, 24, 5))
    assert whole == parts


def test_pass_through_is_not_a_copy():
    words = np.arange(64, dtype=np.uint16)
    view = encode(words, "BF16", 64, T.BF16, None)
    words[5] = 999
    assert bytes(view) == words.tobytes()


def hard_values(kind: str) -> np.ndarray:
    """Rows [24, 1280] that take a 4-bit search through its branches."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((24, 1280)).astype(np.float32)
    return {
        "weights": x * np.float32(0.014),
        "heavy tails": x**3,
        "one loud sub-block": x * np.where(np.arange(1280) // 32 % 3, np.float32(1e-6), 1),
        "few levels": np.trunc(2 * x),
        "negative": -np.abs(x),
        "far from zero": np.abs(x) + 50,
        "flat": np.where(np.arange(1280) // 64 % 2, np.float32(0), x * np.float32(1e-4)),
        "constant": np.full_like(x, -0.25),
        "zeros of both signs": np.copysign(np.float32(0), x),
        "many magnitudes": x * np.exp(8 * rng.standard_normal(x.shape)).astype(np.float32),
        "denormal": x * np.float32(1e-41),
    }[kind].astype(np.float32)


HARD = (
    "weights",
    "heavy tails",
    "one loud sub-block",
    "few levels",
    "negative",
    "far from zero",
    "flat",
    "constant",
    "zeros of both signs",
    "many magnitudes",
    "denormal",
)


@pytest.mark.parametrize("kind", HARD)
def test_the_fast_q4_k_makes_the_bytes_of_ggml(native_library, kind):
    fast, plain = Quantizer(native_library), Quantizer(native_library)
    if fast._fast_q4_k is None:
        pytest.skip(f"{native_library} is another build of llama.cpp: it has no fast Q4_K")
    plain._fast_q4_k = None
    rows = np.ascontiguousarray(hard_values(kind))
    np.testing.assert_array_equal(fast.chunk(T.Q4_K, rows), plain.chunk(T.Q4_K, rows))
