"""`dspine inspect`."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dspine._headers import Header

MIB = 1 << 20
SHOWN = 8  # elements of a short array
TEXT = 100  # characters of a text


def inspect(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="GGUF file, or OWNER/REPO[:FILE or :QUANT] on the hub."
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a GGUF file holds: kind, metadata, tensors by type, fingerprint.

    Reads the header only, also of a file on the hub.
    """
    from dspine._headers import open_header

    header = open_header(file)
    document = describe(header)
    if json:
        typer.echo(json_format.dumps(document, indent=2, ensure_ascii=False))
        return
    typer.echo(_as_text(document))
    if tensors:
        typer.echo("\ntensors")
        for t in header.tensors:
            typer.echo(f"  {t.name:<40} {t.type:<8} {t.nbytes:>14}  {list(t.shape)}")


def describe(header: Header) -> dict[str, Any]:
    """Everything for --json; sizes in bytes, shapes in ggml order."""
    from dspine.cli import SCHEMA_VERSION

    types: dict[str, dict[str, int]] = {}
    for tensor in header.tensors:
        row = types.setdefault(tensor.type, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += tensor.nbytes
    return {
        "schema_version": SCHEMA_VERSION,
        "file": header.spec,
        "kind": header.kind,
        "architecture": header.architecture,
        "file_bytes": header.file_bytes,
        "tensor_types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "metadata": {key: _plain(header, key) for key in header.values},
        "dspine": _dspine_facts(header),
        "fingerprint": _fingerprint(header),
        "tensors": [
            {"name": t.name, "type": t.type, "shape": list(t.shape), "bytes": t.nbytes}
            for t in header.tensors
        ],
    }


def _plain(header: Header, key: str) -> Any:
    """A metadata value; of an array longer than `SHOWN` elements only its size."""
    from dspine_convert.errors import ConvertError
    from dspine_convert.gguf_format import ValueType

    value = header.values[key]
    try:
        if value.type is not ValueType.ARRAY:
            return value.scalar()
        if value.count <= SHOWN and value.element is ValueType.STRING:
            return [text.decode("utf-8", "replace") for text in value.strings()]
        if value.count <= SHOWN:
            return value.numbers()
    except ConvertError as error:
        return f"({error})"
    element = value.element.name.lower() if value.element is not None else "unknown"
    return f"({value.count} values of {element})"


def _dspine_facts(header: Header) -> dict[str, Any] | None:
    """Block size, taps and window of a drafter; None for any other file."""
    from dspine._shapes import draft_shape

    if header.kind != "drafter":
        return None
    shape = draft_shape(header)
    return {
        "block_size": shape.block_size,
        "drafts_at_most": shape.block_size - 1,
        "top_k": shape.top_k,
        "transfer_rank": shape.rank,
        "message_size": shape.message,
        "table": "folded" if shape.folded else "codes",
        "layers": len(shape.layers),
        "reads_layer_inputs": list(shape.taps),
        "window": shape.window or None,
        "sliding_layers": [i for i, layer in enumerate(shape.layers) if layer.swa],
    }


def _fingerprint(header: Header) -> dict[str, Any] | None:
    """Of a target its own; of a drafter that of the target it was converted for."""
    from dspine_convert.errors import ConvertError
    from dspine_convert.target import from_header

    prefix = "dspine.target."
    stored = {k.removeprefix(prefix): _plain(header, k) for k in header.values if prefix in k}
    if stored or header.kind not in ("target", "vocabulary"):
        return stored or None
    try:
        facts = from_header(header.source, header.spec)
    except ConvertError:  # a model without a vocabulary is no target of a drafter
        return None
    return {
        "architecture": facts.architecture,
        "name": facts.name,
        "embedding_length": facts.embedding_length,
        "block_count": facts.block_count,
        "vocab_size": facts.vocab_size,
        "tokens_fnv1a64": facts.tokens_fnv1a64,
    }


def _as_text(document: dict[str, Any]) -> str:
    size = f"{document['file_bytes'] / MIB:.1f} MiB" if document["file_bytes"] else "size unknown"
    lines = [
        f"{document['file']}: {document['kind']}, architecture {document['architecture']}, {size}"
    ]
    lines += ["", "tensors by type"]
    for name, row in document["tensor_types"].items():
        lines.append(f"  {name:<8} {row['tensors']:>5}  {row['bytes'] / MIB:>10.1f} MiB")
    for title, part in (("DSpine", "dspine"), ("fingerprint of the target", "fingerprint")):
        if document[part]:
            lines += ["", title]
            lines += [f"  {key:<20} {_short(value)}" for key, value in document[part].items()]
    lines += ["", "metadata"]
    lines += [f"  {key:<44} {_short(value)}" for key, value in document["metadata"].items()]
    return "\n".join(lines)


def _short(value: Any) -> str:
    """A value on one line, whatever a file holds."""
    text = value if isinstance(value, str) else json_format.dumps(value, ensure_ascii=False)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"
