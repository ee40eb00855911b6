"""The tokens of a GGUF file, each with its type and score."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from attrs import field, frozen

from intarsia_gguf.metadata import Metadata

MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"


class TokenType(IntEnum):
    """Token types as llama.cpp numbers them (they are sentencepiece's)."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Types that are matched whole in a text -> whether such a token is special, so left out of the text when decoding.
_ADDED = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}


@frozen
class Vocabulary:
    """Tokens by id.

    Attributes:
        tokens: the text of each, as the file spells it, no two equal.
        types: the type of each; all normal where the file does not say.
        scores: the score of each, none of them NaN; None where the file does not say.
    """

    tokens: list[str] = field(repr=False)
    types: tuple[int, ...] = field(repr=False)
    scores: tuple[float, ...] | None = field(repr=False)

    def ids(self) -> dict[str, int]:
        """Return text -> id, in the order of ids."""
        return {token: index for index, token in enumerate(self.tokens)}

    def added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are matched whole in a text, as tokenizer.json lists them."""
        return [
            {
                "id": index,
                "content": self.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": _ADDED[TokenType(kind)],
            }
            for index, kind in enumerate(self.types)
            if kind in _ADDED
        ]


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Return the tokens; raise CheckpointError where the arrays are missing, of wrong types or of unequal lengths."""
    tokens = metadata.texts(TOKENS)
    if not tokens:
        metadata.fail(TOKENS, "is empty")
    # As llama.cpp names them: an empty text is no token.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        metadata.fail(TOKENS, f"has {twice[:100]!r} twice")
    return Vocabulary(tokens, _types(metadata, len(tokens)), _scores(metadata, len(tokens)))


def _types(metadata: Metadata, num_tokens: int) -> tuple[int, ...]:
    if TYPES not in metadata:
        return (TokenType.NORMAL,) * num_tokens
    types = metadata.integers(TYPES)
    _check_length(metadata, TYPES, len(types), num_tokens)
    unknown = set(types) - set(TokenType)
    if unknown:
        metadata.fail(TYPES, f"has the unknown type {min(unknown)}; types are 0 to {max(TokenType).value}")
    return types


def _scores(metadata: Metadata, num_tokens: int) -> tuple[float, ...] | None:
    if SCORES not in metadata:
        return None
    scores = metadata.floats(SCORES)
    _check_length(metadata, SCORES, len(scores), num_tokens)
    if any(map(math.isnan, scores)):
        metadata.fail(SCORES, "has a score that is not a number")
    return scores


def _check_length(metadata: Metadata, key: str, length: int, num_tokens: int) -> None:
    if length != num_tokens:
        metadata.fail(key, f"has {length} items, but there are {num_tokens} tokens")
