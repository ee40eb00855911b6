"""The engine's logits processors, as the sampler calls them: one that fails is named, and what it takes is counted.

Shape legend: V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attrs import frozen

from intarsia.errors import PluginError
from intarsia.owners import owned_by
from intarsia.protocols import ExecutorContext, LogitsProcessor, Selection, SequenceProcessor
from intarsia.saying import is_raised, said
from intarsia.times import Times
from intarsia.types import SamplingParams

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class _Named(LogitsProcessor):
    """A logits processor, and whose it is."""

    processor: LogitsProcessor
    selection: Selection
    times: Times

    def applies(self, params: SamplingParams) -> bool:
        with self.at("applies"):
            return self.processor.applies(params)

    def open(self, params: SamplingParams, num_prompt: int) -> SequenceProcessor:
        with self.at("open"):
            return _Opened(self.processor.open(params, num_prompt), self)

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Count the block, and name the processor where it fails; that ends one row."""
        try:
            with self.times.at(self.selection.name):
                yield
        except BaseException as error:
            if not is_raised(error):
                raise
            raised = PluginError(f"{self.selection.title} failed in {doing}: {said(error)}")
            raised.owner = self.selection.title
            raise raised from error


@frozen(eq=False)
class _Opened:
    """What processes one sequence."""

    processor: SequenceProcessor
    owner: _Named

    def process(self, token_ids: Sequence[int], logits_V: torch.Tensor) -> None:
        with self.owner.at("process"):
            self.processor.process(token_ids, logits_V)


def logits_processors(context: ExecutorContext) -> tuple[LogitsProcessor, ...]:
    """Return a context's logits processors; those of which it says whose they are, named."""
    pairs = owned_by(context.selections, logits_processors=context.logits_processors)
    named = tuple(
        _Named(processor, selection, context.times)
        for processor, (_, selection) in zip(context.logits_processors, pairs, strict=False)
    )
    return named if len(named) == len(context.logits_processors) else context.logits_processors
