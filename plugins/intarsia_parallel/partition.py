"""How ranks share a model: slices of each layer (tensor parallel), and ranges of layers (pipeline parallel).

All of it follows from the spec and the options, so every rank, and whoever explains a config before any rank is
started, works out the same shares.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from attrs import evolve, field, frozen

from intarsia.errors import CompositionError
from intarsia.ops import Ops, rebound
from intarsia.protocols import PartitionContext
from intarsia.types import EMBED, POSITIONS, DecoderSpec, EngineOptions, Share, WeightMap
from intarsia_parallel.collectives import TensorGroup
from intarsia_parallel.options import ParallelOptions
from intarsia_parallel.rendezvous import is_launched, number_of
from intarsia_parallel.slices import check_divides, local_layer, misfits, num_numbers, part_of, vocabulary
from intarsia_parallel.stages import stage_sizes
from intarsia_parallel.traffic import token_report

#: What every sharing between ranks asks of a runner.
_SLICED = frozenset({"all_reduce", "look_up"})
_OVER_TOKENS = frozenset({"gather_tokens", "gather_rows", "own_tokens"})


@frozen(eq=False)
class ParallelPartition:
    """What `intarsia.protocols.Partition` asks for.

    Attributes:
        options: the executor's.
        spec: the whole model.
        shares: what each rank holds.
        share: what this one does.
        peers: ranks that share this machine's cores and memory.
        device: this rank's; empty is the engine's.
        tensor: the ranks that hold slices of this one's layers; whoever starts the ranks connects it.
    """

    options: ParallelOptions
    spec: DecoderSpec
    shares: tuple[Share, ...] = field(repr=False)
    share: Share = field(repr=False)
    peers: int
    device: str
    tensor: TensorGroup = field(repr=False)

    @property
    def needs(self) -> frozenset[str]:
        """What a runner must be able to do."""
        needs: frozenset[str] = frozenset()
        if self.options.tp > 1:
            over_ranks = any(layer.attention.qk_norm == "all" for layer in self.spec.layers)
            needs |= _SLICED | ({"rms_norm_over_ranks"} if over_ranks else frozenset())
            needs |= _OVER_TOKENS if self.options.sequence else frozenset()
        return needs | {"stages"} if self.options.pp > 1 else needs

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks could hold slices of each layer."""
        return not misfits(self.spec, ranks)

    def cut(self, weight_map: WeightMap, share: Share) -> WeightMap:
        """Return what a rank loads: the tensors of its layers, in their slices.

        The first stage has the embeddings, the last the norm and the head; a tied head is the embedding again.
        """

        def is_held(name: str) -> bool:
            if name.startswith("layers."):
                return int(name.split(".", 2)[1]) in share.layers
            if name == EMBED:
                return share.is_first or (share.is_last and self.spec.tied)
            return share.is_first if name == POSITIONS else share.is_last

        part = partial(part_of, spec=self.spec, tp=share.tp, tp_rank=share.tp_rank)
        held = {
            name: evolve(source, part=part(name, source))
            for name, source in weight_map.tensors.items()
            if is_held(name)
        }
        return evolve(weight_map, tensors=held, has_head=share.is_last)

    def bind(self, ops: Ops) -> Ops:
        """Return the ops with this rank's collectives."""
        if self.options.tp == 1:
            return ops
        return rebound(ops, self.tensor.calls(), "parallel")

    def report(self, engine: EngineOptions) -> Mapping[str, Any]:
        """Return how the ranks are laid out, and by formula what a token costs between and on them."""
        options = self.options
        return {
            "tp": options.tp,
            "pp": options.pp,
            "sequence": options.sequence,
            "rank": self.share.rank,
            **token_report(self.spec, self.shares, engine.dtype, sequence=options.sequence),
        }


def share_out(spec: DecoderSpec, tp: int, pp: int) -> tuple[Share, ...]:
    """Return what each rank holds, by rank.

    Raises:
        CompositionError: heads or features do not divide, or there are more stages than layers.
    """
    check_divides(spec, tp)
    if pp > spec.num_layers:
        raise CompositionError(
            f"executor.pp: {pp} stages are more than the model's {spec.num_layers} layers; what would do: "
            f"executor.pp = {spec.num_layers} or fewer",
            field="executor.pp",
        )
    table = spec.vocab_size * spec.embed_dim
    stages = stage_sizes([num_numbers(spec, layer) for layer in spec.layers], table, table, pp)
    rows = vocabulary(spec.vocab_size, tp, 0).num_rows
    return tuple(
        Share(
            rank=stage * tp + tp_rank,
            tp_rank=tp_rank,
            tp=tp,
            stage=stage,
            stages=pp,
            layers=layers,
            spec=evolve(spec, vocab_size=rows, layers=tuple(local_layer(spec.layers[i], tp, tp_rank) for i in layers)),
            vocab_size=spec.vocab_size,
            first_id=tp_rank * rows,
        )
        for stage, layers in enumerate(stages)
        for tp_rank in range(tp)
    )


def build(context: PartitionContext) -> ParallelPartition:
    """Share the model out, and find which rank this process is.

    Raises:
        CompositionError: what does not divide; a rank that is not there; tokens to be sharded between no slices.
        ConfigError: the environment is not as torchrun sets it.
    """
    options: ParallelOptions = context.options
    if options.sequence and options.tp == 1:
        raise CompositionError(
            "executor.sequence: tokens are sharded between the slices of a stage, and executor.tp = 1 makes one; what "
            "would do: executor.sequence = false, or executor.tp = 2 or more",
            field="executor.sequence",
        )
    world = options.tp * options.pp
    rank, on_machine, device = _place(options, world, context.engine.device)
    shares = share_out(context.spec, options.tp, options.pp)
    share = shares[rank]
    tensor = TensorGroup(
        rank=share.tp_rank,
        size=share.tp,
        sequence=options.sequence,
        first_id=share.first_id,
        num_rows=share.spec.vocab_size,
        vocab_size=share.vocab_size,
        num_ids=context.num_ids,
    )
    return ParallelPartition(options, context.spec, shares, share, on_machine, device, tensor)


def _place(options: ParallelOptions, world: int, device: str) -> tuple[int, int, str]:
    """Return which rank this is, how many share its cores and memory, and its device.

    torchrun says all of it in the environment, as does whoever starts ranks by an option.
    """
    said: Mapping[str, str] = os.environ if is_launched() else {}
    rank = _number(said, "RANK", 0) if options.rank is None else options.rank
    started = _number(said, "WORLD_SIZE", world) if options.rank is None else world
    if started != world or rank >= world:
        raise CompositionError(
            f"executor: tp = {options.tp} and pp = {options.pp} make {world} ranks, and this is rank {rank} of "
            f"{max(started, rank + 1)} that were started",
            field="executor.rank",
        )
    on_machine = max(1, min(world, _number(said, "LOCAL_WORLD_SIZE", world)))
    if not device.startswith("cuda"):
        return rank, on_machine, ""
    local = _number(said, "LOCAL_RANK", rank % on_machine)
    return rank, 1, f"cuda:{local}" if device == "cuda" else device


def _number(said: Mapping[str, str], name: str, default: int) -> int:
    """Return a number of what the environment says, or what is so where it does not."""
    return number_of(said, name) if name in said else default
