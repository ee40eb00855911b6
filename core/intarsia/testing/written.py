"""An allocator's books with memory behind them, and what each sequence must find there."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia.protocols import CacheAllocator, SwappingAllocator
from intarsia.testing.memory import SlotMemory
from intarsia.testing.simulation import tables
from intarsia.types import CacheLayout, SequenceId

__all__ = ["WrittenCache"]


@define(eq=False)
class WrittenCache:
    """Makes the calls that schedulers and engines make, in their order, and does the moves as executors do.

    Attributes:
        tokens: of each sequence, those that it must find in their slots.
        swapped: those of sequences in host memory.
        salts: of all sequences.
    """

    allocator: CacheAllocator
    layout: CacheLayout
    tokens: dict[SequenceId, list[int]] = field(factory=dict, init=False)
    swapped: dict[SequenceId, list[int]] = field(factory=dict, init=False)
    salts: dict[SequenceId, str] = field(factory=dict, init=False)
    _memory: SlotMemory = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._memory = SlotMemory(self.layout, tables(self.allocator))

    # --- calls ------------------------------------------------------------------------------------------------------

    def enter(self, sequence_id: SequenceId, token_ids: Sequence[int], salt: str = "") -> int | None:
        """Reserve for a new sequence's tokens; return how many were found, and check that they are there."""
        assert sequence_id not in self.tokens and sequence_id not in self.swapped, "the test uses an id twice"
        found = self.allocator.reserve(sequence_id, token_ids, len(token_ids), salt)
        if found is None:
            return None
        self.tokens[sequence_id] = list(token_ids[:found])
        self.salts[sequence_id] = salt
        self.do_moves()
        self.check(sequence_id)
        self.allocator.check_integrity()
        return found

    def grow(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        *,
        count: int | None = None,
        drafts: Sequence[int] = (),
        salt: str = "",
        rewinding: bool = True,
    ) -> bool:
        """Run the first `count` tokens of a sequence that are not there yet, and drafts that are all rejected.

        Returns False where there is no room.
        """
        stop = len(token_ids) if count is None else count
        if sequence_id not in self.tokens and self.enter(sequence_id, token_ids[:stop], salt) is None:
            return False
        salt, held = self.salts[sequence_id], self.tokens[sequence_id]
        found = self.allocator.reserve(sequence_id, token_ids, stop + len(drafts), salt)
        if found is None:
            return False
        assert found == len(held), f"{sequence_id} has {len(held)} tokens in the cache, and `reserve` says {found}"
        self.do_moves()
        self._write(sequence_id, len(held), [*token_ids[:stop], *drafts])
        if drafts or stop > len(held):
            self.tokens[sequence_id] = list(token_ids[:stop])
            self.allocator.commit(sequence_id, token_ids, stop)
        if drafts and rewinding:
            self.allocator.rewind(sequence_id, stop)
        self.allocator.check_integrity()
        return True

    def _write(self, sequence_id: SequenceId, start: int, token_ids: Sequence[int]) -> None:
        prefixes = self._memory.prefixes(token_ids, self.salts[sequence_id])
        pages = self.allocator.pages(sequence_id)
        self._memory.write(pages, start, prefixes, sequence_id)
        if start < len(token_ids):
            self._memory.check(pages, start, prefixes, sequence_id)

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Forget tokens from a position on; no further back than what windows still hold, and then return False."""
        held = self.tokens[sequence_id]
        if num_tokens < len(held) and any(group.window is not None for group in self.layout.groups):
            return False
        self.allocator.rewind(sequence_id, num_tokens)
        del held[num_tokens:]
        self.allocator.check_integrity()
        return True

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Fork a sequence after its first tokens."""
        if not self.allocator.fork(parent, child, num_tokens):
            return False
        self.tokens[child] = self.tokens[parent][:num_tokens]
        self.salts[child] = self.salts[parent]
        self.do_moves()
        self.check(child)
        self.allocator.check_integrity()
        return True

    def release(self, sequence_id: SequenceId) -> None:
        """Give a sequence back, wherever it is."""
        self.allocator.release(sequence_id)
        self.tokens.pop(sequence_id, None)
        self.swapped.pop(sequence_id, None)
        self.allocator.check_integrity()

    def swap_out(self, sequence_id: SequenceId) -> bool:
        """Move a sequence to host memory, where that is possible."""
        assert isinstance(self.allocator, SwappingAllocator)
        if not self.allocator.swap_out(sequence_id):
            return False
        self.swapped[sequence_id] = self.tokens.pop(sequence_id)
        self.do_moves()
        self.allocator.check_integrity()
        return True

    def swap_in(self, sequence_id: SequenceId) -> bool:
        """Bring a sequence back; False where there is no room."""
        held = self.swapped[sequence_id]
        found = self.allocator.reserve(sequence_id, held, len(held), self.salts[sequence_id])
        if found is None:
            return False
        assert found == len(held), f"{sequence_id} left with {len(held)} tokens, and comes back with {found}"
        self.tokens[sequence_id] = self.swapped.pop(sequence_id)
        self.do_moves()
        self.check(sequence_id)
        self.allocator.check_integrity()
        return True

    def fill(self, num_tokens: int, first: int = 1000) -> list[SequenceId]:
        """Add sequences that have nothing in common until there is no room; return them."""
        added: list[SequenceId] = []
        while True:
            assert len(added) <= 4096, "a cache without end"
            sequence_id = (f"filler-{first + len(added)}", 0)
            ids = [5000 + first + len(added), *range(num_tokens - 1)]
            if not self.grow(sequence_id, ids):
                return added
            added.append(sequence_id)

    def empty(self) -> None:
        """Release everything, and what the test has only reserved."""
        for sequence_id in (*self.tokens, *self.swapped):
            self.release(sequence_id)

    def do_moves(self) -> None:
        """Do what is due, as an executor does before a step."""
        self._memory.move(self.allocator.take_moves())

    # --- checks -----------------------------------------------------------------------------------------------------

    def refuses(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int) -> None:
        """Raise AssertionError unless there is no room, and saying so has changed nothing."""
        before = self.snapshot()
        found = self.allocator.reserve(sequence_id, token_ids, num_tokens)
        assert found is None, f"{num_tokens} tokens fit a cache that is full"
        assert self.snapshot() == before, "a reservation that was refused changed the books"

    def snapshot(self) -> object:
        """Return all that the books say of themselves; moves that are due are done first."""
        self.allocator.check_integrity()
        self.do_moves()
        swap = self.allocator.swap_stats() if isinstance(self.allocator, SwappingAllocator) else None
        found = {name: self.allocator.lookup([*ids, 1], self.salts[name]) for name, ids in self.tokens.items()}
        places = {name: self.allocator.pages(name) for name in self.tokens}
        return self.allocator.stats(), places, found, swap and (swap.used, swap.swapped, swap.outs, swap.ins)

    def check(self, sequence_id: SequenceId) -> None:
        """Raise AssertionError unless a sequence's next token would see all that it must."""
        held = self.tokens[sequence_id]
        prefixes = self._memory.prefixes(held, self.salts[sequence_id])
        self._memory.check(self.allocator.pages(sequence_id), len(held), prefixes, sequence_id)

    def check_all(self) -> None:
        """Check every sequence, and the books."""
        self.do_moves()
        for sequence_id in self.tokens:
            self.check(sequence_id)
        self.allocator.check_integrity()

    def check_table(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Raise AssertionError unless there are pages for so many tokens, each of them one that exists."""
        pages = self.allocator.pages(sequence_id)
        assert len(pages) == len(self.layout.groups), f"{len(pages)} page tables for {len(self.layout.groups)} groups"
        size = self.layout.page_size
        for group, table in zip(self.layout.groups, pages, strict=True):
            assert len(table) * size >= num_tokens, f"{len(table)} pages of {size} slots for {num_tokens} tokens"
            held = len(self.tokens.get(sequence_id, ()))
            first = 0 if group.window is None else max(0, held - group.window + 1) // size
            needed = table[first : -(-num_tokens // size)]
            assert all(0 <= page < tables(self.allocator) for page in needed), f"{table} names pages that are none"
            assert len(set(needed)) == len(needed), f"{table} has a page twice"
