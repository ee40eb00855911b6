"""The functions whose bits must not depend on where in a tensor a number lies, nor on what lies beside it.

Torch splits a sum by the number of rows and threads; numpy sums each row by itself. Torch may also take the tail of a
tensor through another exp and log than the rest, depending on how it was built; numpy takes one for all. On a GPU every
element takes the same path, but its sums are torch's.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

#: In place of a token, where nothing can be chosen.
FAILED: Final = -1


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return e to the power of each element."""
    return torch.from_numpy(np.exp(x.contiguous().numpy())) if x.device.type == "cpu" else x.exp()


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of each element, all of them above 0."""
    return torch.from_numpy(np.log(x.contiguous().numpy())) if x.device.type == "cpu" else x.log()


def weights(logits_LV: torch.Tensor, temperatures_L1: torch.Tensor) -> torch.Tensor:
    """Return probabilities (L, V), float64, up to a factor a row: the likeliest has 1, so that nothing overflows.

    Args:
        logits_LV: fp32, with a finite maximum in every row.
        temperatures_L1: float64, above 0.
    """
    best_L1 = logits_LV.amax(dim=-1, keepdim=True).double()
    return exp((logits_LV.double() - best_L1) / temperatures_L1)


def totals(weights_LV: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row (L, 1)."""
    if weights_LV.device.type != "cpu":
        return weights_LV.sum(dim=-1, keepdim=True)
    return torch.from_numpy(np.stack([row.sum(keepdims=True) for row in weights_LV.numpy()]))


def likeliest(logits_LV: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return what `likeliest_ids` does, on the host."""
    ids_L, best_L = likeliest_ids(logits_LV)
    return ids_L.tolist(), best_L.tolist()


def likeliest_ids(logits_LV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id of each row's highest logit (L,), of equal ones the lowest id, and that logit (L,).

    The id is FAILED where the logit is NaN, as it is where any of the row is, or infinite.
    """
    if logits_LV.device.type == "cpu":
        # Several times as fast as torch's, which finds indices one by one and wakes its threads for it.
        rows = logits_LV.numpy()
        ids = rows.argmax(axis=-1)
        best = rows[np.arange(len(rows)), ids]
        return torch.from_numpy(np.where(np.isfinite(best), ids, FAILED)), torch.from_numpy(best)
    found = logits_LV.max(dim=-1)
    return torch.where(found.values.isfinite(), found.indices, FAILED), found.values
