"""The attention backend `cpu`: rows of all kinds in one native call a layer, bitwise whatever the batch.

Shape legend: T tokens, R rows, H heads, K kv heads, D head dim, P pages, S slots a page.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from itertools import accumulate, chain

import torch
from attrs import field, frozen

from intarsia.protocols import LayerCache, PartContext
from intarsia.types import AttentionSpec, CacheLayout, Fit, ForwardBatch, Invariance, Unfit
from intarsia_cpu.build import load, unavailable
from intarsia_cpu.entries import ENTRIES, Scales, entry_of

#: What the kernels compute in. Everything else is another backend's.
_NAMES = ("float32", "bfloat16")
_MAX_HEAD_DIM = 256


class _Args(ctypes.Structure):
    """`AttentionArgs` of `src/attention.h`, field by field."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("queries", "out", "keys", "values", "key_scales", "value_scales")],
        *[(name, ctypes.c_void_p) for name in ("bounds", "starts", "pages", "page_bounds")],
        *[(name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")],
        *[(name, ctypes.c_int64) for name in ("out_token_stride", "out_head_stride")],
        *[(name, ctypes.c_int64) for name in ("page_stride", "kv_head_stride", "slot_stride")],
        *[(name, ctypes.c_int64) for name in ("scale_page_stride", "scale_head_stride", "scale_slot_stride")],
        *[(name, ctypes.c_int32) for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "page_size")],
        *[(name, ctypes.c_int32) for name in ("window", "queries_bf16", "entry")],
        *[(name, ctypes.c_float) for name in ("scale", "soft_cap")],
    )


def _ints(numbers: Iterable[int]) -> array[int]:
    """int32 in one piece of memory."""
    return array("i", numbers)


@frozen(eq=False)
class RowPages:
    """The page tables of one cache group: `pages` end to end, those of row r from `bounds[r]` to `bounds[r + 1]`."""

    pages: array[int]
    bounds: array[int]

    @classmethod
    def of(cls, tables: tuple[tuple[int, ...], ...]) -> RowPages:
        """Lay tables end to end."""
        return cls(_ints(chain.from_iterable(tables)), _ints(accumulate(map(len, tables), initial=0)))


@frozen(eq=False)
class Prepared:
    """A step's rows as the kernel reads them.

    Attributes:
        bounds: R + 1 offsets into the batch's tokens.
        starts: R positions of the rows' first tokens.
        groups: the page tables of each cache group.
        order: of the cache's axes.
        page_size: slots a page.
        num_threads: that share the work. No bit of a result depends on it.
    """

    bounds: array[int]
    starts: array[int]
    groups: tuple[RowPages, ...]
    order: str
    page_size: int
    num_threads: int


def _load() -> ctypes.CDLL:
    """Return the compiled kernel; raise PluginError where it cannot be had."""
    library = load()
    assert library.intarsia_attention_args_bytes() == ctypes.sizeof(_Args)
    return library


@frozen(eq=False)
class CpuAttention:
    """Flash attention over pages in tiles of 64 keys, which begin at fixed positions and are taken in order."""

    orders: tuple[str, ...] = ("PKSD", "PSKD")
    formats: tuple[str, ...] = tuple(ENTRIES)
    _library: ctypes.CDLL = field(factory=_load, repr=False)

    def invariance(self, dtype: str) -> Invariance:
        """A query's bits depend on its own numbers and its keys' alone."""
        return "bitwise" if dtype in _NAMES else "numeric"

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Prepared:
        """Lay bounds, positions and page tables out, once for all layers."""
        return Prepared(
            bounds=_ints(batch.bounds),
            starts=_ints(batch.starts),
            groups=tuple(map(RowPages.of, batch.pages)),
            order=layout.order,
            page_size=layout.page_size,
            num_threads=torch.get_num_threads(),
        )

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D). Of the cache, only slots that a query sees are read."""
        assert q_THD.dtype in (torch.float32, torch.bfloat16), q_THD.dtype
        prepared: Prepared = batch.attention
        keys, values, tables = cache.keys, cache.values, prepared.groups[group]
        if q_THD.stride(-1) != 1:
            q_THD = q_THD.contiguous()
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        slot, head = (1, 2) if prepared.order == "PSKD" else (2, 1)
        scales = Scales.of(cache)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        args = _Args(
            queries=q_THD.data_ptr(),
            out=out_THD.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_scales=scales.keys,
            value_scales=scales.values,
            bounds=prepared.bounds.buffer_info()[0],
            starts=prepared.starts.buffer_info()[0],
            pages=tables.pages.buffer_info()[0],
            page_bounds=tables.bounds.buffer_info()[0],
            query_token_stride=q_THD.stride(0),
            query_head_stride=q_THD.stride(1),
            out_token_stride=out_THD.stride(0),
            out_head_stride=out_THD.stride(1),
            page_stride=keys.stride(0),
            kv_head_stride=keys.stride(head),
            slot_stride=keys.stride(slot),
            scale_page_stride=scales.strides[0],
            scale_head_stride=scales.strides[head],
            scale_slot_stride=scales.strides[slot],
            num_rows=len(prepared.starts),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=prepared.page_size,
            window=spec.window or 0,
            queries_bf16=q_THD.dtype == torch.bfloat16,
            entry=entry_of(keys),
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
        )
        self._library.intarsia_attention(ctypes.byref(args), prepared.num_threads)
        return out_THD


def fit(context: PartContext) -> Fit | Unfit:
    """CPUs, fp32 and bf16, heads of up to 256 dimensions, and a compiler."""
    engine = context.engine
    if engine.device != "cpu":
        return Unfit(f"its kernels are for CPUs, and the engine runs on {engine.device}")
    if engine.dtype not in _NAMES:
        return Unfit(f"its kernels compute in {' or '.join(_NAMES)}, and the engine runs {engine.dtype}")
    wide = [(i, layer.attention.head_dim) for i, layer in enumerate(context.spec.layers)]
    for index, head_dim in wide:
        if head_dim > _MAX_HEAD_DIM:
            return Unfit(f"its heads have up to {_MAX_HEAD_DIM} dimensions, and those of layer {index} have {head_dim}")
    reason = unavailable()
    return Fit(70, "compiled for this CPU; bitwise whatever the batch") if reason is None else Unfit(reason)


def build(context: PartContext) -> CpuAttention:
    """Make the backend."""
    del context
    return CpuAttention()
