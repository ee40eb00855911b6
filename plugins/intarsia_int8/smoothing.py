"""SmoothQuant: what makes activations hard to round is moved into the weights (Xiao et al. 2022).

An input column with outliers spoils the int8 scale of every column beside it. It is divided by s, and the weight's
column multiplied by s, which changes no product. Equation 4 there: s_j = max|X_j|^a / max|W_j|^(1 - a). The division
stays with the weight, as `input_scale` = 1 / s: nothing is folded into what comes before, so any linear layer of any
architecture can be smoothed.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

import torch

#: How far s may be from the middle of a layer's columns: outliers are some hundred times the others.
_MOST = 1e4


def smoothing_scale(largest_C: torch.Tensor, weight_C: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return s (C,), float32: what columns of the weight are multiplied by, and those of the activations divided.

    Its geometric mean is 1, since a factor common to all columns would change no rounding. Columns that never saw an
    input, or whose weights are all zero, have s = 1: nothing says what would be right for them.

    Args:
        largest_C: each input's largest magnitude.
        weight_C: each column's largest magnitude.
        exponent: from 0 to 1: how much of the inputs' spread goes into the weight.
    """
    inputs, weights = largest_C.double(), weight_C.double()
    is_live = (inputs > 0) & (weights > 0) & inputs.isfinite() & weights.isfinite()
    # The logarithm of 1 stands in where there is none.
    logs = exponent * torch.where(is_live, inputs, 1).log() - (1 - exponent) * torch.where(is_live, weights, 1).log()
    middle = logs[is_live].mean() if is_live.any() else logs.new_zeros(())
    scale = (logs - middle).exp().clamp(1 / _MOST, _MOST)
    return torch.where(is_live, scale, 1).float()
