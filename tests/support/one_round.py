"""One round of a drafter, as JSON: `python -m support.one_round TARGET DRAFT ROWS BLOCKS`.

A process of its own, because DSPINE_FUSED is read once. Prints the operations of the draft's graph
that launch a kernel, by name, how many results lie off a cache line, and what was drafted: ids,
scores and tokens of every block.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from dspine import Pair
from dspine import _library as native
from dspine_bench.rawllama import Context, Model, api

from support.compare import draft_together
from support.workshop import EXACT

NO_KERNEL = {"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
CONTEXT = 20  # rows of features before the block
LINE = 64  # bytes of a cache line


def operations(target: Path, draft: Path, rows: int) -> tuple[collections.Counter[str], int]:
    """Kernels of one draft's graph, counted while it runs, and how many results lie off a line."""
    lib = api()
    ggml = ctypes.CDLL(str(native.library_candidates()[0].with_name("libggml-base.so")))
    ggml.ggml_op_desc.restype = ctypes.c_char_p
    for function in (ggml.ggml_op_desc, ggml.ggml_get_data, ggml.ggml_nbytes):
        function.argtypes = [ctypes.c_void_p]
    ggml.ggml_get_data.restype = ggml.ggml_nbytes.restype = ctypes.c_size_t
    found: list[tuple[str, bool]] = []  # operation, whether its result lies off a line

    @lib.ggml_backend_sched_eval_callback
    def count(tensor: int, ask: bool, data: Any) -> bool:
        if ask:
            whole = ggml.ggml_nbytes(tensor) % LINE == 0
            off = whole and ggml.ggml_get_data(tensor) % LINE != 0
            found.append((ggml.ggml_op_desc(tensor).decode(), off))
        return False

    with (
        Context(Model(target), 256, 1) as owner,
        Context(Model(draft), 256, 1, owner, params={"cb_eval": count}) as drafter,
    ):
        drafter.tokens(rows, 0, logits=False)
        found.clear()
        drafter.tokens(rows, 0, logits=False)
    kernels = [(op, off) for op, off in found if op not in NO_KERNEL]
    return collections.Counter(op for op, _ in kernels), sum(off for _, off in kernels)


def draft_blocks(target: Path, draft: Path, rows: int, blocks: int) -> list[dict[str, Any]]:
    """Drafts of blocks after contexts of unequal length."""
    options = dataclasses.replace(EXACT, n_draft=rows - 1, n_seq=blocks)
    with Pair(target, draft, options) as pair:
        drafted, tables = draft_together(pair, [CONTEXT - seq for seq in range(blocks)])
    return [
        {"drafted": tokens, "ids": ids.tolist(), "scores": scores.tolist()}
        for tokens, (ids, scores) in zip(drafted, tables, strict=True)
    ]


def main() -> None:
    target, draft, rows, blocks = sys.argv[1:]
    paths = Path(target), Path(draft)
    counted, unaligned = operations(*paths, int(rows))
    result = {
        "operations": counted,
        "unaligned": unaligned,
        "blocks": draft_blocks(*paths, int(rows), int(blocks)),
    }
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
