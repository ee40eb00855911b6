"""SmoothQuant: what makes activations hard to round is moved into the weights (Xiao et al. 2022).

An input column with outliers spoils the int8 scale of every column beside it. It is divided by s, and the weight's
column multiplied by s, which changes no product. Equation 4 there: s_j = max|X_j|^a / max|W_j|^(1 - a). Here root mean
squares stand for the two maxima: they do not hang on one token or one output, and on SmolLM2 the divergence from the
dense model is less with them, by a quarter at groups of 32. To search a for each layer by its error on some inputs
gained nothing there.

The division stays with the weight, as `input_scale` = 1 / s: nothing is folded into what comes before, so any linear
layer of any architecture can be smoothed.

Shape legend: N out features, C in features.
"""

from __future__ import annotations

import torch

#: How far s may be from the middle of a layer's columns: outliers are some hundred times the others.
_MOST = 1e4


def column_size(weight_NC: torch.Tensor, rows_at_once: int) -> torch.Tensor:
    """Return the root mean square of each column, (C,), in float64; some rows at a time become floats of 64 bits."""
    total = torch.zeros(weight_NC.shape[1], dtype=torch.float64, device=weight_NC.device)
    for rows in torch.split(weight_NC, rows_at_once):
        total += rows.double().square().sum(0)
    return (total / max(1, len(weight_NC))).sqrt()


def smoothing_scale(input_C: torch.Tensor, weight_C: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return s (C,), float32: what columns of the weight are multiplied by, and those of the activations divided.

    Its geometric mean is 1, since a factor common to all columns would change no rounding. Columns that never saw an
    input, or whose weights are all zero, have s = 1: nothing says what would be right for them.

    Args:
        input_C: each input's root mean square.
        weight_C: each column's.
        exponent: from 0 to 1: how much of the inputs' spread goes into the weight.
    """
    inputs, weights = input_C.double(), weight_C.double()
    is_live = (inputs > 0) & (weights > 0) & inputs.isfinite() & weights.isfinite()
    # The logarithm of 1 stands in where there is none.
    logs = exponent * torch.where(is_live, inputs, 1).log() - (1 - exponent) * torch.where(is_live, weights, 1).log()
    middle = logs[is_live].mean() if is_live.any() else logs.new_zeros(())
    scale = (logs - middle).exp().clamp(1 / _MOST, _MOST)
    return torch.where(is_live, scale, 1).float()
