"""How many drafts to verify, and of whom: as many as measured acceptance and measured costs say that it pays.

**The rule.** R rows want drafts in a step that runs B tokens without any. Row i's next guess is right with chance a_i,
so its j-th guess brings a_i ** j tokens. The gains of all rows are sorted, the largest first, and n are verified::

    rate(n) = (R + sum of the n largest gains) / (C(B + n) + D * depth(n))
    n       = the n of the highest rate, if rate(n) > (1 + MARGIN) * rate(0); else 0

C(T) is the seconds of a step of T tokens, `cost.CostCurve`; a_i is `acceptance.Acceptance`; D the seconds of drafting
one guess deeper, and depth(n) the longest draft among the n; D is 0 for drafters whose guesses are there anyway. Where
C is convex the highest rate is where the next guess stops to pay: a_i ** j / rate < C(T + 1) - C(T). C often is not
(kernels run whole tiles of rows), so every n is looked at. Equal inputs give equal answers: there is no clock here.

What is not run is not measured, so that now and then a step does other than the rule says: see `probing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from attrs import Factory, define, evolve, field, frozen

from intarsia.protocols import Drafter, DraftRequest, StepCost, Target, Verified
from intarsia.types import CacheLayout, Draft, Entered, SequenceId
from intarsia_speculative.acceptance import Acceptance
from intarsia_speculative.cost import CostCurve, assumed
from intarsia_speculative.figures import Figures
from intarsia_speculative.probing import Probing

#: The part of the rate that drafts must add: less is within the noise of what was measured.
MARGIN = 0.03


@frozen
class Rung:
    """One more guess to verify: of which row, how deep in its draft, and the tokens that it brings."""

    gain: float
    row: int
    depth: int


def ladder(chances: Sequence[float], limits: Sequence[int]) -> list[Rung]:
    """Return the guesses in the order in which they are worth verifying.

    Args:
        chances: of each row, that its next guess is right.
        limits: of each row, how many guesses there can be.
    """
    rungs = [
        Rung(chance**depth, row, depth)
        for row, (chance, limit) in enumerate(zip(chances, limits, strict=True))
        for depth in range(1, limit + 1)
    ]
    return sorted(rungs, key=lambda rung: (-rung.gain, rung.depth, rung.row))


def best(rungs: Sequence[Rung], num_rows: int, step_s: Callable[[int, int], float]) -> int:
    """Return how many rungs to climb: the n of the rule.

    Args:
        rungs: in their order.
        num_rows: rows that want drafts: each brings a token without any.
        step_s: (number of drafts, longest draft) -> seconds of the step.
    """
    plain = num_rows / step_s(0, 0)
    found, highest = 0, plain * (1 + MARGIN)
    tokens, depth = float(num_rows), 0
    for n, rung in enumerate(rungs, 1):
        tokens += rung.gain
        depth = max(depth, rung.depth)
        rate = tokens / step_s(n, depth)
        if rate > highest:
            found, highest = n, rate
    return found


def counts(rungs: Sequence[Rung], n: int, num_rows: int) -> list[int]:
    """Return how many guesses of each row are among the first n."""
    taken = [0] * num_rows
    for rung in rungs[:n]:
        taken[rung.row] += 1
    return taken


@frozen
class _Guess:
    """What was guessed after so many tokens."""

    position: int
    token_ids: tuple[int, ...]
    grade: int


def _no_grade(_: SequenceId) -> int:
    return 0


@define(eq=False)
class Adaptive(Drafter):
    """A drafter that is asked for as many guesses as pay.

    Attributes:
        inner: the drafter.
        k: guesses for a sequence in a step, at most.
        is_cheap: its guesses cost next to nothing: it is always asked for k, and what does not pay is cut off after.
        grade: sequence -> how good the last guess for it is likely to be, as a small number; acceptance is measured by
            grade. All are of one grade by default.
    """

    inner: Drafter
    k: int
    is_cheap: bool = False
    grade: Callable[[SequenceId], int] = _no_grade
    acceptance: Acceptance = Factory(Acceptance)
    costs: CostCurve = Factory(CostCurve)
    figures: Figures = Factory(Figures)
    _guesses: dict[SequenceId, _Guess] = Factory(dict)
    _grades: dict[SequenceId, int] = Factory(dict)
    _deeper: deque[float] = Factory(lambda: deque(maxlen=9))
    _asked_depth: int = 0
    _last: tuple[int, int, int] = (0, 0, 0)  # rows, tokens, drafts of the step before
    _probing: Probing = field(init=False)
    _chosen: Mapping[str, Any] = Factory(dict)

    def __attrs_post_init__(self) -> None:
        self._probing = Probing(self.is_cheap)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return what the drafter takes."""
        return self.inner.num_bytes(layout)

    def start(self, target: Target) -> None:
        """Start the drafter."""
        self.inner.start(target)

    def enter(self, entered: Entered) -> None:
        """Tell the drafter. What was guessed before a preemption still counts."""
        self.inner.enter(entered)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return the guesses that pay."""
        for request in requests:
            self._settle(request)
        limits = [min(request.wanted, self.k) for request in requests]
        return self._cut(requests, limits) if self.is_cheap else self._ask(requests, limits)

    def _cut(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> list[Draft]:
        """Ask for all there is, and leave out what does not pay."""
        asked = [evolve(request, wanted=limit) for request, limit in zip(requests, limits, strict=True)]
        drafts = self.inner.propose(asked)
        lengths = [min(len(draft.token_ids), limit) for draft, limit in zip(drafts, limits, strict=True)]
        grades = [self.grade(request.sequence_id) for request in requests]
        taken = self._decide([r.sequence_id for r in requests], grades, lengths)
        for request, grade, draft in zip(requests, grades, drafts, strict=True):
            self._remember(request, grade, draft)
        return [_first(draft, n) for draft, n in zip(drafts, taken, strict=True)]

    def _ask(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> list[Draft]:
        """Ask for what pays alone."""
        grades = [self._grades.get(request.sequence_id, 0) for request in requests]
        taken = self._decide([r.sequence_id for r in requests], grades, limits)
        asked = [evolve(r, wanted=n) for r, n in zip(requests, taken, strict=True) if n]
        self._asked_depth = max(taken, default=0)
        found = iter(self.inner.propose(asked) if asked else ())
        drafts = [_first(next(found), n) if n else Draft() for n in taken]
        for request, draft in zip(requests, drafts, strict=True):
            self._grades[request.sequence_id] = grade = self.grade(request.sequence_id)
            self._remember(request, grade, draft)
        return drafts

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Take in what a step took. Only steps without parts of prompts say what verifying costs."""
        self.inner.observe(verified, cost)
        drafted, accepted = sum(one.drafted for one in verified), sum(one.accepted for one in verified)
        self.figures.add(verified, cost)
        self._last = cost.num_rows, cost.num_tokens, drafted
        if cost.num_tokens == cost.num_rows + drafted:
            row_s = self.costs.seconds(cost.num_rows) / cost.num_rows if self.costs.is_known else 0.0
            plain_s = row_s * (cost.num_rows + accepted)
            self._probing.observe(drafted, accepted, cost.target_s + cost.draft_s, plain_s)
            if self.costs.add(cost.num_tokens, cost.target_s):
                self._probing.trust(drafted)
        if drafted and self._asked_depth:
            self._deeper.append(cost.draft_s / self._asked_depth)

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop a sequence's guesses and experience."""
        self.inner.forget(sequence_id)
        self.acceptance.forget(sequence_id)
        self._guesses.pop(sequence_id, None)
        self._grades.pop(sequence_id, None)

    def stats(self) -> Mapping[str, Any]:
        """Return the drafter's figures, what was measured, and what the rule last made of it."""
        acceptance = {str(grade): round(self.acceptance.of_grade(grade), 4) for grade in self.acceptance.grades}
        return {
            **self.inner.stats(),
            **self.figures.plain(),
            "acceptance": acceptance,
            "step_s": {str(tokens): seconds for tokens, seconds in self.costs.measured().items()},
            "draft_s_a_guess": self._deeper_s,
            "probes": self._probing.num_probes,
            "patience": self._probing.patience,
            "chosen": dict(self._chosen),
        }

    def stop(self) -> None:
        """Stop the drafter."""
        self.inner.stop()

    # --- the rule and its exceptions --------------------------------------------------------------------------------

    def _decide(self, ids: Sequence[SequenceId], grades: Sequence[int], limits: Sequence[int]) -> list[int]:
        chances = [self.acceptance.chance(one, grade) for one, grade in zip(ids, grades, strict=True)]
        rungs = ladder(chances, limits)
        if not rungs:
            return [0] * len(ids)
        base = self._base(len(ids))
        rungs = rungs[: self._probing.bound(len(ids))]
        ruled = best(rungs, len(ids), lambda n, depth: self._step_s(base + n, depth))
        n = self._or_probe(rungs, len(ids), base, ruled)
        self._chosen = {
            "rows": len(ids),
            "base_tokens": base,
            "chance": [round(chance, 4) for chance in chances],
            "offered": sum(limits),
            "by_rule": ruled,
            "drafts": n,
        }
        return counts(rungs, n, len(ids))

    def _step_s(self, num_tokens: int, depth: int) -> float:
        return self.costs.seconds(num_tokens) + depth * self._deeper_s

    def _or_probe(self, rungs: Sequence[Rung], num_rows: int, base: int, ruled: int) -> int:
        """Return what the rule says, or another number where one was not tried for long."""
        if self._probing.is_plain_due(ruled) or not self.costs.is_known:
            return 0
        by_shape = best(rungs, num_rows, lambda n, _: assumed(base + n))
        n = min(len(rungs), max(by_shape, ruled + max(1, num_rows // 4, ruled // 2)))
        if n == ruled:
            return ruled
        depth, gain = max(rung.depth for rung in rungs[:n]), sum(rung.gain for rung in rungs[:n])
        plain_s = self.costs.seconds(base)
        loss_s = max(0.0, self._step_s(base + n, depth) - plain_s * (1 + gain / num_rows))
        return n if self._probing.is_due(ruled, rungs[0].gain, loss_s) else ruled

    def _base(self, num_rows: int) -> int:
        """The tokens of the next step without drafts, as far as the step before tells.

        Rows that want drafts run one each. Other rows, such as long prompts, run as much as they did.
        """
        rows, tokens, drafted = self._last
        return num_rows if rows <= num_rows else max(rows, tokens - drafted)

    @property
    def _deeper_s(self) -> float:
        return median(self._deeper) if self._deeper else 0.0

    # --- acceptance -------------------------------------------------------------------------------------------------

    def _remember(self, request: DraftRequest, grade: int, draft: Draft) -> None:
        if draft.token_ids:
            self._guesses[request.sequence_id] = _Guess(len(request.token_ids), draft.token_ids, grade)

    def _settle(self, request: DraftRequest) -> None:
        """Compare the last guess with what came: a draft is accepted as far as it equals it, however it is verified."""
        guess = self._guesses.pop(request.sequence_id, None)
        if guess is None:
            return
        came = request.token_ids[guess.position : guess.position + len(guess.token_ids)]
        right = next((i for i, pair in enumerate(zip(guess.token_ids, came, strict=False)) if pair[0] != pair[1]), None)
        if right is None:
            self.acceptance.learn(request.sequence_id, guess.grade, len(came), 0)
        else:
            self.acceptance.learn(request.sequence_id, guess.grade, right, 1)


@define(eq=False)
class Capped(Drafter):
    """A drafter that is always asked for k guesses."""

    inner: Drafter
    k: int
    figures: Figures = Factory(Figures)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return what the drafter takes."""
        return self.inner.num_bytes(layout)

    def start(self, target: Target) -> None:
        """Start the drafter."""
        self.inner.start(target)

    def enter(self, entered: Entered) -> None:
        """Tell the drafter."""
        self.inner.enter(entered)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Ask for as many as are wanted, and no more than k."""
        return self.inner.propose([evolve(request, wanted=min(request.wanted, self.k)) for request in requests])

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Count."""
        self.inner.observe(verified, cost)
        self.figures.add(verified, cost)

    def forget(self, sequence_id: SequenceId) -> None:
        """Tell the drafter."""
        self.inner.forget(sequence_id)

    def stats(self) -> Mapping[str, Any]:
        """Return the drafter's figures, and the counts."""
        return {**self.inner.stats(), **self.figures.plain()}

    def stop(self) -> None:
        """Stop the drafter."""
        self.inner.stop()


def controlled(
    drafter: Drafter,
    *,
    k: int,
    adaptive: bool,
    is_cheap: bool = False,
    grade: Callable[[SequenceId], int] = _no_grade,
) -> Drafter:
    """Return the drafter under control, or just capped at k guesses."""
    return Adaptive(drafter, k, is_cheap, grade) if adaptive else Capped(drafter, k)


def _first(draft: Draft, n: int) -> Draft:
    if n >= len(draft.token_ids):
        return draft
    probabilities = None if draft.probabilities is None else draft.probabilities[:n]
    return Draft(draft.token_ids[:n], probabilities)
