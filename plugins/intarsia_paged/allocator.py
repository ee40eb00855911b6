"""The books of the paged cache. Each cache group has its own pool and its own page tables."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia.protocols import CacheContext
from intarsia.types import CacheLayout, CacheMove, CacheStats, SequenceId, SwapPrices, SwapStats
from intarsia_paged import hashing
from intarsia_paged.host import HostBooks
from intarsia_paged.options import PagedOptions
from intarsia_paged.pool import Pool
from intarsia_paged.tables import GONE, Held


@define
class PagedAllocator:
    """Gives pages as sequences grow, shares those with equal content, and copies before a shared one is written to."""

    options: PagedOptions
    layout: CacheLayout
    num_pages: int
    num_host_pages: int = 0
    _pools: list[Pool] = field(init=False)
    _held: dict[SequenceId, Held] = field(factory=dict, init=False)
    _host: HostBooks = field(init=False)
    _moves: list[CacheMove] = field(factory=list, init=False)
    #: groups whose layers leave pages behind
    _windowed: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        groups = self.layout.groups
        self._windowed = tuple(index for index, group in enumerate(groups) if group.window is not None)
        self._pools = [Pool(self.num_pages) for _ in self.layout.groups]
        self._host = HostBooks(self.layout, self.num_host_pages, self.options.swap_when == "always")

    @property
    def _size(self) -> int:
        return self.layout.page_size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    @property
    def shares_prefixes(self) -> bool:
        """As the option says."""
        return self.options.prefix

    def capacity(self, max_tokens: int) -> int:
        """Return how many sequences of `max_tokens` fit when nothing is shared."""
        return self.num_pages // max(1, self._pages_for(max_tokens))

    # --- prefixes ---------------------------------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Return how many leading tokens are cached: whole pages, and never the last token, which must be run."""
        return len(self._find(token_ids, salt)) * self._size

    def _find(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Return the names of the longest prefix whose visible pages every group still holds."""
        if not self.options.prefix:
            return []
        chain: list[bytes] = []
        for name in hashing.names(token_ids[: len(token_ids) - 1], self._size, salt):
            if any(pool.find(name) is None for pool in self._full_pools()):
                break
            chain.append(name)
        while chain and not self._windows_hold(chain):
            chain.pop()
        return chain

    def _full_pools(self) -> list[Pool]:
        """Pools of the layers that see everything; without any, of all: then a prefix needs every page."""
        groups = self.layout.groups
        full = [pool for pool, group in zip(self._pools, groups, strict=True) if group.window is None]
        return full or self._pools

    def _windows_hold(self, chain: list[bytes]) -> bool:
        end = len(chain) * self._size
        return all(
            pool.find(name) is not None
            for group, pool in enumerate(self._pools)
            for name in chain[self._first_visible(group, end) :]
        )

    def _first_visible(self, group: int, position: int) -> int:
        """Return the first page that a token at `position` or later can see."""
        window = self.layout.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self._size

    # --- a sequence's pages -----------------------------------------------------------------------------------------

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Make room for `num_tokens`; a sequence's first call takes what is cached of its tokens.

        One that is swapped out comes back.
        """
        held = self._held.get(sequence_id)
        if held is None and (swapped := self._host.get(sequence_id)) is not None:
            return self._swap_in(sequence_id, swapped, num_tokens)
        if held is None:
            return self._admit(sequence_id, token_ids, num_tokens, salt)
        if self._has_room(held, num_tokens):
            return held.num_computed
        needs = [self._needed(group, held, num_tokens) for group in range(len(self._pools))]
        if any(need > pool.num_available for need, pool in zip(needs, self._pools, strict=True)):
            return None
        for group, pool in enumerate(self._pools):
            self._own_next(group, held)
            self._grow(pool, held.tables[group], num_tokens)
        held.changed()
        return held.num_computed

    def _has_room(self, held: Held, num_tokens: int) -> bool:
        """Whether no page is to be taken, as in most steps: see `_needed`."""
        size = self.layout.page_size
        index = held.num_computed // size
        for pool, table in zip(self._pools, held.tables, strict=True):
            if num_tokens > len(table) * size:
                return False
            if index < len(table) and pool.is_known_elsewhere(table[index]):
                return False
        return True

    def _admit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str) -> int | None:
        chain = self._find(token_ids, salt)
        num_cached = len(chain) * self._size
        found = [
            [GONE] * first + [self._page(pool, name) for name in chain[first:]]
            for pool, first in ((p, self._first_visible(g, num_cached)) for g, p in enumerate(self._pools))
        ]
        for pool, table in zip(self._pools, found, strict=True):
            revived = sum(pool.is_cached(page) for page in table if page != GONE)
            if self._pages_for(num_tokens) - len(table) + revived > pool.num_available:
                return None
        for pool, table in zip(self._pools, found, strict=True):
            for page in table:
                if page != GONE:
                    pool.share(page)
            self._grow(pool, table, num_tokens)
        self._held[sequence_id] = Held(found, salt, num_cached, chain)
        return num_cached

    def _page(self, pool: Pool, name: bytes) -> int:
        page = pool.find(name)
        assert page is not None
        return page

    def _needed(self, group: int, held: Held, num_tokens: int) -> int:
        """Pages to take for a group: those to grow by, and one where the next token's page must be copied."""
        table = held.tables[group]
        return max(0, self._pages_for(num_tokens) - len(table)) + self._must_copy(group, held)

    def _must_copy(self, group: int, held: Held) -> bool:
        index = held.num_computed // self._size
        table = held.tables[group]
        return index < len(table) and self._pools[group].is_known_elsewhere(table[index])

    def _own_next(self, group: int, held: Held) -> None:
        """Copy the page that the next token is written to, if others refer to it or can find it by name."""
        if not self._must_copy(group, held):
            return
        index = held.num_computed // self._size
        shared, pool = held.tables[group][index], self._pools[group]
        own = pool.take()
        pool.drop(shared)
        held.tables[group][index] = own
        if held.num_computed % self._size:
            self._moves.append(CacheMove("copy", own, shared, group))

    def _grow(self, pool: Pool, table: list[int], num_tokens: int) -> None:
        while len(table) < self._pages_for(num_tokens):
            table.append(pool.take())

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the page table, one tuple a group; -1 stands for pages that a window has left behind."""
        return self._held[sequence_id].pages()

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Name the pages that are full now, and give back those that windows have left behind."""
        held = self._held[sequence_id]
        assert num_computed <= len(token_ids)
        held.num_computed = num_computed
        if self.options.prefix and num_computed // self.layout.page_size > len(held.chain):
            self._name_full(held, token_ids)
        for group in self._windowed:
            pool, table = self._pools[group], held.tables[group]
            for index in range(self._first_visible(group, num_computed) - 1, -1, -1):
                if table[index] == GONE:
                    break
                pool.drop(table[index])
                table[index] = GONE
                held.changed()

    def _name_full(self, held: Held, token_ids: Sequence[int]) -> None:
        size = self._size
        for index in range(len(held.chain), held.num_computed // size):
            parent = held.chain[-1] if held.chain else hashing.root(held.salt)
            held.chain.append(hashing.extend(parent, token_ids[index * size : (index + 1) * size]))
            for pool, table in zip(self._pools, held.tables, strict=True):
                if table[index] != GONE:
                    pool.name(table[index], held.chain[-1])

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Give back the pages past position `num_tokens`, and forget that the rest of its page holds tokens."""
        held = self._held[sequence_id]
        held.num_computed = min(held.num_computed, num_tokens)
        del held.chain[held.num_computed // self._size :]
        for pool, table in zip(self._pools, held.tables, strict=True):
            while len(table) > self._pages_for(num_tokens):
                page = table.pop()
                held.changed()
                if page != GONE:
                    pool.drop(page)

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Let the child refer to the parent's pages of these tokens; who writes to a shared one copies it first."""
        assert child not in self._held and child not in self._host, "the child holds pages already"
        source = self._held[parent]
        assert num_tokens <= source.num_computed
        tables = []
        for group, table in enumerate(source.tables):
            first = self._first_visible(group, num_tokens)
            seen = table[first : self._pages_for(num_tokens)]
            if GONE in seen:
                return False
            tables.append([GONE] * first + seen)
        for pool, table in zip(self._pools, tables, strict=True):
            for page in table:
                if page != GONE:
                    pool.share(page)
        self._held[child] = Held(tables, source.salt, num_tokens, source.chain[: num_tokens // self._size])
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Give everything back. The end goes first, so that of a cached prefix the beginning lives longest."""
        self._host.drop(sequence_id)
        if sequence_id in self._held:
            self._give_back(sequence_id)

    def _give_back(self, sequence_id: SequenceId) -> None:
        held = self._held.pop(sequence_id)
        for pool, table in zip(self._pools, held.tables, strict=True):
            for page in reversed(table):
                if page != GONE:
                    pool.drop(page)

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return the copies due before the next step, and forget them."""
        if not self._moves:
            return ()
        moves, self._moves = tuple(self._moves), []
        return moves

    # --- swapping ---------------------------------------------------------------------------------------------------

    def swap_out(self, sequence_id: SequenceId) -> bool:
        """Keep a sequence's valid pages in host memory and give back those of the device.

        What has a name stays cached here too, until its page is needed.
        """
        held = self._held[sequence_id]
        if not self.num_host_pages or not held.num_computed:
            return False
        moves = self._host.put(sequence_id, held)
        if moves is None:
            return False
        self._moves += moves
        self._give_back(sequence_id)
        return True

    def _swap_in(self, sequence_id: SequenceId, swapped: Held, num_tokens: int) -> int | None:
        """Bring a sequence's pages back, but for those that are still here by their names."""
        found = [
            [GONE if page == GONE else self._still_here(pool, swapped, index) for index, page in enumerate(table)]
            for pool, table in zip(self._pools, swapped.tables, strict=True)
        ]
        for pool, pages in zip(self._pools, found, strict=True):
            revived = sum(page is not None and page != GONE and pool.is_cached(page) for page in pages)
            grown = max(0, self._pages_for(num_tokens) - len(pages))
            if pages.count(None) + revived + grown > pool.num_available:
                return None
        tables = [self._bring_back(group, swapped, pages, num_tokens) for group, pages in enumerate(found)]
        self._held[sequence_id] = Held(tables, swapped.salt, swapped.num_computed, list(swapped.chain))
        self._host.drop(sequence_id, returned=True)
        return swapped.num_computed

    def _still_here(self, pool: Pool, swapped: Held, index: int) -> int | None:
        name = swapped.name(index)
        return None if name is None else pool.find(name)

    def _bring_back(self, group: int, swapped: Held, found: list[int | None], num_tokens: int) -> list[int]:
        """Refer to the pages that were found, take others for the rest, and have these filled."""
        pool, table = self._pools[group], list[int]()
        for page in found:
            if page is not None and page != GONE:
                pool.share(page)
        for index, (page, host) in enumerate(zip(found, swapped.tables[group], strict=True)):
            if page is None:
                page = pool.take()
                self._moves.append(CacheMove("swap_in", page, host, group))
                if (name := swapped.name(index)) is not None:
                    pool.name(page, name)
            table.append(page)
        self._grow(pool, table, num_tokens)
        return table

    def price(self, prices: SwapPrices) -> None:
        """Decide by these from now on."""
        self._host.prices = prices

    def swap_stats(self) -> SwapStats:
        """Return the figures of host memory."""
        return self._host.stats()

    # --- figures ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every reference is some table's, and every page is referenced, cached or free, in host memory too."""
        assert not any(sequence_id in self._host for sequence_id in self._held), "a sequence is here and swapped out"
        self._host.check()
        for group, pool in enumerate(self._pools):
            pool.check([page for held in self._held.values() for page in held.tables[group] if page != GONE])

    def stats(self) -> CacheStats:
        """Return the figures of the first group, whose layers see most; `wasted_slots` wait for tokens."""
        used, free, cached, shared = self._pools[0].counts()
        wasted = sum(len(held.tables[0]) * self._size - held.num_computed for held in self._held.values())
        return CacheStats(
            num_pages=self.num_pages, used=used, free=free, cached=cached, shared=shared, wasted_slots=wasted
        )


def build(context: CacheContext) -> PagedAllocator:
    """Make the books for the layout that the composition agreed on."""
    return PagedAllocator(context.options, context.layout, context.num_pages, context.num_host_pages)
