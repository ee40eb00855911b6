"""The attention backends against numpy in float64, over a cache whose unused slots hold NaN.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, D head dim, M keys, P pages, S slots a page.
"""

import random

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.defaults import sdpa as torch_sdpa
from intarsia.defaults.attention import build_eager, build_tiled, eager_row, fit_tiled
from intarsia.defaults.tiled import TILE, tiled_row
from intarsia.models.cache import LayerTensors
from intarsia.protocols import PartContext
from intarsia.types import (
    AttentionSpec,
    CacheGroup,
    CacheLayout,
    DecoderSpec,
    EngineOptions,
    Fit,
    ForwardBatch,
    LayerSpec,
    MlpSpec,
    Unfit,
)

BACKENDS = {"eager": build_eager, "tiled": build_tiled, "sdpa": torch_sdpa.build}
backends = pytest.mark.parametrize("backend", BACKENDS)


def build(backend, device="cpu", dtype="float32"):
    return BACKENDS[backend](PartContext(engine=EngineOptions(device=device, dtype=dtype), spec=model()))


def model(*attention):
    layers = tuple(LayerSpec(a, MlpSpec(8, "silu")) for a in attention)
    return DecoderSpec("llama", 10, 8, 64, 1e-5, True, layers)


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


def attend(backend, spec, sequences, *, order="PSKD", page_size=16, scatter=None, cache_dtype=None):
    """Run sequences as one batch; pages are consecutive, or drawn at random with the seed `scatter`."""
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
    shape = [size[axis] for axis in order]
    cache = LayerTensors(*(torch.full(shape, torch.nan, dtype=cache_dtype or dtype) for _ in range(2)))
    for sequence, table in zip(sequences, tables, strict=True):
        first = 0 if spec.window is None else max(0, sequence.start - spec.window + 1) // page_size * page_size
        for position in range(first, sequence.start + sequence.length):
            page, offset = table[position // page_size], position % page_size
            at = (page, offset) if order == "PSKD" else (page, slice(None), offset)
            cache.keys[at], cache.values[at] = sequence.keys[position], sequence.values[position]
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
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        ids_T=torch.zeros(bounds[-1], dtype=torch.int64),
        positions_T=nothing,
        slots_T=(nothing,),
        bounds=tuple(bounds),
        starts=tuple(s.start for s in sequences),
        pages=(tuple(tables),),
        logits_L=nothing,
    )
    part = build(backend, dtype=str(dtype).removeprefix("torch."))
    batch = evolve(batch, attention=part.prepare(batch, layout))
    # As in the runner, queries are a part of a wider tensor: what lies between them is not theirs.
    wide = torch.full((bounds[-1], spec.num_heads + spec.num_kv_heads, spec.head_dim), torch.nan, dtype=dtype)
    wide[:, : spec.num_heads] = torch.cat([s.queries for s in sequences])
    with torch.inference_mode():
        out = part.attend(wide[:, : spec.num_heads], cache, spec, 0, batch)
    assert out.shape == (bounds[-1], spec.num_heads, spec.head_dim) and out.dtype == dtype
    return [out[first : first + s.length] for first, s in zip(bounds, sequences, strict=False)]


def check(outs, sequences, spec):
    for out, sequence in zip(outs, sequences, strict=True):
        right, size = expected(sequence, spec)
        # bf16 weights are rounded before they meet the values, and the result is rounded: a unit (2**-8) each.
        bound = 1e-5 if out.dtype == torch.float32 else size * 2.0**-7 + 1e-5
        error = np.abs(out.double().numpy() - right)
        assert (error <= bound).all(), float(error.max())


HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1)}
#: (start, length): prompts, chunks behind others, single tokens
ROWS = [(0, 1), (0, 2), (0, 16), (0, 37), (1, 1), (15, 1), (16, 1), (63, 1), (5, 12), (16, 16), (40, 3)]


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [16, 20, 33, 64, 80, 128])
def test_every_row_equals_float64(backend, dtype, heads, head_dim):
    spec = attention_spec(*HEADS[heads], head_dim)
    sequences = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(ROWS)]
    check(attend(backend, spec, sequences), sequences, spec)


@backends
@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("scatter", [None, 0, 1])
def test_pages_can_lie_anywhere_and_unused_slots_are_not_read(backend, order, page_size, scatter):
    spec = attention_spec(6, 2, 20)
    sequences = [Sequence.random(spec, *row, seed) for seed, row in enumerate(ROWS)]
    outs = attend(backend, spec, sequences, order=order, page_size=page_size, scatter=scatter)
    check(outs, sequences, spec)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 40, 1000])
def test_a_query_sees_the_last_keys_of_its_window(backend, dtype, window):
    spec = attention_spec(6, 2, 32, window=window)
    sequences = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(ROWS)]
    check(attend(backend, spec, sequences, page_size=3), sequences, spec)


@pytest.mark.parametrize("backend", ["eager", "tiled"])
@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [None, 7])
def test_soft_caps_bend_the_scores(backend, soft_cap, window):
    spec = attention_spec(6, 2, 32, window=window, soft_cap=soft_cap)
    sequences = [Sequence.random(spec, *row, seed) for seed, row in enumerate(ROWS)]
    outs = attend(backend, spec, sequences)
    check(outs, sequences, spec)
    plain = attend(backend, evolve(spec, soft_cap=None), sequences)
    assert not torch.allclose(outs[3], plain[3], atol=1e-6 if soft_cap > 5 else 1e-3)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(BACKENDS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=5),
    st.one_of(st.none(), st.integers(1, 30)),
    st.sampled_from(["PSKD", "PKSD"]),
    st.integers(1, 17),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_any_batch_equals_float64(backend, dtype, heads, head_dim, rows, window, order, page_size, scatter):
    spec = attention_spec(heads[0] * heads[1], heads[0], head_dim, window=window)
    sequences = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(rows)]
    outs = attend(backend, spec, sequences, order=order, page_size=page_size, scatter=scatter)
    check(outs, sequences, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 150, 500])
def test_long_chunks_in_the_middle_of_a_prompt_equal_float64(dtype, heads, window):
    """From 64 queries on, sdpa attends to the keys before a chunk and to its own apart."""
    spec = attention_spec(*HEADS[heads], 20, window=window)
    rows = [(1, 64), (16, 63), (37, 100), (130, 70)]
    sequences = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(rows)]
    check(attend("sdpa", spec, sequences, page_size=7, scatter=3), sequences, spec)


@backends
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scores_are_multiplied_by_the_scale_of_the_spec(backend, scale):
    spec = evolve(attention_spec(4, 2, 16), scale=scale)
    sequences = [Sequence.random(spec, *row, seed) for seed, row in enumerate(ROWS)]
    check(attend(backend, spec, sequences), sequences, spec)


@backends
def test_large_scores_do_not_overflow(backend):
    spec = attention_spec(4, 2, 16)
    row = Sequence.random(spec, 9, 4, 0)
    row = evolve(row, queries=row.queries * 1e4, keys=row.keys * 1e4)
    check(attend(backend, spec, [row]), [row], spec)


@backends
@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_a_cache_of_another_float_dtype_is_read_as_its_rounded_values(backend, order):
    spec = attention_spec(6, 2, 32)
    rounded = [
        evolve(s, keys=s.keys.bfloat16().float(), values=s.values.bfloat16().float())
        for s in (Sequence.random(spec, *row, seed) for seed, row in enumerate(ROWS))
    ]
    check(attend(backend, spec, rounded, order=order, cache_dtype=torch.bfloat16), rounded, spec)


# --- what a row's bits depend on --------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 33, 64])
@pytest.mark.parametrize("window", [None, 9])
def test_a_row_has_the_same_bits_alone_and_among_any_neighbours(backend, dtype, head_dim, window):
    """Neighbours move a row's queries in the batch and its pages in the cache: neither may show."""
    level = build(backend).invariance(str(dtype).removeprefix("torch."))
    assert level == ("bitwise" if backend == "tiled" else "neighbours")
    spec = attention_spec(6, 2, head_dim, window=window)
    sequences = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate([*ROWS, (0, 150), (300, 1)])]
    alone = [attend(backend, spec, [sequence])[0] for sequence in sequences]
    rng = random.Random(1)
    for trial in range(12):
        among = rng.sample(range(len(sequences)), rng.randint(2, len(sequences)))
        scatter = trial if trial % 2 else None
        outs = attend(backend, spec, [sequences[i] for i in among], scatter=scatter)
        for i, out in zip(among, outs, strict=True):
            assert torch.equal(out, alone[i]), (sequences[i].start, sequences[i].length, trial)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 4), 20), ((5, 1), 33), ((9, 3), 16)])
@pytest.mark.parametrize("facts", [{}, {"window": 9}, {"window": TILE + 5}, {"soft_cap": 5.0}])
def test_tiled_gives_the_same_bits_however_a_prompt_is_cut(dtype, heads, head_dim, facts):
    spec = attention_spec(*heads, head_dim, **facts)
    whole = Sequence.random(spec, 0, 2 * TILE + 45, 7, dtype)
    (expected_bits,) = attend("tiled", spec, [whole])
    rng = random.Random(head_dim)
    for chunk in (1, 2, 3, 7, 8, 16, 37, TILE - 1, TILE, TILE + 1, 2 * TILE):
        pieces = []
        for start in range(0, whole.length, chunk):
            stop = min(start + chunk, whole.length)
            piece = Sequence(start, stop - start, whole.queries[start:stop], whole.keys[:stop], whole.values[:stop])
            pieces.append(piece)
        some = pieces if chunk > 8 else rng.sample(pieces, 12)
        for piece, out in zip(
            some, attend("tiled", spec, some, page_size=rng.choice([1, 3, 16]), scatter=chunk), strict=True
        ):
            assert torch.equal(out, expected_bits[piece.start : piece.start + piece.length]), (chunk, piece.start)


# --- which models it fits ---------------------------------------------------------------------------------------------


def test_sdpa_refuses_a_soft_cap_and_names_the_layer():
    plain, capped = attention_spec(2, 1, 4, window=3), attention_spec(2, 1, 4, soft_cap=30.0)
    assert isinstance(torch_sdpa.fit(PartContext(spec=model(plain, plain))), Fit)
    unfit = torch_sdpa.fit(PartContext(spec=model(plain, capped)))
    assert isinstance(unfit, Unfit) and "soft cap" in unfit.reason and "layer 1" in unfit.reason


def test_tiled_is_the_choice_of_fp32_on_cpus_and_promises_nothing_elsewhere():
    def rank(dtype, device):
        return fit_tiled(PartContext(engine=EngineOptions(dtype=dtype, device=device), spec=model())).rank

    sdpa = torch_sdpa.fit(PartContext(spec=model())).rank
    assert rank("float32", "cpu") > sdpa > rank("bfloat16", "cpu") == rank("float32", "cuda")
    assert build("tiled", device="cuda").invariance("float32") == "neighbours"


def test_eager_and_tiled_differ_in_their_row_only():
    assert [build(b).attend_row for b in ("eager", "tiled")] == [eager_row, tiled_row]
