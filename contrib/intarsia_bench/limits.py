"""What the machine allows: its read bandwidth and matrix peak, and the rate of a workload that they bound.

`docs/benchmarks.md` states the formulae. Shape legend as in `intarsia.types.model`.
"""

from __future__ import annotations

import itertools
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import Factory, define, field, frozen

from intarsia.models.weights import tied_head_quantizers
from intarsia.types import EMBED, MoeSpec
from intarsia_bench.peers import workloads

if TYPE_CHECKING:
    from intarsia.protocols import Parts
    from intarsia.types import LayerSpec

#: Far beyond a last-level cache.
_BUFFER_BYTES = 256 << 20
#: Rows and columns of the matrices.
_MATRIX = 2048
_READS = 3
_PRODUCTS = 2


@frozen
class Limits:
    """The best that was seen of a machine.

    Attributes:
        bytes_per_s: read from memory.
        flops_per_s: dtype name -> of a matrix product; a multiplication and an addition are two.
    """

    bytes_per_s: float
    flops_per_s: dict[str, float]


@define(eq=False)
class Meter:
    """Measures a machine's limits, again and again: memory bandwidth wanders. The best counts.

    Reads use torch's threads, as many as the engine has set.
    """

    dtypes: Sequence[str]
    device: str = "cpu"
    buffer_bytes: int = _BUFFER_BYTES
    size: int = _MATRIX
    _buffers: list[torch.Tensor] = field(init=False)
    _bytes_per_s: float = field(default=0.0, init=False)
    _flops_per_s: dict[str, float] = Factory(dict)

    def __attrs_post_init__(self) -> None:
        self._buffers = [torch.ones(self.buffer_bytes, dtype=torch.uint8, device=self.device)]
        if self.device == "cpu" and (huge := _huge_pages(self.buffer_bytes)) is not None:
            self._buffers.append(huge)

    @property
    def limits(self) -> Limits:
        """The best so far."""
        return Limits(self._bytes_per_s, dict(self._flops_per_s))

    def sample(self) -> None:
        """Measure for a fraction of a second."""
        for buffer in self._buffers:
            for read in _reads(buffer):
                seconds = self._best(read, _READS)
                self._bytes_per_s = max(self._bytes_per_s, self.buffer_bytes / seconds)
        for dtype in self.dtypes:
            a = torch.ones(self.size, self.size, dtype=getattr(torch, dtype), device=self.device)
            seconds = self._best(partial(torch.matmul, a, a.T), _PRODUCTS)
            self._flops_per_s[dtype] = max(self._flops_per_s.get(dtype, 0.0), 2 * self.size**3 / seconds)

    def _best(self, work: Callable[[], object], times: int) -> float:
        """Return the seconds of the fastest of a few runs, after one that does not count."""
        work()
        spent = []
        for _ in range(times):
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            spent.append(time.perf_counter() - start)
        return min(spent)

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def _huge_pages(num_bytes: int) -> torch.Tensor | None:
    """Return a written buffer in huge pages, where the system has such."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None
    pages = mmap.mmap(-1, num_bytes)
    try:
        pages.madvise(advice)
    except OSError:  # a kernel without them
        return None
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def _reads(buffer: torch.Tensor) -> list[Callable[[], object]]:
    """Return ways to read a buffer from end to end: which is fastest depends on the processor and on torch."""
    floats, longs = buffer.view(torch.float32), buffer.view(torch.int64)
    matrix = floats.view(-1, 1024)
    vector = torch.ones(1024, device=buffer.device)
    return [floats.sum, longs.sum, lambda: torch.mv(matrix, vector)]


# --- what a model takes -----------------------------------------------------------------------------------------------


@frozen
class LayerCost:
    """What the attention of one or several layers takes for a key that a token sees.

    Attributes:
        flops: of one token and one key: 4 H D; score and sum are 2 H D each.
        num_bytes: of one key and its value in the cache.
        window: how many keys a token sees at most; None is all.
    """

    flops: int
    num_bytes: int
    window: int | None = None

    def seen(self, context: int) -> int:
        """Return how many of a context's keys a token sees."""
        return context if self.window is None else min(context, self.window)


@frozen(kw_only=True)
class ModelCost:
    """What a model takes.

    Attributes:
        weight_bytes: of the weights that every step reads; of an embedding that is not the head, a step reads rows.
        token_flops: of a token in all linear layers without the head: 2 a weight.
        head_flops: of a token whose logits are wanted: 2 V E.
        layers: of the attention of layers that are alike.
    """

    weight_bytes: int
    token_flops: int
    head_flops: int
    layers: tuple[LayerCost, ...]

    @classmethod
    def of(cls, parts: Parts) -> ModelCost:
        """Read what a composition takes."""
        spec, groups = parts.spec, parts.layout.groups
        embedding = spec.vocab_size * spec.embed_dim
        weight_bytes = parts.weight_bytes
        if not spec.tied or head_is_apart(parts):
            weight_bytes -= _embedding_bytes(parts)
        layers = []
        for group in groups:
            key_bytes = parts.layout.layer_token_bytes(group)
            for index in group.layers:
                heads = spec.layers[index].attention
                layers.append(LayerCost(4 * heads.num_heads * heads.head_dim, key_bytes, group.window))
        return cls(
            weight_bytes=weight_bytes,
            token_flops=2 * sum(num_linear(layer, spec.embed_dim) for layer in spec.layers),
            head_flops=2 * embedding,
            layers=merged(layers),
        )


def num_linear(layer: LayerSpec, embed_dim: int) -> int:
    """Weights of a layer's matrices that a token meets: queries, keys, values, out; gate where there is one, up, down.

    Of a mixture these are its router and the experts that a token goes to.
    """
    heads, mlp = layer.attention, layer.mlp
    attention = (2 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    if isinstance(mlp, MoeSpec):
        return embed_dim * (attention + mlp.num_experts + 3 * mlp.top_k * mlp.ffn_dim)
    return embed_dim * (attention + (3 if mlp.gated else 2) * mlp.ffn_dim)


def _embedding_bytes(parts: Parts) -> int:
    source = parts.weight_map.tensors[EMBED]
    num_bytes: int = torch.Size(source.shape).numel() * getattr(torch, parts.engine.dtype).itemsize
    if source.kept is not None:
        num_bytes = source.kept.num_bytes(source.shape)
    for quantizer in parts.quantizers:
        if quantizer.accepts(EMBED, source.shape):
            num_bytes = quantizer.num_bytes(EMBED, source.shape)
    return num_bytes


def head_is_apart(parts: Parts) -> bool:
    """Whether a tied head is a weight of its own in memory, quantized apart or packed."""
    source = parts.weight_map.tensors[EMBED]
    taken = [quantizer.format for quantizer in parts.quantizers if quantizer.accepts(EMBED, source.shape)]
    weight_format = taken[-1] if taken else "dense" if source.kept is None else source.kept.name
    return bool(tied_head_quantizers(parts.quantizers, source.shape)) or parts.ops.packs(weight_format)


def merged(layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Add up layers that see alike."""
    sums: dict[int | None, tuple[int, int]] = {}
    for layer in layers:
        flops, num_bytes = sums.get(layer.window, (0, 0))
        sums[layer.window] = flops + layer.flops, num_bytes + layer.num_bytes
    return tuple(LayerCost(flops, num_bytes, window) for window, (flops, num_bytes) in sums.items())


# --- what a workload takes --------------------------------------------------------------------------------------------


@frozen
class Demand:
    """The least that a workload takes: bytes read from memory, and floating-point operations."""

    num_bytes: int
    flops: int

    def seconds(self, limits: Limits, dtype: str) -> float:
        """Return the least time: reading and computing can overlap, neither can be faster than its limit."""
        return max(self.num_bytes / limits.bytes_per_s, self.flops / limits.flops_per_s[dtype])


def demand(cost: ModelCost, requests: workloads.Work, *, without_first: bool) -> Demand:
    """Return what requests take at least, however they are batched.

    A prefix that all of them share is computed once, and read once a step. A prompt's own keys need not be read back.

    Args:
        cost: of the model.
        requests: (prompt ids, tokens to generate).
        without_first: leave out the prompts and the first tokens.
    """
    shared = _num_shared([ids for ids, _ in requests])
    flops = num_bytes = 0
    if not without_first:
        spans = [range(shared), *(range(shared, len(ids)) for ids, _ in requests)]
        flops += sum(_token_flops(cost, position + 1) for span in spans for position in span)
        flops += cost.head_flops * len(requests)
        num_bytes += cost.weight_bytes
    # The token that is run at position p, to choose the one after it, sees p + 1 keys; its own is at hand.
    for ids, num_tokens in requests:
        for position in range(len(ids), len(ids) + num_tokens - 1):
            flops += _token_flops(cost, position + 1) + cost.head_flops
            num_bytes += sum(layer.num_bytes * _own_keys(layer, position, shared) for layer in cost.layers)
    steps = max(num_tokens for _, num_tokens in requests) - 1
    num_bytes += steps * (cost.weight_bytes + _shared_bytes(cost, shared))
    return Demand(num_bytes, flops)


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all of several prompts have in common; of one alone, none."""
    if len(prompts) < 2:
        return 0
    columns = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _token_flops(cost: ModelCost, context: int) -> int:
    return cost.token_flops + sum(layer.flops * layer.seen(context) for layer in cost.layers)


def _own_keys(layer: LayerCost, context: int, shared: int) -> int:
    """Keys in the cache that a token sees and that are not the prefix that all share."""
    return min(layer.seen(context), context - shared)


def _shared_bytes(cost: ModelCost, shared: int) -> int:
    """Bytes of a shared prefix, of the layers that see all of it."""
    return sum(layer.num_bytes * shared for layer in cost.layers if layer.window is None)


def bound(cost: ModelCost, workload: str, repeats: int, limits: Limits, dtype: str) -> float:
    """Return the tokens a second of a workload that the machine allows at most; the median over its repeats."""
    without_first = workload in workloads.WITHOUT_FIRST
    return statistics.median(
        workloads.num_counted(workload, repeat)
        / demand(cost, workloads.work(workload, repeat), without_first=without_first).seconds(limits, dtype)
        for repeat in range(repeats)
    )
