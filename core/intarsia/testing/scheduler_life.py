"""Random lives of a scheduler. Needs hypothesis: `intarsia.testing.schedulers` imports this when it is asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from intarsia.errors import OverloadedError
from intarsia.testing.caches import SimulatedCache
from intarsia.testing.simulation import Simulation

if TYPE_CHECKING:
    from intarsia.testing.scheduler_case import SchedulerCase

#: Shrinking long lives takes minutes; a failing life is short enough to read as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
#: The smallest page table that holds `SimulatedCache.max_len` tokens has so many pages, and some are spare.
_SPARE = st.integers(0, 12)


class Life(RuleBasedStateMachine):
    """Arrivals, choices, cancels, failures and steps, in any order."""

    contract: SchedulerCase
    sim: Simulation

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        spare=_SPARE,
        windows=st.sampled_from([(None,), (None, 5), (4,)]),
        paged=st.booleans(),
        prefix=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 6]),
        max_tokens=st.sampled_from([1, 3, 5, 40]),
        max_batch=st.integers(1, 5),
        propose=st.sampled_from([None, "right", "wrong", "half"]),
    )
    def begin(
        self, page_size: int, spare: int, propose: str | None, max_tokens: int, max_batch: int, **facts: Any
    ) -> None:
        """Make an empty cache and a scheduler over it."""
        cache = evolve(SimulatedCache(), page_size=page_size, **facts)
        cache = evolve(cache, num_pages=-(-cache.max_len // page_size) + spare)
        self.sim = self.contract.simulate(cache, propose=propose, max_tokens=max_tokens, max_batch=max_batch)
        self.expected: set[tuple[str, int]] = set()
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        num_tokens=st.integers(1, 10),
        priority=st.integers(-1, 2),
        choices=st.integers(1, 3),
        salt=st.sampled_from(["", "x"]),
        ends=st.sampled_from([{}, {}, {"stops_after": 2}, {"fails_after": 1}]),
    )
    def arrive(
        self, prompt: list[int], num_tokens: int, priority: int, choices: int, salt: str, ends: dict[str, int]
    ) -> None:
        """Add a request of some choices."""
        name = f"s{self.count}"
        self.count += 1
        for choice in range(choices):
            try:
                self.sim.add(name, prompt, num_tokens, choice=choice, priority=priority, salt=salt, **ends)
            except OverloadedError:
                continue
            self.expected.add((name, choice))

    @precondition(lambda self: self.sim.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Give one up."""
        sequence_id = data.draw(st.sampled_from(sorted(self.sim.sequences)))
        self.sim.cancel(sequence_id)
        self.expected.discard(sequence_id)

    @rule(steps=st.integers(1, 4))
    def go_on(self, steps: int) -> None:
        """Run some steps."""
        for _ in range(steps):
            plan = self.sim.step()
            assert plan.rows or plan.preempted or not self.sim.sequences, "nothing runs, and nobody gives way"
        self.sim.check_answers()

    def teardown(self) -> None:
        """Let the rest run to its end."""
        if not hasattr(self, "sim"):
            return
        self.sim.run()
        self.sim.check_answers()
        assert {*self.sim.finished, *self.sim.failed} == self.expected, "a request was lost"
        self.sim.check_idle()


def live(contract: SchedulerCase) -> None:
    """Try random lives; AssertionError, with the calls that led there, where one breaks the contract."""
    machine = type("Life", (Life,), {"contract": contract})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=contract.examples,
            stateful_step_count=25,
            deadline=None,
            phases=PHASES,
            derandomize=contract.derandomize,
            database=None if contract.derandomize else settings().database,
            suppress_health_check=list(HealthCheck),
        ),
    )
