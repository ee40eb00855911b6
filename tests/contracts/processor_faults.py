"""Broken logits processors, around one that lets a third of the ids through: which, the answer's sum says."""

import random
from collections.abc import Mapping
from concurrent.futures import Future

import torch

from contracts.planted import planting
from intarsia.errors import InvalidRequestError
from intarsia.protocols import LogitsProcessor, SequenceProcessor
from intarsia.testing.logits_processors import LogitsProcessorContract
from intarsia.types import Provider

FAULTS = []
plant = planting(FAULTS)
FIELD = "sampling.logits_processors.thirds"


def step_of(asked):
    """Return what a request asks."""
    if not isinstance(asked, Mapping) or set(asked) != {"step"} or asked["step"] not in (1, 2):
        raise InvalidRequestError(f"{FIELD}: {asked!r:.80} is not {{'step': 1}} or {{'step': 2}}", field=FIELD)
    return asked["step"]


def sum_of(answer):
    return sum(token // 3 + 1 for token in answer)


class Third(SequenceProcessor):
    def __init__(self, step, num_prompt):
        self.step, self.num_prompt = step, num_prompt

    def process(self, token_ids, logits_V):
        self.allow(sum_of(token_ids[self.num_prompt :]) * self.step, logits_V)

    def allow(self, number, logits_V):
        forbidden = torch.arange(len(logits_V)) % 3 != number % 3
        logits_V.masked_fill_(forbidden, float("-inf"))


class Thirds(LogitsProcessor):
    """A good processor."""

    sequence = Third

    def applies(self, params):
        return "thirds" in params.logits_processors and step_of(params.logits_processors["thirds"]) > 0

    def open(self, params, num_prompt):
        return self.sequence(step_of(params.logits_processors["thirds"]), num_prompt)


#: What faults are planted in: the contract finds nothing wrong with these.
SOUND = (Thirds,)


def contract(part):
    """Return the contract for a broken processor."""

    class Broken(LogitsProcessorContract):
        asked = ({"step": 1}, {"step": 2})
        refused = ({"step": 3}, {"steps": 1})
        patience_s = 0.2

        def provider(self):
            return Provider(key="thirds", summary="a third", build=lambda context: part())

    return Broken


# --- requests ---------------------------------------------------------------------------------------------------------


@plant("test_whether_it_applies_follows_from_the_request_alone")
class AppliesInTurns(Thirds):
    """It applies to a request that asks for nothing every second time"""

    turns = 0

    def applies(self, params):
        self.turns += 1
        return super().applies(params) or (not params.logits_processors and self.turns % 2 == 0)


@plant("test_whether_it_applies_follows_from_the_request_alone")
class AppliesToOthers(Thirds):
    """It applies to requests that ask something of another processor"""

    def applies(self, params):
        return bool(params.logits_processors) and ("thirds" not in params.logits_processors or super().applies(params))


@plant("test_what_is_malformed_is_refused_by_its_field")
class TrustsRequests(Thirds):
    """It looks its option up in whatever a request says"""

    def applies(self, params):
        return "thirds" in params.logits_processors and params.logits_processors["thirds"]["step"] in (1, 2)


@plant("test_what_is_malformed_is_refused_by_its_field")
class NamesNoField(Thirds):
    """It refuses without saying which field is wrong"""

    def applies(self, params):
        try:
            return super().applies(params)
        except InvalidRequestError:
            raise InvalidRequestError("this cannot be done") from None


@plant("test_what_is_malformed_is_refused_by_its_field")
class RepeatsWhatWasSaid(Thirds):
    """Its message repeats all that the request said"""

    def applies(self, params):
        try:
            return super().applies(params)
        except InvalidRequestError:
            asked = params.logits_processors["thirds"]
            raise InvalidRequestError(
                f"{FIELD}: {'' if isinstance(asked, list) else asked} is wrong", field=FIELD
            ) from None


@plant("test_what_is_malformed_is_refused_by_its_field")
class TakesTheNearest(Thirds):
    """It takes a number that it does not know for one that it knows"""

    def applies(self, params):
        asked = params.logits_processors.get("thirds")
        return asked == {"step": 3} or super().applies(params)

    def open(self, params, num_prompt):
        return self.sequence(1, num_prompt)


@plant("test_requests_are_prepared_in_time_and_more_than_once")
class NeverReady(Thirds):
    """The future of its work is never done"""

    def prepare(self, params):
        return Future()


@plant("test_requests_are_prepared_in_time_and_more_than_once")
class PreparesNothing(Thirds):
    """It returns the result of its work, not a future of it"""

    def prepare(self, params):
        return {"step": 1}


@plant("test_requests_are_prepared_in_time_and_more_than_once")
class OpensOnce(Thirds):
    """What it prepared is gone once a sequence has been opened: a preempted one fails"""

    def prepare(self, params):
        self.ready = step_of(params.logits_processors["thirds"])

    def open(self, params, num_prompt):
        ready = self.ready
        del self.ready
        return self.sequence(ready, num_prompt)


# --- a pure function --------------------------------------------------------------------------------------------------


def planted(claim, says):
    """File a processor whose sequences are broken."""

    def file(sequence):
        plant(claim)(type(sequence.__name__, (Thirds,), {"sequence": sequence, "__doc__": says}))
        return sequence

    return file


@planted("test_equal_ids_bring_equal_logits", "It counts how often it was called, not the ids")
class CountsCalls(Third):
    calls = 0

    def process(self, token_ids, logits_V):
        self.calls += 1
        self.allow(self.calls, logits_V)


@planted("test_equal_ids_bring_equal_logits", "It draws by Python's own random numbers")
class DrawsByLot(Third):
    def process(self, token_ids, logits_V):
        self.allow(random.SystemRandom().randrange(3), logits_V)


@planted("test_equal_ids_bring_equal_logits", "It adds up ids as they come, and keeps those of rejected drafts")
class OnlyGoesForward(Third):
    seen = total = 0

    def process(self, token_ids, logits_V):
        self.total += sum_of(token_ids[max(self.seen, self.num_prompt) :])
        self.seen = max(self.seen, len(token_ids))
        self.allow(self.total * self.step, logits_V)


@plant("test_sequences_do_not_meet")
class SharesItsState(Thirds):
    """Sequences of equal requests share what it keeps of an answer"""

    def __init__(self):
        self.shared = {}

    def open(self, params, num_prompt):
        step = step_of(params.logits_processors["thirds"])
        shared = self.shared.setdefault(step, {})

        class Sequence(Third):
            def process(self, token_ids, logits_V):
                answer = token_ids[self.num_prompt :]
                known = shared.setdefault(len(answer), sum_of(answer) * self.step)
                self.allow(known, logits_V)

        return Sequence(step, num_prompt)


@planted("test_prompts_of_any_length_are_taken", "It looks at the last id of the prompt, where there may be none")
class NeedsAPrompt(Third):
    def process(self, token_ids, logits_V):
        token_ids[self.num_prompt - 1]
        super().process(token_ids, logits_V)


# --- rows -------------------------------------------------------------------------------------------------------------


@planted("test_only_its_own_row_is_changed", "It changes the whole batch that its row is a part of")
class ChangesTheBatch(Third):
    def process(self, token_ids, logits_V):
        super().process(token_ids, logits_V)
        if logits_V._base is not None:
            logits_V._base.mul_(2)


@planted("test_only_its_own_row_is_changed", "It writes in the list of ids that it was given")
class AppendsToTheIds(Third):
    def process(self, token_ids, logits_V):
        super().process(token_ids, logits_V)
        token_ids.append(0)


@planted("test_only_its_own_row_is_changed", "It returns a new row, and leaves the old one as it was")
class ReturnsARow(Third):
    def process(self, token_ids, logits_V):
        changed = logits_V.clone()
        super().process(token_ids, changed)
        return changed


@planted("test_something_may_follow", "After some tokens it lets none through")
class EndsInNothing(Third):
    def process(self, token_ids, logits_V):
        super().process(token_ids, logits_V)
        if len(token_ids) > self.num_prompt + 9:
            logits_V.fill_(float("-inf"))


@planted("test_something_may_follow", "It takes the average off, and what is forbidden makes that NaN")
class CentersForbidden(Third):
    def process(self, token_ids, logits_V):
        super().process(token_ids, logits_V)
        if len(token_ids) > self.num_prompt:
            logits_V.sub_(logits_V.mean())


@planted("test_rows_of_any_numbers_are_taken", "It scales logits by their span, which can be 0")
class DividesBySpan(Third):
    def process(self, token_ids, logits_V):
        finite = logits_V[logits_V.isfinite()]
        logits_V.div_(finite.max() - finite.min())
        super().process(token_ids, logits_V)


@planted("test_rows_of_any_numbers_are_taken", "It lets through what another processor has forbidden")
class AllowsForbidden(Third):
    def process(self, token_ids, logits_V):
        logits_V.clamp_(min=-1e4)
        super().process(token_ids, logits_V)


# --- in an engine -----------------------------------------------------------------------------------------------------


@plant("test_answers_do_not_depend_on_company")
class CountsSequences(Thirds):
    """What a sequence may say depends on how many others there are"""

    def __init__(self):
        self.opened = 0

    def open(self, params, num_prompt):
        self.opened += 1
        sequence = super().open(params, num_prompt)
        sequence.step += self.opened
        return sequence


@planted("test_drafts_change_no_answer", "It takes drafts for tokens that were accepted")
class TakesDrafts(Third):
    def __init__(self, step, num_prompt):
        super().__init__(step, num_prompt)
        self.answer = []

    def process(self, token_ids, logits_V):
        self.answer += token_ids[self.num_prompt + len(self.answer) :]
        self.allow(sum_of(self.answer) * self.step, logits_V)


@planted("test_chunks_and_preemptions_change_no_answer", "Opened again, it knows nothing of what was said before")
class BeginsAnew(Third):
    begun = None

    def process(self, token_ids, logits_V):
        self.begun = len(token_ids) if self.begun is None else self.begun
        self.allow(sum_of(token_ids[self.begun :]) * self.step, logits_V)


@plant("test_a_request_that_is_refused_fails_alone")
class BreaksForAll(Thirds):
    """After a request that it refused it refuses all"""

    broken = False

    def applies(self, params):
        if self.broken:
            raise InvalidRequestError(f"{FIELD}: broken", field=FIELD)
        try:
            return super().applies(params)
        except InvalidRequestError:
            self.broken = True
            raise


# --- leaving ----------------------------------------------------------------------------------------------------------


@plant("test_it_forgets_sequences_that_left")
class KeepsSequences(Thirds):
    """It keeps every sequence that it ever opened"""

    def __init__(self):
        self.opened = []

    def open(self, params, num_prompt):
        self.opened.append(super().open(params, num_prompt))
        return self.opened[-1]
