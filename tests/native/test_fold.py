"""A folded drafter drafts what the plain one drafts: the table holds what is else computed."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine import LoadError, Pair
from support.compare import aligned_scores, draft_together
from support.drafters import RandomDrafter
from support.gguf_edit import rewrite
from support.golden import GOLDEN, UNIT_CASES, load_case, load_rounds
from support.native_build import program
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

TOLERANCE = 1e-4  # as in test_golden.py
TABLE, CODES = "transfer_folded.weight", "transfer_codes.weight"
F32 = gguf.GGMLQuantizationType.F32


def _names(path: Path) -> set[str]:
    return {t.name for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", UNIT_CASES)
def test_unit_case(name: str, workshop: Workshop) -> None:
    case = load_case(name)
    target, draft = workshop.unit(name, "f32", fold=True)
    assert TABLE in _names(draft) and CODES not in _names(draft)
    options = dataclasses.replace(EXACT, n_draft=case.rows - 1)
    with Pair(target, draft, options) as pair:
        pair.draft_feed(0, case.features, 0)
        drafted = pair.draft(0, case.anchor, len(case.features))
        scores = aligned_scores(case.expected["candidates"], *pair.candidates())
    np.testing.assert_allclose(scores, case.expected["scores"], rtol=0, atol=TOLERANCE)
    assert drafted.tolist() == case.expected["drafted"].tolist()


@pytest.mark.parametrize(
    ("name", "draft_name", "rounds"),
    [
        ("e2e_qwen3", "draft", "rounds"),
        ("e2e_hybrid", "draft", "rounds"),
        ("e2e_hybrid", "draft_fit", "rounds_fit"),
    ],
)
def test_whole_runs(name: str, draft_name: str, rounds: str, workshop: Workshop) -> None:
    """The recorded text; drafts and acceptance of every round as with the plain file."""
    recorded = load_rounds(GOLDEN / name / f"{rounds}.json")
    found = []
    for fold in (False, True):
        target, draft = workshop.e2e(name, "f32", draft_name, fold=fold)
        with Pair(target, draft, EXACT) as pair:
            runs = [pair.generate(run.prompt, 64) for run in recorded.runs]
        assert [r.tokens.tolist() for r in runs] == [run.plain for run in recorded.runs]
        found.append([(list(x.drafted), x.accepted) for r in runs for x in r.rounds])
    assert found[0] == found[1]
    assert sum(accepted for _, accepted in found[1]) > 0


SMALL = RandomDrafter(hidden=96, vocab=128, target_layers=4)
SHAPES = {
    "2M = R": SMALL,
    "message wider than rank": dataclasses.replace(SMALL, rank=16, message=48),
    "odd message and rank": dataclasses.replace(SMALL, rank=21, message=7),
    "block of two": dataclasses.replace(SMALL, block=2, top_k=8),
    "block of three": dataclasses.replace(SMALL, block=3, top_k=2),
    "block 16": dataclasses.replace(SMALL, block=16, top_k=8, layers=3),
    "one layer": dataclasses.replace(SMALL, layers=1, taps=(1,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_random_models(name: str, workshop: Workshop) -> None:
    """Any shape, and three sequences in one batch."""
    drafter = SHAPES[name]
    found = []
    for fold in (False, True):
        target, draft = workshop.random(drafter, fold=fold)
        assert (TABLE in _names(draft)) == fold
        with Pair(target, draft, dataclasses.replace(EXACT, n_seq=3)) as pair:
            found.append(draft_together(pair, (30, 4, 17)))
    (plain, tables), (folded, others) = found
    assert folded == plain
    for (ids, scores), other in zip(tables, others, strict=True):
        np.testing.assert_allclose(aligned_scores(ids, *other), scores, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_quantized(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    """It loads, its table is quantized, and llama-quantize's file drafts the same."""
    case = load_case("b16_k16")
    target, draft = workshop.unit("b16_k16", kind, fold=True)
    _, base = workshop.unit("b16_k16", "bf16", fold=True)
    theirs = tmp_path / "theirs.gguf"
    command = [program("llama-quantize"), base, theirs, kind.upper(), "1"]
    subprocess.run(command, check=True, capture_output=True)
    drafted = []
    for path in (draft, theirs):
        (table,) = (t for t in gguf.GGUFReader(path).tensors if t.name == TABLE)
        assert table.tensor_type.name == {"q8_0": "Q8_0", "q4_k_m": "Q4_K"}[kind]
        with Pair(target, path, EXACT) as pair:
            pair.draft_feed(0, case.features, 0)
            drafted.append(pair.draft(0, case.anchor, len(case.features)).tolist())
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) == case.rows - 1


def _refused(target: Path, draft: Path, match: str) -> None:
    with pytest.raises(LoadError, match=match) as caught:
        Pair(target, draft, EXACT)
    assert "\n" not in str(caught.value).strip()


def test_neither_table(workshop: Workshop, tmp_path: Path) -> None:
    target, draft = workshop.random(SMALL, fold=True)

    def without(name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple | None:
        return None if name == TABLE else (data, kind)

    bare = rewrite(draft, tmp_path / "d.gguf", change=without)
    _refused(target, bare, f"{CODES} or {TABLE} expected, neither found")


def test_both_tables(workshop: Workshop, tmp_path: Path) -> None:
    target, draft = workshop.random(SMALL, fold=True)
    codes = np.zeros((SMALL.vocab, SMALL.rank), np.float32)
    both = rewrite(draft, tmp_path / "d.gguf", added={CODES: (codes, F32)})
    _refused(target, both, f"{CODES} or {TABLE} expected, both found")


@pytest.mark.parametrize("rows", [slice(None, -1), (slice(None), slice(1, None))])
def test_a_misshapen_table(rows: slice, workshop: Workshop, tmp_path: Path) -> None:
    target, draft = workshop.random(SMALL, fold=True)

    def cut(name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple:
        return (np.ascontiguousarray(data[rows]) if name == TABLE else data), kind

    _refused(target, rewrite(draft, tmp_path / "d.gguf", change=cut), TABLE)
