"""Which weights llama.cpp keeps a second time on a CPU, in the layout that its kernels want.

The copies are in buffers of their own ("AMX", "CPU_REPACK") beside the mapped file. Which there
are depends on the CPU: src/ggml-cpu/amx/amx.cpp is asked first, then src/ggml-cpu/repack.cpp.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dspine._headers import Tensor

CPUINFO = Path("/proc/cpuinfo")
FEATURES = frozenset({"amx_int8", "avx2", "avx512f", "asimddp", "i8mm"})
AMX_TILE = 32  # columns of two tiles
# Types with AMX kernels: what a row's width must be a multiple of, and bytes added to a block.
AMX = {
    "q4_0": (32, 0),
    "q4_1": (32, 0),
    "q8_0": (32, 4),
    "q4_k": (256, 4),
    "q5_k": (256, 4),
    "q6_k": (256, 0),
    "iq4_xs": (256, 2),
    "f16": (16, 0),
}
# Types that are repacked, by feature: what the number of rows must be a multiple of.
REPACK = {
    "avx2": {"q4_0": 8, "q4_k": 8, "iq4_nl": 8, "mxfp4": 8},
    "avx512f": {"q2_k": 8},
    "i8mm": {"q4_0": 4, "q4_k": 8, "q5_k": 8, "q6_k": 8, "q8_0": 4},
    "asimddp": {"q4_0": 4, "q4_k": 8, "q5_k": 8, "q6_k": 8, "q8_0": 4, "iq4_nl": 4, "mxfp4": 4},
}
# Tensors of two dimensions that no matrix is multiplied by.
NO_MATRIX = re.compile(r"token_embd|_norm|conv1d|transfer_|position_embd|token_types")


def cpu_features() -> frozenset[str]:
    """The features of this machine's CPU that decide about copies; empty where unknown."""
    try:
        text = CPUINFO.read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return FEATURES & frozenset(match[1].split()) if match else frozenset()


def packed_bytes(tensor: Tensor, features: frozenset[str]) -> int:
    """Bytes of the copy of a weight; 0 where it is used from the mapped file."""
    if len(tensor.shape) < 2 or NO_MATRIX.search(tensor.name):
        return 0
    width, rows = tensor.shape[:2]
    is_experts = len(tensor.shape) == 3
    kind = tensor.type
    if "amx_int8" in features and kind in AMX and not is_experts and rows % AMX_TILE == 0:
        multiple, added = AMX[kind]
        if width % multiple == 0:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
            return prod(tensor.shape) // block * (size + added)
    if any(kind in REPACK[f] and rows % REPACK[f][kind] == 0 for f in features & REPACK.keys()):
        return tensor.nbytes
    return 0
