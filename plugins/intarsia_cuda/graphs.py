"""The runner `cuda_graph`: decoding steps of another runner, launched as one CUDA graph.

A step of few tokens takes a GPU less time than it takes a host to launch its hundreds of kernels. A graph is captured
once for a number of rows, a bucket, and replayed with one call. What it reads is in buffers that stay where they are: a
step copies its ids, positions, slots and attention metadata into them. A step of fewer rows than the bucket is padded:
padded rows write to the spare page and read from it alone, and what they give is dropped.

Prompts and the verification of drafts run by the inner runner as they are: they have tokens enough. So do the logits.

Shape legend: T tokens, B rows of a bucket, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from attrs import define, evolve, field, frozen

from intarsia.errors import CompositionError, ExecutionError
from intarsia.protocols import AttentionBackend, CacheStorage, FixedAttention, Runner, RunnerContext
from intarsia.types import CacheLayout, CacheMove, Fit, ForwardBatch, MoeSpec, Unfit
from intarsia_cuda.driver import elsewhere

#: Runs before a capture: libraries choose kernels and take memory in the first.
_RUNS_BEFORE = 2


@frozen(eq=False)
class Captured:
    """A captured call.

    Attributes:
        out: what it returned; `replay` writes it anew.
        replay: does what was captured once more.
    """

    out: torch.Tensor
    replay: Callable[[], None]


class Graphs(Protocol):
    """Captures calls."""

    def capture(self, call: Callable[[], torch.Tensor]) -> Captured:
        """Run a call and keep what it launches."""
        ...


@define(eq=False)
class TorchGraphs:
    """torch's. All graphs take their memory from one pool: only one runs at a time."""

    _pool: Any = field(factory=lambda: torch.cuda.graph_pool_handle())

    def capture(self, call: Callable[[], torch.Tensor]) -> Captured:
        """Run a call beside the stream, then capture it."""
        current = torch.cuda.current_stream()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(_RUNS_BEFORE):
                call()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()
        return Captured(out, graph.replay)


@frozen
class Bucket:
    """What a graph is captured for: rows of one token each, of so many tokens at most with what is in the cache."""

    num_rows: int
    max_len: int


@frozen
class _Decode:
    """Stands for the attention's metadata of a step that is replayed."""

    bucket: Bucket


@define(eq=False)
class FixedStep:
    """A captured step and its buffers.

    Attributes:
        batch: B rows over the buffers, with the metadata that the graph reads; its host fields are of padding.
        num_filled: rows that hold a step's tokens; those behind them are padding.
    """

    bucket: Bucket
    batch: ForwardBatch
    captured: Captured
    num_filled: int = 0

    def fill(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy a step's rows into the buffers, padding behind them; return the padded batch, without metadata."""
        rows, stale = batch.num_rows, slice(batch.num_rows, self.num_filled)
        for buffer, new, padding in (
            (self.batch.ids_T, batch.ids_T, 0),
            (self.batch.positions_T, batch.positions_T, 0),
            *((buffer, new, -1) for buffer, new in zip(self.batch.slots_T, batch.slots_T, strict=True)),
        ):
            buffer[:rows].copy_(new)
            if rows < self.num_filled:
                buffer[stale].fill_(padding)
        self.num_filled = rows
        return evolve(
            self.batch,
            starts=(*batch.starts, *self.batch.starts[rows:]),
            pages=tuple(
                (*tables, *padding[rows:]) for tables, padding in zip(batch.pages, self.batch.pages, strict=True)
            ),
            attention=None,
        )


def padding_batch(num_rows: int, num_groups: int, spare: int, device: torch.device) -> ForwardBatch:
    """Return rows that are all padding: token 0 at position 0 of the spare page, written to slot -1.

    Args:
        num_rows: how many.
        num_groups: of the cache.
        spare: the spare page.
        device: where the buffers are.
    """
    zeros = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
    slots = torch.full((num_groups, num_rows), -1, dtype=torch.int64, device=device)
    return ForwardBatch(
        ids_T=zeros[0],
        positions_T=zeros[1],
        slots_T=tuple(slots),
        bounds=tuple(range(num_rows + 1)),
        starts=(0,) * num_rows,
        pages=(((spare,),) * num_rows,) * num_groups,
        logits_L=torch.zeros(0, dtype=torch.int64, device=device),
    )


@define(eq=False)
class CudaGraphRunner:
    """Replays decoding steps, and lets the inner runner run the others.

    What `run` returns for a replayed step holds until the next `run`.

    Attributes:
        inner: what is captured.
        attention: prepares for both.
        buckets: in ascending order of rows and of lengths.
    """

    inner: Runner
    attention: AttentionBackend
    layout: CacheLayout
    device: torch.device
    graphs: Graphs
    buckets: tuple[Bucket, ...]
    _cache: CacheStorage | None = field(default=None, init=False)
    _spare: int = field(default=-1, init=False)
    _steps: dict[tuple[Bucket, range], FixedStep] = field(factory=dict, init=False)

    @classmethod
    def build(cls, context: RunnerContext, graphs: Graphs) -> CudaGraphRunner:
        """Build the inner runner. Graphs are captured when the first batch, that of the warm-up, brings the cache."""
        assert context.inner is not None and context.engine.max_model_len is not None
        return cls(
            inner=context.inner(context.options.inner).build(),
            attention=context.attention,
            layout=context.layout,
            device=torch.device(context.engine.device),
            graphs=graphs,
            buckets=buckets(context.options.buckets, context.options.lengths, context.engine.max_model_len),
        )

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Any:
        """Leave a step to `run` that is replayed; let the backend prepare for any other."""
        bucket = self._bucket(batch) if self._cache is not None else None
        return self.attention.prepare(batch, layout) if bucket is None else _Decode(bucket)

    def _bucket(self, batch: ForwardBatch) -> Bucket | None:
        """Return the smallest bucket that a batch fits, or None: rows of several tokens, or too many."""
        rows = batch.num_rows
        if not rows or batch.bounds[-1] != rows or any(stop != i for i, stop in enumerate(batch.bounds)):
            return None
        longest = max(batch.starts) + 1
        return next((b for b in self.buckets if b.num_rows >= rows and b.max_len >= longest), None)

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Replay a decoding step from the embedding on; let the inner runner run any other."""
        if cache is not self._cache:
            self._meet(cache, layers)
        decode = batch.attention
        if isinstance(decode, _Decode) and hidden_TE is None:
            return self._replay(batch, decode.bucket, cache, layers)
        if isinstance(decode, _Decode):
            batch = evolve(batch, attention=self.attention.prepare(batch, self.layout))
        return self.inner.run(batch, cache, layers, hidden_TE)

    def _replay(self, batch: ForwardBatch, bucket: Bucket, cache: CacheStorage, layers: range) -> torch.Tensor:
        step = self._steps.get((bucket, layers)) or self._capture(bucket, cache, layers)
        step.batch.attention.refill(self._prepare_fixed(step.fill(batch), bucket))
        step.captured.replay()
        return step.captured.out[: batch.num_rows]

    def _prepare_fixed(self, batch: ForwardBatch, bucket: Bucket) -> Any:
        assert isinstance(self.attention, FixedAttention), "fit refuses others"
        return self.attention.prepare_fixed(batch, self.layout, bucket.max_len)

    def _meet(self, cache: CacheStorage, layers: range) -> None:
        """Capture all buckets over a cache, the largest first: the others find its memory in the pool."""
        self._cache, self._spare = cache, cache.layer(0).keys.shape[0] - 1
        self._steps.clear()
        # A padded row reads what no step has written. It harms no other row, but should be a number.
        cache.move([CacheMove("zero", self._spare, group=group) for group in range(len(self.layout.groups))])
        for bucket in reversed(self.buckets):
            self._capture(bucket, cache, layers)

    def _capture(self, bucket: Bucket, cache: CacheStorage, layers: range) -> FixedStep:
        batch = padding_batch(bucket.num_rows, len(self.layout.groups), self._spare, self.device)
        batch = evolve(batch, attention=self._prepare_fixed(batch, bucket))
        try:
            captured = self.graphs.capture(lambda: self.inner.run(batch, cache, layers))
        except RuntimeError as error:
            raise ExecutionError(
                f"runner 'cuda_graph' cannot capture a step of {bucket.num_rows} rows: {error}; "
                "runner = 'eager' launches kernel by kernel"
            ) from error
        step = self._steps[bucket, layers] = FixedStep(bucket, batch, captured)
        return step

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of some tokens, by the inner runner."""
        return self.inner.logits(hidden_TE, rows_L)


def buckets(rows: Sequence[int], lengths: Sequence[int], max_len: int) -> tuple[Bucket, ...]:
    """Return every number of rows with every length below `max_len`, and with it, in ascending order."""
    shorter = sorted({length for length in lengths if length < max_len})
    return tuple(Bucket(n, length) for n in sorted(set(rows)) for length in (*shorter, max_len))


def fit(context: RunnerContext) -> Fit | Unfit:
    """NVIDIA GPUs, dense models, and attention whose metadata can stay where it is."""
    device = context.engine.device
    if not device.startswith("cuda"):
        return Unfit(f"it captures what is launched on NVIDIA GPUs, and {elsewhere(device)}")
    reason = refusal(context)
    # Below `eager`: a config names it, until it has been measured on a device.
    return Unfit(reason) if reason else Fit(5, "a decoding step is launched as one graph")


def refusal(context: RunnerContext) -> str | None:
    """Return why a composition's steps cannot be captured, or None."""
    if context.inner is None:
        return "it wraps another runner and is not wrapped itself"
    if not isinstance(context.attention, FixedAttention):
        name = type(context.attention).__name__
        return (
            "a graph reads the same buffers in each step, and the attention backend lays its metadata out anew: "
            f"{name} has no prepare_fixed"
        )
    for index, layer in enumerate(context.spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            return (
                f"layer {index} sends tokens to {layer.mlp.num_experts} experts, and how many go where is read on the "
                "host, which a graph cannot wait for"
            )
    try:
        inner = context.inner(context.options.inner).provider
    except CompositionError as error:
        return str(error)
    if inner.provides:
        return f"runner.inner: {inner.key!r} brings its own {' and '.join(inner.provides)}, which no graph holds"
    return None


def build(context: RunnerContext) -> CudaGraphRunner:
    """Make the runner around another, which is built around the loaded weights."""
    return CudaGraphRunner.build(context, TorchGraphs())
