"""A cache that asks for a move with each new page, for suites that watch what becomes of moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.types import CacheMove, SequenceId

__all__ = ["ZeroingAllocator"]


class ZeroingAllocator:
    """Passes all calls on to an allocator, and has each page zeroed that a sequence takes to write to.

    A move that is lost is missed by counting; one that comes late wipes out what was written by then.

    Attributes:
        taken: all moves that `take_moves` has returned.
    """

    def __init__(self, inner: Any, page_size: int) -> None:
        self._inner, self._page_size = inner, page_size
        self._due: list[CacheMove] = []
        self._seen: dict[SequenceId, set[tuple[int, int]]] = {}
        self.taken: list[CacheMove] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Zero what is new behind the tokens that are there."""
        found: int | None = self._inner.reserve(sequence_id, token_ids, num_tokens, salt)
        if found is not None:
            now = self._pages_of(sequence_id, found)
            new = now - self._seen.get(sequence_id, set())
            self._due += [CacheMove("zero", page, group=group) for group, page in sorted(new)]
            self._seen[sequence_id] = self._seen.get(sequence_id, set()) | now
        return found

    def _pages_of(self, sequence_id: SequenceId, found: int) -> set[tuple[int, int]]:
        first = -(-found // self._page_size)
        return {
            (group, page)
            for group, table in enumerate(self._inner.pages(sequence_id))
            for page in table[first:]
            if page >= 0
        }

    def release(self, sequence_id: SequenceId) -> None:
        """Forget its pages."""
        self._seen.pop(sequence_id, None)
        self._inner.release(sequence_id)

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return the inner moves, and then those that zero."""
        moves = (*self._inner.take_moves(), *self._due)
        self._due = []
        self.taken += moves
        return moves
