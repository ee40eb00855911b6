"""Batches of random rows over a cache whose unused slots hold NaN, and what attention makes of them in float64.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, D head dim, M keys, P pages, S slots a page.
"""

import random

import numpy as np
import torch
from attrs import evolve, frozen

from intarsia.models.cache import LayerTensors
from intarsia.types import AttentionSpec, CacheGroup, CacheLayout, ForwardBatch


def attention_spec(heads, kv_heads, head_dim, **facts):
    return AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, None, **facts)


@frozen(eq=False)
class Sequence:
    """One row's tokens: `start` of them are in the cache already, `length` run now."""

    start: int
    length: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, spec, start, length, seed, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        heads = ((length, spec.num_heads), *[(start + length, spec.num_kv_heads)] * 2)
        return cls(start, length, *(torch.randn(*h, spec.head_dim, generator=generator).to(dtype) for h in heads))


def expected(sequence, spec):
    """Softmax over the keys that each query sees, a query and a head at a time; and the same of the absolute values."""
    q, k, v = (t.double().numpy() for t in (sequence.queries, sequence.keys, sequence.values))
    out, size = np.zeros(q.shape), np.zeros(q.shape)
    for i, h in np.ndindex(q.shape[:2]):
        position, kv_head = sequence.start + i, h // (spec.num_heads // spec.num_kv_heads)
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        scores = k[first : position + 1, kv_head] @ q[i, h] * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        seen = v[first : position + 1, kv_head]
        out[i, h], size[i, h] = weights @ seen, weights @ np.abs(seen)
    return out, size


def int8(x_TKD):
    """Return numbers and scales of int8 entries, with no help from the code under test."""
    x = x_TKD.float().numpy()
    finite = np.isfinite(x).all(axis=-1)
    x = np.where(finite[..., None], x, 0)
    scales = np.abs(x).max(axis=-1) * np.float32(1 / 127)
    divisors = np.where(scales > 0, scales, np.float32(1))
    numbers = np.clip(np.rint(x / divisors[..., None]), -127, 127) * (scales > 0)[..., None]
    scales = np.where(finite, scales, np.float32(np.nan))
    return torch.from_numpy(numbers).to(torch.int8), torch.from_numpy(scales)


def as_int8(sequence):
    """Return a sequence whose keys and values are what its int8 entries stand for, in float64."""
    pairs = [int8(x) for x in (sequence.keys, sequence.values)]
    keys, values = (numbers.double() * scales.double().unsqueeze(-1) for numbers, scales in pairs)
    return evolve(sequence, keys=keys, values=values)


def attend(
    part, spec, sequences, *, order="PSKD", page_size=16, scatter=None, cache_dtype=None, device="cpu", **prepared
):
    """Run sequences as one batch on a device; pages are consecutive, or drawn at random with the seed `scatter`.

    A cache of the dtype int8 holds what `int8` makes of keys and values.

    What else is given replaces fields of what the part prepares.
    """
    counts = [-(-(s.start + s.length) // page_size) for s in sequences]
    pool = list(range(sum(counts) + 3))
    if scatter is not None:
        random.Random(scatter).shuffle(pool)
    tables = []
    for count in counts:
        # One page more than needed: a cache can reserve ahead, and what it reserved must not be read.
        tables.append(tuple(pool[: count + 1]))
        del pool[:count]
    dtype = sequences[0].queries.dtype
    size = {"P": sum(counts) + 4, "S": page_size, "K": spec.num_kv_heads, "D": spec.head_dim}
    scaled = cache_dtype == torch.int8
    cache = LayerTensors.empty(order, size, cache_dtype or dtype, torch.device(device), scaled=scaled)
    cache.fill(torch.nan)
    for sequence, table in zip(sequences, tables, strict=True):
        first = 0 if spec.window is None else max(0, sequence.start - spec.window + 1) // page_size * page_size
        for position in range(first, sequence.start + sequence.length):
            page, offset = table[position // page_size], position % page_size
            at = (page, offset) if order == "PSKD" else (page, slice(None), offset)
            key, value = sequence.keys[position], sequence.values[position]
            if scaled:
                cache.keys[at], cache.key_scales[at] = int8(key)
                cache.values[at], cache.value_scales[at] = int8(value)
            else:
                cache.keys[at], cache.values[at] = key, value
    # A window's allocator takes back the pages that no query sees: -1, the spare page, which holds NaN.
    if spec.window is not None:
        gone = [max(0, s.start - spec.window + 1) // page_size for s in sequences]
        tables = [(-1,) * count + table[count:] for count, table in zip(gone, tables, strict=True)]
    bounds = [0]
    for sequence in sequences:
        bounds.append(bounds[-1] + sequence.length)
    group = CacheGroup(
        kind="full" if spec.window is None else "window",
        layers=(0,),
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
    )
    layout = CacheLayout(order=order, format="float32", entry_bytes=4, page_size=page_size, groups=(group,))
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        ids_T=torch.zeros(bounds[-1], dtype=torch.int64, device=device),
        positions_T=nothing,
        slots_T=(nothing,),
        bounds=tuple(bounds),
        starts=tuple(s.start for s in sequences),
        pages=(tuple(tables),),
        logits_L=nothing,
    )
    ready = part.prepare(batch, layout)
    batch = evolve(batch, attention=evolve(ready, **prepared) if prepared else ready)
    # As in the runner, queries are a part of a wider tensor: what lies between them is not theirs.
    size = (bounds[-1], spec.num_heads + spec.num_kv_heads, spec.head_dim)
    wide = torch.full(size, torch.nan, dtype=dtype, device=device)
    wide[:, : spec.num_heads] = torch.cat([s.queries for s in sequences])
    with torch.inference_mode():
        out = part.attend(wide[:, : spec.num_heads], cache, spec, 0, batch).cpu()
    assert out.shape == (bounds[-1], spec.num_heads, spec.head_dim) and out.dtype == dtype
    return [out[first : first + s.length] for first, s in zip(bounds, sequences, strict=False)]


def check(outs, sequences, spec):
    for out, sequence in zip(outs, sequences, strict=True):
        right, size = expected(sequence, spec)
        # bf16 weights are rounded before they meet the values, and the result is rounded: a unit (2**-8) each.
        bound = 1e-5 if out.dtype == torch.float32 else size * 2.0**-7 + 1e-5
        error = np.abs(out.double().numpy() - right)
        assert (error <= bound).all(), float(error.max())
