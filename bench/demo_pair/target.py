"""The target's weights in PyTorch, dequantized from its GGUF: embeddings, head, first values."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F
from gguf.quants import dequantize
from torch import Tensor

TYPE_ENV = "DSPINE_TRAIN_TYPE"


def load_target(path: Path) -> dict[str, Tensor]:
    """Every tensor of the GGUF in float32, under its GGUF name."""
    tensors = {}
    for item in gguf.GGUFReader(path).tensors:
        tensors[item.name] = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
    return tensors


@cache
def quicker_type() -> torch.dtype:
    """bfloat16 where this CPU multiplies it faster than float32, as those with AMX do.

    Measured, not looked up: without instructions for it, bf16 products take several times as long.
    The variable DSPINE_TRAIN_TYPE holds the answer where it was found already.
    """
    if given := os.environ.get(TYPE_ENV):
        found: torch.dtype = getattr(torch, given)
        return found
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.ones(256, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        F.linear(rows, weight)
        began = time.perf_counter()
        for _ in range(3):
            F.linear(rows, weight)
        seconds[dtype] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__)


def split_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo the row order of llama's q and k in GGUF (interleaved rope pairs) to half-split."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
