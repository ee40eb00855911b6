"""The attention backend `cpu`, on every path of this CPU: against float64, over caches whose unused slots hold NaN.

Shape legend: H heads, K kv heads, D head dim.
"""

import random
from typing import ClassVar

import pytest
import torch
from attrs import evolve

from attending import AttentionRow, attend, attention_spec
from intarsia.protocols import PartContext
from intarsia.testing.attention_backends import AttentionContract
from intarsia.types import DecoderSpec, EngineOptions, Fit, LayerSpec, MlpSpec, NormSpec, Unfit
from intarsia_cpu import attention, build, provide_attention_backends
from intarsia_cpu.attention import CpuAttention
from native import compiled  # noqa: F401

#: AVX-512 with and without VNNI is one path to attention, as is AVX2.
PATHS = [path for path in build.supported() if not path.endswith("_vnni")]
DTYPES = [torch.float32, torch.bfloat16]
#: (start, length): prompts, chunks behind others, single tokens, at the borders of tiles
ROWS = [(0, 1), (0, 2), (0, 16), (0, 37), (63, 1), (64, 1), (127, 2), (16, 16), (40, 130), (300, 1), (0, 65)]


@pytest.fixture(scope="session", params=PATHS)
def part(request, compiled):  # noqa: F811
    return CpuAttention(library=compiled(request.param))


@pytest.fixture(scope="session")
def best(compiled):  # noqa: F811
    return CpuAttention(library=compiled(PATHS[0]))


def rows(spec, dtype, shapes=ROWS):
    return [AttentionRow.random(spec, *row, seed, dtype) for seed, row in enumerate(shapes)]


class TestEveryPath(AttentionContract):
    """The contract, on every path of this CPU."""

    page_sizes: ClassVar = (1, 3, 16, 64, 100)
    rows: ClassVar = ROWS

    @pytest.fixture(autouse=True, params=PATHS)
    def on_path(self, request, compiled):  # noqa: F811
        self.part = CpuAttention(library=compiled(request.param))

    def provider(self):
        (provider,) = provide_attention_backends()
        return evolve(provider, build=lambda context: self.part)


def test_a_batch_of_no_rows_is_no_work(best):
    spec = attention_spec(4, 2, 16)
    sequence = AttentionRow.random(spec, 3, 0, 0)
    assert attend(best, spec, [sequence])[0].shape == (0, 4, 16)


# --- what a row's bits depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 4), 20), ((5, 1), 33), ((9, 3), 96)])
@pytest.mark.parametrize("facts", [{}, {"window": 9}, {"window": 133}, {"soft_cap": 5.0}])
def test_the_bits_are_the_same_in_any_chunks_batch_pages_order_and_threads(part, dtype, heads, head_dim, facts):
    assert part.invariance(str(dtype).removeprefix("torch.")) == "bitwise"
    spec = attention_spec(*heads, head_dim, **facts)
    whole = AttentionRow.random(spec, 0, 300, 7, dtype)
    (bits,) = attend(part, spec, [whole])
    neighbours = rows(spec, dtype, [(100, 1), (0, 9)])
    rng = random.Random(head_dim)
    for trial, chunk in enumerate((1, 2, 7, 37, 63, 64, 65, 299)):
        pieces = whole.chunks(chunk)
        some = pieces if chunk > 7 else rng.sample(pieces, 8)
        layout = {"page_size": rng.choice([1, 3, 16]), "order": ["PKSD", "PSKD"][trial % 2], "scatter": trial}
        outs = attend(part, spec, [neighbours[0], *some, neighbours[1]], num_threads=1 + trial % 4, **layout)
        for piece, out in zip(some, outs[1:-1], strict=True):
            assert torch.equal(out, bits[piece.start : piece.start + piece.length]), (chunk, piece.start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("facts", [{}, {"window": 9}])
def test_a_key_that_is_not_seen_weighs_nothing_whatever_its_value(part, dtype, facts):
    """Queries share tiles with others, which see keys of values so large that the smallest weight would show."""
    spec = attention_spec(6, 2, 24, **facts)
    whole = AttentionRow.random(spec, 0, 100, 3, dtype)
    whole.values[20::20] = 1e37
    (bits,) = attend(part, spec, [whole])
    assert bits[:20].abs().max() < 10
    for piece, out in zip(whole.chunks(1), attend(part, spec, whole.chunks(1)), strict=True):
        assert torch.equal(out, bits[piece.start : piece.start + 1]), piece.start


# --- what it fits -----------------------------------------------------------------------------------------------------


def context(head_dim=64, device="cpu", dtype="bfloat16"):
    layer = LayerSpec(attention_spec(4, 2, head_dim), MlpSpec(8, "silu"))
    spec = DecoderSpec("llama", 10, 8, 64, NormSpec(), True, (layer,))
    return PartContext(engine=EngineOptions(device=device, dtype=dtype), spec=spec)


def test_it_fits_cpus_and_says_what_else_it_does_not(monkeypatch):
    monkeypatch.setattr(attention, "unavailable", lambda: None)
    assert isinstance(attention.fit(context()), Fit)
    for facts, word in (
        ({"device": "cuda"}, "cuda"),
        ({"dtype": "float16"}, "float16"),
        ({"head_dim": 257}, "layer 0 have 257"),
    ):
        refusal = attention.fit(context(**facts))
        assert isinstance(refusal, Unfit) and word in refusal.reason
    monkeypatch.setattr(attention, "unavailable", lambda: "no compiler")
    assert attention.fit(context()) == Unfit("no compiler")
