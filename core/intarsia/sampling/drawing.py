"""Drawing a token: the inverse cumulative distribution at one uniform number, in id order.

Shape legend: L rows of logits, M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from intarsia.sampling.filters import Candidates, candidates
from intarsia.sampling.settings import Settings


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
