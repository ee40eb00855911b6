"""Ranks that share a model: tensor, sequence and pipeline parallelism over torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from intarsia.hookspecs import hookimpl
from intarsia.protocols import ExecutorContext
from intarsia.types import Fit, Provider, Unfit, lazy

if TYPE_CHECKING:
    from intarsia.protocols import Parts


def _fit(context: ExecutorContext) -> Fit | Unfit:
    if context.partition is None:
        return Unfit("ranks share a model where a config says executor.use = 'parallel'")
    return Fit(50, f"{len(context.partition.shares)} ranks share the model")


@hookimpl
def provide_executors() -> list[Provider]:
    """Several ranks."""
    from intarsia_parallel.options import ParallelOptions

    return [
        Provider(
            key="parallel",
            summary="ranks that share a model: slices of layers (tp), stages of them (pp), tokens (sequence)",
            options=ParallelOptions,
            fit=_fit,
            partition=lazy("intarsia_parallel.partition:build"),
            build=lazy("intarsia_parallel.executor:build"),
        )
    ]


@hookimpl
def provide_commands() -> list[Provider]:
    """What every rank but the first runs."""
    return [
        Provider(
            key="follow",
            summary="Be one rank of an engine that several processes share.",
            build=lazy("intarsia_parallel.commands:build_follow"),
        )
    ]


@hookimpl
def check_composition(parts: Parts) -> None:
    """Refuse drafters that would run a model which is shared out."""
    from intarsia_parallel.checks import check_parts

    check_parts(parts)
