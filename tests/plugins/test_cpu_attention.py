"""The attention backend `cpu`, on every path of this CPU: against float64, over caches whose unused slots hold NaN.

Shape legend: H heads, K kv heads, D head dim.
"""

import random

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attending import Sequence, attend, attention_spec, check
from intarsia.defaults.attention import RowByRowAttention, eager_row
from intarsia.protocols import PartContext
from intarsia.types import DecoderSpec, EngineOptions, Fit, LayerSpec, MlpSpec, NormSpec, Unfit
from intarsia_cpu import attention, build
from intarsia_cpu.attention import CpuAttention
from native import compiled  # noqa: F401

#: AVX-512 with and without VNNI is one path to attention, as is AVX2.
PATHS = [path for path in build.supported() if not path.endswith("_vnni")]
DTYPES = [torch.float32, torch.bfloat16]
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (5, 1), "wide": (70, 1)}
#: (start, length): prompts, chunks behind others, single tokens, at the borders of tiles
ROWS = [(0, 1), (0, 2), (0, 16), (0, 37), (63, 1), (64, 1), (127, 2), (16, 16), (40, 130), (300, 1), (0, 65)]


@pytest.fixture(scope="session", params=PATHS)
def part(request, compiled):  # noqa: F811
    return CpuAttention(library=compiled("attention", request.param))


@pytest.fixture(scope="session")
def best(compiled):  # noqa: F811
    return CpuAttention(library=compiled("attention", PATHS[0]))


def rows(spec, dtype, shapes=ROWS):
    return [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 16, 20, 33, 64, 80, 96, 128, 256])
def test_every_row_equals_float64(part, dtype, head_dim):
    for heads in HEADS.values():
        spec = attention_spec(*heads, head_dim)
        few = ROWS if heads[0] < 10 else ROWS[-4:]
        sequences = rows(spec, dtype, few)
        check(attend(part, spec, sequences, order="PKSD", scatter=head_dim), sequences, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
def test_pages_can_lie_anywhere_and_unused_slots_are_not_read(part, dtype, order, page_size):
    spec = attention_spec(6, 2, 20)
    sequences = rows(spec, dtype)
    for scatter in (None, 0):
        check(attend(part, spec, sequences, order=order, page_size=page_size, scatter=scatter), sequences, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 5, 16, 64, 65, 130, 1000])
def test_a_query_sees_the_last_keys_of_its_window(part, dtype, window):
    spec = attention_spec(6, 2, 32, window=window)
    sequences = rows(spec, dtype)
    check(attend(part, spec, sequences, order="PKSD", page_size=3), sequences, spec)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [None, 7])
def test_soft_caps_bend_the_scores(part, soft_cap, window):
    spec = attention_spec(6, 2, 32, window=window, soft_cap=soft_cap)
    sequences = rows(spec, torch.float32)
    outs = attend(part, spec, sequences)
    check(outs, sequences, spec)
    plain = attend(part, evolve(spec, soft_cap=None), sequences)
    assert not torch.allclose(outs[3], plain[3], atol=1e-6 if soft_cap > 5 else 1e-3)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 3), st.integers(1, 9)),
    st.integers(1, 256),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 150)),
    st.sampled_from(["PSKD", "PKSD"]),
    st.integers(1, 70),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(1, 5),
)
def test_any_batch_equals_float64(best, dtype, heads, head_dim, shapes, window, order, page_size, scatter, threads):
    spec = attention_spec(heads[0] * heads[1], heads[0], head_dim, window=window)
    sequences = rows(spec, dtype, shapes)
    facts = {"order": order, "page_size": page_size, "scatter": scatter, "num_threads": threads}
    check(attend(best, spec, sequences, **facts), sequences, spec)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scores_are_multiplied_by_the_scale_of_the_spec(part, scale):
    spec = evolve(attention_spec(4, 2, 16), scale=scale)
    sequences = rows(spec, torch.float32)
    check(attend(part, spec, sequences), sequences, spec)


def test_large_scores_do_not_overflow(part):
    spec = attention_spec(4, 2, 16)
    row = Sequence.random(spec, 9, 70, 0)
    row = evolve(row, queries=row.queries * 1e4, keys=row.keys * 1e4)
    check(attend(part, spec, [row]), [row], spec)


def test_what_is_not_a_number_among_a_rows_own_keys_shows_in_that_row_alone(part):
    spec = attention_spec(4, 2, 16)
    sick, well = rows(spec, torch.bfloat16, [(20, 3), (70, 3)])
    sick.keys[5, 0, 3] = torch.nan
    outs = attend(part, spec, [well, sick, well])
    assert outs[1][:, :2].isnan().all() and outs[1][:, 2:].isfinite().all()
    for out in (outs[0], outs[2]):
        check([out], [well], spec)


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_cache_of_the_other_dtype_is_read_as_its_numbers(part, order, dtype, cache):
    spec = attention_spec(6, 2, 32)
    rounded = [
        evolve(s, keys=s.keys.bfloat16().to(dtype), values=s.values.bfloat16().to(dtype)) for s in rows(spec, dtype)
    ]
    check(attend(part, spec, rounded, order=order, cache_dtype=cache), rounded, spec)


def test_fp32_equals_the_oracle_of_the_core(part):
    spec = attention_spec(6, 2, 64)
    sequences = rows(spec, torch.float32)
    outs, oracle = attend(part, spec, sequences), attend(RowByRowAttention(eager_row), spec, sequences)
    for out, right in zip(outs, oracle, strict=True):
        assert (out - right).abs().max() <= 1e-5


def test_a_batch_of_no_rows_is_no_work(best):
    spec = attention_spec(4, 2, 16)
    sequence = Sequence.random(spec, 3, 0, 0)
    assert attend(best, spec, [sequence])[0].shape == (0, 4, 16)


# --- what a row's bits depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 4), 20), ((5, 1), 33), ((9, 3), 96)])
@pytest.mark.parametrize("facts", [{}, {"window": 9}, {"window": 133}, {"soft_cap": 5.0}])
def test_the_bits_are_the_same_in_any_chunks_batch_pages_order_and_threads(part, dtype, heads, head_dim, facts):
    assert part.invariance(str(dtype).removeprefix("torch.")) == "bitwise"
    spec = attention_spec(*heads, head_dim, **facts)
    whole = Sequence.random(spec, 0, 300, 7, dtype)
    (bits,) = attend(part, spec, [whole])
    neighbours = rows(spec, dtype, [(100, 1), (0, 9)])
    rng = random.Random(head_dim)
    for trial, chunk in enumerate((1, 2, 7, 37, 63, 64, 65, 299)):
        pieces = [
            Sequence(start, stop - start, whole.queries[start:stop], whole.keys[:stop], whole.values[:stop])
            for start in range(0, 300, chunk)
            for stop in [min(start + chunk, 300)]
        ]
        some = pieces if chunk > 7 else rng.sample(pieces, 8)
        layout = {"page_size": rng.choice([1, 3, 16]), "order": ["PKSD", "PSKD"][trial % 2], "scatter": trial}
        outs = attend(part, spec, [neighbours[0], *some, neighbours[1]], num_threads=1 + trial % 4, **layout)
        for piece, out in zip(some, outs[1:-1], strict=True):
            assert torch.equal(out, bits[piece.start : piece.start + piece.length]), (chunk, piece.start)


# --- what it fits -----------------------------------------------------------------------------------------------------


def context(head_dim=64, device="cpu", dtype="bfloat16"):
    layer = LayerSpec(attention_spec(4, 2, head_dim), MlpSpec(8, "silu"))
    spec = DecoderSpec("llama", 10, 8, 64, NormSpec(), True, (layer,))
    return PartContext(engine=EngineOptions(device=device, dtype=dtype), spec=spec)


def test_it_fits_cpus_and_says_what_else_it_does_not(monkeypatch):
    monkeypatch.setattr(attention, "unavailable", lambda area: None)
    assert isinstance(attention.fit(context()), Fit)
    for facts, word in (
        ({"device": "cuda"}, "cuda"),
        ({"dtype": "float16"}, "float16"),
        ({"head_dim": 257}, "layer 0 have 257"),
    ):
        refusal = attention.fit(context(**facts))
        assert isinstance(refusal, Unfit) and word in refusal.reason
    monkeypatch.setattr(attention, "unavailable", lambda area: "no compiler")
    assert attention.fit(context()) == Unfit("no compiler")
