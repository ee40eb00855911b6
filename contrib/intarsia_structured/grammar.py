"""Constraints as llguidance's Lark, and Lark as a matcher. Imports neither torch nor the core: the trial's process too.

llguidance forces the canonical tokens of text that a grammar leaves no choice about, if it is let. It is not: how a
text is cut into tokens is the model's choice, and masks stay a function of the ids' text alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance
from attrs import frozen
from llguidance.gbnf_to_lark import any_to_lark

#: Work that one mask may take before it is an error: some 15 ms, as llguidance's authors measured it.
_LIMITS = {"verbose_errors": False, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
#: The last of several declarations counts.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_SPACE = "[\\x20\\x0A\\x0D\\x09]"


class GrammarError(Exception):
    """A constraint that cannot be compiled. The message is llguidance's, cut."""


@frozen(eq=False)
class Vocabulary:
    """The bytes of the ids that can be chosen.

    Attributes:
        tokens: by id; empty where an id has no text; a name where it is special.
        special_ids: ids that no text matches; Lark's rules can ask for them by name.
        eos_ids: those of them that end an answer.
    """

    tokens: Sequence[bytes]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def tokenizer(self) -> Any:
        """Return it as llguidance wants it."""
        return llguidance.LLTokenizer(_Wrapper(self), eos_token=list(self.eos_ids))


class _Wrapper(llguidance.TokenizerWrapper):
    """What llguidance reads of a vocabulary. Nothing is ever forced, so nothing is ever encoded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special_ids)

    def __call__(self, text: str) -> list[int]:  # noqa: ARG002
        raise AssertionError("nothing is encoded where nothing is forced")


def lark_of(kind: str, source: str, max_whitespace: int) -> str:
    """Return a constraint as Lark, complete.

    Raises:
        GrammarError: it is malformed.
    """
    try:
        if kind == "json_schema":
            lark = f"start: %json {_schema(source, max_whitespace)}"
        elif kind == "choice":
            lark = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(source))
        elif kind == "regex":
            lark = json.loads(llguidance.LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]
        else:
            lark = any_to_lark(source)
    except Exception as error:  # the converter of GBNF raises whatever comes
        raise GrammarError(_short(error)) from None
    return lark + _NO_FORCING


def _schema(source: str, max_whitespace: int) -> str:
    """Return a schema with its whitespace bounded: a model that likes it would never end otherwise."""
    schema = json.loads(source)
    if schema is False:
        raise GrammarError("no answer satisfies the schema false")
    if schema is True:
        schema = {}
    spaces: dict[str, object] = {"whitespace_flexible": max_whitespace > 0}
    if max_whitespace:
        spaces["whitespace_pattern"] = f"{_SPACE}{{1,{max_whitespace}}}"
    schema["x-guidance"] = {**schema.get("x-guidance", {}), **spaces}
    return json.dumps(schema, ensure_ascii=False)


def matcher_of(tokenizer: Any, lark: str) -> Any:
    """Return a matcher at the start of an answer, its first mask computed.

    Raises:
        GrammarError: the grammar is malformed or too large, or no answer follows it.
    """
    limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    matcher = llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)
    check(matcher)
    matcher.compute_bitmask()
    check(matcher)
    return matcher


def check(matcher: Any) -> None:
    """Raise GrammarError where a matcher has failed. It never recovers."""
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


def _short(error: object) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0]
    if "NoExtension" in text:
        return "no token of the model can begin or go on with what it allows"
    # A regex's own error comes last, below a drawing of where it is.
    reason = next((line.strip() for line in reversed(lines) if line.startswith("error: ")), "")
    return f"{_cut(text)} {reason}".strip()


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
