"""The books of the cache `vmm`: a range of addresses a sequence, with memory as far as it has grown.

The idea is vAttention's (Prabhu et al. 2024): addresses are reserved for the longest sequence, and physical memory is
mapped behind them as requests grow. To a kernel each sequence lies in one piece; in fact it is paged. What is mapped
and unmapped the plan says, as moves of granules; the storage does it.

Equal prefixes are not shared: memory could be mapped twice, but only in whole granules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import Factory, define, field

from intarsia.errors import CompositionError
from intarsia.protocols import CacheContext, CacheStorage
from intarsia.types import CacheLayout, CacheMove, CacheStats, Fit, SequenceId, Unfit, parse_bytes
from intarsia_cuda.driver import VirtualMemory, cuda_memory, elsewhere, ordinal, unavailable
from intarsia_cuda.options import VmmOptions
from intarsia_cuda.pages import Regions

if TYPE_CHECKING:
    import torch

#: In a page table: a page that a window has left behind. Nothing reads it again.
GONE = -1
#: Addresses that a process can have on every GPU of today, with room for all else.
_MOST_ADDRESSES = 1 << 46


@define(eq=False)
class _Region:
    """Addresses for one sequence.

    Attributes:
        index: the first page is `index` x pages a region.
        mapped: of each group, the granules of the region that have memory, counted from its begin.
    """

    index: int
    mapped: list[range]

    @property
    def num_mapped(self) -> int:
        """Granules that have memory, over all groups."""
        return sum(map(len, self.mapped))


@define
class _Held:
    """What one sequence holds.

    Attributes:
        num_tokens: that it has room for.
        num_computed: of these that have valid slots.
        first: of each group, the first page that no window has left behind.
    """

    region: _Region
    first: list[int]
    num_tokens: int = 0
    num_computed: int = 0


@define
class VmmAllocator:
    """Gives each sequence a region of addresses, and memory page by page as it grows.

    A region that is given back keeps its memory for the next sequence, within the option `keep` and as long as nobody
    else needs it.

    Attributes:
        num_pages: pages that memory holds at once.
        num_granules: granules that may have memory at once, over all groups.
        open_memory: the device's memory, for the storage.
    """

    options: VmmOptions
    layout: CacheLayout
    regions: Regions
    num_pages: int
    num_granules: int
    open_memory: Callable[[], VirtualMemory]
    _idle: list[_Region] = field(init=False)
    _held: dict[SequenceId, _Held] = Factory(dict)
    _moves: list[CacheMove] = Factory(list)
    _num_mapped: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        groups = len(self.layout.groups)
        self._idle = [_Region(i, [range(0)] * groups) for i in range(self.regions.num_regions)]

    @classmethod
    def of(
        cls,
        options: VmmOptions,
        layout: CacheLayout,
        *,
        max_tokens: int,
        num_pages: int,
        granule: int,
        open_memory: Callable[[], VirtualMemory],
    ) -> VmmAllocator:
        """Make the books.

        Args:
            options: of the cache.
            layout: of the cache.
            max_tokens: of a sequence.
            num_pages: what memory was meant to hold; granules that pages do not fill, and the spare page's, cost some.
            granule: the least that the device maps, in bytes.
            open_memory: see `VmmAllocator`.

        Raises:
            CompositionError: no device has so many addresses, or not one sequence fits.
        """
        regions = Regions.of(layout, granule, max_tokens, options.max_sequences)
        if regions.num_bytes > _MOST_ADDRESSES:
            fitting = _MOST_ADDRESSES * options.max_sequences // regions.num_bytes
            raise CompositionError(
                f"cache.max_sequences: {options.max_sequences} sequences of engine.max_model_len = {max_tokens} tokens "
                f"reserve {regions.num_bytes} bytes of addresses, and a process has {_MOST_ADDRESSES}; what would do: "
                + (f"cache.max_sequences = {fitting}" if fitting else "a smaller engine.max_model_len"),
                field="cache.max_sequences",
            )
        spare = sum(len(group.granules(range(1))) for group in regions.groups)
        num_granules = max(0, (num_pages + 1) * layout.page_bytes // granule - spare)
        books = cls(
            options=options,
            layout=layout,
            regions=regions,
            num_pages=min(num_pages, num_granules * granule // regions.page_bytes),
            num_granules=num_granules,
            open_memory=open_memory,
        )
        if needed := books._shortage(max_tokens):
            raise CompositionError(
                f"cache.memory: {options.memory!r} is {num_granules * granule} bytes in pieces of {granule}, and one "
                f"sequence of engine.max_model_len = {max_tokens} takes {needed} bytes more; what would do: "
                f"cache.memory = '{(num_pages + 1) * layout.page_bytes + needed}', or a smaller engine.max_model_len",
                field="cache.memory",
            )
        return books

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def shares_prefixes(self) -> bool:
        """Sequences are apart."""
        return False

    @property
    def num_page_ids(self) -> int:
        """Pages of all regions, whether they have memory or not."""
        return self.regions.num_pages

    def make_storage(self, num_pages: int, device: torch.device) -> CacheStorage:
        """Reserve the addresses; memory comes with moves."""
        from intarsia_cuda.storage import VmmStorage

        return VmmStorage.open(self.layout, self.regions, num_pages, self.open_memory(), device)

    def capacity(self, max_tokens: int) -> int:
        """Return how many sequences of `max_tokens` have room in a region, and memory, at once."""
        if max_tokens > self.regions.region_pages * self._size:
            return 0
        return min(self.regions.num_regions, self.num_granules // max(1, self._granules_for(max_tokens)))

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Nothing is shared."""
        del token_ids, salt
        return 0

    @property
    def _size(self) -> int:
        return self.layout.page_size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _granules_for(self, num_tokens: int) -> int:
        return sum(len(group.granules(range(self._pages_for(num_tokens)))) for group in self.regions.groups)

    def _shortage(self, num_tokens: int) -> int:
        """Return the bytes that are missing for one sequence; 0 where it fits."""
        granule = self.regions.groups[0].granule
        return max(0, self._granules_for(num_tokens) - self.num_granules) * granule

    # --- a sequence's memory ----------------------------------------------------------------------------------------

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Make room for `num_tokens`; a sequence's first call takes a region, one with memory if there is one."""
        del token_ids, salt
        held = self._held.get(sequence_id)
        if held is not None:
            num_tokens = max(num_tokens, held.num_tokens)
        if num_tokens > self.regions.region_pages * self._size:
            return None
        new = held or self._new()
        if new is None or not self._map(new, num_tokens):
            return None
        if held is None:
            self._enter(sequence_id, new)
        return new.num_computed

    def _new(self) -> _Held | None:
        """Return what a new sequence would hold: the idle region that has most memory."""
        region = max(self._idle, key=lambda idle: idle.num_mapped, default=None)
        return None if region is None else _Held(region, [0] * len(self.layout.groups))

    def _enter(self, sequence_id: SequenceId, held: _Held) -> None:
        self._idle.remove(held.region)
        self._held[sequence_id] = held

    def _map(self, held: _Held, num_tokens: int) -> bool:
        """Map memory for a sequence to hold `num_tokens`; where there is not enough, nothing has changed."""
        stop = self._pages_for(num_tokens)
        wanted = [
            group.granules(range(first, max(first, stop)))
            for group, first in zip(self.regions.groups, held.first, strict=True)
        ]
        missing = sum(
            len(granules) - _overlap(granules, mapped)
            for granules, mapped in zip(wanted, held.region.mapped, strict=True)
        )
        if not self._make_room(missing, held.region):
            return False
        for group, granules in enumerate(wanted):
            if granules:
                self._cover(held.region, group, granules)
        held.num_tokens = num_tokens
        return True

    def _make_room(self, num_granules: int, region: _Region) -> bool:
        """Unmap memory of idle regions but this one until so many granules can be mapped; False where none would do."""
        shortage = self._num_mapped + num_granules - self.num_granules
        others = [idle for idle in self._idle if idle is not region and idle.num_mapped]
        if shortage > sum(idle.num_mapped for idle in others):
            return False
        self._give_back(others, shortage)
        return True

    def _give_back(self, idle: Sequence[_Region], num_granules: int) -> None:
        """Unmap so many granules of idle regions, of the longest idle first, and of each its end."""
        for region in idle:
            for group in range(len(region.mapped)):
                mapped = region.mapped[group]
                if count := max(0, min(num_granules, len(mapped))):
                    self._keep(region, group, mapped[: len(mapped) - count])
                    num_granules -= count

    def _cover(self, region: _Region, group: int, granules: range) -> None:
        """Map these granules, and go on having those behind them; memory before them, or apart from them, goes."""
        mapped = region.mapped[group]
        if not mapped or mapped.stop < granules.start or granules.stop < mapped.start:
            self._keep(region, group, range(granules.start, granules.start))
            mapped = range(granules.start, granules.start)
        for granule in (*range(granules.start, mapped.start), *range(mapped.stop, granules.stop)):
            self._move("map", region, group, granule)
        region.mapped[group] = range(min(granules.start, mapped.start), max(granules.stop, mapped.stop))
        self._keep(region, group, range(granules.start, region.mapped[group].stop))

    def _keep(self, region: _Region, group: int, kept: range) -> None:
        """Unmap the granules of a group that are not kept."""
        for granule in region.mapped[group]:
            if granule not in kept:
                self._move("unmap", region, group, granule)
        region.mapped[group] = kept

    def _move(self, kind: Literal["map", "unmap"], region: _Region, group: int, granule: int) -> None:
        pages = self.regions.groups[group]
        first = region.index * self.regions.region_pages * pages.page_bytes // pages.granule
        self._moves.append(CacheMove(kind, first + granule, group=group))
        self._num_mapped += 1 if kind == "map" else -1

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the pages that have memory, side by side; -1 stands for those that a window has left behind."""
        held = self._held[sequence_id]
        begin, stop = held.region.index * self.regions.region_pages, self._pages_for(held.num_tokens)
        return tuple((GONE,) * min(first, stop) + tuple(range(begin + first, begin + stop)) for first in held.first)

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Count the tokens that have valid slots, and unmap what windows have left behind."""
        assert num_computed <= len(token_ids)
        held = self._held[sequence_id]
        held.num_computed = num_computed
        for group, pages in enumerate(self.regions.groups):
            first = self._first_visible(group, num_computed)
            if first > held.first[group]:
                held.first[group] = first
                mapped = held.region.mapped[group]
                seen = pages.granules(range(first, first + 1)).start
                self._keep(held.region, group, range(min(seen, mapped.stop), mapped.stop))

    def _first_visible(self, group: int, position: int) -> int:
        """Return the first page that a token at `position` or later can see."""
        window = self.layout.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self._size

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Forget slots from a position on; of the memory behind it one granule a group stays, for the next tokens."""
        held = self._held[sequence_id]
        held.num_computed = min(held.num_computed, num_tokens)
        held.num_tokens = min(held.num_tokens, num_tokens)
        if not held.num_tokens:
            held.first = [0] * len(held.first)
        for group, pages in enumerate(self.regions.groups):
            mapped = held.region.mapped[group]
            stop = pages.granules(range(max(1, self._pages_for(num_tokens)))).stop + 1
            self._keep(held.region, group, range(mapped.start, max(mapped.start, min(mapped.stop, stop))))

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Copy the pages that hold these tokens to a region of the child's own."""
        assert child not in self._held, "the child holds a region of its own"
        source, new = self._held[parent], self._new()
        assert num_tokens <= source.num_computed
        if new is None:
            return False
        new.first = [self._first_visible(group, num_tokens) for group in range(len(new.first))]
        if any(own < gone for own, gone in zip(new.first, source.first, strict=True)):
            return False
        if not self._map(new, num_tokens):
            return False
        new.num_computed = num_tokens
        self._enter(child, new)
        for group, (sources, targets) in enumerate(zip(self.pages(parent), self.pages(child), strict=True)):
            for page in range(new.first[group], self._pages_for(num_tokens)):
                self._moves.append(CacheMove("copy", targets[page], sources[page], group))
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Give the region back. What is idle beyond `keep` loses its memory; so does what does not begin at 0."""
        held = self._held.pop(sequence_id, None)
        if held is None:
            return
        region = held.region
        for group, mapped in enumerate(region.mapped):
            if mapped and mapped.start:
                self._keep(region, group, range(0))
        self._idle.append(region)
        kept = parse_bytes(self.options.keep) // self.regions.groups[0].granule
        self._give_back(self._idle, self._num_idle - kept)

    @property
    def _num_idle(self) -> int:
        """Granules that have memory and belong to nobody."""
        return sum(region.num_mapped for region in self._idle)

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return what is to be mapped, unmapped and copied before the next step, in order, and forget it."""
        moves, self._moves = tuple(self._moves), []
        return moves

    # --- figures ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every region is idle or one sequence's, and memory reaches as far as its tokens and not beyond the budget."""
        held = [each.region for each in self._held.values()]
        regions = [*held, *self._idle]
        assert sorted(r.index for r in regions) == list(range(self.regions.num_regions)), "a region is lost or shared"
        assert self._num_mapped == sum(region.num_mapped for region in regions), "a granule is lost"
        assert self._num_mapped <= self.num_granules, "more memory is mapped than there is"
        for each in self._held.values():
            assert each.num_computed <= each.num_tokens
            for pages, first, mapped in zip(self.regions.groups, each.first, each.region.mapped, strict=True):
                wanted = pages.granules(range(first, max(first, self._pages_for(each.num_tokens))))
                assert _overlap(wanted, mapped) == len(wanted), "a page that is held has no memory"
        assert all(mapped.start == 0 for region in self._idle for mapped in region.mapped if mapped)

    def stats(self) -> CacheStats:
        """Return figures, memory as pages of all layers; idle memory counts as cached."""
        granule, page_bytes = self.regions.groups[0].granule, self.regions.page_bytes
        idle = self._num_idle
        used = min(self.num_pages, -(-(self._num_mapped - idle) * granule // page_bytes))
        cached = min(self.num_pages - used, idle * granule // page_bytes)
        slots = sum(
            self.regions.groups[0].whole_pages(range(held.region.mapped[0].stop)).stop * self._size - held.num_computed
            for held in self._held.values()
        )
        return CacheStats(
            num_pages=self.num_pages,
            used=used,
            free=self.num_pages - used - cached,
            cached=cached,
            wasted_slots=max(0, slots),
        )


def _overlap(one: range, other: range) -> int:
    """Return how many numbers two ranges share."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def fit(context: CacheContext) -> Fit | Unfit:
    """NVIDIA GPUs whose driver is there."""
    device = context.engine.device
    if not device.startswith("cuda"):
        return Unfit(f"it maps the memory of NVIDIA GPUs, and {elsewhere(device)}")
    reason = unavailable()
    return Unfit(reason) if reason else Fit(20, "each sequence in one piece; equal prefixes are not shared")


def build(context: CacheContext) -> VmmAllocator:
    """Make the books for the device's granules."""
    assert context.engine.max_model_len is not None
    memory = cuda_memory(ordinal(context.engine.device))
    return VmmAllocator.of(
        context.options,
        context.layout,
        max_tokens=context.engine.max_model_len,
        num_pages=context.num_pages,
        granule=memory.granule,
        open_memory=lambda: memory,
    )
