"""Prompt lookup: the last tokens came before in the sequence, and what followed them there is the guess.

Saxena 2023, prompt lookup decoding; Yang et al. 2023 (LLMA) copy from references in the same way. Here an index makes
each token cost the same however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define, field

from intarsia.protocols import Drafter, DraftRequest, PartContext
from intarsia.types import Draft, Entered, SequenceId
from intarsia_speculative.control import controlled
from intarsia_speculative.options import NgramOptions

#: Matching tokens before a match's n-gram that are counted to grade it.
_GRADED = 63


def continuation(token_ids: Sequence[int], begin: int, count: int) -> tuple[int, ...]:
    """Return what follows from `begin` on, `count` ids: past the end it goes on as it began, as a period does."""
    period = len(token_ids) - begin
    known = tuple(token_ids[begin : begin + count])
    return tuple(known[i % period] for i in range(count))


@define(eq=False)
class Index:
    """Where each n-gram of one sequence was last followed by a token.

    Attributes:
        ids: what was indexed.
    """

    min_n: int
    max_n: int
    ids: list[int] = Factory(list)
    _follows: dict[tuple[int, ...], int] = Factory(dict)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens after those that are known: max_n - min_n + 1 entries each."""
        for token in token_ids[len(self.ids) :]:
            end = len(self.ids)
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._follows[tuple(self.ids[end - n :])] = end
            self.ids.append(token)

    def find(self) -> tuple[int, int] | None:
        """Return what follows the latest place of the longest n-gram at the end, and how many tokens match there."""
        for n in range(min(self.max_n, len(self.ids) - 1), self.min_n - 1, -1):
            begin = self._follows.get(tuple(self.ids[-n:]))
            if begin is not None:
                return begin, self._matching(begin, n)
        return None

    def _matching(self, begin: int, n: int) -> int:
        end = len(self.ids)
        while n < min(_GRADED, begin) and self.ids[begin - n - 1] == self.ids[end - n - 1]:
            n += 1
        return n


@define(eq=False)
class NgramDrafter(Drafter):
    """Keeps an index for each sequence, of prompt and answer."""

    options: NgramOptions
    _indexes: dict[SequenceId, Index] = field(factory=dict, init=False)
    _matches: dict[SequenceId, int] = field(factory=dict, init=False)

    def enter(self, entered: Entered) -> None:
        """Index the prompt; after a preemption what is known is known still."""
        index = self._indexes.get(entered.sequence_id)
        if index is not None and tuple(index.ids) != entered.token_ids[: len(index.ids)]:
            del self._indexes[entered.sequence_id]
        self._index(entered.sequence_id, entered.token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return what followed the last tokens where they came before."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        index = self._index(request.sequence_id, request.token_ids)
        found = index.find()
        self._matches[request.sequence_id] = found[1] if found else 0
        return Draft(continuation(index.ids, found[0], request.wanted)) if found else Draft()

    def _index(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> Index:
        index = self._indexes.get(sequence_id)
        if index is None:
            index = self._indexes[sequence_id] = Index(self.options.min_n, self.options.max_n)
        index.extend(token_ids)
        return index

    def grade(self, sequence_id: SequenceId) -> int:
        """Return the grade of the last guess: how often the matching tokens can be halved."""
        return self._matches.get(sequence_id, 0).bit_length()

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop the sequence's index."""
        self._indexes.pop(sequence_id, None)
        self._matches.pop(sequence_id, None)


def build(context: PartContext) -> Drafter:
    """Make the drafter."""
    options: NgramOptions = context.options
    drafter = NgramDrafter(options)
    return controlled(drafter, k=options.k, adaptive=options.adaptive, is_cheap=True, grade=drafter.grade)
