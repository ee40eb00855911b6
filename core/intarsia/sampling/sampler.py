"""Choosing and verifying tokens. Plain decoding is speculation with zero drafts.

Randomness is counter-based: one uniform number per (seed, choice, position, purpose), so that a request's draws depend
on nothing else: not on its batch, its chunks, a preemption or speculation. A draft is accepted if it equals the token
that the target draws at its position; so drafts never change the output, sampled or greedy. The other way to verify,
`rejection`, keeps the distribution alone. Penalties, biases, logits processors and bans at a position see the drafts
before it, and none after.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from attrs import define, field

from intarsia.protocols import LogitsProcessor, TokenizerView
from intarsia.sampling.arithmetic import FAILED
from intarsia.sampling.drawing import Draw, SampleRows, draw
from intarsia.sampling.on_device import Picked, can_pick, pick
from intarsia.sampling.picking import Picks, blame, drawn, edit, failure, redraw
from intarsia.sampling.random import CHOOSE, DRAFT
from intarsia.sampling.rejection import distributions, verify
from intarsia.sampling.reports import Report, report, report_tasks
from intarsia.sampling.state import State, Task
from intarsia.sampling.words import Vocabulary, Words
from intarsia.saying import is_raised
from intarsia.types import Draft, Entered, Row, RowResult, SequenceId, TokenLogprobs, Verify, Want

_RAW_NOT_FINITE: Final = "the model's logits are not finite: NaN, inf, or -inf for every token"


@define
class Sampler:
    """Chooses tokens for the rows of a step. Holds the ids of the sequences it was told of.

    Attributes:
        num_ids: ids from here on have logits in a padded vocabulary and no token; they are never chosen.
        processors: the engine's logits processors, in the order in which they run.
        tokenizer: knows the bytes of tokens, for banned words.
        verify: how drafts are judged.
        draw: draws a token a row, from logits after everything but temperature and filters.
    """

    num_ids: int
    processors: tuple[LogitsProcessor, ...] = ()
    tokenizer: TokenizerView | None = None
    verify: Verify = "equal"
    draw: Draw = draw
    _states: dict[SequenceId, State] = field(factory=dict, init=False)
    _vocabulary: Vocabulary | None = field(default=None, init=False)

    def enter(self, entered: Entered) -> None:
        """Take a sequence, or take it again after a preemption. What fails here is the error of its first row."""
        state = State.of(entered, self.num_ids)
        self._states[entered.sequence_id] = state
        if state.params.banned_words:
            state.error = self._ban_words(state)
        opened = []
        for processor in self.processors:
            try:
                if processor.applies(entered.params):
                    opened.append((processor, processor.open(entered.params, entered.num_prompt)))
            except BaseException as raised:  # as in `edit`: it ends this sequence alone
                if not is_raised(raised):
                    raise
                state.error = blame(processor, raised)
        state.processors = tuple(opened)
        state.complete()

    def _ban_words(self, state: State) -> str | None:
        """Begin to keep banned words out of an answer; return why that cannot be."""
        if self._vocabulary is None:
            if self.tokenizer is None:
                return "sampling.banned_words: this model has no tokenizer, so that words cannot be found in its tokens"
            self._vocabulary = Vocabulary.of(self.tokenizer, self.num_ids)
        vocabulary = self._vocabulary
        state.words = Words(vocabulary, tuple(map(vocabulary.word, state.params.banned_words)))
        state.words.extend(state.history.token_ids[state.history.num_prompt :])
        return None

    def leave(self, sequence_id: SequenceId) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        self._states.pop(sequence_id, None)

    def token_ids(self, sequence_id: SequenceId) -> Sequence[int]:
        """Return the prompt and what was chosen so far."""
        return self._states[sequence_id].history.token_ids

    def can_pick(self, rows: Sequence[Row], *, draws: bool) -> bool:
        """Whether the device alone can choose for all of these rows; see `intarsia.sampling.on_device`."""
        return all(can_pick(row, self._states[row.sequence_id], draws=draws) for row in rows)

    def pick(self, rows: Sequence[Row], logits_LV: torch.Tensor, sample_rows: SampleRows | None) -> Picked:
        """Choose for such rows on the device, as `choose` does. What is chosen is taken by `Picked.settle`."""
        wanting = [row for row in rows if row.want is not Want.NONE]
        states = [self._states[row.sequence_id] for row in wanting]
        return pick(wanting, states, logits_LV[:, : self.num_ids], sample_rows)

    def scored(self, row: Row) -> range:
        """Return the indices into a row's ids after which a token of the prompt follows that is to be scored."""
        num_scored = self._states[row.sequence_id].num_scored
        return range(min(len(row.token_ids), max(0, num_scored - row.start)))

    def score(self, row: Row, indices: range, logits_LV: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Score the prompt's tokens that follow some of those that `scored` gave. Call it before `choose`.

        Args:
            row: a row of the plan.
            indices: L of them.
            logits_LV: fp32 logits after each; not changed.

        Returns:
            One entry an index; nothing where the logits are not finite, and then `choose` gives this row its error.
        """
        state = self._states[row.sequence_id]
        wanted = state.params.prompt_logprobs
        assert wanted is not None, "only what `scored` gave is scored"
        following = [state.history.token_ids[row.start + index + 1] for index in indices]
        entries = report(logits_LV[:, : self.num_ids], following, wanted)
        if entries is None:
            state.error = f"{_RAW_NOT_FINITE}, within the prompt"
        return entries or ()

    def choose(
        self,
        rows: Sequence[Row],
        logits_LV: torch.Tensor,
        probabilities: Mapping[SequenceId, torch.Tensor] = MappingProxyType({}),
    ) -> list[RowResult]:
        """Choose after each row's last token and after each of its drafts; accept drafts and draw one token more.

        Args:
            rows: the plan's rows. In their order, as many rows of logits belong to each as it wants.
            logits_LV: fp32; changed in place.
            probabilities: what drafts were drawn from, (k, V), float64; read where they are verified by rejection.

        Returns:
            One result a row. A row that fails has an error; the others are not disturbed.
        """
        logits = logits_LV[:, : self.num_ids]
        tasks = self._tasks(rows)
        raw, firsts = report_tasks(tasks, logits)
        picks = edit(tasks, logits)
        redraw(drawn(tasks, picks), logits, CHOOSE, picks, self.draw)
        if self.verify == "rejection":
            verify(tasks, logits, probabilities, picks)
        results = {task.sequence_id: _settle(task, picks, raw, firsts.get(task.sequence_id)) for task in tasks}
        return [results.get(row.sequence_id) or self._unchosen(row) for row in rows]

    def are_plain(self, rows: Sequence[Row]) -> bool:
        """Whether the likeliest id after each token that wants one is all that these rows need: then `take` serves."""
        for row in rows:
            state = self._states[row.sequence_id]
            if row.start < state.num_scored or state.error is not None:
                return False
            if not state.is_plain and row.want is not Want.NONE:
                return False
        return True

    def take(self, rows: Sequence[Row], token_ids: Sequence[int], best: Sequence[float]) -> list[RowResult]:
        """Do what `choose` does for such rows, from what `arithmetic.likeliest` finds in their rows of logits.

        Args:
            rows: the plan's, of which `are_plain` said so.
            token_ids: L likeliest ids.
            best: their logits.
        """
        results, first = [], 0
        for row in rows:
            sequence_id = row.sequence_id
            if row.want is Want.NONE:
                results.append(RowResult(sequence_id=sequence_id))
                continue
            stop = first + row.num_drafts + 1
            accepted = accept(row.token_ids[len(row.token_ids) - row.num_drafts :], token_ids[first:stop])
            if accepted[-1] == FAILED:
                results.append(RowResult(sequence_id=sequence_id, error=failure(best[first + len(accepted) - 1])))
            else:
                self._states[sequence_id].extend(accepted)
                results.append(RowResult(sequence_id=sequence_id, token_ids=tuple(accepted)))
            first = stop
        return results

    def guess(
        self, sequence_ids: Sequence[SequenceId], drafts: Sequence[Sequence[int]], logits_RV: torch.Tensor
    ) -> Draft:
        """Choose one id a row from a drafter's logits; see `Target.choose`. Nothing is remembered."""
        logits = logits_RV[:, : self.num_ids]
        tasks = [
            Task(sequence_id, self._states[sequence_id], range(index, index + 1), tuple(before), len(before))
            for index, (sequence_id, before) in enumerate(zip(sequence_ids, drafts, strict=True))
        ]
        picks = edit(tasks, logits)
        for index in picks.failed:
            picks.token_ids[index] = FAILED
        sampled = drawn(tasks, picks)
        redraw(sampled, logits, CHOOSE if self.verify == "equal" else DRAFT, picks, self.draw)
        if self.verify == "equal" or not sampled:
            return Draft(tuple(picks.token_ids))
        probabilities_RV = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        indices = [one.index for one in sampled]
        probabilities_RV[indices] = distributions(logits[indices], [one.state.settings for one in sampled])
        return Draft(tuple(picks.token_ids), probabilities_RV)

    def _unchosen(self, row: Row) -> RowResult:
        """Return the result of a row that wants no tokens: the error of its prompt's scores, if there was one."""
        return RowResult(sequence_id=row.sequence_id, error=self._states[row.sequence_id].error)

    def _tasks(self, rows: Sequence[Row]) -> list[Task]:
        tasks, first = [], 0
        for row in rows:
            if row.want is Want.NONE:
                continue
            tasks.append(Task.of(row, self._states[row.sequence_id], first))
            first = tasks[-1].span.stop
        return tasks


def _settle(task: Task, picks: Picks, raw: Report, first: int | None) -> RowResult:
    """Give a sequence what was chosen for it, or its error; its log-probabilities begin in the report at `first`."""
    accepted = accept(task.drafts, picks.token_ids[task.span.start : task.span.stop])
    # Only what happened at accepted tokens counts: behind a rejected draft, anything may have failed.
    reached = task.span[: len(accepted)]
    error = task.state.error or next((picks.failed[index] for index in reached if index in picks.failed), None)
    if error is None and FAILED in accepted:
        error = failure(picks.best[reached[-1]])
    logprobs = raw.read(first, accepted) if first is not None and error is None else ()
    if logprobs is None:
        error = _RAW_NOT_FINITE
    if error is not None:
        return RowResult(sequence_id=task.sequence_id, error=error)
    task.state.extend(accepted)
    return RowResult(sequence_id=task.sequence_id, token_ids=tuple(accepted), logprobs=tuple(logprobs or ()))


def accept(drafts: Sequence[int], picks: Sequence[int]) -> list[int]:
    """Return the target's picks up to the first that differs from its draft, that one included.

    Args:
        drafts: k guesses.
        picks: k + 1 tokens: what follows the known tokens, and each draft. A draft that is accepted is its own pick.
    """
    agreeing = 0
    while agreeing < len(drafts) and drafts[agreeing] == picks[agreeing]:
        agreeing += 1
    return list(picks[: agreeing + 1])
