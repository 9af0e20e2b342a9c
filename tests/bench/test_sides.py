"""`convert` and `engine`: what is made of the samples of two sides."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from dspine_bench import convert, engine
from dspine_bench.cli import main
from dspine_bench.errors import BenchError
from dspine_bench.schema import (
    ConvertReport,
    ConvertSample,
    EngineReport,
    EngineSample,
    Report,
    ServerReport,
    load,
    save,
)

SIZES = {"BF16": 4_060_000_000, "Q8_0": 2_211_000_000, "Q4_K_M": 1_260_000_000}


@pytest.fixture
def converted(report: ServerReport) -> ConvertReport:
    """Ours takes 20, 22 and 30 seconds; the peer's three steps 100 together, later 110 and 120."""
    samples = [
        ConvertSample(side="ours", step="all", repeat=r, seconds=s, peak_rss=1 << 27)
        for r, s in enumerate((20.0, 22.0, 30.0))
    ]
    samples += [
        ConvertSample(side="peer", step=step, repeat=r, seconds=s + extra, peak_rss=1 << 32)
        for r, extra in enumerate((0.0, 10.0, 20.0))
        for step, s, extra in (("BF16", 10.0, 0.0), ("Q8_0", 20.0, 0.0), ("Q4_K_M", 70.0, extra))
    ]
    return ConvertReport(
        schema_version=1,
        provenance=report.provenance,
        hardware=report.hardware,
        workload="convert",
        config={"repeats": 3},
        sizes=SIZES,
        samples=samples,
        summary=convert.summarize(samples, SIZES),
    )


@pytest.fixture
def engined(report: ServerReport) -> EngineReport:
    """The engine takes 1.1 times as long, in the last repeat 1.3 times."""
    samples = [
        EngineSample(
            repeat=r,
            prompt=p,
            rounds=30,
            engine_ms=ratio * (10.0 + p),
            server_ms=10.0 + p,
            same_ids=True,
            same_rounds=True,
        )
        for r, ratio in enumerate((1.1, 1.1, 1.3))
        for p in range(3)
    ]
    return EngineReport(
        schema_version=1,
        provenance=report.provenance,
        hardware=report.hardware,
        workload="engine",
        models=[],
        config={"repeats": 3},
        samples=samples,
        summary=engine.summarize(samples),
    )


def test_steps_are_added_then_divided(converted: ConvertReport) -> None:
    found = converted.summary
    assert found.ratio.median == pytest.approx(22 / 110)
    assert (found.ratio.min, found.ratio.max) == pytest.approx((20 / 100, 30 / 120))
    assert found.peak_rss == 1 << 27, "the peer's memory is not ours"
    assert found.size_error == pytest.approx({"BF16": 0.0, "Q8_0": 0.005, "Q4_K_M": 0.0})


def test_the_first_route_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(_: list[str], side: convert.Side, step: str, repeat: int) -> ConvertSample:
        return ConvertSample(side=side, step=step, repeat=repeat, seconds=1.0, peak_rss=1)

    monkeypatch.setattr(convert, "_timed", timed)
    monkeypatch.setattr(Path, "unlink", lambda _: None)
    here = Path()
    sides = [[s.side for s in convert._both(here, here, here, r)] for r in range(3)]
    ours_first = ["ours", "peer", "peer", "peer"]
    assert sides == [ours_first, ours_first[::-1], ours_first]


def test_memory_is_the_commands_own() -> None:
    """This process holds more, which Linux counts as that of what it starts."""
    held = b"x" * (200 << 20)
    words = ["-I", "-S", "-c", "x = b'x' * (40 << 20)"]
    sample = convert._timed([sys.executable, *words], "ours", "all", 0)
    assert 40 << 20 < sample.peak_rss < 100 << 20 < len(held)


def test_a_route_that_fails_is_named() -> None:
    words = ["-c", "import sys; sys.exit('no room')"]
    with pytest.raises(BenchError, match=r"failed \(1\): no room"):
        convert._timed([sys.executable, *words], "ours", "all", 0)
    words = ["-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(BenchError, match=r"failed \(-9\)"):
        convert._timed([sys.executable, *words], "ours", "all", 0)


@pytest.mark.parametrize(
    ("changed", "passed"),
    [({}, True), ({"seconds": 90.0}, False), ({"peak_rss": 2 << 30}, False)],
)
def test_what_passes(changed: dict[str, float], passed: bool, converted: ConvertReport) -> None:
    samples = [s.model_copy(update=changed) if s.side == "ours" else s for s in converted.samples]
    assert convert.passes(convert.summarize(samples, SIZES)) is passed
    larger = SIZES | {"Q8_0": 2_300_000_000}
    assert not convert.passes(convert.summarize(samples, larger))


def test_neighbours_are_divided(engined: EngineReport) -> None:
    found = engined.summary
    assert found.ratio.median == pytest.approx(1.1) and found.ratio.max == pytest.approx(1.3)
    assert found.quartiles == pytest.approx([1.1, 1.3])
    assert found.same_ids and found.same_rounds
    other = engined.samples[0].model_copy(update={"same_ids": False})
    assert not engine.summarize([other, *engined.samples]).same_ids
    assert engine.summarize([other]).ratio.median == pytest.approx(1.1)


@pytest.mark.parametrize("which", ["converted", "engined"])
def test_results_are_shown_and_compared(
    which: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: Report = request.getfixturevalue(which)
    path, page = tmp_path / "a.json", tmp_path / "a.html"
    save(made, path)
    assert load(path) == made
    assert main(["report", str(path), "-o", str(page)]) == 0
    assert main(["table", str(path)]) == 0
    assert f"{made.summary.ratio.median:.2f} (" in page.read_text()
    assert main(["compare", str(path), str(path), "--ratios"]) == 0
    assert "none of 1 is past" in capsys.readouterr().out
    document = json.loads(path.read_text())
    document["summary"]["ratio"]["median"] *= 1.01
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError, match=r"a\.json: summary\.ratio\.median is"):
        load(path)


def test_a_side_without_samples(converted: ConvertReport, tmp_path: Path) -> None:
    document = converted.model_dump(mode="json")
    document["samples"] = [s for s in document["samples"] if s["side"] == "ours"]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError, match="samples give no summary"):
        load(path)


@pytest.mark.parametrize("text", ["{", "[]", "[[]]", '[["a"]]', "[1]"])
def test_prompts_of_the_engine(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"p\.json: "):
        engine.read_prompts(path)
    with pytest.raises(BenchError, match="absent"):
        engine.read_prompts(tmp_path / "absent")
    path.write_text("[[1, 2], [3]]")
    assert engine.read_prompts(path) == [[1, 2], [3]]


def test_a_program_that_fails(tmp_path: Path) -> None:
    words = ["sh", "-c", "echo one; echo two >&2; exit 3"]
    with pytest.raises(BenchError, match=r"failed \(3\): two$"):
        convert._timed(words, "peer", "BF16", 0)
    timed: Callable[[], ConvertSample] = lambda: convert._timed(["true"], "ours", "all", 1)  # noqa: E731
    assert timed().seconds > 0 and timed().peak_rss > 0
