"""Rotary frequencies against transformers' own."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from intarsia.models.rope import cos_sin, inverse_frequencies
from intarsia.types import RopeSpec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

KINDS = [
    pytest.param(RopeSpec("default", 10_000.0, 64), {}, id="default"),
    pytest.param(RopeSpec("default", 500_000.0, 64), {}, id="default, another base"),
    pytest.param(RopeSpec("linear", 10_000.0, 64, factor=4.0), {"factor": 4.0}, id="linear"),
    pytest.param(
        RopeSpec(
            "llama3", 500_000.0, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
        ),
        LLAMA3,
        id="llama3",
    ),
    pytest.param(
        RopeSpec(
            "llama3", 500_000.0, 64, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
        ),
        LLAMA3 | {"factor": 32.0},
        id="llama3, as in Llama 3.2",
    ),
]


def reference(rope: RopeSpec, parameters: dict[str, object]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        head_dim=rope.dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.base, **parameters},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("rope", "parameters"), KINDS)
def test_frequencies_equal_transformers(rope, parameters):
    torch.testing.assert_close(inverse_frequencies(rope), reference(rope, parameters).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rope", "parameters"), KINDS)
def test_tables_equal_transformers_at_every_position(rope, parameters):
    cos_LD, sin_LD = cos_sin(rope, 300)
    cos, sin = reference(rope, parameters)(torch.zeros(1), torch.arange(300)[None])
    half = rope.dim // 2
    # transformers repeats each half: pairs are (i, i + D/2).
    for ours, theirs in ((cos_LD, cos[0]), (sin_LD, sin[0])):
        assert ours.shape == (300, half)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs[:, :half], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, theirs[:, half:], rtol=1e-6, atol=1e-6)


def test_the_default_is_the_formula_of_the_paper():
    expected = [500_000.0 ** (-2 * i / 16) for i in range(8)]
    assert inverse_frequencies(RopeSpec("default", 500_000.0, 16)).tolist() == pytest.approx(expected, rel=1e-6)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    rope = RopeSpec(
        "llama3", 500_000.0, 128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
    )
    ratios = (inverse_frequencies(RopeSpec("default", 500_000.0, 128)) / inverse_frequencies(rope)).tolist()
    wavelengths = [2 * math.pi * 500_000.0 ** (2 * i / 128) for i in range(64)]
    for ratio, wavelength in zip(ratios, wavelengths, strict=True):
        if wavelength < 8192 / 4:
            assert ratio == 1.0
        elif wavelength > 8192:
            assert ratio == pytest.approx(8.0, rel=1e-6)
        else:
            assert 1.0 <= ratio <= 8.0
    assert len({round(ratio, 3) for ratio in ratios}) > 3, "some lie between"


def test_an_unknown_kind_is_no_silent_default():
    with pytest.raises(AssertionError):
        inverse_frequencies(RopeSpec("yarn", 10_000.0, 64))  # type: ignore[arg-type]
