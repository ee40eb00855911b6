"""Scales of columns before rounding (Lin et al. 2023, AWQ: Activation-aware Weight Quantization).

Columns are multiplied by s = rms(x)^a, where x is what calibration has seen of their inputs, and the inputs by 1 / s:
columns that matter lose less. Each linear takes the exponent a, from 0 to 1, of least error of its outputs over the
calibration's sample. Nothing is folded into what comes before it: the inputs are multiplied as they come, so any linear
of any architecture can be scaled. The paper takes the mean magnitude; the root mean square is what calibration has.

Shape legend: N out features, C in features, M sampled inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from intarsia.quantizing.calibration import InputStatistics

_EXPONENTS = tuple(step / 10 for step in range(11))
#: Rows of a weight that are enough to choose by, spread over it.
_ROWS = 128
#: How far a column's size may be from the mean one.
_RANGE = 1e4


def scale_columns(
    weight_NC: torch.Tensor,
    inputs: InputStatistics,
    rounded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return s, (C,) in float32: what to multiply the columns by.

    Args:
        weight_NC: its numbers, finite.
        inputs: what calibration has seen, on the weight's device.
        rounded: (rows of the weight, s) -> the same rows as they are after they are scaled, rounded and scaled back.
    """
    sizes_C = _sizes(inputs.mean_square)
    rows_NC = weight_NC[:: -(-len(weight_NC) // _ROWS) or 1].float()
    sample_CM = inputs.sample.float().t()

    def error(exponent: float) -> float:
        off_NC = rounded(rows_NC, sizes_C**exponent) - rows_NC
        return (off_NC @ sample_CM).double().square().sum().item()

    # The first of equals is the least: 0 where nothing was seen.
    return sizes_C ** min(_EXPONENTS, key=error)


def _sizes(mean_square_C: torch.Tensor) -> torch.Tensor:
    """Return root mean squares in parts of their geometric mean; 1 for a column that was always 0."""
    logs_C = mean_square_C.double().log() / 2
    seen_C = logs_C.isfinite()
    if not seen_C.any():
        return torch.ones_like(mean_square_C, dtype=torch.float32)
    sizes_C = (logs_C - logs_C[seen_C].mean()).exp().clamp(1 / _RANGE, _RANGE)
    return torch.where(seen_C, sizes_C, 1.0).float()
