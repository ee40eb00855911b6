"""How the cache lies and where memory goes: layout, bytes of weights, pages, and whether all of it has room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intarsia.errors import CompositionError
from intarsia.models.weights import num_parameters
from intarsia.protocols import CacheAllocator, CacheContext, Quantizer
from intarsia.types import AUTO, CacheGroup, CacheLayout, CacheOptions, DecoderSpec, Dtype, WeightMap, parse_bytes

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


def weight_bytes(weight_map: WeightMap, quantizers: Sequence[Quantizer], dtype: Dtype) -> int:
    """Return bytes of all weights as they will be in memory: dense ones in `dtype`, quantized ones as they come out."""
    itemsize: int = getattr(torch, dtype).itemsize
    total = num_parameters(weight_map) * itemsize
    for name, source in weight_map.tensors.items():
        before = torch.Size(source.shape).numel() * itemsize
        for quantizer in quantizers:
            if len(source.shape) == 2 and quantizer.accepts(name, source.shape):
                after = quantizer.num_bytes(name, source.shape)
                total += after - before
                before = after
    return total


def num_pages(options: CacheOptions, layout: CacheLayout, room: int) -> int:
    """Return how many pages the cache's memory holds.

    Args:
        options: give the size, or leave it open.
        layout: gives the bytes of a page.
        room: bytes that are free beside the weights, of which an open size takes `CACHE_SHARE`.
    """
    memory = int(max(0, room) * CACHE_SHARE) if options.memory == AUTO else parse_bytes(options.memory)
    return memory // layout.page_bytes


def check_room(cache: CacheAllocator, context: CacheContext, weights: int, free: int) -> None:
    """Check that weights and cache fit, and that the cache can hold one sequence of max_model_len.

    Args:
        cache: the books.
        context: what they were built from.
        weights: bytes of all weights.
        free: bytes that are free on the device.

    Raises:
        CompositionError: they do not; says which sizes would.
    """
    options, layout, device = context.options, context.layout, context.engine.device
    max_len = context.engine.max_model_len
    assert max_len is not None
    room = free - weights
    if room <= 0:
        raise CompositionError(
            f"the weights take {weights} bytes in {context.engine.dtype}, and {free} are free on {device}; a smaller "
            "model, a dtype of fewer bytes or a quantizer takes less",
            field="model",
        )
    taken = context.num_pages * layout.page_bytes
    if taken > room:
        raise CompositionError(
            f"cache.memory: {options.memory!r} is asked for, and {room} bytes are free on {device} beside the weights; "
            f"'{_down(room)}' fits",
            field="cache.memory",
        )
    if cache.capacity(max_len):
        return
    tokens = context.num_pages * layout.page_size
    needed = -(-max_len // layout.page_size) * layout.page_bytes
    ways = [f"cache.memory = '{_up(needed)}'"] if needed <= room else []
    ways += [f"engine.max_model_len = {tokens}"] if 0 < tokens < max_len else []
    ways += ["a smaller cache.page_size"] if layout.page_size > max_len else []
    raise CompositionError(
        f"cache.memory: {options.memory!r} has room for {tokens} tokens ({taken} bytes), and one sequence of "
        f"engine.max_model_len = {max_len} takes {needed} bytes; what would do: "
        f"{' or '.join(ways) or 'a smaller model, or a machine with more memory'}",
        field="cache.memory",
    )


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def _up(size: int) -> str:
    """Return a size as a config says it, rounded up by less than a tenth."""
    unit, factor = next(((u, f) for u, f in _UNITS if size >= 10 * f), ("", 1))
    return f"{-(-size // factor)}{unit}"


def _down(size: int) -> str:
    """Return a size as a config says it, rounded down by less than a tenth."""
    unit, factor = next(((u, f) for u, f in _UNITS if size >= 10 * f), ("", 1))
    return f"{size // factor}{unit}"
