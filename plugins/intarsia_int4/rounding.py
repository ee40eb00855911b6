"""Rounding a floating weight to int4: to nearest, or with the scale of least squared error for each group.

`intarsia.quantizing.integers` describes the formats. Without zero points the number of largest magnitude in a group
becomes -8, and scales can be negative; others are at most half a scale off, and one scale where a number of the other
sign is as large. With zero points the range from the smallest to the largest number, 0 included, is cut into 15 steps.
A group of zeros has scale 0. Numbers are rounded to nearest, with the scale as it is stored, in bfloat16.

The search for a scale tries some factors of that first one. What each rounds to is fitted by least squares, so that
few factors do; the best is taken where it beats the first as stored. Squared errors are weighed by column: on their own
they clip large numbers, and those matter more than their share where a model's inputs have outliers. (SmolLM2 loses
quality by a search without weights and gains much by one with.)

Shape legend: N out features, C in features, G groups, S columns a group, R = N * G groups of all rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat, pack_nibbles
from intarsia.types import Weight

#: Numbers quantized at once: temporary tensors stay this small, in a core's cache, however large a weight is.
_CHUNK = 1 << 18
#: Without zero points 0 is 8.
_MIDDLE = 8.0
_LARGEST = 15.0
#: Of the first scale, that are tried: below 1 the largest numbers are clipped.
_FACTORS = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.63, 1.07)


def quantize(
    name: str,
    weight_NC: torch.Tensor,
    layout: IntegerFormat,
    *,
    clip: bool = False,
    importance_C: torch.Tensor | None = None,
) -> Weight:
    """Round a floating weight to int4.

    Args:
        name: its canonical name.
        weight_NC: its numbers.
        layout: one of the formats without minima.
        clip: search for the scales of least squared error.
        importance_C: what a column's squared errors are multiplied by in that, at least 0; None is 1.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    outs, ins = weight_NC.shape
    assert layout.bits == 4 and layout.group is not None and layout.offset != "min"
    importance_SG = None if importance_C is None or not clip else shares(importance_C.float(), layout.group)
    chunks = [
        _quantize(name, rows.float(), layout, importance_SG, clip=clip)
        for rows in torch.split(weight_NC, max(1, _CHUNK // max(1, ins)))
    ]
    tensors = {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}
    return Weight(layout, tensors, (outs, ins))


def _quantize(
    name: str, rows_NC: torch.Tensor, layout: IntegerFormat, importance_SG: torch.Tensor | None, *, clip: bool
) -> dict[str, torch.Tensor]:
    check_finite(name, rows_NC)
    assert layout.group is not None
    num_rows, columns = rows_NC.shape
    x_SR = _by_group(rows_NC, layout.group)
    importance_SR = None
    if importance_SG is not None:
        importance_SR = importance_SG[:, None].expand(-1, num_rows, -1).reshape(x_SR.shape)
    scale_R, zero_R = fit(x_SR, layout, importance_SR, clip=clip)
    steps_SR = round_steps(x_SR / divisor(scale_R), zero_R).add_(zero_R).to(torch.uint8)
    numbers_NC = steps_SR.view(layout.group, num_rows, -1).permute(1, 2, 0).reshape(num_rows, -1)[:, :columns]
    return stored(numbers_NC, scale_R.view(num_rows, -1), zero_R.view(num_rows, -1), layout)


def stored(
    numbers_NC: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor, layout: IntegerFormat
) -> dict[str, torch.Tensor]:
    """Return the format's tensors of rows."""
    tensors = {"weight": pack_nibbles(numbers_NC), "scale": scale_NG}
    return tensors | ({"zero": zero_NG.to(torch.uint8)} if layout.offset == "zero" else {})


def check_finite(name: str, weight_NC: torch.Tensor) -> None:
    """Raise CheckpointError that names a weight which holds NaN or infinity."""
    if not weight_NC.isfinite().all():
        raise CheckpointError(f"{name} holds NaN or infinity, which int4 cannot represent")


def fit(
    x_SR: torch.Tensor, layout: IntegerFormat, importance_SR: torch.Tensor | None = None, *, clip: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, in bfloat16, and zero points (R,) of groups.

    Args:
        x_SR: their numbers, in float32.
        layout: says whether they have zero points.
        importance_SR: what squared errors are multiplied by in the search; None is 1.
        clip: search for the scales of least squared error.
    """
    scale_R, zero_R = _ranged(x_SR) if layout.offset == "zero" else _symmetric(x_SR)
    return (_searched(x_SR, scale_R, zero_R, importance_SR) if clip else scale_R), zero_R


def divisor(scale_R: torch.Tensor) -> torch.Tensor:
    """Return what to divide by, in float32: 1 for the scale of a group of zeros."""
    scale_R = scale_R.float()
    return torch.where(scale_R == 0, 1.0, scale_R)


def round_steps(x_SR: torch.Tensor, zero_R: torch.Tensor) -> torch.Tensor:
    """Round numbers, in scales, to what q - zero can be, where they are."""
    return x_SR.round_().clamp_(-zero_R, _LARGEST - zero_R)


def _by_group(rows_NC: torch.Tensor, group: int) -> torch.Tensor:
    """Return the numbers of each group below one another, (S, R), which sums over groups read fastest.

    Zeros fill the last group: they change neither its largest number nor its range, which holds 0.
    """
    padded = functional.pad(rows_NC, (0, -rows_NC.shape[1] % group))
    return padded.view(len(rows_NC), -1, group).permute(2, 0, 1).reshape(group, -1)


def shares(importance_C: torch.Tensor, group: int) -> torch.Tensor:
    """Return (S, G): importances as parts of their group's largest, or 1 where that is 0."""
    groups_SG = _by_group(importance_C[None], group)
    largest_G = groups_SG.amax(0)
    return torch.where(largest_G > 0, groups_SG / divisor(largest_G), 1.0)


def _symmetric(x_SR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points (R,) with which the largest magnitude is -8."""
    smallest, largest = x_SR.amin(0), x_SR.amax(0)
    scale_R = (torch.where(largest > -smallest, largest, smallest) / -_MIDDLE).bfloat16()
    return scale_R, torch.full_like(smallest, _MIDDLE)


def _ranged(x_SR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points (R,) with which the smallest number, at most 0, is q = 0."""
    smallest, largest = x_SR.amin(0).clamp(max=0), x_SR.amax(0).clamp(min=0)
    # Halved, since the whole range of the largest floats is none.
    scale_R = ((largest / 2 - smallest / 2) / (_LARGEST / 2)).bfloat16()
    return scale_R, (-smallest / divisor(scale_R)).round().clamp(0, _LARGEST)


def _searched(
    x_SR: torch.Tensor, first_R: torch.Tensor, zero_R: torch.Tensor, importance_SR: torch.Tensor | None
) -> torch.Tensor:
    """Return scales (R,), in bfloat16, whose weighed squared error is the first's or less."""
    unit_R = divisor(first_R)
    x_SR = x_SR / unit_R  # from -8 to 15: no square overflows
    weighed_SR = x_SR if importance_SR is None else x_SR * importance_SR
    best_R, ratio_R = torch.zeros_like(unit_R), torch.ones_like(unit_R)
    for factor in _FACTORS:
        steps_SR = round_steps(x_SR / factor, zero_R)
        product_R = (weighed_SR * steps_SR).sum(0)
        steps_SR.square_()
        square_R = (steps_SR if importance_SR is None else steps_SR.mul_(importance_SR)).sum(0)
        fitted_R = product_R / divisor(square_R)
        # By so much the error of the fitted scale is less than that of rounding all to 0.
        gain_R = fitted_R * product_R
        better_R = gain_R > best_R
        best_R, ratio_R = torch.where(better_R, gain_R, best_R), torch.where(better_R, fitted_R, ratio_R)
    found_R = torch.where(first_R == 0, first_R, (ratio_R * unit_R).bfloat16())
    # Rounding a scale can undo a small gain.
    errors = (_error(x_SR, divisor(scale_R) / unit_R, zero_R, importance_SR) for scale_R in (found_R, first_R))
    return torch.where(next(errors) < next(errors), found_R, first_R)


def _error(
    x_SR: torch.Tensor, ratio_R: torch.Tensor, zero_R: torch.Tensor, importance_SR: torch.Tensor | None
) -> torch.Tensor:
    """Return the weighed squared error (R,) of rounding with this scale."""
    error_SR = round_steps(x_SR / ratio_R, zero_R).mul_(ratio_R).sub_(x_SR).square_()
    return (error_SR if importance_SR is None else error_SR.mul_(importance_SR)).sum(0)
