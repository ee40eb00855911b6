"""Attention through torch.nn.functional.scaled_dot_product_attention.

Short rows that decode are computed together where they read about equally many pages; the others one by one. Which of
the two, and the padding and mask of the first, depend on a row's own length alone; so its bits do not depend on the
rows beside it. In fp32 all go one by one: torch's kernel rounds a batch of rows otherwise than one.

Shape legend: T tokens, R rows, n tokens of one row, H heads, K kv heads, G query heads a kv head, D head dim, M keys,
S slots a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import frozen
from torch.nn import functional

from intarsia.defaults.attention import FORMATS, Keys, entries, visible
from intarsia.protocols import LayerCache, PartContext
from intarsia.types import AttentionSpec, CacheLayout, Fit, ForwardBatch, Invariance, Unfit

#: Decoding rows are computed together whose pages come to the same multiple of this.
_PAGES = 4
#: Keys up to which calls cost more than what they do. Longer rows are read faster one by one, without a mask.
_SHORT = 512


@frozen(eq=False)
class _Decoding:
    """Rows of one token each, with equally many pages.

    Attributes:
        tokens_R: where their tokens are in the batch.
        pages: their page tables, end to end; a row's first page stands in front again, hidden, to fill up.
        bias_R11M: 0 for keys that a row sees, -inf for the others.
        hidden_RM11: keys that a row does not see. Where a slot holds no token, anything may lie there.
    """

    tokens_R: torch.Tensor
    pages: torch.Tensor
    bias_R11M: torch.Tensor
    hidden_RM11: torch.Tensor
    page_size: int

    @classmethod
    def of(
        cls, rows: Sequence[tuple[int, int, tuple[int, ...]]], window: int | None, size: int, like: torch.Tensor
    ) -> _Decoding:
        """Lay rows out that are given as (index of the token, its position, the pages that it sees)."""
        device = like.device
        tables: list[int] = []
        fills = [-len(pages) % _PAGES for _, _, pages in rows]
        for (_, _, pages), fill in zip(rows, fills, strict=True):
            tables += [pages[0]] * fill + list(pages)
        num_keys = len(tables) // len(rows) * size
        positions_R1 = torch.tensor([position for _, position, _ in rows], device=device).unsqueeze(1)
        least_R1 = torch.tensor(
            [(position // size + 1 - len(pages)) * size for _, position, pages in rows], device=device
        ).unsqueeze(1)
        # The fill lies before the keys that are there.
        first_R1 = least_R1 - torch.tensor(fills, device=device).unsqueeze(1) * size
        keys_RM = first_R1 + torch.arange(num_keys, device=device)
        seen_RM = (keys_RM <= positions_R1) & (keys_RM >= least_R1)
        if window is not None:
            seen_RM &= keys_RM > positions_R1 - window
        bias = torch.zeros_like(seen_RM, dtype=like.dtype).masked_fill_(~seen_RM, -torch.inf)
        return cls(
            tokens_R=torch.tensor([token for token, _, _ in rows], device=device),
            pages=torch.tensor(tables, device=device),
            bias_R11M=bias[:, None, None, :],
            hidden_RM11=~seen_RM[:, :, None, None],
            page_size=size,
        )

    def attend(self, q_RHD: torch.Tensor, cache: LayerCache, order: str, spec: AttentionSpec) -> torch.Tensor:
        """Return (R, H, D)."""
        keys, values = (x.to(q_RHD.dtype) for x in entries(cache, lambda stored: self._gather(stored, order)))
        # A row's token sees every key that is not hidden, so a kv head's query heads can be the queries of one call.
        grouped_RKGD = q_RHD.reshape(len(q_RHD), spec.num_kv_heads, -1, spec.head_dim)
        mixed = functional.scaled_dot_product_attention(
            grouped_RKGD, keys, values, attn_mask=self.bias_R11M, scale=spec.scale
        )
        return mixed.reshape(q_RHD.shape)

    def _gather(self, stored: torch.Tensor, order: str) -> torch.Tensor:
        """Return (R, K, M, D). What holds no token becomes zero: NaN would spread from where it is hidden."""
        pages = stored.index_select(0, self.pages)
        if order == "PKSD":
            pages = pages.transpose(1, 2)
        gathered = pages.reshape(len(self.tokens_R), -1, *pages.shape[2:])
        # Only what fills up, in front, and the last page can have such slots.
        for part in (slice(0, (_PAGES - 1) * self.page_size), slice(-self.page_size, None)):
            gathered[:, part].masked_fill_(self.hidden_RM11[:, part], 0)
        return gathered.transpose(1, 2)


@frozen(eq=False)
class _Group:
    """One cache group's rows: those that decode, and (first token, end, position, keys) of the others."""

    decoding: tuple[_Decoding, ...]
    others: tuple[tuple[int, int, int, Keys], ...]


@frozen
class SdpaAttention:
    """torch's kernel. `dtype` is the queries'."""

    dtype: torch.dtype
    orders: tuple[str, ...] = ("PSKD", "PKSD")
    formats: tuple[str, ...] = FORMATS

    def invariance(self, dtype: str) -> Invariance:
        """A row's own tokens decide what it is computed with; other rows do not."""
        del dtype
        return "neighbours"

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> tuple[tuple[_Group, ...], str]:
        """Find each row's keys, and who is computed together, once for all layers."""
        like = batch.ids_T.new_zeros((), dtype=self.dtype)
        size = layout.page_size
        groups = []
        for group, tables in zip(layout.groups, batch.pages, strict=True):
            together: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {}
            others = []
            for (first, stop), start, table in zip(pairwise(batch.bounds), batch.starts, tables, strict=True):
                skipped = 0 if group.window is None else max(0, start - group.window + 1) // size
                pages = table[skipped : start // size + 1]
                if stop - first == 1 and len(pages) * size <= _SHORT and self.dtype != torch.float32:
                    together.setdefault(-(-len(pages) // _PAGES), []).append((first, start, pages))
                    continue
                keys = Keys.locate(table, start, start + stop - first, group.window, size, like.device)
                others.append((first, stop, start, keys))
            decoding = tuple(_Decoding.of(rows, group.window, size, like) for rows in together.values())
            groups.append(_Group(decoding, tuple(others)))
        return tuple(groups), layout.order

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D)."""
        groups, order = batch.attention
        mine: _Group = groups[group]
        mixed = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for rows in mine.decoding:
            mixed[rows.tokens_R] = rows.attend(q_THD[rows.tokens_R], cache, order, spec)
        for first, stop, start, keys in mine.others:
            found = keys.read(cache, order)
            mixed[first:stop] = attend_row(q_THD[first:stop], *found, start, keys.first, spec)
        return mixed


def attend_row(
    q_nHD: torch.Tensor, keys_MKD: torch.Tensor, values_MKD: torch.Tensor, start: int, first: int, spec: AttentionSpec
) -> torch.Tensor:
    """Return (n, H, D) from torch's kernel, which on CPUs never holds tokens x tokens."""
    start -= first
    if spec.window is not None and (unseen := start - spec.window + 1) > 0:
        keys_MKD, values_MKD, start = keys_MKD[unseen:], values_MKD[unseen:], spec.window - 1
    num_queries, num_keys = len(q_nHD), len(keys_MKD)
    keys_KMD = keys_MKD.to(q_nHD.dtype).transpose(0, 1)
    values_KMD = values_MKD.to(q_nHD.dtype).transpose(0, 1)
    if num_queries == 1:
        # One query sees every key, so a kv head's query heads can be the queries of one call: keys are read once.
        grouped_KGD = q_nHD.reshape(spec.num_kv_heads, -1, spec.head_dim)
        return _sdpa(grouped_KGD, keys_KMD, values_KMD, scale=spec.scale).reshape(q_nHD.shape)
    sees_all = spec.window is None or num_keys <= spec.window
    if sees_all and start > 0 and num_queries >= _SPLIT and q_nHD.device.type == "cpu":
        return _behind_prefix(q_nHD.transpose(0, 1), keys_KMD, values_KMD, start, spec.scale).transpose(0, 1)
    causal = start == 0 and sees_all
    mask = None if causal else visible(num_queries, num_keys, start, spec.window, q_nHD.device)
    mixed = _sdpa(
        q_nHD.transpose(0, 1),
        keys_KMD,
        values_KMD,
        attn_mask=mask,
        is_causal=causal,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return mixed.transpose(0, 1)


#: Queries of a chunk from which two products cost less than one with a mask, whose hidden half is computed too.
_SPLIT = 64


def _behind_prefix(
    q_HnD: torch.Tensor, keys_KMD: torch.Tensor, values_KMD: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """Attend for a chunk in the middle of its prompt: to the keys before it, and causally to its own; (H, n, D).

    The two are weighed by their sums of exponentials (Dao et al. 2023, flash-decoding).
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    q, keys, values = (tensor.unsqueeze(0) for tensor in (q_HnD, keys_KMD, values_KMD))
    before, log_before = flash(q, keys[:, :, :start], values[:, :, :start], 0.0, False, scale=scale)
    own, log_own = flash(q, keys[:, :, start:], values[:, :, start:], 0.0, True, scale=scale)
    share = torch.sigmoid(log_before - log_own).unsqueeze(-1)
    return torch.lerp(own.float(), before.float(), share).to(q.dtype).squeeze(0)


def _sdpa(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any) -> torch.Tensor:
    """Run torch's kernel on three-dimensional tensors; without a batch axis it would take a slower path."""
    queries, keys, values = (tensor.unsqueeze(0) for tensor in (queries, keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, **how).squeeze(0)


def fit(context: PartContext) -> Fit | Unfit:
    """Everything but soft caps."""
    capped = [i for i, layer in enumerate(context.spec.layers) if layer.attention.soft_cap is not None]
    if capped:
        return Unfit(f"torch's attention has no soft cap, which layer {capped[0]} needs")
    return Fit(50, "torch's own kernel")


def build(context: PartContext) -> SdpaAttention:
    """Make the backend."""
    return SdpaAttention(getattr(torch, context.engine.dtype))
