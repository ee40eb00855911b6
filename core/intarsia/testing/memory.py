"""Cache memory without numbers: each slot remembers which token it holds, after which others, under which salt.

Suites read it back before a row would: a page that was shared wrongly, copied too late or given away too early is seen
at once. The prefix that ends in a slot is one number, so that comparing takes no longer where sequences are long.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia.types import CacheGroup, CacheLayout, CacheMove

__all__ = ["SlotMemory", "simulated_layout"]


def simulated_layout(page_size: int = 4, windows: Sequence[int | None] = (None,)) -> CacheLayout:
    """Return a layout of one small layer a group: None sees everything, a number is a window of so many tokens."""
    return CacheLayout(
        order="PSKD",
        format="float32",
        entry_bytes=4,
        page_size=page_size,
        groups=tuple(
            CacheGroup(kind="full" if w is None else "window", layers=(i,), num_kv_heads=1, head_dim=4, window=w)
            for i, w in enumerate(windows)
        ),
    )


@define(eq=False)
class SlotMemory:
    """The slots of a cache's pages, and of its host pages.

    Attributes:
        num_page_ids: pages that tables can name, from 0 on.
    """

    layout: CacheLayout
    num_page_ids: int
    _slots: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    _host: dict[tuple[int, int, int], int] = field(factory=dict, init=False)
    #: (the prefix before, token) -> the prefix; what comes before the first token of a salt is the salt
    _prefixes: dict[tuple[int | str, int], int] = field(factory=dict, init=False)

    def prefixes(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """Return the number of the prefix that each token ends: equal for equal tokens and salt alone."""
        before: int | str = salt
        found = []
        for token in token_ids:
            before = self._prefixes.setdefault((before, token), len(self._prefixes))
            found.append(before)
        return found

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do cache work in order. Memory behind addresses, `map` and `unmap`, is not simulated."""
        for move in moves:
            if move.kind in ("map", "unmap"):
                continue
            source = None if move.kind == "zero" else self._host if move.kind == "swap_in" else self._slots
            target = self._host if move.kind == "swap_out" else self._slots
            for slot in range(self.layout.page_size):
                held = None if source is None else source.get((move.group, move.source, slot))
                if held is None:
                    target.pop((move.group, move.target, slot), None)
                else:
                    target[move.group, move.target, slot] = held

    def write(self, pages: Sequence[Sequence[int]], start: int, prefixes: Sequence[int], who: object) -> None:
        """Write the tokens from position `start` on; `prefixes` are those of all tokens from 0 on."""
        for group, table in enumerate(pages):
            for position in range(start, len(prefixes)):
                self._slots[self._place(group, table, position, who)] = prefixes[position]

    def check(self, pages: Sequence[Sequence[int]], start: int, prefixes: Sequence[int], who: object) -> None:
        """Raise AssertionError unless each slot holds its token that a token at position `start` or later can see."""
        groups = self.layout.groups
        assert len(pages) == len(groups), f"{who}: {len(pages)} page tables for {len(groups)} cache groups"
        for group, table in enumerate(pages):
            for position in range(self._first_visible(groups[group], start), len(prefixes)):
                held = self._slots.get(self._place(group, table, position, who))
                assert held == prefixes[position], (
                    f"{who} would read at position {position} {self._told(held)}, not {self._told(prefixes[position])}"
                )

    def _first_visible(self, group: CacheGroup, position: int) -> int:
        return 0 if group.window is None else max(0, position - group.window + 1)

    def _place(self, group: int, table: Sequence[int], position: int, who: object) -> tuple[int, int, int]:
        size = self.layout.page_size
        index = position // size
        assert index < len(table), f"{who}: position {position} is beyond its {len(table)} pages of {size} tokens"
        page = table[index]
        assert page >= 0, f"{who} reads or writes at position {position} a page that is gone"
        assert page < self.num_page_ids, f"{who}: page {page} is none of {self.num_page_ids}"
        return group, page, position % size

    def _told(self, prefix: int | None) -> str:
        """Return a prefix as an author wants to see it."""
        if prefix is None:
            return "nothing"
        by_number = {number: key for key, number in self._prefixes.items()}
        tokens: list[int] = []
        before: int | str = prefix
        while isinstance(before, int):
            before, token = by_number[before]
            tokens.insert(0, token)
        return f"{tokens[-1]} after {tokens[:-1]}" + (f" under salt {before!r}" if before else "")
