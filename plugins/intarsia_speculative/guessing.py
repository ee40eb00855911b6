"""Guesses that a model makes: one token after another, all sequences together.

Shape legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from intarsia.protocols import DraftRequest, Target
from intarsia.types import Draft, Row

if TYPE_CHECKING:
    import torch


@define(eq=False)
class Guessing:
    """One sequence's guesses in the making.

    Attributes:
        request: what was asked.
        begin: tokens of the sequence that the model has in its cache.
        wanted: how many guesses to make.
        pages: a page table that holds the sequence and all guesses but the last.
        token_ids: guesses so far.
    """

    request: DraftRequest
    begin: int
    wanted: int
    pages: tuple[tuple[int, ...], ...]
    token_ids: list[int] = field(factory=list, init=False)
    _probabilities: list[torch.Tensor] = field(factory=list, init=False)
    _failed: bool = field(default=False, init=False)

    @property
    def goes_on(self) -> bool:
        """Whether a guess is still wanted."""
        return len(self.token_ids) < self.wanted and not self._failed

    def row(self) -> Row:
        """Return what runs next: all that the model lacks, or the last guess."""
        known = self.request.token_ids
        ids, start = tuple(known[self.begin :]), self.begin
        if self.token_ids:
            ids, start = (self.token_ids[-1],), len(known) + len(self.token_ids) - 1
        return Row(sequence_id=self.request.sequence_id, token_ids=ids, start=start, pages=self.pages)

    def take(self, token_id: int, probabilities_V: torch.Tensor | None) -> None:
        """Take a guess, and what it was drawn from; below 0 is none."""
        if token_id < 0:
            self._failed = True
            return
        self.token_ids.append(token_id)
        if probabilities_V is not None:
            self._probabilities.append(probabilities_V)

    def draft(self) -> Draft:
        """Return what was guessed."""
        if not self._probabilities:
            return Draft(tuple(self.token_ids))
        import torch

        return Draft(tuple(self.token_ids), torch.stack(self._probabilities))


def guess(guessings: Sequence[Guessing], target: Target, forward: Callable[[Sequence[Row]], torch.Tensor]) -> None:
    """Make the guesses.

    Args:
        guessings: those of one batch; filled in place.
        target: chooses ids as the requests would.
        forward: runs rows and returns logits (R, V) after their last tokens.
    """
    while open_ones := [one for one in guessings if one.goes_on]:
        logits_RV = forward([one.row() for one in open_ones])
        ids = [one.request.sequence_id for one in open_ones]
        chosen = target.choose(ids, [one.token_ids for one in open_ones], logits_RV)
        q_RV = chosen.probabilities
        for row, (one, token) in enumerate(zip(open_ones, chosen.token_ids, strict=True)):
            one.take(token, None if q_RV is None else q_RV[row])
