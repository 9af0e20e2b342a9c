"""`dspine inspect` and the headers that it and the plan read, also in parts and on the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from dspine import _headers
from dspine._headers import HeaderError, open_header
from dspine.cli import main
from support import true_shapes
from support.workshop import Workshop

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run the command line in this process."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_drafter(cli: Cli, workshop: Workshop) -> None:
    target, draft = workshop.e2e("e2e_qwen3", "f32")
    code, out, err = cli("inspect", draft, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    reader = gguf.GGUFReader(draft)
    facts = document["dspine"]
    assert document["kind"] == "drafter"
    assert facts["block_size"] == reader.fields["dflash.block_size"].contents()
    assert facts["drafts_at_most"] == facts["block_size"] - 1
    assert facts["reads_layer_inputs"] == reader.fields["dflash.target_layers"].contents()
    assert facts["window"] is None
    assert facts["table"] == "codes"
    assert document["file_bytes"] == draft.stat().st_size
    found = {t["name"]: (t["type"], t["bytes"]) for t in document["tensors"]}
    expected = {t.name: (t.tensor_type.name.lower(), int(t.n_bytes)) for t in reader.tensors}
    assert found == expected
    total = sum(row["bytes"] for row in document["tensor_types"].values())
    assert total == sum(size for _, size in expected.values())
    # the fingerprint that a drafter carries is its target's own
    of_target = json.loads(cli("inspect", target, "--json")[1])
    assert document["fingerprint"] == of_target["fingerprint"]
    assert of_target["kind"] == "target"
    assert of_target["dspine"] is None


def test_a_folded_drafter(cli: Cli, workshop: Workshop) -> None:
    _, draft = workshop.e2e("e2e_qwen3", "f32", fold=True)
    document = json.loads(cli("inspect", draft, "--json")[1])
    assert document["kind"] == "drafter"
    assert document["dspine"]["table"] == "folded"
    assert document["metadata"]["dspine.folded"] is True


def test_text(cli: Cli, workshop: Workshop) -> None:
    _, draft = workshop.e2e("e2e_hybrid", "q8_0")
    code, out, _ = cli("inspect", draft)
    assert code == 0
    assert "drafter, architecture dflash" in out.splitlines()[0]
    assert "block_size" in out
    assert "tokens_fnv1a64" in out
    assert "(" in next(line for line in out.splitlines() if "tokenizer.ggml.tokens" in line)
    assert "blk.0.attn_q.weight" not in out
    assert "blk.0.attn_q.weight" in cli("inspect", draft, "--tensors")[1]


def test_odd_metadata_stays_on_its_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "two\nlines\x1b[31m")
    writer.add_array("a.texts", ["x", "y"])
    writer.add_array("a.numbers", list(range(100)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    code, out, _ = cli("inspect", path)
    assert code == 0
    assert "\x1b" not in out
    assert r"two\nlines\x1b[31m" in out
    assert '["x", "y"]' in out
    assert "(100 values of int32)" in out
    assert json.loads(cli("inspect", path, "--json")[1])["kind"] == "vocabulary"


@pytest.mark.parametrize(
    ("arch", "keys", "kind"),
    [
        ("clip", {"general.type": "mmproj"}, "projector"),
        ("llama", {"general.type": "adapter"}, "adapter"),
        ("eagle3", {}, "other drafter"),
        ("dflash", {}, "other drafter"),
    ],
)
def test_kinds(arch: str, keys: dict[str, str], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_string(key, value)
    true_shapes.write_holes(writer, path, {"a.weight": (32, 4)}, [gguf.GGMLQuantizationType.F32])
    header = open_header(str(path))
    assert header.kind == kind
    assert header.describe_kind().startswith("this is a")


def test_a_split_file(tmp_path: Path) -> None:
    whole = open_header(str(true_shapes.write_small(tmp_path / "whole.gguf")))
    first = true_shapes.write_small(tmp_path / "model.gguf", parts=3)
    header = open_header(str(first))
    assert {t.name: t.nbytes for t in header.tensors} == {t.name: t.nbytes for t in whole.tensors}
    assert header.file_bytes == sum(p.stat().st_size for p in tmp_path.glob("model-*.gguf"))
    assert {t.part for t in header.tensors} == {0, 1, 2}
    second = str(first).replace("00001", "00002")
    with pytest.raises(HeaderError, match="later part of a split GGUF; give its first part"):
        open_header(second)
    lone = shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(HeaderError, match="does not end in -00001-of-00003"):
        open_header(str(lone))
    Path(second).unlink()
    with pytest.raises(HeaderError, match="00002-of-00003"):
        open_header(str(first))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A hub of one repository: files by name, read in ranges, and the ranges that were read."""
    from dspine_convert import hub as real

    files: dict[str, bytes] = {}

    class Remote:
        def __init__(self, repo: str, name: str, revision: str | None) -> None:
            self.what, self.name, self.size = f"{repo}:{name}", name, 0

        def read(self, first: int, end: int) -> bytes:
            self.size = len(files[self.name])
            return files[self.name][first:end]

    monkeypatch.setattr(real, "RemoteFile", Remote)
    monkeypatch.setattr(real, "cached_file", lambda *args: None)
    monkeypatch.setattr(real, "is_offline", lambda: False)
    monkeypatch.setattr(_headers, "_hub_files", lambda repo: list(files))
    return files


def test_names_on_the_hub(hub: dict[str, bytes], tmp_path: Path) -> None:
    data = true_shapes.write_small(tmp_path / "small.gguf").read_bytes()
    names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "sub/m-BF16.gguf", "mmproj-Q8_0.gguf", "README.md")
    hub |= dict.fromkeys(names, data)
    for spec in ("some/repo", "some/repo:q8_0", "some/repo:BF16", "some/repo:m-Q8_0.gguf"):
        header = open_header(spec)
        assert header.kind == "target"
        assert header.file_bytes == len(data)
        assert len(header.tensors) == 21
    with pytest.raises(HeaderError, match=r"no file for 'Q2_K'.*m-Q4_K_M.gguf, m-Q8_0.gguf"):
        open_header("some/repo:Q2_K")
    hub["m-Q8_0.gguf"] = data[:2000]
    with pytest.raises(HeaderError, match="truncated GGUF"):
        open_header("some/repo:Q8_0")
    hub["m-Q8_0.gguf"] = b"<html>not found</html>" * 50
    with pytest.raises(HeaderError, match="not a GGUF"):
        open_header("some/repo:Q8_0")


def test_a_repository_with_one_file_needs_no_name(hub: dict[str, bytes], tmp_path: Path) -> None:
    hub["model-F32.gguf"] = true_shapes.write_small(tmp_path / "small.gguf").read_bytes()
    assert open_header("some/repo").kind == "target"


def test_parts_on_the_hub(hub: dict[str, bytes], tmp_path: Path) -> None:
    true_shapes.write_small(tmp_path / "model-Q8_0.gguf", parts=2)
    hub |= {f"Q8_0/{p.name}": p.read_bytes() for p in tmp_path.glob("*.gguf")}
    assert len(open_header("some/repo:Q8_0").tensors) == 21


def _with(path: Path, change: Callable[[gguf.GGUFWriter], Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    change(writer)
    tensors = {"a.weight": (32, 4)}
    return true_shapes.write_holes(writer, path, tensors, [gguf.GGMLQuantizationType.F32])


def test_hostile_keys(tmp_path: Path) -> None:
    from dspine._shapes import target_shape

    cases: list[tuple[Callable[[gguf.GGUFWriter], Any], str]] = [
        (lambda w: None, "key 'llama.block_count' is missing"),
        (lambda w: w.add_string("llama.block_count", "two"), "expected an integer"),
        (lambda w: w.add_int32("llama.block_count", -1), "is -1, expected 1 to"),
        (lambda w: w.add_uint64("llama.block_count", 1 << 60), "expected 1 to"),
        (lambda w: w.add_array("llama.block_count", [1, 2]), "is an array"),
        (
            lambda w: (
                w.add_block_count(4),
                w.add_array("llama.attention.head_count", [1, 2]),
            ),
            "has 2 values, expected 4",
        ),
    ]
    for i, (change, said) in enumerate(cases):
        header = open_header(str(_with(tmp_path / f"{i}.gguf", change)))
        with pytest.raises(HeaderError, match=said):
            target_shape(header)
