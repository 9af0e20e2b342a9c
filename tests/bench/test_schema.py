"""Results are checked when they are written and when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspine_bench.errors import BenchError
from dspine_bench.schema import Replay, ServerReport, load, save
from dspine_bench.summary import summarize
from pydantic import ValidationError
from support.bench import PLAIN, report_of

REPLAY = {"mode": "plain", "repeat": 0, "requests": 3, "tokens": 300, "wall_ms": 900.0}
SAID_REPEATS = "plain has the repeats [0, 1, 2, 3, 4] of chat-1, expected "


@pytest.fixture
def replayed(report: ServerReport) -> ServerReport:
    """The same as a replay."""
    samples = [s.model_copy(update={"category": "replay"}) for s in report.samples]
    replays = [
        Replay(mode=mode.name, repeat=r, requests=3, tokens=300, wall_ms=900.0)
        for mode in report.modes
        for r in range(5)
    ]
    summary = summarize(report.modes, samples, replays)
    return report_of(samples, workload="replay", replays=replays, summary=summary)


def test_round_trip(report: ServerReport, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tasks.json"
    save(report, path)
    assert load(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["tasks.json"]


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("schema_version",), 7, "schema_version is 7, expected 1"),
        (("schema_version",), True, "schema_version is True, expected 1"),
        (("schema_version",), 1.0, "schema_version is 1.0, expected 1"),
        (("workload",), "depth", "categories ['chat', 'code'], expected tokens of context"),
        (("modes", 1, "name"), "plain", "two modes have one name"),
        (("config", "repeats"), 50, f"{SAID_REPEATS}50 from 0 on (config.repeats)"),
        (("config", "repeats"), 2**40, f"{SAID_REPEATS}1099511627776 from 0 on"),
        (("samples", 0, "repeat"), 1, "plain has the repeats [1, 1, 2, 3, 4] of chat-1"),
        (("samples", 0, "prompt"), "chat-2", "plain has the repeats [0] of chat-2, expected 5"),
        (("samples", 0, "tokens"), 10**30, "samples.0.tokens"),
        (("samples", 3, "accepted_at", 0), 10**30, "samples.3.accepted_at.0"),
        (("samples", 0, "prompt"), "a\0", "samples.0.prompt"),
        (("samples", 0, "category"), "\x1b[2J", "samples.0.category"),
        (("replays",), [REPLAY], "replay 0 of plain has 3 requests and 300 tokens"),
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
    assert said in refused(document, tmp_path)


def refused(document: object, folder: Path) -> str:
    """What is said of a file that is no result: one line with its name."""
    path = folder / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BenchError) as caught:
        load(path)
    assert "bad.json: " in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kept", [[0], [1, 2, 3, 4], []])
def test_a_mode_with_some_repeats(kept: list[int], report: ServerReport, tmp_path: Path) -> None:
    """A baseline of one repeat would be a ratio of one repeat, called five."""
    document = report.model_dump(mode="json")
    document["samples"] = [
        s for s in document["samples"] if s["mode"] != PLAIN.name or s["repeat"] in kept
    ]
    assert f"plain has the repeats {kept} of chat-1, expected 5" in refused(document, tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": 900}, "3 requests and 900 tokens, the samples give (3, 300)"),
        ({"requests": 9}, "9 requests and 300 tokens, the samples give (3, 300)"),
        ({"mode": "draft"}, "replay 0 of draft has 3 requests and 300 tokens, the samples give n"),
        ({"repeat": 5}, "replay 5 of plain has 3 requests and 300 tokens, the samples give none"),
        (None, "replay 0 of plain is missing"),
    ],
)
def test_a_replay_is_of_its_samples(
    changed: dict[str, object] | None, said: str, replayed: ServerReport, tmp_path: Path
) -> None:
    save(replayed, tmp_path / "good.json")
    document = replayed.model_dump(mode="json")
    if changed is None:
        del document["replays"][0]
    else:
        document["replays"][0] |= changed
    assert said in refused(document, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"a"', "\xff", "[" * 100_000])
def test_no_result(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BenchError, match=r"a\.json: .*(JSON|result)"):
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
