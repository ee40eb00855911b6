"""The contract of executors, as tests to inherit.

::

    from intarsia.testing.executors import ExecutorContract

    class TestMine(ExecutorContract):
        options = {"workers": 2}

        def provider(self):
            return my_plugin.provide_executors()[0]

pytest runs the inherited tests. They compose an engine's parts around a tiny model, start the executor, and give it
plans that are made by hand: no scheduler runs. What each sequence says is compared with what it says alone, computed
anew for every token by the local executor.
"""

from __future__ import annotations

import random

from attrs import evolve

from intarsia.testing.composing import BAD_ID
from intarsia.testing.executor_case import GREEDY, PROMPTS, REQUESTS, SEEDED, ExecutorCase
from intarsia.testing.executor_ends import EndClaims
from intarsia.testing.executor_parts import PartClaims
from intarsia.testing.executor_steps import StepClaims
from intarsia.testing.planned import PlannedSequence, Trial
from intarsia.types import SamplingParams

__all__ = ["ExecutorContract"]

_NUM_TOKENS = 6


def _add_all(trial: Trial, prefix: str = "r") -> list[PlannedSequence]:
    """Add the requests of every kind."""
    return [
        trial.add(f"{prefix}{number}", prompt, params, choice=choice, seed=seed)
        for number, (prompt, params, choice, seed) in enumerate(REQUESTS)
    ]


class _AnswerClaims(ExecutorCase):
    """What rows bring."""

    def test_every_row_says_what_it_says_alone(self) -> None:
        """Rows of a mixed batch bring the tokens and log-probabilities that their sequences have alone."""
        with self.trial() as trial:
            sequences = _add_all(trial)
            trial.decode(sequences, _NUM_TOKENS)
            self.check(*sequences)

    def test_results_are_in_the_order_of_the_rows(self) -> None:
        """However a plan orders its rows, its results have their order, one a row."""
        with self.trial() as trial:
            sequences = _add_all(trial)
            for turn in range(_NUM_TOKENS):
                order = [*sequences[turn:], *sequences[:turn]][:: -1 if turn % 2 else 1]
                trial.step(*(trial.row(sequence) for sequence in order))
            self.check(*sequences)

    def test_chunks_choose_nothing_and_change_no_answer(self) -> None:
        """A row that wants no token brings none; a prompt in chunks of any size is answered as in one piece."""
        with self.trial() as trial:
            for size in (1, 3, 4, 7):
                chunked = _add_all(trial, f"chunks-of-{size}-")
                neighbour = trial.add(f"beside-{size}", PROMPTS[1], GREEDY)
                while any(s.num_computed < len(s.prompt) - size for s in chunked):
                    rows = [
                        trial.row(s, min(size, len(s.prompt) - 1 - s.num_computed))
                        for s in chunked
                        if s.num_computed < len(s.prompt) - size
                    ]
                    trial.step(*rows, trial.row(neighbour))
                trial.decode([*chunked, neighbour], 8)
                self.check(*chunked, neighbour)
                trial.leave_all()

    def test_draws_do_not_depend_on_the_batch(self) -> None:
        """A draw is a matter of seed, choice and position: neighbours, order and steps before do not show."""
        with self.trial() as trial:
            for turn in range(3):
                noise = [trial.add(f"noise-{i}", PROMPTS[i], SEEDED, seed=100 * turn + i) for i in range(turn + 1)]
                if turn == 2:
                    trial.decode(noise, 2)
                twins = [trial.add(f"twin-{i}", PROMPTS[0], SEEDED, choice=i % 2, seed=3) for i in range(4)]
                trial.decode([*noise, *twins][:: -1 if turn else 1], 8)
                self.check(*noise, *twins)
                said = [tuple(twin.answer) for twin in twins]
                assert said[:2] == said[2:], "two sequences of equal seeds, choices and prompts differ"
                assert said[0] != said[1], "two choices of one seed draw the same"
                trial.leave_all()

    def test_drafts_are_verified(self) -> None:
        """Right drafts are accepted up to the first wrong one, and one token more is chosen: answers stay."""
        with self.trial() as trial:
            sequences = _add_all(trial)
            trial.decode(sequences, 1)
            for turn in range(6):
                rows = []
                for number, sequence in enumerate(sequences):
                    ahead = self.solo.answer(sequence, len(sequence.answer) + 3)[0][len(sequence.answer) :]
                    right = (turn + number) % 4
                    wrong = [(token + 1) % BAD_ID for token in ahead[right:]]
                    drafts = [*ahead[:right], *wrong][: (turn + number) % 5]
                    rows.append((sequence, trial.row(sequence, drafts=drafts), min(right, len(drafts))))
                before = [len(sequence.answer) for sequence, _, _ in rows]
                trial.step(*(row for _, row, _ in rows))
                self.check(*sequences)
                for (sequence, row, right), length in zip(rows, before, strict=True):
                    brought = len(sequence.answer) - length
                    assert brought == right + 1, (
                        f"of {row.num_drafts} drafts the first {right} are right, and the row brought {brought} tokens"
                    )

    def test_prompts_are_scored_where_it_is_asked_for(self) -> None:
        """`prompt_logprobs` come for every token from the second on, whatever the chunks, and for choice 0 alone."""
        params = SamplingParams(temperature=0, prompt_logprobs=2)
        with self.trial() as trial:
            for size in (2, 5, 20):
                scored = [trial.add(f"scored-{size}", PROMPTS[2], params, choice=choice) for choice in range(2)]
                plain = trial.add(f"plain-{size}", PROMPTS[2], GREEDY)
                while (left := len(PROMPTS[2]) - scored[0].num_computed) > size:
                    trial.step(*(trial.row(each, size) for each in (scored[0], plain, scored[1])))
                assert left
                trial.decode([plain, *scored], 2)
                self.check(plain, *scored)
                trial.leave_all()

    # --- sequences that fail, leave and return ----------------------------------------------------------------------

    def test_a_row_that_fails_takes_nobody_with_it(self) -> None:
        """A row's failure is its own result's error; the rows beside it, and the steps behind, are not disturbed."""
        nothing = SamplingParams(temperature=0, banned_token_ids=tuple(range(64)))
        with self.trial() as trial:
            sequences = _add_all(trial)
            trial.decode(sequences, 1)
            bad = [trial.add("nan", (3, BAD_ID, 5), GREEDY), trial.add("all-banned", PROMPTS[0], nothing)]
            late = trial.add("nan-later", (BAD_ID, *PROMPTS[2]), GREEDY)
            trial.step(trial.row(late, 4), *(trial.row(sequence) for sequence in sequences))
            trial.step(*(trial.row(s) for s in (bad[0], *sequences[:3], late, *sequences[3:], bad[1])))
            for sequence in (*bad, late):
                assert sequence.error is not None, f"{sequence.sequence_id} cannot go on, and its row has no error"
            trial.leave(*bad, late)
            trial.decode(sequences, _NUM_TOKENS)
            self.check(*sequences)

    def test_pages_can_be_used_again_whatever_they_hold(self) -> None:
        """What a sequence left behind, numbers that are none included, reaches nobody who has its pages next."""
        with self.trial() as trial:
            for turn in range(3):
                spoilers = [trial.add(f"nan-{i}", [BAD_ID] * 11, GREEDY) for i in range(3)]
                trial.step(*(trial.row(spoiler) for spoiler in spoilers))
                trial.leave(*spoilers)
                sequences = _add_all(trial, f"r{turn}-")
                trial.decode(sequences, _NUM_TOKENS)
                self.check(*sequences)
                trial.leave(*sequences)

    def test_an_id_can_be_used_again(self) -> None:
        """A sequence whose id has left is another, even where one plan says that it left and entered."""
        penalised, seeded = REQUESTS[2][1], SEEDED
        with self.trial() as trial:
            for params, prompt in ((penalised, PROMPTS[2]), (seeded, PROMPTS[0]), (penalised, PROMPTS[0])):
                first = trial.add("again", prompt, params, seed=4)
                trial.decode([first], 5)
                self.check(first)
                trial.leave(first)
            second = trial.add("again", PROMPTS[4], penalised)
            trial.step(trial.row(second))  # with the plan that says who left
            trial.decode([second], 5)
            self.check(second)

    def test_a_preempted_sequence_goes_on_as_it_was(self) -> None:
        """Entered again, with what it had said by then, a sequence says what it would have said."""
        with self.trial() as trial:
            sequences = _add_all(trial)
            trial.decode(sequences, 3)
            for count in (4, 6):
                trial.preempt(*sequences[count % 3 :: 2])
                trial.decode(sequences[::-1], count)
            self.check(*sequences)

    def test_leaving_can_be_told_of_anybody(self) -> None:
        """Plans may say that somebody left who never came, or who left before."""
        with self.trial() as trial:
            sequences = _add_all(trial)
            trial.decode(sequences, 2)
            trial.step(left=[("nobody", 0), ("nobody", 3)])
            gone = sequences.pop()
            trial.leave(gone)
            trial.step(*(trial.row(s) for s in sequences), left=[gone.sequence_id])
            trial.decode(sequences, _NUM_TOKENS)
            self.check(*sequences)

    def test_any_life(self) -> None:
        """Chunks, drafts, preemptions, failures and ends in any order: answers are what they are alone."""
        for seed in range(self.lives):
            rng = random.Random(seed)
            with self.trial() as trial:
                for number in range(30):
                    self._live(trial, rng, f"life-{seed}-{number}")

    def _live(self, trial: Trial, rng: random.Random, name: str) -> None:
        """Make one step of a random life."""
        live = list(trial.sequences.values())
        if len(live) < 5 and rng.random() < 0.5:
            prompt, params, choice, seed = rng.choice(REQUESTS)
            params = evolve(params, logprobs=rng.choice([None, 1]))
            live.append(trial.add(name, prompt, params, choice=choice, seed=seed + rng.randrange(3)))
        for sequence in live[:]:
            if rng.random() < 0.08 or len(sequence.answer) > 14:
                live.remove(sequence)
                trial.leave(sequence)
            elif sequence.entered and rng.random() < 0.1:
                trial.preempt(sequence)
        rows = []
        for sequence in rng.sample(live, rng.randint(0, len(live))):
            missing = len(sequence.token_ids) - sequence.num_computed
            if missing > 1 and rng.random() < 0.5:
                rows.append(trial.row(sequence, rng.randrange(1, missing)))
                continue
            ahead = self.solo.answer(sequence, len(sequence.answer) + 2)[0][len(sequence.answer) :]
            drafts = [token if rng.random() < 0.7 else (token + 1) % BAD_ID for token in ahead]
            rows.append(trial.row(sequence, drafts=drafts[: rng.randrange(3)]))
        trial.step(*rows)
        self.check(*trial.sequences.values())


class ExecutorContract(_AnswerClaims, StepClaims, PartClaims, EndClaims):
    """What every executor keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `in_process = False`, is in `ExecutorCase`.
    """
