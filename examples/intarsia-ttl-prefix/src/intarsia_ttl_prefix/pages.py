"""The pages: who refers to each, which hold a known prefix, and until when one that nobody refers to is kept."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field


@define
class Pages:
    """Pages with reference counts. A page is referenced, or resting (nobody's, but its prefix is known), or free.

    Resting pages are given away in the order of their last use, and only when no free page is left: so one can be gone
    before its time. One whose time is over is found by nobody from that moment on, and is free once somebody collects.

    Attributes:
        ttl_s: seconds that a page rests.
        clock: returns seconds, and never goes back.
    """

    num_pages: int
    ttl_s: float
    clock: Callable[[], float]
    _references: list[int] = field(init=False)
    _names: dict[int, bytes] = field(factory=dict, init=False)
    _by_name: dict[bytes, int] = field(factory=dict, init=False)
    _free: list[int] = field(init=False)
    _resting: OrderedDict[int, float] = field(factory=OrderedDict, init=False)  # page -> when its time is over

    def __attrs_post_init__(self) -> None:
        self._references = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._resting)

    def collect(self) -> None:
        """Free the resting pages whose time is over: they are the first, since all rest equally long."""
        now = self.clock()
        while self._resting and next(iter(self._resting.values())) <= now:
            self._free.append(self._forget_oldest())

    def _forget_oldest(self) -> int:
        page, _ = self._resting.popitem(last=False)
        del self._by_name[self._names.pop(page)]
        return page

    def take(self) -> int:
        """Return a page that nobody else refers to; what it held is forgotten."""
        page = self._free.pop() if self._free else self._forget_oldest()
        self._references[page] = 1
        return page

    def find(self, name: bytes) -> int | None:
        """Return the page that holds this prefix, if its time is not over."""
        page = self._by_name.get(name)
        if page is None or self._resting.get(page, math.inf) <= self.clock():
            return None
        return page

    def is_resting(self, page: int) -> bool:
        """Whether nobody refers to a page that holds a known prefix."""
        return page in self._resting

    def share(self, page: int) -> None:
        """Refer to a page once more."""
        self._resting.pop(page, None)
        self._references[page] += 1

    def is_known_elsewhere(self, page: int) -> bool:
        """Whether what a page holds matters to others: it is referred to twice, or found by name."""
        return self._references[page] > 1 or page in self._names

    def drop(self, page: int) -> None:
        """Refer to a page once less. The last to leave a page with a known prefix leaves it resting."""
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._names:
            self._resting[page] = self.clock() + self.ttl_s
        else:
            self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Tell which prefix a full page holds. Where another page holds it already, this one stays private."""
        if name not in self._by_name and page not in self._names:
            self._names[page] = name
            self._by_name[name] = page

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many pages are referenced, free, resting and shared."""
        referenced = self.num_pages - self.num_available
        return referenced, len(self._free), len(self._resting), sum(count > 1 for count in self._references)

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless `held`, all page tables laid end to end, accounts for every reference."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        assert counts == self._references, "a page's references differ from the tables that name it"
        unreferenced = [page for page, count in enumerate(counts) if count == 0]
        assert sorted([*self._free, *self._resting]) == unreferenced, "a page is lost, or free and in use"
        assert {page: name for name, page in self._by_name.items()} == self._names, "a page's name is lost"
        assert self._names.keys().isdisjoint(self._free), "a free page has a name"
        assert self._resting.keys() <= self._names.keys(), "a resting page has no name"
        times = list(self._resting.values())
        assert times == sorted(times), "pages do not rest in the order of their last use"
