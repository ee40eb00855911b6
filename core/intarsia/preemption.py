"""What preempting costs: figures of it, and the prices by which a cache chooses to copy or to compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from attrs import Factory, define, field

from intarsia.protocols import CacheAllocator, SwappingAllocator
from intarsia.types import BatchPlan, SequenceId, StepResult, SwapPrices, Want

#: How much of what was measured before counts beside a new measurement: about the last ten decide.
_KEPT = 0.9


@define
class _Rate:
    """A ratio of sums in which what is old counts less and less."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> None:
        self.above = self.above * _KEPT + above
        self.below = self.below * _KEPT + below

    @property
    def value(self) -> float | None:
        """None until both have been measured."""
        return self.above / self.below if self.above > 0 and self.below > 0 else None


@define
class Preemption:
    """Counts preemptions, and measures what it takes to copy pages and to compute a prompt's tokens.

    Seconds a token are those of steps, from the one after the last that chose tokens to the next that does, of whose
    tokens at least half are prompts': a device may still be at work on a step that chose none. That attention takes
    longer the longer a sequence is, is in the mean of the prompts so far and no further.

    Attributes:
        preempted: how often a sequence lost its pages.
        recomputed: tokens that were computed again for it; those that were found in the cache are none.
    """

    allocator: CacheAllocator
    preempted: int = 0
    recomputed: int = 0
    _lost: dict[SequenceId, int] = Factory(dict)
    _token_s: _Rate = Factory(_Rate)
    _bytes_per_s: _Rate = Factory(_Rate)
    _open_s: float = field(default=0.0, init=False)
    _open_tokens: int = field(default=0, init=False)
    _open_prompts: int = field(default=0, init=False)
    #: the allocator where it swaps: asked once, since a step has no time for it
    _swapping: SwappingAllocator | None = field(init=False)
    #: whether the allocator was not told of the prices yet that are in force
    _is_news: bool = field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        self._swapping = self.allocator if isinstance(self.allocator, SwappingAllocator) else None

    def begin(self, plan: BatchPlan, num_computed: Callable[[SequenceId], int]) -> None:
        """Note who is preempted in a plan that is about to run, and who runs again.

        Args:
            plan: of the step.
            num_computed: gives how many tokens of a sequence had valid slots before the plan.
        """
        for sequence_id in plan.left:
            self._lost.pop(sequence_id, None)
        for sequence_id in plan.preempted:
            self.preempted += 1
            self._lost[sequence_id] = max(num_computed(sequence_id), self._lost.get(sequence_id, 0))
        if self._lost:
            for row in plan.rows:
                self.recomputed += max(0, self._lost.pop(row.sequence_id, 0) - row.start)

    def observe(self, plan: BatchPlan, result: StepResult) -> bool:
        """Learn from what a step took; return whether the allocator is to be told, by `tell`."""
        self._open_s += result.target_s
        chooses = False
        for row in plan.rows:
            num_tokens = len(row.token_ids)
            self._open_tokens += num_tokens
            if row.want is Want.LAST:
                chooses = True
            if row.want is Want.NONE or num_tokens > row.num_drafts + 1:
                self._open_prompts += num_tokens
        if chooses:
            if 2 * self._open_prompts >= self._open_tokens:
                self._token_s.add(self._open_s, self._open_tokens)
                self._is_news = True
            self._open_s, self._open_tokens, self._open_prompts = 0.0, 0, 0
        if result.swapped:
            self._bytes_per_s.add(result.swapped, result.swap_s)
            self._is_news = True
        return self._is_news and self._swapping is not None

    def tell(self) -> None:
        """Tell an allocator that swaps the prices that are in force."""
        if self._swapping is not None:
            self._swapping.price(self.prices)
        self._is_news = False

    @property
    def prices(self) -> SwapPrices:
        """What was measured; the defaults of what was not."""
        assumed = SwapPrices()
        return SwapPrices(
            bytes_per_s=self._bytes_per_s.value or assumed.bytes_per_s, token_s=self._token_s.value or assumed.token_s
        )

    def stats(self) -> dict[str, Any]:
        """Return the figures.

        Keys:
            preempted, recomputed_tokens: see the attributes.
            token_s: seconds a token of prompts; None where nothing was measured yet.
            swap: of a cache with host memory, its books (`SwapStats`), `bytes_per_s` of copies (None where none was
                measured yet), and the `prices` that are in force; else None.
        """
        swap = None
        if self._swapping is not None and (books := self._swapping.swap_stats()).num_pages:
            swap = {
                **attrs.asdict(books),
                "bytes_per_s": self._bytes_per_s.value,
                "prices": attrs.asdict(self.prices),
            }
        return {
            "preempted": self.preempted,
            "recomputed_tokens": self.recomputed,
            "token_s": self._token_s.value,
            "swap": swap,
        }
