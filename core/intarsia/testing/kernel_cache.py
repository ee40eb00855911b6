"""Ops that write the cache, as calls that return what is in the slots then; around these everything stays as it was.

Shape legend: T tokens, H heads, K kv heads, N = H + 2 K, D head dim, h half of the rotated dims, P pages, S slots a
page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from intarsia.models.cache import LayerTensors
from intarsia.protocols import Kernel
from intarsia.testing.kernel_calls import SUM, TINY, UNIT, Judge, near, normal
from intarsia.testing.kernel_rows import norm_error, rms_normed

__all__ = ["attending", "draw_inputs", "draw_write", "judge_inputs", "judge_write", "writing"]

_PAGE = 5
_EPS = 1e-5


def _slots(rows: int, seed: int) -> torch.Tensor:
    """Return slots (T,), all of them different; of more than two rows one goes nowhere."""
    slots = torch.randperm(2 * rows + 3, generator=torch.Generator().manual_seed(seed))[:rows]
    if rows > 2:
        slots[rows // 2] = -1
    return slots


class _Cache:
    """A cache full of NaN, and of scales of NaN, from which entries are read back."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype, order: str, num_slots: int, device: str) -> None:
        self._order = order
        size = {"P": -(-num_slots // _PAGE) + 1, "S": _PAGE, "K": heads, "D": width}
        self.tensors = LayerTensors.empty(order, size, dtype, torch.device(device), scaled=dtype == torch.int8)
        self.tensors.fill(torch.nan)

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the entries of slots, zeros for slot -1; raise AssertionError where another slot was written to."""
        found = []
        for stored in self.tensors.tensors:
            by_slot = (stored if self._order == "PSKD" else stored.transpose(1, 2)).flatten(0, 1).cpu()
            kept = by_slot[: len(by_slot) - _PAGE].clone()
            real = slots >= 0
            entries = by_slot.new_zeros((len(slots), *by_slot.shape[1:]))
            entries[real] = kept[slots[real]]
            kept[slots[real]] = torch.nan if stored.is_floating_point() else 1
            clean = kept.isnan() if stored.is_floating_point() else kept == 1
            assert bool(clean.all()), "a slot is written to that no token has"
            found.append(entries)
        return tuple(found)


def writing(kernel: Kernel, entry: torch.dtype, order: str, num_slots: int) -> Callable[..., Any]:
    """Return `cache_write` into an empty cache, as a function of keys, values and slots.

    Returns:
        Of what it returns: keys and values (T, K, D) as they are stored, and of int8 their scales (T, K).
    """

    def call(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cache = _Cache(keys.shape[1], keys.shape[2], entry, order, num_slots, str(keys.device))
        kernel.call(keys, values, cache.tensors, slots, order)
        return cache.take(slots.cpu())

    return call


def draw_write(rows: int, width: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Return keys and values (T, K, D), and slots."""
    keys, values = (normal(seed + i, rows, 1 + seed % 3, width, dtype=dtype) for i in (0, 1))
    if rows > 3:
        keys[0], values[1] = 0, 0
    return keys, values, _slots(rows, seed)


def judge_write(entry: torch.dtype) -> Judge:
    """Return the judge of what `writing` returns."""

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        keys, values, slots = arguments
        real = slots >= 0
        _judge_entries((keys[real], values[real]), (0.0, 0.0), tuple(each[real] for each in results), entry)

    return judge


def _judge_entries(
    rights: tuple[torch.Tensor, ...],
    limits: tuple[torch.Tensor | float, ...],
    found: tuple[torch.Tensor, ...],
    entry: torch.dtype,
) -> None:
    for place, said in enumerate(("a stored key", "a stored value")):
        right, limit = rights[place], limits[place]
        if entry != torch.int8:
            exact = right.to(entry) if isinstance(limit, float) else right
            near(found[place], exact.double(), limit, entry, said)
            continue
        largest = right.double().abs().amax(-1)
        most = torch.as_tensor(limit, dtype=torch.float64).expand(right.shape).amax(-1)
        near(
            found[place + 2],
            largest / 127,
            largest * 2 * SUM + most / 127 + 2.0**-140,
            torch.float32,
            f"{said}'s scale",
        )
        assert found[place].dtype == torch.int8, f"{said} is in {found[place].dtype}"
        whole = found[place].double() * found[place + 2].double().unsqueeze(-1)
        step = (largest / 127).unsqueeze(-1)
        near(whole, right.double(), 0.501 * step + 2 * most.unsqueeze(-1) + 2.0**-126, torch.float64, said)


# --- what attention is given ------------------------------------------------------------------------------------------


def attending(kernel: Kernel, entry: torch.dtype, order: str, num_heads: int, num_slots: int) -> Callable[..., Any]:
    """Return `attention_inputs` over an empty cache, as a function of what it norms, rotates and writes.

    Returns:
        Of what it returns: queries (T, H, D), and then what `writing` does.
    """

    def call(
        qkv: torch.Tensor, norms: Any, cos: torch.Tensor | None, sin: torch.Tensor | None, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        cache = _Cache((qkv.shape[1] - num_heads) // 2, qkv.shape[2], entry, order, num_slots, str(qkv.device))
        angles = None if cos is None or sin is None else (cos, sin)
        queries = kernel.call(qkv, num_heads, norms, _EPS, angles, cache.tensors, slots, order)
        return queries.cpu(), *cache.take(slots.cpu())

    return call


def draw_inputs(rows: int, width: int, dtype: torch.dtype, seed: int, num_heads: int) -> tuple[Any, ...]:
    """Return queries, keys and values (T, N, D), norms or None, angles or None, and slots."""
    width = max(2, min(width, 256))
    num_kv_heads = (num_heads, 1, max(1, num_heads // 2))[seed % 3]
    qkv = normal(seed, rows, num_heads + 2 * num_kv_heads, width, dtype=dtype)
    norms = (normal(seed + 1, width, dtype=dtype), normal(seed + 2, width, dtype=dtype)) if seed % 2 else None
    angles = normal(seed + 3, rows, 1, width // (2, 4, 3)[seed % 3]) * 3
    turns = (None, None) if seed % 4 == 1 else (angles.cos().to(dtype), angles.sin().to(dtype))
    return qkv, norms, *turns, _slots(rows, seed)


def judge_inputs(entry: torch.dtype, num_heads: int) -> Judge:
    """Return the judge of what `attending` returns."""

    def judge(arguments: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> None:
        qkv, norms, cos, sin, slots = arguments
        last_key, real, dtype = (num_heads + qkv.shape[1]) // 2, slots >= 0, qkv.dtype
        weights = (None, None) if norms is None else norms
        queries, limit = _turned(qkv[:, :num_heads], weights[0], cos, sin)
        near(results[0], queries, limit, dtype, "a query")
        keys, limit = _turned(qkv[:, num_heads:last_key], weights[1], cos, sin)
        rights, limits = (keys[real], qkv[real, last_key:]), (limit[real] + keys[real].abs() * UNIT[dtype], 0.0)
        _judge_entries(rights, limits, tuple(each[real] for each in results[1:]), entry)

    return judge


def _turned(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return heads normed and rotated in float64, and how far off they may be."""
    right = x.double() if weight is None else rms_normed(x, weight, _EPS)
    off = torch.zeros_like(right) if weight is None else norm_error(right, weight, x.dtype)
    if cos is None or sin is None:
        return right, off
    half = cos.shape[-1]
    parts = right[..., :half], right[..., half : 2 * half], right[..., 2 * half :]
    turned = (parts[0] * cos.double() - parts[1] * sin.double(), parts[1] * cos.double() + parts[0] * sin.double())
    size = (parts[0].abs() + parts[1].abs()) * 3 * UNIT[x.dtype] + off[..., :half] + off[..., half : 2 * half]
    limit = torch.cat((size, size, off[..., 2 * half :]), -1) + TINY[x.dtype]
    return torch.cat((*turned, parts[2]), -1), limit
