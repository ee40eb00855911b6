"""A suffix automaton that grows by a token at a time, with how often each of its substrings came.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". SuffixDecoding (Oliaro et al. 2024)
drafts from suffix trees with counts; the automaton holds the same substrings in at most two states a token.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import Factory, define

#: The state of the empty string, and the link of that state.
ROOT, NOWHERE = 0, -1
#: Stands between texts in one automaton: no token's id, so that no match reaches over it.
END = -1
#: States that one more token is counted in. Chains are as long only where a text repeats itself over and over.
_COUNTED = 64


@define(eq=False)
class Automaton:
    """All substrings of the tokens so far. Extending costs O(1) amortised, and a count in each suffix's state.

    A state stands for the substrings that end at the same places; its own are suffixes of its longest one.

    Attributes:
        num_tokens: how many were added, ends of texts among them.
    """

    num_tokens: int = 0
    _next: list[dict[int, int]] = Factory(lambda: [{}])
    _link: list[int] = Factory(lambda: [NOWHERE])
    _length: list[int] = Factory(lambda: [0])
    _count: list[int] = Factory(lambda: [0])
    _latest: list[int] = Factory(lambda: [0])
    _last: int = ROOT

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens."""
        for token in token_ids:
            self._add(token)

    def _add(self, token: int) -> None:
        self.num_tokens += 1
        new = self._state({}, ROOT, self._length[self._last] + 1, 0)
        state = self._last
        while state != NOWHERE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != NOWHERE:
            self._link[new] = self._split(state, token)
        self._last = new
        self._tally(new)

    def _split(self, state: int, token: int) -> int:
        """Return the state of this state's longest substring and the token, which may first need one of its own."""
        target = self._next[state][token]
        length = self._length[state] + 1
        if self._length[target] == length:
            return target
        clone = self._state(dict(self._next[target]), self._link[target], length, self._count[target])
        self._latest[clone] = self._latest[target]
        self._link[target] = clone
        while state != NOWHERE and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(self.num_tokens)
        return len(self._next) - 1

    def _tally(self, state: int) -> None:
        """Count one more place for every suffix."""
        for _ in range(_COUNTED):
            if state == ROOT:
                return
            self._count[state] += 1
            self._latest[state] = self.num_tokens
            state = self._link[state]

    # --- matches ----------------------------------------------------------------------------------------------------

    def repeated(self) -> tuple[int, int]:
        """Return the longest suffix that came before: (state, length)."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of a match and one more token that is in here: (state, length)."""
        state, length = self.settle(state, length)
        while state != NOWHERE and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state != NOWHERE else 0
        return (ROOT, 0) if state == NOWHERE else (self._next[state][token], length + 1)

    def settle(self, state: int, length: int) -> tuple[int, int]:
        """Return a match's state, after states have been split since."""
        while state != ROOT and length <= self._length[self._link[state]]:
            state = self._link[state]
        return state, length

    def likeliest(self, state: int) -> tuple[int, float, int] | None:
        """Return what most often follows: (token, its part of what followed, next state); of equals the latest."""
        following = self._next[state]
        if not following:
            return None
        token = max(following, key=lambda one: (self._count[following[one]], self._latest[following[one]]))
        total = sum(self._count[target] for target in following.values())
        return token, self._count[following[token]] / total, following[token]

    def shorter(self, state: int) -> tuple[int, int]:
        """Return the longest suffix of a state's substrings that ends at more places: (state, length)."""
        link = max(self._link[state], ROOT)
        return link, self._length[link]
