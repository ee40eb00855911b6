"""Broken drafters, around one that proposes what followed the last token where it came before."""

import random

import numpy as np
import torch

from contracts.planted import offering, planting
from intarsia.protocols import Drafter
from intarsia.testing.drafters import DrafterContract
from intarsia.types import Draft, Provider, Row

FAULTS = []
plant = planting(FAULTS)


class Echo(Drafter):
    """A good drafter: what followed the last token where it came last."""

    def __init__(self, num_ids):
        self.num_ids = num_ids
        self.known = {}

    def start(self, target):
        self.target = target

    def enter(self, entered):
        self.known[entered.sequence_id] = entered

    def propose(self, requests):
        return [self.guess(request, list(request.token_ids)) for request in requests]

    def guess(self, request, ids):
        for i in range(len(ids) - 2, -1, -1):
            if ids[i] == ids[-1]:
                return Draft(tuple(ids[i + 1 : i + 1 + min(4, request.wanted)]))
        return Draft()

    def forget(self, sequence_id):
        self.known.pop(sequence_id, None)

    def stats(self):
        return {"sequences": len(self.known)}


class Drawing(Echo):
    """A good drafter with probabilities: guesses are drawn from a distribution of its own, by the request's seed."""

    def guess(self, request, ids):
        drawn, rows = [], []
        for depth in range(min(4, request.wanted)):
            q = self.distribution([*ids, *drawn])
            drawn.append(int(self.numbers(request, len(ids) + depth).choice(len(q), p=q)))
            rows.append(q)
        return self.said(drawn, rows)

    def numbers(self, request, position):
        seed = self.known[request.sequence_id].seed
        return np.random.default_rng([seed, request.sequence_id[1], position])

    def distribution(self, ids):
        weights = np.random.default_rng(ids[-1]).uniform(0.1, 1, self.num_ids) ** 4
        return weights / weights.sum()

    def said(self, drawn, rows):
        return Draft(tuple(drawn), torch.tensor(np.array(rows)))


#: What faults are planted in: the contract finds nothing wrong with these.
SOUND = (Echo, Drawing)


def provider_of(part):
    return Provider(key="echo", summary="what followed", build=lambda context: part(context.num_ids))


def contract(part):
    """Return the contract for a broken drafter."""

    class Broken(DrafterContract):
        def provider(self):
            return offering(provider_of(part), lambda context: part(context.num_ids))

    return Broken


# --- answers ----------------------------------------------------------------------------------------------------------


@plant("test_drafts_change_no_answer")
class WritesOverTheCache(Echo):
    """It runs a guess at the place of a token that is in the cache already"""

    def guess(self, request, ids):
        if len(ids) > 2:
            rows = [Row(sequence_id=request.sequence_id, token_ids=(7,), start=len(ids) - 2, pages=request.pages)]
            self.target.forward(rows)
        return super().guess(request, ids)


@plant("test_drafts_change_no_answer")
class FailsNowAndThen(Echo):
    """It raises where a sequence has eleven tokens, and the engine has to go on without it"""

    def guess(self, request, ids):
        if len(ids) == 11:
            raise KeyError("eleven")
        return super().guess(request, ids)


@plant("test_drafts_change_no_answer_of_one_sequence")
class NeedsCompany(Echo):
    """It cannot do with one request alone"""

    def propose(self, requests):
        first, second, *_ = requests
        return super().propose([first, second, *_])


@plant("test_preempted_sequences_go_on_as_they_were")
class MeetsNobodyTwice(Echo):
    """A sequence that enters again after a preemption is an error to it"""

    def enter(self, entered):
        assert entered.sequence_id not in self.known, "it is here already"
        super().enter(entered)


@plant("test_short_long_and_monotonous_sequences_are_survived")
class NeedsThreeTokens(Echo):
    """It reads the third token from the end, where there may be none"""

    def guess(self, request, ids):
        return super().guess(request, [ids[-3], *ids])


@plant("test_short_long_and_monotonous_sequences_are_survived")
class KeepsTable(Echo):
    """Its table has no row for the vocabulary's last id"""

    def guess(self, request, ids):
        table = [0] * (self.num_ids - 1)
        for token in ids:
            table[token] += 1
        return super().guess(request, ids)


# --- proposals --------------------------------------------------------------------------------------------------------


@plant("test_proposals_are_what_was_asked_for")
class ProposesMore(Echo):
    """It proposes a token more than was wanted"""

    def guess(self, request, ids):
        return Draft((*(1,) * request.wanted, 2))


@plant("test_proposals_are_what_was_asked_for")
class ProposesNoIds(Echo):
    """It proposes ids beyond the vocabulary"""

    def guess(self, request, ids):
        return Draft((self.num_ids,)) if len(ids) % 5 == 0 else super().guess(request, ids)


@plant("test_proposals_are_what_was_asked_for")
class AnswersTheFirst(Echo):
    """It returns drafts for some of the requests alone"""

    def propose(self, requests):
        return [draft for draft in super().propose(requests) if draft.token_ids]


@plant("test_proposals_are_what_was_asked_for")
class ChangesItsRequest(Echo):
    """It goes on writing in the list of tokens that it was handed"""

    def propose(self, requests):
        drafts = super().propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            request.token_ids.extend(draft.token_ids)
        return drafts


@plant("test_salts_are_kept_apart")
class TellsOthers(Echo):
    """It proposes what sequences of other salts have said"""

    def guess(self, request, ids):
        for other in self.known.values():
            if other.sequence_id != request.sequence_id:
                return super().guess(request, [*other.token_ids, ids[-1]])
        return super().guess(request, ids)


@plant("test_salts_are_kept_apart")
class RemembersAnswers(Echo):
    """It learns from every answer, whatever its salt, and proposes that to all"""

    def __init__(self, num_ids):
        super().__init__(num_ids)
        self.learnt = []

    def propose(self, requests):
        drafts = super().propose(requests)
        for request in requests:
            self.learnt += request.token_ids[-1:]
        return drafts

    def guess(self, request, ids):
        return super().guess(request, [*self.learnt, *ids])


# --- probabilities ----------------------------------------------------------------------------------------------------


@plant("test_probabilities_are_those_that_guesses_are_drawn_with")
class AddsToAcceptance(Drawing):
    """It says that its guess was 2% less likely than it was, which adds 2% to acceptance"""

    def said(self, drawn, rows):
        rows = np.array(rows)
        rows[np.arange(len(drawn)), drawn] *= 0.98
        return Draft(tuple(drawn), torch.tensor(rows / rows.sum(axis=1, keepdims=True)))


@plant("test_probabilities_are_those_that_guesses_are_drawn_with")
class SharpensItsDraws(Drawing):
    """It draws from a sharper distribution than it says"""

    def distribution(self, ids):
        q = super().distribution(ids)
        return q**1.5 / (q**1.5).sum()

    def said(self, drawn, rows):
        rows = np.array(rows) ** (1 / 1.5)
        return Draft(tuple(drawn), torch.tensor(rows / rows.sum(axis=1, keepdims=True)))


@plant("test_probabilities_are_those_that_guesses_are_drawn_with")
class LeavesSumsOpen(Drawing):
    """Its probabilities do not sum to 1"""

    def said(self, drawn, rows):
        return Draft(tuple(drawn), torch.tensor(np.array(rows) * 0.9))


@plant("test_rejection_keeps_the_models_distribution")
class HidesUnlikelyGuesses(Drawing):
    """It proposes its guess only where that was the likeliest one"""

    def distribution(self, ids):
        q = super().distribution(ids) ** 4
        return q / q.sum()

    def said(self, drawn, rows):
        kept = next((i for i, token in enumerate(drawn) if rows[i].argmax() != token), len(drawn))
        return super().said(drawn[:kept], rows[:kept]) if kept else Draft()


@plant("test_rejection_keeps_the_models_distribution")
class SaysWhatIsEasilyAccepted(Drawing):
    """It always guesses one token, and says that it drew it from all evenly"""

    def said(self, drawn, rows):
        even = np.full((len(drawn), self.num_ids), 1 / self.num_ids)
        return Draft((3,) * len(drawn), torch.tensor(even))


@plant("test_seeded_answers_repeat_themselves_under_rejection")
class DrawsByLot(Drawing):
    """It draws its guesses by Python's own random numbers, whatever the request's seed"""

    def numbers(self, request, position):
        return np.random.default_rng(random.SystemRandom().getrandbits(64))


# --- leaving ----------------------------------------------------------------------------------------------------------


@plant("test_an_id_can_be_used_again")
class TakesNobodyAnew(Echo):
    """It knows a sequence by its id for ever, and fails where its tokens are others"""

    def __init__(self, num_ids):
        super().__init__(num_ids)
        self.first = {}

    def guess(self, request, ids):
        known = self.first.setdefault(request.sequence_id, ids)
        if ids[: len(known)] != known:
            raise ValueError("the sequence has changed")
        return super().guess(request, ids)


@plant("test_a_cancelled_sequence_is_forgotten")
class KeepsUnfinished(Echo):
    """It forgets sequences only once they have said enough"""

    def enter(self, entered):
        super().enter(entered)
        self.num_said = {**getattr(self, "num_said", {}), entered.sequence_id: 0}

    def guess(self, request, ids):
        self.num_said[request.sequence_id] += 1
        return super().guess(request, ids)

    def forget(self, sequence_id):
        if self.num_said.get(sequence_id, 0) > 9:
            del self.num_said[sequence_id]
            super().forget(sequence_id)


@plant("test_what_has_left_is_not_kept")
class KeepsABook(Echo):
    """It keeps a list of all sequences that ever entered"""

    def __init__(self, num_ids):
        super().__init__(num_ids)
        self.book = []

    def enter(self, entered):
        super().enter(entered)
        self.book.append(entered)


@plant("test_strangers_are_ignored")
class KnowsEverybody(Echo):
    """It fails where a sequence leaves that it never met"""

    def forget(self, sequence_id):
        del self.known[sequence_id]


@plant("test_strangers_are_ignored")
class NeedsSomebody(Echo):
    """It takes the longest of the requests, of which there may be none"""

    def propose(self, requests):
        max(len(request.token_ids) for request in requests)
        return super().propose(requests)


# --- besides ----------------------------------------------------------------------------------------------------------


@plant("test_figures_are_plain_data")
class CountsByNumber(Echo):
    """The keys of its figures are numbers"""

    def stats(self):
        return {"accepted": {1: 3, 2: 4}}


@plant("test_figures_are_plain_data")
class DividesByNothing(Echo):
    """Before the first step its figures hold NaN"""

    def stats(self):
        return {"rate": float("nan")}


@plant("test_its_bytes_are_told_beforehand")
class CountsInHalves(Echo):
    """The bytes that it will take are a fraction"""

    def num_bytes(self, layout):
        return layout.page_bytes * 1.5


@plant("test_it_stops_twice")
class StopsOnce(Echo):
    """The second stop fails"""

    def stop(self):
        del self.target
