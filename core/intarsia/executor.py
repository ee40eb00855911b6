"""The local executor: a plan becomes a ForwardBatch, runs, and its tokens are chosen, in this process.

On a GPU two steps can be in flight. `submit` launches a step and returns; the host plans the next one, and accepts what
the step before brought, while the device runs. Where the device alone can choose a step's tokens (greedy rows, and with
a kernel of the op `sample_rows` those that are drawn, of which nothing else is asked: see
`intarsia.sampling.on_device`), the next step takes their ids where they are, and is launched without waiting. Where it
cannot, the host chooses them when it collects the step or launches the next one, which needs the ids.

Shape legend: T tokens, R rows, L rows of logits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch
from attrs import define, evolve, field

from intarsia.choosing import TokenChoosing, build_choosing
from intarsia.protocols import Drafter, ExecutorContext, Progress, Selection
from intarsia.sampling import Picked, to_device
from intarsia.stage import ModelStage, build_stage, forward_batch
from intarsia.types import (
    PENDING,
    BatchPlan,
    CacheLayout,
    CacheMove,
    Demand,
    Draft,
    Entered,
    ForwardBatch,
    Row,
    RowResult,
    SequenceId,
    StepResult,
)

__all__ = ["LocalExecutor", "build", "forward_batch"]

#: Does nothing around a block. It has no state, and is made once.
_NOTHING: Final = nullcontext()


@define(eq=False)
class _Step:
    """A step that was launched. What the device reads is kept until it is over.

    Attributes:
        begun: when it was launched.
        batch, hidden_TE: what ran.
        picked: what the device chose; None where the host does.
        over: comes when the device is done with it; None where that is so by the time tokens are chosen.
        result: once it is settled.
    """

    plan: BatchPlan
    begun: float
    batch: ForwardBatch | None = None
    hidden_TE: torch.Tensor | None = None
    picked: Picked | None = None
    over: torch.cuda.Event | None = None
    result: StepResult | None = None


@define
class LocalExecutor:
    """Runs steps in their order. To a drafter it is a `Target`.

    Attributes:
        depth: as the option says. At 1 a step is over when `submit` returns.
    """

    context: ExecutorContext
    depth: int = field(init=False)
    _stage: ModelStage = field(init=False)
    _choosing: TokenChoosing = field(init=False)
    _num_scratch: int = field(default=0, init=False)
    _steps: deque[_Step] = field(factory=deque, init=False)
    _beside: torch.cuda.Stream | None = field(default=None, init=False)
    _settled: float = field(default=0.0, init=False)
    _is_cuda: bool = field(init=False)
    #: whether steps and their phases are marked as NVTX ranges
    _marks: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        options = self.context.options
        self._is_cuda = self.context.engine.device.startswith("cuda")
        self.depth = getattr(options, "depth", None) or (2 if self._is_cuda else 1)
        self._marks = getattr(options, "nvtx", False)
        self._stage, self._choosing = build_stage(self.context), build_choosing(self.context)

    @property
    def resolves_pending(self) -> bool:
        """Ids are taken where they are: on the device, or from what is known of their sequence."""
        return True

    def start(self, progress: Progress) -> None:
        """Load weights, start the drafter, make the cache, and run one token through the model."""
        self._stage.load(progress)
        self._choosing.start(self)
        self._stage.allocate(self._num_scratch)
        if self.depth > 1 and self._is_cuda:
            self._beside = torch.cuda.Stream(self._stage.device)  # type: ignore[no-untyped-call]
        self._warm_up()

    def _warm_up(self) -> None:
        """Run token 0 in the spare page: kernels are chosen and threads started before the first request comes."""
        spare = self.context.num_pages + self._num_scratch
        pages = tuple((spare,) for _ in self.context.layout.groups)
        row = Row(sequence_id=("", 0), token_ids=(0,), start=0, pages=pages)
        self.all_logits(row)

    def _run(
        self,
        rows: Sequence[Row],
        ids: Sequence[Sequence[int]],
        num_layers: int | None = None,
        beside: AbstractContextManager[None] = _NOTHING,
        *,
        reads_all: bool = True,
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Run rows with these ids through the first layers, or all; return the batch and the residual stream (T, E)."""
        with self._marked("prepare"), beside:
            batch = self._stage.batch(rows, ids, reads_all=reads_all)
        batch = self._with_pending(batch, rows)
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
        return torch.cuda.nvtx.range(name) if self._marks else _NOTHING

    def _marked_step(self, plan: BatchPlan) -> AbstractContextManager[None]:
        """Mark a step likewise."""
        return self._marked(f"step: {len(plan.rows)} rows, {plan.num_tokens} tokens") if self._marks else _NOTHING

    @torch.inference_mode()
    def submit(self, plan: BatchPlan) -> None:
        """Launch the step; at a depth of 1, run it."""
        assert len(self._steps) < self.depth, "more steps in flight than `depth`"
        with self._marked_step(plan):
            if self._steps and self._steps[-1].picked is None:
                self._settle(self._steps[-1])
            step = self._launch(plan)
            self._steps.append(step)
            if self.depth == 1:
                self._settle(step)

    def _launch(self, plan: BatchPlan) -> _Step:
        self._choosing.meet(plan)
        self._stage.move(plan.moves)
        step = _Step(plan, time.perf_counter())
        if not plan.rows:
            return step
        ids = [self._choosing.ids(row) for row in plan.rows]
        beside = _NOTHING if self._beside is None else self._aside(self._beside)
        scores = self._choosing.scores_prompts
        step.batch, step.hidden_TE = self._run(plan.rows, ids, beside=beside, reads_all=scores)
        if self.depth > 1:
            if self._choosing.can_pick(plan.rows):
                with self._marked("choose"):
                    step.picked = self._choosing.pick(plan.rows, self._logits(step.hidden_TE, step.batch.logits_L))
            if self._beside is not None:
                step.over = torch.cuda.Event()  # type: ignore[no-untyped-call]
                step.over.record(torch.cuda.current_stream(self._stage.device))
        return step

    @contextmanager
    def _aside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Lay a batch out on a stream of its own: what comes from the host then does not wait for the step in flight.

        Its memory is that stream's, and is used on the other: it is kept until the step is over.
        """
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self._stage.device).wait_stream(stream)

    def _with_pending(self, batch: ForwardBatch, rows: Sequence[Row]) -> ForwardBatch:
        """Return the batch with the ids that the step in flight chose, where they are on the device still."""
        picked = self._steps[-1].picked if self._steps else None
        if picked is None or self._steps[-1].result is not None:
            return batch
        # Of two steps the second names one id a sequence, and drafts do not follow it.
        pending = [
            (row, stop - 1) for row, stop in zip(rows, batch.bounds[1:], strict=True) if row.token_ids[-1] == PENDING
        ]
        if not pending:
            return batch
        places = to_device(torch.tensor([place for _, place in pending], dtype=torch.int64), batch.ids_T.device)
        ids = picked.pending([row.sequence_id for row, _ in pending])
        return evolve(batch, ids_T=batch.ids_T.index_copy(0, places, ids))

    def _settle(self, step: _Step) -> None:
        """Choose the step's tokens, or read what the device chose; wait for it. Steps before it come first."""
        for each in self._steps:
            if each.result is None:
                each.result = self._result(each)
                each.batch = each.hidden_TE = None
            if each is step:
                return

    def _result(self, step: _Step) -> StepResult:
        if step.batch is None:
            return StepResult()
        rows = step.plan.rows
        with self._marked("choose" if step.picked is None else "read"):
            if step.picked is None:
                assert step.hidden_TE is not None
                results = self._choose(rows, step.batch, step.hidden_TE)
            if step.over is not None:
                step.over.synchronize()
            if step.picked is not None:
                results = step.picked.settle(rows)
        since, self._settled = max(step.begun, self._settled), time.perf_counter()
        result = self._choosing.finish(rows, results, self._settled - since)
        swapped, swap_s = self._stage.take_swapped()
        return evolve(result, swapped=swapped, swap_s=swap_s) if swapped else result

    def _choose(self, rows: Sequence[Row], batch: ForwardBatch, hidden_TE: torch.Tensor) -> Sequence[RowResult]:
        """Choose the tokens of rows that ran, from their likeliest ids where these are found and all that is needed."""
        if not (self._stage.finds_likeliest and self._choosing.are_plain(rows)):
            return self._choosing.choose(rows, batch.bounds, partial(self._demanded, hidden_TE))
        if not len(batch.logits_L):
            return self._choosing.take(rows, (), ())
        ids_L, best_L = self._stage.likeliest(hidden_TE, batch.logits_L)
        return self._choosing.take(rows, ids_L.tolist(), best_L.tolist())

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
        batch, hidden = self._run(rows, [row.token_ids for row in rows], num_layers, reads_all=False)
        return self._logits(hidden, batch.logits_L)

    @torch.inference_mode()
    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row as the row's request would."""
        return self._choosing.guess(sequence_ids, drafts, logits_RV)

    # --- the rest ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def replace_drafter(
        self, drafter: Drafter | None, entered: Sequence[Entered], owner: Selection | None = None
    ) -> None:
        """Draft by another from here on, or not at all."""
        assert not self._steps, "a step is in flight"
        self._choosing.replace_drafter(drafter, self, entered, owner)

    def poison(self) -> None:
        """Fill the cache with NaN, for tests: what holds no token must not be read."""
        self._stage.fill(float("nan"))

    def collect(self) -> StepResult:
        """Return the oldest step's results."""
        step = self._steps[0]
        if step.result is None:
            with torch.inference_mode():
                self._settle(step)
        self._steps.popleft()
        assert step.result is not None
        return step.result

    def stop(self) -> None:
        """Drop weights, cache and what the drafter took."""
        self._choosing.stop()
        self._stage.stop()
        self._steps.clear()


def build(context: ExecutorContext) -> LocalExecutor:
    """Make the executor; nothing is loaded yet."""
    return LocalExecutor(context)
