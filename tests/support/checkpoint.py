"""Reads safetensors into numpy arrays, BF16 included, with nothing but the standard library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file; BF16 is widened to float32, which is exact."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors: dict[str, np.ndarray] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "BF16":
            words = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
            array = words.view(np.float32)
        else:
            array = np.frombuffer(raw, _DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors
