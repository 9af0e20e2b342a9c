"""`dspine tune`: the depths, the choice, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspine import InvalidError, _tune
from dspine._tune import PLAIN, Point, _point, _Run, choose, depths_for, read_prompts
from dspine._tuned import stored_depth
from dspine.cli import main
from dspine_bench.golden_bench import write_pair
from support.golden import GOLDEN


def point(depth: int, ratio: float, differing: int = 0) -> Point:
    return Point(depth, 10 * ratio, ratio, ratio * 0.98, ratio * 1.1, 1.0 + depth / 4, differing)


@pytest.mark.parametrize(
    ("points", "chosen"),
    [
        ([(2, 1.2), (7, 1.8), (15, 1.5)], 7),
        ([(2, 0.9), (7, 0.7), (15, 0.4)], 0),  # never slower than plain decoding
        ([(2, 1.001), (7, 0.7)], 0),  # a gain that is noise is none
        ([(2, 1.019), (7, 0.7)], 0),  # not in every repeat
        ([(2, 1.1), (7, 1.105)], 2),  # as good, and needs less memory
        ([], 0),
    ],
)
def test_choice(points: list[tuple[int, float]], chosen: int) -> None:
    assert choose([point(PLAIN, 1.0), *(point(d, r) for d, r in points)]) == chosen


def test_a_gain_that_is_not_in_every_repeat_is_named(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_tune, "measure", lambda *_, **__: [point(0, 1.0), point(7, 1.015)])
    assert main(measured) == 0
    assert "No depth beat plain decoding in every repeat" in capsys.readouterr().out


def test_other_text_is_not_chosen() -> None:
    points = [point(0, 1.0), point(3, 1.2), point(7, 3.0, differing=1)]
    assert choose(points) == 3
    # one that keeps the text was tried, and is slower
    assert choose([point(0, 1.0), point(3, 0.9), point(7, 3.0, differing=1)]) == PLAIN


def test_no_choice_where_no_faster_depth_keeps_the_text() -> None:
    points = [point(0, 1.0), point(3, 2.9, differing=1), point(7, 3.1, differing=1)]
    assert choose(points) is None
    slower = [point(0, 1.0), point(3, 0.9, differing=1), point(7, 0.8, differing=1)]
    assert choose(slower) == PLAIN  # whatever the text: plain decoding is fastest


def test_a_point() -> None:
    plain = [_Run(100, 1000.0, 99, 0, ((1, 2), (3,))), _Run(100, 2000.0, 99, 0, ((1, 2), (3,)))]
    mine = [_Run(100, 500.0, 40, 60, ((1, 2), (3,))), _Run(100, 800.0, 40, 60, ((1, 2), (4,)))]
    found = _point(7, mine, plain)
    assert (found.ratio_min, found.ratio, found.ratio_max) == pytest.approx((2.0, 2.25, 2.5))
    assert found.mean_accepted_length == pytest.approx(2.5) and found.differing == 1
    assert _point(0, plain, plain).ratio == 1.0


def test_depths() -> None:
    assert depths_for(16) == [2, 3, 4, 7, 15]
    assert depths_for(8) == [2, 3, 4, 7]
    assert depths_for(6) == [2, 3, 4, 5]
    assert depths_for(16, [5, 2, 5]) == [2, 5]
    for wrong in (0, 16):
        with pytest.raises(InvalidError, match=rf"depth {wrong}: the drafter's are 1 to 15"):
            depths_for(16, [wrong])


def _contents(path: Path) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in read_prompts(path)]


def test_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("One.\n\n  Two. \n")
    assert _contents(path) == ["One.", "Two."]
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert _contents(path) == ["a", "b"]
    path.write_bytes('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    assert _contents(path) == ["a\u2028b", "c"]
    path.write_bytes("a\u2028b\r\nc\r\n".encode())
    assert _contents(path) == ["a\u2028b", "c"]
    path.write_text('{"messages": [{"role": "user", "content": "b"}], "tools": [{"a": 1}]}')
    assert read_prompts(path)[0].tools == [{"a": 1}]
    for text, said in (
        ("\n", "no prompt"),
        ('{"prompt": "a"}\n{\n', r"prompts.txt:2: no JSON"),
        ('{"x": 1}', r"prompts.txt:1: expected"),
        ('{"messages": [1]}', r"prompts.txt:1: a message"),
        ('{"messages": [{"role": "user"}], "tools": [1]}', r"prompts.txt:1: tools"),
        ('[{"prompt": "a"}]', r"prompts.txt: a JSON array, expected JSON lines"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidError, match=said):
            read_prompts(path)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is measured, depth 7 is best; returns the command line, starts no server."""
    files = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in files:
        path.write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(_tune, "local_files", lambda *_: files)
    monkeypatch.setattr(_tune, "block_size", lambda _: 8)
    monkeypatch.setattr(_tune, "measure", lambda *_, **__: [point(0, 1.0), point(7, 1.8)])
    return ["tune", *map(str, files)]


def test_a_place_that_cannot_be_written_is_named_before_measuring(
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file" / "x"))
    assert main(measured) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"{tmp_path}/file/x/dspine/depths.json: " in err and "--no-store" in err
    assert main([*measured, "--no-store"]) == 0
    assert "7 tokens a round are fastest here" in capsys.readouterr().out


def test_a_curve_is_shown_although_it_cannot_be_kept(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config" / "dspine" / "depths.json"
    path.mkdir(parents=True)  # a folder in the file's place: nothing can replace it
    assert main(measured) == 1
    out, err = capsys.readouterr()
    assert "7 tokens a round are fastest here" in out and f"dspine: {path}: " in err
    assert main([*measured, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["points"][1]["depth"] == 7 and found["stored"] is None
    assert found["exit_code"] == 1 and str(path) in found["error"]


@pytest.mark.parametrize("words", [[], ["--no-store"], ["--flag=-t"]])
def test_nothing_is_kept_where_no_depth_keeps_the_text(
    words: list[str],
    measured: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    points = [point(0, 1.0), point(3, 2.9, differing=1), point(7, 3.1, differing=2)]
    monkeypatch.setattr(_tune, "measure", lambda *_, **__: points)
    assert main([*measured, *words]) == 1
    out, err = capsys.readouterr()
    assert "3.10 " in out and "<-" not in out and "fastest" not in out
    assert "dspine: no depth keeps plain decoding's text" in err
    assert "1 at depth 3, 2 at depth 7" in err
    assert main([*measured, *words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["n_draft"] is None and found["stored"] is None and found["exit_code"] == 1
    assert "no depth keeps" in found["error"]
    assert stored_depth(Path(measured[1]), Path(measured[2]), ["q8_0"]) is None


def test_other_caches_and_flags_leave_the_choice(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = Path(measured[1]), Path(measured[2])
    assert main([*measured, "--cache-type", "f16"]) == 0
    assert stored_depth(*files, ["f16"]) == 7 and stored_depth(*files, ["q8_0"]) is None
    assert "with f16 caches" in capsys.readouterr().err
    assert main([*measured, "--flag=-t", "--flag=1"]) == 0
    assert stored_depth(*files, ["q8_0"]) is None
    said = "dspine serve --cache-type q8_0 --n-draft 7 -- -t 1"
    assert f"not kept, as it was measured with --flag; to use it: {said}" in capsys.readouterr().err


@pytest.mark.e2e
def test_on_the_golden_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    pair = write_pair(GOLDEN, tmp_path / "models")
    words = ["tune", str(pair.target), str(pair.draft), "--prompts", str(pair.prompts), "--json"]
    words += ["--depths", "7", "--repeats", "1", "-n", "24", "-c", "1024", "--cache-type", "f32"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["depth"] for p in found["points"]] == [0, 7]
    assert all(p["differing"] == 0 for p in found["points"])
    assert found["points"][1]["mean_accepted_length"] > 3.0
    assert found["n_draft"] == stored_depth(pair.target, pair.draft, ["f32"])
    assert Path(found["stored"]).is_relative_to(tmp_path)
