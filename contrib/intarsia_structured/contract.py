"""What the contract of logits processors is told of `structured_output`: run by `intarsia plugins check structured`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from intarsia.testing.logits_processors import LogitsProcessorContract
from intarsia.types import Provider
from intarsia_structured import provide_logits_processors

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


class StructuredOutputContract(LogitsProcessorContract):
    """A structure of each kind, and what none can be made of."""

    asked: ClassVar[Sequence[Any]] = (
        {"json_schema": _PERSON},
        {"regex": "(ab|c{2,9})*d"},
        {"choice": ["a", "ab", "abc", "é"]},
        {"grammar": 'root ::= "[" root* "]"'},
    )
    refused: ClassVar[Sequence[Any]] = (
        {"regex": "(a"},
        {"json_schema": {"type": "strng"}},
        {"regex": "a", "json": True},
        {"json_shema": {}},
        "json",
    )

    def provider(self) -> Provider:
        return provide_logits_processors()[0]
