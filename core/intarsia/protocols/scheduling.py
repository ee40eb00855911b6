"""Who runs next, and where keys and values live: schedulers and cache allocators. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from intarsia.protocols.forward import CacheStorage
from intarsia.types import (
    BatchPlan,
    CacheMove,
    CacheStats,
    Entered,
    RowResult,
    SamplingParams,
    SequenceId,
    SwapPrices,
    SwapStats,
)

if TYPE_CHECKING:
    import torch


class SequenceView(Protocol):
    """What schedulers see of a sequence. The engine owns it and changes it between calls."""

    @property
    def sequence_id(self) -> SequenceId:
        """Request id and choice."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and accepted tokens."""
        ...

    @property
    def num_prompt(self) -> int:
        """How many of them are the prompt."""
        ...

    @property
    def num_computed(self) -> int:
        """How many of them have their keys and values in the cache. Schedulers' own books may run ahead of it."""
        ...

    @property
    def max_total(self) -> int:
        """The most tokens it can ever hold: prompt and limit."""
        ...

    @property
    def priority(self) -> int:
        """Higher runs first."""
        ...

    @property
    def salt(self) -> str:
        """Its cached prefixes are shared with sequences of an equal salt alone."""
        ...

    @property
    def params(self) -> SamplingParams:
        """What was asked."""
        ...

    def entered(self) -> Entered:
        """Return what a plan tells an executor when the sequence's first row comes, or its first after a preemption."""
        ...


class CacheAllocator(Protocol):
    """Keeps the books of the cache's pages. Needs no torch; the tensors are the executor's.

    One page table a cache group. `num_computed` tokens of a sequence have valid slots; only accepted tokens count.
    """

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can find what another with equal first tokens has computed."""
        ...

    def capacity(self, max_tokens: int) -> int:
        """Return how many sequences that each grow to `max_tokens` fit at once in an empty cache."""
        ...

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Return how many leading tokens `reserve` would find cached. No side effects."""
        ...

    def reserve(self, sequence_id: SequenceId, token_ids: Sequence[int], num_tokens: int, salt: str = "") -> int | None:
        """Make room for a sequence to hold `num_tokens`, of which `token_ids` are the known ones.

        Returns how many leading tokens have valid slots by now, prefix hits included, or None where there is no room;
        then nothing has changed.
        """
        ...

    def pages(self, sequence_id: SequenceId) -> tuple[tuple[int, ...], ...]:
        """Return the page table, one tuple a group, in the order of positions."""
        ...

    def commit(self, sequence_id: SequenceId, token_ids: Sequence[int], num_computed: int) -> None:
        """Tell that the first `num_computed` of these accepted tokens are in the cache; full pages may be shared."""
        ...

    def rewind(self, sequence_id: SequenceId, num_tokens: int) -> None:
        """Forget all slots from position `num_tokens` on, such as those of rejected drafts."""
        ...

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> bool:
        """Let `child` start with the first `num_tokens` that `parent` has computed.

        Returns False where there is no room, or a window has left behind what the next token would see; then nothing
        has changed. Pages that both would write to are copied, by `take_moves`, before one of them does.
        """
        ...

    def release(self, sequence_id: SequenceId) -> None:
        """Give a sequence's pages back. Unknown ids are ignored: a request can be cancelled twice."""
        ...

    def take_moves(self) -> tuple[CacheMove, ...]:
        """Return the page copies due before the next step, and forget them."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError where a page is lost, or owned twice without being shared."""
        ...

    def stats(self) -> CacheStats:
        """Return the books' figures."""
        ...


@runtime_checkable
class StorageMaker(Protocol):
    """What a cache allocator can do besides: make the storage that its page tables are for.

    Such an allocator can name more pages than have memory at once, and says in its moves which have.
    """

    @property
    def num_page_ids(self) -> int:
        """How many pages its tables can name, from 0 on."""
        ...

    def make_storage(self, num_pages: int, device: torch.device) -> CacheStorage:
        """Return one rank's tensors.

        Args:
            num_pages: `num_page_ids`, and behind these the pages that a drafter took, which always have memory. So has
                the spare page behind them all.
            device: where the memory is.

        Raises:
            ExecutionError: the device refuses.
        """
        ...


@runtime_checkable
class SwappingAllocator(Protocol):
    """What a cache allocator can do besides: keep the pages of preempted sequences in host memory.

    `reserve` brings a swapped sequence's pages back, and then returns as many tokens as were valid when it left, or
    None where there is no room; then it stays swapped out. `release` gives its host pages back, and `fork` names it as
    neither parent nor child. Both ways the copies are moves of the next plan.
    """

    def swap_out(self, sequence_id: SequenceId) -> bool:
        """Move a sequence's valid tokens to host memory and give its pages back.

        Returns False where host memory has no room, or computing the tokens again is cheaper; then nothing has changed.
        """
        ...

    def price(self, prices: SwapPrices) -> None:
        """Learn what copying and computing were measured to take."""
        ...

    def swap_stats(self) -> SwapStats:
        """Return the figures of host memory."""
        ...


class Scheduler(Protocol):
    """Decides who runs in the next step. It holds the allocator; it never sees tensors."""

    def add(self, sequence: SequenceView) -> None:
        """Take a new sequence, one that fits an empty cache. Raise OverloadedError where the queue is full.

        Where it raises, nothing has changed.
        """
        ...

    def plan(self) -> BatchPlan:
        """Return the next step: who runs, how many tokens, who is preempted. No rows where nothing can run."""
        ...

    def update(self, plan: BatchPlan, results: Sequence[RowResult]) -> None:
        """Take a step's outcome. The sequences hold the accepted tokens by now, cut at stops; drafts are proposals."""
        ...

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence that finished or was cancelled, in whatever state, and release its pages.

        It is never in a later plan. Unknown ids are ignored.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that have no pages."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """What a scheduler can do besides: plan a step while others are in flight. Others plan after each result.

    `update` tells of each step in turn. It leaves out rows whose sequence is gone by then.
    """

    def expect(self, plan: BatchPlan, *, names_pending: bool) -> None:
        """Take note that a plan was submitted; later ones come after it. Not called where one step is in flight alone.

        A row that wants a token is expected to bring one, as far as `max_total` allows. A sequence with a row in flight
        is not preempted, and is no parent or prefix for more than `num_computed` says.

        Args:
            plan: what `plan` returned last.
            names_pending: whether a row may name the id that is expected, by PENDING. Where not, and always after a row
                with drafts, a sequence whose row wants a token has its next one after the result.
        """
        ...
