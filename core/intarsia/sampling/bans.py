"""What may not be chosen: banned ids and words, and what would end an answer before its min_tokens.

Shape legend: L rows of logits, V vocab, N ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from intarsia.sampling.state import Task


def ban(tasks: Sequence[Task], logits_LV: torch.Tensor) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
    """Forbid in place, at each position, all that may not be chosen there.

    Returns:
        Row of logits -> ids (N,) and their logits (N,), of what only min_tokens forbade: see `lift`.
    """
    parts, early = [], []
    for task in tasks:
        state = task.state
        if len(state.banned_N):
            parts += [(index, state.banned_N) for index in task.span]
        if state.words is not None:
            parts += [(index, ids_N) for index, drafts in task.positions() for ids_N in state.words.forbidden(drafts)]
        if len(state.stops_N):
            missing = state.params.min_tokens - state.history.num_answer - task.before
            early += [(index, state.stops_N) for index in task.span[: max(0, missing)]]
    _forbid(parts, logits_LV)
    held = {}
    for index, stops_N in early:
        ids_N = torch.from_numpy(stops_N).to(logits_LV.device)
        held[index] = (ids_N, logits_LV[index, ids_N])
    _forbid(early, logits_LV)
    return held


def lift(logits_V: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Give a row back what min_tokens forbade: nothing else may follow, so the answer may end."""
    ids_N, logits_N = held
    logits_V[ids_N] = logits_N


def _forbid(parts: Sequence[tuple[int, np.ndarray]], logits_LV: torch.Tensor) -> None:
    if parts:
        rows = np.repeat([index for index, _ in parts], [len(ids_N) for _, ids_N in parts])
        rows_N = torch.from_numpy(rows).to(logits_LV.device)
        ids_N = torch.from_numpy(np.concatenate([ids_N for _, ids_N in parts])).to(logits_LV.device)
        logits_LV[rows_N, ids_N] = -torch.inf
