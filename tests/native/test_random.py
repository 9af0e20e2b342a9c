"""Random drafters against the numpy reference: windows, shapes and positions that trip code up."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
from dspine import Pair
from support.checkpoint import read_safetensors
from support.compare import is_decided, worst_errors
from support.drafters import RandomDrafter
from support.reference import Draft, Reference
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

TOLERANCE = 2e-4  # random weights make rows of a few units; float32 reaches 2e-5 of them
CAPTURE = dataclasses.replace(EXACT, capture=True, n_ctx=2048)

SMALL = RandomDrafter(hidden=96, vocab=128, target_layers=4)


@dataclass(frozen=True)
class Setting:
    """One random model, and where it drafts."""

    drafter: RandomDrafter
    context: int
    first_position: int = 0
    arch: str = "llama"


def _with(**changes: object) -> RandomDrafter:
    return dataclasses.replace(SMALL, **changes)


LINEAR = (("rope_theta", 5e5), ("rope_type", "linear"), ("factor", 4.0))

SETTINGS = {
    "plain": Setting(SMALL, 20),
    "no context": Setting(SMALL, 0),
    "one layer, block of two, one candidate": Setting(
        _with(layers=1, block=2, top_k=1, taps=(1,)), 5
    ),
    "block of two, many candidates": Setting(_with(block=2, top_k=8), 31),
    "block of three": Setting(_with(block=3, top_k=2), 3),
    "block 16": Setting(_with(block=16, top_k=8, layers=3), 70),
    "one kv head": Setting(_with(heads=8, kv_heads=1, head_dim=16), 40),
    "no grouping": Setting(_with(heads=3, kv_heads=3), 12),
    "wide heads": Setting(_with(heads=2, kv_heads=1, head_dim=64), 33),
    "taps out of order": Setting(_with(taps=(2, 0, 1)), 9),
    "rank wider than message": Setting(_with(rank=64, message=8), 25),
    "message wider than rank": Setting(_with(rank=16, message=48), 25),
    "all sliding": Setting(_with(windows=(0, 1), window=12), 60),
    "window equals block": Setting(_with(windows=(0, 1), window=8), 60),
    "window below block": Setting(_with(windows=(0, 1), window=5), 40),
    "window of one": Setting(_with(windows=(1,), window=1), 40),
    "first slides": Setting(_with(layers=3, windows=(0,), window=9), 50),
    "last slides": Setting(_with(layers=3, windows=(2,), window=9), 50),
    "window beyond the context": Setting(_with(windows=(0, 1), window=500), 30),
    "far positions": Setting(SMALL, 30, first_position=1500),
    "far positions, sliding": Setting(_with(windows=(0,), window=16), 40, first_position=1900),
    "rope theta": Setting(_with(rope=(("rope_theta", 1e7), ("rope_type", "default"))), 44),
    "linear rope scaling": Setting(_with(rope=LINEAR), 44, first_position=900),
    "m-rope target": Setting(SMALL, 40, first_position=1200, arch="qwen35"),
    "m-rope target, sliding": Setting(_with(windows=(1,), window=11), 40, arch="qwen35"),
    "qwen3 target": Setting(SMALL, 25, arch="qwen3"),
}


def _features(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def _reference(drafter: RandomDrafter, target_tensors: dict[str, np.ndarray]) -> Reference:
    embed, head = target_tensors["token_embd.weight"], target_tensors["output.weight"]
    return Reference(drafter.weights(), drafter.config(), embed, head)


def _decided(setting: Setting, workshop: Workshop) -> tuple[RandomDrafter, np.ndarray, Draft]:
    """The first seed whose values lie far enough apart to compare ids exactly."""
    for seed in range(20):
        drafter = dataclasses.replace(setting.drafter, seed=seed)
        target = workshop.random_target(
            setting.arch, drafter.hidden, drafter.vocab, drafter.target_layers
        )
        features = _features(setting.context, len(drafter.taps) * drafter.hidden, seed)
        reference = _reference(drafter, workshop.target_tensors(target))
        expected = reference.draft(features, 7, drafter.block, setting.first_position)
        if is_decided(expected):
            return drafter, features, expected
    raise AssertionError("no seed without near ties")


@pytest.mark.parametrize("name", SETTINGS)
def test_random_model(name: str, workshop: Workshop) -> None:
    setting = SETTINGS[name]
    drafter, features, expected = _decided(setting, workshop)
    target, draft = workshop.random(drafter, setting.arch)
    with Pair(target, draft, CAPTURE) as pair:
        if len(features):
            pair.draft_feed(0, features, setting.first_position)
        drafted = pair.draft(0, 7, setting.first_position + len(features))
        errors = worst_errors(pair, expected)
    assert max(errors.values()) < TOLERANCE, errors
    assert drafted.tolist() == expected.drafted.tolist()


@pytest.mark.parametrize("windows", [(), (0,), (0, 1)])
def test_a_long_run_of_rounds(windows: tuple[int, ...], workshop: Workshop) -> None:
    """Drafting at every step, past the cells of a sliding cache, loses no context row.

    The rows of a block stand past the window of rows that the next round still needs; a cache
    that reuses what the block's own positions no longer see would drop them.
    """
    drafter = _with(windows=windows, window=9 if windows else None)
    target, draft = workshop.random(drafter)
    reference = _reference(drafter, workshop.target_tensors(target))
    features = _features(420, len(drafter.taps) * drafter.hidden)
    options = dataclasses.replace(CAPTURE, n_draft_ubatch=8)
    with Pair(target, draft, options) as pair:
        for start in range(0, len(features), 3):
            pair.draft_feed(0, features[start : start + 3], start)
            drafted = pair.draft(0, start % drafter.vocab, start + 3)
            if start % 60 == 57 or start > 410:
                expected = reference.draft(
                    features[: start + 3], start % drafter.vocab, drafter.block
                )
                worst = max(worst_errors(pair, expected).values())
                assert worst < TOLERANCE, (start, worst)
                if is_decided(expected):
                    assert drafted.tolist() == expected.drafted.tolist(), start


def test_sequences_do_not_see_each_other(workshop: Workshop) -> None:
    drafter = _with(windows=(1,), window=10, block=6)
    target, draft = workshop.random(drafter)
    reference = _reference(drafter, workshop.target_tensors(target))
    lengths, anchors = (44, 5, 19), (1, 2, 3)
    features = [_features(n, len(drafter.taps) * drafter.hidden, n) for n in lengths]
    with Pair(target, draft, dataclasses.replace(CAPTURE, n_seq=3)) as pair:
        for seq, rows in enumerate(features):
            pair.draft_feed(seq, rows, 0)
        pair.draft_many(range(3), anchors, lengths)
        for seq, rows in enumerate(features):
            expected = reference.draft(rows, anchors[seq], drafter.block)
            errors = worst_errors(pair, expected, seq)
            assert max(errors.values()) < TOLERANCE, (seq, errors)


def test_p_min_ends_a_draft_at_the_first_doubt(workshop: Workshop) -> None:
    drafter, features, expected = _decided(SETTINGS["plain"], workshop)
    target, draft = workshop.random(drafter)
    confidences, row = [], 0
    for i, table in enumerate(expected.scores):
        shares = np.exp(table[row] - table[row].max())
        confidences.append(1 / shares.sum())
        row = expected.candidates[i].tolist().index(expected.drafted[i])
    for p_min in (0.3, 0.5, 0.9, 1.0):
        kept = next((i for i, c in enumerate(confidences) if c < p_min), len(confidences))
        with Pair(target, draft, dataclasses.replace(EXACT, p_min=p_min)) as pair:
            pair.draft_feed(0, features, 0)
            drafted = pair.draft(0, 7, len(features))
        assert drafted.tolist() == expected.drafted[:kept].tolist(), p_min


def test_weights_are_read_as_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The support code itself: what a random drafter writes is what the reference gets."""
    folder = SMALL.write(tmp_path_factory.mktemp("drafter"))
    written = read_safetensors(folder / "model.safetensors")
    for name, value in SMALL.weights().items():
        assert (written[name] == value).all(), name
