"""Claims of executors about steps: the cache's work, empty plans, steps in flight, what a step says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable

from intarsia.protocols import ResolvesPending
from intarsia.testing.claims import unclaimed
from intarsia.testing.composing import composed, spoiled_model
from intarsia.testing.executor_case import GREEDY, PROMPTS, REQUESTS, SEEDED, ExecutorCase
from intarsia.testing.planned import PlannedSequence, Trial
from intarsia.types import CacheMove, SamplingParams

__all__ = ["StepClaims"]


def _moves(trial: Trial, *moves: tuple[str, int, int]) -> list[CacheMove]:
    """Return moves (kind, target, source) in every cache group."""
    return [
        CacheMove(kind, target, source, group)  # type: ignore[arg-type]
        for group in range(len(trial.parts.layout.groups))
        for kind, target, source in moves
    ]


class StepClaims(ExecutorCase):
    """The cache's work, and steps in flight."""

    def test_cache_moves_come_first_and_in_order(self) -> None:
        """A plan's moves are done in order, and before its rows run: what these rely on is there."""
        with self.trial() as trial:
            parent = trial.add("parent", PROMPTS[2], GREEDY)
            trial.step(trial.row(parent, 11))
            child = self._fork(trial, parent, num_tokens=10)
            last, spare = parent.pages[2], trial.take_pages(2)
            # The page of both goes by way of a page that is zeroed behind it, and only then gets lost.
            moves = [
                ("copy", spare[0], last),
                ("copy", child.pages[2], spare[0]),
                ("zero", spare[0], -1),
                ("copy", spare[1], spare[0]),
            ]
            trial.step(trial.row(parent, 1), trial.row(child, 1), moves=_moves(trial, *moves))
            trial.give_pages(spare)
            trial.decode([child, parent], 5)
            self.check(child, parent)

    def _fork(self, trial: Trial, parent: PlannedSequence, num_tokens: int) -> PlannedSequence:
        """Return a sequence that begins with a parent's first pages, and a page of its own for the last of these."""
        child = trial.add("child", (*parent.prompt[:num_tokens], 50, 51, 52), SEEDED)
        # Its own pages cannot be given back with those of the parent.
        whole = num_tokens // trial.parts.layout.page_size
        child.pages = [*trial.take_pages(whole), *trial.take_pages(1)]
        child.num_computed = num_tokens
        trial.step(moves=_moves(trial, *(("copy", child.pages[i], parent.pages[i]) for i in range(whole))))
        return child

    def test_zeroed_pages_hold_zeros(self) -> None:
        """A page that a move zeroes has zeros for keys and values: rows read them as the local executor's do."""

        def script(trial: Trial) -> list[tuple[int, float]]:
            sequence = trial.add("zeroed", PROMPTS[2], GREEDY)
            trial.step(trial.row(sequence, 12))
            trial.step(trial.row(sequence), moves=_moves(trial, ("zero", sequence.pages[1], -1)))
            trial.decode([sequence], 4)
            return sequence.logprobs

        self._check_as_local(script)

    def _check_as_local(self, script: Callable[[Trial], list[tuple[int, float]]]) -> None:
        """Compare what a script brings with what it brings on the local executor."""
        parts = composed(spoiled_model(), {"executor": "local"})[1]
        local = Trial(parts, parts.executor)
        local.start()
        try:
            wanted = script(local)
        finally:
            local.executor.stop()
        with self.trial() as trial:
            found = script(trial)
        assert [token for token, _ in found] == [token for token, _ in wanted], f"{found}, and locally {wanted}"
        self._check_near("the script", [value for _, value in found], [value for _, value in wanted])

    def test_swapped_pages_come_back_and_are_told(self) -> None:
        """Pages that go to host memory come back with what they held, and steps tell the bytes and the seconds."""
        swapping = {"use": "paged", "page_size": 4, "memory": "128KiB", "swap": "64KiB"}
        with self.trial(cache=swapping) as trial:
            sequence = trial.add("swapped", PROMPTS[2], GREEDY)
            other = trial.add("other", PROMPTS[0], GREEDY)
            trial.decode([sequence, other], 2)
            gone = sequence.pages
            trial.give_pages(gone)
            out = [("swap_out", host, page) for host, page in enumerate(gone)]
            wiped = [("zero", page, -1) for page in gone]
            trial.step(trial.row(other), moves=_moves(trial, *out, *wiped))
            filler = trial.add("filler", PROMPTS[2], SEEDED)  # has the pages now
            trial.decode([filler, other], 4)
            sequence.pages = trial.take_pages(len(gone))
            back = [("swap_in", page, host) for host, page in enumerate(sequence.pages)]
            trial.step(trial.row(sequence), moves=_moves(trial, *back))
            trial.decode([sequence, filler, other], 6)
            self.check(sequence, other, filler)
            swapped, seconds = (sum(getattr(each, name) for each in trial.results) for name in ("swapped", "swap_s"))
            assert swapped > 0, f"{len(gone)} pages went out and came back, and steps tell {swapped} bytes"
            assert 0 < seconds < math.inf, f"copying took {seconds} s"

    def test_empty_plans_have_their_turns(self) -> None:
        """A plan without rows is collected as any other: it does the cache's work, and takes note of who left."""
        with self.trial() as trial:
            for _ in range(2):
                assert trial.step().rows == ()
            sequence = trial.add("r", PROMPTS[0], GREEDY)
            trial.decode([sequence], 2)
            kept = trial.take_pages(len(sequence.pages))
            trial.step(moves=_moves(trial, *(("copy", k, p) for k, p in zip(kept, sequence.pages, strict=True))))
            trial.give_pages(sequence.pages)
            sequence.pages = kept
            trial.decode([sequence], 5)
            self.check(sequence)
            trial.leave(sequence)
            assert trial.step().rows == ()

    def test_steps_say_what_they_took(self) -> None:
        """`target_s` is a time where rows ran; nothing is told of a drafter or of copies where there are none."""
        with self.trial() as trial:
            sequences = [trial.add(f"r{i}", PROMPTS[i], GREEDY) for i in range(3)]
            begun = len(trial.results)
            trial.decode(sequences, 4)
            for result in trial.results[begun:]:
                assert 0 < result.target_s < 600, f"a step with rows took {result.target_s} s"
                told = (result.draft_s, result.draft_error, result.swapped, result.swap_s)
                assert told == (0.0, None, 0, 0.0), f"nothing is drafted and nothing swapped, and a step tells {told}"

    # --- steps in flight --------------------------------------------------------------------------------------------

    def test_steps_in_flight_come_back_in_their_order(self) -> None:
        """Up to `depth` steps can be submitted before the first is collected; they come back as they went."""
        with self.trial() as trial:
            depth = self._deep(trial)
            groups = [
                [trial.add(f"r{turn}-{i}", p, params, choice=c, seed=s) for i, (p, params, c, s) in enumerate(some)]
                for turn, some in enumerate(REQUESTS[i::depth] for i in range(depth))
            ]
            for _ in range(3):
                for group in groups:
                    trial.submit(*(trial.row(sequence) for sequence in group))
                for _ in groups:
                    trial.collect()
                trial.submit()
                trial.submit(*(trial.row(sequence) for sequence in groups[0]))
                assert trial.collect().rows == (), "an empty plan came back with rows"
                trial.collect()
            self.check(*(sequence for group in groups for sequence in group))

    def _deep(self, trial: Trial) -> int:
        """Return how many steps can be in flight; skip the claim where it is one."""
        depth = trial.executor.depth
        assert isinstance(depth, int) and depth >= 1, f"depth is {depth!r}, not a whole number from 1"
        if depth == 1:
            unclaimed("depth is 1: each step is collected before the next is submitted")
        return depth

    def test_ids_that_a_step_in_flight_chooses_can_be_named(self) -> None:
        """Where it says that it resolves them, rows may name PENDING ids: those that the step before chooses."""
        plain = [SamplingParams(temperature=0), GREEDY, SEEDED]
        with self.trial() as trial:
            depth, executor = self._deep(trial), trial.executor
            if not (isinstance(executor, ResolvesPending) and executor.resolves_pending):
                unclaimed("it resolves no pending ids: a sequence is in one step in flight at a time")
            for number, params in enumerate(plain):
                sequences = [trial.add(f"r{number}-{i}", PROMPTS[i], params, seed=i) for i in range(3)]
                for turn in range(6):
                    trial.submit(*(trial.row(sequence) for sequence in sequences[:: -1 if turn % 2 else 1]))
                    if len(trial.in_flight) == depth:
                        trial.collect()
                while trial.in_flight:
                    trial.collect()
                self.check(*sequences)
                trial.leave(*sequences)

    def test_pages_can_be_used_again_while_a_step_that_writes_them_is_in_flight(self) -> None:
        """Steps read and write the cache in the order of their submission, moves included."""
        with self.trial() as trial:
            self._deep(trial)
            keeper = trial.add("keeper", PROMPTS[2], GREEDY)
            trial.decode([keeper], 1)
            for turn in range(4):
                gone = trial.add(f"gone-{turn}", [50 - i for i in range(13)], GREEDY)
                if turn % 2:
                    trial.step(trial.row(gone, 3))
                trial.submit(trial.row(gone))
                pages = list(gone.pages)
                trial.leave(gone)
                heir = trial.add(f"heir-{turn}", (*keeper.prompt[:8], 50, 51), SEEDED, seed=turn)
                heir.pages, heir.num_computed = trial.take_pages(2), 8
                assert set(heir.pages) <= set(pages), "the suite gives pages that were just given back"
                moves = (("copy", mine, theirs) for mine, theirs in zip(heir.pages, keeper.pages, strict=False))
                trial.submit(trial.row(heir), moves=_moves(trial, *moves))
                trial.collect()
                trial.collect()
                trial.decode([heir], 4)
                self.check(heir)
                trial.leave(heir)
