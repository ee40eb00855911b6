"""Random lives of a cache. Needs hypothesis: `intarsia.testing.allocators` imports this when it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from intarsia.protocols import SwappingAllocator
from intarsia.testing.written import WrittenCache
from intarsia.types import SequenceId

if TYPE_CHECKING:
    from intarsia.testing.allocator_case import AllocatorCase

#: Few different tokens, so that prefixes meet.
_IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


class Life(RuleBasedStateMachine):
    """Any calls in any order; every token is read back from its slot."""

    contract: AllocatorCase
    cache: WrittenCache

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        windows=st.sampled_from([(None,), (None, 3), (7, 2)]),
        room=st.sampled_from([1, 2, 3]),
        num_host_pages=st.sampled_from([0, 8]),
    )
    def begin(self, page_size: int, windows: tuple[int | None, ...], room: int, num_host_pages: int) -> None:
        """Make an empty cache, with room for one to three of the longest sequences."""
        num_pages = -(-self.contract.max_len // page_size) * room + room - 1
        self.cache = self.contract.build(
            page_size=page_size, windows=windows, num_pages=num_pages, num_host_pages=num_host_pages
        )
        self.count = 0

    def name(self) -> SequenceId:
        """Return an id that none had before."""
        self.count += 1
        return f"s{self.count}", 0

    def pick(self, data: st.DataObject) -> SequenceId:
        """Return one of the sequences."""
        return data.draw(st.sampled_from(sorted(self.cache.tokens)))

    @rule(ids=_IDS, salt=st.sampled_from(["", "a"]), runs=st.booleans())
    def enter(self, ids: list[int], salt: str, runs: bool) -> None:
        """A new sequence: found as `lookup` promised, and run or only reserved."""
        name, promised = self.name(), self.cache.allocator.lookup(ids, salt)
        found = self.cache.enter(name, ids, salt)
        assert found is None or found == promised < len(ids)
        if found is not None and runs:
            self.cache.grow(name, ids)

    @precondition(lambda self: self.cache.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=6), num_drafts=st.integers(0, 3))
    def go_on(self, data: st.DataObject, more: list[int], num_drafts: int) -> None:
        """More tokens, perhaps with drafts that are rejected, and perhaps rewound."""
        name = self.pick(data)
        ids = [*self.cache.tokens[name], *more][: self.contract.max_len - 3]
        rewinding = data.draw(st.booleans())
        if len(ids) > len(self.cache.tokens[name]):
            self.cache.grow(name, ids, drafts=[7] * num_drafts, rewinding=rewinding)

    @precondition(lambda self: self.cache.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A child with some of the tokens."""
        parent = self.pick(data)
        count = data.draw(st.integers(0, len(self.cache.tokens[parent])))
        self.cache.fork(parent, self.name(), count)

    @precondition(lambda self: self.cache.tokens)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Fewer tokens."""
        name = self.pick(data)
        self.cache.rewind(name, data.draw(st.integers(0, len(self.cache.tokens[name]))))

    @precondition(lambda self: self.cache.tokens or self.cache.swapped)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        """One leaves, wherever it is."""
        name = data.draw(st.sampled_from(sorted([*self.cache.tokens, *self.cache.swapped])))
        self.cache.release(name)
        if again:
            self.cache.release(name)

    @precondition(lambda self: self.cache.tokens and isinstance(self.cache.allocator, SwappingAllocator))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """One goes to host memory."""
        self.cache.swap_out(self.pick(data))

    @precondition(lambda self: self.cache.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        """One comes back."""
        self.cache.swap_in(data.draw(st.sampled_from(sorted(self.cache.swapped))))

    @rule()
    def read_all(self) -> None:
        """Every token is in its slot, and the figures add up."""
        self.cache.check_all()
        stats = self.cache.allocator.stats()
        assert stats.used + stats.free + stats.cached == stats.num_pages
        assert self.cache.tokens or self.cache.swapped or stats.used == 0

    def teardown(self) -> None:
        """All leave, and nothing stays."""
        if not hasattr(self, "cache"):
            return
        self.cache.check_all()
        self.cache.empty()
        assert self.cache.allocator.stats().used == 0, "pages are in use when all have left"


def live(contract: AllocatorCase) -> None:
    """Try random lives; AssertionError, with the calls that led there, where one breaks the contract."""
    machine = type("Life", (Life,), {"contract": contract})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=contract.examples,
            stateful_step_count=30,
            deadline=None,
            phases=PHASES,
            derandomize=contract.derandomize,
            database=None if contract.derandomize else settings().database,
            suppress_health_check=list(HealthCheck),
        ),
    )
