"""Choosing and verifying tokens. Plain decoding is speculation with zero drafts.

Randomness is counter-based: one uniform number per (seed, choice, position, purpose), so that a request's draws depend
on nothing else: not on its batch, its chunks, a preemption or speculation. A draft is accepted if it equals the token
that the target draws at its position; so drafts never change the output, sampled or greedy.

Shape legend: L rows of logits, V vocab, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from attrs import define, field, frozen

from intarsia.protocols import LogitsProcessor, SequenceProcessor, TokenizerView
from intarsia.sampling.random import CHOOSE, uniforms
from intarsia.sampling.reports import report
from intarsia.types import Entered, Row, RowResult, SamplingParams, SequenceId, TokenLogprobs, Want


@define
class _State:
    """What is known of one sequence: its parameters, the ids so far, and what failed before its first token."""

    params: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    token_ids: list[int]
    processors: list[tuple[LogitsProcessor, SequenceProcessor]]
    error: str | None


@define
class Sampler:
    """Chooses tokens for the rows of a step. Holds the ids of the sequences it was told of.

    Attributes:
        num_ids: ids from here on have logits in a padded vocabulary and no token; they are never chosen.
    """

    num_ids: int
    processors: tuple[LogitsProcessor, ...] = ()
    tokenizer: TokenizerView | None = None
    _states: dict[SequenceId, _State] = field(factory=dict, init=False)

    def enter(self, entered: Entered) -> None:
        """Take a sequence, or take it again after a preemption."""
        processors, error = [], None
        for processor in self.processors:
            try:
                if processor.applies(entered.params):
                    processors.append((processor, processor.open(entered.params, entered.num_prompt)))
            except Exception as raised:  # as in `_process`: it ends this sequence alone
                error = _blame(processor, raised)
        self._states[entered.sequence_id] = _State(
            entered.params,
            entered.seed,
            entered.sequence_id[1],
            entered.num_prompt,
            list(entered.token_ids),
            processors,
            error,
        )

    def leave(self, sequence_id: SequenceId) -> None:
        """Forget a sequence. Unknown ids are ignored."""
        self._states.pop(sequence_id, None)

    def token_ids(self, sequence_id: SequenceId) -> Sequence[int]:
        """Return the prompt and what was chosen so far."""
        return self._states[sequence_id].token_ids

    def choose(self, rows: Sequence[Row], logits_LV: torch.Tensor) -> list[RowResult]:
        """Choose after each row's last token and after each of its drafts; accept the drafts that agree.

        Args:
            rows: the plan's rows. In their order, as many rows of logits belong to each as it wants.
            logits_LV: fp32; logits processors change it in place.

        Returns:
            One result a row. A row that fails has an error; the others are not disturbed.
        """
        logits = logits_LV[:, : self.num_ids]
        tasks = self._tasks(rows)
        reports = {
            task.row.sequence_id: _Report.of(task, logits) for task in tasks if task.state.params.logprobs is not None
        }
        errors = {task.row.sequence_id: error for task in tasks if (error := _process(task, logits))}
        picks = _pick(tasks, logits)
        results = {}
        for task in tasks:
            sequence_id = task.row.sequence_id
            accepted = accept(task.drafts, [picks[i] for i in task.span])
            error = errors.get(sequence_id) or (_NOT_FINITE if _FAILED in accepted else None)
            if error:
                results[sequence_id] = RowResult(sequence_id=sequence_id, error=error)
                continue
            task.state.token_ids += accepted
            logprobs = reports[sequence_id].read(accepted) if sequence_id in reports else ()
            results[sequence_id] = RowResult(sequence_id=sequence_id, token_ids=tuple(accepted), logprobs=logprobs)
        return [results.get(row.sequence_id) or RowResult(sequence_id=row.sequence_id) for row in rows]

    def scored(self, row: Row) -> range:
        """Return the indices into a row's ids after which a token of the prompt follows that is to be scored."""
        state = self._states[row.sequence_id]
        if state.params.prompt_logprobs is None or state.choice != 0:
            return range(0)
        return range(min(len(row.token_ids), max(0, state.num_prompt - 1 - row.start)))

    def score(self, row: Row, indices: range, logits_LV: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Score the prompt's tokens that follow some of those that `scored` gave. Call it before `choose`.

        Args:
            row: a row of the plan.
            indices: L of them.
            logits_LV: fp32 logits after each; not changed.

        Returns:
            One entry an index. None where the logits are not finite; then `choose` gives this row its error.
        """
        state = self._states[row.sequence_id]
        wanted = state.params.prompt_logprobs
        assert wanted is not None
        following = [state.token_ids[row.start + index + 1] for index in indices]
        entries = report(logits_LV[:, : self.num_ids], following, wanted)
        if entries is None:
            state.error = "the logits of its prompt are not finite"
        return entries or ()

    def _tasks(self, rows: Sequence[Row]) -> list[_Task]:
        tasks, first = [], 0
        for row in rows:
            if row.want is Want.NONE:
                continue
            stop = first + row.num_drafts + 1
            tasks.append(_Task(row, self._states[row.sequence_id], range(first, stop)))
            first = stop
        return tasks


@frozen
class _Task:
    """A row that wants tokens, and the rows of logits that are its own."""

    row: Row
    state: _State
    span: range

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.row.token_ids[len(self.row.token_ids) - self.row.num_drafts :]

    @property
    def first_position(self) -> int:
        """Position of the token that is chosen first."""
        return self.row.start + len(self.row.token_ids) - self.row.num_drafts


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


def _process(task: _Task, logits_LV: torch.Tensor) -> str | None:
    """Run a row's logits processors at each of its positions; return what went wrong, if anything."""
    state = task.state
    if state.error:
        return state.error
    for depth, index in enumerate(task.span):
        for processor, opened in state.processors:
            before = [*state.token_ids, *task.drafts[:depth]]
            try:
                opened.process(before, logits_LV[index])
            except Exception as error:  # a third party's code, whatever it raises, ends this row alone
                return _blame(processor, error)
    return None


def _blame(processor: LogitsProcessor, error: Exception) -> str:
    return f"logits processor {type(processor).__name__}: {type(error).__name__}: {error}"


#: In place of a token, where logits hold NaN, or nothing that may be chosen.
_FAILED: Final = -1
_NOT_FINITE: Final = "the logits are not finite: NaN, or no token is allowed"


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1 or params.top_p == 0


def _pick(tasks: Sequence[_Task], logits_LV: torch.Tensor) -> list[int]:
    """Return the target's own token for each row of logits."""
    if not tasks:
        return []
    picks = _likeliest(logits_LV)
    sampled = [
        (index, task, task.first_position + depth)
        for task in tasks
        if not _is_greedy(task.state.params)
        for depth, index in enumerate(task.span)
        if picks[index] != _FAILED
    ]
    if sampled:
        states = [task.state for _, task, _ in sampled]
        indices = [index for index, _, _ in sampled]
        draws = uniforms([s.seed for s in states], [s.choice for s in states], [p for _, _, p in sampled], CHOOSE)
        probabilities = target_probabilities(logits_LV[indices], [s.params for s in states])
        for index, token in zip(indices, draw(probabilities, draws), strict=True):
            picks[index] = token
    return picks


def _likeliest(logits_LV: torch.Tensor) -> list[int]:
    """Return the likeliest id of each row, of equal ones the lowest; _FAILED where its logit is not finite."""
    if logits_LV.device.type == "cpu":
        # Several times as fast as torch's, which finds indices one by one and wakes its threads for it.
        rows = logits_LV.numpy()
        ids = rows.argmax(axis=-1)
        finite = np.isfinite(rows[np.arange(len(rows)), ids])
        return np.where(finite, ids, _FAILED).tolist()  # type: ignore[no-any-return]
    best = logits_LV.max(dim=-1)
    picks: list[int] = torch.where(best.values.isfinite(), best.indices, _FAILED).tolist()
    return picks


def target_probabilities(logits_LV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the distribution that tokens are drawn from, (L, V) float64: temperature, then top-k, then top-p.

    Args:
        logits_LV: finite maximum in every row; not changed.
        params: one a row, with a temperature above 0.
    """
    scores = logits_LV.double()
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=scores.device)
    # Taking the maximum off first keeps a tiny temperature from overflowing.
    scores = (scores - scores.max(dim=-1, keepdim=True).values) / temperatures.unsqueeze(1)
    vocab = scores.shape[1]
    limited = [i for i, p in enumerate(params) if p.top_k and p.top_k < vocab]
    if limited:
        ks = torch.tensor([params[i].top_k for i in limited], device=scores.device)
        best = scores[limited].topk(int(ks.max()), dim=-1).values
        threshold = best.gather(1, (ks - 1).unsqueeze(1))
        scores[limited] = scores[limited].masked_fill(scores[limited] < threshold, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1)
    nuclear = [i for i, p in enumerate(params) if p.top_p is not None and p.top_p < 1]
    if nuclear:
        top_p = torch.tensor([params[i].top_p for i in nuclear], dtype=torch.float64, device=scores.device)
        probabilities[nuclear] = _nucleus(probabilities[nuclear], top_p)
    return probabilities


def _nucleus(probabilities_LV: torch.Tensor, top_p_L: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens that reaches top_p (Holtzman et al. 2020); equal ones by lower id."""
    sorted_LV, order_LV = probabilities_LV.sort(dim=-1, descending=True, stable=True)
    before_LV = sorted_LV.cumsum(dim=-1) - sorted_LV
    before_LV[:, 0] = 0.0
    kept = sorted_LV.masked_fill(before_LV >= top_p_L.unsqueeze(1), 0.0)
    return torch.zeros_like(probabilities_LV).scatter_(1, order_LV, kept)


def draw(probabilities_LV: torch.Tensor, uniforms_L: np.ndarray) -> list[int]:
    """Return the inverse cumulative distribution, in id order, at each uniform number; rows need not sum to 1."""
    cumulative = probabilities_LV.cumsum(dim=-1)
    total = cumulative[:, -1:]
    points = torch.from_numpy(uniforms_L).to(cumulative.device).unsqueeze(1) * total
    # Rounding can carry a point onto the total, where no token is left.
    points = points.minimum(torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(cumulative, points, right=True).flatten().tolist()
    return tokens


@frozen(eq=False)
class _Report:
    """Raw log-probabilities of a task's positions, taken before anything changes the logits."""

    logprobs: torch.Tensor
    top: list[tuple[tuple[int, float], ...]]

    @classmethod
    def of(cls, task: _Task, logits_LV: torch.Tensor) -> _Report:
        logprobs = torch.log_softmax(logits_LV[task.span.start : task.span.stop], dim=-1)
        wanted = min(task.state.params.logprobs or 0, logprobs.shape[1])
        best = logprobs.topk(wanted, dim=-1)
        top = [
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return cls(logprobs, top)

    def read(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        return tuple(
            TokenLogprobs(token, float(self.logprobs[i, token]), self.top[i]) for i, token in enumerate(token_ids)
        )
