"""`intarsia follow`: one rank of an engine whose rank 0 is another process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click
from attrs import frozen

from intarsia.errors import CompositionError, IntarsiaError
from intarsia.protocols import CommandContext, ExecutorContext
from intarsia_parallel.ranks import is_ours, signals_of_followers, tie_to_parent
from intarsia_parallel.rendezvous import is_launched

#: How long rank 0 may take to be there.
_TIMEOUT_S = 600.0


@frozen
class FollowCommand:
    """The command, as a part."""

    context: CommandContext

    def command(self) -> click.Command:
        """Return the click command."""

        @click.command()
        @click.option(
            "-o",
            "--override",
            "overrides",
            metavar="PATH=VALUE",
            multiple=True,
            help="Set one value of rank 0's config here, such as model.use where the files lie elsewhere. Repeatable.",
        )
        def follow(*, overrides: tuple[str, ...]) -> None:
            """Be one rank of an engine that several processes share.

            Rank 0 runs the engine and sends the config; which rank this is, and where the others are, is in the
            environment, as torchrun sets it. Rank 0 starts the ranks of one machine by itself.
            """
            self._follow(overrides)

        return follow

    def _follow(self, overrides: tuple[str, ...]) -> None:
        tie_to_parent()
        signals_of_followers()
        if not is_launched():
            raise click.UsageError(
                "this process is none of several ranks: RANK and WORLD_SIZE are not set. Start all ranks by torchrun, "
                "such as: torchrun --nproc-per-node 2 -m intarsia_parallel.rank serve -c engine.toml"
            )
        from intarsia_parallel.following import follow

        def compose(config: Mapping[str, Any]) -> ExecutorContext:
            from intarsia_parallel.executor import ParallelExecutor

            executor = self.context.compose(self.context.load_config(config, overrides)).executor
            if not isinstance(executor, ParallelExecutor):
                raise CompositionError("executor: rank 0's is 'parallel', and this rank's is another", field="executor")
            return executor.context

        try:
            follow(compose, _TIMEOUT_S)
        except IntarsiaError:
            if not is_ours():
                raise
            sys.exit(1)  # rank 0 has been told, and says it


def build_follow(context: CommandContext) -> FollowCommand:
    """Make the command."""
    return FollowCommand(context)
