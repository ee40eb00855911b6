"""Verification by rejection: the output has the target's distribution, and drafts are accepted as often as can be.

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)), where p is the target's distribution
after everything that a request asks for; else a token is drawn from max(p - q, 0), scaled to sum to 1 (Leviathan et al.
2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model
Decoding with Speculative Sampling"). A draft without probabilities has q(x) = 1.

Shape legend: L positions, V vocab, k drafts of one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen

from intarsia.sampling.arithmetic import FAILED, totals
from intarsia.sampling.drawing import invert
from intarsia.sampling.filters import Candidates, candidates
from intarsia.sampling.picking import Picks
from intarsia.sampling.random import ACCEPT, REPLACE, uniforms
from intarsia.sampling.settings import Settings
from intarsia.sampling.state import State, Task
from intarsia.types import SequenceId


@frozen(eq=False)
class _Guess:
    """One draft, the row of logits that judges it, and what it was drawn from (V,); None is certainty."""

    index: int
    state: State
    position: int
    token: int
    probabilities_V: torch.Tensor | None


def distributions(logits_LV: torch.Tensor, settings: Sequence[Settings]) -> torch.Tensor:
    """Return the probabilities (L, V), float64, that tokens are drawn with.

    Args:
        logits_LV: fp32, with a finite maximum in every row; not changed.
        settings: one a row, none of them greedy.
    """
    found_LV = torch.zeros(logits_LV.shape, dtype=torch.float64, device=logits_LV.device)
    for some in candidates(logits_LV, settings):
        weights_LM, rows = some.weights_LM, list(some.rows)
        if some.ids_LM is None:
            found_LV[rows] = weights_LM
            continue
        # What pads a row has no weight, and an id beyond the vocabulary: added to the last id, it changes nothing.
        ids_LM = some.ids_LM.clamp_max(logits_LV.shape[1] - 1)
        found_LV[rows] = torch.zeros_like(found_LV[rows]).scatter_add_(1, ids_LM, weights_LM)
    return found_LV / totals(found_LV)


def trusted(probabilities_kV: torch.Tensor, num_ids: int) -> torch.Tensor | None:
    """Return a draft's probabilities over the ids that can be chosen, float64 (k, V); None if they are none.

    Ids that no token has are never run as drafts; given that, what was drawn has the distribution of the others.
    """
    if probabilities_kV.dim() != 2 or probabilities_kV.shape[1] < num_ids or probabilities_kV.is_complex():
        return None
    q_kV = probabilities_kV[:, :num_ids].to(torch.float64)
    sums_k1 = totals(q_kV)
    if not (bool((q_kV >= 0).all()) and bool(sums_k1.isfinite().all()) and bool((sums_k1 > 0).all())):
        return None
    return q_kV / sums_k1


def verify(
    tasks: Sequence[Task], logits_LV: torch.Tensor, given: Mapping[SequenceId, torch.Tensor], picks: Picks
) -> None:
    """Accept drafts or replace them: put at each draft's position the draft, or what is drawn in its place.

    Args:
        tasks: those of greedy sequences are left as they are.
        logits_LV: fp32, edited; not changed.
        given: what drafts were drawn from (k, V), float64, on any device.
        picks: changed at the positions of drafts.
    """
    guesses = _guesses(tasks, given, picks)
    if not guesses:
        return
    p_LV = distributions(logits_LV[[guess.index for guess in guesses]], [guess.state.settings for guess in guesses])
    q_LV = torch.zeros_like(p_LV)
    for row, guess in enumerate(guesses):
        if guess.probabilities_V is None:
            q_LV[row, guess.token] = 1.0
        else:
            q_LV[row] = guess.probabilities_V
    tokens_L1 = torch.tensor([[guess.token] for guess in guesses], device=p_LV.device)
    p_L, q_L = (x_LV.gather(1, tokens_L1).flatten().cpu().numpy() for x_LV in (p_LV, q_LV))
    accepted_L = _numbers(guesses, ACCEPT) * q_L < p_L
    replacements = _replacements(p_LV, q_LV, _numbers(guesses, REPLACE))
    for guess, accepted, replacement in zip(guesses, accepted_L.tolist(), replacements, strict=True):
        picks.token_ids[guess.index] = guess.token if accepted else replacement


def _guesses(tasks: Sequence[Task], given: Mapping[SequenceId, torch.Tensor], picks: Picks) -> list[_Guess]:
    found = []
    for task in tasks:
        if task.state.settings.is_greedy:
            continue
        q_kV = given.get(task.sequence_id)
        for depth, (index, token) in enumerate(zip(task.span, task.drafts, strict=False)):
            if picks.token_ids[index] != FAILED:
                # A draft that was drawn has a probability; of one that has none it is not known what it came from.
                known = q_kV is not None and depth < len(q_kV) and float(q_kV[depth, token]) > 0
                q_V = q_kV[depth] if q_kV is not None and known else None
                found.append(_Guess(index, task.state, task.first_position + depth, token, q_V))
    return found


def _numbers(guesses: Sequence[_Guess], purpose: int) -> np.ndarray:
    states = [guess.state for guess in guesses]
    positions = [guess.position for guess in guesses]
    return uniforms([s.seed for s in states], [s.choice for s in states], positions, purpose)


def _replacements(p_LV: torch.Tensor, q_LV: torch.Tensor, numbers_L: np.ndarray) -> list[int]:
    """Draw from what p has more of than q; from p where that is nothing, as rounding may have it."""
    left_LV = (p_LV - q_LV).clamp_min_(0.0)
    weights_LV = torch.where(totals(left_LV) > 0, left_LV, p_LV)
    return invert(Candidates(tuple(range(len(p_LV))), weights_LV), numbers_L)
