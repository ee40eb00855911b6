"""Rotary frequencies and tables, of every kind, against transformers' own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from intarsia.families import Fields, read_rope
from intarsia.rope import cos_sin, inverse_frequencies
from intarsia.types import RopeSpec
from ropes import reference_rope

MAX_LEN = 131_072
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 16.0, "original_max_position_embeddings": 8192}


def longrope(dim, **more):
    pairs = range(dim // 2)
    return {
        "short_factor": [1 + 0.01 * i for i in pairs],
        "long_factor": [1 + 0.7 * i for i in pairs],
        "original_max_position_embeddings": 4096,
        **more,
    }


#: name -> kind, theta, head's dimensions, what else the table holds.
KINDS = {
    "default": ("default", 10_000.0, 64, {}),
    "default, another base": ("default", 500_000.0, 64, {}),
    "linear": ("linear", 10_000.0, 64, {"factor": 4.0}),
    "dynamic": ("dynamic", 10_000.0, 64, {"factor": 2.0}),
    "dynamic, small": ("dynamic", 10_000.0, 4, {"factor": 8.0}),
    "llama3": ("llama3", 500_000.0, 128, LLAMA3),
    "llama3, as in Llama 3.2": ("llama3", 500_000.0, 64, LLAMA3 | {"factor": 32.0}),
    "yarn": ("yarn", 10_000.0, 64, YARN),
    "yarn, as in Qwen 2.5": ("yarn", 1e6, 128, {"factor": 4.0, "original_max_position_embeddings": 32_768}),
    "yarn, as in gpt-oss": (
        "yarn",
        150_000.0,
        64,
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "yarn, as in DeepSeek": ("yarn", 10_000.0, 64, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn, its betas": ("yarn", 10_000.0, 64, YARN | {"beta_fast": 16.0, "beta_slow": 2.0}),
    "yarn, betas that meet": ("yarn", 10_000.0, 64, YARN | {"beta_fast": 4, "beta_slow": 4, "truncate": False}),
    "yarn, its attention factor": ("yarn", 10_000.0, 64, YARN | {"attention_factor": 0.9}),
    "yarn, too short to turn": ("yarn", 10_000.0, 64, {"factor": 2.0, "original_max_position_embeddings": 4}),
    "yarn, a ramp of no width": ("yarn", 10_000.0, 64, {"factor": 2.0, "original_max_position_embeddings": 6}),
    "longrope": ("longrope", 10_000.0, 96, longrope(96)),
    "longrope, its factor": ("longrope", 10_000.0, 96, longrope(96, factor=2.0)),
    "longrope, its attention factor": ("longrope", 10_000.0, 96, longrope(96, attention_factor=1.25)),
}
kinds = pytest.mark.parametrize("name", KINDS)


def both(kind, theta, dim, table, max_len=MAX_LEN):
    """Return transformers' config of a rope table, and what is read of it."""
    config = LlamaConfig(
        head_dim=dim,
        max_position_embeddings=max_len,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **table},
    )
    return config, read_rope(Fields(config.to_dict()), dim)


@kinds
@pytest.mark.parametrize("length", [100, 4096, 4097, MAX_LEN, 3 * MAX_LEN])
def test_frequencies_and_attention_factor_equal_transformers(name, length):
    config, rope = both(*KINDS[name])
    expected, attention_factor = reference_rope(config, length)
    torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@kinds
def test_tables_equal_transformers_at_every_position(name):
    # A llama whose length is the original one: transformers takes the short form for 300 positions, and so do we.
    config, rope = both(*KINDS[name])
    cos_LD, sin_LD = cos_sin(rope, 300)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    half = rope.dim // 2
    # transformers repeats each half: pairs are (i, i + D/2).
    for ours, theirs in ((cos_LD, cos[0]), (sin_LD, sin[0])):
        assert ours.shape == (300, half)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs[:, :half], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, theirs[:, half:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_what_depends_on_the_length_equals_transformers_for_a_sequence_that_long(name):
    kind, theta, dim, table = KINDS[name]
    for length in (300, 700):
        table = table | ({"original_max_position_embeddings": 500} if kind == "longrope" else {})
        config, rope = both(kind, theta, dim, table, max_len=500 if kind == "dynamic" else 1000)
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        cos_LD, sin_LD = cos_sin(rope, length)
        torch.testing.assert_close(cos_LD, cos[0][:, : dim // 2], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sin_LD, sin[0][:, : dim // 2], rtol=1e-5, atol=1e-4)
    assert not torch.equal(inverse_frequencies(rope, 300), inverse_frequencies(rope, 700))
    assert torch.equal(inverse_frequencies(rope, 300), inverse_frequencies(rope, 500)), "the original length is short"
    assert not torch.equal(inverse_frequencies(rope, 500), inverse_frequencies(rope, 501))


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name][0] not in ("dynamic", "longrope")])
def test_other_kinds_do_not_depend_on_the_length(name):
    _, rope = both(*KINDS[name])
    assert torch.equal(inverse_frequencies(rope, 1), inverse_frequencies(rope, 10**9))


# --- any parameters ---------------------------------------------------------------------------------------------------

FACTORS = st.floats(0.5, 100)
LENGTHS = st.integers(2, 1_000_000)


@st.composite
def tables(draw):
    """A kind, its theta and dimensions, and a valid table of it."""
    kind = draw(st.sampled_from(sorted(ROPE_INIT_FUNCTIONS.keys() & {k for k, *_ in KINDS.values()})))
    dim = 2 * draw(st.integers(2, 80))
    ratios = st.lists(st.floats(0.5, 100), min_size=dim // 2, max_size=dim // 2)
    table = {"factor": draw(FACTORS)}
    if kind == "llama3":
        low = draw(st.floats(0.1, 8))
        table |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.1, 8))}
    if kind == "yarn":
        slow = draw(st.floats(0.1, 10))
        table |= {"beta_slow": slow, "beta_fast": slow + draw(st.floats(0, 40)), "truncate": draw(st.booleans())}
        table |= draw(
            st.sampled_from([{}, {"attention_factor": 1.5}, {"mscale": 0.7}, {"mscale": 0, "beta_fast": None}])
        )
        table |= draw(
            st.fixed_dictionaries({"mscale": st.floats(0, 3), "mscale_all_dim": st.floats(0, 3)}) | st.just({})
        )
        # Too small a weight is refused.
        table = {key: 0.0 if key.startswith("mscale") and value < 1e-3 else value for key, value in table.items()}
    if kind == "longrope":
        table |= {"short_factor": draw(ratios), "long_factor": draw(ratios)}
        table |= draw(st.sampled_from([{}, {"attention_factor": 1.5}, {"factor": None}]))
    if kind in ("llama3", "yarn", "longrope"):
        table["original_max_position_embeddings"] = draw(LENGTHS)
    return kind, draw(st.floats(2, 1e7)), dim, table


@settings(max_examples=150, deadline=None)
@given(tables(), LENGTHS, LENGTHS)
def test_any_valid_table_gives_the_frequencies_of_transformers(table, max_len, length):
    config, rope = both(*table, max_len=max_len)
    expected, attention_factor = reference_rope(config, length)
    actual = inverse_frequencies(rope, length)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-30)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


# --- against the papers -----------------------------------------------------------------------------------------------


def test_the_default_is_the_formula_of_the_paper():
    expected = [500_000.0 ** (-2 * i / 16) for i in range(8)]
    assert inverse_frequencies(RopeSpec("default", 500_000.0, 16), 1).tolist() == pytest.approx(expected, rel=1e-6)


def test_an_odd_number_of_dimensions_has_a_last_pair_too():
    expected = [10_000.0 ** (-2 * i / 11) for i in range(6)]
    assert inverse_frequencies(RopeSpec("default", 10_000.0, 11), 1).tolist() == pytest.approx(expected, rel=1e-6)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    _, rope = both("llama3", 500_000.0, 128, LLAMA3)
    ratios = (inverse_frequencies(RopeSpec("default", 500_000.0, 128), 1) / inverse_frequencies(rope, 1)).tolist()
    wavelengths = [2 * math.pi * 500_000.0 ** (2 * i / 128) for i in range(64)]
    for ratio, wavelength in zip(ratios, wavelengths, strict=True):
        if wavelength < 8192 / 4:
            assert ratio == 1.0
        elif wavelength > 8192:
            assert ratio == pytest.approx(8.0, rel=1e-6)
        else:
            assert 1.0 <= ratio <= 8.0
    assert len({round(ratio, 3) for ratio in ratios}) > 3, "some lie between"


def test_yarn_keeps_pairs_that_turn_often_and_divides_those_that_turn_less_than_once():
    _, rope = both("yarn", 10_000.0, 128, {"factor": 16.0, "original_max_position_embeddings": 4096})
    plain = [10_000.0 ** (-2 * i / 128) for i in range(64)]
    for frequency, actual in zip(plain, inverse_frequencies(rope, 1).tolist(), strict=True):
        turns = 4096 * frequency / (2 * math.pi)
        # The bounds are rounded to whole pairs, so that those next to a bound may lie on its other side.
        if turns > 32 * 1.2:
            assert actual == pytest.approx(frequency, rel=1e-6)
        elif turns < 1 / 1.2:
            assert actual == pytest.approx(frequency / 16, rel=1e-6)


def test_dynamic_turns_the_slowest_pair_as_if_positions_were_squeezed_into_the_original_length():
    # NTK-aware scaling by s: the last pair turns s times slower, the first as ever.
    _, rope = both("dynamic", 10_000.0, 64, {"factor": 4.0}, max_len=1000)
    plain = inverse_frequencies(RopeSpec("default", 10_000.0, 64), 1)
    ratios = plain / inverse_frequencies(rope, 2000)
    assert ratios[0] == 1.0
    assert ratios[-1].item() == pytest.approx(4.0 * 2 - 3, rel=1e-5)


def test_an_unknown_kind_is_no_silent_default():
    with pytest.raises(AssertionError):
        inverse_frequencies(RopeSpec("proportional", 10_000.0, 64), 1)  # type: ignore[arg-type]
