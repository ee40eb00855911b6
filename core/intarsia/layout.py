"""How the cache lies and where memory goes: layout, bytes of weights, pages, and whether all of it has room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.errors import CompositionError
from intarsia.models.weights import tied_head_quantizers
from intarsia.ops import Ops
from intarsia.protocols import CacheAllocator, CacheContext, Quantizer
from intarsia.types import (
    AUTO,
    EMBED,
    HEAD,
    POSITIONS,
    CacheGroup,
    CacheLayout,
    CacheOptions,
    DecoderSpec,
    Dtype,
    WeightMap,
    parse_bytes,
)

#: Entry formats whose numbers share a scale, a token, kv head and tensor each; and the bytes of that.
_SCALE_BYTES = {"int8": 4}
#: Of the memory that is free beside the weights, how much the cache takes where no size is given.
CACHE_SHARE = 0.5


def lay_out(spec: DecoderSpec, options: CacheOptions, order: str, dtype: Dtype) -> CacheLayout:
    """Lay the cache out: layers with equal heads and window share page tables.

    Args:
        spec: the model.
        options: give page size and entry format.
        order: of the axes, such as `PSKD`.
        dtype: the engine's; entries have it where the format is `auto`.

    Raises:
        CompositionError: the entry format is no torch dtype, so that its size is not known.
    """
    entry = dtype if options.format == AUTO else options.format
    torch_dtype = getattr(torch, entry, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise CompositionError(f"cache.format: {entry!r} is no dtype of torch", field="cache.format")
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        heads = layer.attention
        members.setdefault((heads.num_kv_heads, heads.head_dim, heads.window), []).append(index)
    return CacheLayout(
        order=order,
        format=entry,
        entry_bytes=torch_dtype.itemsize,
        scale_bytes=_SCALE_BYTES.get(entry, 0),
        page_size=options.page_size,
        groups=tuple(
            CacheGroup(
                kind="full" if window is None else "window",
                layers=tuple(layers),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                window=window,
            )
            for (num_kv_heads, head_dim, window), layers in members.items()
        ),
    )


def weight_bytes(weight_map: WeightMap, quantizers: Sequence[Quantizer], ops: Ops, dtype: Dtype) -> int:
    """Return bytes of all weights as they will be in memory.

    Dense ones are in `dtype`, quantized ones as they come out, packed ones as large as before; a tied head that is
    packed, or quantized apart, is a weight of its own.
    """
    total = 0
    for name, source in weight_map.tensors.items():
        itemsize: int = (torch.float32 if source.float32 else getattr(torch, dtype)).itemsize
        size, weight_format = torch.Size(source.shape).numel() * itemsize, "dense"
        if source.kept is not None:
            size, weight_format = source.kept.num_bytes(source.shape), source.kept.name
        for quantizer in quantizers:
            if len(source.shape) == 2 and name != POSITIONS and quantizer.accepts(name, source.shape):
                size, weight_format = quantizer.num_bytes(name, source.shape), quantizer.format
        total += size
        if name == EMBED and HEAD not in weight_map.tensors:
            total += _tied_head_bytes(source.shape, quantizers, ops, size, weight_format)
    return total


def _tied_head_bytes(
    shape: tuple[int, ...], quantizers: Sequence[Quantizer], ops: Ops, size: int, weight_format: str
) -> int:
    """Return what a head takes beside the embedding that it is tied to, of this size and format."""
    apart = tied_head_quantizers(quantizers, shape)
    if apart:
        return apart[-1].num_bytes(HEAD, shape)
    return size if ops.packs(weight_format) else 0


def num_pages(options: CacheOptions, layout: CacheLayout, room: int) -> int:
    """Return how many pages the cache's memory holds.

    Args:
        options: give the size, or leave it open.
        layout: gives the bytes of a page.
        room: bytes that are free beside the weights, of which an open size takes `CACHE_SHARE`.
    """
    memory = int(max(0, room) * CACHE_SHARE) if options.memory == AUTO else parse_bytes(options.memory)
    return memory // layout.page_bytes


def check_memory(context: CacheContext, weights: int, free: int) -> None:
    """Check that weights and cache fit together.

    Args:
        context: of the cache.
        weights: bytes of all weights.
        free: bytes that are free on the device.

    Raises:
        CompositionError: they do not; says what would.
    """
    device, room = context.engine.device, free - weights
    if room <= 0:
        raise CompositionError(
            f"the weights take {weights} bytes in {context.engine.dtype}, and {free} are free on {device}; a smaller "
            "model, a dtype of fewer bytes or a quantizer takes less",
            field="model",
        )
    if context.num_pages * context.layout.page_bytes > room:
        raise CompositionError(
            f"cache.memory: {context.options.memory!r} is asked for, and {room} bytes are free on {device} beside the "
            f"weights; '{_sized(room)}' fits",
            field="cache.memory",
        )


def check_capacity(cache: CacheAllocator, context: CacheContext, room: int) -> None:
    """Check that the cache can hold one sequence of max_model_len.

    Args:
        cache: its books.
        context: what they were built from.
        room: bytes that are free beside the weights.

    Raises:
        CompositionError: it cannot; says which sizes would do.
    """
    options, layout, max_len = context.options, context.layout, context.engine.max_model_len
    assert max_len is not None
    if cache.capacity(max_len):
        return
    tokens = context.num_pages * layout.page_size
    needed = -(-max_len // layout.page_size) * layout.page_bytes
    ways = [f"cache.memory = '{_sized(needed, up=True)}'"] if needed <= room else []
    ways += [f"engine.max_model_len = {tokens}"] if 0 < tokens < max_len else []
    ways += ["a smaller cache.page_size"] if layout.page_size > max_len else []
    raise CompositionError(
        f"cache.memory: {options.memory!r} has room for {tokens} tokens ({tokens * layout.token_bytes} bytes), and one "
        f"sequence of engine.max_model_len = {max_len} takes {needed} bytes; what would do: "
        f"{' or '.join(ways) or 'a smaller model, or a machine with more memory'}",
        field="cache.memory",
    )


def _sized(size: int, *, up: bool = False) -> str:
    """Return a size as a config says it, rounded down, or up, by less than a tenth."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)):
        if size >= 10 * factor or not unit:
            break
    return f"{-(-size // factor) if up else size // factor}{unit}"
