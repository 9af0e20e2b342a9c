"""Bad input ends in one line that names it, and odd names break nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspine_bench import plots
from dspine_bench.cli import main
from dspine_bench.options import SHARED, flags_of
from dspine_bench.schema import DraftReport, ServerReport
from support.bench import report_of

RECORDED = Path(__file__).resolve().parents[2] / "bench" / "results" / "draft.json"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize(
    "words", [["compare", "bad.json"], ["table"], ["report", "-o", "page.html"]]
)
def test_a_file_that_is_no_result(
    data: bytes,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_bytes(data)
    assert main([*words, "bad.json"]) == 1
    assert capsys.readouterr().err.startswith("dspine-bench: bad.json: ")


@pytest.mark.parametrize("heat", ["inf", "-inf", "nan"])
def test_a_temperature_that_is_none(heat: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "--temperature", "1", "--temperature", heat]) == 2
    assert "--temperature" in capsys.readouterr().err


def test_what_is_given_twice_is_measured_once() -> None:
    given = {name: default for name, (_, default) in SHARED.items()}
    given |= {"kv": ["f16", "q8_0", "f16"], "temperature": [1.0, 0.0, 1.0], "flag": ["a", "a"]}
    flags = flags_of(given)
    assert (flags.caches, flags.temperatures) == (("f16", "q8_0"), (1.0, 0.0))
    assert flags.extra == ("a", "a")


@pytest.mark.parametrize("name", ["c$x_{ $", "$$"])
def test_categories_are_no_mathematics(name: str, report: ServerReport) -> None:
    samples = [
        s.model_copy(update={"category": name}) if s.category == "chat" else s
        for s in report.samples
    ]
    drawn = plots.plots([report_of(samples)])
    assert [plot.name for plot in drawn] == ["speed-by-task", "accepted-by-position"]


def test_a_shape_is_no_path() -> None:
    text = RECORDED.read_text(encoding="utf-8").replace("small", r"../\\1<")
    drawn = plots.plots([DraftReport.model_validate_json(text)])
    assert drawn[0].name == "draft--1-"
