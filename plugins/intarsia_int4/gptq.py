"""Rounding column by column with feedback (Frantar et al. 2022, GPTQ: Accurate Post-Training Quantization).

What a column loses by rounding is made up for by those behind it, as far as their inputs go along with its own. If R
holds the correlations of the inputs, and U is the upper triangle with U.T @ U = inv(R), then column k takes
U[j, k] / U[j, j] of column j's error, in units of their inputs' sizes. Scales are fitted group by group, to what the
columns have become by then.

Correlations come from calibration's sample, of fewer inputs than a wide linear has columns: they are shrunk towards
none, which also keeps R well conditioned. (On SmolLM2 shrinking by 0.3 was better than by 0.1, beside AWQ or alone.)

Shape legend: N out features, C in features, G groups, S columns a group, M sampled inputs.
"""

from __future__ import annotations

import torch

from intarsia.quantizing.calibration import InputStatistics
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import Weight
from intarsia_int4.rounding import check_finite, divisor, fit, round_steps, shares, stored

#: Numbers quantized at once.
_CHUNK = 1 << 22
_SHRINKAGE = 0.3


def feedback(inputs: InputStatistics) -> torch.Tensor:
    """Return (C, C) in float32, where row j says what each column k > j takes off for an error of column j."""
    sample_MC = inputs.sample.double()
    # A column that the sample has only zeros of goes along with none.
    sample_MC = torch.nn.functional.normalize(sample_MC, dim=0)
    correlation_CC = (sample_MC.t() @ sample_MC).mul_(1 - _SHRINKAGE).fill_diagonal_(1.0)
    # R = V @ V.T for an upper triangle V, whose inverse is U. Turned round, V is the usual lower one.
    upper_CC = torch.linalg.cholesky(correlation_CC.flip(0, 1)).flip(0, 1)
    inverse_CC = torch.linalg.solve_triangular(upper_CC, torch.eye(len(upper_CC)).to(upper_CC), upper=True)
    sizes_C = inputs.mean_square.double().sqrt()
    sizes_C = torch.where(sizes_C > 0, sizes_C, 1.0)
    feedback_CC: torch.Tensor = inverse_CC * (sizes_C / inverse_CC.diagonal())[:, None] / sizes_C
    return feedback_CC.float()


def quantize(
    name: str,
    weight_NC: torch.Tensor,
    layout: IntegerFormat,
    feedback_CC: torch.Tensor,
    importance_C: torch.Tensor,
    *,
    clip: bool,
) -> Weight:
    """Round a floating weight to int4.

    Args:
        name: its canonical name.
        weight_NC: its numbers.
        layout: one of the formats without minima.
        feedback_CC: what `feedback` returned; for columns that are multiplied by s, times s of k, divided by s of j.
        importance_C: what a column's squared errors are multiplied by in the search for scales.
        clip: search for the scales of least squared error.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    check_finite(name, weight_NC)
    assert layout.group is not None
    importance_SG = shares(importance_C.float(), layout.group)
    chunks = [
        _quantize(rows.float(), layout, feedback_CC, importance_SG, clip=clip)
        for rows in torch.split(weight_NC, max(1, _CHUNK // max(1, weight_NC.shape[1])))
    ]
    tensors = {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}
    return Weight(layout, tensors, tuple(weight_NC.shape))


def _quantize(
    rows_NC: torch.Tensor, layout: IntegerFormat, feedback_CC: torch.Tensor, importance_SG: torch.Tensor, *, clip: bool
) -> dict[str, torch.Tensor]:
    assert layout.group is not None
    left_CN = rows_NC.t().clone(memory_format=torch.contiguous_format)
    numbers_CN = torch.empty_like(left_CN, dtype=torch.uint8)
    scales, zeros = [], []
    for group, start in enumerate(range(0, len(left_CN), layout.group)):
        block_SN, behind_CN = left_CN[start : start + layout.group], left_CN[start + layout.group :]
        stop = start + len(block_SN)
        importance_SN = importance_SG[: len(block_SN), group, None].expand_as(block_SN)
        scale_N, zero_N = fit(block_SN, layout, importance_SN, clip=clip)
        errors_SN = torch.empty_like(block_SN)
        for column, x_N in enumerate(block_SN):
            steps_N = round_steps(x_N / divisor(scale_N), zero_N)
            numbers_CN[start + column] = steps_N + zero_N
            torch.sub(x_N, steps_N.mul_(scale_N), out=errors_SN[column])
            taken_S = feedback_CC[start + column, start + column + 1 : stop]
            block_SN[column + 1 :].addr_(taken_S, errors_SN[column], alpha=-1)
        behind_CN.addmm_(feedback_CC[start:stop, stop:].t(), errors_SN, alpha=-1)
        scales.append(scale_N)
        zeros.append(zero_N)
    return stored(numbers_CN.t().contiguous(), torch.stack(scales, dim=1), torch.stack(zeros, dim=1), layout)
