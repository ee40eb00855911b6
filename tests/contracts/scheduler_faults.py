"""Broken schedulers, around the in-flight and the static one."""

import itertools
import random
from typing import ClassVar

from attrs import evolve

from contracts.planted import offering, planting
from intarsia.defaults import provide_schedulers as plain_schedulers
from intarsia.defaults.static import StaticScheduler
from intarsia.testing.schedulers import SchedulerContract
from intarsia.types import Want
from intarsia_inflight import provide_schedulers
from intarsia_inflight.scheduler import InflightScheduler

FAULTS = []
plant = planting(FAULTS)


def contract(part):
    """Return the contract for a broken scheduler."""
    is_static = issubclass(part, StaticScheduler)
    good = next(p for p in plain_schedulers() if p.key == "static") if is_static else provide_schedulers()[0]

    class Broken(SchedulerContract):
        options: ClassVar = {} if is_static else {"ageing_steps": 4}
        derandomize = True
        patience = 100

        def provider(self):
            return offering(good, lambda context: part(context.options, context.parts["cache"]))

    return Broken


# --- nobody is lost ---------------------------------------------------------------------------------------------------


@plant("test_every_request_ends_with_its_own_answer")
class StartsLate(InflightScheduler):
    """It leaves out the first token of a row that has several."""

    def plan(self):
        plan = super().plan()
        rows = tuple(
            evolve(r, start=r.start + 1, token_ids=r.token_ids[1:]) if len(r.token_ids) > 1 else r for r in plan.rows
        )
        return evolve(plan, rows=rows)


@plant("test_every_request_ends_with_its_own_answer")
class WantsTooMuch(InflightScheduler):
    """It wants a token after each chunk of a prompt."""

    def plan(self):
        plan = super().plan()
        return evolve(plan, rows=tuple(evolve(row, want=Want.LAST) for row in plan.rows))

    def __attrs_post_init__(self):
        self.options = evolve(self.options, max_tokens=3)
        super().__attrs_post_init__()


@plant("test_every_request_ends_with_its_own_answer")
class NeverTellsWhoLeft(InflightScheduler):
    """No plan of it says who left, and executors keep their state for ever."""

    def plan(self):
        return evolve(super().plan(), left=())


@plant("test_the_longest_request_that_fits_is_run")
class WantsSlack(StaticScheduler):
    """It wants room for a token more than a sequence can hold."""

    def _fill(self):
        full = self.allocator
        self.allocator = _Greedy(full)
        entered = super()._fill()
        self.allocator = full
        return entered


class _Greedy:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def reserve(self, sequence_id, token_ids, num_tokens, salt=""):
        return self._inner.reserve(sequence_id, token_ids, num_tokens + 1, salt)


@plant("test_nobody_starves_behind_later_arrivals")
class LastComeFirstServed(InflightScheduler):
    """It prefers later arrivals for ever."""

    def __attrs_post_init__(self):
        self.options = evolve(self.options, ageing_steps=10**6)
        super().__attrs_post_init__()

    def add(self, sequence):
        super().add(sequence)
        self._waiting.find(sequence.sequence_id).arrival *= -1
        self._waiting._entries.sort(key=lambda entry: entry.turn)


@plant("test_nobody_starves_behind_later_arrivals")
class OvertakesTheBig(InflightScheduler):
    """Whoever fits overtakes whoever does not, for ever."""

    def _admit(self, step):
        for entry in sorted(self._waiting, key=lambda entry: len(entry.sequence.token_ids)):
            if step.budget and self._enter(entry, step):
                self._prefill(entry, step)


@plant("test_waiting_outlives_higher_priorities")
class NeverAges(InflightScheduler):
    """Waiting raises nobody's rank."""

    def __attrs_post_init__(self):
        self.options = evolve(self.options, ageing_steps=10**6)
        super().__attrs_post_init__()


@plant("test_a_failed_request_takes_nobody_with_it")
class ForgetsANeighbour(InflightScheduler):
    """When a row fails it forgets the sequence of the row behind it, too."""

    def update(self, plan, results):
        super().update(plan, results)
        for result, behind in itertools.pairwise(results):
            if result.error is not None:
                self._running.pop(behind.sequence_id, None)


# --- who is next ------------------------------------------------------------------------------------------------------


@plant("test_higher_priorities_run_first")
class IgnoresPriority(StaticScheduler):
    """It runs whoever came first, whatever the priorities."""

    def add(self, sequence):
        self._waiting.append(sequence)


@plant("test_equals_run_in_the_order_of_their_arrival")
class SortsByName(StaticScheduler):
    """It runs whose name is first in the alphabet."""

    def _fill(self):
        waiting = sorted(self._waiting, key=lambda sequence: sequence.sequence_id)
        self._waiting.clear()
        self._waiting.extend(waiting)
        return super()._fill()


# --- budgets ----------------------------------------------------------------------------------------------------------


@plant("test_the_token_budget_is_kept_and_changes_no_answer")
class ExceedsTheBudget(InflightScheduler):
    """It runs a token more than the budget allows."""

    def _prefill(self, entry, step):
        step.budget += step.budget == 1
        super()._prefill(entry, step)


@plant("test_the_token_budget_is_kept_and_changes_no_answer")
class DraftsForFree(InflightScheduler):
    """It does not count drafts."""

    def _put(self, entry, num_tokens, drafts, step):
        super()._put(entry, num_tokens, drafts, step)
        step.budget += len(drafts)


@plant("test_the_batch_limit_is_kept_and_changes_no_answer")
class ExceedsTheBatch(StaticScheduler):
    """It runs one sequence more than it may."""

    def _fill(self):
        options, self.options = self.options, evolve(self.options, max_batch=self.options.max_batch + 1)
        entered = super()._fill()
        self.options = options
        return entered


@plant("test_a_full_queue_refuses_and_changes_nothing")
class QueuesTheRefused(InflightScheduler):
    """It refuses a sequence, and keeps it."""

    def add(self, sequence):
        is_full = len(self._waiting) >= self.options.max_waiting
        options, self.options = self.options, evolve(self.options, max_waiting=10**6)
        super().add(sequence)
        self.options = options
        if is_full:
            super().add(sequence)


@plant("test_a_full_queue_refuses_and_changes_nothing")
class NeverRefuses(InflightScheduler):
    """Its queue has no end."""

    def add(self, sequence):
        options, self.options = self.options, evolve(self.options, max_waiting=10**6)
        super().add(sequence)
        self.options = options


# --- preemption -------------------------------------------------------------------------------------------------------


@plant("test_preemption_changes_no_answer")
class DropsThePreempted(InflightScheduler):
    """A sequence that is preempted never runs again."""

    def _preempt(self, entry, step):
        preempted = super()._preempt(entry, step)
        if preempted:
            self._waiting.discard(entry)
        return preempted


@plant("test_preemption_changes_no_answer")
class GoesOnInTheMiddle(InflightScheduler):
    """A preempted sequence goes on where it was, and its pages are gone."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.stood = {}

    def _preempt(self, entry, step):
        computed = entry.computed
        preempted = super()._preempt(entry, step)
        if preempted:
            self.stood[entry.sequence.sequence_id] = computed
        return preempted

    def _enter(self, entry, step):
        entered = super()._enter(entry, step)
        if entered:
            entry.computed = max(entry.computed, self.stood.pop(entry.sequence.sequence_id, 0))
        return entered


@plant("test_preemption_changes_no_answer")
class PreemptsItsRows(InflightScheduler):
    """It preempts a sequence that has a row in the same step."""

    def _victim(self, step):
        return min(self._running.values(), key=lambda entry: entry.turn, default=None)


@plant("test_preemption_changes_no_answer")
class ForgetsToEnter(InflightScheduler):
    """A sequence that runs again after a preemption does not enter again."""

    def plan(self):
        plan = super().plan()
        self.met = getattr(self, "met", set()) - set(plan.left)
        entered = tuple(each for each in plan.entered if each.sequence_id not in self.met)
        self.met |= {each.sequence_id for each in entered}
        return evolve(plan, entered=entered)


@plant("test_a_swapped_sequence_comes_back_or_is_given_up")
class LeavesHostPages(InflightScheduler):
    """A waiting sequence that is cancelled keeps its host pages."""

    def remove(self, sequence_id):
        waits = self._waiting.find(sequence_id) is not None
        books = self.allocator
        if waits:
            self.allocator = _Deaf()
        super().remove(sequence_id)
        self.allocator = books


class _Deaf:
    def release(self, sequence_id):
        pass


# --- leaving ----------------------------------------------------------------------------------------------------------


@plant("test_a_request_can_be_cancelled_in_every_state")
class LeaksTheCancelled(InflightScheduler):
    """It keeps the pages of a sequence that is cancelled between two chunks of its prompt."""

    def remove(self, sequence_id):
        entry, books = self._running.get(sequence_id), self.allocator
        if entry is not None and entry.remaining > 1:
            self.allocator = _Deaf()
        super().remove(sequence_id)
        self.allocator = books


@plant("test_a_request_can_be_cancelled_in_every_state")
class RunsTheCancelled(StaticScheduler):
    """A sequence that is cancelled while it waits is run all the same."""

    def remove(self, sequence_id):
        if sequence_id in self._running:
            super().remove(sequence_id)


@plant("test_unknown_and_repeated_cancels_are_ignored")
class StumblesOverUnknown(InflightScheduler):
    """It says that whatever is removed has left."""

    def remove(self, sequence_id):
        super().remove(sequence_id)
        if sequence_id not in self._left:
            self._left.append(sequence_id)


@plant("test_an_id_can_be_used_again")
class KeepsDrafts(StaticScheduler):
    """Drafts of a sequence that was cancelled reach the next one of its id."""

    def remove(self, sequence_id):
        drafts = self._drafts.get(sequence_id)
        super().remove(sequence_id)
        if drafts:
            self._drafts[sequence_id] = drafts


# --- what a plan says -------------------------------------------------------------------------------------------------


@plant("test_drafts_change_no_answer")
class RunsOldDrafts(StaticScheduler):
    """Drafts that were not run go on waiting, although the sequence has gone on."""

    def _row(self, sequence):
        drafts = self._drafts.get(sequence.sequence_id, ())
        row = super()._row(sequence)
        if drafts:
            self._drafts[sequence.sequence_id] = drafts
        return row


@plant("test_drafts_change_no_answer")
class CallsDraftsTokens(InflightScheduler):
    """It runs drafts as if they were the sequence's own tokens."""

    def plan(self):
        plan = super().plan()
        return evolve(plan, rows=tuple(evolve(row, num_drafts=0) for row in plan.rows))


@plant("test_choices_of_a_request_say_the_same")
class ForksTheUnrun(InflightScheduler):
    """Further choices take over a prompt's pages before they are written."""

    def _enter(self, entry, step):
        entered = super()._enter(entry, step)
        if entered and self._parent(entry) is not None:
            entry.computed = max(entry.computed, len(entry.sequence.token_ids) - 1)
        return entered

    def _awaits_parent(self, entry):
        return False


@plant("test_what_is_cached_is_found_and_not_run_again")
class RunsAllAgain(StaticScheduler):
    """It runs every prompt from its first token, whatever is cached."""

    def _fill(self):
        entered = super()._fill()
        self._cached = dict.fromkeys(self._cached, 0)
        return entered


@plant("test_salts_are_kept_apart")
class IgnoresSalts(InflightScheduler):
    """It asks the cache for everybody's prefixes."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.allocator = _Saltless(self.allocator)


class _Saltless(_Greedy):
    def reserve(self, sequence_id, token_ids, num_tokens, salt=""):
        return self._inner.reserve(sequence_id, token_ids, num_tokens, "")


@plant("test_cache_moves_are_in_the_next_plan_once")
class DropsMoves(InflightScheduler):
    """It leaves cache moves out of its plans."""

    def plan(self):
        return evolve(super().plan(), moves=())


@plant("test_cache_moves_are_in_the_next_plan_once")
class DelaysMoves(InflightScheduler):
    """It tells cache moves a step late."""

    def plan(self):
        plan = super().plan()
        late, self.late = getattr(self, "late", ()), plan.moves
        return evolve(plan, moves=late)


@plant("test_plans_do_not_depend_on_names_or_chance")
class OrdersBySet(InflightScheduler):
    """The order of its rows is that of a set of names."""

    def plan(self):
        plan = super().plan()
        by_name = {row.sequence_id: row for row in plan.rows}
        return evolve(plan, rows=tuple(by_name[name] for name in set(by_name)))


@plant("test_plans_do_not_depend_on_names_or_chance")
class DrawsLots(InflightScheduler):
    """Who runs first is drawn by lot."""

    def plan(self):
        plan = super().plan()
        return evolve(plan, rows=tuple(random.sample(plan.rows, len(plan.rows))))


# --- steps in flight --------------------------------------------------------------------------------------------------


@plant("test_planning_ahead_changes_no_answer")
class ForgetsWhatIsInFlight(InflightScheduler):
    """It plans as if no step were in flight."""

    def expect(self, plan, *, names_pending):
        pass


@plant("test_planning_ahead_changes_no_answer")
class PreemptsInFlight(InflightScheduler):
    """It preempts sequences that have a row in flight."""

    @property
    def _in_flight(self):
        return False


@plant("test_planning_ahead_changes_no_answer")
class AlwaysNamesPending(InflightScheduler):
    """It names ids that are still being chosen, to executors that cannot tell them."""

    def expect(self, plan, *, names_pending):
        super().expect(plan, names_pending=True)


# --- another takes over -----------------------------------------------------------------------------------------------


@plant("test_another_scheduler_takes_over_at_any_time")
class SaysTooMuchIsComputed(InflightScheduler):
    """To the scheduler that takes over it says that a token is computed which is not."""

    def held(self):
        return [evolve(h, num_computed=h.num_computed + (h.pages == "device")) for h in super().held()]


@plant("test_another_scheduler_takes_over_at_any_time")
class HandsOverWhoRunsAlone(InflightScheduler):
    """It hands over those that run, and forgets those that wait."""

    def held(self):
        return [one for one in super().held() if one.pages == "device"]


@plant("test_another_scheduler_takes_over_at_any_time")
class KeepsNoPagesItCountsOn(InflightScheduler):
    """It runs on those that it takes over, and lets their pages go."""

    def take_over(self, held):
        super().take_over(held)
        return set()


@plant("test_another_scheduler_takes_over_at_any_time")
class KeepsPagesThatAreNone(InflightScheduler):
    """It says that all whom it takes over keep their pages, those too who have none."""

    def take_over(self, held):
        super().take_over(held)
        return {one.sequence.sequence_id for one in held}


@plant("test_it_goes_on_where_another_fails_to_take_over")
class LetsGoTooEarly(InflightScheduler):
    """It forgets its sequences as it is asked for them, before another has them."""

    def held(self):
        found = super().held()
        self._running.clear()
        return found


# --- whatever happens -------------------------------------------------------------------------------------------------


@plant("test_any_life")
class LosesTheFifth(InflightScheduler):
    """It loses the fifth of those that wait when a sixth comes."""

    def add(self, sequence):
        super().add(sequence)
        if len(self._waiting) == 6:
            self._waiting.discard(list(self._waiting)[4])
