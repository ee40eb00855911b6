"""The books of host memory: pages of sequences that were preempted, until they run again.

A host page has the name of what it holds, as a device page has. So pages that two swapped sequences share are copied
once; and one that stays behind, after its sequence is back on the device, need not be copied when that is swapped out
again. Pages that nobody refers to are given away in least-recently-used order.
"""

from __future__ import annotations

from attrs import define, field

from intarsia.types import CacheLayout, CacheMove, SequenceId, SwapPrices, SwapStats
from intarsia_paged.pool import Pool
from intarsia_paged.tables import GONE, Held


@define
class HostBooks:
    """Where the pages of swapped-out sequences are. Each cache group has its own pool.

    Attributes:
        num_pages: host pages of each group.
        always: swap whatever it costs.
        prices: what copying and computing take.
    """

    layout: CacheLayout
    num_pages: int
    always: bool = False
    prices: SwapPrices = field(factory=SwapPrices)
    _pools: list[Pool] = field(init=False)
    _swapped: dict[SequenceId, Held] = field(factory=dict, init=False)
    _outs: int = field(default=0, init=False)
    _ins: int = field(default=0, init=False)
    _declined: int = field(default=0, init=False)
    _no_room: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._pools = [Pool(self.num_pages) for _ in self.layout.groups]

    def get(self, sequence_id: SequenceId) -> Held | None:
        """Return what a swapped-out sequence holds here; None of any other."""
        return self._swapped.get(sequence_id)

    def put(self, sequence_id: SequenceId, held: Held) -> list[CacheMove] | None:
        """Take a sequence's valid pages; return the copies that are due, those to pages without a copy here.

        Returns None where there is no room, or computing again is cheaper; then nothing has changed.
        """
        stop = -(-held.num_computed // self.layout.page_size)
        tables = [table[:stop] for table in held.tables]
        found = [self._find(pool, held, table) for pool, table in zip(self._pools, tables, strict=True)]
        for pool, pages in zip(self._pools, found, strict=True):
            revived = sum(page is not None and page != GONE and pool.is_cached(page) for page in pages)
            if pages.count(None) + revived > pool.num_available:
                self._no_room += 1
                return None
        if not (self.always or self._pays(found, held.num_computed)):
            self._declined += 1
            return None
        self._share(found)
        moves: list[CacheMove] = []
        for group, (pool, pages, table) in enumerate(zip(self._pools, found, tables, strict=True)):
            for index, source in enumerate(table):
                if pages[index] is None:
                    pages[index] = target = pool.take()
                    if (name := held.name(index)) is not None:
                        pool.name(target, name)
                    moves.append(CacheMove("swap_out", target, source, group))
        settled = [[page for page in pages if page is not None] for pages in found]
        self._swapped[sequence_id] = Held(settled, held.salt, held.num_computed, list(held.chain))
        self._outs += 1
        return moves

    def _find(self, pool: Pool, held: Held, table: list[int]) -> list[int | None]:
        """Return for each device page the host page that holds the same already, or None; GONE stays."""
        names = (held.name(index) for index in range(len(table)))
        return [
            GONE if page == GONE else None if name is None else pool.find(name)
            for page, name in zip(table, names, strict=True)
        ]

    def _share(self, found: list[list[int | None]]) -> None:
        """Refer to what is here, before pages are taken: those that nobody refers to would be given away."""
        for pool, pages in zip(self._pools, found, strict=True):
            for page in pages:
                if page is not None and page != GONE:
                    pool.share(page)

    def _pays(self, found: list[list[int | None]], num_tokens: int) -> bool:
        """Compare copying with computing: out what is not here yet, in all of it."""
        num_bytes = 0
        for group, pages in zip(self.layout.groups, found, strict=True):
            page_bytes = len(group.layers) * self.layout.layer_token_bytes(group) * self.layout.page_size
            num_out, num_in = pages.count(None), len(pages) - pages.count(GONE)
            num_bytes += (num_out + num_in) * page_bytes
        return self.prices.pays(num_bytes, num_tokens)

    def drop(self, sequence_id: SequenceId, *, returned: bool = False) -> None:
        """Give a sequence's pages back: it is on the device again, or has left."""
        held = self._swapped.pop(sequence_id, None)
        if held is None:
            return
        self._ins += returned
        # The end goes first, as on the device.
        for pool, table in zip(self._pools, held.tables, strict=True):
            for page in reversed(table):
                if page != GONE:
                    pool.drop(page)

    def check(self) -> None:
        """Raise AssertionError unless every host page is referred to, cached or free, and tables hold what is valid."""
        for held in self._swapped.values():
            stop = -(-held.num_computed // self.layout.page_size)
            assert all(len(table) == stop for table in held.tables), "a host table is not as long as its valid tokens"
            assert len(held.chain) * self.layout.page_size <= held.num_computed, "a page with a name is not full"
        for group, pool in enumerate(self._pools):
            pool.check([page for held in self._swapped.values() for page in held.tables[group] if page != GONE])

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._swapped

    def stats(self) -> SwapStats:
        """Return the figures, pages of the group that uses most."""
        used, free, cached, _ = max(pool.counts() for pool in self._pools)
        return SwapStats(
            num_pages=self.num_pages,
            used=used,
            free=free,
            cached=cached,
            swapped=len(self._swapped),
            outs=self._outs,
            ins=self._ins,
            declined=self._declined,
            no_room=self._no_room,
        )
