"""Executors, and what they drive: a stage of the model, choosing, and the logits that it will ask for.

Shape legend: T tokens, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from intarsia.protocols.choosing import Target
from intarsia.protocols.serving import Progress
from intarsia.types import BatchPlan, CacheMove, Demand, Draft, ForwardBatch, Row, RowResult, SequenceId, StepResult

if TYPE_CHECKING:
    import torch


class Stage(Protocol):
    """One rank's part of the model, which an executor drives: weights, cache tensors and the chosen runner."""

    def load(self, progress: Progress) -> None:
        """Load the weights, and build the runner around them. Reads files; raise CheckpointError as loading does."""
        ...

    def allocate(self, num_scratch: int = 0) -> None:
        """Make the cache, with so many pages behind the pool that no sequence holds. Called once, after `load`."""
        ...

    def batch(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> ForwardBatch:
        """Lay rows with these ids, none of them pending, out as tensors, ready for attention. No side effects."""
        ...

    def run(
        self, batch: ForwardBatch, hidden_TE: torch.Tensor | None = None, num_layers: int | None = None
    ) -> torch.Tensor:
        """Run its first layers, or all, writing keys and values into the cache; return the residual stream (T, E).

        The first stage embeds the batch's ids; the others take up the `hidden_TE` that the stage before returned.
        Where activations are sharded along tokens, T is that of this rank.
        """
        ...

    def logits(self, hidden_TE: torch.Tensor, rows_L: Sequence[int]) -> torch.Tensor:
        """Return fp32 logits (L, V) of the tokens with these numbers, of this rank's ids. The last stage has them."""
        ...

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do a plan's cache work, in order."""
        ...

    def take_swapped(self) -> tuple[int, float]:
        """Return bytes copied between device and host and the seconds that took, see `SwappingStorage`."""
        ...

    def stop(self) -> None:
        """Drop weights and cache. Safe to call twice."""
        ...


class Choosing(Protocol):
    """Sampler, logits processors and drafter, which an executor hands logits to. One rank has it."""

    def start(self, target: Target) -> None:
        """Let the drafter get ready: weights are loaded, the cache is not made yet."""
        ...

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        ...

    def ids(self, row: Row) -> Sequence[int]:
        """Return a row's token ids: pending ones have been chosen by now."""
        ...

    def choose(
        self, rows: Sequence[Row], bounds: Sequence[int], logits_of: Callable[[Demand], torch.Tensor]
    ) -> Sequence[RowResult]:
        """Score prompts and choose tokens, and remember these.

        Args:
            rows: some of a plan's, each whole or a piece that begins where the piece before ended.
            bounds: where each begins among the tokens that ran with them.
            logits_of: returns fp32 logits (L, V) of the whole vocabulary. Called once a demand, in the order of
                `Demands.of`, whatever fails. They are changed in place.
        """
        ...

    def finish(self, rows: Sequence[Row], results: Sequence[RowResult], target_s: float) -> StepResult:
        """Return the whole step's result, once all its rows are chosen: the drafter learns and proposes."""
        ...

    def guess(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose from a drafter's logits, see `Target.choose`."""
        ...

    def stop(self) -> None:
        """Let the drafter free what it took."""
        ...


class Demands(Protocol):
    """Which logits choosing will ask for, known from plans alone: so that every rank takes part in gathering them."""

    def meet(self, plan: BatchPlan) -> None:
        """Forget sequences that left, and take those that enter."""
        ...

    def of(self, rows: Sequence[Row], bounds: Sequence[int]) -> Sequence[Demand]:
        """Return the demands in their order; the last is for choosing tokens, and its rows can be none."""
        ...


class Executor(Protocol):
    """Runs plans: on this process's device, or over many."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight at once."""
        ...

    def start(self, progress: Progress) -> None:
        """Load weights, make the cache, warm up. Called once, before any plan."""
        ...

    def submit(self, plan: BatchPlan) -> None:
        """Begin a step. At most `depth` are in flight.

        Steps read and write the cache in the order in which they were submitted, moves included: so pages of a sequence
        that is gone may be in a later plan while a step that writes to them is in flight.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and return what it chose. A row's failure is in its result."""
        ...

    def stop(self) -> None:
        """Free what `start` took. Safe to call twice, and after a failed start."""
        ...


@runtime_checkable
class ResolvesPending(Protocol):
    """What an executor of some depth can do besides: run rows whose ids a step in flight chooses."""

    @property
    def resolves_pending(self) -> bool:
        """Whether rows may name PENDING ids. Where not, a sequence is in one step in flight at a time."""
        ...
