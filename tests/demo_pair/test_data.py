"""Training data: what stands in a block's rows, and texts that are collected in order."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair import collect  # noqa: E402
from demo_pair.collect import TOP, Store  # noqa: E402
from demo_pair.data import HIDDEN, TOP_USED, Batch, Corpus, draw_anchors  # noqa: E402
from demo_pair.evaluate import first_difference  # noqa: E402
from demo_pair.prompts import Prompt  # noqa: E402
from demo_pair.texts import Text, texts_of  # noqa: E402

WIDTH = 4  # of the tapped rows
LENGTHS = ((5, 12), (3, 9))  # of prompts and answers


def append(store: Store, first: int, prompt: int, answer: int) -> None:
    """A sequence whose every value tells its position: `first` + position."""
    numbers = np.arange(first, first + prompt + answer)
    store.append(
        Text("chat", False, numbers[:prompt].tolist(), numbers[prompt:].tolist()),
        {
            "tokens": numbers.astype(np.int32),
            "taps": np.repeat(numbers, WIDTH).reshape(-1, WIDTH).astype(np.float16),
            "top_ids": (numbers[:, None] * 100 + np.arange(TOP)).astype(np.int32),
            "top_lp": np.repeat(-numbers / 1000, TOP).reshape(-1, TOP).astype(np.float16),
            "finals": np.repeat(numbers, HIDDEN).reshape(-1, HIDDEN).astype(np.float16),
        },
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    store = Store(tmp_path)
    for number, (prompt, answer) in enumerate(LENGTHS):
        append(store, 100 * (number + 1), prompt, answer)
    return Corpus([tmp_path], WIDTH, with_finals=True)


def test_rows_of_a_block(corpus: Corpus) -> None:
    anchors = np.array([[5, 15], [3, 4]])
    batch = corpus.batch(corpus.sequences, anchors, 4)
    first = torch.tensor([100, 200])[:, None]
    assert torch.equal(batch.anchor_tokens, first + torch.from_numpy(anchors))
    places = torch.from_numpy(anchors)[..., None] + torch.arange(1, 4)
    assert torch.equal(batch.valid, places <= torch.tensor([16, 11])[:, None, None])
    right = batch.valid
    expected = (first[..., None] + places)[right]
    assert torch.equal(batch.labels[right], expected)
    # what the target said, and held, one position earlier
    assert torch.equal(batch.top_ids[right][:, 0], 100 * (expected - 1))
    assert torch.equal(batch.finals[right][:, 0].long(), expected - 1)
    assert torch.allclose(batch.top_p[right][:, 0], (-(expected - 1) / 1000).exp(), atol=1e-3)
    assert batch.top_ids.shape[-1] == TOP_USED
    # the context reaches to the last anchor, which it does not hold
    assert batch.taps.shape[1] == 15 and batch.taps[0, -1, 0] == 114 and batch.taps[1, 11, 0] == 211


def test_blocks_begin_in_the_answer(corpus: Corpus) -> None:
    batch: Batch = corpus.sample(np.random.default_rng(1), 8, 6, 4)
    ends = {100: (105, 116), 200: (203, 211)}
    for tokens in batch.anchor_tokens.tolist():
        start, end = ends[tokens[0] // 100 * 100]
        assert all(start <= token < end for token in tokens) and tokens == sorted(set(tokens))


def test_anchors_are_drawn_twice_only_where_they_must() -> None:
    rng = np.random.default_rng(1)
    assert draw_anchors(rng, 7, 11, 4).tolist() == [7, 8, 9, 10]
    assert set(draw_anchors(rng, 7, 9, 50)) == {7, 8}


def test_an_interrupted_collection_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers come in any order, and stand in that of the prompts."""
    prompts = [Prompt("chat", str(n)) for n in range(6)]
    monkeypatch.setattr(collect, "held_out", lambda: prompts)
    asked: list[int] = []
    broken = [3]

    async def ask(_: object, request: collect.Request, __: int) -> Text:
        number = int(request.prompt.text)
        await asyncio.sleep(0.02 * (6 - number))  # the last one first
        if number in broken:
            raise OSError("the server is gone")
        asked.append(number)
        return Text("chat", False, [number], [number])

    monkeypatch.setattr(collect, "ask", ask)
    args = argparse.Namespace(
        out=tmp_path, held_out=True, server="http://127.0.0.1:1", parallel=6, n_predict=1
    )
    with pytest.raises(OSError, match="gone"):
        asyncio.run(collect.say(args))
    assert 5 in asked and not list(texts_of(tmp_path / "texts.jsonl"))
    broken.clear()
    asyncio.run(collect.say(args))
    assert [text.prompt for text in texts_of(tmp_path / "texts.jsonl")] == [[n] for n in range(6)]


def test_a_text_that_ends_early_differs() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == first_difference([1, 2], [1, 2, 3]) == 2
