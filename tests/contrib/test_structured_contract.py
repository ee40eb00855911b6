"""Structured output under the contract of logits processors."""

from intarsia_structured.contract import StructuredOutputContract


class TestStructuredOutput(StructuredOutputContract):
    pass
