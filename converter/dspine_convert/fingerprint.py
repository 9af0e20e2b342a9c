"""A hash of the target's token list, so that a wrong partner is refused by name.

FNV-1a (64 bit) over, for every token id in order whose type is not UNUSED: the id as four
little-endian bytes, the token's bytes, one zero byte. The native loader computes the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

UNUSED_TOKEN = 5
_OFFSET = 0xCBF29CE484222325
_PRIME = 0x100000001B3


def token_bytes(tokens: Sequence[bytes], types: Sequence[int] | None) -> bytes:
    """The byte stream that is hashed; an empty token takes the name llama.cpp gives it."""
    pack = struct.Struct("<I").pack
    parts: list[bytes] = []
    for index, token in enumerate(tokens):
        if types is not None and types[index] == UNUSED_TOKEN:
            continue
        parts.append(pack(index) + (token or b"[EMPTY_%d]" % index) + b"\0")
    return b"".join(parts)


def fnv1a64(data: bytes) -> int:
    """FNV-1a of `data`, without a Python loop over its bytes.

    A step is h ← (h xor b)·p. The xor touches the low 8 bits only, and those depend on nothing
    above them. p is odd, so bit k of h·p is bit k of h plus a carry from lower bits: the low
    byte before every step follows bit by bit from running xors. Then h xor b = h + d with d
    known, and the recurrence is a sum of d times powers of p, modulo 2^64.
    """
    n = len(data)
    if n == 0:
        return _OFFSET
    b = np.frombuffer(data, dtype=np.uint8)
    low = np.zeros(n, dtype=np.uint8)
    for k in range(8):
        known = (low ^ b) & np.uint8((1 << k) - 1)
        flips = ((b ^ (known * np.uint8(_PRIME & 0xFF))) >> np.uint8(k)) & np.uint8(1)
        bits = np.empty(n, dtype=np.uint8)
        bits[0] = (_OFFSET >> k) & 1
        np.bitwise_xor.accumulate(flips[:-1], out=bits[1:])
        bits[1:] ^= bits[0]
        low |= bits << np.uint8(k)
    delta = ((low ^ b).astype(np.int64) - low.astype(np.int64)).view(np.uint64)
    powers = np.multiply.accumulate(np.full(n, _PRIME, dtype=np.uint64))
    head = (_OFFSET * int(powers[-1])) & 0xFFFF_FFFF_FFFF_FFFF
    tail = int(np.sum(delta * powers[::-1], dtype=np.uint64))
    return (head + tail) & 0xFFFF_FFFF_FFFF_FFFF


def tokens_fnv1a64(tokens: Sequence[bytes], types: Sequence[int] | None) -> str:
    """The fingerprint as 16 lowercase hexadecimal digits."""
    return f"{fnv1a64(token_bytes(tokens, types)):016x}"
