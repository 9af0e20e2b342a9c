"""The trained tiny pair under tests/golden as files that the benchmarks can run.

    python -m dspine_bench.golden_bench DIR

writes target.gguf, draft.gguf, prompts.jsonl (for `tasks`) and replay.jsonl (for `replay`). The
pair's vocabulary is one text per id, so that its prompts are ids in brackets. It shows that the
programs do what they should; no speed of it means anything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from dspine_convert.convert import Options, run
from dspine_convert.plan import OutputType

from dspine_bench.errors import BenchError
from dspine_bench.golden_target import text_of, write_qwen3_target


@dataclass(frozen=True)
class GoldenPair:
    """Paths of the files."""

    target: Path
    draft: Path
    prompts: Path
    replay: Path


def _talk(recorded: dict[str, Any], turns: int) -> list[dict[str, str]]:
    """A conversation whose later turns are pieces of the recorded continuation."""
    ids: list[int] = recorded["plain_greedy"]
    messages = [{"role": "user", "content": text_of(recorded["prompt"])}]
    for turn in range(turns):
        piece = ids[12 * turn : 12 * turn + 12]
        messages.append({"role": "assistant", "content": text_of(piece[:9])})
        messages.append({"role": "user", "content": text_of(piece[9:])})
    return messages if turns == 0 else messages[:-1]


def _lines(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def write_pair(golden: Path, folder: Path) -> GoldenPair:
    """Write the files; BenchError where the golden models are not at `golden`."""
    case = golden / "e2e_qwen3"
    if not (case / "rounds.json").is_file():
        raise BenchError(f"{case}: the golden pair is not here; run inside the repository")
    folder.mkdir(parents=True, exist_ok=True)
    recorded = json.loads((case / "rounds.json").read_text(encoding="utf-8"))["prompts"]
    target = write_qwen3_target(case / "target", folder / "target.gguf")
    options = Options(
        source=str(case / "draft"),
        target=str(target),
        types=(OutputType.F32,),
        directory=folder,
        force=True,
        quiet=True,
    )
    draft = folder / "draft.gguf"
    shutil.move(run(options).paths[0], draft)
    prompts = [
        {"id": f"golden-{i}", "category": "golden", "messages": _talk(one, 0)}
        for i, one in enumerate(recorded)
    ]
    talks = [{"id": f"golden-{i}", "messages": _talk(one, 2)} for i, one in enumerate(recorded)]
    return GoldenPair(
        target,
        draft,
        _lines(folder / "prompts.jsonl", prompts),
        _lines(folder / "replay.jsonl", talks),
    )


def main(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    golden: Annotated[Path, typer.Option(help="the golden cases")] = Path("tests/golden"),
) -> None:
    """Write the golden pair for the benchmarks."""
    pair = write_pair(golden, folder)
    typer.echo(f"{pair.target} {pair.draft}")


if __name__ == "__main__":
    typer.run(main)
