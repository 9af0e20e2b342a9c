"""The real llama-server on the trained tiny pair: small runs of every workload with servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspine_bench.cli import main
from dspine_bench.golden_bench import GoldenPair, write_pair
from dspine_bench.schema import ServerReport, load
from support.golden import GOLDEN

pytestmark = pytest.mark.e2e

EXACT = ["--kv", "f32", "-fa", "off", "--flag=-t", "--flag=1", "-q"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> GoldenPair:
    return write_pair(GOLDEN, tmp_path_factory.mktemp("golden"))


def run(command: str, pair: GoldenPair, out: Path, *words: str) -> ServerReport:
    files = ["-m", str(pair.target), "-md", str(pair.draft)]
    assert main([command, *files, *EXACT, "-o", str(out), *words]) == 0
    found = load(out / f"{command}.json")
    assert isinstance(found, ServerReport)
    return found


@pytest.mark.parametrize("interleave", ["request", "repeat"])
def test_tasks(interleave: str, pair: GoldenPair, tmp_path: Path) -> None:
    words = ["--prompts", str(pair.prompts), "-n", "32", "-c", "1024", "--repeats", "2"]
    report = run(
        "tasks", pair, tmp_path, *words, "--sweep", "n-draft=3,7", "--interleave", interleave
    )
    rows = {row.mode: row for row in report.summary}
    lengths = {mode: row.mean_accepted_length or 0.0 for mode, row in rows.items()}
    deep = rows["draft n=7"]
    assert lengths["plain"] == 1.0 and 2.0 < lengths["draft n=3"] <= 4.0
    assert lengths["draft n=7"] > lengths["draft n=3"]
    assert all(row.checked and not row.differing and row.ratio for row in rows.values())
    # the counters by position are those of the single requests
    assert deep.accepted_by_position is not None and len(deep.accepted_by_position) == 7
    assert sum(deep.accepted_by_position) == pytest.approx(deep.accepted / deep.rounds)
    assert report.provenance.pin == "0c1e57098" and len(report.models) == 2
    assert all(len(m.sha256) == 64 for m in report.models)
    commands = {mode.name: mode.command for mode in report.modes}
    assert "-md" not in commands["plain"] and "target.gguf" in commands["plain"]
    at = commands["draft n=3"].index("--spec-draft-n-max")
    assert commands["draft n=3"][at + 1] == "3"


def test_replay(pair: GoldenPair, tmp_path: Path) -> None:
    words = ["--conversations", str(pair.replay), "-np", "2", "-n", "16", "-c", "2048"]
    report = run("replay", pair, tmp_path, *words, "--repeats", "1")
    assert report.config.interleave == "repeat"
    draft = next(row for row in report.summary if row.mode != "plain")
    assert draft.mean_accepted_length is not None and draft.mean_accepted_length > 2.0
    assert draft.speed is not None
    cached = [s.cached for s in report.samples if s.prompt.endswith("/2")]
    assert all(cached), "a conversation's next request finds its prefix"


def test_depth_that_does_not_fit(
    pair: GoldenPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["-m", str(pair.target), "-md", str(pair.draft), "-o", str(tmp_path / "out")]
    assert main(["depth", *files, *EXACT, "--depths", "1000000"]) == 1
    assert "--depths 1000000: the target was trained with a context of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_wrong_pair(pair: GoldenPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["-m", str(pair.draft), "-md", str(pair.target), "-o", str(tmp_path)]
    assert main(["tasks", *files, *EXACT, "--prompts", str(pair.prompts)]) == 1
    assert "Traceback" not in capsys.readouterr().err and not list(tmp_path.iterdir())
