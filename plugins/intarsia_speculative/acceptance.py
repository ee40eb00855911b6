"""How likely a guess is right: measured by the quality of the guess over all requests, and by request."""

from __future__ import annotations

from attrs import Factory, define

from intarsia.types import SequenceId

#: Trials that a grade's, and a request's, experience reaches back to.
GRADE_MEMORY = 200.0
REQUEST_MEMORY = 24.0
#: Trials that the prior weighs: one half for a grade, the grade's rate for a request.
GRADE_PRIOR = 2.0
REQUEST_PRIOR = 3.0


@define
class Rate:
    """A success rate that forgets exponentially: after n trials an old one weighs (1 - 1 / memory) ** n."""

    memory: float
    right: float = 0.0
    trials: float = 0.0

    def add(self, right: int, wrong: int) -> None:
        """Take trials in: the right ones came first."""
        keep = 1 - 1 / self.memory
        for outcome in (1.0,) * right + (0.0,) * wrong:
            self.right = self.right * keep + outcome
            self.trials = self.trials * keep + 1

    def toward(self, prior: float, weight: float) -> float:
        """Return the rate, drawn toward a prior that weighs as much as `weight` trials."""
        return (self.right + prior * weight) / (self.trials + weight)


@define
class Acceptance:
    """The chance that a guess is right, given that all before it in its draft are.

    A draft of k ids is up to k trials: the right ones, and the first wrong one. A drafter may tell grades of guesses
    apart, such as by the length of a match. With r right ones of t trials, forgotten exponentially::

        a_grade   = (r_grade   + 0.5     * GRADE_PRIOR)   / (t_grade   + GRADE_PRIOR)
        a_request = (r_request + a_grade * REQUEST_PRIOR) / (t_request + REQUEST_PRIOR)
    """

    _grades: dict[int, Rate] = Factory(dict)
    _requests: dict[SequenceId, Rate] = Factory(dict)

    def learn(self, sequence_id: SequenceId, grade: int, right: int, wrong: int) -> None:
        """Take in what became of a draft: so many right, then none or one wrong."""
        self._grades.setdefault(grade, Rate(GRADE_MEMORY)).add(right, wrong)
        self._requests.setdefault(sequence_id, Rate(REQUEST_MEMORY)).add(right, wrong)

    def chance(self, sequence_id: SequenceId, grade: int) -> float:
        """Return a_request, between 0 and 1."""
        request = self._requests.get(sequence_id, Rate(REQUEST_MEMORY))
        return request.toward(self.of_grade(grade), REQUEST_PRIOR)

    def of_grade(self, grade: int) -> float:
        """Return a_grade."""
        return self._grades.get(grade, Rate(GRADE_MEMORY)).toward(0.5, GRADE_PRIOR)

    @property
    def grades(self) -> tuple[int, ...]:
        """Grades that guesses have had."""
        return tuple(sorted(self._grades))

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop a request's own rate."""
        self._requests.pop(sequence_id, None)
