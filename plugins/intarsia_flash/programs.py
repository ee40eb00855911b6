"""The Triton programs of flash attention over the paged cache.

`attend_tile` takes a tile of packed queries of one row and one kv head through its keys, with the softmax kept up as it
goes (Dao et al. 2022 and 2023, FlashAttention 1 and 2). Queries are packed: tile index m stands for query m // G and
query head m % G of the kv head, so that keys and values are read once for the G heads that share them. Rows that decode
are cut into splits of a fixed number of keys (Dao et al. 2023, flash-decoding), and `merge_splits` puts them together.

What a query's bits depend on is its own numbers and its keys': tiles of keys and splits begin at fixed positions and
are added up in order, and a tile or split in which a query sees nothing adds exactly zero.

Triton reads these functions' source: values whose names are in capitals are compile-time constants.

Shape legend: M packed queries of a tile, N keys of a tile, D head dim padded to a power of two, S splits of a tile.
"""

# Triton looks the names of annotations up, and knows none but its own.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl

from intarsia_flash import work

#: int32 numbers of one piece of work, as `intarsia_flash.work` writes them.
RECORD = tl.constexpr(work.RECORD)
#: Head dims and the strides of queries, keys and values are multiples of it, and are given divided by it: Triton then
#: knows that runs of 16 bytes are aligned, whatever the numbers.
PIECE = tl.constexpr(8)
_MINUS_2_LOG2_E = tl.constexpr(-2.8853900817779268)

#: Numbers that change from model to model or step to step: a form must not be compiled anew where one is 1, or a
#: multiple of 16.
_NUMBERS = (
    *("query_token", "query_head", "out_token", "out_head", "page_stride", "kv_head_stride", "slot_stride"),
    *("scale_page", "scale_head", "scale_slot", "group_size", "head_pieces", "page_size", "page_magic", "page_shift"),
    *("window", "num_slots", "factor", "bend"),
)
#: Read a number at a time, wherever they lie.
_SCALES = ("key_scales", "value_scales")


@triton.jit
def _tanh(x):
    """Tanh by exp2, without loss where it is near 1, and without overflow."""
    shrunk = tl.exp2(tl.abs(x) * _MINUS_2_LOG2_E)
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _fold(
    q,
    peak,
    total,
    mixed,
    first_key,
    position,
    lowest,
    end,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    page_stride,
    slot_stride,
    scale_page,
    scale_slot,
    inside,
    page_size,
    page_magic,
    page_shift,
    window,
    factor,
    bend,
    N: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take one tile of keys into (peak, total, mixed); without MASKED every query sees all of them."""
    d = tl.arange(0, D)
    key = first_key + tl.arange(0, N)
    held = (key >= lowest) & (key < end)
    # key // page_size, by a multiplication: page_magic is 2**(31 + shift) / page_size, rounded up.
    index = (tl.umulhi(key.to(tl.uint32) * 2, page_magic.to(tl.uint32)) >> page_shift.to(tl.uint32)).to(tl.int32)
    if MASKED:
        page = tl.load(table + index, mask=held, other=0).to(tl.int64)
        present = held[:, None] & inside[None, :]
    else:
        page = tl.load(table + index).to(tl.int64)
        present = inside[None, :]
    in_page = key - index * page_size
    at = page * (page_stride * PIECE) + in_page * (slot_stride * PIECE)
    # Where no token lies there can be NaN, and 0 x NaN is NaN: only what is held is loaded.
    k = tl.load(keys + at[:, None] + d[None, :], mask=present, other=0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if key_scales is not None:
        scale_at = page * scale_page + in_page * scale_slot
        scores *= tl.load(key_scales + scale_at, mask=held, other=0.0)[None, :]
    if bend != 0.0:
        scores = _tanh(scores * bend)
    # As an unsigned number, the distance to a later key is huge: one comparison tells what is seen.
    seen = (position[:, None] - key[None, :]).to(tl.uint32) < window.to(tl.uint32)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * factor)
    # A query that has seen no key yet has a peak of -inf, and -inf - -inf is NaN.
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * factor - finite[:, None])
    shrink = tl.exp2(peak - finite)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    v = tl.load(values + at[:, None] + d[None, :], mask=present, other=0)
    if value_scales is not None:
        value_scale = tl.load(value_scales + scale_at, mask=held, other=0.0)
        if q.dtype == tl.float16:
            # A weight times a scale can be too small for fp16; a value is not.
            v = (v.to(tl.float32) * value_scale[:, None]).to(q.dtype)
        else:
            weights = weights * value_scale[None, :]
            if MASKED:
                weights = tl.where(seen, weights, 0.0)
            v = v.to(q.dtype)
    mixed = tl.dot(weights.to(q.dtype), v, mixed, input_precision="ieee")
    return higher, total, mixed


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SCALES)
def attend_tile(
    queries,
    out,
    keys,
    values,
    key_scales,
    value_scales,
    pages,
    items,
    partials,
    sums,
    query_token,
    query_head,
    out_token,
    out_head,
    page_stride,
    kv_head_stride,
    slot_stride,
    scale_page,
    scale_head,
    scale_slot,
    group_size,
    head_pieces,
    page_size,
    page_magic,
    page_shift,
    window,
    num_slots,
    factor,
    bend,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attend for one piece of work (axis 0) and one kv head (axis 1).

    What it is given:
        queries, out: (T, H, D'), with D' = head_pieces x PIECE.
        keys, values: of all pages, by the strides; scales likewise, or None.
        pages: the page tables of all rows, end to end.
        items: pieces of work, RECORD numbers each: first token, queries, start, where the row's page table begins,
            tile, split, place among the partial results or -1. One of no queries fills up.
        partials: (K, num_slots, M, D') fp32: weighted sums of values. None where SPLIT is 0.
        sums: (K, num_slots, M, 2) fp32: the peak of the scores x log2(e), and the sum of exponentials below it.
        window: keys that a query sees, itself included.
        factor: what scores (or capped ones) are multiplied by: log2(e) included.
        bend: what scores are multiplied by before tanh; 0 where they are not capped.
        SPLIT: keys of a split, a multiple of N; 0 is all keys at once.
    """
    record = items + tl.program_id(0) * RECORD
    num_queries = tl.load(record + 1)
    if num_queries == 0:
        return
    kv_head = tl.program_id(1)
    first_token = tl.load(record)
    start = tl.load(record + 2)
    table = pages + tl.load(record + 3)
    tile = tl.load(record + 4)

    packed = tile * M + tl.arange(0, M)
    query = packed // group_size
    head = kv_head * group_size + packed - query * group_size
    live = query < num_queries
    d = tl.arange(0, D)
    inside = d < head_pieces * PIECE
    token = (first_token + query).to(tl.int64)
    chosen = live[:, None] & inside[None, :]
    at = token * (query_token * PIECE) + head * (query_head * PIECE)
    q = tl.load(queries + at[:, None] + d[None, :], mask=chosen, other=0.0)

    position = start + query
    first_query = tile * M // group_size
    last_query = tl.minimum((tile * M + M - 1) // group_size, num_queries - 1)
    lowest = tl.maximum(start + first_query - window + 1, 0)
    begin = lowest // N * N
    end = start + last_query + 1
    if SPLIT != 0:
        split = tl.load(record + 5)
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
    keys += kv_head * (kv_head_stride * PIECE)
    values += kv_head * (kv_head_stride * PIECE)
    if key_scales is not None:
        key_scales += kv_head * scale_head
        value_scales += kv_head * scale_head

    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    if SPLIT == 0 and queries.dtype.element_ty != tl.float32:
        # Tiles that every query sees whole need no mask. With a window in sight, all take the masked way; so does fp32,
        # whose products are made in registers, and leave none for a second loop.
        whole = (start + first_query + 1) // N * N
        if start + last_query >= window:
            whole = begin
        for first_key in range(begin, whole, N):
            peak, total, mixed = _fold(
                q, peak, total, mixed, first_key, position, lowest, end,
                keys, values, key_scales, value_scales, table, page_stride, slot_stride, scale_page, scale_slot,
                inside, page_size, page_magic, page_shift, window, factor, bend, N, D, False,
            )  # fmt: skip
        begin = whole
    for first_key in range(begin, end, N):
        peak, total, mixed = _fold(
            q, peak, total, mixed, first_key, position, lowest, end,
            keys, values, key_scales, value_scales, table, page_stride, slot_stride, scale_page, scale_slot,
            inside, page_size, page_magic, page_shift, window, factor, bend, N, D, True,
        )  # fmt: skip

    out_at = token * (out_token * PIECE) + head * (out_head * PIECE)
    target = out + out_at[:, None] + d[None, :]
    if SPLIT != 0:
        place = tl.load(record + 6)
        if place >= 0:
            lane = (kv_head.to(tl.int64) * num_slots + place) * M + tl.arange(0, M)
            tl.store(sums + lane * 2, peak, mask=live)
            tl.store(sums + lane * 2 + 1, total, mask=live)
            tl.store(partials + lane[:, None] * (head_pieces * PIECE) + d[None, :], mixed, mask=chosen)
        else:
            tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=chosen)
    else:
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=chosen)


@triton.jit(do_not_specialize=_NUMBERS)
def merge_splits(
    out,
    items,
    partials,
    sums,
    out_token,
    out_head,
    group_size,
    head_pieces,
    num_slots,
    M: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
):
    """Put the splits of one token (axis 0) and one query head (axis 1) together, D dimensions of them (axis 2).

    What it is given:
        items: RECORD numbers each: token, query in its row, place of the row's first partial result, first split,
            splits. One of no splits fills up.

    The others are those of `attend_tile`. Splits have lanes by their number in the row, not by how many are there: what
    is added to what does not depend on where a window begins.
    """
    record = items + tl.program_id(0) * RECORD
    num_splits = tl.load(record + 4)
    if num_splits == 0:
        return
    head = tl.program_id(1)
    token = tl.load(record).to(tl.int64)
    query = tl.load(record + 1)
    place = tl.load(record + 2)
    first = tl.load(record + 3)
    kv_head = head // group_size
    packed = query * group_size + head - kv_head * group_size
    tile = packed // M
    origin = kv_head.to(tl.int64) * num_slots + place + tile * num_splits - first
    lane = packed - tile * M
    stop = first + num_splits
    d = tl.program_id(2) * D + tl.arange(0, D)
    inside = d < head_pieces * PIECE

    peaks = tl.full([S], float("-inf"), tl.float32)
    for base in range(first // S * S, stop, S):
        split = base + tl.arange(0, S)
        held = (split >= first) & (split < stop)
        at = (origin + split) * M + lane
        peaks = tl.maximum(peaks, tl.load(sums + at * 2, mask=held, other=float("-inf")))
    peak = tl.max(peaks, 0)
    total = tl.zeros([S], tl.float32)
    mixed = tl.zeros([S, D], tl.float32)
    for base in range(first // S * S, stop, S):
        split = base + tl.arange(0, S)
        held = (split >= first) & (split < stop)
        at = (origin + split) * M + lane
        weight = tl.exp2(tl.load(sums + at * 2, mask=held, other=float("-inf")) - peak)
        total += weight * tl.load(sums + at * 2 + 1, mask=held, other=0.0)
        rows = partials + at[:, None] * (head_pieces * PIECE) + d[None, :]
        mixed += weight[:, None] * tl.load(rows, mask=held[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(mixed, 0) / tl.sum(total, 0)
    target = out + token * (out_token * PIECE) + head * (out_head * PIECE) + d
    tl.store(target, merged.to(out.dtype.element_ty), mask=inside)
