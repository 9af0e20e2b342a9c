"""Puts the figures of bench/results into the README; `--check` fails when they differ.

Nothing in the README's table is typed by hand: it stands between two markers and is made from
the committed JSON files. Files of the demonstration's pair that are not there are left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from dspine._terms import mean_accepted_length

from dspine_bench.compare import ACCEPTED, compare
from dspine_bench.draft import medians
from dspine_bench.errors import BenchError
from dspine_bench.peers import BLOCK
from dspine_bench.schema import AGAIN, DraftSample, load

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
FAMILY_NAMES = {"dspine": "DSpine", "dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}
CACHE_NAMES = {"f32": "F32", "q8_0": "q8_0, -fa on"}
Result = dict[str, Any]


def _load(folder: Path, name: str) -> Result:
    loaded: Result = json.loads((folder / name).read_text(encoding="utf-8"))
    return loaded


def _checked(folder: Path, name: str) -> Result:
    """A result of `dspine-bench`; BenchError where it is none."""
    load(folder / name)
    return _load(folder, name)


def _optional(folder: Path, name: str) -> Result | None:
    return _checked(folder, name) if (folder / name).is_file() else None


def _golden(folder: Path) -> list[Result]:
    """The golden pair's results; BenchError where a mean is not that of its totals."""
    found: list[Result] = _load(folder, "golden_pair.json")["results"]
    for one in found:
        mean = round(mean_accepted_length(one["accepted"], one["rounds"]), 3)
        if one["mean_accepted_length"] != mean:
            raise BenchError(
                f"{folder / 'golden_pair.json'}: {one['type']}, {one['cache']}: "
                f"mean_accepted_length is {one['mean_accepted_length']}, its totals give {mean}"
            )
    return found


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


def conversion_lines(result: Result, first: Result | None) -> list[str]:
    """Sizes, ratio and memory of the 27B conversion; `first` as of `_otherwise`."""
    sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in result["sizes"].items())
    ratio, peak = result["summary"]["ratio"], result["summary"]["peak_rss"]
    return [
        f"Converting a checkpoint of the true 27B drafter shape: {sizes} in one pass, at "
        f"{_spread(ratio, result)} times the time of a gguf-py script plus `llama-quantize` twice, "
        f"with {peak / 2**20:.0f} MiB of memory "
        f"({result['hardware']['cores']} cores, {_repeats(result)}).{_otherwise(result, first)}",
    ]


def machine_text(result: Result) -> str:
    """Device, or CPU and cores, of a result of `dspine-bench`."""
    hardware = result["hardware"]
    gpus = [d["description"] for d in hardware["devices"] if d["backend"] != "CPU"]
    return ", ".join(gpus) or f"{hardware['cpu']}, {hardware['cores']} cores"


def commit_text(result: Result) -> str:
    """Our commit of a result, and whether the checkout had changes."""
    commit = (result["provenance"]["commit"] or "unknown")[:9]
    return commit + (" with changes" if result["provenance"]["dirty"] else "")


def _otherwise(result: Result, first: Result | None) -> str:
    """ " (machine; commit)", each where it is not that of the first result."""
    if first is None:
        return ""
    said = ((machine_text, "{}"), (commit_text, "commit {}"))
    other = [form.format(text(result)) for text, form in said if text(result) != text(first)]
    return f" ({'; '.join(other)})" if other else ""


def _spread(ratio: Result, result: Result) -> str:
    many = result["config"]["repeats"] > 1
    ends = f" ({ratio['min']:.2f}-{ratio['max']:.2f})" if many else ""
    return f"{ratio['median']:.2f}{ends}"


def _ratio(row: Result, result: Result, name: str = "ratio") -> str:
    left_out = len(row["differing"]) + len(row["unstable"])
    if row[name] is None:
        return "not reported: other text" if row["differing"] else "not reported: unstable text"
    over = f" over {row['prompts'] - left_out} of {row['prompts']} prompts" if left_out else ""
    return f"{_spread(row[name], result)}{over}"


def _length(row: Result) -> str:
    length = row["mean_accepted_length"]
    return "not reported" if length is None else f"{length:.2f}"


def _same(row: Result) -> str:
    if row["differing"]:
        return f"{len(row['differing'])} differ"
    return f"{len(row['unstable'])} unstable" if row["unstable"] else "yes"


def _repeats(result: Result) -> str:
    number = result["config"]["repeats"]
    quick = ", --quick" if result["config"].get("quick") else ""
    return f"{number} repeat{'' if number == 1 else 's'}{quick}"


def _drafting(result: Result) -> list[Result]:
    plain = {mode["name"] for mode in result["modes"] if mode["name"] == mode["baseline"]}
    return [row for row in result["summary"] if row["mode"] not in plain]


def task_table(result: Result) -> list[str]:
    """The demonstration's pair by task."""
    models = ", ".join(f"{m['role']} {m['name']}" for m in result["models"])
    kinds = ", ".join(sorted({m["cache_type"] for m in result["modes"]}))
    lines = [
        f"Speed against plain decoding on a small real pair ({models}; KV {kinds}, greedy, "
        f"{result['config']['max_tokens']} tokens, {_repeats(result)}; "
        f"{machine_text(result)}; commit {commit_text(result)}). It is made to check the "
        "programs on a CPU; verification of many rows costs a CPU more than a GPU.",
        "",
        "| task | prompts | tokens a round | speed, plain = 1.00 (min-max) | same text |",
        "|---|---|---|---|---|",
    ]
    for row in _drafting(result):
        prompts = str(row["prompts"])
        cells = [row["category"], prompts, _length(row), _ratio(row, result), _same(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _drafts(result: Result) -> str:
    """ ", N drafts a round" where all modes have a depth that was asked for."""
    depths = {mode["n_draft"] for mode in result["modes"] if mode["drafter"]}
    return f", {depths.pop()} drafts a round" if len(depths) == 1 and None not in depths else ""


def _of_all_tasks(result: Result) -> list[Result]:
    """Of every drafting mode the row of all tasks, which comes last."""
    return list({row["mode"]: row for row in _drafting(result)}.values())


def _of_lengths(result: Result) -> list[Result]:
    """The rows of `depth`, one for each length of the context."""
    return [row for row in _drafting(result) if row["category"] != "all"]


class Varied(NamedTuple):
    """Results in which one thing varies: their file, what varies, and its value in a row."""

    file: str
    what: str
    value: Callable[[Result, Result], str]  # of the mode and the row
    rows: Callable[[Result], list[Result]] = _of_all_tasks
    note: str = ""


VARIED = (
    Varied("sweep.json", "draft depth", lambda mode, _: str(mode["n_draft"])),
    # NAME-TYPE.gguf; the largest tensors of a small Q4_K_M file are of another type
    Varied(
        "types.json",
        "drafter's type",
        lambda mode, _: Path(mode["drafter"]).stem.rpartition("-")[2],
    ),
    Varied("kv.json", "type of the caches", lambda mode, _: str(mode["cache_type"])),
    Varied(
        "temperature.json",
        "temperature",
        lambda mode, _: f"{mode['temperature']:g}",
        note="Above temperature 0 the texts differ, and their lengths.",
    ),
    Varied(
        "depth.json",
        "context before the answer",
        lambda _, row: str(row["category"]),
        _of_lengths,
        note="Each context has one answer, so that its text counts as well as the context.",
    ),
)


def varied_rows(varied: Varied, result: Result, first: Result | None) -> list[str]:
    """Rows of the table of what varies; `first` as of `_otherwise`."""
    modes = {mode["name"]: mode for mode in result["modes"]}
    what = varied.what + _otherwise(result, first)
    lines = []
    for row in varied.rows(result):
        mode = modes[row["mode"]]
        cells = [
            what,
            varied.value(mode, row),
            "own" if mode["n_draft"] is None else str(mode["n_draft"]),
            f"{row['prompts']} x {result['config']['max_tokens']}",
            _length(row),
            _ratio(row, result),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        what = ""
    return lines


def varied_table(folder: Path, first: Result | None) -> list[str]:
    """What varies, in one table of the results that are there."""
    rows, notes = [], []
    for varied in VARIED:
        result = _optional(folder, varied.file)
        if result is not None:
            rows += varied_rows(varied, result, first)
            notes += [varied.note] if varied.note else []
    if not rows:
        return []
    return [
        "",
        "| what varies | | drafts a round | prompts x tokens at most | tokens a round "
        "| speed, plain = 1.00 (min-max) |",
        "|---|---|---|---|---|---|",
        *rows,
        *(["", " ".join(notes)] if notes else []),
    ]


def replay_line(result: Result) -> str:
    """The agent replay, in one sentence."""
    row = _drafting(result)[0]
    requests = result["replays"][0]["requests"]
    at_once = result["config"]["parallel"]
    return (
        f"Agent conversations, {at_once} at a time, {requests} requests of up to "
        f"{result['config']['max_tokens']} tokens{_drafts(result)}: all tokens over the wall time "
        f"{_ratio(row, result)}; time of single requests {_ratio(row, result, 'request_ratio')}; "
        f"{_length(row)} tokens a round."
    )


def engine_line(result: Result) -> str:
    """The library's loop against the server's, in one sentence."""
    found = result["summary"]
    same = "the same ids" if found["same_ids"] else "other ids"
    return (
        f"A round in the Python engine takes {_spread(found['ratio'], result)} times that of "
        f"llama-server ({found['engine_ms']:.1f} ms; {same})."
    )


def draft_table(result: Result, first: Result | None) -> list[str]:
    """The graphs of all families, which are alike, and apart from them whole drafts."""
    times = medians([DraftSample(**sample) for sample in result["samples"]])
    rows = {(r["family"], r["shape"], r["part"]): r["ms"]["median"] for r in result["summary"]}

    def graph_ms(family: str, shape: str) -> str:
        return f"{statistics.median(times[f'{family}, {shape}', 'graph', BLOCK].values()):.2f}"

    def whole_ms(family: str, shape: str) -> str:
        # what the result calls DFlash2's draft is its graph
        return "-" if family == "dflash2" else f"{rows[family, shape, 'draft']:.2f}"

    lines = [
        "",
        f"One draft of 16 rows on equal random backbones, milliseconds{_otherwise(result, first)}:",
        "",
        f"| | {' | '.join(FAMILY_NAMES.values())} |",
        "|---|" + "---|" * len(FAMILY_NAMES),
    ]
    for shape in result["shapes"]:
        for what, ms in (("the graph", graph_ms), ("with the choice of tokens", whole_ms)):
            cells = [f"{shape}, {what}", *(ms(family, shape) for family in FAMILY_NAMES)]
            lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "The choice of tokens is the library's whole call for DSpine, logits and sampler for "
        "DFlash and DSpark, and was not timed for DFlash2. Both are timed apart, so that a "
        "difference below a millisecond is noise.",
    ]


LINES = (("replay.json", replay_line), ("engine.json", engine_line))


def agreement_lines(folder: Path) -> list[str]:
    """How far the ratios of second runs are from those of the first."""
    ratios: list[float] = []
    lengths: list[float] = []
    names = []
    for path in sorted((folder / AGAIN).glob("*.json")):
        if (folder / path.name).is_file():
            names.append(path.stem)
            for one in compare(load(folder / path.name), load(path), ratios=True):
                if one.change is not None:
                    of_length = one.what.endswith(ACCEPTED)
                    (lengths if of_length else ratios).append(abs(one.change))
    if not ratios:
        return []
    same = sum(change == 0 for change in lengths)
    equal = f"; {same} of {len(lengths)} mean accepted lengths are equal" if lengths else ""
    return [
        f"- Measured twice ({', '.join(names)}): {len(ratios)} ratios of times, the largest change "
        f"is {100 * max(ratios):.1f} %{equal}."
    ]


def bench_lines(folder: Path, tasks: Result | None) -> list[str]:
    """What `dspine-bench record` has left in the folder; `tasks` is its first result."""
    lines: list[str] = []
    if tasks is not None:
        lines += ["", *task_table(tasks)]
    lines += varied_table(folder, tasks)
    draft = _optional(folder, "draft.json")
    if draft is not None:
        lines += draft_table(draft, tasks)
    sentences = []
    for name, make in LINES:
        result = _optional(folder, name)
        if result is not None:
            sentences.append(f"- {make(result)}{_otherwise(result, tasks)}")
    sentences += agreement_lines(folder)
    return lines + (["", *sentences] if sentences else [])


def render(folder: Path) -> str:
    """The text between the markers."""
    golden, tasks = _golden(folder), _optional(folder, "tasks.json")
    equal = all(r["lossless"] for r in golden)
    lines = [
        "A trained tiny Qwen3 pair (block 8, greedy, CPU, the library's own loop): tokens a round, "
        "plain decoding being 1.00. The PyTorch reference recorded 5.45 with whole blocks; a "
        "server cuts its last draft to what may still be emitted."
        + (" All token ids equal those without the drafter." if equal else ""),
        "",
        *golden_table(golden),
        *bench_lines(folder, tasks),
        "",
        *conversion_lines(_checked(folder, "convert.json"), tasks),
    ]
    return "\n".join(lines)


def put(made_here: str, readme: Path, *, check: bool) -> None:
    """The text between the markers of a file; BenchError where it differs and is only checked."""
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    made = f"{head}{BEGIN}\n{made_here}\n{END}{tail}"
    if check and made != text:
        raise BenchError(f"{readme} differs from its results")
    if not check:
        readme.write_text(made, encoding="utf-8")


def main(
    check: Annotated[bool, typer.Option("--check", help="compare, write nothing")] = False,
    readme: Annotated[Path, typer.Option()] = Path("README.md"),
    results: Annotated[Path, typer.Option()] = Path("bench/results"),
) -> None:
    """Write the figures into the README, or check that they are there."""
    try:
        put(render(results), readme, check=check)
    except BenchError as error:
        typer.echo(f"{error}: python -m dspine_bench.figures", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
