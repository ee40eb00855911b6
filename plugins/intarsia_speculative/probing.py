"""When to do other than the rule says, so that costs and acceptance stay known."""

from __future__ import annotations

from attrs import define

#: Steps with drafts, after which one runs without.
PLAIN_EVERY = 48
#: Steps from a probe to the next.
PATIENCE_MIN, PATIENCE_MAX = 16, 512
#: The part of all time that probes may lose.
BUDGET = 0.01
#: The drafts of the first step that has any.
FIRST = 2
#: Chances below which a probe of a cheap drafter is not worth its time, and a right guess is a surprise.
HOPELESS, SURPRISE = 0.15, 0.5


@define
class Probing:
    """Exceptions from the rule of `control`.

    **Slow start.** No step verifies more than twice as many drafts as any step before it whose cost is trusted, from
    `FIRST` or a fourth of the rows on: costs that were assumed too low are found out by a small step.

    **Plain steps.** Every `PLAIN_EVERY` steps with drafts, one runs without: what that costs must stay known.

    **Probes.** After `patience` steps a step verifies more than the rule says. Patience doubles with each probe up to
    `PATIENCE_MAX`, and begins anew when the rule comes to ask for more. What probes lose is a part `BUDGET` of all time
    at most: the seconds that they took, less those in which their tokens would have come without drafts. Where little
    was hoped for and a guess was right all the same, the next step may be a probe again.

    Acceptance costs nothing to measure with cheap drafters: there is no probe where it is hardly ever right.
    """

    is_cheap: bool
    num_probes: int = 0
    patience: int = PATIENCE_MIN
    _since_plain: int = 0
    _since_probe: int = 0
    _ruled: int = 0
    _most: int = 0
    _is_probe: bool = False
    _is_doubtful: bool = False
    _elapsed_s: float = 0.0
    _lost_s: float = 0.0

    def bound(self, num_rows: int) -> int:
        """Return how many drafts the next step may verify."""
        return max(FIRST, num_rows // 4, 2 * self._most)

    def trust(self, drafted: int) -> None:
        """Hear that the cost of a step with so many drafts is known."""
        self._most = max(self._most, drafted)

    def observe(self, drafted: int, accepted: int, seconds: float, plain_s: float) -> None:
        """Hear of a step.

        Args:
            drafted: drafts that it verified.
            accepted: how many of them were right.
            seconds: that it took, drafting included.
            plain_s: in which its tokens would have come without drafts.
        """
        self._elapsed_s += seconds
        if not drafted:
            self._since_plain = 0
        elif self._is_probe:
            self._lost_s += max(0.0, seconds - plain_s)
            if accepted and self._is_doubtful:
                self._since_probe, self.patience = PATIENCE_MAX, PATIENCE_MIN
        self._is_probe = False

    def is_plain_due(self, ruled: int) -> bool:
        """Whether the next step is to run without drafts, though the rule wants so many."""
        self._since_plain += 1
        self._since_probe += 1
        if ruled > self._ruled:
            self.patience, self._ruled = PATIENCE_MIN, ruled
        return bool(ruled) and self._since_plain > PLAIN_EVERY

    def is_due(self, ruled: int, chance: float, loss_s: float) -> bool:
        """Whether the next step is to be a probe.

        Args:
            ruled: the drafts that the rule wants.
            chance: that the best guess is right.
            loss_s: seconds that the probe is thought to lose.
        """
        if self._since_probe < self.patience or (self.is_cheap and chance < HOPELESS):
            return False
        if self._lost_s + loss_s > BUDGET * self._elapsed_s:
            return False
        self._since_probe, self.patience = 0, min(2 * self.patience, PATIENCE_MAX)
        self.num_probes += 1
        self._ruled = ruled
        self._is_probe, self._is_doubtful = True, not self.is_cheap and chance < SURPRISE
        return True
