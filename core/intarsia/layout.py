"""How the cache lies and where memory goes: layout, bytes of weights, pages, and whether all of it has room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intarsia.errors import CompositionError
from intarsia.models.weights import tied_head_quantizers
from intarsia.ops import Ops
from intarsia.protocols import CacheAllocator, CacheContext, Divisible, Partition, Quantizer, SwappingAllocator
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
    Share,
    TensorSource,
    WeightMap,
    parse_bytes,
)

#: Entry formats whose numbers share a scale, a token, kv head and tensor each; and the bytes of that.
_SCALE_BYTES = {"int8": 4}
#: Of the memory that is free beside the weights, how much the cache takes where no size is given.
CACHE_SHARE = 0.5


def lay_out(
    spec: DecoderSpec, options: CacheOptions, order: str, dtype: Dtype, share: Share | None = None
) -> CacheLayout:
    """Lay the cache out: layers with equal heads and window share page tables.

    Args:
        spec: the whole model.
        options: give page size and entry format.
        order: of the axes, such as `PSKD`.
        dtype: the engine's; entries have it where the format is `auto`.
        share: the rank whose cache it is; None is the whole model's. Page tables mean the same on every rank, so groups
            are those of the whole model; one that has no layers here is empty.

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
        layers = members.setdefault((heads.num_kv_heads, heads.head_dim, heads.window), [])
        if share is None or index in share.layers:
            layers.append(index - (0 if share is None else share.layers.start))
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
                num_kv_heads=share.spec.layers[layers[0]].attention.num_kv_heads if share and layers else num_kv_heads,
                head_dim=head_dim,
                window=window,
            )
            for (num_kv_heads, head_dim, window), layers in members.items()
        ),
    )


def page_bytes(
    spec: DecoderSpec, options: CacheOptions, order: str, dtype: Dtype, shares: Sequence[Share | None] = (None,)
) -> int:
    """Return the bytes of a page on the rank where it takes most: all ranks have equally many pages."""
    return max(lay_out(spec, options, order, dtype, share).page_bytes for share in shares)


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
            if len(source.shape) == 2 and name != POSITIONS and quantizer.accepts(name, source.whole):
                size, weight_format = quantizer.num_bytes(name, source.shape), quantizer.format
        total += size
        if name == EMBED and HEAD not in weight_map.tensors and weight_map.has_head:
            total += _tied_head_bytes(source, quantizers, ops, size, weight_format)
    return total


def _tied_head_bytes(
    source: TensorSource, quantizers: Sequence[Quantizer], ops: Ops, size: int, weight_format: str
) -> int:
    """Return what a head takes beside the embedding that it is tied to, of this size and format."""
    apart = tied_head_quantizers(quantizers, source.whole)
    if apart:
        return apart[-1].num_bytes(HEAD, source.shape)
    return size if ops.packs(weight_format) else 0


def check_cuts(weight_map: WeightMap, quantizers: Sequence[Quantizer], partition: Partition) -> None:
    """Check that ranks cut no weight within a group of columns, before any is loaded.

    Raises:
        CompositionError: one is; names the weight, the sizes, and the numbers of ranks that would do.
    """
    cuts = {name: source for name, source in weight_map.tensors.items() if source.part and source.part.columns}
    steps = {name: _column_step(name, source, quantizers) for name, source in cuts.items()}

    def works(ranks: int) -> bool:
        sizes = ((source.whole[1], steps[name][0]) for name, source in cuts.items())
        return partition.divides(ranks) and all(
            not columns % ranks and not columns // ranks % s for columns, s in sizes
        )

    for name, source in cuts.items():
        assert source.part is not None and source.part.columns is not None
        (start, stop), columns, (step, stored) = source.part.columns, source.whole[1], steps[name]
        if start % step or (stop % step and stop != columns):
            tp = columns // (stop - start)
            ways = nearest_numbers(tp, [ranks for ranks in range(1, columns + 1) if works(ranks)])
            raise CompositionError(
                f"executor.tp: {tp} ranks would hold {stop - start} of the {columns} columns of {name} each, and "
                f"{stored} has groups of {step} columns, which cannot be cut; what would do: "
                f"executor.tp = {ways or 1}, or another group size",
                field="executor.tp",
            )


def _column_step(name: str, source: TensorSource, quantizers: Sequence[Quantizer]) -> tuple[int, str]:
    """Return the columns that stay together in the format that a weight will have, and that format's name."""
    takers: list[Any] = [quantizer for quantizer in quantizers if quantizer.accepts(name, source.whole)]
    if takers:
        part, key = takers[-1], takers[-1].format
    elif source.kept is not None:
        part, key = source.kept, source.kept.name
    else:
        return 1, "dense"
    if not isinstance(part, Divisible):
        raise CompositionError(
            f"quantizer: {key!r} does not say where its weights may be cut (column_step), as {name} must be where "
            "ranks share a model",
            field="quantizer",
        )
    return part.column_step, key


def nearest_numbers(asked: int, working: Sequence[int]) -> str:
    """Return the nearest of some numbers below and above one that does not do, such as `1 or 3`."""
    below, above = [n for n in working if n < asked], [n for n in working if n > asked]
    return " or ".join(str(n) for n in (*below[-1:], *above[:1]))


def num_pages(options: CacheOptions, page_bytes: int, room: int) -> int:
    """Return how many pages the cache's memory holds.

    Args:
        options: give the size, or leave it open.
        page_bytes: of a page.
        room: bytes that are free beside the weights, of which an open size takes `CACHE_SHARE`.
    """
    memory = int(max(0, room) * CACHE_SHARE) if options.memory == AUTO else parse_bytes(options.memory)
    return memory // page_bytes


def num_host_pages(options: CacheOptions, page_bytes: int) -> int:
    """Return how many pages of each group host memory holds.

    Args:
        options: give the size.
        page_bytes: of a page.
    """
    return parse_bytes(options.swap) // page_bytes


def check_swap(context: CacheContext, free: int) -> None:
    """Check that there is as much host memory as `cache.swap` asks for, and that it holds a page.

    Args:
        context: of the cache.
        free: bytes of host memory that are free beside weights and cache.

    Raises:
        CompositionError: it is not so; says what would be.
    """
    asked, page_bytes = context.options.swap, context.layout.page_bytes
    size = parse_bytes(asked)
    if size > free:
        problem = (
            f"{max(0, free)} bytes of host memory are free beside weights and cache; '{_sized(max(0, free))}' fits"
        )
    elif size and not context.num_host_pages:
        problem = f"it holds no page of {page_bytes} bytes; '{_sized(page_bytes, up=True)}' holds one"
    else:
        return
    raise CompositionError(f"cache.swap: {asked!r} is asked for, and {problem}", field="cache.swap")


def check_swaps(cache: CacheAllocator, key: str, context: CacheContext) -> None:
    """Check that a cache that is given host memory has a use for it.

    Args:
        cache: its books.
        key: of its provider.
        context: what they were built from.

    Raises:
        CompositionError: it has none.
    """
    if context.num_host_pages and not isinstance(cache, SwappingAllocator):
        raise CompositionError(
            f"cache.swap: {context.options.swap!r} is asked for, and cache {key!r} keeps no pages in host memory; "
            "leave it at '0', or take cache 'paged'",
            field="cache.swap",
        )


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
