"""The local executor: a plan becomes a ForwardBatch, runs, and its tokens are chosen, in this process.

Shape legend: T tokens, R rows, L rows of logits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from attrs import define, evolve, field

from intarsia.choosing import TokenChoosing, build_choosing
from intarsia.protocols import ExecutorContext, Progress
from intarsia.stage import ModelStage, build_stage, forward_batch
from intarsia.types import BatchPlan, CacheLayout, CacheMove, Demand, Draft, ForwardBatch, Row, SequenceId, StepResult

__all__ = ["LocalExecutor", "build", "forward_batch"]


@define
class LocalExecutor:
    """Runs each step when it is submitted; one is in flight at most. To a drafter it is a `Target`."""

    context: ExecutorContext
    _stage: ModelStage = field(init=False)
    _choosing: TokenChoosing = field(init=False)
    _num_scratch: int = field(default=0, init=False)
    _done: deque[StepResult] = field(factory=deque, init=False)

    def __attrs_post_init__(self) -> None:
        self._stage, self._choosing = build_stage(self.context), build_choosing(self.context)

    @property
    def depth(self) -> int:
        """One: the step is over when `submit` returns."""
        return 1

    def start(self, progress: Progress) -> None:
        """Load weights, start the drafter, make the cache, and run one token through the model."""
        self._stage.load(progress)
        self._choosing.start(self)
        self._stage.allocate(self._num_scratch)
        self._warm_up()

    def _warm_up(self) -> None:
        """Run token 0 in the spare page: kernels are chosen and threads started before the first request comes."""
        spare = self.context.num_pages + self._num_scratch
        pages = tuple((spare,) for _ in self.context.layout.groups)
        row = Row(sequence_id=("", 0), token_ids=(0,), start=0, pages=pages)
        self.all_logits(row)

    def _run(
        self, rows: Sequence[Row], ids: Sequence[Sequence[int]], num_layers: int | None = None
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Run rows with these ids through the first layers, or all; return the batch and the residual stream (T, E)."""
        with self._marked("prepare"):
            batch = self._stage.batch(rows, ids)
        with self._marked("layers"):
            return batch, self._stage.run(batch, num_layers=num_layers)

    def _logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor | Sequence[int]) -> torch.Tensor:
        return self._stage.logits(hidden_TE, rows_L)

    @torch.inference_mode()
    def all_logits(self, row: Row) -> torch.Tensor:
        """Run a row and return the fp32 logits (T, V) of all its tokens, choosing nothing."""
        batch, hidden = self._run((row,), (row.token_ids,))
        return self._logits(hidden, torch.arange(len(row.token_ids), device=batch.ids_T.device))

    def _marked(self, name: str) -> AbstractContextManager[None]:
        """Mark what is done under this name as an NVTX range, where a config asks for that."""
        return torch.cuda.nvtx.range(name) if getattr(self.context.options, "nvtx", False) else nullcontext()

    @torch.inference_mode()
    def submit(self, plan: BatchPlan) -> None:
        """Run the step."""
        with self._marked(f"step: {len(plan.rows)} rows, {plan.num_tokens} tokens"):
            self._step(plan)

    def _step(self, plan: BatchPlan) -> None:
        assert not self._done, "one step is in flight at most"
        self._choosing.meet(plan)
        self._stage.move(plan.moves)
        begun = time.perf_counter()
        if not plan.rows:
            self._done.append(StepResult())
            return
        batch, hidden = self._run(plan.rows, [self._choosing.ids(row) for row in plan.rows])
        with self._marked("choose"):
            results = self._choosing.choose(plan.rows, batch.bounds, partial(self._demanded, hidden))
        result = self._choosing.finish(plan.rows, results, time.perf_counter() - begun)
        swapped, swap_s = self._stage.take_swapped()
        self._done.append(evolve(result, swapped=swapped, swap_s=swap_s))

    def _demanded(self, hidden_TE: torch.Tensor, demand: Demand) -> torch.Tensor:
        return self._logits(hidden_TE, demand.rows_L)

    # --- what a drafter may do ------------------------------------------------------------------------------------

    @property
    def layout(self) -> CacheLayout:
        """How the cache lies."""
        return self.context.layout

    def take_scratch(self, num_pages: int) -> tuple[int, ...]:
        """Return pages behind the pool."""
        assert not self._stage.is_allocated, "the cache is made already"
        first = self.context.num_pages + self._num_scratch
        self._num_scratch += num_pages
        return tuple(range(first, first + num_pages))

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], *, num_layers: int | None = None, moves: Sequence[CacheMove] = ()
    ) -> torch.Tensor:
        """Run rows through the first layers and the head; return fp32 logits (R, V) after their last tokens."""
        self._stage.move(moves)
        batch, hidden = self._run(rows, [row.token_ids for row in rows], num_layers)
        return self._logits(hidden, batch.logits_L)

    @torch.inference_mode()
    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row as the row's request would."""
        return self._choosing.guess(sequence_ids, drafts, logits_RV)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Fill the cache with NaN, for tests: what holds no token must not be read."""
        self._stage.fill(float("nan"))

    def collect(self) -> StepResult:
        """Return the step's results."""
        return self._done.popleft()

    def stop(self) -> None:
        """Drop weights, cache and what the drafter took."""
        self._choosing.stop()
        self._stage.stop()
        self._done.clear()


def build(context: ExecutorContext) -> LocalExecutor:
    """Make the executor; nothing is loaded yet."""
    return LocalExecutor(context)
