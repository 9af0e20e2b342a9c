"""The target's side: fingerprint, layers, Hugging Face directories."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from dspine_convert.errors import ConvertError
from dspine_convert.fingerprint import fnv1a64, tokens_fnv1a64
from dspine_convert.target import PUBLISHES_LAST_LAYER, find_hf_converter, load_gguf


def plain_fnv(data: bytes) -> int:
    """FNV-1a as its authors write it."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & (1 << 64) - 1
    return value


def test_known_values():
    """From the published test vectors of FNV-1a (64 bit)."""
    assert fnv1a64(b"") == 0xCBF29CE484222325
    assert fnv1a64(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a64(b"foobar") == 0x85944171F73967E8


@pytest.mark.parametrize("size", [1, 2, 9, 255, 4096])
def test_fnv_against_the_plain_loop(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert fnv1a64(data) == plain_fnv(data)


def test_fingerprint_stream():
    """Ids as four bytes, unused tokens left out, empty tokens by the name llama.cpp gives them."""
    tokens, types = [b"a", b"x", b"", "ö".encode()], [1, 5, 3, 1]
    stream = b"\0\0\0\0a\0" + b"\2\0\0\0[EMPTY_2]\0" + b"\3\0\0\0\xc3\xb6\0"
    assert tokens_fnv1a64(tokens, types) == f"{plain_fnv(stream):016x}"
    assert tokens_fnv1a64(tokens, None) != tokens_fnv1a64(tokens, types)


def test_a_target(target, kit):
    found = load_gguf(target)
    assert (found.architecture, found.name) == ("qwen3", "Tiny Target")
    assert (found.embedding_length, found.block_count, found.vocab_size) == (32, 6, 96)
    stream = b"".join(i.to_bytes(4, "little") + f"tök{i}".encode() + b"\0" for i in range(96))
    assert found.tokens_fnv1a64 == f"{plain_fnv(stream):016x}"


def test_prediction_layers_are_no_layers(tmp_path, kit):
    """block_count counts multi-token-prediction layers; taps and fingerprint do not."""
    path = kit.new_target(tmp_path / "mtp.gguf", arch="qwen35", nextn=1)
    assert load_gguf(path).block_count == 6


def test_a_drafter_is_no_target(draft, target, cli, tmp_path):
    made = cli(draft.write(), "--target", target, "-o", tmp_path / "o").out.strip()
    result = cli(draft.directory, "--target", made, "-o", tmp_path / "p")
    assert result.code == 1
    assert "this is a drafter" in result.err


def test_later_part_of_a_split(draft, kit, cli, tmp_path):
    path = kit.new_target(tmp_path / "s.gguf", change=lambda w: w.add_uint16("split.no", 1))
    result = cli(draft.write(), "--target", path, "-o", tmp_path / "o")
    assert result.code == 1
    assert "give its first part" in result.err


def test_vocabulary_is_copied_verbatim(draft, kit, cli, tmp_path):
    """Types and values as stored, whatever they are; the mask token is the drafter's."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_token_scores([0.5] * 96)
        writer.add_uint32("tokenizer.ggml.mask_token_id", 7)
        writer.add_array("tokenizer.ggml.eog_token_ids", [1, 2])

    path = kit.new_target(tmp_path / "v.gguf", change=more)
    made = cli(draft.write(), "--target", path, "-o", tmp_path / "o").out.strip()
    source, copy = gguf.GGUFReader(path), gguf.GGUFReader(made)
    for name, field in source.fields.items():
        if name.startswith("tokenizer.") and name != "tokenizer.ggml.mask_token_id":
            assert copy.fields[name].types == field.types
            assert copy.fields[name].contents() == field.contents()
    assert copy.get_field("tokenizer.ggml.mask_token_id").contents() == 95


def test_directory_without_config(draft, cli, tmp_path):
    (tmp_path / "empty").mkdir()
    result = cli(draft.write(), "--target", tmp_path / "empty", "-o", tmp_path / "o")
    assert result.code == 1
    assert "no config.json" in result.err


@pytest.fixture
def hf_target(tmp_path):
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_no_llama_cpp(draft, hf_target, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_LLAMA_CPP_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("dspine_convert.target.package_dir", lambda name: tmp_path / "pkg")
    result = cli(draft.write(), "--target", hf_target, "-o", tmp_path / "o")
    assert result.code == 1
    assert str(tmp_path / "none" / "convert_hf_to_gguf.py") in result.err
    assert str(tmp_path / "pkg" / "native" / "llama.cpp") in result.err


def fake_llama_cpp(directory, body: str, monkeypatch) -> None:
    directory.mkdir()
    (directory / "convert_hf_to_gguf.py").write_text(body)
    monkeypatch.setenv("DSPINE_LLAMA_CPP_DIR", str(directory))


def test_missing_torch_is_named(draft, hf_target, cli, tmp_path, monkeypatch):
    fake_llama_cpp(tmp_path / "llama.cpp", "", monkeypatch)
    real = __import__("importlib.util").util.find_spec
    hidden = ("torch", "transformers")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in hidden else real(name)
    )
    result = cli(draft.write(), "--target", hf_target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "pip install torch transformers" in result.err


@pytest.mark.parametrize("works", [True, False])
def test_directory_through_llama_cpp(draft, hf_target, target, cli, tmp_path, monkeypatch, works):
    """The converter's contract, with a stand-in for llama.cpp's script."""
    body = f"import shutil, sys\nassert sys.argv[1] == {str(hf_target)!r}\n"
    body += "assert sys.argv[2:4] == ['--vocab-only', '--outfile']\n"
    body += (
        f"shutil.copy({str(target)!r}, sys.argv[4])\n" if works else "sys.exit('no tokenizer')\n"
    )
    fake_llama_cpp(tmp_path / "llama.cpp", body, monkeypatch)
    real = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: real("json" if name in ("torch", "transformers") else name),
    )
    result = cli(draft.write(), "--target", hf_target, "-o", tmp_path / "o")
    if works:
        assert result.code == 0, result.err
    else:
        assert result.code == 1
        assert "llama.cpp could not read the vocabulary: no tokenizer" in result.err


def test_archs_that_publish_the_last_layer():
    """The table is what the llama.cpp tree says, where one is at hand."""
    trees = [Path(__file__).parents[2] / "build" / "llama.cpp"]
    with suppress(ConvertError):
        trees.append(find_hf_converter().parent)
    models = next((t / "src" / "models" for t in trees if (t / "src" / "models").is_dir()), None)
    if models is None:
        pytest.skip(f"no llama.cpp sources in {', '.join(map(str, trees))}")
    files = {p.stem for p in models.glob("*.cpp") if "t_layer_inp[n_layer]" in p.read_text()}
    known = {name.removesuffix("_moe").replace("_", "-") for name in PUBLISHES_LAST_LAYER}
    assert files == known


def with_tensor(path, *, rows: int = 4, keep: int | None = None, alignment: int = 32):
    """A target with one tensor's data, of which `keep` bytes are left."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_embedding_length(32)
    writer.add_block_count(6)
    writer.add_custom_alignment(alignment)
    writer.add_token_list([f"t{i}" for i in range(96)])
    writer.add_tensor("token_embd.weight", np.zeros((rows, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if keep is not None:
        reader = gguf.GGUFReader(path)
        start = reader.data_offset
        del reader
        with path.open("r+b") as file:
            file.truncate(start + keep)
    return path


@pytest.mark.parametrize("alignment", [32, 4096])
def test_a_target_cut_in_its_data(draft, cli, tmp_path, alignment):
    """The header is whole and the data are not: a download that broke off."""
    whole = with_tensor(tmp_path / "whole.gguf", alignment=alignment)
    assert load_gguf(whole).block_count == 6
    cut = with_tensor(tmp_path / "cut.gguf", alignment=alignment, keep=511)
    result = cli(draft.write(), "--target", cut, "-o", tmp_path / "o")
    assert result.code == 1
    assert f"{cut}: truncated GGUF, its tensors need" in result.err


def test_a_type_that_is_not_known_yet(tmp_path):
    """Newer types than the table's: the file is taken, since its size cannot be judged."""
    path = with_tensor(tmp_path / "new.gguf")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    raw[at : at + 4] = (250).to_bytes(4, "little")
    path.write_bytes(raw)
    assert load_gguf(path).block_count == 6


BAD_VALUES = {
    "block_count float": ("add_float32", "qwen3.block_count", 6.0, "is 6.0"),
    "block_count negative": ("add_int32", "qwen3.block_count", -6, "is -6"),
    "block_count text": ("add_string", "qwen3.block_count", "6", "is '6'"),
    "nextn NaN": ("add_float32", "qwen3.nextn_predict_layers", float("nan"), "is nan"),
    "nextn negative": ("add_int32", "qwen3.nextn_predict_layers", -3, "is -3"),
    "nextn all": ("add_uint32", "qwen3.nextn_predict_layers", 6, "not below block_count 6"),
    "split float": ("add_float32", "split.no", 0.5, "is 0.5"),
    "width huge": ("add_uint64", "qwen3.embedding_length", 1 << 63, "is 9223372036854775808"),
    "width list": ("add_array", "qwen3.embedding_length", [32], "expected a single value"),
    "types float": ("add_array", "tokenizer.ggml.token_type", [0.5] * 96, "array of integers"),
    "types short": ("add_array", "tokenizer.ggml.token_type", [1] * 95, "but 95 token types"),
    "tokens number": ("add_uint32", "tokenizer.ggml.tokens", 3, "an array of strings"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values_are_named(draft, kit, cli, tmp_path, case):
    method, key, value, message = BAD_VALUES[case]

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        getattr(writer, method)(key, value)

    path = kit.new_target(tmp_path / "bad.gguf", change=change)
    result = cli(draft.write(), "--target", path, "-o", tmp_path / "o")
    assert result.code == 1
    assert f"{path}: key '{key}'" in result.err
    assert message in result.err
    assert "internal error" not in result.err


def test_a_name_that_is_no_text_is_left_out(draft, kit, cli, tmp_path):
    path = kit.new_target(tmp_path / "n.gguf")
    path.write_bytes(path.read_bytes().replace(b"Tiny Target", b"Tiny \xff\xfe\xff\xfe\xff\xfe"))
    assert load_gguf(path).name is None
    result = cli(draft.write(), "--target", path, "-o", tmp_path / "o")
    assert result.code == 0, result.err
    assert gguf.GGUFReader(result.out.strip()).get_field("dspine.target.name") is None
