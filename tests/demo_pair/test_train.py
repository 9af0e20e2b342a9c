"""The training loop's guards, without a target: what is not finite does not stay."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair import train  # noqa: E402
from demo_pair.train import Clock, Trainer  # noqa: E402


class Line(torch.nn.Module):
    """One weight, in place of a drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.shape = argparse.Namespace(block=16)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Its losses are the weight times what `factors` has for each pass."""
    made: Any = Trainer.__new__(Trainer)
    made.args = argparse.Namespace(
        run=tmp_path, blocks=1, sequences=1, accumulate=1, workers=1, rate=0.1, muon_rate=0.1,
        weight_decay=0.0, minutes=1.0, check_minutes=99.0,
    )  # fmt: skip
    made.rank, made.step, made.left_out, made.log = 0, 0, 0, []
    made.drafter, made.rng, made.clock = Line(), np.random.default_rng(1), Clock(1.0)
    made.clock.start()
    made.average = {"weight": torch.ones(1)}
    made.optimizers = [torch.optim.SGD(made.drafter.parameters(), lr=0.1)]
    made.corpus = argparse.Namespace(sample=lambda *_: None)
    made.factors = [1.0]
    monkeypatch.setattr(
        Trainer,
        "one_pass",
        lambda self, _: ((self.drafter.weight * self.factors.pop(0)).sum(), {}),
    )
    return made


def test_a_step_that_is_not_finite_is_left_out(
    trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.factors = [float("nan"), 1.0]
    trainer.train_step()
    assert trainer.drafter.weight.item() == 1 and trainer.step == 1
    assert "step 0: the gradient is not finite, left out" in capsys.readouterr().err
    trainer.train_step()
    assert trainer.drafter.weight.item() < 1 and trainer.step == 2
    trainer.factors = [float("inf")] * (train.MOST_LEFT_OUT + 1)
    with pytest.raises(SystemExit, match="without a finite gradient"):
        for _ in range(train.MOST_LEFT_OUT + 1):
            trainer.train_step()


def test_weights_that_are_not_finite_do_not_replace_a_state(trainer: Any) -> None:
    trainer.step = 7
    trainer.save()
    kept = (trainer.args.run / "state.pt").read_bytes()
    with torch.no_grad():
        trainer.drafter.weight.fill_(float("nan"))
    with pytest.raises(SystemExit, match="not finite"):
        trainer.save()
    assert (trainer.args.run / "state.pt").read_bytes() == kept
    again = trainer
    again.step = 0
    again.resume()
    assert again.step == 7 and again.drafter.weight.item() == 1


def test_blocks_grow_with_the_time() -> None:
    clock = Clock(10.0)
    found = []
    for minutes in (0.1, 5.4, 5.6, 8.9, 9.1, 10.0, 99.0):
        clock.before = minutes * 60
        clock.start()
        found.append(clock.rows(16))
    assert found == [4, 4, 8, 8, 16, 16, 16]
    assert clock.rows(8) == 8, "a smaller block stays as it is"
