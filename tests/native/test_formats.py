"""Quantized drafters, quantized caches, and heads that the CPU backend would repack."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine import Pair, PairOptions
from support.compare import aligned_scores
from support.drafters import RandomDrafter, convert
from support.gguf_edit import rewrite
from support.golden import GOLDEN, load_case, load_rounds
from support.native_build import program
from support.targets import Shape, write_random_target
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

# Smallest share of drafted ids that must equal the F32 file's on one block of 15. Random
# weights have narrow margins; the trained pair is measured in the end-to-end tests.
AGREEMENT = {"bf16": 1.0, "q8_0": 0.5, "q4_k_m": 0.3}


@pytest.mark.parametrize("kind", AGREEMENT)
def test_file_types_draft(kind: str, workshop: Workshop) -> None:
    case = load_case("b16_k16")
    target, draft = workshop.unit("b16_k16", kind)
    with Pair(target, draft, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        drafted = pair.draft(0, case.anchor, len(case.features))
    agreement = float((drafted == case.expected["drafted"]).mean())
    print(f"{kind}: {agreement:.2f} of the drafted ids equal those of F32")  # noqa: T201
    assert agreement >= AGREEMENT[kind]


def test_llama_quantize_keeps_the_bridge(workshop: Workshop, tmp_path: Path) -> None:
    target, draft = workshop.unit("b16_k16", "bf16")
    out = tmp_path / "quantized.gguf"
    subprocess.run(
        [program("llama-quantize"), draft, out, "Q4_K_M", "1"], check=True, capture_output=True
    )
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(out).tensors}
    bridge = {name: kind for name, kind in types.items() if "inject_" in name}
    assert bridge and set(bridge.values()) <= {
        gguf.GGMLQuantizationType.BF16,
        gguf.GGMLQuantizationType.F32,
    }
    assert types["transfer_codes.weight"] == gguf.GGMLQuantizationType.Q4_K
    case = load_case("b16_k16")
    with Pair(target, out, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        quantized = pair.draft(0, case.anchor, len(case.features)).tolist()
    target, ours = workshop.unit("b16_k16", "q4_k_m")
    with Pair(target, ours, EXACT) as pair:
        pair.draft_feed(0, case.features, 0)
        assert pair.draft(0, case.anchor, len(case.features)).tolist() == quantized


@pytest.mark.parametrize("cache", ["q8_0", "f16", "bf16"])
def test_cache_types(cache: str, workshop: Workshop) -> None:
    """Caches below F32 with flash attention on: text as in plain decoding, drafts nearly so."""
    recorded = load_rounds(GOLDEN / "e2e_qwen3" / "rounds.json")
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    options = PairOptions(
        n_ctx=1024,
        n_threads=1,
        flash_attn="on",
        type_k=cache,
        type_v=cache,
        type_k_draft=cache,
        type_v_draft=cache,
    )
    accepted = rounds = 0
    with Pair(target, draft, options) as pair:
        for run in recorded.runs:
            done = pair.generate(run.prompt, 64)
            assert done.tokens.tolist() == run.plain
            accepted += done.stats.accepted
            rounds += done.stats.rounds
    assert (accepted + rounds) / rounds >= 0.9 * recorded.mean_accepted_length


HEADS = {
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_K": "Q4_K",
    "Q6_K": "Q6_K",
}


def _with_head(name: str, source: Path, path: Path) -> Path:
    """The target with a quantized head; K-quants come from llama-quantize."""
    kind = HEADS[name]
    if isinstance(kind, str):
        command = [program("llama-quantize"), "--output-tensor-type", kind.lower()]
        command += ["--token-embedding-type", "f32", "--allow-requantize"]
        subprocess.run([*command, source, path, "F32", "1"], check=True, capture_output=True)
        return path

    def change(tensor: str, data: np.ndarray, old: gguf.GGMLQuantizationType) -> tuple:
        if tensor != "output.weight":
            return data, old
        return gguf.quantize(data, kind), kind

    return rewrite(source, path, change=change)


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_would_be_repacked(head: str, tmp_path: Path) -> None:
    """The scores gather rows of the target's head, which a repacked one does not have."""
    drafter = RandomDrafter(hidden=256, vocab=512, target_layers=4, block=8, top_k=8)
    shape = Shape(256, 512, 4)
    plain = write_random_target(tmp_path / "plain.gguf", "llama", shape)
    target = _with_head(head, plain, tmp_path / "target.gguf")
    stored = {t.name: t for t in gguf.GGUFReader(target).tensors}["output.weight"]
    assert stored.tensor_type.name == head
    draft = convert(drafter.write(tmp_path / "draft"), target, tmp_path / "out")["f32"]
    # The same values in F32: what the head is worth, whatever holds it.
    wide = gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    same = write_random_target(tmp_path / "same.gguf", "llama", shape, head=wide)
    features = np.random.default_rng(1).standard_normal((20, 512)).astype(np.float32)
    found = []
    for path in (target, same):
        with Pair(path, draft, EXACT) as pair:
            pair.draft_feed(0, features, 0)
            pair.draft(0, 3, 20)
            found.append(pair.candidates())
            assert len(pair.generate([1, 2, 3], 20).tokens) == 20
    shared = [len(set(a) & set(b)) for a, b in zip(found[0][0], found[1][0], strict=True)]
    # The quantized product also rounds the activations, to 8 bits.
    assert min(shared) >= 6, shared
    if min(shared) == 8:
        scores = aligned_scores(found[1][0], *found[0])
        assert np.abs(scores - found[1][1]).max() < 0.1
