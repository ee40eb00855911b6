"""What several devices would make of a composition: a model of tensor and pipeline parallelism, not a measurement.

Everything about the model is the composition's own: what each rank holds (`intarsia_parallel.partition`), the bytes of
its weights and cache as they lie in memory, its operations as `intarsia_bench.limits` counts them, and what it sends
(`intarsia_parallel.traffic`). Of a device the model takes the bandwidth B of its memory and its peak P, of a link
between ranks the latency a, the bandwidth b, and the time s that a collective takes to begin.

With n slices, p stages and m microbatches of k tokens each, a rank computes for

    compute = max(bytes / B, operations / P)

where bytes are its weights, once a microbatch, and the keys and values that the microbatch's tokens see. A stage has c
collectives of k E numbers, one after another and not beside the computing:

    all-reduce                   s + 2 (n - 1) (a + bytes / n / b)         (a ring; Patarasuk and Yuan 2009)
    reduce-scatter, all-gather   s +   (n - 1) (a + bytes / n / b)

and the last one brings its rows of logits to the rank that chooses, n - 1 messages of s + a + bytes / b. A stage takes
t = compute + collectives; each hand-over to the next takes h = s + a + k E numbers / b, beside the computing. Stages
work as an assembly line, so that a step takes

    step = t_1 + ... + t_p + (p - 1) h + (m - 1) max(t_1, ..., t_p, h)

which for equal stages and free links is (m + p - 1) t: the bubble is (p - 1) / (m + p - 1) (Huang et al. 2019).

Assumptions, each of which makes the prediction higher than what is reached: memory and compute units are at their peak;
norms, activations, sampling, planning and launches cost nothing; links are at their peak, and no two messages share
one; microbatches are equal; one step ends before the next begins, and all sequences are in it. Of mixtures all experts
are read, which makes it too low for small batches. What a prompt's microbatch reads of the cache is left out, as in
`intarsia bench`.

Shape legend: E embed, V vocab.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from intarsia.errors import ConfigError
from intarsia.layout import check_cuts, lay_out, weight_bytes
from intarsia.protocols import PartitionContext
from intarsia.types import EMBED, Share
from intarsia_bench.hardware import Link
from intarsia_bench.limits import Demand, LayerCost, Limits, ModelCost, head_is_apart, merged, num_linear
from intarsia_parallel.options import ParallelOptions
from intarsia_parallel.partition import ParallelPartition
from intarsia_parallel.partition import build as build_partition
from intarsia_parallel.traffic import LOGIT_BYTES, PAIR_BYTES, sent, token_payloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from intarsia.protocols import Parts

#: Collectives that send in one round of the ring; all others are all-reduces.
_ONE_ROUND = ("reduce_scatter", "gather_tokens")


@frozen
class Layout:
    """How a model is shared out.

    Attributes:
        tp, pp: slices and stages; there are `tp * pp` ranks.
        microbatches: into how many a step is cut.
        sequence: whether activations are sharded along tokens.
    """

    tp: int = 1
    pp: int = 1
    microbatches: int = 1
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tp * self.pp


@frozen
class Machine:
    """What ranks run on.

    Attributes:
        limits: of each rank's device.
        link: between the slices of a stage.
        stage_link: between stages.
    """

    limits: Limits
    link: Link
    stage_link: Link


@frozen
class Step:
    """One step of some sequences, all alike.

    Attributes:
        rows: sequences.
        tokens: that each of them runs.
        seen: keys that its first token sees in the cache.
        likeliest: whether the likeliest id is all that is needed of a row's logits.
    """

    rows: int
    tokens: int = 1
    seen: int = 0
    likeliest: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.rows * self.tokens


@frozen
class Prediction:
    """What a step of a layout takes.

    Attributes:
        seconds: of the step.
        tokens_per_s: of all sequences.
        weights: bytes of weights on the rank that has most of them.
        cache: bytes of the sequences' keys and values behind the step, on the rank where that is most.
        sends: bytes that a rank sends a token, on the rank that sends most, logits among them.
        bubble: the part of the step in which the slowest stage waits.
    """

    seconds: float
    tokens_per_s: float
    weights: int
    cache: int
    sends: float
    bubble: float


def share_out(parts: Parts, layout: Layout) -> ParallelPartition:
    """Share a composition's model out, as the executor `parallel` would.

    Raises:
        CompositionError: heads, features, layers or groups of columns do not divide.
    """
    options = ParallelOptions(tp=layout.tp, pp=layout.pp, sequence=layout.sequence and layout.tp > 1, rank=0)
    partition = build_partition(
        PartitionContext(options=options, engine=parts.engine, spec=parts.spec, num_ids=parts.num_ids)
    )
    for share in partition.shares:
        check_cuts(partition.cut(parts.weight_map, share), parts.quantizers, partition)
    return partition


def rank_cost(parts: Parts, partition: ParallelPartition, share: Share) -> ModelCost:
    """Return what one rank's part of the model takes; with one rank that is `ModelCost.of`."""
    spec, dtype = parts.spec, parts.engine.dtype
    held = partition.cut(parts.weight_map, share)
    num_bytes = weight_bytes(held, parts.quantizers, parts.ops, dtype)
    reads_embedding = share.is_last and spec.tied and not head_is_apart(parts)
    if EMBED in held.tensors and not reads_embedding:
        embedding = evolve(held, tensors={EMBED: held.tensors[EMBED]}, has_head=False)
        num_bytes -= weight_bytes(embedding, parts.quantizers, parts.ops, dtype)
    lies = lay_out(spec, parts.selection("cache").options, parts.layout.order, dtype, share)
    layers = []
    for group in lies.groups:
        for index in group.layers:
            heads = share.spec.layers[index].attention
            flops = 4 * heads.num_heads * heads.head_dim
            layers.append(LayerCost(flops, lies.layer_token_bytes(group), group.window))
    return ModelCost(
        weight_bytes=num_bytes,
        token_flops=2 * sum(num_linear(layer, spec.embed_dim) for layer in share.spec.layers),
        head_flops=2 * share.spec.vocab_size * spec.embed_dim if share.is_last else 0,
        layers=merged(layers),
    )


@frozen
class Scaling:
    """Predicts steps of one layout.

    Attributes:
        parts: a composition of the whole model.
        layout: how it is shared out.
        machine: what it runs on.
    """

    parts: Parts
    layout: Layout
    machine: Machine

    @cached_property
    def partition(self) -> ParallelPartition:
        """Who holds what; raises as `share_out` does."""
        return share_out(self.parts, self.layout)

    @cached_property
    def costs(self) -> Sequence[ModelCost]:
        """What each stage takes of each of its ranks, which hold equally much."""
        return [rank_cost(self.parts, self.partition, share) for share in self._firsts]

    @property
    def _firsts(self) -> Sequence[Share]:
        """The first rank of each stage: the others hold as much."""
        return self.partition.shares[:: self.layout.tp]

    @property
    def _width(self) -> int:
        """Bytes of a token's hidden state."""
        return self.parts.spec.embed_dim * _BYTES[self.parts.engine.dtype]

    def predict(self, step: Step) -> Prediction:
        """Return what a step takes.

        Raises:
            ConfigError: there are more microbatches than tokens to put in them.
        """
        layout, batches = self.layout, self.layout.microbatches
        whole = step.rows if step.tokens == 1 else step.num_tokens
        if batches > whole:
            raise ConfigError(
                f"--microbatches: {batches} are more than the {whole} {'rows' if step.tokens == 1 else 'tokens'} of a "
                f"step; what would do: {whole} or fewer",
                field="microbatches",
            )
        tokens = step.num_tokens / batches
        common = [self._stage_s(index, step, last=step.tokens == 1) for index in range(layout.pp)]
        final = [self._stage_s(index, step, last=True) for index in range(layout.pp)]
        hop_s = self._hop_s(tokens) if layout.pp > 1 else 0.0
        seconds = sum(final) + (layout.pp - 1) * hop_s + (batches - 1) * max(*common, hop_s)
        busy = (batches - 1) * max(common) + max(final)
        return Prediction(
            seconds=seconds,
            tokens_per_s=step.num_tokens / seconds,
            weights=max(self._weights(share) for share in self._firsts),
            cache=max(self._cache(cost, step) for cost in self.costs),
            sends=max(self._sends(share, step) for share in self.partition.shares),
            bubble=1 - busy / seconds,
        )

    # --- one microbatch -----------------------------------------------------------------------------------------------

    def _stage_s(self, index: int, step: Step, *, last: bool) -> float:
        """Return the seconds of a stage for a microbatch; of a prompt only the last one has logits."""
        share, cost = self._firsts[index], self.costs[index]
        batches, whole = self.layout.microbatches, range(step.seen + 1, step.seen + step.tokens + 1)
        rows = (step.rows if step.tokens == 1 else step.rows * last) if share.is_last else 0
        rows_here = rows / batches if step.tokens == 1 else rows
        flops: float = step.num_tokens * cost.token_flops / batches + rows_here * cost.head_flops
        flops += step.rows / batches * sum(layer.flops * _sum_seen(layer, whole) for layer in cost.layers)
        num_bytes: float = cost.weight_bytes - (0 if rows_here else self._head_bytes(share))
        num_bytes += step.rows / batches * sum(layer.num_bytes * layer.seen(step.seen) for layer in cost.layers)
        computing = Demand(int(num_bytes), int(flops)).seconds(self.machine.limits, self.parts.engine.dtype)
        return computing + self._collectives_s(share, step.num_tokens / batches) + self._logits_s(rows_here, step)

    def _collectives_s(self, share: Share, tokens: float) -> float:
        """Return the seconds of a stage's collectives for some tokens: each op's calls are of one token's width."""
        payloads = token_payloads(self.parts.spec, share, self.parts.engine.dtype, sequence=self.layout.sequence)
        filled = -(-tokens // share.tp) * share.tp if self.layout.sequence else tokens
        seconds = 0.0
        for op, num_bytes in payloads.items():
            # A mean of squares is one number in float32.
            each, held = (4, tokens) if op == "rms_norm_over_ranks" else (self._width, filled)
            rounds = 1 if op in _ONE_ROUND else 2
            seconds += num_bytes // each * self.machine.link.ring_s(each * held, share.tp, rounds)
        return seconds

    def _logits_s(self, rows: float, step: Step) -> float:
        """Return the seconds in which the rows' logits come together, one rank's after another's."""
        if not rows or self.layout.tp == 1:
            return 0.0
        link, tp = self.machine.link, self.layout.tp
        gathered = link.ring_s(rows * self._width, tp, 2) if self.layout.sequence else 0.0
        return gathered + (tp - 1) * link.message_s(rows * self._row_bytes(step))

    def _row_bytes(self, step: Step) -> int:
        """Return what a rank sends for a row of logits."""
        return PAIR_BYTES if step.likeliest else self._firsts[-1].spec.vocab_size * LOGIT_BYTES

    def _hop_s(self, tokens: float) -> float:
        """Return the seconds of a hand-over to the next stage; each slice sends its tokens, or all of them."""
        share = self.layout.tp if self.layout.sequence else 1
        return self.machine.stage_link.message_s(-(-tokens // share) * self._width)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _head_bytes(self, share: Share) -> int:
        """Return the bytes of the weights that make logits, on the last stage."""
        if not share.is_last:
            return 0
        parts = self.parts
        with_head = self.partition.cut(parts.weight_map, share)
        kept = {name: source for name, source in with_head.tensors.items() if name.startswith("layers.")}
        layers = weight_bytes(
            evolve(with_head, tensors=kept, has_head=False), parts.quantizers, parts.ops, parts.engine.dtype
        )
        return self.costs[share.stage].weight_bytes - layers

    def _weights(self, share: Share) -> int:
        held = self.partition.cut(self.parts.weight_map, share)
        return weight_bytes(held, self.parts.quantizers, self.parts.ops, self.parts.engine.dtype)

    def _cache(self, cost: ModelCost, step: Step) -> int:
        return step.rows * sum(layer.num_bytes * layer.seen(step.seen + step.tokens) for layer in cost.layers)

    def _sends(self, share: Share, step: Step) -> float:
        """Return what a rank sends a token: to the others of its stage, to the next one, and logits."""
        spec, dtype, sequence = self.parts.spec, self.parts.engine.dtype, self.layout.sequence
        found: float = sent(token_payloads(spec, share, dtype, sequence=sequence), share.tp)
        if not share.is_last:
            found += self._width / share.tp if sequence else self._width
        elif share.tp > 1:
            found += sent({"gather_rows": self._width}, share.tp) / step.tokens if sequence else 0
            found += self._row_bytes(step) / step.tokens if share.tp_rank else 0
        return found


#: Of one number.
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _sum_seen(layer: LayerCost, contexts: range) -> int:
    """Return the keys that tokens see, summed; each token sees one more than the one before it."""
    if layer.window is None or contexts.stop - 1 <= layer.window:
        return (contexts.start + contexts.stop - 1) * len(contexts) // 2
    return sum(layer.seen(context) for context in contexts)
