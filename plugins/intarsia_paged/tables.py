"""What a sequence holds: a page table a cache group, on the device or, while it is swapped out, in host memory."""

from __future__ import annotations

from attrs import define, field

#: In a page table: a page that a window has left behind. Nothing reads it again.
GONE = -1


@define
class Held:
    """What one sequence holds: a page table a group, and the chain of its full pages' names.

    Attributes:
        tables: whoever changes one forgets what `pages` returned: see `changed`.
        num_computed: tokens that have valid slots.
    """

    tables: list[list[int]]
    salt: str
    num_computed: int
    chain: list[bytes]
    _pages: tuple[tuple[int, ...], ...] | None = field(default=None, init=False)

    def changed(self) -> None:
        """Note that a table is another now."""
        self._pages = None

    def pages(self) -> tuple[tuple[int, ...], ...]:
        """Return the tables as they are; the same tuples until one changes, as in most steps none does."""
        if self._pages is None:
            self._pages = tuple(map(tuple, self.tables))
        return self._pages

    def name(self, index: int) -> bytes | None:
        """Return what the `index`-th page of every table is found by; None where it is not full, or has no name."""
        return self.chain[index] if index < len(self.chain) else None
