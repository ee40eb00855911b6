"""Metadata values by key, each checked for its type and range when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia_gguf.header import Header, Value, ValueType

_INTEGERS = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)
_FLOATS = frozenset({ValueType.FLOAT32, ValueType.FLOAT64})
#: Larger than any dimension or count of a model.
LARGE = 2**31 - 1

_T = TypeVar("_T")


@frozen
class Metadata:
    """Every method raises CheckpointError, naming file, key and value, for a wrong type or range.

    A key that is absent gives `default`; without one it is an error.
    """

    path: str
    values: Mapping[str, Value]

    @classmethod
    def of(cls, header: Header) -> Metadata:
        """The metadata of a header."""
        return cls(header.path, header.metadata)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, key: str, what: str) -> NoReturn:
        """Raise CheckpointError for a key."""
        raise CheckpointError(f"{self.path}: metadata {key!r} {what}")

    def integer(self, key: str, *, low: int = 1, high: int = LARGE, default: int | None = None) -> int:
        """Return a whole number from `low` to `high`, both included."""
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if value.type not in _INTEGERS:
            self.fail(key, f"is {value.type_name}, not a whole number")
        if not low <= value.content <= high:
            self.fail(key, f"is {value.content}, not a whole number from {low} to {high}")
        return int(value.content)

    def number(self, key: str, *, positive: bool = False, default: float | None = None) -> float:
        """Return a finite number, above 0 where it must be `positive`."""
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if value.type not in _FLOATS | _INTEGERS:
            self.fail(key, f"is {value.type_name}, not a number")
        if not math.isfinite(value.content) or (positive and value.content <= 0):
            self.fail(key, f"is {value.content}, not a finite number{' above 0' if positive else ''}")
        return float(value.content)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return a bool."""
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if value.type is not ValueType.BOOL:
            self.fail(key, f"is {value.type_name}, not a bool")
        return bool(value.content)

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a text."""
        value = self.values.get(key)
        if value is None:
            return self._default(key, default)
        if value.type is not ValueType.STRING:
            self.fail(key, f"is {value.type_name}, not a text")
        return str(value.content)

    def texts(self, key: str) -> list[str]:
        """Return an array of texts."""
        return list(self._array(key, frozenset({ValueType.STRING}), "texts"))

    def floats(self, key: str) -> tuple[float, ...]:
        """Return an array of float32 or float64."""
        return tuple(self._array(key, _FLOATS, "floats"))

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an array of whole numbers."""
        return tuple(self._array(key, _INTEGERS, "whole numbers"))

    def flags(self, key: str) -> tuple[bool, ...]:
        """Return an array of bools, which may be written as whole numbers."""
        return tuple(map(bool, self._array(key, _INTEGERS | {ValueType.BOOL}, "bools")))

    def per_layer(self, key: str, *, default: int | None = None) -> int:
        """Return a whole number from 1 that a file may state once, or for each layer if it is the same in all."""
        value = self.values.get(key)
        if value is None or value.type is not ValueType.ARRAY:
            return self.integer(key, default=default)
        found = set(self.integers(key))
        if len(found) != 1 or not 1 <= min(found) <= LARGE:
            self.fail(key, f"differs between layers or is out of range: {sorted(found)[:8]}")
        return found.pop()

    def _array(self, key: str, elements: frozenset[ValueType], what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            self.fail(key, "is missing")
        if value.type is not ValueType.ARRAY or value.element not in elements:
            self.fail(key, f"is {value.type_name}, not an array of {what}")
        return value.content

    def _default(self, key: str, default: _T | None) -> _T:
        if default is None:
            self.fail(key, "is missing")
        return default
