"""The algorithm of the `flash` kernels in torch ops: tiles of keys, online softmax (Dao et al. 2022), row by row.

Shape legend: T tokens, n queries of a block, H heads, K kv heads, D head dim, G query heads a kv head, M keys of a
tile, P pages.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import frozen

from intarsia.protocols import LayerCache
from intarsia.types import AttentionSpec, CacheLayout, ForwardBatch, Invariance

#: Keys of a tile, about: whole pages are gathered.
TILE = 128
#: Queries of a block, at most: later ones see keys that earlier ones would compute for nothing.
BLOCK = 128


@frozen(eq=False)
class PageTables:
    """Per cache group and row its page table, int64 (P,)."""

    tables: tuple[tuple[torch.Tensor, ...], ...]
    order: str
    page_size: int


@frozen
class OnlineAttention:
    """Never holds tokens x tokens: block x tile at most, in fp32."""

    orders: tuple[str, ...] = ("PSKD", "PKSD")
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16", "int8")

    def invariance(self, dtype: str) -> Invariance:
        """Each row is computed by itself, in shapes of its own; how it is cut into chunks can show in its last bits."""
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
            for begin in range(first, stop, BLOCK):
                end = min(begin + BLOCK, stop)
                mixed[begin:end] = _block(q_THD[begin:end], cache, pages, start + begin - first, spec, ready)
        return mixed


def _block(
    q_nHD: torch.Tensor, cache: LayerCache, pages: torch.Tensor, start: int, spec: AttentionSpec, ready: PageTables
) -> torch.Tensor:
    """Return (n, H, D) for queries from position `start` on."""
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
        unused_M = ~seen_nM.any(dim=0)
        keys_K1MD = _entries(cache.keys, cache.key_scales, chosen, unused_M, ready.order)
        values_K1MD = _entries(cache.values, cache.value_scales, chosen, unused_M, ready.order)
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


def _entries(
    stored: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, unused_M: torch.Tensor, order: str
) -> torch.Tensor:
    """Return (K, 1, M, D) in fp32: numbers times scales, and zero where no query looks.

    Unused slots may hold NaN, and 0 x NaN is NaN: they become zero before any arithmetic.
    """
    entries_MKD = _gather(stored, pages, order).float()
    if scales is not None:
        entries_MKD = entries_MKD * _gather(scales.unsqueeze(-1), pages, order)
    return entries_MKD.masked_fill(unused_M[:, None, None], 0).transpose(0, 1).unsqueeze(1)


def _gather(stored: torch.Tensor, pages: torch.Tensor, order: str) -> torch.Tensor:
    """Return (M, K, D)."""
    chosen = stored.index_select(0, pages)
    return (chosen.transpose(1, 2) if order == "PKSD" else chosen).flatten(0, 1)
