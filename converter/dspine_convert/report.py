"""What goes to stdout: paths, the plan, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dspine_convert.errors import SCHEMA_VERSION
from dspine_convert.gguf_format import Scalar, Value, ValueType
from dspine_convert.names import Mapped
from dspine_convert.plan import Plan, PlannedFile
from dspine_convert.verify import FileReport

SHOWN_ITEMS = 16


def shown_value(value: Value) -> Scalar | list[int]:
    """A metadata value for people and JSON; long arrays by their length."""
    if value.type is not ValueType.ARRAY:
        return value.scalar()
    element = value.element.name.lower() if value.element is not None else "?"
    if value.count > SHOWN_ITEMS or element in ("string", "float32", "float64"):
        return f"[{value.count} x {element}]"
    return value.numbers()


def _tensor_json(file: PlannedFile) -> list[dict[str, Any]]:
    return [
        {
            "name": t.info.name,
            "source": t.mapped.source.name,
            "source_dtype": t.mapped.source.dtype,
            "folded_with": [m.source.name for m in t.mapped.matrices],
            "shape": list(t.info.shape),
            "type": t.info.type.name,
            "bytes": t.info.nbytes,
        }
        for t in file.tensors
    ]


def _file_json(file: PlannedFile, directory: Path, *, plan_only: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "path": str(directory / file.file_name),
        "type": file.type.value,
        "bytes": file.nbytes,
        "tensor_types": dict(Counter(t.info.type.name for t in file.tensors)),
    }
    if plan_only:
        out["metadata"] = {key: shown_value(value) for key, value in file.values.items()}
        out["tensors"] = _tensor_json(file)
    return out


def as_json(
    plan: Plan, directory: Path, *, plan_only: bool, reports: list[FileReport] | None = None
) -> str:
    """The whole result as one JSON object."""
    files = [_file_json(f, directory, plan_only=plan_only) for f in plan.files]
    for entry, report in zip(files, reports or [], strict=False):
        entry["verified"] = {
            kind: {"worst_relative_error": w.error, "tensor": w.tensor}
            for kind, w in sorted(report.worst.items())
        }
    document = {
        "schema_version": SCHEMA_VERSION,
        "dry_run": plan_only,
        "files": files,
        "dropped": [{"tensor": name, "reason": reason} for name, reason in plan.dropped],
        "notes": [*plan.notes, *(n for f in plan.files for n in f.notes)],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def size_text(nbytes: int) -> str:
    """Bytes in decimal units, as model hubs show them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def summary_line(file: PlannedFile) -> str:
    """One line per output file: name, size, tensors by type."""
    kinds = Counter(t.info.type.name for t in file.tensors)
    listed = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    return f"{file.file_name}: {size_text(file.nbytes)}, {len(file.tensors)} tensors ({listed})"


def _origin(mapped: Mapped) -> str:
    return ", ".join(m.source.name for m in (mapped, *mapped.matrices))


def as_text(plan: Plan) -> str:
    """The plan for a person: per file its metadata and its tensors."""
    lines: list[str] = []
    for file in plan.files:
        lines.append(summary_line(file))
        lines.extend(f"  {key} = {shown_value(value)}" for key, value in file.values.items())
        for t in file.tensors:
            shape = " x ".join(map(str, t.info.shape))
            lines.append(
                f"  {t.info.name}  [{shape}]  {t.mapped.source.dtype} → {t.info.type.name}  "
                f"{size_text(t.info.nbytes)}  from {_origin(t.mapped)}"
            )
    lines.extend(f"dropped {name}: {reason}" for name, reason in plan.dropped)
    return "\n".join(lines)


def verify_lines(reports: list[FileReport]) -> list[str]:
    """Worst relative errors, a line per file and tensor type."""
    return [
        f"{report.path.name}: {kind} worst relative error {worst.error:.2e} ({worst.tensor})"
        for report in reports
        for kind, worst in sorted(report.worst.items())
    ]
