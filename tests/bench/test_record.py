"""`dspine-bench record`: parts, what is taken up again, and two runs that are compared."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dspine_bench import record
from dspine_bench.cli import main
from dspine_bench.errors import BenchError
from dspine_bench.provenance import COMMIT_ENV, binaries, commit
from dspine_bench.record import DEMO_SWEEP, PARTS, Pair, Part
from dspine_bench.request import Flags
from dspine_bench.schema import ServerReport, load
from dspine_convert.errors import Interrupted
from support.bench import report_of


def git(*words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


def commit_all() -> None:
    git("add", "-A")
    git("commit", "-m", "x")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository like ours, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(COMMIT_ENV, raising=False)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "pin.json").write_text("{}")
    git("init", "-q")
    commit_all()
    return tmp_path


@pytest.fixture
def measured(
    checkout: Path, report: ServerReport, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Replaces the parts by two that take no time; returns the names of those that ran.

    `slower` has a factor for every run of the first part; `broken`: the second fails.
    """
    ran: list[str] = []

    @contextmanager
    def no_models(**_: object) -> Iterator[Pair]:
        yield Pair(Path("t.gguf"), (), 5, False, True)

    def part(name: str, slower: list[float], broken: bool) -> Part:
        def measure(_: Pair) -> ServerReport:
            if broken:
                raise BenchError("it broke")
            ran.append(name)
            factor = slower.pop(0) if slower else 1.0
            samples = [
                s.model_copy(update={"generated_ms": s.generated_ms * factor})
                if s.mode == "draft"
                else s
                for s in report.samples
            ]
            head, dirty = commit(Path.cwd())
            made = report.provenance.model_copy(update={"commit": head, "dirty": dirty})
            return report_of(samples, provenance=made)

        return Part(name, "", 60, 30, measure)

    def replace(slower: list[float] | None = None, *, broken: bool = False) -> list[str]:
        parts = (part("tasks", slower or [], False), part("sweep", [], broken))
        monkeypatch.setattr(record, "PARTS", parts)
        ran.clear()
        return ran

    monkeypatch.setattr(record, "_demo", no_models)
    monkeypatch.setattr(record, "binaries", lambda: None)
    return replace


def test_what_is_there_is_not_measured_again(measured: Callable[..., list[str]]) -> None:
    ran = measured()
    results = Path("bench") / "results"
    assert main(["record", "-q"]) == 0 and ran == ["tasks", "sweep"]
    assert {p.name for p in results.iterdir()} == {"tasks.json", "sweep.json"}
    commit_all()  # results, and no code
    assert main(["record", "-q"]) == 0 and ran == ["tasks", "sweep"]
    assert main(["record", "-q", "sweep", "--force"]) == 0 and ran[2:] == ["sweep"]
    assert main(["record", "-q", "--repeats", "6", "tasks"]) == 0 and ran[3:] == ["tasks"]


def test_a_part_of_short_requests_has_more_repeats(
    measured: Callable[..., list[str]], report: ServerReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five for the one that is asked for; and a result that has them is not measured again."""
    measured()
    asked: list[int] = []

    def measure(pair: Pair) -> ServerReport:
        asked.append(pair.repeats)
        head, dirty = commit(Path.cwd())
        made = report.provenance.model_copy(update={"commit": head, "dirty": dirty})
        return report.model_copy(update={"provenance": made})

    monkeypatch.setattr(record, "PARTS", (Part("sweep", "", 60, 60, measure, times=5),))
    for _ in range(2):
        assert main(["record", "-q", "--repeats", "1"]) == 0
    assert asked == [5]


@pytest.mark.parametrize("committed", [True, False])
def test_other_code_is_measured_anew(
    committed: bool, measured: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = measured()
    assert main(["record", "-q", "tasks"]) == 0
    Path("code.py").write_text("1")
    if committed:
        commit_all()
    assert main(["record", "-q", "tasks"]) == 0 and ran == ["tasks", "tasks"]
    assert ("has changes" in capsys.readouterr().err) != committed


def test_another_build_is_measured_anew(
    measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = measured()
    assert main(["record", "-q", "tasks"]) == 0
    monkeypatch.setattr(record, "binaries", lambda: "other")
    assert main(["record", "-q", "tasks"]) == 0 and ran == ["tasks", "tasks"]


def test_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_LIB_DIR", str(tmp_path))
    monkeypatch.setenv("DSPINE_BIN_DIR", str(tmp_path))
    seen = [binaries()]
    for name, text in (
        ("llama-server", "a"), ("libdspine.so", "b"), ("libllama.so", "c"), ("libllama.so", "d"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        seen.append(binaries())
    assert seen[0] is None and len(set(seen)) == 5
    assert binaries() == seen[-1]


def test_an_ended_run_is_taken_up(
    measured: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(broken=True) == [] and main(["record", "-q"]) == 1
    assert "it broke" in capsys.readouterr().err
    ran = measured()
    assert main(["record", "-q"]) == 0 and ran == ["sweep"]


@pytest.mark.parametrize(("factor", "code"), [(1.05, 0), (1.2, 1), (0.8, 1)])
def test_two_runs_of_the_same(
    factor: float,
    code: int,
    measured: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = measured([1.0, factor])
    assert main(["record", "-q", "--again", "tasks"]) == code and ran == ["tasks", "tasks"]
    shown = capsys.readouterr().out
    said = "of 6 past the threshold" if code else "the largest change is 4.8 %"
    assert said in shown
    first, second = (load(Path("bench/results") / p / "tasks.json") for p in ("", "again"))
    assert first.summary[0] == second.summary[0] and (first == second) == (factor == 1.0)
    assert main(["record", "-q", "--again", "tasks", "--threshold", "0.5"]) == 0
    assert ran == ["tasks", "tasks"], "both are there"


def test_plan(measured: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    ran = measured()
    assert main(["record", "--plan", "--again"]) == 0 and ran == []
    shown = capsys.readouterr().out
    assert "again/sweep.json" in shown and "in all about 4 min" in shown
    assert main(["record", "--plan", "--quick", "--repeats", "10", "tasks"]) == 0
    assert "in all about 60 s" in capsys.readouterr().out
    assert main(["record", "-q"]) == 0
    capsys.readouterr()
    assert main(["record", "--plan"]) == 0
    assert "nothing to measure" in capsys.readouterr().out
    assert main(["record", "all"]) == 1
    assert "all: no part of record; expected tasks, sweep" in capsys.readouterr().err


def test_the_parts() -> None:
    """All that the README shows, and within three quarters of an hour."""
    names = [part.name for part in PARTS]
    assert len(names) == len(set(names))
    assert {"tasks", "depth", "replay", "draft", "convert", "engine"} <= set(names)
    assert {"sweep", "types", "kv", "temperature"} <= set(names)
    assert sum(part.estimate(5, quick=False) for part in PARTS) <= 2700


def test_flags_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(Path(f"d{i}.gguf") for i in range(3))
    pair = Pair(Path("t.gguf"), files, 5, False, True)
    seen = {}
    monkeypatch.setattr(record, "run_tasks", lambda flags: flags)
    for part in PARTS:
        if part.name in ("tasks", "sweep", "types", "kv", "temperature"):
            seen[part.name] = part.measure(pair)
    assert seen["tasks"].drafters == files[:1] and not seen["tasks"].quick
    assert seen["types"].drafters == files and seen["sweep"].sweep == DEMO_SWEEP
    assert len(seen["kv"].caches) == 2 and seen["temperature"].temperatures == (0.0, 1.0)
    assert all(flags.repeats == 5 for flags in seen.values())


@pytest.mark.parametrize("keep", [True, False])
def test_flags_say_where_an_interrupted_run_goes(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`all` keeps it in its folder; of `record`, whole parts are kept."""
    seen: list[Flags] = []

    def interrupted(flags: Flags) -> ServerReport:
        seen.append(flags)
        raise Interrupted

    monkeypatch.setattr(record, "run_tasks", interrupted)
    pair = Pair(Path("t.gguf"), (Path("d.gguf"),), 5, quick=False, quiet=True)
    with pytest.raises(Interrupted):
        if keep:
            next(record.run_all(pair.target, pair.drafters, (), tmp_path, repeats=5))
        else:
            record.PARTS[0].measure(pair)
    assert seen[0].keep_interrupted == keep and (seen[0].output == tmp_path) == keep


def test_all_keeps_what_it_has(
    report: ServerReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A workload that fails takes nothing from those before it."""

    def fails(_: object) -> ServerReport:
        raise BenchError("no room")

    monkeypatch.setattr(record, "run_tasks", lambda _: report)
    monkeypatch.setattr(record, "run_depth", fails)
    words = ["all", "-m", "t.gguf", "-md", "d.gguf", "-q", "-o", str(tmp_path / "out")]
    assert main(words) == 1 and "no room" in capsys.readouterr().err
    assert load(tmp_path / "out" / "tasks.json") == report
