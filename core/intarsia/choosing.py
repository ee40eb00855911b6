"""Choosing a step's tokens where its logits are: sampler and drafter behind one face, whoever runs the model.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from attrs import define, evolve, field

from intarsia.demands import LogitsDemands, build_demands
from intarsia.drafting import Drafting
from intarsia.processing import logits_processors
from intarsia.protocols import Drafter, ExecutorContext, Selection, Target
from intarsia.sampling import Draw, Picked, Sampler, SampleRows, draw, draw_by
from intarsia.times import Times
from intarsia.types import (
    PENDING,
    BatchPlan,
    Demand,
    Draft,
    Entered,
    Row,
    RowResult,
    SequenceId,
    StepResult,
    TokenLogprobs,
    Verify,
)

#: What the sampler is called where its seconds are counted.
SAMPLER: Final = "core.sampler"


@define
class TokenChoosing:
    """What `intarsia.protocols.Choosing` asks for."""

    _sampler: Sampler
    _drafting: Drafting | None
    _demands: LogitsDemands = field()
    _sample_rows: SampleRows | None = None
    _times: Times = field(factory=Times)

    def start(self, target: Target) -> None:
        """Let the drafter get ready: the weights are loaded, the cache is not made yet."""
        if self._drafting is not None:
            self._drafting.start(target)

    def stop(self) -> None:
        """Let the drafter free what it took."""
        if self._drafting is not None:
            self._drafting.stop()

    def replace_drafter(
        self, drafter: Drafter | None, target: Target, entered: Sequence[Entered], owner: Selection | None
    ) -> None:
        """Draft by another from here on; where it cannot start, go on with the one before."""
        sampler = self._sampler
        drafting = None if drafter is None else _drafting(drafter, sampler.num_ids, sampler.verify, self._times, owner)
        if drafting is not None:
            try:
                drafting.start(target)
            except BaseException:
                drafting.stop()
                raise
            for each in entered:
                drafting.enter(each)
        self.stop()
        self._drafting = drafting

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        self._demands.meet(plan)
        for sequence_id in plan.left:
            self._sampler.leave(sequence_id)
            if self._drafting is not None:
                self._drafting.forget(sequence_id)
        for entered in plan.entered:
            with self._times.at(SAMPLER):
                self._sampler.enter(entered)
            if self._drafting is not None:
                self._drafting.enter(entered)

    @property
    def scores_prompts(self) -> bool:
        """Whether more logits may be asked for than those of tokens after which one is chosen."""
        return self._demands.scores_prompts

    def ids(self, row: Row) -> Sequence[int]:
        """Return a row's ids; those that the step before chose are known here by now, unless it chose on the device.

        Where nothing was chosen, as its row failed, there is 0: the row is void.
        """
        if PENDING not in row.token_ids:
            return row.token_ids
        known = self._sampler.token_ids(row.sequence_id)
        known = [*known[row.start : row.start + len(row.token_ids)], *(0,) * len(row.token_ids)]
        return [known[i] if token == PENDING else token for i, token in enumerate(row.token_ids)]

    def can_pick(self, rows: Sequence[Row]) -> bool:
        """Whether the device alone can choose for these rows."""
        return self._drafting is None and self._sampler.can_pick(rows, draws=self._sample_rows is not None)

    def pick(self, rows: Sequence[Row], logits_LV: torch.Tensor) -> Picked:
        """Choose on the device, in the place of `choose`, and wait for nothing."""
        with self._times.at(SAMPLER):
            return self._sampler.pick(rows, logits_LV, self._sample_rows)

    def choose(
        self, rows: Sequence[Row], bounds: Sequence[int], logits_of: Callable[[Demand], torch.Tensor]
    ) -> list[RowResult]:
        """Score prompts and choose tokens; `logits_of` is called for each demand, in their order."""
        *scored, chosen = self._demands.of(rows, bounds)
        scores: list[list[TokenLogprobs]] = [[] for _ in rows]
        failed = set()
        # Before tokens are chosen, which adds them to what the sampler knows.
        for demand in scored:
            assert demand.row is not None
            logits = logits_of(demand)
            if demand.row in failed:
                continue
            span = range(demand.first, demand.first + len(demand.rows_L))
            with self._times.at(SAMPLER):
                found = self._sampler.score(rows[demand.row], span, logits)
            scores[demand.row] += found
            if not found:
                failed.add(demand.row)
        given = self._drafting.probabilities(rows) if self._drafting is not None else {}
        logits = logits_of(chosen)
        with self._times.at(SAMPLER):
            results = self._sampler.choose(rows, logits, given)
        if not scored:
            return results
        return [
            _with_scores(result, None if index in failed else tuple(scores[index]))
            for index, result in enumerate(results)
        ]

    def are_plain(self, rows: Sequence[Row]) -> bool:
        """Whether the likeliest ids are all that choosing for these rows takes."""
        return self._sampler.are_plain(rows)

    def take(self, rows: Sequence[Row], token_ids: Sequence[int], best: Sequence[float]) -> list[RowResult]:
        """Choose for such rows, in the place of `choose`, from their likeliest ids and these ids' logits."""
        with self._times.at(SAMPLER):
            return self._sampler.take(rows, token_ids, best)

    def finish(self, rows: Sequence[Row], results: Sequence[RowResult], target_s: float) -> StepResult:
        """Let the drafter learn from the step and propose for the next; return the whole step's result."""
        drafting = self._drafting
        if drafting is None:
            return StepResult(rows=tuple(results), target_s=target_s, spent=self._times.take())
        drafting.observe(rows, results, target_s)
        proposed = drafting.propose(rows, results, self._sampler.token_ids)
        return StepResult(
            rows=tuple(proposed),
            target_s=target_s,
            draft_s=drafting.draft_s,
            draft_error=drafting.take_error(),
            spent=self._times.take(),
        )

    def guess(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row as the row's request would; see `Target.choose`."""
        return self._sampler.guess(sequence_ids, drafts, logits_RV)


def _with_scores(result: RowResult, scores: tuple[TokenLogprobs, ...] | None) -> RowResult:
    if scores is None:
        return evolve(result, error=result.error or "prompt_logprobs: the logits are not finite")
    return evolve(result, prompt_logprobs=scores) if scores else result


def _drafting(drafter: Drafter, num_ids: int, verify: Verify, times: Times, owner: Selection | None = None) -> Drafting:
    title, name = (f"drafter {type(drafter).__name__}", "drafter") if owner is None else (owner.title, owner.name)
    return Drafting(drafter, num_ids, verify == "rejection", title, name, times)


def _draw(context: ExecutorContext) -> Draw:
    """Return how tokens are drawn: by a kernel where one was chosen for it."""
    sample_rows = context.ops.sample_rows
    return draw if sample_rows is None else partial(draw_by, sample_rows)


def build_choosing(context: ExecutorContext) -> TokenChoosing:
    """Make the sampler, and what deals with the drafter where there is one."""
    verify, drafter = context.engine.verify, context.drafter
    owner = next((selection for selection in context.selections if selection.slot == "drafter"), None)
    return TokenChoosing(
        Sampler(context.num_ids, logits_processors(context), context.tokenizer, verify, _draw(context)),
        None if drafter is None else _drafting(drafter, context.num_ids, verify, context.times, owner),
        build_demands(context),
        context.ops.sample_rows,
        context.times,
    )
