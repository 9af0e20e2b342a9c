"""`draft`: random drafters of all families, and the parts made of the calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine._headers import open_header
from dspine_bench import draft, peers
from dspine_bench.draft import Choices, summarize, time_calls
from dspine_bench.errors import BenchError
from dspine_bench.peers import (
    FAMILIES,
    SCALE,
    Extras,
    drafter_sizes,
    write_drafter,
    write_target,
)
from dspine_bench.schema import DraftSample
from dspine_bench.synthetic import Shape

TINY = Shape(320, 2, 4, 2, 64, 512, 1024, 32, 32, 5, 8)
EXTRAS = Extras()


def test_families_share_the_backbone() -> None:
    sizes = {family: drafter_sizes(family, TINY, EXTRAS) for family in FAMILIES}
    backbone = sizes["dflash"]
    assert all(backbone.items() <= sizes[family].items() for family in FAMILIES)
    own = {family: set(sizes[family]) - set(backbone) for family in FAMILIES}
    assert "transfer_codes.weight" in own["dspine"] and "markov_w1.weight" in own["dspark"]
    assert "selector_hidden.weight" in own["dflash2"] and not own["dflash"]


def test_the_true_shape_has_the_published_size() -> None:
    sizes = drafter_sizes("dspine", peers.SHAPES["27b"], EXTRAS)
    values = 0
    for size in sizes.values():
        count = 1
        for n in size:
            count *= n
        values += count
    assert values == 2_025_387_777 - 1  # without the checkpoint's flag


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_k"])
def test_files(kind: str, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "d.gguf", "dspine", TINY, kind, EXTRAS)
    header = open_header(str(path))
    types = {t.name: t.type.lower() for t in header.tensors}
    assert {t.name: t.shape[::-1] for t in header.tensors} == drafter_sizes("dspine", TINY, EXTRAS)
    assert types["blk.0.inject_write.weight"] == "bf16" and types["output_norm.weight"] == "f32"
    # 320 is no multiple of 256: such rows get a type of smaller blocks
    assert types["blk.0.ffn_down.weight"] == kind
    assert types["blk.0.ffn_up.weight"] == ("q8_0" if kind == "q4_k" else kind)


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_k"])
def test_noise_has_one_spread_in_every_type(kind: str, tmp_path: Path) -> None:
    wide = Shape(512, 1, 4, 2, 64, 512, 4096, 64, 32, 2, 4)
    reader = gguf.GGUFReader(write_target(tmp_path / "t.gguf", wide, kind))
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    head = by_name["output.weight"]
    assert head.tensor_type.name == ("Q6_K" if kind == "q4_k" else kind.upper())
    for tensor in (head, by_name["blk.0.ffn_up.weight"]):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all() and SCALE / 2 < values.std() < SCALE * 2, tensor.name


def test_shapes_that_a_family_cannot_have(tmp_path: Path) -> None:
    narrow = Shape(256, 2, 4, 2, 64, 512, 1024, 32, 32, 5, 8)
    with pytest.raises(BenchError, match="cannot hold"):
        write_drafter(tmp_path / "a.gguf", "dspine", narrow, "q8_0", EXTRAS)
    with pytest.raises(BenchError, match="multiple of its groups"):
        write_drafter(tmp_path / "a.gguf", "dflash2", Shape(288), "q8_0", EXTRAS)
    assert not list(tmp_path.iterdir())


def test_every_call_in_every_turn() -> None:
    seen: list[str] = []

    def call(name: str) -> draft.Call:
        def timed() -> float:
            seen.append(name)
            return float(len(seen))

        return draft.Call(name, "graph", 16, timed)

    samples = time_calls([call("a"), call("b")], Choices(repeats=3, calls=2), lambda *_: None)
    assert seen[:2] == ["a", "b"] and len(seen) == 2 + 3 * 2 * 2, "the first turn is dropped"
    assert len(samples) == 12 and {s.repeat for s in samples} == {0, 1, 2}


def test_parts_add_up() -> None:
    """Made-up costs: 2 a layer, head 5, injection 0.3 a layer, candidates 1, cache 4, ..."""
    layers, head, inject, candidates, cache = 2.0, 5.0, 0.3, 1.0, 4.0
    dflash = {5: 5 * layers + head, 1: layers + head}
    cut = {n: dflash[n] + n * inject + candidates for n in (5, 1)}
    calls = {
        ("dflash", "graph"): dflash[5], ("dflash 1 layer", "graph"): dflash[1],
        ("dspine", "cut"): cut[5], ("dspine 1 layer", "cut"): cut[1],
        ("dspine", "graph"): cut[5] + cache, ("dspine", "draft"): cut[5] + cache + 0.5,
        ("dflash2", "graph"): dflash[5] + 3, ("dspark", "graph"): dflash[5] + 7,
        ("dflash", "block"): dflash[5] + 0.2, ("dflash", "walk"): 0.1,
        ("dspark", "block"): dflash[5] + 7.2, ("dspark", "walk"): 0.1,
    }  # fmt: skip
    samples = [
        DraftSample(case=case, call=call, rows=16, repeat=r, ms=ms * (1 + r))
        for (case, call), ms in calls.items()
        for r in range(3)
    ]
    samples += [
        DraftSample(case="dspine", call="context", rows=rows, repeat=r, ms=1.0)
        for rows in draft.FEATURE_ROWS
        for r in range(3)
    ]
    found = {(r.family, r.part): r.ms for r in summarize("made-up", 5, samples)}
    expected = {
        ("dspine", "layers"): 5 * layers, ("dspine", "head"): head,
        ("dspine", "adjacent injection"): 5 * inject, ("dspine", "candidates"): candidates,
        ("dspine", "transition cache"): cache, ("dspine", "walk"): 0.5,
        ("dflash2", "convolutions, selector"): 3, ("dspark", "Markov head"): 7,
        ("dflash", "walk"): 0.3, ("dspark", "draft"): dflash[5] + 7.3,
    }  # fmt: skip
    for key, ms in expected.items():
        assert found[key].min == pytest.approx(ms), key
        assert found[key].median == pytest.approx(2 * ms), key


@pytest.mark.native
def test_all_families_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.SHAPES, "tiny", TINY)
    choices = Choices(("tiny",), repeats=1, calls=1, context=32, widths=(1, 4), threads=1)
    found = draft.run(choices, tmp_path, lambda *_: None)
    assert {(r.family, r.part) for r in found.summary} >= {
        ("dspine", "transition cache"),
        ("dflash2", "draft"),
        ("dspark", "draft"),
        ("dflash", "walk"),
        ("target", "verify"),
    }
    assert all(s.ms > 0 for s in found.samples)
    assert not list(tmp_path.iterdir()), "the models are removed"


@pytest.mark.native
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_all_layers_has_room(family: peers.Family, tmp_path: Path) -> None:
    """llama.cpp aborts where a graph has more nodes than it allots: in a process of its own."""
    layers = max(shape.layers for shape in peers.SHAPES.values())
    shape = replace(TINY, hidden=576, layers=layers)
    drafter = write_drafter(tmp_path / "d.gguf", family, shape, "q8_0", EXTRAS)
    target = write_target(tmp_path / "t.gguf", shape, "q8_0")
    code = (
        "import sys; from pathlib import Path; from dspine_bench.rawllama import *;"
        "t = Context(Model(Path(sys.argv[1]), (KEEP_HEAD_ROWS, 1)), 352, 1);"
        "c = Context(Model(Path(sys.argv[2])), 352, 1, t); print(c.tokens(16, 0, logits=False) > 0)"
    )
    words = [sys.executable, "-c", code, str(target), str(drafter)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr[-2000:]


@pytest.mark.native
def test_a_target_alone(tmp_path: Path) -> None:
    from dspine_bench.rawllama import Context, Model

    path = write_target(tmp_path / "t.gguf", TINY, "q8_0")
    with Context(Model(path), 64, 1) as context:
        context.keep(8, 0)
        assert context.tokens(4, 8, logits=True) > 0
        broken: Callable[[], float] = lambda: context.tokens(4, 99, logits=True)  # noqa: E731
        with pytest.raises(BenchError, match="4 tokens at 99"):
            broken()
    with pytest.raises(BenchError, match="cannot load"):
        Model(tmp_path / "absent.gguf")
