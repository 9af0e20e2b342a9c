"""The chi-square test of the sampled text finds a wrong distribution and passes the right one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the distribution test needs scipy")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair.distribution import compare, kept, verified  # noqa: E402

EXPECTED = {10: 0.5, 11: 0.3, 12: 0.1999, 13: 0.0001}


def drawn(p: list[float], count: int = 20_000) -> Counter[int]:
    rng = np.random.default_rng(2)
    return Counter(rng.choice([10, 11, 12, 13], count, p=p).tolist())


def test_the_right_distribution_passes() -> None:
    found = compare(drawn([0.5, 0.3, 0.1999, 0.0001]), EXPECTED)
    assert found["p_value"] > 0.01 and found["cells"] == 4
    assert sum(found["observed"]) == 20_000, "rare tokens are counted, in a cell of their own"


def test_two_percent_too_much_is_found() -> None:
    assert compare(drawn([0.52, 0.28, 0.1999, 0.0001]), EXPECTED)["p_value"] < 0.001


def test_a_token_that_cannot_be_drawn_is_found() -> None:
    seen = drawn([0.5, 0.3, 0.1999, 0.0001]) + Counter([99])
    assert compare(seen, EXPECTED) == {"samples": 20_001, "outside": 1, "p_value": 0.0}


@pytest.mark.parametrize(("hits", "drafted"), [(0, 0), (0, 9000), (8000, 9000)])
def test_samples_that_were_not_drafted_test_nothing(hits: int, drafted: int) -> None:
    with pytest.raises(SystemExit, match=f"{hits} accepted drafts in {drafted} samples"):
        verified(hits, drafted)
    assert verified(drafted + 1, drafted + 1)["accepted_drafts"] == drafted + 1


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    p = np.array([0.6, 0.3, 0.08, 0.02])
    found = kept(np.log(p).astype(np.float32))
    assert list(found) == [0, 1, 2]
    assert sum(found.values()) == pytest.approx(1.0) and found[0] == pytest.approx(0.6 / 0.98)
