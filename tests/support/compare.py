"""Compares what a pair drafted with the reference, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from dspine import Pair

# Scores closer than this may be ordered either way in float32.
TIE = 1e-3


class Expected(Protocol):
    """The fields of support.reference.Draft."""

    pre_injection: np.ndarray
    post_injection: np.ndarray
    final_hidden: np.ndarray
    logits: np.ndarray
    candidates: np.ndarray
    scores: np.ndarray
    drafted: np.ndarray


def aligned_scores(candidates: np.ndarray, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Bring scores [n, K, K] into the order of `candidates` [n, K]; `ids` is theirs, unordered.

    AssertionError where the two are not the same set.
    """
    aligned = np.empty_like(scores)
    before = np.arange(ids.shape[1])
    for i, (wanted, found) in enumerate(zip(candidates, ids, strict=True)):
        assert sorted(wanted.tolist()) == sorted(found.tolist()), f"candidates of position {i}"
        place = np.array([found.tolist().index(token) for token in wanted])
        aligned[i] = scores[i][np.ix_(before, place)]
        before = place
    return aligned


def worst_errors(pair: Pair, expected: Expected, index: int = 0) -> dict[str, float]:
    """Largest absolute difference of each tensor of block `index` of the last draft."""
    errors: dict[str, float] = {}
    layers = range(len(expected.pre_injection))
    for name in ("pre_injection", "post_injection"):
        found = np.stack([pair.tensor(f"dspine_{name}", layer)[index] for layer in layers])
        errors[name] = float(np.abs(found - getattr(expected, name)).max())
    final = pair.tensor("result_norm")[index]
    errors["final_hidden"] = float(np.abs(final - expected.final_hidden).max())
    logits = pair.tensor("result_output")[index]
    errors["logits"] = float(np.abs(logits - expected.logits).max())
    scores = aligned_scores(expected.candidates, *pair.candidates(index))
    errors["scores"] = float(np.abs(scores - expected.scores).max())
    return errors


def is_decided(expected: Expected) -> bool:
    """No two values of the reference lie so close that float32 may swap them."""
    ordered = np.sort(expected.logits[1:], axis=-1)[:, ::-1]
    k = expected.candidates.shape[1]
    cut = (ordered[:, k - 1] - ordered[:, k]).min()
    row, path = 0, []
    for i, table in enumerate(expected.scores):
        best = np.sort(table[row])[::-1]
        path.append(best[0] - best[1] if k > 1 else np.inf)
        row = expected.candidates[i].tolist().index(expected.drafted[i])
    return bool(min(cut, *path) > TIE)


def draft_together(
    pair: Pair, lengths: Sequence[int]
) -> tuple[list[list[int]], list[tuple[np.ndarray, np.ndarray]]]:
    """Drafted ids and candidate tables of one batch, a block a context of random features."""
    rng = np.random.default_rng(0)
    width = pair.info.n_taps * pair.info.n_embd
    for seq, n in enumerate(lengths):
        pair.draft_feed(seq, rng.standard_normal((n, width)).astype(np.float32), 0)
    blocks = range(len(lengths))
    drafted = pair.draft_many(blocks, [1 + seq for seq in blocks], lengths)
    return [tokens.tolist() for tokens in drafted], [pair.candidates(seq) for seq in blocks]
