"""The target's own token at each position: processors and bans, then the likeliest or a draw.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from intarsia.errors import IntarsiaError
from intarsia.protocols import LogitsProcessor
from intarsia.sampling.arithmetic import FAILED, likeliest
from intarsia.sampling.bans import ban, lift
from intarsia.sampling.drawing import Draw
from intarsia.sampling.penalties import add_biases, penalise
from intarsia.sampling.random import uniforms
from intarsia.sampling.state import State, Task
from intarsia.saying import is_raised, said, text_of


@frozen(eq=False)
class Picks:
    """One token a row of logits.

    Attributes:
        token_ids: FAILED where there is none.
        best: the highest logit of each row.
        failed: row of logits -> what a processor failed with there.
    """

    token_ids: list[int]
    best: list[float]
    failed: dict[int, str]


@frozen(eq=False)
class Drawn:
    """A row of logits whose token is drawn, not the likeliest."""

    index: int
    state: State
    position: int


def edit(tasks: Sequence[Task], logits_LV: torch.Tensor) -> Picks:
    """Change logits in place by penalties, biases, processors and bans; return the likeliest of what is left."""
    if not tasks:
        return Picks([], [], {})
    editing = [task for task in tasks if task.state.edits]
    penalise(editing, logits_LV)
    add_biases(editing, logits_LV)
    failed = dict(found for task in editing if (found := _process(task, logits_LV)))
    held = ban(editing, logits_LV)
    token_ids, best = likeliest(logits_LV)
    for index, stops in held.items():
        if best[index] == -torch.inf:
            lift(logits_LV[index], stops)
            (token_ids[index],), (best[index],) = likeliest(logits_LV[index : index + 1])
    return Picks(token_ids, best, failed)


def drawn(tasks: Sequence[Task], picks: Picks) -> list[Drawn]:
    """Return the rows of logits of sequences that are not greedy, but for those where nothing can be drawn."""
    return [
        Drawn(index, task.state, task.first_position + depth)
        for task in tasks
        if not task.state.settings.is_greedy
        for depth, index in enumerate(task.span)
        if picks.token_ids[index] != FAILED
    ]


def redraw(some: Sequence[Drawn], logits_LV: torch.Tensor, purpose: int, picks: Picks, draw: Draw) -> None:
    """Put drawn tokens in the place of the likeliest."""
    if not some:
        return
    indices, states = [one.index for one in some], [one.state for one in some]
    numbers = uniforms([s.seed for s in states], [s.choice for s in states], [one.position for one in some], purpose)
    chosen = logits_LV if len(indices) == len(logits_LV) else logits_LV[indices]
    for index, token in zip(indices, draw(chosen, [s.settings for s in states], numbers), strict=True):
        picks.token_ids[index] = token


def _process(task: Task, logits_LV: torch.Tensor) -> tuple[int, str] | None:
    """Run a row's logits processors at its positions, up to the first that fails: return its index and what failed."""
    state = task.state
    if not state.processors:
        return None
    for index, drafts in task.positions():
        for processor, opened in state.processors:
            try:
                opened.process([*state.history.token_ids, *drafts], logits_LV[index])
            except BaseException as error:  # a third party's code, whatever it raises, ends this row alone
                if not is_raised(error):
                    raise
                return index, blame(processor, error)
    return None


def blame(processor: LogitsProcessor, error: BaseException) -> str:
    """Say whose processor failed, and how."""
    if isinstance(error, IntarsiaError) and error.owner is not None:
        return text_of(error)
    return f"logits processor {type(processor).__name__}: {said(error)}"


def failure(best: float) -> str:
    """Say why nothing could be chosen where this is the highest logit."""
    if best == -torch.inf:
        return "no token is allowed: the logits are -inf for every token, after processors and bans"
    return f"the logits are not finite: they hold {'inf' if best == torch.inf else 'NaN'}"
