"""The commands. cli imports this once signals are handled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dspine_convert.errors import ExitCode
from dspine_convert.usage import exit_code

from dspine_bench import options as o
from dspine_bench.convert import app as convert_app
from dspine_bench.request import Flags

if TYPE_CHECKING:
    from dspine_bench.schema import Report

HELP = {"help_option_names": ["-h", "--help"]}
OUT = Path("bench-out")

app = typer.Typer(
    name="dspine-bench",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP,
)


@app.callback()
def dspine_bench(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on failure.")] = False,
) -> None:
    """Measure a target with and without its drafter, in one run and in turn."""


def _end(made: Iterable[Report], folder: Path, *, json: bool) -> None:
    """Write everything as it comes, show it, and end with 1 where a text differs."""
    import json as json_format

    from dspine_convert.streams import say

    from dspine_bench.request import deliver, same_text
    from dspine_bench.terminal import console, show

    reports, paths = deliver(made, folder)
    if json:
        documents: list[Any] = [report.model_dump(mode="json") for report in reports]
        one = documents[0] if len(documents) == 1 else documents
        typer.echo(json_format.dumps(one, indent=1, ensure_ascii=False))
    else:
        for report in reports:
            show(report, console())
    for path in paths:
        say(str(path))
    if not all(same_text(report) for report in reports):
        say("dspine-bench: texts differ from plain decoding; their speed is not reported")
        raise typer.Exit(ExitCode.FAILED)


@app.command("tasks", context_settings=HELP)
@o.workload()
def tasks(
    flags: Flags,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompts (JSONL).")
    ] = None,
    thinking: Annotated[
        str,
        typer.Option(metavar="auto|on|off|both", help="auto: both where the template has it."),
    ] = "auto",
    json: o.JsonOpt = False,
) -> None:
    """Chat, code, math, JSON, tools, summary, translation, prose: speed by task."""
    if thinking not in ("auto", "on", "off", "both"):
        raise typer.BadParameter(
            f"{thinking!r} is not auto, on, off or both", param_hint="--thinking"
        )
    from dspine_bench.request import run_tasks

    _end([run_tasks(flags, prompts, thinking)], flags.output, json=json)


@app.command("depth", context_settings=HELP)
@o.workload()
def depth(
    flags: Flags,
    depths: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens of context. Default: 0,8192,32768.")
    ] = "",
    json: o.JsonOpt = False,
) -> None:
    """A long text and its continuation: speed by the length of the context."""
    from dspine_bench.request import run_depth

    _end([run_depth(flags, _numbers(depths))], flags.output, json=json)


def _numbers(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected 0,8192", param_hint="--depths") from None
    if any(number < 0 for number in found):
        raise typer.BadParameter(f"{text!r}: expected 0 or more", param_hint="--depths")
    return tuple(dict.fromkeys(found))


@app.command("replay", context_settings=HELP)
@o.workload("temperature", "interleave")
def replay(
    flags: Flags,
    conversations: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own recordings (JSONL).")
    ] = None,
    parallel: o.ParallelOpt = 8,
    json: o.JsonOpt = False,
) -> None:
    """Recorded conversations of agents, several at a time: all tokens over the wall time."""
    from dspine_bench.request import run_replay

    _end([run_replay(flags, conversations, parallel)], flags.output, json=json)


@app.command("draft", context_settings=HELP)
def draft(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="small|mid|medium|27b", help="May be repeated. Default: small, mid."),
    ] = None,
    kind: Annotated[
        str, typer.Option("--type", metavar="f32|bf16|q8_0|q4_k", help="Of the weights.")
    ] = "q8_0",
    repeats: o.RepeatsOpt = 5,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="Of each kind, in each repeat. Default: 5, with --quick 3."),
    ] = None,
    context: Annotated[int, typer.Option(min=16, help="Tokens before the block.")] = 256,
    threads: o.ThreadsOpt = 0,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For the models; the 27b shape: 25 GB.")
    ] = None,
    output: o.OutputOpt = OUT,
    quick: o.QuickOpt = False,
    quiet: o.QuietOpt = False,
    json: o.JsonOpt = False,
) -> None:
    """One round by part, on random weights: DSpine, DFlash, DFlash2, DSpark."""
    from dspine_bench.draft_report import make

    o.check_folder(output)
    made = make(
        tuple(shape or ()),
        kind,
        repeats=repeats,
        calls=calls,
        context=context,
        threads=threads,
        folder=folder,
        quick=quick,
        quiet=quiet,
    )
    _end([made], output, json=json)


@app.command("all", context_settings=HELP)
def everything(
    target: o.TargetOpt = None,
    drafter: o.DrafterOpt = None,
    kv: o.CacheOpt = None,
    repeats: o.RepeatsOpt = 5,
    parallel: o.ParallelOpt = 8,
    output: o.OutputOpt = OUT,
    quick: o.QuickOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """All workloads; without a target on the demonstration's pair (inside the repository)."""
    from dspine_bench.record import run_all

    o.check_folder(output)
    reports = run_all(
        target,
        tuple(drafter or ()),
        tuple(kv or ()),
        output,
        repeats=repeats,
        parallel=parallel,
        quick=quick,
        quiet=quiet,
    )
    _end(reports, output, json=False)


ThresholdOpt = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, metavar="SHARE", help="Largest difference that passes: 0.1 is 10 %."
    ),
]


@app.command("record", context_settings=HELP)
def record(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="[PART]...", help="Default: all, see --plan.")
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Measure a second time, into DIR/again, and compare."),
    ] = False,
    threshold: ThresholdOpt = 0.1,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be measured and how long it takes.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure too what is there already.")
    ] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR")] = Path("bench/results"),
    repeats: o.RepeatsOpt = 5,
    quick: o.QuickOpt = False,
    quiet: o.QuietOpt = False,
) -> None:
    """Measure the demonstration's pair into the files that the README's figures come from.

    Part by part: what this commit has measured already is left out, so that a run may be ended
    and taken up again.
    """
    from dspine_convert.streams import say

    from dspine_bench import record as of
    from dspine_bench.provenance import commit
    from dspine_bench.request import same_text
    from dspine_bench.terminal import console, show, show_plan

    chosen = of.chosen(parts or ())
    steps = of.plan(chosen, output, repeats=repeats, quick=quick, again=again, force=force)
    out = console()
    show_plan(steps, repeats, out, quick=quick)
    if plan:
        return
    o.check_folder(output)
    if commit(Path.cwd())[1]:
        say("dspine-bench: the checkout has changes: the results say so, and count for no commit")
    failed = False
    begin = time.monotonic()
    for step, report in of.record(steps, repeats=repeats, quick=quick, quiet=quiet):
        show(report, out)
        failed |= not same_text(report)
        say(f"{step.path}: {time.monotonic() - begin:.0f} s")
        begin = time.monotonic()
    for name, first, second in of.pairs(chosen, output) if again else ():
        failed |= _differ(name, first, second, threshold)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _differ(name: str, first: Report, second: Report, threshold: float) -> bool:
    """Show two runs of the same thing; whether a ratio is past the threshold."""
    from dspine_bench import compare as of
    from dspine_bench.terminal import console, show_differences

    found = of.compare(first, second, ratios=True)
    notes = of.conditions(first, second)
    heads = (name, "first", "again")
    lost = of.lost(first, second, either_way=True)
    return show_differences(heads, found, notes, threshold, console(), either_way=True, lost=lost)


@app.command("compare", context_settings=HELP)
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json")],
    second: Annotated[Path, typer.Argument(metavar="B.json")],
    threshold: ThresholdOpt = 0.1,
    either_way: Annotated[
        bool, typer.Option("--either-way", help="A gain past the threshold fails too.")
    ] = False,
    ratios: Annotated[
        bool,
        typer.Option("--ratios", help="Only ratios, which do not follow the machine's speed."),
    ] = False,
) -> None:
    """Compare two results; ends with 1 where the second is worse by more than the threshold."""
    from dspine_bench import compare as of
    from dspine_bench.terminal import console, show_differences

    names, (one, two) = _load_all([first, second])
    two = of.aligned(one, two)
    of.refuse(one, two, names)
    found, notes = of.compare(one, two, ratios=ratios), of.conditions(one, two, names)
    lost = of.lost(one, two, either_way=either_way)
    failed = show_differences(
        ("", names[0], names[1]),
        found,
        notes,
        threshold,
        console(),
        either_way=either_way,
        lost=lost,
    )
    if failed:
        raise typer.Exit(ExitCode.FAILED)


ResultsArg = Annotated[
    list[Path] | None, typer.Argument(metavar="[RESULT.json]...", help="Default: bench-out/*.json")
]


def _load_all(paths: list[Path] | None) -> tuple[list[str], list[Report]]:
    """Results, and names of their files that tell them apart."""
    from dspine_bench.errors import BenchError
    from dspine_bench.schema import load

    found = paths or sorted(OUT.glob("*.json"))
    if not found:
        raise BenchError(f"{OUT}: no results there; name some")
    short = [path.name for path in found]
    names = short if len(set(short)) == len(short) else [str(path) for path in found]
    return names, [load(path) for path in found]


@app.command("table", context_settings=HELP)
def table(results: ResultsArg = None) -> None:
    """Figures that others published, beside those measured here; never mixed."""
    from dspine_bench import published
    from dspine_bench.terminal import console

    names, reports = _load_all(results) if results or list(OUT.glob("*.json")) else ([], [])
    out = console()
    out.print(published.table(reports))
    for line in published.conditions(reports, names):
        out.print(f"measured here: {line}", markup=False)


@app.command("report", context_settings=HELP)
def report(
    results: ResultsArg = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="-: standard output.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the figures there as PNG.")
    ] = None,
) -> None:
    """Make the page, and PNG files, from results."""
    from dspine_bench import page, plots

    names, reports = _load_all(results)
    if str(output) == "-":
        typer.echo(page.render(reports, names), nl=False)
    else:
        typer.echo(page.write(reports, output, names))
    if png:
        for path in plots.save_png(plots.plots(reports, names), png):
            typer.echo(path, err=str(output) == "-")


app.add_typer(convert_app, name="convert")


def execute(arguments: Sequence[str]) -> int:
    """Parse and run one command line; returns its exit code, or raises what ended it early."""
    done = typer.main.get_command(app).main(
        list(arguments) or ["--help"], prog_name="dspine-bench", standalone_mode=False
    )
    return exit_code(done)
