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

from intarsia.drafting import Drafting
from intarsia.models.cache import TensorCache
from intarsia.models.weights import load_weights
from intarsia.protocols import CacheStorage, ExecutorContext, PreparingRunner, Progress, Runner
from intarsia.sampling import Sampler
from intarsia.types import (
    PENDING,
    BatchPlan,
    CacheLayout,
    CacheMove,
    Draft,
    ForwardBatch,
    Row,
    RowResult,
    SequenceId,
    StepResult,
    TokenLogprobs,
    Want,
)


def forward_batch(
    rows: Sequence[Row], ids: Sequence[Sequence[int]], layout: CacheLayout, device: torch.device
) -> ForwardBatch:
    """Lay the rows of a plan end to end as tensors.

    Args:
        rows: the plan's.
        ids: their token ids, none of them pending.
        layout: gives the page size, and how many groups of page tables a row has.
        device: where the tensors go.
    """
    bounds = [0]
    positions: list[int] = []
    wanted: list[int] = []
    slots: list[list[int]] = [[] for _ in layout.groups]
    size = layout.page_size
    for row, row_ids in zip(rows, ids, strict=True):
        span = range(row.start, row.start + len(row_ids))
        positions += span
        for group, pages in zip(slots, row.pages, strict=True):
            group += [pages[position // size] * size + position % size for position in span]
        bounds.append(bounds[-1] + len(row_ids))
        if row.want is Want.LAST:
            wanted += range(bounds[-1] - row.num_drafts - 1, bounds[-1])

    def tensor(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ForwardBatch(
        ids_T=tensor([token for row_ids in ids for token in row_ids]),
        positions_T=tensor(positions),
        slots_T=tuple(tensor(group) for group in slots),
        bounds=tuple(bounds),
        starts=tuple(row.start for row in rows),
        pages=tuple(tuple(row.pages[g] for row in rows) for g in range(len(layout.groups))),
        logits_L=tensor(wanted),
    )


#: Rows of logits that are made at once to score a prompt: a long one's would not fit in memory.
_SCORED_ROWS = 256


@define
class LocalExecutor:
    """Runs each step when it is submitted; one is in flight at most. To a drafter it is a `Target`."""

    context: ExecutorContext
    _sampler: Sampler = field(init=False)
    _drafting: Drafting | None = field(init=False)
    _num_scratch: int = field(default=0, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _cache: CacheStorage | None = field(default=None, init=False)
    _done: deque[StepResult] = field(factory=deque, init=False)

    def __attrs_post_init__(self) -> None:
        context = self.context
        verify = context.engine.verify
        self._sampler = Sampler(context.num_ids, context.logits_processors, context.tokenizer, verify)
        drafter = context.drafter
        self._drafting = None if drafter is None else Drafting(drafter, context.num_ids, verify == "rejection")

    @property
    def depth(self) -> int:
        """One: the step is over when `submit` returns."""
        return 1

    def start(self, progress: Progress) -> None:
        """Load weights, start the drafter, make the cache, and run one token through the model."""
        context = self.context
        engine, device = context.engine, self._device
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        weights = load_weights(
            context.checkpoint,
            context.weight_map,
            dtype=getattr(torch, engine.dtype),
            device=device,
            quantizers=context.quantizers,
            ops=context.ops,
            progress=progress,
        )
        self._runner = context.build_runner(weights)
        if self._drafting is not None:
            self._drafting.start(self)
        make = context.make_storage or partial(TensorCache.allocate, context.layout)
        self._cache = make(self._num_pages, device)
        self._warm_up()

    @property
    def _num_pages(self) -> int:
        """Pages that sequences or the drafter can hold. The spare one stands behind them."""
        return self.context.num_pages + self._num_scratch

    @property
    def _device(self) -> torch.device:
        return torch.device(self.context.engine.device)

    def _warm_up(self) -> None:
        """Run token 0 in the spare page: kernels are chosen and threads started before the first request comes."""
        pages = tuple((self._num_pages,) for _ in self.context.layout.groups)
        row = Row(sequence_id=("", 0), token_ids=(0,), start=0, pages=pages)
        self.all_logits(row)

    def _run(
        self, rows: Sequence[Row], ids: Sequence[Sequence[int]], num_layers: int | None = None
    ) -> tuple[ForwardBatch, torch.Tensor]:
        """Run rows with these ids through the first layers, or all; return the batch and the residual stream (T, E)."""
        assert self._runner is not None and self._cache is not None, "start() comes first"
        context = self.context
        with self._marked("prepare"):
            batch = forward_batch(rows, ids, context.layout, self._device)
            preparing = self._runner if isinstance(self._runner, PreparingRunner) else context.attention
            batch = evolve(batch, attention=preparing.prepare(batch, context.layout))
        with self._marked("layers"):
            return batch, self._runner.run(batch, self._cache, range(num_layers or context.spec.num_layers))

    def _logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        assert self._runner is not None, "start() comes first"
        return self._runner.logits(hidden_TE, rows_L)

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
        assert self._cache is not None, "start() comes first"
        self._meet(plan)
        begun = time.perf_counter()
        self._cache.move(plan.moves)
        if not plan.rows:
            self._done.append(StepResult())
            return
        batch, hidden = self._run(plan.rows, [self._ids(row) for row in plan.rows])
        # Before tokens are chosen, which adds them to what the sampler knows.
        scores = [self._score(row, first, hidden) for row, first in zip(plan.rows, batch.bounds, strict=False)]
        given = self._drafting.probabilities(plan.rows) if self._drafting is not None else {}
        with self._marked("choose"):
            results = self._sampler.choose(plan.rows, self._logits(hidden, batch.logits_L), given)
        scored = [_with_scores(result, found) for result, found in zip(results, scores, strict=True)]
        self._done.append(self._finish(plan.rows, scored, time.perf_counter() - begun))

    def _meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        drafting = self._drafting
        for sequence_id in plan.left:
            self._sampler.leave(sequence_id)
            if drafting is not None:
                drafting.forget(sequence_id)
        for entered in plan.entered:
            self._sampler.enter(entered)
            if drafting is not None:
                drafting.enter(entered)

    def _finish(self, rows: Sequence[Row], results: Sequence[RowResult], target_s: float) -> StepResult:
        """Let the drafter learn from the step and propose for the next."""
        drafting = self._drafting
        if drafting is None:
            return StepResult(rows=tuple(results), target_s=target_s)
        drafting.observe(rows, results, target_s)
        proposed = drafting.propose(rows, results, self._sampler.token_ids)
        return StepResult(
            rows=tuple(proposed), target_s=target_s, draft_s=drafting.draft_s, draft_error=drafting.take_error()
        )

    def _score(self, row: Row, first: int, hidden_TE: torch.Tensor) -> tuple[TokenLogprobs, ...] | None:
        """Score the prompt's tokens that follow a row's, whose own begin at `first` in the batch; None if it fails."""
        indices = self._sampler.scored(row)
        entries: list[TokenLogprobs] = []
        for begin in range(indices.start, indices.stop, _SCORED_ROWS):
            piece = range(begin, min(begin + _SCORED_ROWS, indices.stop))
            rows_L = torch.arange(first + piece.start, first + piece.stop, device=hidden_TE.device)
            found = self._sampler.score(row, piece, self._logits(hidden_TE, rows_L))
            if not found:
                return None
            entries += found
        return tuple(entries)

    def _ids(self, row: Row) -> Sequence[int]:
        """The row's ids; those that the step before chose are known here by now."""
        if PENDING not in row.token_ids:
            return row.token_ids
        known = self._sampler.token_ids(row.sequence_id)
        return [known[row.start + i] if token == PENDING else token for i, token in enumerate(row.token_ids)]

    # --- what a drafter may do ------------------------------------------------------------------------------------

    @property
    def layout(self) -> CacheLayout:
        """How the cache lies."""
        return self.context.layout

    def take_scratch(self, num_pages: int) -> tuple[int, ...]:
        """Return pages behind the pool."""
        assert self._cache is None, "the cache is made already"
        first = self._num_pages
        self._num_scratch += num_pages
        return tuple(range(first, first + num_pages))

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], *, num_layers: int | None = None, moves: Sequence[CacheMove] = ()
    ) -> torch.Tensor:
        """Run rows through the first layers and the head; return fp32 logits (R, V) after their last tokens."""
        assert self._cache is not None, "start() comes first"
        self._cache.move(moves)
        batch, hidden = self._run(rows, [row.token_ids for row in rows], num_layers)
        return self._logits(hidden, batch.logits_L)

    @torch.inference_mode()
    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row as the row's request would."""
        return self._sampler.guess(sequence_ids, drafts, logits_RV)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def poison(self) -> None:
        """Fill the cache with NaN, for tests: what holds no token must not be read."""
        assert self._cache is not None, "start() comes first"
        self._cache.fill(float("nan"))

    def collect(self) -> StepResult:
        """Return the step's results."""
        return self._done.popleft()

    def stop(self) -> None:
        """Drop weights, cache and what the drafter took."""
        if self._drafting is not None:
            self._drafting.stop()
        self._runner = None
        if self._cache is not None:
            self._cache.close()
        self._cache = None
        self._done.clear()


def _with_scores(result: RowResult, scores: tuple[TokenLogprobs, ...] | None) -> RowResult:
    if scores is None:
        return evolve(result, error=result.error or "prompt_logprobs: the logits are not finite")
    return evolve(result, prompt_logprobs=scores) if scores else result


def build(context: ExecutorContext) -> LocalExecutor:
    """Make the executor; nothing is loaded yet."""
    return LocalExecutor(context)
