"""One step of the engine as data: what runs (`BatchPlan`), as tensors (`ForwardBatch`), what came out (`StepResult`).

A batch is ragged: the tokens of all rows laid end to end. Prefill, a chunk of one, decode and verification of drafts
are one case: a row of one or more tokens after a start.

Shape legend: T tokens of the step, R rows, L rows of logits wanted, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import Factory, field, frozen

from intarsia.types.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import torch

#: A token of a row that the step before chooses: its id is still on the device.
PENDING = -1

#: One choice of one request: what schedulers, allocators and executors tell apart.
SequenceId: TypeAlias = tuple[str, int]


class Want(Enum):
    """Which positions of a row need logits."""

    NONE = "none"  #: a chunk before the last of a prompt
    LAST = "last"  #: the last token and each draft before it: a token is chosen after each


@frozen(kw_only=True)
class Row:
    """The tokens that one sequence runs in this step.

    Attributes:
        token_ids: ids, or PENDING for one that the step in flight chooses. The last `num_drafts` are guesses.
        start: position of the first of them: the number of tokens already in the cache.
        num_drafts: how many at the end are drafts to verify.
        drafts_wanted: how many drafts the drafter may propose after this step.
        pages: the page table, one tuple a cache group.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    start: int
    num_drafts: int = 0
    drafts_wanted: int = 0
    want: Want = Want.LAST
    pages: tuple[tuple[int, ...], ...] = ()


@frozen(kw_only=True)
class Entered:
    """A sequence that an executor sees for the first time, or again after a preemption.

    Attributes:
        params: none of its defaults is left open.
        seed: in force for this request; draws depend on (seed, choice, position, purpose) and nothing else.
        token_ids: the prompt and, after a preemption, what was generated before it.
        num_prompt: how many of them are the prompt.
        stop_ids: ids that end it.
        salt: what is kept of it may serve sequences of an equal salt alone.
    """

    sequence_id: SequenceId
    params: SamplingParams
    seed: int
    token_ids: tuple[int, ...]
    num_prompt: int
    stop_ids: frozenset[int] = frozenset()
    salt: str = ""


@frozen
class CacheMove:
    """Work on pages before a step: copy `source` to `target`, zero `target`, or swap between device and host.

    `swap_out` copies the device's page `source` to the host's page `target`, `swap_in` the host's page `source` to the
    device's page `target`. Each group has host pages of its own, numbered from 0.

    Of a cache whose pages have memory only while they are used, `map` and `unmap` give memory to, and take it from,
    the `target`-th granule of a group's addresses: a granule is the least that the device maps.
    """

    kind: Literal["copy", "zero", "swap_out", "swap_in", "map", "unmap"]
    target: int
    source: int = -1
    group: int = 0


@frozen(kw_only=True)
class BatchPlan:
    """Everything an executor needs to run one step. It never asks the scheduler back.

    Attributes:
        preempted: sequences that lost their pages in this plan; never among the rows.
        entered: sequences whose first row is in this plan.
        left: sequences that no later plan will name; executors drop their state.
        moves: cache work to do first, in order.
    """

    rows: tuple[Row, ...] = ()
    preempted: tuple[SequenceId, ...] = ()
    entered: tuple[Entered, ...] = ()
    left: tuple[SequenceId, ...] = ()
    moves: tuple[CacheMove, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that run in this step."""
        return sum(len(row.token_ids) for row in self.rows)


@frozen(kw_only=True, eq=False)
class ForwardBatch:
    """A plan's rows as tensors on the device. Complete at birth.

    Attributes:
        ids_T: int64 token ids.
        positions_T: int64 positions in their sequences.
        slots_T: per cache group, int64 slot (page * page size + offset) that each token's key and value go to; -1 is
            nowhere (a padded token).
        bounds: R + 1 offsets into T, on the host.
        starts: per row the position of its first token, on the host.
        pages: per cache group and row the page table, on the host.
        logits_L: int64 indices into T of the tokens after which one is chosen.
        read_L: int64 indices into T, ascending, of the tokens whose residual stream is read behind the layers of a run;
            None is all. Of the others a runner need only write keys and values.
        attention: what the attention backend prepared for this step.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    pages: tuple[tuple[tuple[int, ...], ...], ...]
    logits_L: torch.Tensor
    read_L: torch.Tensor | None = None
    attention: Any = None

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return len(self.starts)


@frozen(kw_only=True)
class Demand:
    """Logits that choosing asks for at once: to choose tokens, or to score a piece of a prompt.

    Attributes:
        rows_L: numbers of tokens among those that run together: logits after each are wanted.
        plain_L: whether the likeliest id is all that is needed of each; then a row may hold -inf in the place of the
            other logits.
        row: index of the row whose prompt they score; None where tokens are chosen.
        first: of a prompt's piece, the index of its first token into the row's ids.
    """

    rows_L: tuple[int, ...]
    plain_L: tuple[bool, ...]
    row: int | None = None
    first: int = 0


@frozen(eq=False)
class Draft:
    """Guesses of what follows a sequence.

    Attributes:
        token_ids: k ids, the first follows the sequence.
        probabilities: (k, V), what each was drawn from, for verification by rejection. They must be true, and whether a
            guess is proposed must not depend on its id, only on those before it. None is certainty, which keeps the
            target's distribution whatever the guesses come from.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: torch.Tensor | None = None


@frozen(kw_only=True)
class RowResult:
    """What a step chose for one row.

    Attributes:
        token_ids: accepted drafts and one token more; empty where no logits were wanted.
        logprobs: one for each of them, where asked for.
        prompt_logprobs: where asked for, of the prompt's tokens that follow this row's: the first is at `start` + 1.
        drafts: proposals for the next step.
        error: why this row failed; its request ends with it, the others go on.
    """

    sequence_id: SequenceId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: tuple[int, ...] = ()
    error: str | None = None


@frozen(kw_only=True)
class StepResult:
    """The results of a plan's rows, in their order.

    Attributes:
        target_s: seconds for running the model and choosing tokens.
        draft_s: seconds in which the drafter made the proposals.
        draft_error: what the drafter failed with; then it proposed nothing, and the step is whole without it.
        swapped: bytes that were copied between device and host, of copies that are known to be over since the step
            before, on the rank that chooses.
        swap_s: seconds that these took.
        spent: part, as `slot.key`, -> its own seconds and calls since the step before, of the parts that this executor
            drives where it chooses; empty where it does not say.
    """

    rows: tuple[RowResult, ...] = field(default=())
    target_s: float = 0.0
    draft_s: float = 0.0
    draft_error: str | None = None
    swapped: int = 0
    swap_s: float = 0.0
    spent: Mapping[str, tuple[float, int]] = Factory(dict)
