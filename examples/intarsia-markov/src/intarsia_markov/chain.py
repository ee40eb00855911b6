"""What followed which tokens, how often: a Markov chain of several orders, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from attrs import define, field


@define(eq=False)
class Chain:
    """Counts of the tokens that followed each context of 1 to `order` tokens, under each salt.

    A context is kept with its salt: what was learned under one is never seen under another. Contexts that were not met
    for longest are forgotten first, whatever their salt.

    Attributes:
        order: tokens of the longest contexts.
        max_contexts: that are kept.
        halve_at: tokens counted behind a context at which its counts are halved; those of 1 are forgotten. So a context
            has at most `halve_at` followers, and recent text counts more than old.
    """

    order: int
    max_contexts: int
    halve_at: int
    _followers: OrderedDict[tuple[str, tuple[int, ...]], dict[int, int]] = field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._followers)

    def learn(self, salt: str, token_ids: Sequence[int], start: int) -> None:
        """Count the tokens from position `start` on behind their contexts, which can begin before it."""
        for end in range(start, len(token_ids)):
            for length in range(1, min(self.order, end) + 1):
                self._count((salt, tuple(token_ids[end - length : end])), token_ids[end])

    def _count(self, context: tuple[str, tuple[int, ...]], token: int) -> None:
        followers = self._followers.setdefault(context, {})
        self._followers.move_to_end(context)
        followers[token] = followers.get(token, 0) + 1
        if sum(followers.values()) >= self.halve_at:
            self._followers[context] = {token: count // 2 for token, count in followers.items() if count > 1}
        if len(self._followers) > self.max_contexts:
            self._followers.popitem(last=False)

    def likeliest(self, salt: str, token_ids: Sequence[int]) -> tuple[int, float] | None:
        """Return the likeliest next token and its probability, by the longest context that is known.

        A token that came c times of n, among q different ones, has the probability c / (n + q): what is left is for
        tokens that never came (Moffat 1990, PPM's method C). None where no context is known.
        """
        for length in range(min(self.order, len(token_ids)), 0, -1):
            followers = self._followers.get((salt, tuple(token_ids[len(token_ids) - length :])))
            if followers:
                token = max(followers, key=followers.__getitem__)
                return token, followers[token] / (sum(followers.values()) + len(followers))
        return None
