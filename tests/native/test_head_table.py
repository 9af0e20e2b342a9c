"""Scores from a table in place of head rows (DSPINE_HEAD_TABLE) are those from the rows."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine import DspineError, Pair, PairOptions
from dspine._packing import packed_bytes
from support.compare import aligned_scores, draft_together
from support.drafters import RandomDrafter, convert
from support.gguf_edit import rewrite
from support.golden import GOLDEN, UNIT_CASES, load_case, load_rounds
from support.native_build import program
from support.server import server
from support.targets import Shape, write_random_target
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

OPTION = "DSPINE_HEAD_TABLE"
# Largest error over the largest score. F16 rounds a table value by 2^-12 of it, 2.4e-4.
TOLERANCE = {"f32": 1e-5, "f16": 5e-4}
Scores = tuple[np.ndarray, np.ndarray]


def _scored(files: tuple[Path, Path], case_name: str, options: PairOptions) -> tuple[list, Scores]:
    case = load_case(case_name)
    with Pair(*files, options) as pair:
        pair.draft_feed(0, case.features, 0)
        return pair.draft(0, case.anchor, len(case.features)).tolist(), pair.candidates()


def _error(expected: Scores, found: Scores) -> float:
    """Largest difference of scores over the largest score."""
    scores = aligned_scores(expected[0], *found)
    return float(np.abs(scores - expected[1]).max() / np.abs(expected[1]).max())


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", UNIT_CASES)
def test_golden_case(
    name: str, kind: str, fold: bool, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = load_case(name)
    files = workshop.unit(name, "f32", fold=fold)
    options = dataclasses.replace(EXACT, n_draft=case.rows - 1)
    drafted, gathered = _scored(files, name, options)
    monkeypatch.setenv(OPTION, kind)
    from_table, scores = _scored(files, name, options)
    assert from_table == drafted == case.expected["drafted"].tolist()
    error = _error(gathered, scores)
    print(f"{name} {kind}: {error:.1e}")  # noqa: T201
    assert error < TOLERANCE[kind]
    if case.rows > 2:
        assert error > 0  # computed in another way
    golden = aligned_scores(case.expected["candidates"], *scores)
    scale = np.abs(case.expected["scores"]).max()
    assert np.abs(golden - case.expected["scores"]).max() < max(1e-4, TOLERANCE[kind]) * scale


@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", ["e2e_qwen3", "e2e_hybrid"])
def test_whole_runs(
    name: str, kind: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded text, and in every round the drafts of the gathered rows."""
    recorded = load_rounds(GOLDEN / name / "rounds.json").runs
    found = []
    for value in ("off", kind):
        monkeypatch.setenv(OPTION, value)
        with Pair(*workshop.e2e(name, "f32"), EXACT) as pair:
            runs = [pair.generate(run.prompt, 64) for run in recorded]
        assert [r.tokens.tolist() for r in runs] == [run.plain for run in recorded]
        found.append([(list(x.drafted), x.accepted) for r in runs for x in r.rounds])
    assert found[0] == found[1]


SMALL = RandomDrafter(hidden=96, vocab=128, target_layers=4)
SHAPES = {
    "small": SMALL,
    "odd message and rank": dataclasses.replace(SMALL, rank=21, message=7),
    "message wider than the hidden size": dataclasses.replace(SMALL, message=100),
    "one candidate": dataclasses.replace(SMALL, top_k=1),
    "block of two": dataclasses.replace(SMALL, block=2),
    "block of three": dataclasses.replace(SMALL, block=3),
    "block 16": dataclasses.replace(SMALL, block=16, top_k=8, layers=1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_random_models(name: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any shape, and three sequences in one batch."""
    drafter = SHAPES[name]
    found = []
    for value in ("", "f32"):
        monkeypatch.setenv(OPTION, value)
        with Pair(*workshop.random(drafter), dataclasses.replace(EXACT, n_seq=3)) as pair:
            found.append(draft_together(pair, (30, 4, 17)))
    assert found[0][0] == found[1][0]
    errors = [_error(*both) for both in zip(found[0][1], found[1][1], strict=True)]
    assert max(errors) < TOLERANCE["f32"]
    assert drafter.block == 2 or max(errors) > 0, "the same sums in another order"


HEADS = ("Q4_0", "Q8_0", "Q5_1", "F16", "BF16")
BY_PROGRAM = ("Q4_K", "Q6_K")  # types that gguf-py does not write


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter, and targets that differ in the type of the head."""
    root = tmp_path_factory.mktemp("wide")
    shape = Shape(256, 512, 4)
    plain = write_random_target(root / "plain.gguf", "llama", shape)
    files = {"F32": plain}
    for head in HEADS:
        kind = gguf.GGMLQuantizationType[head]

        def change(name: str, data: np.ndarray, old: gguf.GGMLQuantizationType) -> tuple:
            return (gguf.quantize(data, kind), kind) if name == "output.weight" else (data, old)  # noqa: B023

        files[head] = rewrite(plain, root / f"{head}.gguf", change=change)
    for head in BY_PROGRAM:
        files[head] = root / f"{head}.gguf"
        command = [program("llama-quantize"), "--output-tensor-type", head.lower()]
        command += ["--token-embedding-type", "f32", plain, files[head], "F32", "1"]
        subprocess.run(command, check=True, capture_output=True)
    drafter = RandomDrafter(hidden=256, vocab=512, target_layers=4, block=8, top_k=8)
    files["draft"] = convert(drafter.write(root / "draft"), plain, root / "out")["f32"]
    return files


@pytest.mark.parametrize("head", (*HEADS, *BY_PROGRAM))
def test_types_of_the_head(
    head: str, wide: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the loader puts it; products round what they are multiplied with to 8 bits."""
    features = np.random.default_rng(1).standard_normal((20, 512)).astype(np.float32)
    (stored,) = (t for t in gguf.GGUFReader(wide[head]).tensors if t.name == "output.weight")
    assert stored.tensor_type.name == head
    found = []
    for value in ("off", "f32"):
        monkeypatch.setenv(OPTION, value)
        with Pair(wide[head], wide["draft"], EXACT) as pair:
            pair.draft_feed(0, features, 0)
            pair.draft(0, 3, 20)
            found.append(pair.candidates())
            assert len(pair.generate([1, 2, 3], 20).tokens) == 20
    same = [set(a) == set(b) for a, b in zip(found[0][0], found[1][0], strict=True)]
    assert all(same)
    error = _error(*found)
    print(f"{head}: {error:.1e}")  # noqa: T201
    assert error < 0.02


@pytest.mark.e2e
def test_the_log_says_what_it_takes(
    wide: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dspine._headers import open_header
    from dspine._packing import cpu_features

    monkeypatch.setenv(OPTION, "f16")
    flags = ["-lv", "4", "-t", "1", "--no-warmup", "-c", "512", "-np", "1"]
    with server(tmp_path, (wide["Q4_0"], wide["draft"]), *flags) as running:
        running.complete([1, 2, 3], 8)
    line = next(x for x in running.log.splitlines() if "head table of" in x)
    found = re.search(r"head table of 512 x 12 f16 values, ([\d.]+) MiB in a (\w+) buffer", line)
    assert found and float(found[1]) == pytest.approx(512 * 12 * 2 / 2**20, abs=0.06)
    where = re.search(r"head \(q4_0 in a (\w+) buffer\)", line)
    header = open_header(str(wide["Q4_0"]))
    (head,) = (t for t in header.tensors if t.name == "output.weight")
    assert where
    assert (where[1] in ("AMX", "CPU_REPACK")) == bool(packed_bytes(head, cpu_features()))


@pytest.mark.parametrize("value", ["1", "F16", "q8_0", "true"])
def test_another_value_is_refused(
    value: str, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = workshop.random(SMALL)
    monkeypatch.setenv(OPTION, value)
    with pytest.raises(DspineError, match=f"{OPTION} is '{value}', expected f16, f32 or off"):
        Pair(*files, EXACT)
