"""Attention that a CUDA graph can hold, in torch ops: for tests of what comes with that.

Shape legend: R rows, M keys, H heads, K kv heads, G query heads a kv head, D head dim.
"""

import torch
from attrs import frozen

from intarsia.defaults.attention import RowByRowAttention


@frozen(eq=False)
class Tables:
    """Page tables of one length, and how many keys each row sees."""

    pages: tuple[torch.Tensor, ...]
    lengths_R: torch.Tensor
    host: tuple

    def refill(self, other):
        assert self.host == other.host, "something changed that a graph cannot read anew"
        for old, new in zip((*self.pages, self.lengths_R), (*other.pages, other.lengths_R), strict=True):
            old.copy_(new)


@frozen
class FixedAttention(RowByRowAttention):
    """Attention that decodes over padded tables, and runs all else as the oracle does."""

    orders: tuple[str, ...] = ("PSKD",)
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")

    def prepare_fixed(self, batch, layout, max_len):
        width = -(-max_len // layout.page_size)
        pages = tuple(
            torch.tensor([(*table[:width], *(table[-1],) * (width - len(table))) for table in tables])
            for tables in batch.pages
        )
        return Tables(pages, torch.tensor(batch.starts) + 1, (batch.num_rows, max_len, layout.order))

    def attend(self, q_THD, cache, spec, group, batch):
        fixed = batch.attention
        if not isinstance(fixed, Tables):
            return RowByRowAttention.attend(self, q_THD, cache, spec, group, batch)
        keys, values = (stored[fixed.pages[group]].flatten(1, 2).float() for stored in (cache.keys, cache.values))
        positions = torch.arange(keys.shape[1])
        hidden = positions >= fixed.lengths_R[:, None]
        if spec.window is not None:
            hidden |= positions < fixed.lengths_R[:, None] - spec.window
        keys, values = (x.masked_fill(hidden[:, :, None, None], 0) for x in (keys, values))
        queries = q_THD.float().unflatten(1, (spec.num_kv_heads, -1))
        scores = torch.einsum("rkgd,rmkd->rkgm", queries, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("rkgm,rmkd->rkgd", weights, values).reshape(q_THD.shape).to(q_THD.dtype)
