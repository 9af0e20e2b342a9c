"""Results are checked when they are written and when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspine_bench.errors import BenchError
from dspine_bench.schema import ServerReport, load, save
from pydantic import ValidationError


def test_round_trip(report: ServerReport, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tasks.json"
    save(report, path)
    assert load(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["tasks.json"]


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("schema_version",), 7, "schema_version is 7, expected 1"),
        (("samples", 0, "tokens"), -1, "samples.0.tokens"),
        (("samples", 0, "tokens"), "100", "samples.0.tokens"),
        (("samples", 0, "surprise"), 1, "samples.0.surprise"),
        (("samples", 0, "mode"), "unknown", "modes ['unknown']"),
        (("summary", 0, "ratio", "median"), None, "summary.0.ratio.median"),
        (("summary", 0, "ratio", "median"), 9.0, "expected 1.0 <= 9.0 <= 1.0"),
        (
            ("summary", 5, "ratio"),
            {"median": 9.0, "min": 8.0, "max": 9.5},
            "summary.5.ratio.median is 9, the samples give 1.99602",
        ),
        (("summary", 3, "mean_accepted_length"), 0.5, "summary.3.mean_accepted_length"),
        (("summary", 3, "mean_accepted_length"), 7.8, "summary.3.mean_accepted_length is 7.8"),
        (("summary", 3, "acceptance_rate"), 1.5, "summary.3.acceptance_rate"),
        (("summary", 3, "accepted_by_position", 0), 2.0, "summary.3.accepted_by_position.0"),
        (("summary", 3, "category"), "prose", "summary.3.category is 'prose'"),
        (("samples", 0, "digest"), "x", "summary.0.unstable"),
        (("samples", 0, "drafted"), 4, "baselines ['plain'] have drafted"),
        (("samples",), [], "samples: "),
        (("summary",), [], "summary has 0 entries, the samples give 6"),
    ],
)
def test_what_is_wrong_is_named(
    where: tuple[str | int, ...], value: object, said: str, report: ServerReport, tmp_path: Path
) -> None:
    document = report.model_dump(mode="json")
    place = document
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError) as caught:
        load(path)
    assert said in str(caught.value) and "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"a"'])
def test_no_result(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"a\.json"):
        load(path)
    with pytest.raises(BenchError, match="absent"):
        load(tmp_path / "absent.json")


def test_a_wrong_result_is_not_written(report: ServerReport, tmp_path: Path) -> None:
    bad = report.model_copy(update={"modes": []})
    path = tmp_path / "tasks.json"
    path.write_text("before")
    with pytest.raises(BenchError):
        save(bad, path)
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_a_report_cannot_be_changed(report: ServerReport) -> None:
    with pytest.raises(ValidationError):
        report.workload = "depth"
