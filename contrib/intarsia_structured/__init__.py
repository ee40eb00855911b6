"""Structured output: answers that follow a JSON schema, a regex, a grammar or a choice, whatever the model prefers."""

from __future__ import annotations

from importlib.util import find_spec

from intarsia.hookspecs import hookimpl
from intarsia.protocols import PartContext
from intarsia.types import Fit, Provider, Unfit, lazy
from intarsia_structured.options import StructuredOptions


def _fit(context: PartContext) -> Fit | Unfit:
    """An answer can only end where there is an end-of-sequence id, and tokens have bytes only in a tokenizer."""
    if find_spec("llguidance") is None:
        return Unfit('it needs llguidance: pip install "intarsia[structured]"')
    if context.tokenizer is None:
        return Unfit("the model's files have no tokenizer, so its tokens have no text that could follow a structure")
    if not any(0 <= one < context.num_ids for one in context.tokenizer.eos_ids):
        return Unfit("the model has no end-of-sequence id, so a structured answer could never end")
    return Fit(50, "masks what would break the structure a request asks for")


@hookimpl
def provide_logits_processors() -> list[Provider]:
    """Offer `structured_output`."""
    return [
        Provider(
            key="structured_output",
            summary="answers that follow a JSON schema, a regex, a grammar or a choice",
            options=StructuredOptions,
            fit=_fit,
            build=lazy("intarsia_structured.processor:build"),
        )
    ]
