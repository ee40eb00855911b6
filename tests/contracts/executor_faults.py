"""Broken executors: answers and steps; those of `executor_part_faults` are behind them."""

from attrs import evolve

from contracts.broken_executor import FAULTS, Local, contract, plant
from intarsia.errors import ExecutionError
from intarsia.executor import LocalExecutor
from intarsia.types import PENDING, StepResult, Want

__all__ = ["FAULTS", "contract"]

# --- answers ----------------------------------------------------------------------------------------------------------


@plant("test_every_row_says_what_it_says_alone")
class RunsOneShort(Local):
    """It runs whole prompts from their second token on."""

    def meets(self, plan):
        rows = (evolve(r, token_ids=r.token_ids[1:], start=1) if len(r.token_ids) > 8 else r for r in plan.rows)
        return evolve(plan, rows=tuple(rows))


@plant("test_every_row_says_what_it_says_alone")
class ReportsLate(Local):
    """The log-probabilities that it tells are half of what they are."""

    def brings(self, rows, results):
        return [
            evolve(r, logprobs=tuple(evolve(entry, logprob=entry.logprob / 2) for entry in r.logprobs)) for r in results
        ]


@plant("test_results_are_in_the_order_of_the_rows")
class SortsRows(Local):
    """Its results are in the order of the sequences' names."""

    def brings(self, rows, results):
        return sorted(results, key=lambda result: result.sequence_id)


@plant("test_chunks_choose_nothing_and_change_no_answer")
class ChoosesAlways(Local):
    """It chooses a token after each chunk of a prompt."""

    def meets(self, plan):
        return evolve(plan, rows=tuple(evolve(row, want=Want.LAST) for row in plan.rows))


@plant("test_draws_do_not_depend_on_the_batch")
class SeedsByTheBatch(Local):
    """What a sequence draws depends on how many entered with it."""

    def meets(self, plan):
        entered = (evolve(each, seed=each.seed + len(plan.entered)) for each in plan.entered)
        return evolve(plan, entered=tuple(entered))


@plant("test_draws_do_not_depend_on_the_batch")
class ForgetsChoices(Local):
    """All choices of a request draw the same."""

    def meets(self, plan):
        self._choosing.meet(plan)
        for each in plan.entered:
            self._choosing._sampler._states[each.sequence_id].choice = 0
        return evolve(plan, entered=(), left=())


@plant("test_drafts_are_verified")
class TrustsDrafts(Local):
    """It accepts the first draft, whatever the model says."""

    def brings(self, rows, results):
        return [
            evolve(result, token_ids=(row.token_ids[-row.num_drafts], *result.token_ids[1:]))
            if row.num_drafts and result.token_ids
            else result
            for row, result in zip(rows, results, strict=True)
        ]


@plant("test_drafts_are_verified")
class WastesDrafts(Local):
    """It verifies no draft, and chooses the next token alone."""

    def meets(self, plan):
        rows = (
            evolve(row, token_ids=row.token_ids[: -row.num_drafts], num_drafts=0) if row.num_drafts else row
            for row in plan.rows
        )
        return evolve(plan, rows=tuple(rows))


@plant("test_prompts_are_scored_where_it_is_asked_for")
class ScoresTheLastChunk(Local):
    """It scores no chunk of a prompt but the last."""

    def brings(self, rows, results):
        return [
            result if row.want is Want.LAST else evolve(result, prompt_logprobs=())
            for row, result in zip(rows, results, strict=True)
        ]


@plant("test_prompts_are_scored_where_it_is_asked_for")
class ScoresEveryChoice(Local):
    """It scores the prompt for each choice of a request."""

    def brings(self, rows, results):
        scores = next((r.prompt_logprobs for r in results if r.prompt_logprobs), ())
        return [evolve(r, prompt_logprobs=scores) if r.sequence_id[1] else r for r in results]


# --- sequences that fail, leave and return ----------------------------------------------------------------------------


@plant("test_a_row_that_fails_takes_nobody_with_it")
class RaisesForOneRow(Local):
    """One row that fails fails the step."""

    def brings(self, rows, results):
        for result in results:
            if result.error:
                raise ExecutionError(result.error)
        return results


@plant("test_a_row_that_fails_takes_nobody_with_it")
class SpreadsErrors(Local):
    """The row behind one that failed has its error, too."""

    def brings(self, rows, results):
        errors = [None, *(result.error for result in results)]
        return [
            evolve(result, error=error, token_ids=()) if error else result
            for result, error in zip(results, errors, strict=False)
        ]


@plant("test_a_row_that_fails_takes_nobody_with_it")
class HidesFailures(Local):
    """A row that fails brings token 0 and no word."""

    def brings(self, rows, results):
        return [evolve(result, error=None, token_ids=(0,)) if result.error else result for result in results]


@plant("test_pages_can_be_used_again_whatever_they_hold")
class ReadsWholePages(Local):
    """What lies behind a row's last token in its page reaches the row."""

    def _run(self, rows, ids, *more, **named):
        batch, hidden = super()._run(rows, ids, *more, **named)
        cache, size = self._stage._cache.layer(0), self.layout.page_size
        for number, row in enumerate(rows):
            last = row.pages[0][(row.start + len(row.token_ids) - 1) // size]
            if last < self.context.num_pages and len(row.token_ids) > 1:
                hidden[batch.bounds[number + 1] - 1] += 0 * cache.keys[last].sum()
        return batch, hidden


@plant("test_an_id_can_be_used_again")
class RemembersIds(Local):
    """A sequence of an id that it knows goes on as the one that had the id before."""

    def meets(self, plan):
        known = self._choosing._sampler._states
        new = tuple(each for each in plan.entered if each.sequence_id not in known or each.sequence_id[0] != "again")
        return evolve(plan, entered=new, left=tuple(name for name in plan.left if name[0] != "again"))


@plant("test_an_id_can_be_used_again")
class ForgetsWhoEntered(Local):
    """It takes note of who enters before it forgets who left."""

    def meets(self, plan):
        gone = set(plan.left)
        return evolve(plan, entered=tuple(each for each in plan.entered if each.sequence_id not in gone))


@plant("test_a_preempted_sequence_goes_on_as_it_was")
class PenalisesPrompts(Local):
    """What a sequence said before a preemption is part of its prompt after it."""

    def meets(self, plan):
        return evolve(plan, entered=tuple(evolve(e, num_prompt=len(e.token_ids)) for e in plan.entered))


@plant("test_leaving_can_be_told_of_anybody")
class KnowsWhoLeft(Local):
    """Who leaves must have come."""

    def meets(self, plan):
        for name in plan.left:
            del self._choosing._sampler._states[name]
        return plan


@plant("test_any_life")
class CountsAFewPreemptions(Local):
    """It takes a sequence back once; entered a third time it has another seed."""

    def meets(self, plan):
        self.__dict__.setdefault("times", {})
        for each in plan.entered:
            self.times[each.sequence_id] = self.times.get(each.sequence_id, 0) + 1
        entered = (evolve(e, seed=e.seed + 1) if self.times[e.sequence_id] > 2 else e for e in plan.entered)
        return evolve(plan, entered=tuple(entered))


# --- steps ------------------------------------------------------------------------------------------------------------


@plant("test_cache_moves_come_first_and_in_order")
class MovesLast(Local):
    """It does a plan's moves once its rows have run."""

    def submit(self, plan):
        super().submit(evolve(plan, moves=()))
        self._stage.move(plan.moves)


@plant("test_cache_moves_come_first_and_in_order")
class MovesBackwards(Local):
    """It does a plan's moves from the last to the first."""

    def meets(self, plan):
        return evolve(plan, moves=plan.moves[::-1])


@plant("test_zeroed_pages_hold_zeros")
class ZeroesNothing(Local):
    """It leaves pages as they are that are to be zeroed."""

    def meets(self, plan):
        return evolve(plan, moves=tuple(move for move in plan.moves if move.kind != "zero"))


@plant("test_swapped_pages_come_back_and_are_told")
class SwapsNothingIn(Local):
    """Pages that come back from host memory hold what was in them."""

    def meets(self, plan):
        return evolve(plan, moves=tuple(move for move in plan.moves if move.kind != "swap_in"))


@plant("test_swapped_pages_come_back_and_are_told")
class TellsNoSwaps(Local):
    """It copies pages between device and host and says nothing of it."""

    def collect(self):
        return evolve(super().collect(), swapped=0, swap_s=0.0)


@plant("test_empty_plans_have_their_turns")
class DropsEmptyPlans(Local):
    """A plan without rows is dropped, with its moves."""

    def submit(self, plan):
        self.__dict__.setdefault("empty", []).append(not plan.rows)
        if plan.rows:
            super().submit(plan)

    def collect(self):
        return StepResult() if self.empty.pop(0) else super().collect()


@plant("test_steps_say_what_they_took")
class TakesNoTime(Local):
    """Its steps take 0 s."""

    def collect(self):
        return evolve(super().collect(), target_s=0.0)


@plant("test_steps_in_flight_come_back_in_their_order")
class ReturnsTheNewest(Local):
    """Of the steps in flight it returns the newest."""

    deep = True

    def collect(self):
        self._settle(self._steps[-1])
        return self._steps.pop().result


@plant("test_ids_that_a_step_in_flight_chooses_can_be_named")
class GuessesPending(Local):
    """An id that is pending is 0."""

    deep = True

    def meets(self, plan):
        rows = (
            evolve(row, token_ids=tuple(0 if token == PENDING else token for token in row.token_ids))
            for row in plan.rows
        )
        return evolve(plan, rows=tuple(rows))


@plant("test_pages_can_be_used_again_while_a_step_that_writes_them_is_in_flight")
class RunsLate(Local):
    """It runs a step when it is collected, and does its moves as it is submitted."""

    deep = True

    def submit(self, plan):
        self._stage.move(plan.moves)
        self.__dict__.setdefault("late", []).append(evolve(plan, moves=()))

    def collect(self):
        LocalExecutor.submit(self, self.late.pop(0))
        return LocalExecutor.collect(self)


# Planted last, so that the page lists them behind the others.
import contracts.executor_part_faults  # noqa: E402, F401
