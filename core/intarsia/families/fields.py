"""A checkpoint's config, read field by field: every value is checked where it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from attrs import frozen

from intarsia.errors import CheckpointError, did_you_mean

#: Sizes past these are mistakes or attacks; no model comes near.
MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 65_536
MAX_EXPERTS: Final = 65_536
MAX_DIM: Final = 1 << 24
MAX_LEN: Final = 1 << 31
#: Numbers past these leave float32's range once they are multiplied.
_LOW, _HIGH = 1e-30, 1e30

_REQUIRED: Any = object()


@frozen
class Fields:
    """A config in Hugging Face's spelling. `prefix` is the path of a nested table. Null is the same as absent.

    Every method raises CheckpointError, which names the field, its value and what would be right.
    """

    values: Mapping[str, Any]
    prefix: str = ""

    def has(self, name: str) -> bool:
        """Whether a value is given."""
        return self.values.get(name) is not None

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these fields over a family's defaults, which stand where a name is absent; not where it is null."""
        return Fields({**defaults, **self.values}, self.prefix)

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a value as it is."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"config: {self.prefix}{name} is missing", field=f"{self.prefix}{name}")
        return default

    def wrong(self, name: str, right: str) -> CheckpointError:
        """Return the error for a value that is not what is right."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        path = f"{self.prefix}{name}"
        return CheckpointError(f"config: {path} is {shown}, not {right}", field=path)

    def size(self, name: str, default: Any = _REQUIRED, *, low: int = 1, high: int = MAX_DIM) -> int:
        """Return a whole number from `low` to `high`."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a number above 0 that float32 can work with."""
        value = self.get(name, default)
        # NaN fails every comparison, and whole numbers of any size compare with floats.
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not _LOW <= value <= _HIGH:
            raise self.wrong(name, f"a number from {_LOW:g} to {_HIGH:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def table(self, name: str) -> Fields:
        """Return a nested table; an absent one is empty."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object or null")
        return Fields(value, f"{self.prefix}{name}.")

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of so many finite numbers above 0."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise self.wrong(name, f"a list of {length} numbers")
        return tuple(Fields({name: one}, self.prefix).number(name) for one in value)

    def texts(self, name: str, known: Collection[str], length: int) -> tuple[str, ...]:
        """Return a list of so many texts, each one of those that are known."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or len(value) != length or not all(item in known for item in value):
            raise self.wrong(name, f"a list of {length} out of {', '.join(known)}")
        return tuple(value)

    def choice(self, name: str, meanings: Mapping[str, Any], default: Any = _REQUIRED) -> Any:
        """Return what a text means, out of those that are known."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in meanings:
            hint = did_you_mean(value, meanings) if isinstance(value, str) else ""
            raise self.wrong(name, f"one of {', '.join(meanings)}{'.' + hint if 'Did' in hint else ''}")
        return meanings[value]

    def must_be(self, name: str, value: object, *, default: Any = None) -> None:
        """Refuse any other value: it would change the model's result, and a wrong answer is worse than none."""
        found = self.get(name, default)
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            raise self.wrong(name, repr(value))
