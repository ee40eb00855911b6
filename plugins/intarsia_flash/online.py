"""The algorithm of the `flash` kernels in torch ops: tiles of keys, online softmax (Dao et al. 2022), row by row.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, G query heads a kv head, D head dim, M keys of a tile,
P pages.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import frozen

from intarsia.protocols import LayerCache
from intarsia.types import AttentionSpec, CacheLayout, ForwardBatch, Invariance

#: Keys a tile, at least: whole pages are gathered.
TILE = 128


@frozen(eq=False)
class PageTables:
    """Per cache group and row its page table, int64 (P,)."""

    tables: tuple[tuple[torch.Tensor, ...], ...]
    order: str
    page_size: int


@frozen
class OnlineAttention:
    """Never holds tokens x tokens: n x tile at most."""

    orders: tuple[str, ...] = ("PSKD", "PKSD")
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")

    def invariance(self, dtype: str) -> Invariance:
        """Each row is computed by itself; how it is cut into chunks can show in its last bits."""
        del dtype
        return "neighbours"

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> PageTables:
        """Put the page tables on the device."""
        device = batch.ids_T.device
        tables = tuple(tuple(torch.tensor(row, device=device) for row in rows) for rows in batch.pages)
        return PageTables(tables, layout.order, layout.page_size)

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D)."""
        ready: PageTables = batch.attention
        mixed = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        rows = zip(batch.starts, pairwise(batch.bounds), ready.tables[group], strict=True)
        for start, (first, stop), pages in rows:
            mixed[first:stop] = _row(q_THD[first:stop], cache, pages, start, spec, ready)
        return mixed


def _row(
    q_nHD: torch.Tensor, cache: LayerCache, pages: torch.Tensor, start: int, spec: AttentionSpec, ready: PageTables
) -> torch.Tensor:
    """Return (n, H, D), computed in fp32."""
    num, size = len(q_nHD), ready.page_size
    step = max(1, TILE // size)
    q_KGnD = q_nHD.float().reshape(num, spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3) * spec.scale
    positions_n1 = torch.arange(start, start + num, device=q_nHD.device).unsqueeze(1)
    peak_KGn1 = q_KGnD.new_full((*q_KGnD.shape[:3], 1), -torch.inf)
    total_KGn1 = torch.zeros_like(peak_KGn1)
    mixed_KGnD = torch.zeros_like(q_KGnD)
    lowest = 0 if spec.window is None else max(0, start - spec.window + 1)
    for page in range(lowest // size // step * step, -(-(start + num) // size), step):
        # Pages before `lowest` were given back: their entries are hidden below.
        chosen = pages[page : page + step].clamp_min(0)
        keys_M = torch.arange(page * size, (page + len(chosen)) * size, device=q_nHD.device)
        seen_nM = keys_M <= positions_n1
        if spec.window is not None:
            seen_nM &= keys_M > positions_n1 - spec.window
        unused_M11 = ~seen_nM.any(dim=0)[:, None, None]
        # Unused slots may hold NaN, and 0 x NaN is NaN: they become zero before any arithmetic.
        keys_K1MD = _gather(cache.keys, chosen, ready.order).masked_fill(unused_M11, 0).transpose(0, 1).unsqueeze(1)
        values_K1MD = _gather(cache.values, chosen, ready.order).masked_fill(unused_M11, 0).transpose(0, 1).unsqueeze(1)
        scores = q_KGnD @ keys_K1MD.transpose(2, 3)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~seen_nM, -torch.inf)
        higher = torch.maximum(peak_KGn1, scores.amax(dim=-1, keepdim=True))
        # A query that has seen no key yet has a peak of -inf; -inf - -inf would be NaN.
        finite = higher.masked_fill(higher == -torch.inf, 0)
        weights, shrink = torch.exp(scores - finite), torch.exp(peak_KGn1 - finite)
        total_KGn1 = total_KGn1 * shrink + weights.sum(dim=-1, keepdim=True)
        mixed_KGnD = mixed_KGnD * shrink + weights @ values_K1MD
        peak_KGn1 = higher
    return (mixed_KGnD / total_KGn1).permute(2, 0, 1, 3).reshape(q_nHD.shape).to(q_nHD.dtype)


def _gather(stored: torch.Tensor, pages: torch.Tensor, order: str) -> torch.Tensor:
    """Return (M, K, D) in fp32."""
    chosen = stored.index_select(0, pages)
    return (chosen.transpose(1, 2) if order == "PKSD" else chosen).flatten(0, 1).float()
