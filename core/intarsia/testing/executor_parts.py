"""Claims of executors about the drafters and the logits processors that they drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from intarsia.protocols import DraftRequest
from intarsia.testing.executor_case import GREEDY, PROMPTS, REQUESTS, SEEDED, ExecutorCase
from intarsia.testing.planned import PlannedSequence, Trial
from intarsia.testing.probes import PROBE, ProbeDrafter, ProbeProcessor, probing
from intarsia.types import SamplingParams

__all__ = ["PartClaims"]


class PartClaims(ExecutorCase):
    """Drafters and logits processors."""

    @contextmanager
    def _drafting(
        self, says: Callable[[DraftRequest], Sequence[int]]
    ) -> Iterator[tuple[Trial, ProbeDrafter, list[PlannedSequence]]]:
        """Start an executor with a drafter, and run some prompts."""
        self.needs_this_process()
        drafter = ProbeDrafter(says)
        with self.trial(probing(drafter=drafter), drafter=PROBE) as trial:
            sequences = [
                trial.add(f"r{i}", prompt, params, choice=choice, seed=seed)
                for i, (prompt, params, choice, seed) in enumerate(REQUESTS[:5])
            ]
            yield trial, drafter, sequences

    def test_a_drafter_is_asked_for_what_rows_want_and_told_what_became_of_it(self) -> None:
        """It proposes for the rows that want drafts, with what these hold by then, and hears how many were right."""

        def says(request: DraftRequest) -> Sequence[int]:
            # The first is right, the second is not.
            sequence = known[request.sequence_id]
            ahead = self.solo.answer(sequence, len(request.token_ids) - len(sequence.prompt) + 2)[0][-2:]
            return [ahead[0], (ahead[1] + 1) % 60, 5, 5]

        known: dict[tuple[str, int], PlannedSequence] = {}
        with self._drafting(says) as (trial, drafter, sequences):
            known |= {sequence.sequence_id: sequence for sequence in sequences}
            trial.step(*(trial.row(s, wanted=i % 3) for i, s in enumerate(sequences)))
            for _ in range(4):
                wanting = [s.sequence_id for i, s in enumerate(sequences) if i % 3]
                asked = [(each.sequence_id, tuple(each.token_ids)) for each in drafter.asked]
                holding = [(name, tuple(known[name].token_ids)) for name in wanting]
                assert asked == holding, f"rows of {wanting} want drafts, and the drafter was asked for {asked}"
                drafter.asked, drafter.verified = [], []
                lengths = [len(sequence.drafts) for sequence in sequences]
                assert lengths == [i % 3 for i in range(len(sequences))], f"wanted 0, 1, 2 ..., and got {lengths}"
                trial.step(*(trial.row(s, drafts=s.drafts, wanted=i % 3) for i, s in enumerate(sequences)))
                told = [(each.sequence_id, each.drafted, each.accepted) for each in drafter.verified]
                right = [(name, length, 1) for name, length in zip(known, lengths, strict=True) if length]
                assert told == right, f"of the drafts one each was right, and the drafter hears {told}"
            self.check(*sequences)

    def test_a_drafter_can_say_anything(self) -> None:
        """Ids that no token has, and more guesses than were wanted, reach no result."""
        with self._drafting(lambda _: [3, 4, 64, 5, -1, 10**6]) as (trial, _, sequences):
            for wanted in (1, 2, 5):
                trial.step(*(trial.row(s, wanted=wanted) for s in sequences))
                for sequence in sequences:
                    assert sequence.drafts == (3, 4)[:wanted], f"{wanted} wanted, and {sequence.drafts} came"
            self.check(*sequences)

    def test_a_drafter_that_fails_costs_its_guesses_alone(self) -> None:
        """Its failure is told with the step's result, whose rows are whole; the next step asks it again."""
        failing = True

        def says(_: DraftRequest) -> Sequence[int]:
            if failing:
                raise RuntimeError("the suite's drafter fails")
            return [1]

        with self._drafting(says) as (trial, _, sequences):
            result = trial.step(*(trial.row(s, wanted=2) for s in sequences))
            assert "the suite's drafter fails" in (result.draft_error or ""), f"the step tells {result.draft_error!r}"
            assert not any(sequence.drafts for sequence in sequences), "the drafter failed, and there are drafts"
            failing = False
            result = trial.step(*(trial.row(s, wanted=2) for s in sequences))
            assert result.draft_error is None, f"the drafter is well, and the step tells {result.draft_error!r}"
            assert all(s.drafts == (1,) for s in sequences), "the drafter is well again, and was not asked"
            self.check(*sequences)

    def test_a_drafter_hears_who_enters_and_who_leaves(self) -> None:
        """It knows of the sequences that are there, and of no others; it is stopped with the executor."""
        with self._drafting(lambda _: []) as (trial, drafter, sequences):
            trial.step(*(trial.row(s) for s in sequences[:3]))
            trial.step(*(trial.row(s) for s in sequences[3:]))
            names = {s.sequence_id for s in sequences}
            assert drafter.live == names, f"{names} have entered, and the drafter knows {drafter.live}"
            trial.preempt(sequences[0])
            trial.leave(*sequences[1:3])
            trial.step(trial.row(sequences[0]))
            trial.decode([sequences[0], *sequences[3:]], 4)
            self.check(sequences[0], *sequences[3:])
            names -= {s.sequence_id for s in sequences[1:3]}
            assert drafter.live == names, f"{names} are left, and the drafter knows {drafter.live}"
        assert drafter.stopped, "the executor has stopped, and its drafter has not"

    def test_logits_processors_change_the_rows_that_ask_for_them(self) -> None:
        """They see the ids before each position, drafts included, and change the logits of their own row alone."""
        self.needs_this_process()
        processor = ProbeProcessor()
        pushed = SamplingParams(temperature=0, logits_processors={PROBE: {"id": 9}})
        with self.trial(probing(processor=processor), logits_processors=[PROBE]) as trial:
            plain = [trial.add("plain", PROMPTS[0], GREEDY), trial.add("drawn", PROMPTS[3], SEEDED)]
            asking = trial.add("asking", PROMPTS[4], pushed)
            trial.decode([plain[0], asking, plain[1]], 3)
            self.check(*plain)
            assert asking.answer[::2] == [9, 9], f"the processor pushes 9 at odd lengths: {asking.answer}"
            before = tuple(asking.token_ids)
            assert len(before) % 2 == 0
            processor.seen.clear()
            trial.step(trial.row(asking, drafts=[50, 9]), trial.row(plain[0]))
            expected = [before, (*before, 50), (*before, 50, 9)]
            assert processor.seen == expected, f"with drafts 50, 9 it sees {processor.seen}, not {expected}"
            self.check(*plain)

    def test_a_logits_processor_that_fails_fails_its_row(self) -> None:
        """Its failure is the error of the row that asked for it, and no other's."""
        self.needs_this_process()
        with self.trial(probing(processor=ProbeProcessor()), logits_processors=[PROBE]) as trial:
            plain = [trial.add(f"r{i}", PROMPTS[i], (GREEDY, SEEDED)[i % 2], seed=i) for i in range(4)]
            bad = {
                how: trial.add(
                    how, PROMPTS[0], SamplingParams(temperature=0, logits_processors={PROBE: {"fails": how}})
                )
                for how in ("open", "process")
            }
            trial.step(*(trial.row(s) for s in (plain[0], bad["open"], plain[1], bad["process"], *plain[2:])))
            for how, sequence in bad.items():
                told = sequence.error or ""
                assert f"fails to {how}" in told, f"the processor fails to {how}, and its row tells {told!r}"
            trial.leave(*bad.values())
            trial.decode(plain, 4)
            self.check(*plain)
