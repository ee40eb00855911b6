"""The naive cache: every sequence reserves its maximum, in pages that lie side by side.

The "before" of every before and after: simple, never out of room halfway, and mostly empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define, field

from intarsia.protocols import CacheContext
from intarsia.types import CacheMove, CacheStats, SequenceId


@define
class ContiguousAllocator:
    """Books of a pool that is cut into regions of `max_tokens` each; a sequence owns one region from first to last.

    Attributes:
        num_groups: cache groups; each has the same table, since each reserves the maximum.
        region_pages: pages a region.
        num_regions: how many regions there are.
    """

    page_size: int
    num_groups: int
    region_pages: int
    num_regions: int
    _free: list[int] = field(init=False)
    _regions: dict[SequenceId, int] = Factory(dict)
    _computed: dict[SequenceId, int] = Factory(dict)
    _moves: list[CacheMove] = Factory(list)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.num_regions - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages that regions use; what is left of the pool after the last whole region is not."""
        return self.num_regions * self.region_pages

    @property
    def shares_prefixes(self) -> bool:
        """Regions are apart."""
        return False

    def capacity(self, max_tokens: int) -> int:
        """One region each, however short."""
        return self.num_regions if max_tokens <= self.region_pages * self.page_size else 0

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Nothing is shared."""
        del token_ids, salt
        return 0

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Take a region at the first call; later ones find room in it."""
        del token_ids, salt
        if num_tokens > self.region_pages * self.page_size:
            return None
        if sequence_id not in self._regions:
            if not self._free:
                return None
            self._regions[sequence_id] = self._free.pop()
            self._computed[sequence_id] = 0
        return self._computed[sequence_id]

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the whole region."""
        first = self._regions[sequence_id] * self.region_pages
        return (tuple(range(first, first + self.region_pages)),) * self.num_groups

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Count the tokens that have valid slots."""
        assert num_computed <= len(token_ids)
        self._computed[sequence_id] = num_computed

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Forget slots; the region stays."""
        self._computed[sequence_id] = min(self._computed[sequence_id], num_tokens)

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Copy the pages that hold these tokens to a region of the child's own; False where none is free."""
        assert child not in self._regions, "the child holds a region of its own"
        if self.reserve(child, (), 0) is None:
            return False
        assert num_tokens <= self._computed[parent]
        used = -(-num_tokens // self.page_size)
        for group, (sources, targets) in enumerate(zip(self.pages(parent), self.pages(child), strict=True)):
            self._moves += [CacheMove("copy", targets[i], sources[i], group) for i in range(used)]
        self._computed[child] = num_tokens
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Free the region."""
        region = self._regions.pop(sequence_id, None)
        if region is not None:
            self._free.append(region)
            del self._computed[sequence_id]

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return copies due, and forget them."""
        moves = tuple(self._moves)
        self._moves.clear()
        return moves

    def check_integrity(self) -> None:
        """Every region is free or owned, once."""
        owned = list(self._regions.values())
        assert sorted(owned + self._free) == list(range(self.num_regions)), "a region is lost or owned twice"
        assert self._regions.keys() == self._computed.keys()

    def stats(self) -> CacheStats:
        """Return figures; a reserved slot without a token is wasted."""
        used = len(self._regions) * self.region_pages
        return CacheStats(
            num_pages=self.num_pages,
            used=used,
            free=self.num_pages - used,
            wasted_slots=used * self.page_size - sum(self._computed.values()),
        )


def build(context: CacheContext) -> ContiguousAllocator:
    """Cut the pool into regions of max_model_len."""
    assert context.engine.max_model_len is not None
    region_pages = -(-context.engine.max_model_len // context.layout.page_size)
    return ContiguousAllocator(
        page_size=context.layout.page_size,
        num_groups=len(context.layout.groups),
        region_pages=region_pages,
        num_regions=context.num_pages // region_pages,
    )
