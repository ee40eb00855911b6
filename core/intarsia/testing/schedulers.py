"""The contract of schedulers, as tests to inherit.

::

    from intarsia.testing.schedulers import SchedulerContract

    class TestMine(SchedulerContract):
        options = {"ageing_steps": 4}

        def provider(self):
            return my_plugin.provide_schedulers()[0]

pytest runs the inherited tests. No model runs: a simulation makes the engine's calls, over the caches that come with
Intarsia, checks each plan, and compares what every sequence says with what it says alone. What a scheduler need not
promise, an attribute says: `ages = False` skips the claim, in sight.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

from attrs import evolve

from intarsia.errors import OverloadedError
from intarsia.protocols import PlansAhead, SwappingAllocator
from intarsia.testing.caches import SimulatedCache
from intarsia.testing.claims import hypothesis, unclaimed
from intarsia.testing.scheduler_case import CACHES, CRAMPED, ONE, finish, numbered, order
from intarsia.testing.scheduler_handover import SchedulerHandover
from intarsia.testing.simulation import Simulation
from intarsia.testing.zeroing import ZeroingAllocator
from intarsia.types import BatchPlan

__all__ = ["SchedulerContract"]


class SchedulerContract(SchedulerHandover):
    """What every scheduler keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `ages = False`, is in `SchedulerCase`.
    """

    # --- nobody is lost ---------------------------------------------------------------------------------------------

    def test_every_request_ends_with_its_own_answer(self) -> None:
        """Every request ends, and says in any company what it says alone; then nothing is left of it."""
        for cache in CACHES:
            sim = self.simulate(cache)
            for i in range(9):
                stops = 3 if i % 3 == 2 else None
                sim.add(f"r{i}", [(i + j) % 3 for j in range(1 + 2 * i % 13)], 1 + i % 9, stops_after=stops)
            finish(sim, 9)

    def test_the_longest_request_that_fits_is_run(self) -> None:
        """A request that needs the whole cache is run, alone if it must."""
        for cache in (ONE, SimulatedCache(num_pages=6, prefix=False), SimulatedCache(num_pages=6, num_host_pages=9)):
            sim = self.simulate(cache)
            for i in range(3):
                sim.add(f"r{i}", [i] * 12, 12)
            finish(sim, 3)

    def test_nobody_starves_behind_later_arrivals(self) -> None:
        """A long request that needs most of the cache ends, whatever short ones keep coming behind it."""
        for cache in (SimulatedCache(num_pages=7, prefix=False), ONE):
            sim = self.simulate(cache, max_batch=4)
            for i in range(3):
                sim.add(f"early-{i}", [1, i], 4)
            sim.add("long", [2] * 16, 8)
            self._stream(sim, "long", priority=0)

    def test_waiting_outlives_higher_priorities(self) -> None:
        """A request of low priority ends, although requests of a higher one keep coming."""
        if not self.ages:
            unclaimed("ages = False: higher priorities always run first")
        for cache in (ONE, SimulatedCache(num_pages=6, prefix=False)):
            sim = self.simulate(cache, max_batch=1)
            sim.add("low", [1, 2], 3)
            self._stream(sim, "low", priority=4)

    def _stream(self, sim: Simulation, name: str, priority: int) -> None:
        """Let a request a step arrive until `name` has finished."""
        for step in range(self.patience):
            with contextlib.suppress(OverloadedError):
                sim.add(f"late-{step}", [2, 1], 2, priority=priority)
            sim.step()
            if (name, 0) in sim.finished:
                return sim.check_answers()
        raise AssertionError(f"{name!r} has not finished after {self.patience} steps of arrivals behind it")

    def test_a_failed_request_takes_nobody_with_it(self) -> None:
        """Rows can fail: their requests end, and the others go on as if alone."""
        for cache in (*CACHES[:2], CRAMPED[0]):
            sim = self.simulate(cache)
            for i in range(8):
                sim.add(f"r{i}", [i % 3] * (1 + i), 8, fails_after=i if i % 2 else None)
            sim.run(self.patience * 4)
            assert set(sim.finished) == {(f"r{i}", 0) for i in range(0, 8, 2)}, "others failed, or did not end"
            sim.check_answers()
            sim.check_idle()

    # --- who is next ------------------------------------------------------------------------------------------------

    def test_higher_priorities_run_first(self) -> None:
        """Of requests that wait, the one of the highest priority runs first."""
        if not self.by_priority:
            unclaimed("by_priority = False")
        sim = self.simulate(ONE)
        for name, priority in (("a", 0), ("b", 5), ("c", 1), ("d", 7), ("e", -1)):
            sim.add(name, [1, 2, 0], 1, priority=priority)
        ran = order(sim)
        assert ran == list("dbcae"), f"of priorities a 0, b 5, c 1, d 7, e -1 they ran {ran}"

    def test_equals_run_in_the_order_of_their_arrival(self) -> None:
        """Of requests that wait and are alike, the first that came runs first."""
        if not self.by_arrival:
            unclaimed("by_arrival = False")
        sim = self.simulate(ONE)
        for name in "cadbe":
            sim.add(name, [1, 2, 0], 2)
        ran = order(sim)
        assert ran == list("cadbe"), f"c, a, d, b, e came, and ran {ran}"

    # --- budgets ----------------------------------------------------------------------------------------------------

    def test_the_token_budget_is_kept_and_changes_no_answer(self) -> None:
        """No step runs more than `max_tokens` tokens, drafts included, and answers do not depend on the budget."""
        if "max_tokens" not in self.promised():
            unclaimed("it has no budget of tokens")
        for most in (1, 3, 7, 16):
            for cache, propose in ((CACHES[1], None), (CACHES[3], "right"), (CACHES[0], "half")):
                sim = self.simulate(cache, propose=propose, max_tokens=most)
                for i in range(6):
                    sim.add(f"r{i}", [(i * j) % 3 for j in range(3 * i + 1)], 5)
                finish(sim, 6)

    def test_the_batch_limit_is_kept_and_changes_no_answer(self) -> None:
        """No more than `max_batch` sequences run at once, and answers do not depend on how many do."""
        if "max_batch" not in self.promised():
            unclaimed("it has no limit of sequences that run at once")
        for most in (1, 2, 5):
            sim = self.simulate(evolve(CACHES[1], num_pages=200), max_batch=most)
            for i in range(9):
                sim.add(f"r{i}", [i % 3] * (1 + i % 4), 1 + i % 5)
            finish(sim, 9)

    def test_a_full_queue_refuses_and_changes_nothing(self) -> None:
        """Beyond `max_waiting` a request is refused, with a hint when to retry, and leaves no trace."""
        if "max_waiting" not in self.promised():
            unclaimed("it has no limit of sequences that wait")
        sim = self.simulate(CACHES[1], max_waiting=2, max_batch=1)
        for name in "ab":
            sim.add(name, [1], 2)
        for _ in range(2):
            try:
                sim.add("refused", [1], 2)
            except OverloadedError as error:
                assert error.retry_after_s is not None and error.retry_after_s > 0, "it does not say when to retry"
            else:
                raise AssertionError("a third sequence waits, and max_waiting is 2")
            assert sim.scheduler.num_waiting == 2, "a sequence that was refused is counted"
        sim.step()
        sim.cancel(("refused", 0))
        finish(sim, 2)

    # --- preemption -------------------------------------------------------------------------------------------------

    def test_preemption_changes_no_answer(self) -> None:
        """Where sequences outgrow the cache some give way, and still say what they say alone."""
        seen = 0
        for cache in CRAMPED:
            for propose in (None, "half"):
                sim = self.simulate(cache, propose=propose, max_tokens=24)
                for i in range(6):
                    sim.add(f"r{i}", [(i + j) % 3 for j in range(5 + i % 4)], 12)
                finish(sim, 6)
                seen += sum(len(plan.preempted) for plan in sim.log)
        assert seen or not self.preempts, "nothing was preempted; if nothing ever is, say preempts = False"

    def test_a_swapped_sequence_comes_back_or_is_given_up(self) -> None:
        """What is in host memory comes back with its tokens, and a cancelled sequence leaves nothing there."""
        if not self.preempts:
            unclaimed("preempts = False")
        for stop in range(0, 24, 2):
            sim = self.simulate(CRAMPED[3])
            if not isinstance(sim.allocator, SwappingAllocator):
                unclaimed("no allocator swaps")
            for i in range(6):
                sim.add(f"r{i}", [(i + j) % 3 for j in range(6)], 12)
            for _ in range(stop):
                sim.step()
            for i in (3, 5):
                sim.cancel((f"r{i}", 0))
            sim.run(self.patience * 4)
            sim.check_answers()
            sim.check_idle()
            swapped = sim.allocator.swap_stats()
            assert (swapped.used, swapped.swapped) == (0, 0), f"{swapped.used} host pages are in use when all have left"

    # --- leaving ----------------------------------------------------------------------------------------------------

    def test_a_request_can_be_cancelled_in_every_state(self) -> None:
        """A cancelled request is in no later plan and leaves no page, whatever it was doing; others go on."""
        for cache in (CACHES[0], CACHES[1], CRAMPED[0], CRAMPED[3]):
            for steps in range(12):
                sim = self.simulate(cache, max_tokens=6, propose="half")
                for i in range(5):
                    sim.add(f"r{i}", [(i + j) % 3 for j in range(7)], 8)
                for _ in range(steps):
                    sim.step()
                live = [sequence_id for sequence_id in sim.sequences if sequence_id[0] in ("r1", "r3", "r4")]
                for sequence_id in live:
                    sim.cancel(sequence_id)
                sim.run(self.patience * 4)
                sim.check_answers()
                sim.check_idle()

    def test_unknown_and_repeated_cancels_are_ignored(self) -> None:
        """Cancelling what is gone, or never was, changes nothing."""
        sim = self.simulate(CACHES[1])
        for i in range(3):
            sim.add(f"r{i}", [1, i], 4)
        for target in (("nobody", 0), ("r1", 0), ("r1", 0), ("r0", 7)):
            sim.step()
            sim.cancel(target)
        sim.cancel(("nobody", 0))
        finish(sim, 2)

    def test_an_id_can_be_used_again(self) -> None:
        """A request of an id that has left is another: nothing of the first reaches it, drafts neither."""
        for steps in range(5):
            sim = self.simulate(CACHES[1], propose="right")
            for _ in range(3):
                sim.add("again", [1, 2, 1, 2, steps % 3], 9)
                for _ in range(steps):
                    sim.step()
                sim.cancel(("again", 0))
            sim.add("again", [2, 2, 0], 9)
            finish(sim, None)

    # --- what a plan says -------------------------------------------------------------------------------------------

    def test_drafts_change_no_answer(self) -> None:
        """Right, wrong and half right proposals change no answer; those that are run are of the step before."""
        for propose in ("right", "wrong", "half"):
            for cache in CACHES:
                sim = self.simulate(cache, propose=propose)
                for i in range(5):
                    sim.add(f"r{i}", [i % 3] * (1 + 2 * i), 2 + 2 * i, stops_after=3 if i == 4 else None)
                finish(sim, 5)
                ran = sum(row.num_drafts for plan in sim.log for row in plan.rows)
                wanted = sum(row.drafts_wanted for plan in sim.log for row in plan.rows)
                assert ran or not wanted, "it wants drafts and runs none"

    def test_choices_of_a_request_say_the_same(self) -> None:
        """Several choices of one request, which may share its prompt's pages, each say what they say alone."""
        for cache in (*CACHES, CRAMPED[0], CRAMPED[3]):
            for prompt in ([1], [1, 2], [0, 1, 2, 1], [2, 1, 0, 1, 2, 1, 0, 2, 2]):
                sim = self.simulate(cache, max_tokens=6)
                for choice, num_tokens in enumerate((2, 6, 6)):
                    sim.add("n", prompt, num_tokens, choice=choice)
                finish(sim, 3)

    def test_what_is_cached_is_found_and_not_run_again(self) -> None:
        """A request runs from where `reserve` says that its tokens are cached: behind windows nothing else is there."""
        for cache in (SimulatedCache(), SimulatedCache(windows=(None, 3)), SimulatedCache(windows=(3,), page_size=2)):
            sim = self.simulate(cache)
            for i in range(3):
                sim.add(f"r{i}", [1, 2, 0] * 4, 3)
                sim.run()
            found = [sim.finished[f"r{i}", 0].cached_tokens or 0 for i in range(3)]
            assert found[0] == 0 and min(found[1:]) > 0, f"rows began at {found}, and the cache holds the prompt"
            finish(sim, 3)

    def test_salts_are_kept_apart(self) -> None:
        """Sequences find what is cached under their own salt, and never under another's."""
        sim = self.simulate(SimulatedCache(num_pages=200))
        for i, salt in enumerate(("", "a", "b", "a", "", "b")):
            sim.add(f"r{i}", [1, 2] * 5, 3, salt=salt)
            for _ in range(4):
                sim.step()
        finish(sim, 6)

    def test_cache_moves_are_in_the_next_plan_once(self) -> None:
        """What the allocator's `take_moves` returns is in the plan whose rows rely on it, whole and in order."""
        for cache in (CACHES[0], CACHES[1], CACHES[3]):
            books = ZeroingAllocator(cache.build(), cache.page_size)
            part, limits = self.build(books, max_tokens=8, max_batch=3)
            sim = Simulation(part, books, cache.layout, limits)
            for i in range(5):
                sim.add(f"r{i}", [i % 3] * (1 + 3 * i), 6)
            finish(sim, 5)
            planned = [move for plan in sim.log for move in plan.moves]
            assert len(books.taken) > 5, "the suite's cache asks for moves"
            assert planned == books.taken, f"{len(planned)} moves in plans, {len(books.taken)} from the allocator"

    def test_plans_do_not_depend_on_names_or_chance(self) -> None:
        """The same calls bring the same plans, whatever requests are called, and whatever `random` says."""
        before = random.getstate()
        try:
            for cache in (CACHES[1], CRAMPED[0]):
                plans = []
                for turn, names in enumerate(([f"r{i}" for i in range(8)], [f"{97 * (9 - i)}" for i in range(8)])):
                    random.seed(turn)
                    plans.append(list(numbered(self._replay(cache, names), {name: i for i, name in enumerate(names)})))
                assert plans[0] == plans[1], "two runs of the same calls differ"
        finally:
            random.setstate(before)

    def _replay(self, cache: SimulatedCache, names: Sequence[str]) -> list[BatchPlan]:
        sim = self.simulate(cache, max_tokens=9, propose="half")
        for i, name in enumerate(names):
            sim.add(name, [(i * j) % 3 for j in range(2 + i % 5)], 4 + i % 7, priority=i % 3 // 2)
            sim.step()
            if i == 5:
                sim.cancel((names[2], 0))
        sim.run(self.patience * 4)
        return sim.log

    # --- steps in flight --------------------------------------------------------------------------------------------

    def test_planning_ahead_changes_no_answer(self) -> None:
        """With steps in flight, plans name no token that is not known, preempt nobody in flight, and answers stay."""
        part, _ = self.build(ONE.build())
        if not isinstance(part, PlansAhead):
            unclaimed("it plans each step from the results of the one before")
        for cache in (*CACHES, *CRAMPED):
            for names_pending, propose in ((True, None), (False, None), (False, "half")):
                for depth in (2, 3):
                    sim = self.simulate(cache, depth=depth, names_pending=names_pending, propose=propose, max_tokens=12)
                    for i in range(6):
                        sim.add(f"r{i}", [(i + j) % 3 for j in range(3 + 2 * i)], 9, stops_after=4 if i == 2 else None)
                        sim.step()
                    sim.cancel(("r4", 0))
                    sim.run(self.patience * 4)
                    sim.check_answers()
                    sim.check_idle()

    # --- whatever happens -------------------------------------------------------------------------------------------

    def test_any_life(self) -> None:
        """Arrivals, choices, cancels and steps in any order: all of the above holds, and everybody gets an answer."""
        hypothesis()
        from intarsia.testing.scheduler_life import live

        live(self)
