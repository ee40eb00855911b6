"""How a cache group's pages lie in a range of addresses: those of all its layers for some tokens, end to end.

A page of 16 tokens of one layer is far smaller than the 2 MiB that a GPU maps at least, and a page of all layers is
about as large: so little is mapped that is not used (vAttention's tensor slicing, Prabhu et al. 2024), and a page is
one run of memory, moved by one copy.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

from __future__ import annotations

import math

from attrs import field, frozen

from intarsia.types import CacheGroup, CacheLayout

#: Layers begin at multiples of this, so that vector instructions read them; pages at multiples of the other, so that
#: some small number of pages always fills whole granules.
_LAYER_BYTES, _PAGE_BYTES = 16, 512


@frozen
class Runs:
    """One layer's part of a page: `num_runs` times (key scales, value scales, keys, values).

    In the order PSKD that is once a page; in the order PKSD once a page and head, since attention reads a head at a
    time, and a long run of memory is read faster than two short ones. So lie the layers of caches whose memory is all
    there from the start, too.

    Attributes:
        outer: axes before the runs, `K` in the order PKSD.
        num_scales: scales of the keys, or of the values, in a run; 0 where entries have none.
        num_bytes: of the keys, or of the values, in a run.
        length: bytes of a run.
    """

    outer: tuple[int, ...]
    inner: tuple[int, ...]
    num_scales: int
    num_bytes: int

    @classmethod
    def of(cls, layout: CacheLayout, group: CacheGroup) -> Runs:
        """Lay a layer of a group out."""
        size = {"S": layout.page_size, "K": group.num_kv_heads, "D": group.head_dim}
        axis = layout.order.index("S")
        outer, inner = tuple(size[a] for a in layout.order[1:axis]), tuple(size[a] for a in layout.order[axis:])
        num_scales = math.prod(inner[:-1]) if layout.scale_bytes else 0
        return cls(outer, inner, num_scales, math.prod(inner) * layout.entry_bytes)

    @property
    def length(self) -> int:
        """Bytes of a run, whole floats."""
        return _up(2 * (4 * self.num_scales + self.num_bytes), 4)

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer of a page to the next."""
        return _up(math.prod(self.outer) * self.length, _LAYER_BYTES)


@frozen
class GroupPages:
    """Where the pages of a group lie.

    Attributes:
        page_bytes: from one page to the next.
        granule: the least that the device maps, in bytes.
    """

    runs: Runs
    page_bytes: int
    granule: int

    @classmethod
    def of(cls, layout: CacheLayout, group: CacheGroup, granule: int) -> GroupPages:
        """Lay a group's pages out."""
        runs = Runs.of(layout, group)
        return cls(runs, _up(runs.layer_bytes * len(group.layers), _PAGE_BYTES), granule)

    @property
    def unit(self) -> int:
        """The fewest pages that fill whole granules."""
        return self.granule // math.gcd(self.granule, self.page_bytes)

    def granules(self, pages: range) -> range:
        """Return the granules in which these pages lie, some in part."""
        if not pages:
            return range(0)
        return range(pages.start * self.page_bytes // self.granule, -(-pages.stop * self.page_bytes // self.granule))

    def whole_pages(self, granules: range) -> range:
        """Return the pages that lie in these granules and in no other."""
        first = -(-granules.start * self.granule // self.page_bytes)
        return range(first, max(first, granules.stop * self.granule // self.page_bytes))


@frozen
class Regions:
    """How the addresses of all groups are cut into regions, each for one sequence.

    Attributes:
        groups: of the layout, in its order. All have the same page ids.
        region_pages: pages a region: `max_tokens`, and so many more that regions begin at granules.
        num_regions: how many there are. They cost addresses, not memory.
    """

    groups: tuple[GroupPages, ...]
    region_pages: int
    num_regions: int = field()

    @classmethod
    def of(cls, layout: CacheLayout, granule: int, max_tokens: int, num_regions: int) -> Regions:
        """Cut regions for sequences of `max_tokens` each."""
        groups = tuple(GroupPages.of(layout, group, granule) for group in layout.groups)
        unit = math.lcm(*(group.unit for group in groups))
        return cls(groups, _up(-(-max_tokens // layout.page_size), unit), num_regions)

    @property
    def num_pages(self) -> int:
        """Page ids of all regions."""
        return self.region_pages * self.num_regions

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all groups."""
        return sum(group.page_bytes for group in self.groups)

    @property
    def num_bytes(self) -> int:
        """Addresses that all regions take."""
        return self.num_pages * self.page_bytes


def _up(number: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-number // to) * to
