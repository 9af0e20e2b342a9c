"""One pass over the checkpoint: row chunks are read, checked and encoded on all cores.

Each worker reads a chunk, encodes it for every file that wants it and writes the results at
places known beforehand, so the bytes do not depend on the number of workers or their order.
Memory is bounded by workers x one chunk, whatever the size of a tensor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from dspine_convert.checkpoint import ITEM_SIZE, SourceTensor
from dspine_convert.errors import ConvertError, short
from dspine_convert.fold import FOLDED, as_source, check_range, folded_rows, stacked, widened
from dspine_convert.gguf_format import tensor_bytes
from dspine_convert.names import CODES, Mapped
from dspine_convert.plan import Plan, PlannedTensor
from dspine_convert.progress import Meter
from dspine_convert.quantize import (
    LARGEST,
    LARGEST_OTHERWISE,
    NUMPY_WORD,
    F32Array,
    Quantizer,
    Words,
    as_bytes,
    encode,
    largest_magnitude,
)

CHUNK_ELEMENTS = 1 << 19
CODE_TOLERANCE = 0.02  # of a row's length; rounding to BF16 changes it by 0.4 % at most
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Output:
    """A place for one tensor in one open file: `offset` is absolute."""

    fd: int
    type: GGMLQuantizationType
    offset: int


@dataclass(frozen=True)
class Chunk:
    """Whole rows of one tensor, [first, first + count), and where each copy of it goes."""

    mapped: Mapped
    first: int
    count: int
    outputs: tuple[Output, ...]

    @property
    def width(self) -> int:
        """Values of a row as it is stored."""
        return self.mapped.shape[-1]

    @property
    def source_width(self) -> int:
        """Values of a row as it is read."""
        return self.mapped.source.shape[-1]


@dataclass
class Run:
    """What the workers share: the meter, the stop flag, the largest code, the first bad one.

    `matrix` is what rows are folded with, [R, 2M], where a tensor of the plan asks for it.
    """

    quantizer: Quantizer | None
    meter: Meter
    matrix: Matrix | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    largest_code: float = 0.0
    bad_code: tuple[int, float] | None = None  # row and norm
    lock: threading.Lock = field(default_factory=threading.Lock)


def split_rows(mapped: Mapped, outputs: tuple[Output, ...]) -> Iterator[Chunk]:
    """Cut a tensor into chunks of whole rows; a vector is one row."""
    rows = _rows(mapped)
    step = max(1, CHUNK_ELEMENTS // max(mapped.shape[-1], mapped.source.shape[-1]))
    for first in range(0, rows, step):
        yield Chunk(mapped, first, min(step, rows - first), outputs)


def _rows(mapped: Mapped) -> int:
    return mapped.shape[0] if len(mapped.shape) == 2 else 1


def read_chunk(chunk: Chunk) -> Words:
    """Read the rows of a chunk, as raw words of the source."""
    width = chunk.source_width
    return read_words(chunk.mapped.source, chunk.first * width, chunk.count * width)


def read_words(source: SourceTensor, first: int, count: int) -> Words:
    """Read `count` elements of a tensor from element `first`, as raw words."""
    item = ITEM_SIZE[source.dtype]
    words = np.empty(count, dtype=NUMPY_WORD[source.dtype])
    view = as_bytes(words)
    offset, done = source.offset + first * item, 0
    while done < len(view):
        got = os.preadv(source.fd, [view[done:]], offset + done)
        if got == 0:
            raise ConvertError(f"{source.path}: truncated while reading {short(source.name)!r}")
        done += got
    return words


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _not_finite(chunk: Chunk, words: Words) -> ConvertError:
    source = chunk.mapped.source
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}[source.dtype]
    at = int(np.flatnonzero((words & exponent) == exponent)[0])
    row, column = divmod(at, chunk.source_width)
    place = [chunk.first + row, column] if len(chunk.mapped.shape) == 2 else [column]
    mantissa = int(words[at]) & (exponent & -exponent) - 1
    found = "NaN" if mantissa else "Inf"
    return ConvertError(
        f"{source.path.name}: tensor {short(source.name)!r} holds {found} at {place}; "
        "the checkpoint is damaged"
    )


def finite_words(chunk: Chunk) -> tuple[Words, float]:
    """Read a chunk, refuse values that are not finite, return words and largest magnitude."""
    words = read_chunk(chunk)
    largest = largest_magnitude(words, chunk.mapped.source.dtype)
    if largest is None:
        raise _not_finite(chunk, words)
    return words, largest


def checked_words(chunk: Chunk, run: Run) -> Words:
    """Read a chunk and refuse values that are not finite or that a stored type cannot hold."""
    source = chunk.mapped.source
    words, largest = finite_words(chunk)
    for out in chunk.outputs:
        if largest > LARGEST.get(out.type, LARGEST_OTHERWISE):
            raise ConvertError(
                f"{source.path.name}: tensor {short(source.name)!r} holds {largest:g}, "
                f"too large for {out.type.name}"
            )
    if chunk.mapped.canonical in (CODES, FOLDED):
        _note_codes(chunk, words, largest, run)
    return words


def _note_codes(chunk: Chunk, words: Words, largest: float, run: Run) -> None:
    """Remember the first row whose length is not one: the drafter takes codes as they are."""
    rows = widened(words, chunk.mapped.source.dtype, chunk.source_width)
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    bad = np.flatnonzero(np.abs(norms - 1.0) > CODE_TOLERANCE)
    with run.lock:
        run.largest_code = max(run.largest_code, largest)
        if bad.size:
            first = (chunk.first + int(bad[0]), float(norms[bad[0]]))
            run.bad_code = min(run.bad_code or first, first)


def fold_matrix(tensors: Iterable[PlannedTensor]) -> Matrix | None:
    """What the rows of the folded table are made with; None where nothing is folded."""
    for planned in tensors:
        if not planned.mapped.matrices:
            continue
        wholes = [Chunk(m, 0, _rows(m), ()) for m in planned.mapped.matrices]
        message, gate = (
            widened(finite_words(c)[0], c.mapped.source.dtype, c.source_width) for c in wholes
        )
        return stacked(message, gate)
    return None


def fold_chunk(chunk: Chunk, words: Words, matrix: Matrix) -> F32Array:
    """The rows [count, 2M] of the table that the codes of a chunk fold to."""
    codes = widened(words, chunk.mapped.source.dtype, chunk.source_width)
    return folded_rows(codes, matrix)


def _encoder(chunk: Chunk, words: Words, run: Run) -> Callable[[GGMLQuantizationType], memoryview]:
    """What gives the stored bytes of a chunk for a type."""
    if run.matrix is None or not chunk.mapped.matrices:
        dtype = chunk.mapped.source.dtype
        return lambda kind: encode(words, dtype, chunk.width, kind, run.quantizer)
    rows = fold_chunk(chunk, words, run.matrix)
    check_range(chunk.mapped, rows, {out.type for out in chunk.outputs})

    def encode_folded(kind: GGMLQuantizationType) -> memoryview:
        return encode(*as_source(rows, kind), chunk.width, kind, run.quantizer)

    return encode_folded


def convert_chunk(chunk: Chunk, run: Run) -> None:
    """Read, encode once per distinct type, write every copy."""
    if run.stop.is_set():
        return
    words = checked_words(chunk, run)
    encoder = _encoder(chunk, words, run)
    encoded: dict[GGMLQuantizationType, memoryview] = {}
    for out in chunk.outputs:
        if out.type not in encoded:
            encoded[out.type] = encoder(out.type)
        row_bytes = tensor_bytes(out.type, (chunk.width,))
        write_all(out.fd, encoded[out.type], out.offset + chunk.first * row_bytes)
    run.meter.advance(words.nbytes)


def planned_chunks(plan: Plan, fds: tuple[int, ...]) -> list[Chunk]:
    """All chunks of a plan, in file order; `fds` belong to plan.files one to one."""
    chunks: list[Chunk] = []
    for index, planned in enumerate(plan.files[0].tensors):
        outputs = tuple(
            Output(fd, info.type, len(file.header) + info.offset)
            for fd, file in zip(fds, plan.files, strict=True)
            for info in (file.tensors[index].info,)
        )
        chunks.extend(split_rows(planned.mapped, outputs))
    return chunks


def on_all_cores(
    chunks: list[Chunk], work: Callable[[Chunk], None], threads: int, stop: threading.Event
) -> None:
    """Run `work` over all chunks; the first error or interrupt stops the rest and is raised."""
    # One worker more than cores, so that a core is not idle while a worker waits for the disk.
    with ThreadPoolExecutor(max_workers=threads + 1, thread_name_prefix="convert") as pool:
        try:
            futures: list[Future[None]] = [pool.submit(work, chunk) for chunk in chunks]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [f for f in futures if f in done and f.exception() is not None]
            if failed:
                failed[0].result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def source_bytes(plan: Plan) -> int:
    """Bytes that one pass reads."""
    return sum(t.mapped.source.nbytes for t in plan.files[0].tensors)


def stream(plan: Plan, fds: tuple[int, ...], run: Run, threads: int) -> None:
    """Convert everything into the open files; raises ConvertError for unusable values."""
    chunks = planned_chunks(plan, fds)
    run.matrix = fold_matrix(plan.files[0].tensors)
    on_all_cores(chunks, lambda chunk: convert_chunk(chunk, run), threads, run.stop)
    if run.largest_code == 0.0:
        raise ConvertError(
            "transfer_codes are all zero: this checkpoint is untrained\ntake a finished checkpoint"
        )
    if run.bad_code is not None:
        row, norm = run.bad_code
        raise ConvertError(
            f"transfer_codes: row {row} has length {norm:.4g}, expected 1 as in every row of a "
            "finished checkpoint"
        )
