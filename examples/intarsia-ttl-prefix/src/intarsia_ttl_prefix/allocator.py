"""The books of the cache `ttl_prefix`.

All cache groups share one page table: page 7 of every group is the same sequence's. That keeps the books small. The
price is that what a window has left behind is not given back before its sequence leaves.

A full page is named by a digest of all tokens up to its end and of the salt, so that a name stands for one prefix and
nothing else, and prefixes of different salts never meet.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence

from attrs import define, field

from intarsia.protocols import CacheContext
from intarsia.types import CacheLayout, CacheMove, CacheStats, SequenceId
from intarsia_ttl_prefix.options import TtlPrefixOptions
from intarsia_ttl_prefix.pages import Pages


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"ttl_prefix.salt").digest()


def _extend(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32, person=b"ttl_prefix.page").digest()


@define
class _Held:
    """What one sequence holds.

    Attributes:
        num_computed: tokens that have valid slots.
        names: of its full pages, as far as they are known.
    """

    table: list[int]
    salt: str
    num_computed: int
    names: list[bytes]


@define
class TtlPrefixAllocator:
    """Gives pages as sequences grow, and keeps full ones for `ttl_s` after their last user has left.

    Attributes:
        clock: returns seconds, and never goes back.
    """

    layout: CacheLayout
    num_pages: int
    ttl_s: float
    clock: Callable[[], float] = time.monotonic
    _pages: Pages = field(init=False)
    _held: dict[SequenceId, _Held] = field(factory=dict, init=False)
    _moves: list[CacheMove] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self._pages = Pages(self.num_pages, self.ttl_s, self.clock)

    @property
    def shares_prefixes(self) -> bool:
        """Always."""
        return True

    @property
    def _size(self) -> int:
        return self.layout.page_size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def capacity(self, max_tokens: int) -> int:
        """Return how many sequences of `max_tokens` fit when nothing is shared."""
        return self.num_pages // max(1, self._pages_for(max_tokens))

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Return how many leading tokens are cached: whole pages, and never the last token, which must be run."""
        return len(self._find(token_ids, salt)) * self._size

    def _find(self, token_ids: Sequence[int], salt: str) -> list[tuple[bytes, int]]:
        """Return the names and pages of the longest prefix that is known."""
        found: list[tuple[bytes, int]] = []
        name = _root(salt)
        for stop in range(self._size, len(token_ids), self._size):
            name = _extend(name, token_ids[stop - self._size : stop])
            page = self._pages.find(name)
            if page is None:
                break
            found.append((name, page))
        return found

    # --- a sequence's pages -----------------------------------------------------------------------------------------

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Make room for `num_tokens`; a sequence's first call takes what is cached of its tokens."""
        self._pages.collect()
        held = self._held.get(sequence_id)
        if held is None:
            return self._admit(sequence_id, token_ids, num_tokens, salt)
        must_copy = self._must_copy(held)
        if self._pages_for(num_tokens) - len(held.table) + must_copy > self._pages.num_available:
            return None
        if must_copy:
            self._copy_next(held)
        self._grow(held.table, num_tokens)
        return held.num_computed

    def _admit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str) -> int | None:
        found = self._find(token_ids, salt)
        revived = sum(self._pages.is_resting(page) for _, page in found)
        if self._pages_for(num_tokens) - len(found) + revived > self._pages.num_available:
            return None
        for _, page in found:
            self._pages.share(page)
        held = _Held([page for _, page in found], salt, len(found) * self._size, [name for name, _ in found])
        self._grow(held.table, num_tokens)
        self._held[sequence_id] = held
        return held.num_computed

    def _must_copy(self, held: _Held) -> bool:
        """Whether others refer to the page that the next token is written to, or can find it by name."""
        index = held.num_computed // self._size
        return index < len(held.table) and self._pages.is_known_elsewhere(held.table[index])

    def _copy_next(self, held: _Held) -> None:
        index = held.num_computed // self._size
        shared, own = held.table[index], self._pages.take()
        self._pages.drop(shared)
        held.table[index] = own
        if held.num_computed % self._size:
            self._moves += [CacheMove("copy", own, shared, group) for group in range(len(self.layout.groups))]

    def _grow(self, table: list[int], num_tokens: int) -> None:
        while len(table) < self._pages_for(num_tokens):
            table.append(self._pages.take())

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the page table, the same for every group."""
        return (tuple(self._held[sequence_id].table),) * len(self.layout.groups)

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Name the pages that are full now."""
        self._pages.collect()
        held, size = self._held[sequence_id], self._size
        assert num_computed <= len(token_ids)
        held.num_computed = num_computed
        for index in range(len(held.names), num_computed // size):
            parent = held.names[-1] if held.names else _root(held.salt)
            held.names.append(_extend(parent, token_ids[index * size : (index + 1) * size]))
            self._pages.name(held.table[index], held.names[-1])

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Give back the pages past position `num_tokens`, and forget that the rest of its page holds tokens."""
        held = self._held[sequence_id]
        held.num_computed = min(held.num_computed, num_tokens)
        del held.names[held.num_computed // self._size :]
        while len(held.table) > self._pages_for(num_tokens):
            self._pages.drop(held.table.pop())

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Let the child refer to the parent's pages of these tokens; who writes to a shared one copies it first."""
        assert child not in self._held, "the child holds pages already"
        held = self._held[parent]
        assert num_tokens <= held.num_computed
        table = held.table[: self._pages_for(num_tokens)]
        for page in table:
            self._pages.share(page)
        self._held[child] = _Held(table, held.salt, num_tokens, held.names[: num_tokens // self._size])
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Give everything back. The end goes first, so that of a cached prefix the beginning lives longest."""
        held = self._held.pop(sequence_id, None)
        for page in reversed(held.table if held else []):
            self._pages.drop(page)

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return the copies due before the next step, and forget them."""
        moves, self._moves = tuple(self._moves), []
        return moves

    # --- figures ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every reference is some table's, and every page is referenced, resting or free."""
        self._pages.check([page for held in self._held.values() for page in held.table])

    def stats(self) -> CacheStats:
        """Return the figures; what rests is `cached`."""
        self._pages.collect()
        used, free, cached, shared = self._pages.counts()
        wasted = sum(len(held.table) * self._size - held.num_computed for held in self._held.values())
        return CacheStats(
            num_pages=self.num_pages, used=used, free=free, cached=cached, shared=shared, wasted_slots=wasted
        )


def build(context: CacheContext) -> TtlPrefixAllocator:
    """Make the books for the layout that the composition agreed on."""
    options: TtlPrefixOptions = context.options
    return TtlPrefixAllocator(context.layout, context.num_pages, options.ttl_s)
