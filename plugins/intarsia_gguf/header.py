"""The header of a GGUF file: metadata, and where each tensor lies.

The format is described in ggml's `docs/gguf.md`. Every count, length, type and offset comes from the file and is
checked before it is used: a malformed file gives a CheckpointError, in time and memory bounded by the limits below.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen

from intarsia.errors import CheckpointError
from intarsia_gguf.cursor import Cursor
from intarsia_gguf.files import MAGIC
from intarsia_gguf.formats import FORMATS, TensorFormat

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

# Several times what the largest public models need.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 21
MAX_TEXT_BYTES = 1 << 26
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 256
MAX_ALIGNMENT = 1 << 20


class ValueType(IntEnum):
    """Types of metadata values, by their number in the file."""

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


#: struct codes of the types of fixed size.
_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "B",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@frozen
class Value:
    """A metadata value with the type that it has in the file; `element` is the type of an array's items."""

    type: ValueType
    content: Any = field(repr=False)
    element: ValueType | None = None

    @property
    def type_name(self) -> str:
        """The type in words, such as `float32` or `array of string`."""
        return self.type.name.lower() if self.element is None else f"array of {self.element.name.lower()}"


@frozen
class TensorInfo:
    """Where a tensor lies. `shape` is rows first, the reverse of the file's; `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    offset: int
    num_bytes: int


@frozen
class Header:
    """A file's header, and the bytes that its tensors are read from."""

    path: str
    version: int
    metadata: Mapping[str, Value] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    data: mmap.mmap = field(repr=False)


def read_header(path: Path) -> Header:
    """Map a file and read its header.

    Raises:
        CheckpointError: the file is no GGUF file of a version we know, or is malformed or cut short.
    """
    try:
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if data is None:
        raise CheckpointError(f"{path}: the file is empty")
    cursor = Cursor(data, str(path), MAX_TEXT_BYTES)
    version = _read_version(cursor)
    num_tensors = cursor.count("the number of tensors", MAX_TENSORS, least_bytes=8 + 4 + 8 + 4 + 8)
    num_keys = cursor.count("the number of metadata keys", MAX_KEYS, least_bytes=8 + 4 + 1)
    metadata = _read_metadata(cursor, num_keys)
    alignment = _alignment(cursor, metadata)
    tensors = _read_tensors(cursor, num_tensors, alignment)
    return Header(str(path), version, metadata, tensors, data)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(len(MAGIC), "the magic")
    if magic != MAGIC:
        cursor.fail(f"no GGUF file: it starts with {magic!r} instead of {MAGIC!r}")
    version = cursor.uint32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
            cursor.fail("the file is big-endian (byte-swapped), which is not supported; convert it for little-endian")
        if version == 1:
            cursor.fail("GGUF version 1 is not supported; convert the model again, to version 3")
        cursor.fail(f"GGUF version {version} is not known; versions 2 and 3 are")
    return version


# --- metadata ---------------------------------------------------------------------------------------------------------


def _read_metadata(cursor: Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    items_left = MAX_ARRAY_ITEMS
    for index in range(num_keys):
        key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            cursor.fail(f"metadata key {index} is empty")
        if key in metadata:
            cursor.fail(f"metadata key {key[:200]!r} is there twice")
        value = _read_value(cursor, f"metadata {key[:200]!r}", items_left)
        if value.type is ValueType.ARRAY:
            items_left -= len(value.content)
        metadata[key] = value
    return metadata


def _read_type(cursor: Cursor, what: str) -> ValueType:
    number = cursor.uint32(f"the type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        cursor.fail(f"{what} has the unknown value type {number}; types are 0 to {max(ValueType).value}")


def _read_value(cursor: Cursor, what: str, max_items: int) -> Value:
    kind = _read_type(cursor, what)
    if kind is ValueType.STRING:
        return Value(kind, cursor.text(what))
    if kind is ValueType.ARRAY:
        return _read_array(cursor, what, max_items)
    return Value(kind, _read_numbers(cursor, kind, 1, what)[0])


def _read_array(cursor: Cursor, what: str, max_items: int) -> Value:
    element = _read_type(cursor, f"the items of {what}")
    if element is ValueType.ARRAY:
        # llama.cpp refuses them as well; nesting would be without bound.
        cursor.fail(f"{what} is an array of arrays, which is not supported")
    size = 8 if element is ValueType.STRING else struct.calcsize(_CODES[element])
    count = cursor.count(f"the number of items of {what}", max_items, least_bytes=size)
    if element is ValueType.STRING:
        return Value(ValueType.ARRAY, cursor.texts(count, what), element)
    return Value(ValueType.ARRAY, _read_numbers(cursor, element, count, what), element)


def _read_numbers(cursor: Cursor, kind: ValueType, count: int, what: str) -> tuple[Any, ...]:
    layout = struct.Struct(f"<{count}{_CODES[kind]}")
    numbers = layout.unpack(cursor.take(layout.size, what))
    if kind is not ValueType.BOOL:
        return numbers
    if any(number > 1 for number in numbers):
        cursor.fail(f"{what} holds {max(numbers)} as a bool, which is neither 0 nor 1")
    return tuple(map(bool, numbers))


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    alignment = value.content
    if value.type is not ValueType.UINT32:
        cursor.fail(f"metadata 'general.alignment' is {value.type_name}, not uint32")
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"metadata 'general.alignment' is {alignment}, not a power of two from 1 to {MAX_ALIGNMENT}")
    return int(alignment)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _read_tensors(cursor: Cursor, num_tensors: int, alignment: int) -> tuple[TensorInfo, ...]:
    found: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        info = _read_tensor(cursor, index, alignment)
        if info.name in found:
            cursor.fail(f"tensor {info.name!r} is there twice")
        found[info.name] = info
    start = _align(cursor.position, alignment)
    placed = tuple(
        TensorInfo(info.name, info.shape, info.format, start + info.offset, info.num_bytes) for info in found.values()
    )
    _check_places(cursor, placed, alignment)
    return placed


def _read_tensor(cursor: Cursor, index: int, alignment: int) -> TensorInfo:
    name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    if not name:
        cursor.fail(f"the name of tensor {index} is empty")
    num_dims = cursor.uint32(f"the number of dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{what} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
    dims = [cursor.uint64(f"dimension {dim} of {what}") for dim in range(num_dims)]
    type_number = cursor.uint32(f"the type of {what}")
    offset = cursor.uint64(f"the offset of {what}")
    fmt = FORMATS.get(type_number)
    if fmt is None:
        cursor.fail(f"{what} has the tensor type {type_number}, which is unknown or was removed from the format")
    num_elements = 1
    for dim in dims:
        # Bounded one by one, so that no product outgrows what the file could hold (a group takes at least a byte).
        num_elements *= dim
        if dim < 1 or num_elements > len(cursor.data) * fmt.group:
            cursor.fail(f"{what} has the shape {tuple(reversed(dims))}, which the file cannot hold")
    if dims[0] % fmt.group:
        cursor.fail(
            f"{what} has rows of {dims[0]} elements, which is not a multiple of {fmt.group}, the group of {fmt.name}"
        )
    if offset % alignment:
        cursor.fail(f"{what} has the offset {offset}, which is not a multiple of the alignment {alignment}")
    return TensorInfo(name, tuple(reversed(dims)), fmt, offset, fmt.num_bytes(num_elements))


def _check_places(cursor: Cursor, tensors: tuple[TensorInfo, ...], alignment: int) -> None:
    """Every tensor lies inside the file, and no two share bytes."""
    size = len(cursor.data)
    end, before = 0, None
    for info in sorted(tensors, key=lambda info: info.offset):
        if before is not None and info.offset < end:
            cursor.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.num_bytes, info.name
        if end > size:
            cursor.fail(
                f"cut short or malformed: tensor {info.name!r} needs the bytes {info.offset} to {end}, "
                f"but the file has {size}"
            )
    # Writers pad the last tensor too. A file without any padding is whole, one with a part of it was cut.
    if end < size < _align(end, alignment):
        cursor.fail(f"cut short: the file ends at {size}, inside the padding behind tensor {before!r}")


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
