"""The op that draws tokens, against the inverse cumulative distribution in float64, one row after another.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from typing import Any

import torch

from intarsia.testing.kernel_calls import normal

__all__ = ["draw_sampling", "judge_sampling"]

#: A number so near to an edge may fall to either side.
_EDGE = 1e-9
_TEMPERATURES = (1.0, 0.7, 2.5, 0.05)
_TOP_KS = (0, 5, 1, 0, 40, 3)
_TOP_PS = (1.0, 1.0, 0.9, 0.5, 0.01, 0.999, 0.6)
_MIN_PS = (0.0, 0.0, 0.0, 0.2, 0.01)


def draw_sampling(rows: int, width: int, seed: int) -> tuple[Any, ...]:
    """Return logits (L, V), of which every fourth row is ties alone, and of each row how it is drawn, with a number."""
    logits = normal(seed, rows, width) * 3
    for row in range(3, rows, 4):
        logits[row] = -3.25
    each = range(seed, seed + rows)
    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (
        logits,
        torch.tensor([_TEMPERATURES[i % 4] for i in each], dtype=torch.float64),
        torch.tensor([min(_TOP_KS[i % 6], width) for i in each], dtype=torch.int32),
        torch.tensor([_TOP_PS[i % 7] for i in each], dtype=torch.float64),
        torch.tensor([_MIN_PS[i % 5] for i in each], dtype=torch.float64),
        uniforms,
    )


def judge_sampling(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
    """Raise AssertionError unless each id is that of its row's number."""
    [ids] = results
    assert ids.dtype == torch.int64, f"ids are in {ids.dtype}"
    assert ids.shape == (len(arguments[0]),), f"{len(arguments[0])} rows bring ids of the shape {tuple(ids.shape)}"
    for row, drawn in enumerate(ids.tolist()):
        _judge_row(drawn, arguments[0][row].double(), *(float(column[row]) for column in arguments[1:]))


def _judge_row(
    drawn: int, logits: torch.Tensor, temperature: float, top_k: float, top_p: float, min_p: float, number: float
) -> None:
    weights = _kept(logits, temperature, int(top_k), top_p, min_p)
    asked = f"temperature {temperature:g}, top_k {top_k:g}, top_p {top_p:g}, min_p {min_p:g}"
    assert 0 <= drawn < len(weights), f"{drawn} is no id of {len(weights)} ({asked})"
    assert weights[drawn] > 0, f"id {drawn} is drawn, which is not kept ({asked})"
    sums = weights.cumsum(0)
    point = number * float(sums[-1])
    low, high = float(sums[drawn] - weights[drawn]), float(sums[drawn])
    assert low - _EDGE <= point <= high + _EDGE, (
        f"the number {number:.4f} draws id {drawn}, whose share is from {low / float(sums[-1]):.4f} to "
        f"{high / float(sums[-1]):.4f} in id order ({asked})"
    )


def _kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return the weight of each id (V,), 0 where it is not kept."""
    weights = ((logits - logits.max()) / temperature).exp()
    if 0 < top_k < len(logits):
        weights[logits < logits.sort(descending=True).values[top_k - 1]] = 0
    if top_p < 1:
        # The likeliest first, of equal ones the lower id, until they sum to the share.
        order = logits.sort(descending=True, stable=True).indices
        ranked = weights[order]
        weights[order[ranked.cumsum(0) - ranked >= top_p * float(ranked.sum())]] = 0
    weights[weights < min_p] = 0
    return weights
