"""Plain attention over the cache, row by row: what `eager`, `tiled` and (for rows of several tokens) `sdpa` share.

A row here is one sequence's tokens of the step. Each row is computed on its own, by the same calls whatever rows are
beside it, so its result does not depend on them. How a prompt is cut into chunks can show in the last bits, except in
`tiled`.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, G query heads a kv head, D head dim, M keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeAlias

import torch
from attrs import Factory, frozen

from intarsia.defaults.tiled import tiled_row
from intarsia.protocols import LayerCache, PartContext
from intarsia.types import AttentionSpec, CacheLayout, Fit, ForwardBatch, Invariance

#: Pages in order: a slice where they lie side by side, which reads without a copy.
_Pages: TypeAlias = slice | torch.Tensor
#: Entries that `Keys.read` reads.
FORMATS = ("float32", "float16", "bfloat16", "int8")
#: (queries (n, H, D), keys (M, K, D), values (M, K, D), positions of the first query and the first key, spec)
#: -> (n, H, D)
RowAttention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, AttentionSpec], torch.Tensor]


@frozen(eq=False)
class Keys:
    """Where one row's keys lie: its pages from the first that a window lets it see, and how many keys they hold."""

    pages: _Pages
    first: int
    count: int

    @classmethod
    def locate(
        cls, pages: tuple[int, ...], start: int, stop: int, window: int | None, page_size: int, device: torch.device
    ) -> Keys:
        """Find the keys that queries from position `start` up to `stop` see."""
        skipped = 0 if window is None else max(0, start - window + 1) // page_size
        used = pages[skipped : -(-stop // page_size)]
        first = skipped * page_size
        if used == tuple(range(used[0], used[0] + len(used))):
            return cls(slice(used[0], used[0] + len(used)), first, stop - first)
        return cls(torch.tensor(used, device=device), first, stop - first)

    def gather(self, stored: torch.Tensor, order: str) -> torch.Tensor:
        """Return keys (or values) as (M, K, D); slots past the last one are not read."""
        # index_select copies whole pages; indexing would walk over their numbers one by one.
        chosen = stored[self.pages] if isinstance(self.pages, slice) else stored.index_select(0, self.pages)
        if order == "PKSD":
            chosen = chosen.transpose(1, 2)
        return chosen.flatten(0, 1)[: self.count]

    def read(self, cache: LayerCache, order: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row's keys and values as (M, K, D): of quantized entries those that they stand for, in fp32."""
        return entries(cache, lambda stored: self.gather(stored, order))


def entries(cache: LayerCache, gather: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `gather` takes of keys and of values: of quantized entries numbers times scales, in fp32.

    It sees scales as tensors of one number a slot and head, with the axes of the others.
    """
    keys, values = gather(cache.keys), gather(cache.values)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values
    scales = (gather(one.unsqueeze(-1)) for one in (cache.key_scales, cache.value_scales))
    return keys * next(scales), values * next(scales)


@frozen(eq=False)
class RowKeys:
    """Per cache group and row, where its keys lie."""

    keys: tuple[tuple[Keys, ...], ...]
    order: str


@frozen
class RowByRowAttention:
    """A backend that hands each row's queries, keys and values to one function.

    Attributes:
        levels: dtype -> what the function promises; `neighbours` where it says nothing, since rows are apart.
    """

    attend_row: RowAttention
    levels: Mapping[str, Invariance] = Factory(dict)
    orders: tuple[str, ...] = ("PSKD", "PKSD")
    formats: tuple[str, ...] = FORMATS

    def invariance(self, dtype: str) -> Invariance:
        """A row's own tokens decide the shapes that it is computed in; other rows do not."""
        return self.levels.get(dtype, "neighbours")

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> RowKeys:
        """Find each row's keys, once for all layers."""
        ends = [start + stop - first for start, (first, stop) in zip(batch.starts, pairwise(batch.bounds), strict=True)]
        size, device = layout.page_size, batch.ids_T.device
        keys = tuple(
            tuple(
                Keys.locate(row, start, end, group.window, size, device)
                for row, start, end in zip(tables, batch.starts, ends, strict=True)
            )
            for group, tables in zip(layout.groups, batch.pages, strict=True)
        )
        return RowKeys(keys, layout.order)

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D)."""
        prepared: RowKeys = batch.attention
        mixed = []
        for start, (first, stop), found in zip(batch.starts, pairwise(batch.bounds), prepared.keys[group], strict=True):
            keys, values = found.read(cache, prepared.order)
            mixed.append(self.attend_row(q_THD[first:stop], keys, values, start, found.first, spec))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def visible(num_queries: int, num_keys: int, start: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return (n, M): whether the query at position start + i sees the key at position j; keys count from 0."""
    queries = torch.arange(start, start + num_queries, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def eager_row(
    q_nHD: torch.Tensor, keys_MKD: torch.Tensor, values_MKD: torch.Tensor, start: int, first: int, spec: AttentionSpec
) -> torch.Tensor:
    """Return softmax(q k^T scale) v, (n, H, D), written out, in fp32: the oracle."""
    num_queries, num_heads, head_dim = q_nHD.shape
    num_kv_heads = keys_MKD.shape[1]
    grouped_KGnD = q_nHD.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys_K1DM = keys_MKD.float().permute(1, 2, 0).unsqueeze(1)
    values_K1MD = values_MKD.float().transpose(0, 1).unsqueeze(1)
    scores = grouped_KGnD @ keys_K1DM * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    hidden = ~visible(num_queries, len(keys_MKD), start - first, spec.window, q_nHD.device)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    mixed_nKGD = (weights @ values_K1MD).permute(2, 0, 1, 3)
    return mixed_nKGD.reshape(num_queries, num_heads, head_dim).to(q_nHD.dtype)


def fit_tiled(context: PartContext) -> Fit:
    """The choice of fp32 on CPUs, where everything else is bitwise too."""
    if context.engine.dtype == "float32" and context.engine.device == "cpu":
        return Fit(60, "fixed tiles: an answer's bits do not depend on batches or chunks")
    return Fit(20, "fixed tiles in fp32")


def build_eager(_: PartContext) -> RowByRowAttention:
    """Make the oracle."""
    return RowByRowAttention(eager_row)


def build_tiled(context: PartContext) -> RowByRowAttention:
    """Make the backend of fixed tiles. What it rests on was measured on CPUs."""
    levels: dict[str, Invariance] = {}
    if context.engine.device == "cpu":
        levels = dict.fromkeys(("float32", "float16", "bfloat16"), "bitwise")
    return RowByRowAttention(tiled_row, levels)
