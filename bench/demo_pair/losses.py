"""The training objective.

For the rows of a block: cross-entropy to the target's token, and L1 distance and divergence from
the target's distribution, twice: on the block's own logits over a shortlist of the vocabulary, and
on the candidates as the transition cache rescores them. A third term turns every layer's feature
towards the code of its row's token, which is what makes a feature readable as a predecessor. A
fourth pulls the rows that the head reads, the block's and the transition cache's, towards the
target's own: of little text, 576 numbers a row teach more than one token does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_pair.data import Batch
from demo_pair.model import Block, Drafter


@dataclass(frozen=True)
class Weights:
    ce: float = 0.3
    l1: float = 0.7
    kl: float = 0.5
    align: float = 0.3
    imitate: float = 1.0  # falls with the learning rate's share of the time, see train.py
    decay: float = 4.0  # rows further from the anchor matter less: exp(-(row - 1) / decay)


@dataclass(frozen=True)
class Shortlist:
    """Token ids that a step's softmax runs over. `correction` makes the drawn ones stand for the
    rest of the vocabulary: its size over theirs, as a logarithm."""

    ids: Tensor  # [s]
    place: Tensor  # [vocabulary] -> index in ids
    correction: Tensor  # [s]


def make_shortlist(batch: Batch, common: Tensor, vocabulary: int, drawn: int) -> Shortlist:
    needed = [batch.labels[batch.valid], batch.top_ids[batch.valid].flatten(), common]
    forced = torch.cat(needed).unique()
    free = torch.ones(vocabulary, dtype=torch.bool)
    free[forced] = False
    rest = free.nonzero()[:, 0]
    others = rest[torch.randint(len(rest), (drawn,))].unique()
    ids = torch.cat([forced, others])
    place = torch.zeros(vocabulary, dtype=torch.long)
    place[ids] = torch.arange(len(ids))
    correction = torch.zeros(len(ids))
    correction[len(forced) :] = torch.log(torch.tensor(len(rest) / len(others)))
    return Shortlist(ids, place, correction)


@dataclass(frozen=True)
class Rows:
    """The valid rows of a batch, flat [m, ..]."""

    label: Tensor
    previous: Tensor
    top_ids: Tensor
    top_p: Tensor
    weight: Tensor
    final: Tensor  # [m, hidden] float32, the target's normed last row


def flat_rows(batch: Batch, decay: float) -> Rows:
    keep = batch.valid
    previous = torch.cat([batch.anchor_tokens[..., None], batch.labels[..., :-1]], dim=-1)
    steps = torch.arange(batch.labels.shape[-1]).float()
    weight = torch.exp(-steps / decay).expand(keep.shape)[keep]
    return Rows(
        batch.labels[keep],
        previous[keep],
        batch.top_ids[keep],
        batch.top_p[keep],
        weight / weight.sum(),
        batch.finals[keep].float(),
    )


@dataclass(frozen=True)
class Taught:
    """What the target's own row says over the shortlist."""

    logits: Tensor  # [m, s]
    norm: Tensor  # [m, 1] logarithm of the sum
    mean: Tensor  # [m, hidden] expected head row


@torch.no_grad()
def taught(rows: Rows, listed: Tensor, short: Shortlist) -> Taught:
    logits = F.linear(rows.final.to(listed.dtype), listed)
    corrected = logits.float() + short.correction
    norm = corrected.logsumexp(dim=-1, keepdim=True)
    p = (corrected - norm).exp_().to(listed.dtype)
    return Taught(logits, norm, p @ listed)


def block_losses(
    normed: Tensor, logits: Tensor, rows: Rows, short: Shortlist, target: Taught
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, L1 and divergence KL(target || draft) of [m, s] logits, which `normed` rows gave."""
    logits = logits.float()
    norm = (logits + short.correction).logsumexp(dim=-1, keepdim=True)
    ce = norm[:, 0] - logits.gather(1, short.place[rows.label][:, None])[:, 0]
    p = (logits.gather(1, short.place[rows.top_ids]) - norm).exp()
    l1 = (p - rows.top_p).abs().sum(dim=-1)
    l1 = l1 + (p.sum(dim=-1) - rows.top_p.sum(dim=-1)).abs()
    # The expected difference of the logits is the product with the expected head row.
    apart = (rows.final - normed.float()) * target.mean.float()
    kl = (norm - target.norm)[:, 0] + apart.sum(dim=-1)
    return (ce * rows.weight).sum(), (l1 * rows.weight).sum(), (kl * rows.weight).sum()


def imitation(normed: Tensor, rows: Rows) -> Tensor:
    """Squared distance [] to the target's rows, relative to their squared length."""
    distance = (normed.float() - rows.final).square().sum(dim=-1)
    return (distance / rows.final.square().sum(dim=-1) * rows.weight).sum()


def candidate_places(logits: Tensor, rows: Rows, short: Shortlist, top_k: int) -> Tensor:
    """The block's best candidates [m, k] as shortlist indices; the true token is always in."""
    places = logits.detach().topk(top_k, dim=-1).indices
    truth = short.place[rows.label]
    missing = ~(places == truth[:, None]).any(dim=-1)
    places[:, -1] = torch.where(missing, truth, places[:, -1])
    return places


def refined_losses(
    scores: Tensor, places: Tensor, rows: Rows, short: Shortlist, target: Taught
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CE, L1, divergence and weighted accuracy of scores [m, k] of shortlist places [m, k]."""
    logp = scores.float().log_softmax(dim=-1)
    true = short.ids[places] == rows.label[:, None]
    ce = -(logp * true).sum(dim=-1)
    wanted = target.logits.gather(1, places).float().log_softmax(dim=-1)
    q = wanted.exp()
    l1 = (logp.exp() - q).abs().sum(dim=-1)
    kl = (q * (wanted - logp)).sum(dim=-1)
    hit = true.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0].float()
    w = rows.weight
    return (ce * w).sum(), (l1 * w).sum(), (kl * w).sum(), (hit * w).sum()


def objective(
    drafter: Drafter, block: Block, batch: Batch, head: Tensor, short: Shortlist, w: Weights
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one pass, and its parts for the log."""
    keep, rows = batch.valid, flat_rows(batch, w.decay)
    listed = head[short.ids]
    target = taught(rows, listed, short)
    normed = drafter.norm(block.out[:, :, 1:][keep])
    logits = F.linear(normed, listed)
    ce, l1, kl = block_losses(normed, logits, rows, short, target)
    places = candidate_places(logits, rows, short, drafter.shape.top_k)
    refined = drafter.refine(block.last[:, :, 1:][keep], rows.previous)
    # All scores, of which the candidates' are taken: cheaper than a head row a candidate.
    scores = F.linear(refined, listed).gather(1, places)
    ce2, l12, kl2, hit = refined_losses(scores, places, rows, short, target)
    codes = drafter.transfer_codes[rows.label]
    aligned = [F.cosine_similarity(f[:, :, 1:][keep], codes, dim=-1) for f in block.features]
    align = torch.stack([((1 - a) * rows.weight).sum() for a in aligned]).mean()
    like = imitation(normed, rows) + imitation(refined, rows)
    loss = w.ce * (ce + ce2) + w.l1 * (l1 + l12) + w.kl * (kl + kl2)
    loss = loss + w.align * align + w.imitate * like
    parts = {"ce": ce, "l1": l1, "kl": kl, "ce_refined": ce2, "l1_refined": l12}
    parts |= {"kl_refined": kl2, "align": align, "imitate": like, "hit": hit}
    return loss, {name: float(value.detach()) for name, value in parts.items()}
