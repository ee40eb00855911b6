"""Drawing a token: the inverse cumulative distribution at one uniform number, in id order.

Shape legend: L rows of logits, M candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from intarsia.sampling.filters import Candidates, candidates
from intarsia.sampling.settings import Settings

#: A kernel of the op `sample_rows`.
SampleRows: TypeAlias = Callable[..., torch.Tensor]
#: Draws one token a row, as `draw` does.
Draw: TypeAlias = Callable[[torch.Tensor, Sequence[Settings], np.ndarray], list[int]]


def draw(logits_LV: torch.Tensor, settings: Sequence[Settings], uniforms_L: np.ndarray) -> list[int]:
    """Return one token a row.

    Args:
        logits_LV: fp32, with a finite maximum in every row; not changed.
        settings: one a row, none of them greedy.
        uniforms_L: float64 in [0, 1).
    """
    tokens = [0] * len(settings)
    for some in candidates(logits_LV, settings):
        for row, token in zip(some.rows, invert(some, uniforms_L[list(some.rows)]), strict=True):
            tokens[row] = token
    return tokens


def draw_by(
    sample_rows: SampleRows,
    logits_LV: torch.Tensor,
    settings: Sequence[Settings],
    uniforms_L: np.ndarray,
) -> list[int]:
    """Return one token a row by a kernel of the op `sample_rows`, as `draw` does.

    Rows with typical_p, which the op does not know, are drawn here.
    """
    tokens = [0] * len(settings)
    here = [row for row, setting in enumerate(settings) if setting.typical_p < 1]
    there = [row for row, setting in enumerate(settings) if setting.typical_p >= 1]
    if here:
        drawn = draw(logits_LV[here], [settings[row] for row in here], uniforms_L[here])
        for row, token in zip(here, drawn, strict=True):
            tokens[row] = token
    if there:
        logits = logits_LV if not here else logits_LV[there]
        asked = columns([settings[row] for row in there], logits_LV.shape[1])
        numbers = [*asked, torch.from_numpy(uniforms_L[there])]
        chosen = sample_rows(logits, *(column.to(logits_LV.device) for column in numbers)).tolist()
        for row, token in zip(there, chosen, strict=True):
            tokens[row] = token
    return tokens


def columns(settings: Sequence[Settings], vocab: int) -> list[torch.Tensor]:
    """Return temperature, top_k, top_p and min_p of each row (L,)."""
    return [
        torch.tensor([s.temperature for s in settings], dtype=torch.float64),
        torch.tensor([min(s.top_k, vocab) for s in settings], dtype=torch.int32),
        torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        torch.tensor([s.min_p for s in settings], dtype=torch.float64),
    ]


def invert(some: Candidates, uniforms_L: np.ndarray) -> list[int]:
    """Return the inverse cumulative distribution of each row at its number."""
    sums_LM = some.weights_LM.cumsum(dim=-1)
    total_L1 = sums_LM[:, -1:]
    points_L1 = torch.from_numpy(uniforms_L).to(sums_LM.device).unsqueeze(1) * total_L1
    # Rounding can carry a point onto the total, where no token is left.
    points_L1 = points_L1.minimum(torch.nextafter(total_L1, torch.zeros_like(total_L1)))
    columns_L1 = torch.searchsorted(sums_LM, points_L1, right=True)
    ids_L1 = columns_L1 if some.ids_LM is None else some.ids_LM.gather(1, columns_L1)
    tokens: list[int] = ids_L1.flatten().tolist()
    return tokens
