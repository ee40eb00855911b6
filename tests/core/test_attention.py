"""The attention backends against numpy in float64, over a cache whose unused slots hold NaN.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, D head dim, M keys, P pages, S slots a page.
"""

import random

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attending import Sequence, attention_spec, check
from attending import attend as run
from intarsia.defaults import sdpa as torch_sdpa
from intarsia.defaults.attention import build_eager, build_tiled, eager_row, fit_tiled
from intarsia.defaults.tiled import TILE, tiled_row
from intarsia.protocols import PartContext
from intarsia.types import (
    DecoderSpec,
    EngineOptions,
    Fit,
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


def attend(backend, spec, sequences, **facts):
    """Run sequences as one batch."""
    part = build(backend, dtype=str(sequences[0].queries.dtype).removeprefix("torch."))
    return run(part, spec, sequences, **facts)


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
