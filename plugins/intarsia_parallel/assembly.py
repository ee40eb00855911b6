"""A rank's own part, put together: its groups, its weights and cache, and what it does in each step."""

from __future__ import annotations

import torch

from intarsia.protocols import ExecutorContext, Progress
from intarsia.types import Share
from intarsia_parallel.edges import Inbound, Outbound
from intarsia_parallel.partition import ParallelPartition
from intarsia_parallel.pipeline import Pipeline, SharedTarget
from intarsia_parallel.rendezvous import Meeting


def place_of(share: Share) -> str:
    """Say where a rank stands, for messages."""
    return f"stage {share.stage} of {share.stages}, tensor rank {share.tp_rank} of {share.tp}"


def assemble(context: ExecutorContext, meeting: Meeting, progress: Progress) -> Pipeline:
    """Connect this rank with its neighbours, load its share, and run one token through all stages.

    All ranks call it; it returns once those that this one exchanges with have come as far.

    Raises:
        IntarsiaError: weights cannot be loaded, or a drafter cannot start.
        RuntimeError: a neighbour did not come.
    """
    partition, options = context.partition, context.options
    assert isinstance(partition, ParallelPartition)
    share, device = partition.share, torch.device(context.engine.device)
    inbound, outbound = _connect(partition, meeting, device, options.step_timeout_s)
    stage = context.build_stage(context)
    stage.load(progress)
    choosing = context.build_choosing(context) if share.chooses else None
    if choosing is not None:
        choosing.start(SharedTarget(context, choosing))
    stage.allocate()
    pipeline = Pipeline(
        stage=stage,
        tensor=partition.tensor,
        num_microbatches=options.microbatches or share.stages,
        cuts_rows=_cuts_rows(context),
        inbound=inbound,
        outbound=outbound,
        demands=context.build_demands(context) if share.is_last else None,
        choosing=choosing,
    )
    pipeline.warm_up(context.layout)
    return pipeline


def _connect(
    partition: ParallelPartition, meeting: Meeting, device: torch.device, timeout_s: float
) -> tuple[Inbound | None, Outbound | None]:
    """Make this rank's groups: with the stage before, with those that share its layers, with the stage after.

    In this order everywhere, so that no two ranks wait for each other.
    """
    share = partition.share
    inbound = outbound = None
    if not share.is_first:
        before = [share.rank - share.tp, share.rank]
        inbound = Inbound(meeting.group(f"edge/{before[0]}", before, str(device), timeout_s), device)
    if share.tp > 1:
        first = share.rank - share.tp_rank
        ranks = range(first, first + share.tp)
        partition.tensor.connect(meeting.group(f"tensor/{share.stage}", ranks, str(device), timeout_s))
    else:
        partition.tensor.connect(None)
    if not share.is_last:
        after = [share.rank, share.rank + share.tp]
        outbound = Outbound(meeting.group(f"edge/{after[0]}", after, str(device), timeout_s), device)
    return inbound, outbound


def _cuts_rows(context: ExecutorContext) -> bool:
    """Whether microbatches may cut a prompt: not where its answer could depend on it and the config minds that."""
    engine = context.engine
    return engine.invariance == "numeric" or context.attention.invariance(engine.dtype) == "bitwise"
