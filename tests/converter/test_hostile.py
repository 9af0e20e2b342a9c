"""Hostile and damaged files: by hand, then by hypothesis within a fixed budget."""

from __future__ import annotations

import copy
import json
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from dspine_convert.checkpoint import open_checkpoint, parse_json
from dspine_convert.config import parse_config
from dspine_convert.errors import ConvertError
from dspine_convert.gguf_format import NeedMoreDataError, read_header
from dspine_convert.names import resolve
from dspine_convert.target import from_header
from hypothesis import example, given
from hypothesis import strategies as st


def raw_file(path: Path, header: object, body: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def entry(shape: object, span: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


ABYSS = b'{"a":' * 100_000
HEADERS: dict[str, tuple[object, bytes, str]] = {
    "not json": (b"{nope", b"", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "nested": (ABYSS, b"", "not valid JSON"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    "list": ([], b"", "not a JSON object"),
    "repeated key": (b'{"a": 1, "a": 2}', b"", "'a' appears twice"),
    "entry is a number": ({"a": 3}, b"", "header entry is not an object"),
    "dtype": ({"a": entry([1], [0, 4], "Q4")}, b"1234", "dtype 'Q4'"),
    "dtype list": ({"a": entry([1], [0, 4], [])}, b"1234", "dtype []"),
    "negative size": ({"a": entry([-1], [0, 4])}, b"1234", "not a short list of sizes"),
    "boolean size": ({"a": entry([True], [0, 4])}, b"1234", "not a short list of sizes"),
    "huge size": ({"a": entry([1 << 62, 1 << 62], [0, 4])}, b"1234", "needs"),
    "many dims": ({"a": entry([1] * 9, [0, 4])}, b"1234", "not a short list of sizes"),
    "offsets reversed": ({"a": entry([1], [4, 0])}, b"1234", "data_offsets span -4"),
    "offsets short": ({"a": entry([1], [0])}, b"1234", "not [begin, end]"),
    "offsets float": ({"a": entry([1], [0.0, 4.0])}, b"1234", "not [begin, end]"),
    "size unlike shape": ({"a": entry([2], [0, 4])}, b"1234", "needs 8 bytes"),
    "past the end": ({"a": entry([2], [0, 8])}, b"1234", "it is truncated"),
    "trailing bytes": ({"a": entry([1], [0, 4])}, b"12345", "fill bytes 0 to 4 of 5"),
    "hole": (
        {"a": entry([1], [0, 4]), "b": entry([1], [8, 12])},
        b"x" * 12,
        "bytes between 'a' and 'b'",
    ),
    "overlap": (
        {"a": entry([2], [0, 8]), "b": entry([2], [4, 12])},
        b"x" * 12,
        "'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_header(draft, target, cli, tmp_path, case):
    header, body, message = HEADERS[case]
    raw_file(draft.write() / "model.safetensors", header, body)
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    assert result.code == 1, result.err
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes is too short"),
        (b"1234567", "7 bytes is too short"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header of 4611686018427387904 bytes"),
        (struct.pack("<Q", 3) + b"{}", "header of 3 bytes in a file of 10"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not safetensors"),
    ],
)
def test_hostile_length(draft, target, cli, tmp_path, content, message):
    (draft.write() / "model.safetensors").write_bytes(content)
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert message in result.err


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.1])
def test_truncated_checkpoint(draft, target, cli, tmp_path, keep):
    path = draft.write() / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "truncated" in result.err


@pytest.mark.parametrize("content", [b"[]", b"3", b"", b"\xff", b"{", b'{"config": 3}', ABYSS])
def test_hostile_config(draft, target, cli, tmp_path, content):
    (draft.write() / "config.json").write_bytes(content)
    result = cli(draft.directory, "--target", target, "-o", tmp_path / "o")
    assert result.code == 1
    assert "config.json" in result.err


def gguf_head(*, version: int = 3, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(20), "not a GGUF file"),
        (b"GGUF", "truncated GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (gguf_head(version=1), "GGUF version 1"),
        (gguf_head(values=1 << 60), "truncated GGUF"),
        (gguf_head(values=1) + struct.pack("<Q", 1 << 40), "at most 65535"),
        (gguf_head(values=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99), "type 99"),
        (gguf_head(values=1) + struct.pack("<Q", 1) + b"\xff" + struct.pack("<I", 0), "UTF-8"),
        (
            gguf_head(values=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),
            "array of arrays",
        ),
        (
            gguf_head(values=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 50),
            "truncated GGUF",
        ),
        (
            gguf_head(values=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 61),
            "truncated GGUF",
        ),
        (gguf_head(), "general.architecture"),
        (b"", "empty file"),
    ],
)
def test_hostile_target(draft, cli, tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    result = cli(draft.write(), "--target", path, "-o", tmp_path / "o")
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err


# Anything that JSON can hold, kept small.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=8)
    | st.sampled_from([0, 1, 2**31, 2**63, 10**400, "yarn", "linear", "sliding_attention"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into a JSON value."""
    out = [at] if at else []
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        out += places(value, (*at, key))
    return out


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    node = copy.deepcopy(node)
    target = node
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return node


@given(data=st.data())
def test_fuzz_config(kit, data):
    """Any value in any place of a config is accepted or refused in words."""
    base = kit.config_of(kit.TINY)
    base |= {
        "rope_scaling": None,
        "dflash_config": {**base["dflash_config"], "use_swa": False, "swa_window_size": 16},
    }
    paths = places(base)
    paths += [("rope_parameters", key) for key in ("factor", "type", "beta_fast", "truncate")]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        try:
            base = replaced(base, path, data.draw(JSON))
        except (KeyError, TypeError, IndexError):
            continue  # an earlier change removed the way there
    pair = data.draw(st.booleans())
    try:
        parse_config(base, "config.json", reference_pair=pair)
    except ConvertError as error:
        assert str(error).count("\n") < 3


@given(value=JSON)
def test_fuzz_config_whole(value):
    try:
        parse_config(value, "config.json", reference_pair=True)
    except ConvertError as error:
        assert str(error)


@given(text=st.binary(max_size=64))
@example(text=b"[" * 100_000)
@example(text=b"9" * 5000)
@example(text=b"NaN")
def test_fuzz_json(text):
    try:
        parse_json(text, "x")
    except ConvertError as error:
        assert str(error).startswith("x: ")


@given(data=st.data())
def test_fuzz_safetensors(kit, tmp_path, data):
    """A damaged file is read or refused; nothing else can happen."""
    draft = kit.new_draft(tmp_path / "fuzz")
    path = draft.write() / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        # The length and the header are where damage matters; the data are only numbers.
        at = data.draw(st.integers(0, min(8 + length, len(raw) - 1)))
        action = data.draw(st.sampled_from(["flip", "cut", "insert", "digit", "tail"]))
        if action == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif action == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif action == "digit":
            raw[at] = data.draw(st.sampled_from(b'0123456789-,[]{}":e.'))
        else:
            del raw[data.draw(st.integers(0, len(raw))) :]
        if not raw:
            break
    path.write_bytes(bytes(raw))
    config = parse_config(draft.config, "config.json", reference_pair=False)
    try:
        with ExitStack() as stack:
            resolve(open_checkpoint(draft.directory, None, stack).tensors, config, {})
    except ConvertError as error:
        assert str(error).count("\n") < 3


@given(data=st.data())
def test_fuzz_safetensors_fields(kit, tmp_path, data):
    """Any JSON in any field of a well-formed header."""
    shapes = list(kit.tensor_shapes(kit.TINY).items())[:3]
    header, at = {}, 0
    for name, shape in shapes:
        size = 4
        for n in shape:
            size *= n
        header[name] = entry(list(shape), [at, at + size])
        at += size
    for path in data.draw(st.lists(st.sampled_from(places(header)), min_size=1, max_size=3)):
        try:
            header = replaced(header, path, data.draw(JSON))
        except (KeyError, TypeError, IndexError):
            continue
    path = raw_file(tmp_path / "f.safetensors", header, bytes(at))
    config = parse_config(kit.config_of(kit.TINY), "config.json", reference_pair=False)
    try:
        with ExitStack() as stack:
            resolve(open_checkpoint(path, None, stack).tensors, config, {})
    except ConvertError as error:
        assert str(error).count("\n") < 3


@given(data=st.data())
def test_fuzz_gguf_header(kit, tmp_path, data):
    path = tmp_path / "t.gguf"
    if not path.exists():
        kit.new_target(path, kit.Shape(vocab=12))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    try:
        from_header(read_header(memoryview(bytes(raw))), "t.gguf")
    except (ConvertError, NeedMoreDataError) as error:
        assert str(error)
