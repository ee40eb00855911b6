"""Reading numbers and texts from bytes that may lie: each is checked against the file's end before it is believed."""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from attrs import define

from intarsia.errors import CheckpointError

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


@define
class Cursor:
    """A position in a file's bytes.

    Attributes:
        data: the whole file; slices of it are bytes (an mmap or bytes).
        path: for messages.
        text_budget: bytes of text that may still be read, so that a hostile file cannot fill the memory.
    """

    data: Any
    path: str
    text_budget: int
    position: int = 0

    def fail(self, what: str) -> NoReturn:
        """Raise CheckpointError that names the file."""
        raise CheckpointError(f"{self.path}: {what}")

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return len(self.data) - self.position

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes and step over them."""
        if num_bytes > self.left:
            self.fail(
                f"cut short or malformed: {what} needs {num_bytes} bytes at offset {self.position}, "
                f"but the file ends after {self.left}"
            )
        start = self.position
        self.position = start + num_bytes
        return self.data[start : self.position]  # type: ignore[no-any-return]

    def uint32(self, what: str) -> int:
        """Return the next unsigned 32-bit number."""
        return int(_UINT32.unpack(self.take(4, what))[0])

    def uint64(self, what: str) -> int:
        """Return the next unsigned 64-bit number."""
        return int(_UINT64.unpack(self.take(8, what))[0])

    def count(self, what: str, limit: int, least_bytes: int) -> int:
        """Return the next number as a count of things of at least `least_bytes` each, which must fit into the file."""
        value = self.uint64(what)
        if value > limit:
            self.fail(f"{what} is {value}, more than the {limit} that are accepted")
        if value * least_bytes > self.left:
            self.fail(f"cut short or malformed: {what} is {value}, too many for the {self.left} bytes that follow")
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        """Return the next text: its length in bytes, then UTF-8."""
        length = self.uint64(f"the length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} is {length} bytes long, more than the {limit} that are accepted")
        self._spend(length, what)
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:32]!r}")

    def texts(self, count: int, what: str) -> list[str]:
        """Return the next `count` texts. A loop of its own: vocabularies hold hundreds of thousands."""
        data, end, position = self.data, len(self.data), self.position
        unpack, values = _UINT64.unpack_from, []
        budget_end = position + 8 * count + self.text_budget
        for index in range(count):
            start = position + 8
            if start > end:
                self.fail(f"cut short: {what} ends after {index} of {count} texts")
            position = start + unpack(data, position)[0]
            if position > end:
                self.fail(f"cut short or malformed: text {index} of {what} reaches past the end of the file")
            if position > budget_end:
                self.fail(f"{what}: the file's texts take more memory than is accepted")
            try:
                values.append(data[start:position].decode("utf-8"))
            except UnicodeDecodeError:
                self.fail(f"text {index} of {what} is not UTF-8: {data[start : start + 32]!r}")
        self.text_budget -= position - self.position - 8 * count
        self.position = position
        return values

    def _spend(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.left:
            self.fail(
                f"cut short or malformed: {what} has {num_bytes} bytes at offset {self.position}, "
                f"but the file ends after {self.left}"
            )
        self.text_budget -= num_bytes
        if self.text_budget < 0:
            self.fail(f"{what}: the file's texts take more memory than is accepted")
