"""Claims of schedulers that are replaced while sequences run: by one like themselves, by another, and of it."""

from __future__ import annotations

from attrs import evolve

from intarsia.defaults.static import StaticOptions, StaticScheduler
from intarsia.testing.caches import SimulatedCache
from intarsia.testing.scheduler_case import CACHES, CRAMPED, SchedulerCase, finish
from intarsia.testing.simulation import Limits, Simulation

#: Caches with room and without, with prefixes and without, and one with host memory.
_CACHES = (CACHES[0], evolve(CACHES[1], num_pages=40), CRAMPED[0], CRAMPED[1], CRAMPED[3])


class _Refusing(StaticScheduler):
    """Takes nobody over."""

    def add(self, sequence: object) -> None:
        del sequence
        raise MemoryError("it takes nobody over")

    def take_over(self, held: object) -> set[tuple[str, int]]:
        del held
        raise MemoryError("it takes nobody over")


class SchedulerHandover(SchedulerCase):
    """What holds where a scheduler is replaced, see `intarsia.protocols.HandsOver`."""

    def test_another_scheduler_takes_over_at_any_time(self) -> None:
        """Whenever another scheduler takes its sequences over, or it takes another's, every answer stays its own."""
        for cache in _CACHES:
            for steps in range(1, 14, 3):
                for number in range(3):
                    sim = self._begun(cache, steps, static=number == 2)
                    sim.replace(*(self.build(sim.allocator, max_tokens=6) if number else _static(sim)))
                    finish(sim, None)

    def test_it_goes_on_where_another_fails_to_take_over(self) -> None:
        """Where the scheduler that was to take over fails, this one goes on as if nothing had been asked of it."""
        for cache in _CACHES:
            for steps in range(1, 14, 3):
                sim = self._begun(cache, steps)
                try:
                    sim.replace(_Refusing(StaticOptions(), sim.allocator), Limits())
                except MemoryError:
                    finish(sim, None)
                else:
                    assert not sim.sequences, "the one that refuses has taken over"

    def _begun(self, cache: SimulatedCache, steps: int, *, static: bool = False) -> Simulation:
        """Return a simulation of this scheduler, or of static batching, after some steps."""
        sim = self.simulate(cache, max_tokens=6, propose="half")
        if static:
            sim.replace(*_static(sim))
        for i in range(5):
            sim.add(f"r{i}", [(i + j) % 3 for j in range(5 + i)], 8, priority=i // 4)
        for _ in range(steps):
            sim.step()
        return sim


def _static(sim: Simulation) -> tuple[StaticScheduler, Limits]:
    options = StaticOptions(max_batch=3)
    return StaticScheduler(options, sim.allocator), Limits(max_batch=3)
