"""The training objective against plain formulas, and the shortlist that stands for all tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
F = torch.nn.functional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair import losses  # noqa: E402
from demo_pair.data import HIDDEN, TOP_USED, Batch  # noqa: E402

VOCABULARY, ROWS, K = 60, 5, 4


@pytest.fixture
def head() -> Any:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1)) / 20


def batch_of(head: Any) -> Batch:
    """One sequence, two blocks of ROWS rows and an anchor; the last row of the second is void."""
    made = torch.Generator().manual_seed(2)
    finals = torch.randn(1, 2, ROWS, HIDDEN, generator=made)
    p = (finals @ head.T).softmax(dim=-1)
    top_p, top_ids = p.topk(TOP_USED, dim=-1)
    valid = torch.ones(1, 2, ROWS, dtype=torch.bool)
    valid[0, 1, -1] = False
    anchors = torch.tensor([[3, 9]])
    return Batch(
        torch.zeros(1, 9, 1), anchors, anchors + 2, top_ids[..., 0], valid, top_ids, top_p, finals
    )


@pytest.fixture
def rows(head: Any) -> losses.Rows:
    return losses.flat_rows(batch_of(head), decay=4.0)


def whole(head: Any) -> losses.Shortlist:
    """A shortlist of the whole vocabulary."""
    ids = torch.arange(VOCABULARY)
    return losses.Shortlist(ids, ids, torch.zeros(VOCABULARY))


def test_the_divergence_is_that_of_the_two_distributions(head: Any, rows: losses.Rows) -> None:
    short = whole(head)
    normed = rows.final + torch.randn(rows.final.shape, generator=torch.Generator().manual_seed(3))
    logits = normed @ head.T
    target = losses.taught(rows, head, short)
    ce, l1, kl = losses.block_losses(normed, logits, rows, short, target)
    ours, theirs = logits.log_softmax(-1), (rows.final @ head.T).log_softmax(-1)
    expected = (theirs.exp() * (theirs - ours)).sum(dim=-1)
    assert kl.item() == pytest.approx((expected * rows.weight).sum().item(), rel=1e-4)
    label = -ours.gather(1, rows.label[:, None])[:, 0]
    assert ce.item() == pytest.approx((label * rows.weight).sum().item(), rel=1e-5)
    assert l1 > 0


def test_nothing_is_lost_where_the_rows_are_the_targets(head: Any, rows: losses.Rows) -> None:
    short = whole(head)
    logits = rows.final @ head.T
    target = losses.taught(rows, head, short)
    _, l1, kl = losses.block_losses(rows.final, logits, rows, short, target)
    places = losses.candidate_places(logits, rows, short, K)
    _, l1_refined, kl_refined, hit = losses.refined_losses(
        logits.gather(1, places), places, rows, short, target
    )
    assert [x.item() for x in (l1, kl, l1_refined, kl_refined)] == pytest.approx([0] * 4, abs=1e-5)
    assert losses.imitation(rows.final, rows) == 0 and hit.item() == pytest.approx(1)


def test_weights_fall_with_the_row_and_void_rows_have_none(rows: losses.Rows) -> None:
    assert len(rows.label) == 2 * ROWS - 1 and rows.weight.sum().item() == pytest.approx(1)
    ratio = rows.weight[1:ROWS] / rows.weight[: ROWS - 1]
    assert torch.allclose(ratio, torch.tensor(-1 / 4).exp())


def test_drawn_tokens_stand_for_the_rest_of_the_vocabulary(head: Any) -> None:
    batch = batch_of(head)
    torch.manual_seed(4)
    short = losses.make_shortlist(batch, torch.arange(8), VOCABULARY, 12)
    drawn = short.correction > 0
    stood_for = short.correction[drawn].exp().sum().item()
    assert stood_for == pytest.approx(VOCABULARY - int((~drawn).sum()))
    assert (short.ids[short.place[batch.labels]] == batch.labels).all()


def test_imitation_is_relative_to_the_targets_rows(rows: losses.Rows) -> None:
    assert losses.imitation(0 * rows.final, rows).item() == pytest.approx(1)
    assert losses.imitation(1.5 * rows.final, rows).item() == pytest.approx(0.25)
