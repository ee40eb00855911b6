"""Choosing and verifying tokens. Plain decoding is speculation with zero drafts.

Randomness is counter-based: one uniform number per (seed, choice, position, purpose), so that a request's draws depend
on nothing else: not on its batch, its chunks, a preemption or speculation. A draft is accepted if it equals the token
that the target draws at its position; so drafts never change the output, sampled or greedy. Penalties, biases, logits
processors and bans at a position see the drafts before it, and none after.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from attrs import define, field

from intarsia.protocols import LogitsProcessor, TokenizerView
from intarsia.sampling.arithmetic import FAILED, likeliest
from intarsia.sampling.bans import ban, lift
from intarsia.sampling.drawing import draw
from intarsia.sampling.penalties import add_biases, penalise
from intarsia.sampling.random import CHOOSE, uniforms
from intarsia.sampling.reports import report, report_tasks
from intarsia.sampling.state import State, Task
from intarsia.sampling.words import Vocabulary, Words
from intarsia.types import Entered, Row, RowResult, SequenceId, TokenLogprobs, Want

_RAW_NOT_FINITE: Final = "the model's logits are not finite: NaN, inf, or -inf for every token"


@define
class Sampler:
    """Chooses tokens for the rows of a step. Holds the ids of the sequences it was told of.

    Attributes:
        num_ids: ids from here on have logits in a padded vocabulary and no token; they are never chosen.
        processors: the engine's logits processors, in the order in which they run.
        tokenizer: knows the bytes of tokens, for banned words.
    """

    num_ids: int
    processors: tuple[LogitsProcessor, ...] = ()
    tokenizer: TokenizerView | None = None
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
            except Exception as raised:  # as in `_process`: it ends this sequence alone
                state.error = _blame(processor, raised)
        state.processors = tuple(opened)

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

    def scored(self, row: Row) -> range:
        """Return the indices into a row's ids after which a token of the prompt follows that is to be scored."""
        state = self._states[row.sequence_id]
        if state.params.prompt_logprobs is None or state.choice != 0:
            return range(0)
        return range(min(len(row.token_ids), max(0, state.history.num_prompt - 1 - row.start)))

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

    def choose(self, rows: Sequence[Row], logits_LV: torch.Tensor) -> list[RowResult]:
        """Choose after each row's last token and after each of its drafts; accept the drafts that agree.

        Args:
            rows: the plan's rows. In their order, as many rows of logits belong to each as it wants.
            logits_LV: fp32; changed in place.

        Returns:
            One result a row. A row that fails has an error; the others are not disturbed.
        """
        logits = logits_LV[:, : self.num_ids]
        tasks = self._tasks(rows)
        raw, firsts = report_tasks(tasks, logits)
        penalise(tasks, logits)
        add_biases(tasks, logits)
        failed = dict(found for task in tasks if (found := _process(task, logits)))
        picks, best = _pick(tasks, logits)
        results = {}
        for task in tasks:
            accepted = accept(task.drafts, picks[task.span.start : task.span.stop])
            # Only what happened at accepted tokens counts: behind a rejected draft, anything may have failed.
            reached = task.span[: len(accepted)]
            error = task.state.error or next((failed[index] for index in reached if index in failed), None)
            if error is None and FAILED in accepted:
                error = _failure(best[reached[-1]])
            first = firsts.get(task.row.sequence_id)
            logprobs = raw.read(first, accepted) if first is not None and error is None else ()
            if logprobs is None:
                error = _RAW_NOT_FINITE
            results[task.row.sequence_id] = _result(task, accepted, logprobs, error)
        return [results.get(row.sequence_id) or self._unchosen(row) for row in rows]

    def _unchosen(self, row: Row) -> RowResult:
        """Return the result of a row that wants no tokens: the error of its prompt's scores, if there was one."""
        return RowResult(sequence_id=row.sequence_id, error=self._states[row.sequence_id].error)

    def _tasks(self, rows: Sequence[Row]) -> list[Task]:
        tasks, first = [], 0
        for row in rows:
            if row.want is Want.NONE:
                continue
            stop = first + row.num_drafts + 1
            tasks.append(Task(row, self._states[row.sequence_id], range(first, stop)))
            first = stop
        return tasks


def _result(
    task: Task, accepted: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, error: str | None
) -> RowResult:
    """Give a sequence what was chosen for it, or its error."""
    if error is not None:
        return RowResult(sequence_id=task.row.sequence_id, error=error)
    task.state.extend(accepted)
    return RowResult(sequence_id=task.row.sequence_id, token_ids=tuple(accepted), logprobs=tuple(logprobs or ()))


def accept(drafts: Sequence[int], picks: Sequence[int]) -> list[int]:
    """Return the target's picks up to the first that differs from its draft, that one included.

    Args:
        drafts: k guesses.
        picks: k + 1 tokens that the target drew: after the known tokens, and after each draft.
    """
    agreeing = 0
    while agreeing < len(drafts) and drafts[agreeing] == picks[agreeing]:
        agreeing += 1
    return list(picks[: agreeing + 1])


def _process(task: Task, logits_LV: torch.Tensor) -> tuple[int, str] | None:
    """Run a row's logits processors at its positions, up to the first that fails: return its index and what failed."""
    state = task.state
    if not state.processors:
        return None
    for index, drafts in task.positions():
        for processor, opened in state.processors:
            try:
                opened.process([*state.history.token_ids, *drafts], logits_LV[index])
            except Exception as error:  # a third party's code, whatever it raises, ends this row alone
                return index, _blame(processor, error)
    return None


def _blame(processor: LogitsProcessor, error: Exception) -> str:
    return f"logits processor {type(processor).__name__}: {type(error).__name__}: {error}"


def _failure(best: float) -> str:
    """Say why nothing could be chosen where this is the highest logit."""
    if best == -torch.inf:
        return "no token is allowed: the logits are -inf for every token, after processors and bans"
    return f"the logits are not finite: they hold {'inf' if best == torch.inf else 'NaN'}"


def _pick(tasks: Sequence[Task], logits_LV: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the target's own token for each row of logits, FAILED where there is none, and the highest logit."""
    if not tasks:
        return [], []
    held = ban(tasks, logits_LV)
    picks, best = likeliest(logits_LV)
    for index, stops in held.items():
        if best[index] == -torch.inf:
            lift(logits_LV[index], stops)
            (picks[index],), (best[index],) = likeliest(logits_LV[index : index + 1])
    sampled = [
        (index, task.state, task.first_position + depth)
        for task in tasks
        if not task.state.settings.is_greedy
        for depth, index in enumerate(task.span)
        if picks[index] != FAILED
    ]
    if sampled:
        indices, states, positions = zip(*sampled, strict=True)
        draws = uniforms([s.seed for s in states], [s.choice for s in states], positions, CHOOSE)
        chosen = logits_LV if len(indices) == len(logits_LV) else logits_LV[list(indices)]
        for index, token in zip(indices, draw(chosen, [s.settings for s in states], draws), strict=True):
            picks[index] = token
    return picks, best
