"""Claims of executors about their beginnings and ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from intarsia.testing.executor_case import GREEDY, PROMPTS, SEEDED, ExecutorCase
from intarsia.testing.leftovers import Held, calling, check_released
from intarsia.testing.planned import Trial, no_progress
from intarsia.testing.probes import PROBE, failing_runner

__all__ = ["EndClaims"]


@contextmanager
def _stopping_where_it_fails(trial: Trial) -> Iterator[None]:
    """Leave nothing of an executor that fails a claim."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            trial.executor.stop()
        raise


class EndClaims(ExecutorCase):
    """Starting and stopping."""

    def test_start_tells_its_progress(self) -> None:
        """While weights load, `progress` hears what is done of how much, and at the end all of it."""
        told: list[tuple[str, int, int]] = []
        executor = self.compose().executor
        try:
            with calling("start"):
                executor.start(lambda what, done, total: told.append((what, done, total)))
        finally:
            with suppress(Exception):
                executor.stop()
        for what, done, total in told:
            assert isinstance(what, str) and 0 <= done <= total, f"progress: {what!r}, {done} of {total}"

    def test_stop_gives_everything_back(self) -> None:
        """Threads, processes and listening sockets end with the executor, whatever was in flight."""
        before = Held.now()
        for in_flight in (False, True):
            parts = self.compose()
            trial = Trial(parts, parts.executor)
            with _stopping_where_it_fails(trial):
                trial.start()
                sequence = trial.add("r", PROMPTS[0], GREEDY)
                trial.step(trial.row(sequence))
                for number in range(trial.executor.depth if in_flight else 0):
                    other = trial.add(f"other-{number}", PROMPTS[2], SEEDED)
                    trial.submit(trial.row(other))
            with calling("stop"):
                trial.executor.stop()
            check_released(before, "stop", self.patience_s)

    def test_stop_can_come_at_any_time_and_twice(self) -> None:
        """Before the start, and again after it has stopped, `stop` does no harm; another executor can start behind."""
        idle = self.compose().executor
        with calling("stop before the start"):
            idle.stop()
        for _ in range(2):
            parts = self.compose()
            trial = Trial(parts, parts.executor)
            with _stopping_where_it_fails(trial):
                trial.start()
                sequence = trial.add("r", PROMPTS[0], GREEDY)
                trial.decode([sequence], 3)
                self.check(sequence)
            for which in ("stop", "the second stop"):
                with calling(which):
                    trial.executor.stop()

    def test_a_start_that_fails_leaves_nothing(self) -> None:
        """Where a part fails to build, `start` raises; stopped then, the executor has left nothing behind."""
        before = Held.now()
        executor = self.compose(failing_runner(), runner=PROBE).executor
        failed = True
        try:
            executor.start(no_progress)
            failed = False
        except Exception as error:
            assert str(error), f"start raised {type(error).__name__} without a word"
        finally:
            with calling("stop after a failed start"):
                executor.stop()
        assert failed, "its runner fails to build, and start brought no error"
        with calling("the second stop after a failed start"):
            executor.stop()
        check_released(before, "a start that failed", self.patience_s)
