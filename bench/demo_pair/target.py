"""The target's weights in PyTorch, dequantized from its GGUF: embeddings, head, first values."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor


def load_target(path: Path) -> dict[str, Tensor]:
    """Every tensor of the GGUF in float32, under its GGUF name."""
    tensors = {}
    for item in gguf.GGUFReader(path).tensors:
        tensors[item.name] = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
    return tensors


def split_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo the row order of llama's q and k in GGUF (interleaved rope pairs) to half-split."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
