"""Attention alone: prefill of one long row beside a matrix product and torch's own; paged decode beside a copy.

Shape legend: T tokens, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch
from attrs import evolve, frozen
from torch.nn import functional

from intarsia.errors import CompositionError
from intarsia.executor import forward_batch
from intarsia.layout import lay_out
from intarsia.models.cache import LayerTensors, TensorCache
from intarsia.plugins import Registry
from intarsia.protocols import AttentionBackend, PartContext
from intarsia.types import CacheOptions, EngineOptions, ForwardBatch, Row, Unfit
from intarsia_bench.gpu.setting import Emit, Setting
from intarsia_bench.gpu.timing import alternated, copying, multiplying, random_like


@frozen(eq=False)
class Attending:
    """Rows over a paged cache of random entries, whose pages lie scattered, and a backend that is ready for them."""

    backend: AttentionBackend
    setting: Setting
    cache: LayerTensors
    batch: ForwardBatch
    queries: torch.Tensor

    @classmethod
    def of(cls, setting: Setting, rows: Sequence[tuple[int, int]]) -> Attending:
        """Make rows of (first position, tokens).

        Raises:
            IntarsiaError: there is no such backend, or it does not fit.
        """
        longest = max(start + length for start, length in rows)
        spec = setting.spec(longest)
        offer = Registry.discover().find("attention", setting.attention)
        engine = EngineOptions(device=setting.device, dtype=setting.dtype, max_model_len=longest)  # type: ignore[arg-type]
        context = PartContext(options=offer.provider.options(), engine=engine, spec=spec, num_ids=setting.vocab)
        fit = offer.provider.fit(context)
        if isinstance(fit, Unfit):
            raise CompositionError(f"attention: {setting.attention!r} does not fit: {fit.reason}", field="attention")
        backend: AttentionBackend = offer.provider.build(context)
        order = next(iter(backend.orders))
        layout = lay_out(spec, CacheOptions(page_size=setting.page_size), order, engine.dtype)
        counts = [-(-(start + length) // setting.page_size) for start, length in rows]
        pages = list(range(sum(counts)))
        random.Random(0).shuffle(pages)  # noqa: S311
        planned = []
        for index, ((start, length), count) in enumerate(zip(rows, counts, strict=True)):
            table, pages = tuple(pages[:count]), pages[count:]
            planned.append(Row(sequence_id=(str(index), 0), token_ids=(1,) * length, start=start, pages=(table,)))
        device = torch.device(setting.device)
        cache = TensorCache.allocate(layout, sum(counts), device).layer(0)
        for tensor in cache.tensors:
            tensor.normal_()
        batch = forward_batch(planned, [row.token_ids for row in planned], layout, device)
        batch = evolve(batch, attention=backend.prepare(batch, layout))
        queries = random_like(setting, batch.bounds[-1], setting.heads, setting.head_dim)
        return cls(backend, setting, cache, batch, queries)

    def attend(self) -> torch.Tensor:
        """Run one layer's attention; (T, H, D)."""
        return self.backend.attend(self.queries, self.cache, self.setting.attention_spec, 0, self.batch)

    def gathered(self, row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a row in the order of positions, (M, K, D) each."""
        table = torch.tensor(self.batch.pages[0][row], device=self.setting.device)
        length = self.batch.starts[row] + self.batch.bounds[row + 1] - self.batch.bounds[row]
        found = []
        for tensor in (self.cache.keys, self.cache.values):
            pages = tensor[table]
            by_slot = pages if tensor.shape[1] == self.setting.page_size else pages.transpose(1, 2)
            found.append(by_slot.reshape(-1, self.setting.kv_heads, self.setting.head_dim)[:length])
        return found[0], found[1]


def sdpa(setting: Setting, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what torch's causal attention makes of one row's tensors (T, H, D), keys and values already repeated."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
    scale = setting.attention_spec.scale
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)


def prefill(setting: Setting, emit: Emit) -> None:
    """Measure prefill attention of one row, causal; operations are those of the keys that each query sees."""
    tokens = setting.prefill_tokens
    ours = Attending.of(setting, [(0, tokens)])
    group = setting.heads // setting.kv_heads
    keys, values = (x.repeat_interleave(group, dim=1).contiguous() for x in ours.gathered())
    theirs = partial(sdpa, setting, ours.queries, keys, values)
    difference = float((ours.attend().float() - theirs().float()).abs().max())
    emit({"key": "prefill_difference", "value": difference, "unit": "", "note": "largest, from torch's SDPA"})
    multiply, flops = multiplying(setting)
    seconds = alternated({"ours": ours.attend, "sdpa": theirs, "matmul": multiply}, setting.device, setting.rounds)
    work = 4 * setting.heads * setting.head_dim * (tokens * (tokens + 1) // 2)
    rate, peak = work / seconds["ours"], flops / seconds["matmul"]
    emit({"key": "prefill_of_peak", "value": rate / peak, "measured": rate, "limit": peak, "unit": "FLOP/s"})
    emit(
        {
            "key": "prefill_vs_sdpa",
            "value": seconds["sdpa"] / seconds["ours"],
            "measured": rate,
            "limit": work / seconds["sdpa"],
            "unit": "FLOP/s",
        }
    )


def paged_decode(setting: Setting, emit: Emit) -> None:
    """Measure one token a row over a long cache, by the bytes of the keys and values that it reads."""
    copy, moved = copying(setting)
    entry = 2 * setting.kv_heads * setting.head_dim * setting.torch_dtype.itemsize
    for key, rows, keys in (
        ("paged_decode_of_copy", setting.decode_rows, setting.decode_keys),
        ("long_row_of_copy", 1, setting.long_keys),
    ):
        ours = Attending.of(setting, [(keys - 1, 1)] * rows)
        seconds = alternated({"ours": ours.attend, "copy": copy}, setting.device, setting.rounds)
        rate, peak = rows * keys * entry / seconds["ours"], moved / seconds["copy"]
        emit({"key": key, "value": rate / peak, "measured": rate, "limit": peak, "unit": "B/s"})
