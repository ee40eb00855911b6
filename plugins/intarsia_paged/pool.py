"""One cache group's pages: who refers to each, which hold a known prefix, which can be taken."""

from __future__ import annotations

from collections import OrderedDict

from attrs import define, field


@define
class Pool:
    """Pages with reference counts. A page is referenced, or cached (nobody's, but its prefix is known), or free.

    Cached pages are given away in least-recently-used order, and only when no free page is left.
    """

    num_pages: int
    _references: list[int] = field(init=False)
    _names: dict[int, bytes] = field(factory=dict, init=False)
    _by_name: dict[bytes, int] = field(factory=dict, init=False)
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._references = [0] * self.num_pages
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """Return a page that nobody else refers to; what it held is forgotten."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._by_name[self._names.pop(page)]
        self._references[page] = 1
        return page

    def find(self, name: bytes) -> int | None:
        """Return the page that holds this prefix."""
        return self._by_name.get(name)

    def is_cached(self, page: int) -> bool:
        """Whether nobody refers to a page that holds a known prefix."""
        return page in self._cached

    def share(self, page: int) -> None:
        """Refer to a page once more."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def is_known_elsewhere(self, page: int) -> bool:
        """Whether what a page holds matters to others: it is referred to twice, or found by name."""
        return self._references[page] > 1 or page in self._names

    def drop(self, page: int) -> None:
        """Refer to a page once less. The last to leave a page with a known prefix leaves it cached."""
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._names:
                self._cached[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """Tell which prefix a full page holds. Where another page holds it already, this one stays private."""
        if name not in self._by_name and page not in self._names:
            self._names[page] = name
            self._by_name[name] = page

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many pages are referenced, free, cached and shared."""
        referenced = self.num_pages - self.num_available
        return referenced, len(self._free), len(self._cached), sum(count > 1 for count in self._references)

    def check(self, held: list[int]) -> None:
        """Raise AssertionError unless `held`, all page tables laid end to end, accounts for every reference."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        assert counts == self._references, "a page's references differ from the tables that name it"
        unreferenced = {page for page, count in enumerate(counts) if count == 0}
        assert sorted([*self._free, *self._cached]) == sorted(unreferenced), "a page is lost, or free and in use"
        assert {page: name for name, page in self._by_name.items()} == self._names, "a page's name is lost"
        assert not any(page in self._names for page in self._free), "a free page has a name"
        assert all(page in self._names for page in self._cached), "a cached page has no name"
