"""Reads finished files back and compares every tensor with the checkpoint."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dspine_convert.checkpoint import read_at
from dspine_convert.errors import ConvertError
from dspine_convert.gguf_format import tensor_bytes
from dspine_convert.plan import Plan, PlannedFile
from dspine_convert.progress import Meter
from dspine_convert.quantize import F32Array, Words, to_f32
from dspine_convert.stream import (
    Chunk,
    Matrix,
    Output,
    fold_chunk,
    fold_matrix,
    on_all_cores,
    read_chunk,
    split_rows,
)
from dspine_convert.target import read_local_header

T = GGMLQuantizationType
# Above these, relative to the norm of a block of rows, a type's own rounding is not the cause:
# float types by half a unit in the last place, quantised ones about four times what Gaussian
# rows show.
LIMITS = {
    T.F32: 0.0,
    T.F16: 2.0**-9,
    T.BF16: 2.0**-8,
    T.Q8_0: 0.03,
    T.Q6_K: 0.08,
    T.Q5_0: 0.15,
    T.Q4_K: 0.3,
}


@dataclass
class Worst:
    """The worst relative error of one tensor type in one file, and where it is."""

    error: float
    tensor: str


@dataclass(frozen=True)
class FileReport:
    """Worst errors of a file by tensor type."""

    path: Path
    worst: dict[str, Worst]


def relative_error(expected: F32Array, found: F32Array) -> float:
    """Norm of the difference over the norm of the source, over one block of rows."""
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    error = float(np.linalg.norm(expected.astype(np.float64) - found))
    if scale == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / scale


def _read_back(chunk: Chunk, out: Output, path: Path) -> F32Array:
    row = tensor_bytes(out.type, (chunk.width,))
    data = read_at(out.fd, row * chunk.count, out.offset + row * chunk.first, path)
    raw = np.frombuffer(data, dtype=np.uint8).reshape(chunk.count, row)
    if out.type is T.F32:
        return raw.view(np.float32).reshape(-1)
    if out.type is T.F16:
        return raw.view(np.float16).astype(np.float32).reshape(-1)
    values: F32Array = dequantize(raw, out.type).reshape(-1)
    return values


def _expected(chunk: Chunk, words: Words, matrix: Matrix | None) -> tuple[F32Array, float]:
    """What a chunk should hold, and the largest error that its type's rounding explains."""
    limit = LIMITS[chunk.outputs[0].type]
    if matrix is None or not chunk.mapped.matrices:
        return to_f32(words, chunk.mapped.source.dtype), limit
    # sums may round differently when they are made again
    return fold_chunk(chunk, words, matrix).reshape(-1), max(limit, 2.0**-23)


def _check_header(planned: PlannedFile, path: Path) -> int:
    """The stored header says what was planned; returns where the data starts."""
    header = read_local_header(path, with_tensors=True)
    if header.values != planned.values:
        raise ConvertError(f"{path}: verification failed: metadata differ from the plan")
    if header.tensors != tuple(t.info for t in planned.tensors):
        raise ConvertError(f"{path}: verification failed: tensor list differs from the plan")
    return header.data_start


def verify_file(
    planned: PlannedFile, path: Path, fd: int, meter: Meter, threads: int
) -> FileReport:
    """Compare one file with its source; raises ConvertError when an error exceeds its limit."""
    start = _check_header(planned, path)
    matrix = fold_matrix(planned.tensors)
    worst: dict[str, Worst] = {}
    lock = threading.Lock()

    def compare(chunk: Chunk) -> None:
        out = chunk.outputs[0]
        words = read_chunk(chunk)
        expected, limit = _expected(chunk, words, matrix)
        error = relative_error(expected, _read_back(chunk, out, path))
        if not error <= limit:
            raise ConvertError(
                f"{path}: verification failed: {chunk.mapped.gguf} ({out.type.name}) differs by "
                f"{error:.3g} from row {chunk.first}, at most {limit:.3g} expected"
            )
        with lock:
            held = worst.setdefault(out.type.name, Worst(0.0, chunk.mapped.gguf))
            if error > held.error:
                held.error, held.tensor = error, chunk.mapped.gguf
        meter.advance(words.nbytes)

    chunks = [
        chunk
        for t in planned.tensors
        for chunk in split_rows(t.mapped, (Output(fd, t.info.type, start + t.info.offset),))
    ]
    on_all_cores(chunks, compare, threads, threading.Event())
    return FileReport(path, worst)


def verify_bytes(plan: Plan) -> int:
    """Source bytes that a verification reads."""
    return sum(t.mapped.source.nbytes for f in plan.files for t in f.tensors)
