"""Rewrites a GGUF with other metadata or tensors: files that a converter would never make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# Value type of GGUF, or (ARRAY, element type), with the value.
Typed = tuple[gguf.GGUFValueType | tuple[gguf.GGUFValueType, gguf.GGUFValueType], Any]
Change = Callable[[str, np.ndarray, gguf.GGMLQuantizationType], "Tensor | None"]
Tensor = tuple[np.ndarray, gguf.GGMLQuantizationType]


def rewrite(
    source: Path,
    path: Path,
    values: Mapping[str, Typed | None] | None = None,
    change: Change | None = None,
    added: Mapping[str, Tensor] | None = None,
) -> Path:
    """Copy a GGUF.

    Args:
        values: keys to set, or to leave out where the value is None.
        change: gets name, data and type of every tensor and returns what is stored instead, or
            None to leave the tensor out.
        added: tensors that the source does not have.
    """
    reader = gguf.GGUFReader(source)
    changed = dict(values or {})
    arch = reader.fields["general.architecture"].contents()
    wanted = changed.pop("general.architecture", None)
    writer = gguf.GGUFWriter(path, wanted[1] if wanted else arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in changed:
            continue
        kind = field.types[0] if len(field.types) == 1 else (field.types[0], field.types[-1])
        _add(writer, key, (kind, field.contents()))
    for key, typed in changed.items():
        if typed is not None:
            _add(writer, key, typed)
    for tensor in reader.tensors:
        kept: Tensor | None = (tensor.data, tensor.tensor_type)
        if change is not None:
            kept = change(tensor.name, tensor.data, tensor.tensor_type)
        if kept is not None:
            writer.add_tensor(tensor.name, kept[0], raw_dtype=kept[1])
    for name, (data, kind) in (added or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, typed: Typed) -> None:
    kind, value = typed
    if isinstance(kind, tuple):
        writer.add_key_value(key, value, kind[0], sub_type=kind[1])
    else:
        writer.add_key_value(key, value, kind)
