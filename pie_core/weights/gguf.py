"""Reads a GGUF header; every count, length, dimension and offset is checked against the file's size before it is used."""

from __future__ import annotations

import math
import struct
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final

from pie_core.weights.errors import BadHeader, TruncatedFile, UnsupportedFormat
from pie_core.weights.formats import BY_NUMBER
from pie_core.weights.metadata import Metadata, NumberArray, StringArray, Value

MAX_NAME: Final = 65_535  # bytes of a key or tensor name; the format's own limit for keys
MAX_ALIGNMENT: Final = 65_536
MAX_DIMENSIONS: Final = 4
STRING, ARRAY, BOOL = 8, 9, 7
NUMBER_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PAIR_BYTES: Final = 13  # least bytes of a metadata pair: empty key, type, one byte
_TENSOR_BYTES: Final = 32  # least bytes of a tensor entry: empty name, one dimension
_u32: Final = struct.Struct("<I").unpack_from
_u64: Final = struct.Struct("<Q").unpack_from


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: [rows, cols] values of format `fmt`, row-major, `nbytes` bytes at byte `offset` of the file.
    `dims` is the full shape, outermost first; rows is the product of all but the last."""

    name: str
    fmt: str
    rows: int
    cols: int
    offset: int
    nbytes: int
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.rows, self.cols

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.nbytes // self.rows


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself."""

    version: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    alignment: int
    data_offset: int


class _Cursor:
    """A checked position in the header's bytes."""

    def __init__(self, data: memoryview, file_size: int, source: str) -> None:
        self.data, self.file_size, self.source, self.at = data, file_size, source, 0

    def left(self) -> int:
        return len(self.data) - self.at

    def need(self, count: int, what: str) -> None:
        if count > self.left():
            raise TruncatedFile(
                f"{self.source} ends inside its header: {what} at byte {self.at} takes {count} bytes, {self.left()} are left"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _u32(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _u64(self.data, self.at)
        self.at += 8
        return int(value)

    def name(self, what: str) -> str:
        """A key or tensor name."""
        length = self.u64(f"the length of {what}")
        if length > MAX_NAME:
            raise BadHeader(f"{what} in {self.source} claims {length} bytes, at most {MAX_NAME} are allowed")
        return self._text(length, what)

    def string(self, what: str) -> str:
        return self._text(self.u64(f"the length of {what}"), what)

    def _text(self, length: int, what: str) -> str:
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise BadHeader(f"{what} in {self.source} is not UTF-8: {error.reason} at byte {error.start}") from None

    def number(self, code: str, what: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value  # type: ignore[no-any-return]

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings; a tight loop, since vocabularies hold up to a million."""
        data, at, end, unpack = self.data, self.at, len(self.data), _u64
        for index in range(count):
            if at + 8 > end:
                raise TruncatedFile(f"{self.source} ends inside its header: {what} has {count} strings, string {index} starts at byte {at}")
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise TruncatedFile(f"{self.source} ends inside its header: {what} reaches byte {at}, the data ends at {end}")
        self.at = at


def _array(cursor: _Cursor, what: str) -> Value:
    kind, count = cursor.u32(f"the element type of {what}"), cursor.u64(f"the count of {what}")
    if kind == ARRAY:
        raise UnsupportedFormat(f"{what} in {cursor.source} is an array of arrays, which is not read")
    if kind != STRING and kind not in NUMBER_CODES:
        raise BadHeader(f"{what} in {cursor.source} has element type {kind}, types are 0 to 12")
    size = 8 if kind == STRING else struct.calcsize("<" + NUMBER_CODES[kind])
    if count > cursor.left() // size:
        raise TruncatedFile(f"{what} in {cursor.source} claims {count} elements of at least {size} bytes, {cursor.left()} bytes are left")
    start = cursor.at
    if kind == STRING:
        cursor.skip_strings(count, what)
        return StringArray(cursor.data[start : cursor.at], count)
    cursor.at += count * size
    return NumberArray(cursor.data[start : cursor.at], NUMBER_CODES[kind])


def _pair_value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(f"the type of {what}")
    if kind == STRING:
        return cursor.string(what)
    if kind == ARRAY:
        return _array(cursor, what)
    if kind == BOOL:
        value = cursor.number("B", what)
        if value > 1:
            raise BadHeader(f"{what} in {cursor.source} is a bool with value {value}, it must be 0 or 1")
        return bool(value)
    if kind not in NUMBER_CODES:
        raise BadHeader(f"{what} in {cursor.source} has type {kind}, types are 0 to 12")
    return cursor.number(NUMBER_CODES[kind], what)


def _unique(names: Container[str], name: str, kind: str, source: str) -> None:
    if name in names:
        raise BadHeader(f"{source} holds the {kind} {name!r} twice")


def _tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """A tensor entry; its offset is still relative to the data section."""
    source = cursor.source
    name = cursor.name(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    count = cursor.u32(f"the dimension count of {what}")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise BadHeader(f"{what} in {source} has {count} dimensions, 1 to {MAX_DIMENSIONS} are allowed")
    dims = [cursor.u64(f"a dimension of {what}") for _ in range(count)]
    number, offset = cursor.u32(f"the format of {what}"), cursor.u64(f"the offset of {what}")
    fmt = BY_NUMBER.get(number)
    if fmt is None:
        raise UnsupportedFormat(f"{what} in {source} has format number {number}, which this version does not know")
    values = math.prod(dims)
    if not 1 <= values <= cursor.file_size * 8:  # no format packs more than 8 values a byte
        raise BadHeader(f"{what} in {source} has dimensions {dims}, {values} values: a file of {cursor.file_size} bytes cannot hold that")
    if dims[0] % fmt.block:
        raise BadHeader(f"{what} in {source} has rows of {dims[0]} values, {fmt.name} needs a multiple of {fmt.block}")
    if offset % alignment:
        raise BadHeader(f"{what} in {source} starts at offset {offset}, which is not a multiple of the alignment {alignment}")
    return TensorInfo(name, fmt.name, values // dims[0], dims[0], offset, fmt.nbytes(values), tuple(reversed(dims)))


def _place(tensors: list[TensorInfo], data_offset: int, file_size: int, source: str) -> dict[str, TensorInfo]:
    """Absolute offsets; every tensor inside the file, none over another (else a small file could claim endless weights)."""
    placed: dict[str, TensorInfo] = {}
    for info in tensors:
        _unique(placed, info.name, "tensor", source)
        start = data_offset + info.offset
        if start + info.nbytes > file_size:
            raise TruncatedFile(
                f"{source} is cut off: tensor {info.name!r} ends at byte {start + info.nbytes}, the file has {file_size}; fetch it again"
            )
        placed[info.name] = replace(info, offset=start)
    end, last = 0, ""
    for info in sorted(placed.values(), key=lambda item: item.offset):
        if info.offset < end:
            raise BadHeader(f"tensors {last!r} and {info.name!r} overlap in {source}")
        end, last = info.offset + info.nbytes, info.name
    return placed


def read_header(data: memoryview, file_size: int, source: str = "the file") -> Header:
    """Parse the header at the start of `data`.

    `data` may be a prefix of the file (`file_size` is the whole length); when the header is longer than the prefix, TruncatedFile is
    raised and a caller that streams tries again with more. Raises BadHeader, TruncatedFile or UnsupportedFormat.
    """
    cursor = _Cursor(data, file_size, source)
    cursor.need(4, "the magic number")
    if bytes(data[:4]) != b"GGUF":
        raise BadHeader(f"{source} is not a GGUF file: it starts with {bytes(data[:4])!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in (2, 3):
        big = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
        raise UnsupportedFormat(f"{source} is GGUF version {version}{big}; versions 2 and 3, little endian, are read")
    tensor_count, pair_count = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    if pair_count > cursor.left() // _PAIR_BYTES:
        raise TruncatedFile(f"{source} claims {pair_count} metadata pairs of at least {_PAIR_BYTES} bytes, {cursor.left()} bytes are left")
    values: dict[str, Value] = {}
    for index in range(pair_count):
        key = cursor.name(f"metadata key {index}")
        _unique(values, key, "metadata key", source)
        values[key] = _pair_value(cursor, f"metadata key {key!r}")
    metadata = Metadata(values, source)
    alignment = metadata.optional_int("general.alignment", 32, low=8, high=MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise BadHeader(f"general.alignment of {source} is {alignment}, it must be a power of two")
    parts = metadata.optional_int("split.count", 1)
    if parts > 1:
        raise UnsupportedFormat(f"{source} is one of {parts} parts; join the parts into one file first")
    if tensor_count > cursor.left() // _TENSOR_BYTES:
        raise TruncatedFile(f"{source} claims {tensor_count} tensors of at least {_TENSOR_BYTES} bytes, {cursor.left()} bytes are left")
    tensors = [_tensor(cursor, index, alignment) for index in range(tensor_count)]
    data_offset = -(-cursor.at // alignment) * alignment
    return Header(version, metadata, _place(tensors, data_offset, file_size, source), alignment, data_offset)
