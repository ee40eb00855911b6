"""Structured output under the contract of logits processors."""

from typing import ClassVar

from intarsia.testing.logits_processors import LogitsProcessorContract
from intarsia_structured import provide_logits_processors
from structured import PERSON


class TestStructuredOutput(LogitsProcessorContract):
    asked: ClassVar = (
        {"json_schema": PERSON},
        {"regex": "(ab|c{2,9})*d"},
        {"choice": ["a", "ab", "abc", "é"]},
        {"grammar": 'root ::= "[" root* "]"'},
    )
    refused: ClassVar = (
        {"regex": "(a"},
        {"json_schema": {"type": "strng"}},
        {"regex": "a", "json": True},
        {"json_shema": {}},
        "json",
    )

    def provider(self):
        return provide_logits_processors()[0]
