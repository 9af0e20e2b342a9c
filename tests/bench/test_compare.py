"""`dspine-bench compare`: figures, rows that are gone, and what differs beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from dspine_bench import published
from dspine_bench.cli import main
from dspine_bench.compare import aligned, compare, conditions, only_in, refuse
from dspine_bench.errors import BenchError
from dspine_bench.schema import (
    Device,
    Mode,
    ModelFile,
    Replay,
    Report,
    Sample,
    ServerReport,
    WorkloadFile,
    save,
)
from dspine_bench.summary import summarize
from support.bench import DRAFT, PLAIN, report_of

SERVER = ("llama-server", "-m", "t.gguf", "-fa", "on", "-ctk", "q8_0", "--temp", "-2")
DRAFT_3 = DRAFT.model_copy(update={"n_draft": 3})
TARGET = ModelFile(
    role="target", name="t.gguf", bytes=1, sha256="1" * 64, architecture="llama", type="q8_0"
)
DRAFTER = TARGET.model_copy(
    update={"role": "drafter", "name": "draft.gguf", "sha256": "2" * 64, "architecture": "dflash"}
)


def scaled(report: ServerReport, factor: float, modes: Sequence[str]) -> ServerReport:
    """The same with all times of these modes multiplied."""
    times = ("generated_ms", "wall_ms")
    return report_of(
        [
            s.model_copy(update={name: getattr(s, name) * factor for name in times})
            if s.mode in modes
            else s
            for s in report.samples
        ]
    )


def with_modes(report: ServerReport, **changed: object) -> ServerReport:
    """The same with fields of all its modes changed."""
    modes = tuple(mode.model_copy(update=changed) for mode in report.modes)
    return report_of(report.samples, modes)


def with_config(report: ServerReport, **changed: object) -> ServerReport:
    return report.model_copy(update={"config": report.config.model_copy(update=changed)})


def without(report: ServerReport, gone: Callable[[Sample], bool]) -> ServerReport:
    return report_of([s for s in report.samples if not gone(s)])


def with_samples(
    report: ServerReport,
    mode: str,
    prompt: str,
    repeats: Sequence[int] = range(5),
    **changed: object,
) -> ServerReport:
    """The same with fields of a mode's samples of a prompt changed."""
    return report_of(
        [
            s.model_copy(update=changed)
            if (s.mode, s.prompt) == (mode, prompt) and s.repeat in repeats
            else s
            for s in report.samples
        ]
    )


def as_replay(report: ServerReport) -> ServerReport:
    """Its requests, each with a first token after a tenth of its time, as a replay."""
    samples = [
        s.model_copy(update={"category": "replay", "first_token_ms": s.wall_ms / 10})
        for s in report.samples
    ]
    walls = {(s.mode, s.repeat): 0.0 for s in samples}
    for s in samples:
        walls[s.mode, s.repeat] += s.wall_ms
    replays = [
        Replay(mode=mode, repeat=repeat, requests=3, tokens=300, wall_ms=wall)
        for (mode, repeat), wall in walls.items()
    ]
    summary = summarize(report.modes, samples, replays)
    return report_of(samples, workload="replay", replays=replays, summary=summary)


def run(tmp_path: Path, first: Report, second: Report, *words: str) -> int:
    """The command on `a.json` and `b.json`."""
    save(first, tmp_path / "a.json")
    save(second, tmp_path / "b.json")
    return main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *words])


@pytest.mark.parametrize(
    ("factor", "words", "code"),
    [
        (1.0, [], 0),
        (1.05, [], 0),
        (1.2, [], 1),
        (1.2, ["--threshold", "0.3"], 0),
        (0.8, [], 0),
        (0.8, ["--either-way"], 1),
    ],
)
def test_a_slower_drafter(
    factor: float,
    words: list[str],
    code: int,
    report: ServerReport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, report, scaled(report, factor, ["draft"]), *words) == code
    shown = capsys.readouterr().out
    assert "draft, all: ratio" in shown and "plain, all: tokens/s" in shown
    assert ("none of 12 is past" in shown) == (code == 0)


def test_everything_slower(report: ServerReport, tmp_path: Path) -> None:
    """A build that halves all speeds leaves the ratios as they are."""
    slow = scaled(report, 2.0, ["plain", "draft"])
    assert run(tmp_path, report, slow) == 1
    assert run(tmp_path, report, slow, "--ratios") == 0
    changes = {d.what: d.change for d in compare(report, slow)}
    assert changes["plain, all: tokens/s"] == pytest.approx(-0.5)
    assert changes["draft, all: tokens/s"] == pytest.approx(-0.5)


def test_times_of_a_replay(report: ServerReport) -> None:
    first = as_replay(report)
    second = as_replay(scaled(report, 2.0, ["plain", "draft"]))
    found = {d.what: d for d in compare(first, second)}
    for mode in ("plain", "draft"):
        for name in ("latency, ms", "first token, ms"):
            one = found[f"{mode}, replay: {name}"]
            assert one.change == pytest.approx(1.0) and one.worse(0.1, either_way=False)
    assert not any("ms" in d.what for d in compare(first, second, ratios=True))


def test_other_machines_have_no_speeds(report: ServerReport) -> None:
    faster = report.hardware.model_copy(update={"cpu": "Another processor"})
    second = scaled(report, 2.0, ["plain", "draft"]).model_copy(update={"hardware": faster})
    found = compare(report, second)
    assert found and all(d.change == pytest.approx(0.0) for d in found)
    lines = conditions(report, second, ("a.json", "b.json"))
    machine = "machine: A processor, 2 cores in a.json, Another processor, 2 cores in b.json"
    assert lines == [machine, "other machines: only ratios are compared, no speeds and no times"]


def test_a_start_with_less_memory_is_no_other_machine(report: ServerReport) -> None:
    pair = []
    for size in (8 << 30, 7 << 30):
        cpu = Device(name="CPU", backend="CPU", description="A processor", total_bytes=size)
        machine = report.hardware.model_copy(update={"devices": [cpu]})
        pair.append(report.model_copy(update={"hardware": machine}))
    assert conditions(*pair) == []


@pytest.mark.parametrize(("driver", "speeds"), [("570.1", True), (None, False)])
def test_a_build_that_lost_its_gpu(driver: str | None, speeds: bool, report: ServerReport) -> None:
    """The driver says that the GPU is there: such a build is what speeds are compared for."""
    gpu = Device(name="CUDA0", backend="CUDA", description="A card", total_bytes=24 << 30)
    card = report.hardware.model_copy(update={"devices": [gpu], "driver": "570.1"})
    none = report.hardware.model_copy(update={"driver": driver})
    pair = [report.model_copy(update={"hardware": machine}) for machine in (card, none)]
    assert any("tokens/s" in d.what for d in compare(*pair)) is speeds
    assert "GPUs: CUDA A card, 24576 MiB in first, none in second" in conditions(*pair)


def test_rows_that_are_gone(
    report: ServerReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    less = without(report, lambda s: s.category == "code")
    assert run(tmp_path, report, less) == 1
    shown = capsys.readouterr().out
    assert "only in a.json: plain, code; plain, all; draft, code; draft, all" in shown
    assert (
        "none of 4 is past" in shown
        and "rows that are missing and texts that differ count as worse: 4" in shown
    )
    assert run(tmp_path, less, report) == 0, "more rows are no loss"
    assert "only in b.json: plain, code; plain, all" in capsys.readouterr().out
    assert run(tmp_path, less, report, "--either-way") == 1, "two runs that do not agree"


def test_a_mode_that_is_gone(report: ServerReport, tmp_path: Path) -> None:
    other = DRAFT.model_copy(update={"name": "other"})
    more = [s.model_copy(update={"mode": "other"}) for s in report.samples if s.mode == "draft"]
    both = report_of([*report.samples, *more], (PLAIN, DRAFT, other))
    assert only_in(both, report) == ["other, chat", "other, code", "other, all"]
    assert run(tmp_path, both, report) == 1 and run(tmp_path, report, both) == 0


def test_a_total_over_other_prompts_is_left_out(report: ServerReport) -> None:
    chat = [s for s in report.samples if s.category == "chat"]
    third = [s.model_copy(update={"category": "math", "prompt": "math-1"}) for s in chat]
    more = report_of([*report.samples, *third])
    assert not any(", all" in d.what for d in compare(report, more))
    assert "draft, all: left out, it is over other prompts" in conditions(report, more)
    refuse(report, more)  # their categories are the same


def test_nothing_in_common(report: ServerReport) -> None:
    """The baseline alone is no comparison."""
    other = DRAFT.model_copy(update={"name": "other", "drafter": None})
    samples = [
        s.model_copy(update={"mode": "other"}) if s.mode == "draft" else s for s in report.samples
    ]
    with pytest.raises(BenchError, match=r"in common: draft, chat; .* and other, chat; "):
        compare(report, report_of(samples, (PLAIN, other)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: with_modes(r, temperature=2.0), "temperature: 0 in a.json, 2 in b.json"),
        (
            lambda r: report_of(r.samples, (PLAIN, DRAFT_3)),
            "n_draft of draft: 7 in a.json, 3 in b.json",
        ),
        (lambda r: with_config(r, max_tokens=50), "max_tokens: 100 in a.json, 50 in b.json"),
        (lambda r: with_config(r, parallel=8), "parallel: 1 in a.json, 8 in b.json"),
        (
            lambda r: r.model_copy(update={"files": [WorkloadFile(name="my", sha256="5" * 64)]}),
            "prompts: tasks.v1.jsonl 000000000000 in a.json, my 555555555555 in b.json",
        ),
        (
            lambda r: r.model_copy(
                update={"models": [TARGET.model_copy(update={"sha256": "3" * 64})]}
            ),
            "target: t.gguf 111111111111 in a.json, t.gguf 333333333333 in b.json",
        ),
        (
            lambda r: without(r, lambda s: s.prompt == "code-2"),
            "prompts of plain, code (1 in both): 2 in a.json, 1 in b.json",
        ),
    ],
)
def test_what_is_refused(
    change: Callable[[ServerReport], ServerReport],
    said: str,
    report: ServerReport,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    second = change(report)
    first = report.model_copy(update={"models": [TARGET]}) if second.models else report
    assert run(tmp_path, first, second) == 1
    shown = capsys.readouterr()
    assert f"a.json and b.json cannot be compared: {said}" in shown.err and not shown.out


def test_an_unknown_target_is_said(report: ServerReport) -> None:
    """Servers at a URL do not tell the hash of their file."""
    first = report.model_copy(update={"models": [TARGET]})
    refuse(first, report)
    assert conditions(first, report)[0] == (
        "target: t.gguf 111111111111 in first, not known in second"
    )


def test_what_is_said(
    report: ServerReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caches, flags, builds and settings may be the purpose: compared, and named once."""
    first = with_modes(report, command=list(SERVER))
    other = ["llama-server", "-m", "renamed.gguf", "-fa", "off", "-ctk", "f32", "--temp", "-1"]
    second = with_modes(report, command=other, cache_type="f32")
    made = report.provenance.model_copy(update={"binaries": "9" * 64, "dirty": True})
    second = with_config(second, warmup=3).model_copy(update={"provenance": made})
    assert run(tmp_path, first, second) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-6:-1] == [
        "commit: aaaaaaaaaaaa in a.json, aaaaaaaaaaaa with changes in b.json",
        "native build: not known in a.json, 999999999999 in b.json",
        "warmup: 1 in a.json, 3 in b.json",
        "cache type: q8_0 in a.json, f32 in b.json",
        "server flags: -fa on -ctk q8_0 --temp -2 in a.json, -fa off -ctk f32 --temp -1 in b.json",
    ]


def drafter_of(report: ServerReport, name: str, digit: str, depth: int = 7) -> ServerReport:
    """The same with the drafter of another file, which its mode is called by."""
    update = {"name": f"{name} n={depth}", "drafter": f"{name}.gguf", "n_draft": depth}
    mode: Mode = DRAFT.model_copy(update=update)
    file = DRAFTER.model_copy(update={"name": f"{name}.gguf", "sha256": digit * 64})
    samples = [
        s.model_copy(update={"mode": mode.name}) if s.mode == "draft" else s for s in report.samples
    ]
    return report_of(samples, (PLAIN, mode), models=[TARGET, file])


def test_two_drafters(
    report: ServerReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = drafter_of(report, "old", "2"), drafter_of(report, "new", "3")
    assert run(tmp_path, first, second) == 0
    shown = capsys.readouterr().out
    assert "old n=7, all: ratio" in shown and "only in" not in shown
    assert "drafter: old.gguf 222222222222 in a.json, new.gguf 333333333333 in b.json" in shown
    assert aligned(first, first) is first
    deeper = drafter_of(report, "new", "3", depth=15)
    assert "new n=15" in {mode.name for mode in aligned(first, deeper).modes}, "no such depth there"


def test_columns_of_one_name(
    report: ServerReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    paths = ["one/tasks.json", "two/tasks.json"]
    for path in paths:
        save(report, Path(path))
    assert main(["compare", *paths]) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert all(path in head for path in paths)


def test_a_text_that_differs_now_is_worse(
    report: ServerReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompt was the slow one: without it the second would look faster."""
    slow = with_samples(report, "draft", "code-1", generated_ms=900.0)
    broken = with_samples(slow, "draft", "code-1", digest="f" * 64)
    assert run(tmp_path, slow, broken) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "differs from plain decoding only in b.json: draft: code-1" in shown
    assert "rows that are missing and texts that differ count as worse: 1" in shown
    assert "draft, code: compared without code-1" in shown
    changes = {d.what: d.change for d in compare(slow, broken)}
    assert changes["draft, code: ratio"] == changes["draft, all: ratio"] == 0.0
    assert run(tmp_path, broken, slow) == 0
    assert run(tmp_path, broken, slow, "--either-way") == 1


def test_a_row_without_a_common_prompt_is_worse(report: ServerReport) -> None:
    broken = with_samples(report, "draft", "chat-1", digest="e" * 64)
    found = {d.what: d for d in compare(report, broken)}
    assert found["draft, chat: ratio"].second is None
    assert found["draft, chat: ratio"].worse(0.1, either_way=False)
    assert found["draft, all: ratio"].change == 0.0


def test_requests_of_a_replay_are_compared_over_common_ones(report: ServerReport) -> None:
    """A throughput is of all requests: it is no longer reported."""
    first = as_replay(report)
    unstable = as_replay(with_samples(report, "plain", "code-1", [2], digest="d" * 64))
    found = {d.what: d for d in compare(first, unstable)}
    assert found["draft, replay: request ratio"].change == 0.0
    assert found["draft, replay: ratio"].first is not None
    assert found["draft, replay: ratio"].second is None


def at_urls(report: ServerReport, plain: str, draft: str) -> ServerReport:
    """The same, asked of servers at two URLs."""
    modes = [
        m.model_copy(update={"url": u}) for m, u in zip((PLAIN, DRAFT), (plain, draft), strict=True)
    ]
    return report_of(report.samples, tuple(modes))


def on(report: ServerReport, cpu: str) -> ServerReport:
    """The same, asked from or made on another machine."""
    return report.model_copy(update={"hardware": report.hardware.model_copy(update={"cpu": cpu})})


FAR = ("http://a:1", "http://a:2")
NEAR = ("http://127.0.0.1:1", "http://localhost:2")


@pytest.mark.parametrize(
    ("one", "two", "cpu", "same"),
    [
        (FAR, FAR, "Another", True),
        (FAR, ("http://b:1", "http://b:2"), None, False),
        (FAR, None, None, False),
        (NEAR, None, None, True),
        (NEAR, NEAR, "Another", False),
        (("http://[::1]:1", "http://a:2"), (NEAR[0], "http://a:2"), None, True),
    ],
)
def test_the_machine_of_a_url(
    report: ServerReport,
    one: tuple[str, str],
    two: tuple[str, str] | None,
    cpu: str | None,
    same: bool,
) -> None:
    """The client's hardware stands for a server's on its own machine alone."""
    first, second = at_urls(report, *one), at_urls(report, *two) if two else report
    second = on(second, cpu) if cpu else second
    assert any("tokens/s" in d.what for d in compare(first, second)) is same
    assert any("only ratios are compared" in x for x in conditions(first, second)) is not same


def test_a_drafting_servers_build_is_a_condition(report: ServerReport) -> None:
    one, two = (with_modes(report, build=build) for build in ("b1", "b2"))
    assert "build of draft: b1 in first, b2 in second" in conditions(one, two)


def test_table_does_not_know_a_servers_machine(report: ServerReport) -> None:
    (line,) = published.conditions([at_urls(report, *FAR)])
    assert "asked from" in line and "the servers' machine is not known" in line


def test_a_baseline_alone_is_on_the_same_machine(report: ServerReport) -> None:
    """Which modes ran says nothing of where."""
    plain = report_of([s for s in report.samples if s.mode == "plain"], (PLAIN,))
    assert not any("only ratios" in line for line in conditions(report, plain))
