"""What must be refused when a pair is opened: one line that names what and why."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine import LoadError, Pair
from dspine._library import library
from support.drafters import RandomDrafter, convert
from support.gguf_edit import Change, Typed, rewrite
from support.targets import Shape, write_random_target
from support.workshop import EXACT, Workshop

pytestmark = pytest.mark.native

U32 = gguf.GGUFValueType.UINT32
I32_ARRAY = (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
STRING = gguf.GGUFValueType.STRING
# Keys of the target's fingerprint: without them the checks behind it are reached.
NO_FINGERPRINT: dict[str, Typed | None] = {
    f"dspine.target.{key}": None
    for key in (
        "architecture",
        "name",
        "embedding_length",
        "block_count",
        "vocab_size",
        "tokens_fnv1a64",
    )
}


def _refused(target: Path, draft: Path, match: str) -> None:
    library()  # a missing one would be refused as well
    with pytest.raises(LoadError, match=match) as caught:
        Pair(target, draft, EXACT)
    assert "\n" not in str(caught.value).strip()


def _without(name: str) -> Change:
    def change(tensor: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple | None:
        return None if tensor == name else (data, kind)

    return change


def _narrowed(name: str) -> Change:
    def change(tensor: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple:
        return (data[:-1] if tensor == name else data), kind

    return change


@pytest.fixture(scope="module")
def files(workshop: Workshop) -> tuple[Path, Path]:
    return workshop.random(RandomDrafter(hidden=96, vocab=128, target_layers=4))


@pytest.mark.parametrize(
    ("hidden", "vocab", "layers", "match"),
    [
        (64, 128, 4, "hidden size 96, the target has 64"),
        (96, 128, 5, "layer count 4, this target has 5"),
        (96, 160, 4, "vocabulary size 128, this target has 160"),
    ],
)
def test_another_target(
    hidden: int,
    vocab: int,
    layers: int,
    match: str,
    files: tuple[Path, Path],
    workshop: Workshop,
) -> None:
    other = workshop.random_target("llama", hidden, vocab, layers)
    _refused(other, files[1], match)


def test_another_architecture(files: tuple[Path, Path], workshop: Workshop) -> None:
    other = workshop.random_target("qwen3", 96, 128)
    _refused(other, files[1], "architecture llama, this target has qwen3")


def test_another_token_list(files: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = [f"<{i}>" for i in range(128)]
    array = (gguf.GGUFValueType.ARRAY, STRING)
    other = rewrite(files[0], tmp_path / "t.gguf", {"tokenizer.ggml.tokens": (array, tokens)})
    _refused(other, files[1], "token list hash")


def test_an_architecture_without_layer_inputs(tmp_path: Path) -> None:
    target = write_random_target(tmp_path / "t.gguf", "qwen2", Shape(96, 128, 4, heads=3))
    drafter = RandomDrafter(hidden=96, vocab=128, target_layers=4)
    draft = convert(drafter.write(tmp_path / "d"), target, tmp_path / "o")["f32"]
    _refused(target, draft, "'qwen2' does not publish the input of layer 1")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"dflash.target_layers": (I32_ARRAY, [1, 4])}, "layer 4 .*last layer"),
        ({"dflash.target_layers": (I32_ARRAY, [1, 9])}, r"(has|input) 9\b"),
        ({"dflash.target_layers": (I32_ARRAY, [0, 3])}, r"(has|input) 0\b"),
        ({"dflash.selector_top_k": (U32, 10)}, r"cannot be loaded|K\*\(K\+1\)"),
        ({"dflash.selector_top_k": (U32, 0)}, "cannot be loaded|selector_top_k"),
        ({"dflash.block_size": (U32, 1)}, "block_size|no DSpine drafter"),
        ({"dflash.block_size": None}, "block_size"),
        ({"dflash.block_size": (STRING, "8")}, "block_size"),
        ({"dflash.transfer_rank": (U32, 0)}, "cannot be loaded|transfer_rank"),
        ({"dflash.transfer_rank": (U32, 25)}, "cannot be loaded"),
        ({"dflash.message_size": None}, "cannot be loaded|message_size"),
        ({"dflash.transfer_rank": None}, "no DSpine drafter"),
        ({"dflash.target_layers": None}, "cannot be loaded"),
    ],
)
def test_bad_metadata(
    values: dict[str, Typed | None], match: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    _refused(files[0], rewrite(files[1], tmp_path / "d.gguf", values), match)


@pytest.mark.parametrize(
    "name",
    [
        "transfer_codes.weight",
        "inject_message.weight",
        "inject_gate.bias",
        "blk.1.inject_readout.weight",
        "blk.0.inject_write.weight",
        "blk.0.attn_q.weight",
        "fc.weight",
        "output_norm.weight",
    ],
)
def test_missing_and_misshapen_tensors(name: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    _refused(files[0], rewrite(files[1], tmp_path / "a.gguf", change=_without(name)), "loaded")
    _refused(files[0], rewrite(files[1], tmp_path / "b.gguf", change=_narrowed(name)), "loaded")


@pytest.mark.parametrize(
    ("values", "change", "match"),
    [
        ({}, "blk.1.inject_readout.weight", "blk.1.inject_readout.weight"),
        ({"dflash.selector_top_k": (U32, 10)}, None, r"cannot hold K\*\(K\+1\) = 110"),
        ({"dflash.message_size": None}, None, "dflash.message_size"),
    ],
)
def test_the_reason_is_told(
    values: dict[str, Typed | None],
    change: str | None,
    match: str,
    files: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """Not only that a file cannot be loaded, but why, without a log."""
    without = _without(change) if change else None
    _refused(files[0], rewrite(files[1], tmp_path / "d.gguf", values, without), match)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_files(share: float, files: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = files
    for name, source in (("draft", draft), ("target", target)):
        data = source.read_bytes()
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
    _refused(target, tmp_path / "draft", re.escape(str(tmp_path / "draft")))
    _refused(tmp_path / "target", draft, re.escape(str(tmp_path / "target")))


def test_no_file(files: tuple[Path, Path], tmp_path: Path) -> None:
    _refused(tmp_path / "absent.gguf", files[1], "absent.gguf")
    _refused(files[0], tmp_path / "absent.gguf", "absent.gguf")
    _refused(tmp_path, files[1], re.escape(str(tmp_path)))


def test_a_target_as_drafter_and_a_drafter_as_target(files: tuple[Path, Path]) -> None:
    target, draft = files
    _refused(target, target, "no DSpine drafter")
    _refused(draft, draft, re.escape(str(draft)))


def test_hidden_size_without_fingerprint(
    files: tuple[Path, Path], workshop: Workshop, tmp_path: Path
) -> None:
    bare = rewrite(files[1], tmp_path / "d.gguf", NO_FINGERPRINT)
    _refused(workshop.random_target("llama", 64, 128), bare, "hidden size 96, the target has 64")
    with Pair(files[0], bare, EXACT) as pair:
        assert pair.info.block_size == 8


def test_depth_past_the_block_is_clamped(files: tuple[Path, Path]) -> None:
    with Pair(*files, dataclasses.replace(EXACT, n_draft=64)) as pair:
        assert pair.info.n_draft == 7
