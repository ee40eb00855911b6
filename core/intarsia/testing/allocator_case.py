"""How a cache allocator's contract runs it: with which pages, groups and sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from intarsia.testing.caches import allocator_of
from intarsia.testing.memory import simulated_layout
from intarsia.testing.written import WrittenCache
from intarsia.types import Provider, SequenceId

__all__ = ["AllocatorCase", "distinct_tokens", "number_id"]


class AllocatorCase:
    """An allocator on trial: subclasses say whose provider it is, and how it is built.

    Attributes:
        options: the allocator's own, as a config has them.
        page_sizes: tokens a page that it is tried with.
        windows: cache groups that it is tried with, see `simulated_layout`.
        num_pages: of the caches that it is tried with: room for five sequences of `max_len`.
        max_len: tokens of the longest sequence, a multiple of the page sizes.
        examples: random lives that `test_any_life` tries.
        derandomize: whether it tries the same ones each time.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    page_sizes: ClassVar[Sequence[int]] = (1, 4, 16)
    windows: ClassVar[Sequence[Sequence[int | None]]] = ((None,), (None, 6), (5,))
    num_pages: ClassVar[Mapping[int, int]] = {1: 240, 2: 120, 3: 80, 4: 60, 16: 15}
    max_len: ClassVar[int] = 48
    examples: ClassVar[int] = 60
    derandomize: ClassVar[bool] = False

    def provider(self) -> Provider:
        """Return the allocator's provider."""
        raise NotImplementedError

    def build(
        self,
        *,
        page_size: int = 4,
        windows: Sequence[int | None] = (None,),
        num_pages: int = 0,
        num_host_pages: int = 0,
    ) -> WrittenCache:
        """Return the books of an empty cache, with memory behind them. 0 pages are `num_pages` of the page size."""
        layout = simulated_layout(page_size, windows)
        books = allocator_of(
            self.provider(),
            self.options,
            layout,
            num_pages=num_pages or self.num_pages[page_size],
            num_host_pages=num_host_pages,
            max_len=self.max_len,
        )
        return WrittenCache(books, layout)

    def each(self) -> Iterator[WrittenCache]:
        """Yield an empty cache of each page size and each kind of groups."""
        for page_size in self.page_sizes:
            for windows in self.windows:
                yield self.build(page_size=page_size, windows=windows)


def number_id(number: int) -> SequenceId:
    """Return the id of the sequence of a number."""
    return f"s{number}", 0


def distinct_tokens(seed: int, count: int) -> list[int]:
    """Return tokens that no other seed has in common from the first on."""
    return [1000 + seed, *((seed * 7 + i) % 50 for i in range(count - 1))][:count]
