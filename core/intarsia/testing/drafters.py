"""The contract of drafters, as tests to inherit.

::

    from intarsia.testing.drafters import DrafterContract

    class TestMine(DrafterContract):
        options = {"k": 4}

        def provider(self):
            return my_plugin.provide_drafters()[0]

pytest runs the inherited tests. They hold a drafter to what none may do: change an answer, fail, propose more than was
wanted, mix up sequences that are preempted or whose ids are used again, say what others under another salt have said,
lie about its probabilities, keep what has left. Whether its guesses are any good is not a matter of contract;
`WatchedDrafter` counts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from intarsia.protocols import StepCost, Verified
from intarsia.testing.claims import unclaimed
from intarsia.testing.drafter_case import PARAMS, PROMPTS, DrafterCase, check_plain, no_faults, watched
from intarsia.testing.drafter_chances import check_answers, check_draws, check_rows, check_twins
from intarsia.testing.drafter_watch import Proposal, WatchedDrafter, watching
from intarsia.testing.engines import ask, said, scratch, token_bytes, unharmed
from intarsia.testing.reach import holds
from intarsia.types import Completion, Request, SamplingParams

__all__ = ["DrafterContract", "WatchedDrafter", "watching"]

#: The model's own distribution, of many choices: what verification by rejection must keep.
_FREE = SamplingParams(temperature=1, seed=17, n=64, max_tokens=24, logprobs=1000)
_REJECTION = {"engine": {"verify": "rejection"}}


class DrafterContract(DrafterCase):
    """What every drafter keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `repeats = False`, is in `DrafterCase`.
    """

    # --- answers ----------------------------------------------------------------------------------------------------

    def test_drafts_change_no_answer(self) -> None:
        """Greedy and seeded answers of a mixed batch are those without the drafter, log-probabilities included."""
        self.check(PROMPTS, PARAMS)

    def test_drafts_change_no_answer_of_one_sequence(self) -> None:
        """Nor do they where it runs alone."""
        for prompt in PROMPTS[:2]:
            self.check([prompt], [SamplingParams(temperature=0, max_tokens=60)])

    def test_preempted_sequences_go_on_as_they_were(self) -> None:
        """Sequences enter again after a preemption, with what they had said by then."""
        params = [SamplingParams(temperature=0, max_tokens=50), SamplingParams(temperature=0.5, seed=1, max_tokens=50)]
        cache = {"use": "paged", "memory": str(token_bytes(self.page_tokens))}
        found = self.check(PROMPTS, params * 3, cache=cache, scheduler="inflight")
        assert found.num_reentered, "nothing was preempted: make page_tokens smaller"

    def test_short_long_and_monotonous_sequences_are_survived(self) -> None:
        """Prompts of one token, ids at the vocabulary's ends, the context's last token: nothing fails or changes."""
        last = self.num_ids - 1
        prompts = [(0,), (last,), (0,) * 90, (last, 0) * 50, tuple(i % self.num_ids for i in range(126)), (1,) * 127]
        params = [SamplingParams(temperature=0, max_tokens=most) for most in (None, 1, 2, 20, None, None)]
        self.check(prompts, params)

    # --- proposals --------------------------------------------------------------------------------------------------

    def test_proposals_are_what_was_asked_for(self) -> None:
        """A draft a request, no longer than was wanted, of ids that exist; the request stays as it was."""
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            engine.generate([list(prompt) for prompt in PROMPTS], list(PARAMS))
            no_faults(engine)
            strays = watched(engine).strays
            assert not strays, f"{sorted(set(strays))[:5]} were proposed, and ids are from 0 to {self.num_ids - 1}"

    def test_salts_are_kept_apart(self) -> None:
        """What is proposed for a sequence does not depend on sequences of another salt, before it or beside it."""
        if not self.repeats:
            unclaimed("repeats = False: guesses cannot be compared")
        with scratch() as folder:
            model = self.model(folder)
            alone = self._proposals(model, before=(), beside=())
            if self._proposals(model, before=(), beside=()) != alone:
                unclaimed("guesses differ from run to run: say repeats = False, or options that make them the same")
            for others in ({"before": PROMPTS[:2], "beside": ()}, {"before": (), "beside": PROMPTS[:2]}):
                found = self._proposals(model, **others)
                assert found == alone, (
                    "sequences of another salt change what is proposed: they can be guessed from that"
                )

    def _proposals(
        self, model: Path, before: Sequence[Sequence[int]], beside: Sequence[Sequence[int]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Return what is proposed for a request after others and beside others, all of another salt."""
        params = SamplingParams(temperature=0, seed=1, max_tokens=30)
        with self.drafting(model) as engine:
            for index, prompt in enumerate(before):
                ask(engine, prompt, params, f"before-{index}", "other")
            for index, prompt in enumerate(beside):
                others = Request(request_id=f"beside-{index}", prompt=list(prompt), params=params, cache_salt="other")
                engine.add(others)
                for _ in range(6):
                    engine.step()
            ask(engine, PROMPTS[1], params, "own", "own")
            no_faults(engine)
            own = [one for one in watched(engine).proposals if one.sequence_id == ("own", 0)]
            return [(len(one.token_ids), one.draft.token_ids) for one in own]

    # --- probabilities ----------------------------------------------------------------------------------------------

    def test_probabilities_are_those_that_guesses_are_drawn_with(self) -> None:
        """Where drafts are verified by rejection their probabilities are true, and do not depend on the guess."""
        _, proposals = self._chances()
        if not check_rows(proposals, self.num_ids):
            unclaimed("its guesses come without probabilities: they count as certain, which is always right")
        check_twins(proposals)
        check_draws(proposals)

    def test_rejection_keeps_the_models_distribution(self) -> None:
        """Where drafts are verified by rejection tokens are drawn as the model says, however they were guessed."""
        completion, proposals = self._chances()
        if not any(one.draft.token_ids for one in proposals):
            unclaimed("it guessed nothing here")
        check_answers(completion, proposals, self.num_ids)

    def _chances(self) -> tuple[Completion, list[Proposal]]:
        """Run many choices of one request; once for the two claims that look at them."""
        known: tuple[Completion, list[Proposal]] | None = vars(type(self)).get("_known_chances")
        if known is not None:
            return known
        with scratch() as folder, self.drafting(self.model(folder), **_REJECTION) as engine:
            (completion,) = engine.generate([list(PROMPTS[1])], _FREE)
            no_faults(engine)
            for choice in completion.choices:
                assert choice.error is None, choice.error
            found = completion, list(watched(engine).proposals)
        setattr(type(self), "_known_chances", found)  # noqa: B010 - a subclass's own
        return found

    def test_seeded_answers_repeat_themselves_under_rejection(self) -> None:
        """Equal seeds bring equal answers where drafts are verified by rejection, in another engine too."""
        if not self.repeats:
            unclaimed("repeats = False: answers under rejection depend on what was guessed")
        found = []
        with scratch() as folder:
            model = self.model(folder)
            for _ in range(2):
                with self.drafting(model, **_REJECTION) as engine:
                    params = [SamplingParams(temperature=1, seed=i, n=2, max_tokens=30) for i in range(len(PROMPTS))]
                    done = engine.generate([list(prompt) for prompt in PROMPTS], params)
                    no_faults(engine)
                    found.append([[said(choice) for choice in one.choices] for one in done])
        assert found[0] == found[1], "guesses depend on more than the request, its seed and its tokens"

    # --- leaving ----------------------------------------------------------------------------------------------------

    def test_an_id_can_be_used_again(self) -> None:
        """A request that left is forgotten: another of its id is another."""
        params = SamplingParams(temperature=0, max_tokens=24)
        with scratch() as folder:
            model = self.model(folder)
            with self.plain(model) as plain, self.drafting(model) as drafting:
                for prompt in (*PROMPTS[:3], *PROMPTS[:3]):
                    assert ask(drafting, prompt, params) == ask(plain, prompt, params), "an answer is another"
                no_faults(drafting)
                assert len(watched(drafting).entered) <= 1, "engines tell a drafter of those that left"

    def test_a_cancelled_sequence_is_forgotten(self) -> None:
        """Whatever state it is in; the others' answers stay what they are."""
        params = SamplingParams(temperature=0, max_tokens=24)
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            before = ask(engine, PROMPTS[1], params)
            for steps in range(5):
                engine.add(Request(request_id="given up", prompt=list(PROMPTS[0]), params=params))
                for _ in range(steps):
                    engine.step()
                engine.cancel("given up")
                assert ask(engine, PROMPTS[1], params) == before, "a cancelled request changed another's answer"
            no_faults(engine)
            assert ("given up", 0) not in watched(engine).entered
            self._check_gone(watched(engine), "given up")

    def test_what_has_left_is_not_kept(self) -> None:
        """Nothing that the drafter holds names a sequence that has finished."""
        params = SamplingParams(temperature=0.5, seed=1, n=2, max_tokens=12)
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            for turn in range(4):
                ask(engine, PROMPTS[1], params, f"finished-{turn}")
            # What became of the last step's drafts may be known until the next one.
            ask(engine, PROMPTS[0], params, "after")
            no_faults(engine)
            for turn in range(4):
                self._check_gone(watched(engine), f"finished-{turn}")

    def _check_gone(self, drafter: WatchedDrafter, request_id: str) -> None:
        assert not holds(drafter.inner, request_id, without=(drafter.target,)), (
            f"request {request_id!r} has left, and the drafter holds its id still: for how many more?"
        )

    def test_strangers_are_ignored(self) -> None:
        """Nothing to propose for, and sequences that it never met, are no error."""
        stranger, cost = ("nobody", 0), StepCost(num_rows=1, num_tokens=1, target_s=0.01, draft_s=0.0)
        params = SamplingParams(temperature=0, max_tokens=24)
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            before = ask(engine, PROMPTS[1], params)
            inner = watched(engine).inner
            assert list(unharmed("propose of nothing", inner.propose, [])) == [], "drafts for no request"
            for _ in range(2):
                unharmed("forget of a stranger", inner.forget, stranger)
            unharmed("observe of nothing", inner.observe, (), cost)
            verified = [Verified(sequence_id=stranger, drafted=3, accepted=1)]
            unharmed("observe of a stranger", inner.observe, verified, cost)
            assert ask(engine, PROMPTS[1], params) == before
            no_faults(engine)

    # --- besides ----------------------------------------------------------------------------------------------------

    def test_figures_are_plain_data(self) -> None:
        """`stats` can be sent to clients, as JSON with texts for keys, before the first step and after the last."""
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            check_plain(unharmed("stats", watched(engine).stats))
            ask(engine, PROMPTS[1], SamplingParams(temperature=0, max_tokens=24))
            check_plain(unharmed("stats", watched(engine).stats))

    def test_its_bytes_are_told_beforehand(self) -> None:
        """`num_bytes` is a whole number from 0, the same however often it is asked."""
        with scratch() as folder, self.drafting(self.model(folder)) as engine:
            layout = engine.parts.layout
            told = [unharmed("num_bytes", watched(engine).inner.num_bytes, layout) for _ in range(2)]
        assert all(type(one) is int and one >= 0 for one in told), f"num_bytes says {told[0]!r}"
        assert told[0] == told[1], f"num_bytes says {told[0]}, then {told[1]}"

    def test_it_stops_twice(self) -> None:
        """`stop` is safe to call again, and without a start."""
        with scratch() as folder:
            with self.drafting(self.model(folder)) as engine:
                drafter = watched(engine)
            unharmed("the second stop", drafter.stop)
            assert not drafter.faults, drafter.faults
            assert drafter.again is not None
            other = drafter.again()
            for _ in itertools.repeat(None, 2):
                unharmed("a stop without a start", other.stop)
