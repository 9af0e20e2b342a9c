"""GGUF headers: a bounds-checked reader that keeps raw values, and a writer of the same.

The reader works on a prefix of a file, so that a remote header can be read in growing pieces.
Values keep their stored bytes: copying a vocabulary costs nothing and cannot change a type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dspine_convert.errors import ConvertError, short

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_KEY_BYTES = 65_535
MAX_DIMS = 4

Scalar = bool | int | float | str


class ValueType(IntEnum):
    """Types of a metadata value, as numbered in the GGUF specification."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_PACK: dict[ValueType, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: struct.Struct("<I"),
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: struct.Struct("<Q"),
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}
_TYPE_CODES = frozenset(int(kind) for kind in GGML_QUANT_SIZES)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class NeedMoreDataError(Exception):
    """The buffer ends inside the header; `at_least` bytes of the file are needed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"header needs {at_least} bytes")
        self.at_least = at_least


@dataclass(frozen=True)
class Value:
    """One metadata value: its type, its stored bytes, and for arrays the element type."""

    type: ValueType
    raw: bytes
    element: ValueType | None = None
    count: int = 1

    def scalar(self) -> Scalar:
        """Decode a scalar; raises ConvertError for an array or text that is not UTF-8."""
        if self.type is ValueType.ARRAY:
            raise ConvertError("expected a single value, found an array")
        if self.type is ValueType.STRING:
            try:
                return self.raw[8:].decode("utf-8")
            except UnicodeDecodeError as error:
                raise ConvertError("text is not valid UTF-8") from error
        result: Scalar = _PACK[self.type].unpack(self.raw)[0]
        return result

    def strings(self) -> list[bytes]:
        """Decode an array of strings as bytes; raises ConvertError for any other type."""
        if self.element is not ValueType.STRING:
            raise ConvertError("expected an array of strings")
        out: list[bytes] = []
        raw, at = self.raw, 12
        for _ in range(self.count):
            (length,) = _U64.unpack_from(raw, at)
            out.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        return out

    def numbers(self) -> list[int]:
        """Decode an array of integers; raises ConvertError for any other type."""
        if self.element is None or self.element in (
            ValueType.STRING,
            ValueType.ARRAY,
            ValueType.FLOAT32,
            ValueType.FLOAT64,
        ):
            raise ConvertError("expected an array of integers")
        code = _PACK[self.element].format[1:]
        return [int(v) for v in struct.unpack_from(f"<{self.count}{code}", self.raw, 12)]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a GGUF file; `shape` in ggml order, `offset` from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor without padding."""
        return tensor_bytes(self.type, self.shape)


@dataclass(frozen=True)
class Header:
    """A parsed header; `data_start` is the file offset of the tensor data.

    `infos_start` is where the list of `n_tensors` tensors begins, whether it was parsed or not.
    """

    values: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    infos_start: int = 0
    n_tensors: int = 0


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Round `size` up to the alignment."""
    return -(-size // alignment) * alignment


def tensor_bytes(kind: GGMLQuantizationType, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` (ggml order: row width first)."""
    block, size = GGML_QUANT_SIZES[kind]
    return prod(shape) // block * size


class _Cursor:
    """Reads little-endian fields and never past the end of the buffer."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.data):
            raise NeedMoreDataError(end)
        view = self.data[self.at : end]
        self.at = end
        return view

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def text(self, what: str, limit: int = MAX_KEY_BYTES) -> str:
        length = self.u64()
        if length > limit:
            raise ConvertError(f"{what} of {length} bytes, at most {limit} expected")
        try:
            return bytes(self.take(length)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConvertError(f"{what} is not valid UTF-8") from error


def _value_type(code: int, key: str) -> ValueType:
    try:
        return ValueType(code)
    except ValueError:
        raise ConvertError(f"key {short(key)!r} has unknown value type {code}") from None


def _read_value(cur: _Cursor, key: str) -> Value:
    kind = _value_type(cur.u32(), key)
    start = cur.at
    if kind is ValueType.STRING:
        cur.take(cur.u64())
        return Value(kind, bytes(cur.data[start : cur.at]))
    if kind is not ValueType.ARRAY:
        return Value(kind, bytes(cur.take(_PACK[kind].size)))
    element, count = _value_type(cur.u32(), key), cur.u64()
    if element is ValueType.ARRAY:
        raise ConvertError(
            f"key {short(key)!r} is an array of arrays, which llama.cpp does not read"
        )
    if element is ValueType.STRING:
        _skip_strings(cur, count)
    else:
        cur.take(count * _PACK[element].size)
    return Value(kind, bytes(cur.data[start : cur.at]), element, count)


def _skip_strings(cur: _Cursor, count: int) -> None:
    """Step over `count` strings; a tight loop, since a vocabulary has 250,000 of them."""
    data, at, end, unpack = cur.data, cur.at, len(cur.data), _U64.unpack_from
    for _ in range(count):
        if at + 8 > end:
            raise NeedMoreDataError(at + 8)
        at += 8 + unpack(data, at)[0]
    if at > end:
        raise NeedMoreDataError(at)
    cur.at = at


def _read_tensor(cur: _Cursor) -> TensorInfo:
    name = cur.text("tensor name")
    n_dims = cur.u32()
    if not 1 <= n_dims <= MAX_DIMS:
        raise ConvertError(
            f"tensor {short(name)!r} has {n_dims} dimensions, 1 to {MAX_DIMS} expected"
        )
    shape = tuple(cur.u64() for _ in range(n_dims))
    code, offset = cur.u32(), cur.u64()
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise ConvertError(f"tensor {short(name)!r} has unknown type {code}") from None
    return TensorInfo(name, shape, kind, offset)


def read_header(data: memoryview, *, with_tensors: bool = True) -> Header:
    """Parse a header from the first bytes of a GGUF file.

    Raises NeedMoreDataError when the buffer ends first and ConvertError for anything that is
    not a little-endian GGUF of version 2 or 3.
    """
    cur = _Cursor(data)
    if bytes(cur.take(4)) != MAGIC:
        raise ConvertError("not a GGUF file (its first four bytes are not 'GGUF')")
    version = cur.u32()
    if version not in (2, 3):
        raise ConvertError(f"GGUF version {version}; supported: 2 and 3, little-endian")
    n_tensors, n_values = cur.u64(), cur.u64()
    values: dict[str, Value] = {}
    for _ in range(n_values):
        key = cur.text("a metadata key")
        if key in values:
            raise ConvertError(f"key {short(key)!r} appears twice")
        values[key] = _read_value(cur, key)
    infos_start = cur.at
    if not with_tensors:
        return Header(values, (), 0, infos_start, n_tensors)
    tensors = tuple(_read_tensor(cur) for _ in range(n_tensors))
    return Header(values, tensors, padded(cur.at), infos_start, n_tensors)


def data_end(data: memoryview, header: Header) -> int:
    """The file size that the tensors of `header` need; 0 where it lists none.

    A target may have types that are newer than this table: of those only the start is known.
    """
    if header.n_tensors == 0:
        return 0
    cur = _Cursor(data, header.infos_start)
    end = 0
    for _ in range(header.n_tensors):
        cur.text("tensor name")
        n_dims = cur.u32()
        if n_dims > MAX_DIMS:
            raise ConvertError(f"a tensor has {n_dims} dimensions, at most {MAX_DIMS} expected")
        shape = [cur.u64() for _ in range(n_dims)]
        code, offset = cur.u32(), cur.u64()
        known = code in _TYPE_CODES
        size = tensor_bytes(GGMLQuantizationType(code), shape) if known else 0
        end = max(end, offset + size)
    return padded(cur.at, _alignment(header)) + end


def _alignment(header: Header) -> int:
    stored = header.values.get(ALIGNMENT_KEY)
    value = ALIGNMENT if stored is None else stored.scalar()
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConvertError(f"key {ALIGNMENT_KEY!r}: is {value!r:.80}, expected a positive integer")
    return value


def _text_bytes(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return _U64.pack(len(encoded)) + encoded


def make_value(kind: ValueType, value: Scalar) -> Value:
    """Build a scalar value of the given stored type."""
    if kind is ValueType.STRING:
        return Value(kind, _text_bytes(str(value)))
    return Value(kind, _PACK[kind].pack(value))


def make_array(element: ValueType, items: Sequence[Scalar]) -> Value:
    """Build an array of scalars of the given element type."""
    body = b"".join(make_value(element, item).raw for item in items)
    raw = _U32.pack(element) + _U64.pack(len(items)) + body
    return Value(ValueType.ARRAY, raw, element, len(items))


def header_bytes(values: dict[str, Value], tensors: Iterable[TensorInfo]) -> bytes:
    """Serialise a header, padded so that the tensor data may follow directly."""
    infos = list(tensors)
    out = bytearray(MAGIC + _U32.pack(VERSION) + _U64.pack(len(infos)) + _U64.pack(len(values)))
    for key, value in values.items():
        out += _text_bytes(key) + _U32.pack(value.type) + value.raw
    for info in infos:
        out += _text_bytes(info.name) + _U32.pack(len(info.shape))
        out += b"".join(_U64.pack(n) for n in info.shape)
        out += _U32.pack(info.type) + _U64.pack(info.offset)
    out += bytes(padded(len(out)) - len(out))
    return bytes(out)
