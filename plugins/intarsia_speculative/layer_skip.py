"""Self-speculation: the target's own first layers, with its norm and head, are the drafter.

Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip". No second model, and no second cache: the first
layers' keys and values of the sequence are there. Those of the guesses go where the next step writes all layers' anew:
to the free slots of the sequence's last page, which no other sequence can read, and past it to scratch pages.

Shape legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from attrs import define, field

from intarsia.protocols import Drafter, DrafterContext, DraftRequest, Target
from intarsia.types import CacheLayout, Draft, Fit, Unfit
from intarsia_speculative.control import controlled
from intarsia_speculative.guessing import Guessing, guess
from intarsia_speculative.model_options import LayerSkipOptions

#: Sequences that can need scratch pages at once; more are drafted for one batch after another.
_SCRATCH_ROWS = 32


@define(eq=False)
class LayerSkip(Drafter):
    """Runs the first layers k times a step, over all sequences that want guesses.

    Attributes:
        num_layers: how many.
        k: guesses a step, at most: what scratch pages are for.
    """

    num_layers: int
    k: int
    _target: Target | None = field(default=None, init=False)
    _scratch: tuple[int, ...] = field(default=(), init=False)

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes of the scratch pages."""
        return self._num_scratch(layout) * layout.page_bytes

    def start(self, target: Target) -> None:
        """Take scratch pages."""
        self._target = target
        self._scratch = target.take_scratch(self._num_scratch(target.layout))

    def _num_scratch(self, layout: CacheLayout) -> int:
        return _SCRATCH_ROWS * -(-self.k // layout.page_size)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Guess, in as many batches as scratch pages ask for."""
        assert self._target is not None, "start() comes first"
        forward = partial(self._target.forward, num_layers=self.num_layers)
        guessings: list[Guessing] = []
        first, free = 0, list(self._scratch)
        for request in requests:
            wanted = min(request.wanted, self.k)
            lacking = max(self._lacking(request, wanted))
            if lacking > len(free):
                guess(guessings[first:], self._target, forward)
                first, free = len(guessings), list(self._scratch)
            guessings.append(self._begin(request, wanted, free))
            del free[:lacking]
        guess(guessings[first:], self._target, forward)
        return [one.draft() for one in guessings]

    def _lacking(self, request: DraftRequest, wanted: int) -> list[int]:
        """Return how many pages each of a sequence's tables is short of, for all guesses but the last."""
        assert self._target is not None
        num_pages = -(-(len(request.token_ids) + wanted - 1) // self._target.layout.page_size)
        return [max(0, num_pages - len(table)) for table in request.pages]

    def _begin(self, request: DraftRequest, wanted: int, free: Sequence[int]) -> Guessing:
        tables = zip(request.pages, self._lacking(request, wanted), strict=True)
        pages = tuple((*table, *free[:lacking]) for table, lacking in tables)
        return Guessing(request, len(request.token_ids) - 1, wanted, pages)


def _num_layers(options: LayerSkipOptions, num_layers: int) -> int:
    return options.layers if options.layers is not None else max(1, num_layers // 2)


def fit(context: DrafterContext) -> Fit | Unfit:
    """Any model that has layers to skip."""
    has, options = context.spec.num_layers, context.options
    if _num_layers(options, has) >= has:
        asked = "" if options.layers is None else f", and layers = {options.layers} leaves none out"
        return Unfit(f"the model has {has} layers{asked}; layers is a number from 1 to {has - 1}")
    return Fit(10, f"the first {_num_layers(options, has)} of {has} layers draft")


def build(context: DrafterContext) -> Drafter:
    """Make the drafter."""
    options: LayerSkipOptions = context.options
    drafter = LayerSkip(_num_layers(options, context.spec.num_layers), options.k)
    return controlled(drafter, k=options.k, adaptive=options.adaptive)
