"""Rows of attention as numbers, and in numpy what softmax attention makes of them in float64: the oracle.

Shape legend: n tokens of one row, H heads, K kv heads, D head dim, M keys.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from intarsia.types import AttentionSpec

__all__ = ["ROUNDING", "AttentionRow", "attention_of", "check_row", "exact_attention", "int8_numbers"]

_Floats: TypeAlias = npt.NDArray[np.float64]
#: By dtype of the queries, what a result may be off by, in parts of what its weights make of the values' sizes. In 16
#: bits weights are rounded before they meet the values, and the result is rounded: a unit each, and as much again.
ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}
#: And in any dtype this much, where values are about 1.
_FLOOR = 1e-5
#: Half of the distance of neighbours, in parts of a number.
_UNITS = {"float16": 2.0**-12, "bfloat16": 2.0**-9}


def attention_of(heads: int, kv_heads: int, head_dim: int, **facts: Any) -> AttentionSpec:
    """Return a layer's attention, with the usual scale unless `facts` have another."""
    return evolve(AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, None), **facts)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name, as configs say it."""
    return str(dtype).removeprefix("torch.")


@frozen(eq=False)
class AttentionRow:
    """One row's tokens: `start` of them are in the cache already, those that have queries run now.

    Attributes:
        start: position of the first query.
        queries: (n, H, D).
        keys: (start + n, K, D).
        values: (start + n, K, D).
    """

    start: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(
        cls, spec: AttentionSpec, start: int, length: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> AttentionRow:
        """Return a row of normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        heads = ((length, spec.num_heads), *[(start + length, spec.num_kv_heads)] * 2)
        return cls(start, *(torch.randn(*each, spec.head_dim, generator=generator).to(dtype) for each in heads))

    def behind(self, other: AttentionRow, length: int) -> AttentionRow:
        """Return the row with another's first keys and values, `length` of them."""
        begun = (
            (theirs[:length], mine[length:]) for theirs, mine in ((other.keys, self.keys), (other.values, self.values))
        )
        keys, values = (torch.cat(parts) for parts in begun)
        return evolve(self, keys=keys, values=values)

    @property
    def length(self) -> int:
        """How many tokens run now."""
        return len(self.queries)

    @property
    def stop(self) -> int:
        """How many tokens there are."""
        return self.start + self.length

    def cut(self, first: int, stop: int) -> AttentionRow:
        """Return the chunk of the tokens from position `first` up to `stop`, behind all before it."""
        queries = self.queries[first - self.start : stop - self.start]
        return AttentionRow(first, queries, self.keys[:stop], self.values[:stop])

    def chunks(self, length: int) -> list[AttentionRow]:
        """Return the row cut into chunks of so many tokens."""
        starts = range(self.start, self.stop, length)
        return [self.cut(first, min(first + length, self.stop)) for first in starts]

    def stored(self, entry: str) -> AttentionRow:
        """Return the row with the keys and values that entries of a format stand for, in float64."""
        return evolve(self, keys=_stored(self.keys, entry), values=_stored(self.values, entry))


def int8_numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers (..., D) and fp32 scales (...) of int8 entries, with no help from `intarsia.ops`."""
    vectors = x.float().numpy()
    finite = np.isfinite(vectors).all(axis=-1)
    vectors = np.where(finite[..., None], vectors, 0)
    scales = np.abs(vectors).max(axis=-1) * np.float32(1 / 127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    numbers = np.clip(np.rint(vectors / divisors[..., None]), -127, 127) * (scales > 0)[..., None]
    scales = np.where(finite, scales, np.float32(np.nan))
    return torch.from_numpy(numbers).to(torch.int8), torch.from_numpy(scales)


def _stored(x: torch.Tensor, entry: str) -> torch.Tensor:
    if entry == "int8":
        numbers, scales = int8_numbers(x)
        return numbers.double() * scales.double().unsqueeze(-1)
    dtype: torch.dtype = getattr(torch, entry)
    return x.to(dtype).double()


def exact_attention(row: AttentionRow, spec: AttentionSpec) -> tuple[_Floats, _Floats]:
    """Return softmax(q k^T scale) v over the keys that a query sees, and the same of the values' sizes: (n, H, D)."""
    q_HnD, k_KMD, v_KMD = (x.double().numpy().swapaxes(0, 1) for x in (row.queries, row.keys, row.values))
    group = spec.num_heads // spec.num_kv_heads
    keys_HMD, values_HMD = (np.repeat(x, group, axis=0) for x in (k_KMD, v_KMD))
    # Not by `@`: BLAS would spin in threads over matrices as small as these.
    scores_HnM = np.einsum("hnd,hmd->hnm", q_HnD, keys_HMD) * spec.scale
    if spec.soft_cap is not None:
        scores_HnM = spec.soft_cap * np.tanh(scores_HnM / spec.soft_cap)
    positions, keys = np.arange(row.start, row.stop)[:, None], np.arange(row.stop)
    hidden = keys > positions
    if spec.window is not None:
        hidden |= keys <= positions - spec.window
    scores_HnM = np.where(hidden, -np.inf, scores_HnM)
    weights = np.exp(scores_HnM - scores_HnM.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out, size = (np.einsum("hnm,hmd->hnd", weights, x) for x in (values_HMD, np.abs(values_HMD)))
    return out.swapaxes(0, 1), size.swapaxes(0, 1)


def check_row(
    out: torch.Tensor, row: AttentionRow, spec: AttentionSpec, entry: str = "", rounding: float | None = None
) -> None:
    """Compare a row's result (n, H, D) with float64.

    Args:
        out: of the queries' dtype.
        row: the row as it was given.
        spec: the layer's.
        entry: format of the cache's entries; empty where `row` holds what they stand for.
        rounding: what the result may be off by, see `ROUNDING`, where that is not said there.

    Raises:
        AssertionError: it is further off than that; says where.
    """
    dtype = name_of(out.dtype)
    exact = row.stored(entry) if entry else row
    right, size = exact_attention(exact, spec)
    share = ROUNDING[dtype] if rounding is None else rounding
    if entry == "int8" and dtype in _UNITS:
        # What entries stand for may be rounded to the queries' dtype: once in a value, and in each product of a score,
        # whose sum over the D products is at most |q| |k| scale of that.
        norms = float(row.queries.double().norm(dim=-1).max() * exact.keys.norm(dim=-1).max())
        share += _UNITS[dtype] * (1 + 2 * norms * spec.scale)
    error = np.abs(out.double().numpy() - right)
    wrong = np.argwhere(~(error <= size * share + _FLOOR))
    if len(wrong):
        token, head, dim = wrong[0]
        off = error[token, head, dim]
        raise AssertionError(
            f"of a row of {row.length} tokens from position {row.start} on, position {row.start + token} is off by "
            f"{off:.2g} in head {head}: {float(out[token, head, dim]):.6g}, and {right[token, head, dim]:.6g} is right "
            f"({dtype}, {_worded(spec)}{f', entries in {entry}' if entry else ''})"
        )


def _worded(spec: AttentionSpec) -> str:
    heads = f"{spec.num_heads} heads over {spec.num_kv_heads} of {spec.head_dim} dimensions"
    more = [f"{name} {getattr(spec, name)}" for name in ("window", "soft_cap") if getattr(spec, name) is not None]
    return ", ".join((heads, *more))
