"""The folded table: a row per token with what two matrices of the drafter make of its code.

A predecessor v enters the gate only as W_m sqrt(R) C[v] and W_p sqrt(R) C[v], which depend on the
token alone. The table holds both, one after the other, in place of the codes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from dspine_convert.errors import ConvertError
from dspine_convert.names import CODES, Mapped, Resolution
from dspine_convert.quantize import LARGEST, LARGEST_OTHERWISE, F32Array, Words, to_bf16, to_f32

FOLDED = "transfer_folded"
MATRICES = ("injection.message.weight", "injection.predecessor_gate.weight")  # in this order


def fold(resolution: Resolution) -> Resolution:
    """Plan the folded table [V, 2M] where the codes [V, R] stand."""
    by_name = {m.canonical: m for m in resolution.mapped}
    codes = by_name[CODES]
    folded = replace(
        codes,
        canonical=FOLDED,
        gguf=f"{FOLDED}.weight",
        shape=(codes.shape[0], 2 * resolution.message),
        matrices=tuple(by_name[name] for name in MATRICES),
    )
    return replace(
        resolution,
        mapped=tuple(folded if m is codes else m for m in resolution.mapped),
        notes=(*resolution.notes, *_size_note(resolution)),
    )


def _size_note(resolution: Resolution) -> tuple[str, ...]:
    """Nothing where 2M = R, as in the published drafters."""
    width, rank = 2 * resolution.message, resolution.rank
    if width == rank:
        return ()
    return (
        f"--fold: a folded row has 2 x {resolution.message} (message size) = {width} values, "
        f"a code {rank} (transfer rank): the table is {width / rank:.2f} times as large",
    )


def stacked(message: F32Array, gate: F32Array) -> npt.NDArray[np.float64]:
    """[R, 2M]: what a row of codes is multiplied by, from W_m and W_p [M, R]."""
    matrix = np.concatenate([message, gate]).astype(np.float64).T
    return np.ascontiguousarray(matrix * np.sqrt(matrix.shape[0]))


def folded_rows(codes: F32Array, matrix: npt.NDArray[np.float64]) -> F32Array:
    """Rows [n, 2M] of the table from codes [n, R]; summed in float64, infinite past float32."""
    with np.errstate(over="ignore"):
        return (codes.astype(np.float64) @ matrix).astype(np.float32)


def as_source(rows: F32Array, kind: GGMLQuantizationType) -> tuple[Words, str]:
    """The rows as words of the type that `kind` is encoded from, and that type.

    A quantized table is made of the BF16 one, as llama-quantize would make it.
    """
    if kind is GGMLQuantizationType.F32:
        return rows.view(np.uint32).reshape(-1), "F32"
    return to_bf16(rows).reshape(-1), "BF16"


def check_range(mapped: Mapped, rows: F32Array, kinds: set[GGMLQuantizationType]) -> None:
    """Refuse values that a stored type cannot hold."""
    largest = float(np.abs(rows).max())
    for kind in kinds:
        if not largest <= LARGEST.get(kind, LARGEST_OTHERWISE):
            raise ConvertError(
                f"--fold: {mapped.gguf} would hold {largest:g}, too large for {kind.name}; "
                "convert without --fold"
            )


def widened(words: Words, dtype: str, width: int) -> F32Array:
    """Raw words of whole rows as float32 [n, width]."""
    return to_f32(words, dtype).reshape(-1, width)
