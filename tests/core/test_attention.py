"""The attention backends of the core: under the contract of their kind, and which models they fit."""

import pytest
import torch

from attending import AttentionRow, attend, attention_spec, check
from intarsia.defaults import provide_attention_backends
from intarsia.defaults import sdpa as torch_sdpa
from intarsia.defaults.attention import build_eager, build_tiled, eager_row, fit_tiled
from intarsia.defaults.tiled import tiled_row
from intarsia.protocols import PartContext
from intarsia.testing.attention_backends import AttentionContract
from intarsia.types import DecoderSpec, EngineOptions, Fit, LayerSpec, MlpSpec, NormSpec, Unfit

PROVIDERS = {provider.key: provider for provider in provide_attention_backends()}


class TestEager(AttentionContract):
    def provider(self):
        return PROVIDERS["eager"]


class TestTiled(AttentionContract):
    def provider(self):
        return PROVIDERS["tiled"]


class TestSdpa(AttentionContract):
    def provider(self):
        return PROVIDERS["sdpa"]


@pytest.mark.parametrize(("key", "level"), [("eager", "neighbours"), ("tiled", "bitwise"), ("sdpa", "neighbours")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_cpus_all_keep_neighbours_apart_and_tiled_chunks_too(key, level, dtype):
    part = PROVIDERS[key].build(PartContext(engine=EngineOptions(device="cpu", dtype=dtype), spec=model()))
    assert part.invariance(dtype) == level


def model(*attention):
    layers = tuple(LayerSpec(a, MlpSpec(8, "silu")) for a in attention)
    return DecoderSpec("llama", 10, 8, 64, NormSpec(), True, layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 150, 500])
def test_long_chunks_in_the_middle_of_a_prompt_equal_float64(dtype, heads, window):
    """From 64 queries on, sdpa attends to the keys before a chunk and to its own apart."""
    spec = attention_spec(*heads, 20, window=window)
    rows = [(1, 64), (16, 63), (37, 100), (130, 70)]
    sequences = [AttentionRow.random(spec, *row, seed, dtype) for seed, row in enumerate(rows)]
    check(attend(torch_sdpa.SdpaAttention(dtype), spec, sequences, page_size=7, scatter=3), sequences, spec)


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
    elsewhere = build_tiled(PartContext(engine=EngineOptions(device="cuda", dtype="float32"), spec=model()))
    assert elsewhere.invariance("float32") == "neighbours"


def test_eager_and_tiled_differ_in_their_row_only():
    context = PartContext(engine=EngineOptions(device="cpu", dtype="float32"), spec=model())
    assert [build(context).attend_row for build in (build_eager, build_tiled)] == [eager_row, tiled_row]
