"""Banned words: texts that an answer never holds, however they are cut into tokens.

Everything is in bytes, since tokens can cut characters. Where the answer so far ends with the first k bytes of a word,
a token that starts with the word's other bytes would complete it; so would, anywhere, a token that holds all of it.
Case is exact. A special token has no bytes: it neither completes a word nor interrupts one.

Shape legend: N ids.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from attrs import define, field, frozen

from intarsia.protocols import TokenizerView

#: How many words stay indexed after the sequences that ban them have left.
_MOST_KEPT = 256


@frozen(eq=False)
class Word:
    """A word, and the tokens that complete it.

    Attributes:
        holders_N: tokens that hold all of it.
        enders: beginnings of the word, each with the tokens that start with the rest of it, where there are any.
    """

    text: bytes
    holders_N: np.ndarray
    enders: tuple[tuple[bytes, np.ndarray], ...]


@define
class Vocabulary:
    """The bytes of every token, and where words are in them."""

    tokens: list[bytes]
    _joined: bytes = field(init=False)
    _bounds: np.ndarray = field(init=False)
    _sorted: list[bytes] = field(init=False)
    _order_N: np.ndarray = field(init=False)
    _longest: int = field(init=False)
    _words: dict[str, Word] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._joined = b"".join(self.tokens)
        self._bounds = np.array([0, *accumulate(map(len, self.tokens))], dtype=np.int64)
        order = sorted(range(len(self.tokens)), key=self.tokens.__getitem__)
        self._sorted = [self.tokens[token] for token in order]
        self._order_N = np.array(order, dtype=np.int64)
        self._longest = max(map(len, self.tokens), default=0)

    @classmethod
    def of(cls, tokenizer: TokenizerView, num_ids: int) -> Vocabulary:
        """Read every token of a tokenizer: a second or so for a large one."""
        return cls([tokenizer.token_bytes(token) for token in range(num_ids)])

    def word(self, text: str) -> Word:
        """Return a word's tokens; those of the words asked for last are kept."""
        word = self._words.pop(text, None) or self._index(text.encode("utf-8", "surrogatepass"))
        self._words[text] = word
        if len(self._words) > _MOST_KEPT:
            del self._words[next(iter(self._words))]
        return word

    def _index(self, text: bytes) -> Word:
        first = max(1, len(text) - self._longest)  # no token is long enough to end an earlier beginning
        enders = [(text[:k], self._starting_with(text[k:])) for k in range(first, len(text))]
        return Word(text, self._holding(text), tuple((start, ids_N) for start, ids_N in enders if len(ids_N)))

    def _starting_with(self, prefix: bytes) -> np.ndarray:
        # Tokens with a prefix are next to each other, and cut to its length they are sorted too.
        first = bisect_left(self._sorted, prefix)
        past = bisect_right(self._sorted, prefix, lo=first, key=lambda token: token[: len(prefix)])
        return self._order_N[first:past]

    def _holding(self, text: bytes) -> np.ndarray:
        places, place = [], self._joined.find(text)
        while place >= 0:
            places.append(place)
            place = self._joined.find(text, place + 1)
        starts = np.array(places, dtype=np.int64)
        ids = np.searchsorted(self._bounds, starts, side="right") - 1
        # What runs over a token's end was only joined here.
        return np.unique(ids[starts + len(text) <= self._bounds[ids + 1]])


@define
class Words:
    """The words that are banned in one sequence, and the end of its answer, in bytes."""

    vocabulary: Vocabulary
    words: tuple[Word, ...]
    _tail: bytes = field(default=b"", init=False)
    _reach: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reach = max(len(word.text) for word in self.words) - 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what was chosen."""
        self._tail = self._after(token_ids)

    def forbidden(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """Return ids, in several arrays (N,), that would complete a word after the answer so far and these drafts."""
        tail = self._after(drafts)
        return [
            ids_N
            for word in self.words
            for ids_N in (word.holders_N, *(ids_N for start, ids_N in word.enders if tail.endswith(start)))
        ]

    def _after(self, token_ids: Sequence[int]) -> bytes:
        tail = self._tail + b"".join(self.vocabulary.tokens[token] for token in token_ids)
        return tail[max(0, len(tail) - self._reach) :]
