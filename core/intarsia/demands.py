"""Which logits a step asks for, known from its plan alone.

Where ranks share the vocabulary, all of them must take part whenever logits are gathered. So each works out the same
list from the plan, and no rank has to tell another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import define, field, frozen

from intarsia.protocols import ExecutorContext
from intarsia.sampling.settings import Settings
from intarsia.types import BatchPlan, Demand, Entered, Row, SamplingParams, SequenceId, Want

#: Rows of logits that are made at once to score a prompt: a long one's would not fit in memory.
SCORED_ROWS = 256


@frozen
class _Known:
    """What matters here of a sequence: whether its likeliest id is all that is needed, and how far it is scored."""

    is_plain: bool
    num_scored: int

    @classmethod
    def of(cls, entered: Entered, *, has_processors: bool) -> _Known:
        scores = entered.params.prompt_logprobs is not None and entered.sequence_id[1] == 0
        plain = not has_processors and is_plain(entered.params)
        return cls(plain, max(0, entered.num_prompt - 1) if scores else 0)


def is_plain(params: SamplingParams) -> bool:
    """Whether a request's tokens are the likeliest ids of the model's own logits, and nothing else is asked of these.

    Args:
        params: filled: none of its defaults is left open.
    """
    settings = Settings.of(params)
    changes = params.logit_bias or params.banned_token_ids or params.banned_words or params.min_tokens
    return settings.is_greedy and not settings.penalises and not changes and params.logprobs is None


@define
class LogitsDemands:
    """Keeps what it must know of the sequences that are running.

    Attributes:
        has_processors: whether the engine has logits processors, which may see any request's logits.
    """

    has_processors: bool
    _known: dict[SequenceId, _Known] = field(factory=dict, init=False)
    #: those of them whose prompts are scored
    _scored_ids: set[SequenceId] = field(factory=set, init=False)

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        for sequence_id in plan.left:
            self._known.pop(sequence_id, None)
            self._scored_ids.discard(sequence_id)
        for entered in plan.entered:
            known = _Known.of(entered, has_processors=self.has_processors)
            self._known[entered.sequence_id] = known
            if known.num_scored:
                self._scored_ids.add(entered.sequence_id)

    @property
    def scores_prompts(self) -> bool:
        """Whether a sequence is here whose prompt is scored: logits after tokens behind which none is chosen."""
        return bool(self._scored_ids)

    def of(self, rows: Sequence[Row], bounds: Sequence[int]) -> tuple[Demand, ...]:
        """Return the demands in their order: prompts that are scored, piece by piece, then tokens that are chosen.

        Args:
            rows: some of the plan's.
            bounds: where each begins among the tokens that run with them.
        """
        if not self.scores_prompts:  # as in most steps
            return (self._chosen(rows, bounds),)
        scored = (demand for index, row in enumerate(rows) for demand in self._scored(index, row, bounds[index]))
        return (*scored, self._chosen(rows, bounds))

    def _scored(self, index: int, row: Row, first: int) -> Iterator[Demand]:
        known = self._known.get(row.sequence_id)
        count = 0 if known is None else min(len(row.token_ids), max(0, known.num_scored - row.start))
        for begin in range(0, count, SCORED_ROWS):
            stop = min(begin + SCORED_ROWS, count)
            rows_L = tuple(range(first + begin, first + stop))
            yield Demand(rows_L=rows_L, plain_L=(False,) * len(rows_L), row=index, first=begin)

    def _chosen(self, rows: Sequence[Row], bounds: Sequence[int]) -> Demand:
        rows_L: list[int] = []
        plain_L: list[bool] = []
        for row, first in zip(rows, bounds, strict=False):
            if row.want is Want.LAST:
                last = first + len(row.token_ids)
                rows_L += range(last - row.num_drafts - 1, last)
                known = self._known.get(row.sequence_id)
                plain_L += [known is not None and known.is_plain] * (row.num_drafts + 1)
        return Demand(rows_L=tuple(rows_L), plain_L=tuple(plain_L))


def build_demands(context: ExecutorContext) -> LogitsDemands:
    """Make the books of an engine's demands."""
    return LogitsDemands(bool(context.logits_processors))
