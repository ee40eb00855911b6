"""What has a say in the next token: drafters and logits processors.

Shape legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from intarsia.types import CacheLayout, CacheMove, Draft, Entered, Row, SamplingParams, SequenceId

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch


@frozen(kw_only=True)
class DraftRequest:
    """Ask for up to `wanted` guesses of what follows `token_ids`.

    Attributes:
        token_ids: prompt and accepted tokens; all but the last have their keys and values in the cache.
        pages: the sequence's page table, one tuple a cache group.
    """

    sequence_id: SequenceId
    token_ids: Sequence[int]
    wanted: int
    pages: tuple[tuple[int, ...], ...] = ()


@frozen(kw_only=True)
class Verified:
    """What became of one sequence's drafts: of `drafted` ids the first `accepted` were the target's own."""

    sequence_id: SequenceId
    drafted: int
    accepted: int


@frozen(kw_only=True)
class StepCost:
    """What a step took.

    Attributes:
        num_tokens: that ran, drafts among them.
        target_s: seconds for running and choosing.
        draft_s: seconds of the `propose` that made its drafts.
    """

    num_rows: int
    num_tokens: int
    target_s: float
    draft_s: float


class Target(Protocol):
    """A model that a drafter may run: the one that drafts are for, or the drafter's own."""

    @property
    def layout(self) -> CacheLayout:
        """How its cache lies."""
        ...

    def take_scratch(self, num_pages: int) -> tuple[int, ...]:
        """Return pages that no sequence ever holds, in every cache group, for positions that a row has no pages for.

        Called in `Drafter.start` alone: its cache is made after that.
        """
        ...

    def forward(
        self, rows: Sequence[Row], *, num_layers: int | None = None, moves: Sequence[CacheMove] = ()
    ) -> torch.Tensor:
        """Do the cache's work, then run rows and the head; return fp32 logits (R, V) after the last token of each row.

        Nothing is remembered but keys and values at the rows' positions, which whoever runs these positions next writes
        anew.

        Args:
            rows: without drafts; their ids are known. Those that want no logits get none.
            num_layers: how many of the first layers run; None is all.
            moves: of the cache's allocator.
        """
        ...

    def choose(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row from any model's logits as the row's request would, after its tokens and these drafts.

        With its penalties, processors and bans. Where drafts must be equal, the id is drawn with the number that the
        target draws with at that position, so that the two agree often; where they are verified by rejection, with one
        of its own, and the probabilities (R, V) are returned too. An id below 0: nothing could be chosen.

        Args:
            sequence_ids: sequences that have entered.
            drafts: for each of them, those before the position.
            logits_RV: fp32; changed in place. Logits of ids that no token has are ignored.
        """
        ...


class Drafter(Protocol):
    """Guesses the next tokens cheaply. Whatever it says, the output does not change.

    What it raises once it has started costs its guesses and nothing else: it is logged once and counted in `stats`. A
    subclass inherits all but `propose`.
    """

    def num_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes that `start` will take, beside a target whose cache lies so. Called before it, for plans."""
        del layout
        return 0

    def start(self, target: Target) -> None:
        """Get ready: the target's weights are loaded, its cache is not made yet. Called once, before any step."""
        del target

    def enter(self, entered: Entered) -> None:
        """Hear of a sequence when its first row comes, or its first after a preemption."""
        del entered

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return guesses for each request, possibly none. May keep state by sequence id."""
        ...

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Hear what became of the drafts of a step, and what the step took. Called after each step with rows."""
        del verified, cost

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop state of a sequence that left."""
        del sequence_id

    def stats(self) -> Mapping[str, Any]:
        """Return figures."""
        return {}

    def stop(self) -> None:
        """Free what `start` took. Safe to call twice, and without a start."""
        return


class LogitsProcessor(Protocol):
    """Changes the logits of the requests that ask for it. A subclass inherits all but `open`."""

    def applies(self, params: SamplingParams) -> bool:
        """Whether a request with these parameters needs it.

        All do by default. Asked when the request comes, and cheap. What it asks of this processor is in
        `params.logits_processors`, under the processor's key. Raise InvalidRequestError where that is malformed: the
        request is refused, before any step.
        """
        del params
        return True

    def prepare(self, params: SamplingParams) -> Future[object] | None:
        """Begin long work for a request that it applies to, outside the engine's thread; None where there is none.

        The request waits until the future is done, and the others go on. If the future raises InvalidRequestError, the
        request fails with its message. Requests can share a future: that of a request which is given up is not
        cancelled.
        """
        del params
        return None

    def open(self, params: SamplingParams, num_prompt: int) -> SequenceProcessor:
        """Return what processes one sequence of such a request. It is dropped when the sequence leaves."""
        ...


class SequenceProcessor(Protocol):
    """One sequence's logits processing: a pure function of the ids before a position. What it keeps is for speed alone.

    Ids can be other than at the call before: drafts are among them, and may have been rejected since.
    """

    def process(self, token_ids: Sequence[int], logits_V: torch.Tensor) -> None:
        """Change one row of fp32 logits in place. -inf forbids a token; one must be left.

        Args:
            token_ids: prompt, answer and drafts before this position.
            logits_V: the logits there, after penalties and biases.
        """
        ...
