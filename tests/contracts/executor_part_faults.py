"""Executors that deal badly with drafters and logits processors, with their beginnings and their ends."""

import threading

from attrs import evolve

from contracts.broken_executor import Local, plant

# --- drafters and logits processors -----------------------------------------------------------------------------------


@plant("test_a_drafter_is_asked_for_what_rows_want_and_told_what_became_of_it")
class AsksForEverybody(Local):
    """It asks for drafts after rows that want none."""

    def meets(self, plan):
        return evolve(plan, rows=tuple(evolve(row, drafts_wanted=max(1, row.drafts_wanted)) for row in plan.rows))


@plant("test_a_drafter_is_asked_for_what_rows_want_and_told_what_became_of_it")
class TellsDraftersNothing(Local):
    """Its drafter does not hear what became of its guesses."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        if self._choosing._drafting is not None:
            self._choosing._drafting.drafter.observe = lambda verified, cost: None


@plant("test_a_drafter_can_say_anything")
class RunsAnyId(Local):
    """It passes on whatever a drafter says."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        if self._choosing._drafting is not None:
            self._choosing._drafting.num_ids = 10**9


@plant("test_a_drafter_that_fails_costs_its_guesses_alone")
class FailsWithItsDrafter(Local):
    """A drafter that fails fails the rows that wanted drafts."""

    def collect(self):
        result = super().collect()
        if result.draft_error is None:
            return result
        return evolve(result, rows=tuple(evolve(r, error=result.draft_error, token_ids=()) for r in result.rows))


@plant("test_a_drafter_that_fails_costs_its_guesses_alone")
class HidesItsDraftersFailure(Local):
    """It keeps to itself that its drafter failed."""

    def collect(self):
        return evolve(super().collect(), draft_error=None)


@plant("test_a_drafter_hears_who_enters_and_who_leaves")
class ForgetsToForget(Local):
    """Its drafter does not hear who left."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        if self._choosing._drafting is not None:
            self._choosing._drafting.drafter.forget = lambda sequence_id: None


@plant("test_a_drafter_hears_who_enters_and_who_leaves")
class NeverStopsItsDrafter(Local):
    """It stops, and its drafter does not."""

    def stop(self):
        self._choosing._drafting = None
        super().stop()


@plant("test_logits_processors_change_the_rows_that_ask_for_them")
class DraftsUnprocessed(Local):
    """It verifies drafts against logits that went through no processor."""

    def meets(self, plan):
        for row in plan.rows:
            if row.num_drafts:
                self._choosing._sampler._states[row.sequence_id].processors = ()
        return plan


@plant("test_a_logits_processor_that_fails_fails_its_row")
class SkipsFailingProcessors(Local):
    """It goes on without a logits processor that fails."""

    def brings(self, rows, results):
        return [evolve(r, error=None, token_ids=(0,)) if r.error and "processor" in r.error else r for r in results]


# --- beginnings and ends ----------------------------------------------------------------------------------------------


@plant("test_start_tells_its_progress")
class ExaggeratesProgress(Local):
    """It says that more is done than there is."""

    def start(self, progress):
        super().start(lambda what, done, total: progress(what, 2 * done, total))


class Threaded(Local):
    """A base of those that have a thread."""

    def start(self, progress):
        self.begin()
        super().start(progress)

    def begin(self):
        self.done = threading.Event()
        threading.Thread(target=self.done.wait, args=(5.0,), name="broken", daemon=True).start()


@plant("test_stop_gives_everything_back")
class LeavesAThread(Threaded):
    """A thread of it goes on after the stop where a step was in flight."""

    def stop(self):
        if not self._steps and hasattr(self, "done"):
            self.done.set()
        super().stop()


@plant("test_stop_can_come_at_any_time_and_twice")
class StopsOnce(Local):
    """Stopped a second time it fails."""

    def stop(self):
        super().stop()
        del self._steps


@plant("test_stop_can_come_at_any_time_and_twice")
class StopsWhatHasStarted(Threaded):
    """Stopped before its start it fails."""

    def stop(self):
        self.done.set()
        super().stop()


@plant("test_a_start_that_fails_leaves_nothing")
class LeavesAThreadWhereItFails(Threaded):
    """A start that fails leaves its thread behind."""

    def start(self, progress):
        super().start(progress)
        self.has_started = True

    def stop(self):
        if hasattr(self, "has_started"):
            self.done.set()
        super().stop()


@plant("test_a_start_that_fails_leaves_nothing")
class HidesAFailedStart(Local):
    """It says nothing of a runner that fails to build."""

    def start(self, progress):
        try:
            super().start(progress)
        except Exception:
            self._stage.stop()
