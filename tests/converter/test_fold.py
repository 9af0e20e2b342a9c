"""`--fold`: a row per token with its message and its gate, in place of its code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine_convert import stream, verify
from gguf.quants import dequantize

T = gguf.GGMLQuantizationType
TABLE = "transfer_folded.weight"
MESSAGE, GATE = "injection.message.weight", "injection.predecessor_gate.weight"


@pytest.fixture(scope="module")
def even(kit):
    """A shape where 2M = R, as in the published drafters."""
    return kit.Shape(hidden=256, heads=4, head_dim=64, ffn=512, vocab=320, rank=256, message=128)


@pytest.fixture
def run(cli, kit, tmp_path):
    """Convert a drafter of a shape with --fold and more arguments: outcome, paths."""

    def convert(shape, *arguments, draft=None):
        draft = draft or kit.new_draft(tmp_path / "d", shape)
        target = kit.new_target(tmp_path / "t.gguf", shape)
        out = tmp_path / "o"
        result = cli(draft.write(), "--target", target, "-o", out, "--fold", *arguments)
        return result, [Path(line) for line in result.out.split()] if result.code == 0 else []

    return convert


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


def table_of(path: Path) -> np.ndarray:
    """The stored table as float32 [V, 2M]."""
    stored = tensors(path)[TABLE]
    return dequantize(stored.data, stored.tensor_type).reshape(stored.shape[::-1].tolist())


def expected_table(kit, shape) -> np.ndarray:
    """By the definition, a row at a time, in float64."""
    sizes = kit.tensor_shapes(shape)
    values = {n: kit.weights(n, sizes[n]).astype(np.float64) for n in sizes}
    rows = []
    for code in values["transfer_codes"]:
        predecessor = np.sqrt(shape.rank) * code
        rows.append(np.concatenate([values[MESSAGE] @ predecessor, values[GATE] @ predecessor]))
    return np.array(rows)


def bf16_error(values: np.ndarray) -> np.ndarray:
    """Distance to the nearer one of the BF16 neighbours, towards zero and away from it."""
    low = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = (low.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return np.minimum(np.abs(values - low), np.abs(values - high))


@pytest.mark.parametrize("name", ["TINY", "WIDE", "even"])
def test_values(name, kit, run, even):
    shape = even if name == "even" else getattr(kit, name)
    result, (plain, rounded) = run(shape, "-t", "f32", "-t", "bf16")
    assert result.code == 0, result.err
    expected, found = expected_table(kit, shape), table_of(plain)
    assert found.shape == (shape.vocab, 2 * shape.message)
    np.testing.assert_allclose(found, expected, rtol=2**-23, atol=2**-40)
    assert tensors(rounded)[TABLE].tensor_type == T.BF16
    np.testing.assert_array_equal(np.abs(table_of(rounded) - found), bf16_error(found))


def test_what_else_the_file_holds(kit, cli, run, even, tmp_path):
    _, (folded,) = run(even, "-t", "f32", "-q")
    plain = cli(tmp_path / "d", "--target", tmp_path / "t.gguf", "-t", "f32", "-o", tmp_path / "p")
    plain = Path(plain.out.strip())
    names = {"transfer_codes.weight": TABLE}
    assert [names.get(n, n) for n in tensors(plain)] == list(tensors(folded))
    for name, tensor in tensors(plain).items():
        if name not in names:
            np.testing.assert_array_equal(tensor.data, tensors(folded)[name].data)
    before, after = gguf.GGUFReader(plain).fields, gguf.GGUFReader(folded).fields
    assert set(after) - set(before) == {"dspine.folded"}
    assert after["dspine.folded"].contents() is True
    assert all(after[k].contents() == f.contents() for k, f in before.items() if k[0] != "G")
    assert folded.stat().st_size - plain.stat().st_size < 128  # 2M = R: but for the key


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_matches_llama_quantize(kind, run, even, llama_quantize, tmp_path):
    """Our quantized bytes are those that llama-quantize makes of our BF16 file."""
    result, (base, ours) = run(even, "-t", "bf16", "-t", kind)
    assert result.code == 0, result.err
    theirs = tmp_path / "theirs.gguf"
    command = [llama_quantize, base, theirs, kind.upper(), "1"]
    subprocess.run(command, check=True, capture_output=True)
    mine, other = tensors(ours), tensors(theirs)
    if other["inject_message.weight"].tensor_type != T.BF16:
        pytest.skip(f"{llama_quantize} lacks the hook that leaves inject_* alone")
    assert mine[TABLE].tensor_type == {"q8_0": T.Q8_0, "q4_k_m": T.Q4_K}[kind]
    for name, tensor in mine.items():
        assert other[name].tensor_type == tensor.tensor_type, name
        np.testing.assert_array_equal(other[name].data, tensor.data, err_msg=name)


def test_same_bytes_whatever_the_threads_and_the_chunks(
    run, even, native_library, monkeypatch, tmp_path
):
    found = set()
    for threads, elements in ((1, 1 << 19), (4, 1 << 19), (3, 2048)):
        monkeypatch.setattr(stream, "CHUNK_ELEMENTS", elements)
        flags = ("-t", "q4_k_m", "--threads", threads, "--force", "-q")
        _, (path,) = run(even, *flags)
        found.add(path.read_bytes())
    assert len(found) == 1


def test_another_size_is_said(kit, run, even):
    """2M = 24 in place of R = 8."""
    result, _ = run(kit.TINY)
    assert "24 values, a code 8" in result.err and "3.00 times as large" in result.err
    result, _ = run(even, "--force")
    assert result.code == 0
    assert "--fold" not in result.err


def test_plan_names_the_sources(run, even):
    result, _ = run(even, "--dry-run")
    (line,) = (line for line in result.out.splitlines() if TABLE in line)
    assert line.endswith(f"from transfer_codes, {MESSAGE}, {GATE}")
    assert "[256 x 320]" in line
    result, _ = run(even, "--dry-run", "--json")
    (entry,) = (t for t in json.loads(result.out)["files"][0]["tensors"] if t["name"] == TABLE)
    assert entry["source"] == "transfer_codes"
    assert entry["folded_with"] == [MESSAGE, GATE]


@pytest.mark.parametrize("source", ["BF16", "F32"])
def test_verify(source, kit, run, even, native_library, tmp_path):
    draft = kit.new_draft(tmp_path / "d", even, dtype=source)
    kinds = ("-t", "f32", "-t", "bf16", "-t", "q8_0", "-t", "q4_k_m")
    result, paths = run(even, *kinds, "--verify", draft=draft)
    assert result.code == 0, result.err
    assert len(paths) == 4
    assert "worst relative error" in result.err


def test_verify_knows_the_halves(run, even, monkeypatch):
    """Gate before message is another table."""
    right = stream.fold_matrix

    def swapped(planned):
        matrix = right(planned)
        return np.roll(matrix, matrix.shape[1] // 2, axis=1)

    monkeypatch.setattr(verify, "fold_matrix", swapped)
    result, _ = run(even, "-t", "bf16", "--verify")
    assert result.code == 1
    assert TABLE in result.err


def changed(kit, path, name: str, value: np.ndarray, dtype: str = "F32"):
    draft = kit.new_draft(path, dtype=dtype)
    draft.tensors[name] = (dtype, value.astype(np.float32))
    return draft


def test_a_matrix_that_is_not_finite(kit, run, tmp_path):
    shape = kit.TINY
    value = np.zeros((shape.message, shape.rank))
    value[3, 5] = np.nan
    result, _ = run(shape, draft=changed(kit, tmp_path / "d", GATE, value))
    assert result.code == 1
    assert GATE in result.err and "NaN at [3, 5]" in result.err
    assert not list((tmp_path / "o").glob("*")) if (tmp_path / "o").exists() else True


@pytest.mark.parametrize(("kind", "size"), [("q8_0", 1e6), ("f32", 3e38), ("bf16", 3e38)])
def test_a_message_too_large_for_its_type(kind, size, kit, run, native_library, tmp_path):
    """Codes and matrix fit, their product does not."""
    shape = kit.TINY
    value = np.full((shape.message, shape.rank), size)
    result, _ = run(shape, "-t", kind, draft=changed(kit, tmp_path / "d", MESSAGE, value))
    assert result.code == 1
    assert TABLE in result.err and "too large for" in result.err and "without --fold" in result.err


def test_codes_are_checked_all_the_same(kit, run, tmp_path):
    shape = kit.TINY
    codes = kit.weights("transfer_codes", (shape.vocab, shape.rank)).copy()
    codes[7] *= 3
    result, _ = run(shape, draft=changed(kit, tmp_path / "d", "transfer_codes", codes))
    assert result.code == 1
    assert "row 7 has length 2.99" in result.err
    zeros = changed(kit, tmp_path / "d", "transfer_codes", np.zeros_like(codes))
    result, _ = run(shape, draft=zeros)
    assert result.code == 1
    assert "untrained" in result.err
