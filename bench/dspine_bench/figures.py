"""Puts the figures of bench/results into the README; `--check` fails when they differ.

Nothing in the README's table is typed by hand: it stands between two markers and is made from
the committed JSON files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
CACHE_NAMES = {"f32": "F32", "q8_0": "q8_0, -fa on"}


def _load(folder: Path, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return loaded


def golden_table(results: list[dict[str, Any]]) -> list[str]:
    """Rows by drafter type: mean accepted length with each kind of cache."""
    caches = list(dict.fromkeys(r["cache"] for r in results))
    heads = [f"caches {CACHE_NAMES[c]}" for c in caches]
    lines = [f"| drafter | {' | '.join(heads)} |", "|---|" + "---|" * len(caches)]
    for kind in dict.fromkeys(r["type"] for r in results):
        row = {r["cache"]: r for r in results if r["type"] == kind}
        cells = [
            f"{row[c]['mean_accepted_length']:.2f}" + ("" if row[c]["lossless"] else " (differs)")
            for c in caches
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def conversion_lines(result: dict[str, Any]) -> list[str]:
    """Sizes, ratio and memory of the 27B conversion."""
    sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["sizes"].items())
    return [
        f"Converting a checkpoint of the true 27B drafter shape: {sizes} in one pass, at "
        f"{result['ratio']:.2f} times the time of a gguf-py script plus `llama-quantize` twice, "
        f"with {result['peak_rss'] / 2**20:.0f} MiB of memory "
        f"({result['machine']['cores']} cores).",
    ]


def render(folder: Path) -> str:
    """The text between the markers."""
    golden = _load(folder, "golden_pair.json")["results"]
    equal = all(r["lossless"] for r in golden)
    lines = [
        "A trained tiny Qwen3 pair (block 8, greedy, CPU, the library's own loop): tokens a round, "
        "plain decoding being 1.00. The PyTorch reference recorded 5.45 with whole blocks; a "
        "server cuts its last draft to what may still be emitted."
        + (" All token ids equal those without the drafter." if equal else ""),
        "",
        *golden_table(golden),
        "",
        *conversion_lines(_load(folder, "convert.json")),
    ]
    return "\n".join(lines)


def main(
    check: Annotated[bool, typer.Option("--check", help="compare, write nothing")] = False,
    readme: Annotated[Path, typer.Option()] = Path("README.md"),
    results: Annotated[Path, typer.Option()] = Path("bench/results"),
) -> None:
    """Write the figures into the README, or check that they are there."""
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    made = f"{head}{BEGIN}\n{render(results)}\n{END}{tail}"
    if check and made != text:
        typer.echo(f"{readme} differs from {results}: python -m dspine_bench.figures", err=True)
        raise typer.Exit(1)
    if not check:
        readme.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
