"""How a scheduler's contract runs it: over which caches, within which limits, against which drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attrs import evolve

from intarsia.protocols import CacheAllocator, PartContext, Scheduler
from intarsia.testing.caches import SimulatedCache, tiny_spec
from intarsia.testing.claims import settle
from intarsia.testing.simulation import Limits, Simulation, answer
from intarsia.types import BatchPlan, EngineOptions, Provider, SequenceId

__all__ = ["CACHES", "CRAMPED", "ONE", "SchedulerCase", "finish", "guessing", "numbered", "order"]

#: Caches of every kind, each with room for a few sequences.
CACHES: tuple[SimulatedCache, ...] = (
    SimulatedCache(paged=False),
    SimulatedCache(),
    SimulatedCache(prefix=False, page_size=1, num_pages=96),
    SimulatedCache(page_size=3, windows=(None, 5)),
    SimulatedCache(windows=(4,), page_size=2),
)
#: Of these, those in which sequences that grow get in each other's way.
CRAMPED: tuple[SimulatedCache, ...] = (
    evolve(CACHES[1], num_pages=9),
    evolve(CACHES[2], num_pages=30),
    evolve(CACHES[3], num_pages=12),
    evolve(CACHES[1], num_pages=9, num_host_pages=16),
)
#: Room for one sequence: who comes next is for the scheduler to say.
ONE = SimulatedCache(paged=False, num_pages=6)


def guessing(kind: str) -> Callable[[Sequence[int]], Sequence[int]]:
    """Return a drafter that is always `right`, always `wrong`, or right once: `half`."""

    def propose(context: Sequence[int]) -> Sequence[int]:
        right = answer(context, 3)
        return {"right": right, "wrong": [9, 9], "half": [*right[:1], 9, 9]}[kind]

    return propose


class SchedulerCase:
    """A scheduler on trial: subclasses say whose provider it is, and what it need not promise.

    Attributes:
        options: the scheduler's own, as a config has them.
        limit_names: what its options for the limits of `Limits` are called. One that it does not have is not claimed.
        by_priority: of those that wait, higher priorities run first.
        by_arrival: of those that wait and are alike, the first that came runs first.
        ages: waiting outlives a stream of arrivals of higher priority.
        preempts: where pages run out, a running sequence gives way.
        patience: steps within which the suite's streams of arrivals must let everybody through.
        examples: random lives that `test_any_life` tries.
        derandomize: whether it tries the same ones each time.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    limit_names: ClassVar[Mapping[str, str]] = {name: name for name in ("max_batch", "max_tokens", "max_waiting")}
    by_priority: ClassVar[bool] = True
    by_arrival: ClassVar[bool] = True
    ages: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    patience: ClassVar[int] = 200
    examples: ClassVar[int] = 40
    derandomize: ClassVar[bool] = False

    def provider(self) -> Provider:
        """Return the scheduler's provider."""
        raise NotImplementedError

    def build(self, allocator: CacheAllocator, **limits: int) -> tuple[Scheduler, Limits]:
        """Return a new scheduler over an empty cache, and the limits that it promises to keep to.

        Args:
            allocator: the cache's books.
            limits: those that the test wants, for `options` that the part has.
        """
        provider = self.provider()
        wanted = {self.limit_names[name]: value for name, value in limits.items() if name in self.limit_names}
        options = settle(provider, "scheduler", wanted, {k: v for k, v in self.options.items() if k not in wanted})
        engine = EngineOptions(max_model_len=64, device="cpu", dtype="float32", threads=1)
        context = PartContext(options=options, engine=engine, spec=tiny_spec(), num_ids=64, parts={"cache": allocator})
        promised = {name: getattr(options, option, None) for name, option in self.limit_names.items()}
        return provider.build(context), Limits(**promised)

    def simulate(
        self,
        cache: SimulatedCache,
        *,
        propose: str | None = None,
        depth: int = 1,
        names_pending: bool = False,
        **limits: int,
    ) -> Simulation:
        """Return a simulation of the scheduler over an empty cache."""
        books = cache.build()
        part, promised = self.build(books, **limits)
        return Simulation(
            part,
            books,
            cache.layout,
            promised,
            propose=guessing(propose) if propose else None,
            depth=depth,
            names_pending=names_pending,
        )

    def promised(self) -> set[str]:
        """Return the names of the limits that it promises to keep to."""
        _, limits = self.build(ONE.build(), max_batch=2, max_tokens=8, max_waiting=8)
        return {name for name in self.limit_names if getattr(limits, name) is not None}


def finish(sim: Simulation, count: int | None) -> None:
    """Run to the end: all of the sequences have their own answers, and nothing is left."""
    sim.run()
    assert count is None or len(sim.finished) == count, f"{len(sim.finished)} of {count} sequences finished"
    sim.check_answers()
    sim.check_idle()


def order(sim: Simulation) -> list[str]:
    """Run to the end, and return the names in the order of their first rows."""
    sim.run()
    return list(dict.fromkeys(row.sequence_id[0] for plan in sim.log for row in plan.rows))


def numbered(plans: Sequence[BatchPlan], numbers: Mapping[str, int]) -> Iterator[object]:
    """Return plans with numbers in the place of names; in which order sequences leave says nothing."""

    def number(sequence_id: SequenceId) -> SequenceId:
        return str(numbers[sequence_id[0]]), sequence_id[1]

    for plan in plans:
        rows = [evolve(row, sequence_id=number(row.sequence_id)) for row in plan.rows]
        entered = [number(each.sequence_id) for each in plan.entered]
        gone = sorted(map(number, plan.left)), sorted(map(number, plan.preempted))
        yield rows, entered, gone, plan.moves
