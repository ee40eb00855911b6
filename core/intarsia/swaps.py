"""Replacing a part of a running engine, between two steps: whoever fails, no request is lost."""

from __future__ import annotations

import time
from typing import Any

import attrs
from attrs import define, field

from intarsia.errors import PluginError
from intarsia.flight import is_empty
from intarsia.handing_over import hand_over, refused
from intarsia.loop import StepLoop
from intarsia.plugins import Registry
from intarsia.protocols import Parts, ReplacesDrafter, Scheduler
from intarsia.replacing import key_of, replaced
from intarsia.speculation import Speculation
from intarsia.structuring import shown
from intarsia.types import BatchPlan, Choice, EngineConfig


@define
class Swaps:
    """Replaces parts of a loop.

    Attributes:
        done: what was replaced, in order; see `Engine.swap`.
    """

    _loop: StepLoop
    _registry: Registry
    done: list[dict[str, Any]] = field(factory=list, init=False)

    def swap(self, config: EngineConfig, slot: str, choice: Choice) -> EngineConfig:
        """Replace a part, with nothing in flight, and return the config with it.

        Raises as `Engine.swap` does, and then nothing has changed.
        """
        loop, begun = self._loop, time.perf_counter()
        assert not loop.is_flying, "what is collected now may tell an observer, who swaps too"
        before = key_of(loop.parts, slot)
        changed, parts = replaced(config, loop.parts, self._registry, slot, choice)
        kept = self._swap_scheduler(config, parts) if slot == "scheduler" else self._swap_drafter(parts)
        self.done.append(
            {
                "slot": slot,
                "before": before,
                "after": key_of(parts, slot),
                "time": time.time(),
                "seconds": time.perf_counter() - begun,
                "sequences": len(loop.sequences),
                "kept": kept,
            }
        )
        return changed

    def _swap_scheduler(self, config: EngineConfig, parts: Parts) -> int:
        """Hand all sequences over, and have the new scheduler plan its first step; return how many kept their pages."""
        loop = self._loop
        before, key = loop.parts, key_of(loop.parts, "scheduler")
        with refused(parts, "scheduler", key):
            kept = hand_over(before.scheduler, parts.scheduler, loop.in_turn())
        loop.give_back(kept)
        loop.adopt(parts)
        plan = BatchPlan()
        with refused(parts, "scheduler", key):
            try:
                plan = _planned(parts.scheduler)
                step = loop.begin(plan, time.perf_counter())
            except BaseException:  # an interrupt too: nothing stays half swapped
                self._go_back(config, before, plan)
                raise
        loop.planned = None if is_empty(plan) else step
        return len(kept)

    def _swap_drafter(self, parts: Parts) -> int:
        loop, executor = self._loop, parts.executor
        assert isinstance(executor, ReplacesDrafter), "composition has checked that"
        entered = [sequence.entered() for name, sequence in loop.sequences.items() if name in loop.known]
        owner = None if parts.drafter is None else parts.selection("drafter")
        with refused(parts, "drafter", key_of(loop.parts, "drafter")):
            executor.replace_drafter(parts.drafter, entered, owner)
        loop.adopt(parts)
        loop.speculation = Speculation()
        return len(loop.sequences)

    def _go_back(self, config: EngineConfig, parts: Parts, plan: BatchPlan) -> None:
        """Make the scheduler before anew, which has given all away, and give it everything again."""
        loop = self._loop
        with loop.answerable("scheduler", "taking sequences back"):
            _, again = replaced(config, parts, self._registry, "scheduler", config.scheduler)
            loop.adopt(attrs.evolve(parts, scheduler=again.scheduler, built=again.built))
        loop.take_back()
        loop.give_back(())
        if plan.moves:
            loop.run_aside(BatchPlan(moves=plan.moves))


def _planned(scheduler: Scheduler) -> BatchPlan:
    plan = scheduler.plan()
    if not isinstance(plan, BatchPlan):
        raise PluginError(f"{type(scheduler).__name__}.plan returned {shown(plan)}, not a BatchPlan")
    return plan
