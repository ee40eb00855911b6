"""One rank's part in each step: its microbatches through its layers, from the stage before to the stage after.

Shape legend: T tokens, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, field, frozen

from intarsia.protocols import Choosing, Demands, ExecutorContext, Stage
from intarsia.types import PENDING, BatchPlan, CacheLayout, Demand, Draft, Row, RowResult, SequenceId, StepResult
from intarsia_parallel.checks import not_whole
from intarsia_parallel.microbatches import Microbatch, cut, joined

if TYPE_CHECKING:
    from intarsia_parallel.collectives import TensorGroup
    from intarsia_parallel.edges import Inbound, Outbound


@define
class Clock:
    """Where a stage's time goes, in seconds, over all steps so far.

    Attributes:
        busy_s: computing, and beginning to send.
        waiting_s: for hidden states of the stage before.
        steps, microbatches: how many there were.
    """

    busy_s: float = 0.0
    waiting_s: float = 0.0
    steps: int = 0
    microbatches: int = 0

    def figures(self) -> dict[str, float]:
        """Return them as plain data."""
        return {
            "busy_s": self.busy_s,
            "waiting_s": self.waiting_s,
            "steps": self.steps,
            "microbatches": self.microbatches,
        }


@define(eq=False, kw_only=True)
class Pipeline:
    """Runs a rank's share of plans, in their order.

    Attributes:
        stage: its weights and cache.
        tensor: the ranks that share its layers.
        inbound, outbound: to the stages beside it; None at the ends.
        demands: which logits a step asks for; None before the last stage.
        choosing: where tokens are chosen; None on all ranks but one.
        num_microbatches: into how many a step is cut.
        cuts_rows: whether a row may be cut, too.
    """

    stage: Stage
    tensor: TensorGroup
    num_microbatches: int
    cuts_rows: bool
    inbound: Inbound | None = None
    outbound: Outbound | None = None
    demands: Demands | None = None
    choosing: Choosing | None = None
    clock: Clock = field(factory=Clock, init=False)

    @torch.inference_mode()
    def warm_up(self, layout: CacheLayout) -> None:
        """Run token 0 in page 0 through all stages: kernels are chosen, and what goes between stages is told."""
        pages = tuple((0,) for _ in layout.groups)
        row = Row(sequence_id=("", 0), token_ids=(0,), start=0, pages=pages)
        self._expect([Microbatch((row,))])
        batch = self.stage.batch((row,), (row.token_ids,))
        hidden = self.stage.run(batch, self._take())
        if self.outbound is not None:
            self.outbound.send(hidden)
            self.outbound.settle()
        elif self.demands is not None:
            demand = Demand(rows_L=(0,), plain_L=(False,))
            self.tensor.gather_logits(self.stage.logits(hidden, demand.rows_L), demand)

    @torch.inference_mode()
    def step(self, plan: BatchPlan) -> StepResult | None:
        """Run a plan; return its result where tokens are chosen, and None elsewhere."""
        for known in (self.choosing, self.demands):
            if known is not None:
                known.meet(plan)
        self.stage.move(plan.moves)
        begun = time.perf_counter()
        if not plan.rows:
            return None
        batches = cut(plan.rows, self.num_microbatches, cuts_rows=self.cuts_rows)
        self._expect(batches)
        results: list[RowResult] = []
        for batch in batches:
            results += self._run(batch)
        if self.outbound is not None:
            self.outbound.settle()
        self.clock.steps += 1
        self.clock.microbatches += len(batches)
        swapped, swap_s = self.stage.take_swapped()
        if self.choosing is None:
            return None
        result = self.choosing.finish(plan.rows, joined(plan.rows, results), time.perf_counter() - begun)
        return evolve(result, swapped=swapped, swap_s=swap_s)

    def _run(self, microbatch: Microbatch) -> list[RowResult]:
        """Run one microbatch; return what was chosen for its rows, where tokens are chosen."""
        asked = time.perf_counter()
        hidden = self._take()
        begun = time.perf_counter()
        rows = microbatch.rows
        batch = self.stage.batch(rows, [self._ids(row) for row in rows])
        hidden = self.stage.run(batch, hidden)
        results: list[RowResult] = []
        if self.outbound is not None:
            self.outbound.send(hidden)
        else:
            results = self._choose(rows, batch.bounds, hidden)
        self.clock.waiting_s += begun - asked
        self.clock.busy_s += time.perf_counter() - begun
        return results

    def _choose(self, rows: Sequence[Row], bounds: Sequence[int], hidden_TE: torch.Tensor) -> list[RowResult]:
        """Choose, or take part in gathering the logits that another rank chooses from."""

        def logits_of(demand: Demand) -> Any:
            return self.tensor.gather_logits(self.stage.logits(hidden_TE, demand.rows_L), demand)

        if self.choosing is not None:
            return list(self.choosing.choose(rows, bounds, logits_of))
        assert self.demands is not None, "the last stage knows which logits are asked for"
        for demand in self.demands.of(rows, bounds):
            logits_of(demand)
        return []

    def _ids(self, row: Row) -> Sequence[int]:
        if self.choosing is not None:
            return self.choosing.ids(row)
        assert PENDING not in row.token_ids, "only the rank that chooses knows what the step in flight chose"
        return row.token_ids

    def _expect(self, batches: Sequence[Microbatch]) -> None:
        if self.inbound is not None:
            sharded = self.tensor.size if self.tensor.sequence else 1
            self.inbound.expect([-(-batch.num_tokens // sharded) for batch in batches])

    def _take(self) -> torch.Tensor | None:
        return None if self.inbound is None else self.inbound.take()

    def figures(self) -> dict[str, Any]:
        """Return where this rank's time went, and what it sent to others, as plain data."""
        sent = 0 if self.outbound is None else self.outbound.num_bytes
        return {**self.clock.figures(), "sent_bytes": sent, "traffic": self.tensor.traffic.figures()}

    def stop(self) -> None:
        """Free what was taken."""
        if self.choosing is not None:
            self.choosing.stop()
        self.stage.stop()


@frozen(eq=False)
class SharedTarget:
    """What a drafter sees of a model that several ranks hold: it may choose as the target does, and run none of it."""

    context: ExecutorContext
    choosing: Choosing

    @property
    def layout(self) -> CacheLayout:
        """How this rank's cache lies."""
        return self.context.layout

    def take_scratch(self, num_pages: int) -> tuple[int, ...]:
        """Refuse: no rank has the whole model."""
        del num_pages
        raise not_whole("the drafter")

    def forward(self, rows: Sequence[Row], **_: Any) -> torch.Tensor:
        """Refuse: no rank has the whole model."""
        del rows
        raise not_whole("the drafter")

    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row as the row's request would."""
        return self.choosing.guess(sequence_ids, drafts, logits_RV)
