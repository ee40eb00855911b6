"""The int4 quantizer by rounding to nearest, on its own and in engines. Clipping and AWQ: `test_int4_calibrated.py`."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ConfigError
from intarsia.ops import linear
from intarsia.protocols import PartContext
from intarsia.quantizing.integers import IntegerFormat
from intarsia.testing.quantizers import QuantizerContract
from intarsia.types import dense
from intarsia_cpu import linears
from intarsia_int4 import provide_quantizers
from intarsia_int4.options import Int4Options
from intarsia_int4.rounding import quantize
from models import tiny_llama


class Contract(QuantizerContract):
    def provider(self):
        return provide_quantizers()[0]


class TestGroups(Contract):
    """Rounded to nearest, without zero points."""


class TestZeroPoints(Contract):
    options: ClassVar = {"group": 32, "zero_points": True}


class TestClipped(Contract):
    options: ClassVar = {"clip": True, "cache": False}
    rounds_to_nearest = False


formats = st.builds(IntegerFormat, st.just(4), st.sampled_from([32, 64, 128]), st.sampled_from(["none", "zero"]))


def int4(group=64, offset="none"):
    return IntegerFormat(4, group, offset)


def quantizer(**options):
    [provider] = provide_quantizers()
    return provider.build(PartContext(spec=None, options=Int4Options(**options)))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_groups(weight):
    """Read a weight number by number, as the format's page says, in float64."""
    layout, (outs, ins) = weight.format, weight.shape
    pairs, scale = weight.tensors["weight"].tolist(), weight.tensors["scale"].double().tolist()
    zero = weight.tensors["zero"].tolist() if layout.offset == "zero" else [[8] * len(row) for row in scale]
    values = [
        [
            (((pairs[n][c // 2] >> (4 * (c % 2))) & 15) - zero[n][c // layout.group]) * scale[n][c // layout.group]
            for c in range(ins)
        ]
        for n in range(outs)
    ]
    return torch.tensor(values, dtype=torch.float64)


# --- numbers ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    layout=formats, outs=st.integers(1, 6), ins=st.integers(1, 300), power=st.integers(-30, 30), shift=st.floats(-2, 2)
)
def test_every_number_is_within_its_groups_bound(layout, outs, ins, power, shift):
    w = (drawn(outs, ins, seed=ins) + shift) * 10.0**power
    weight = quantize("w", w, layout)
    exact, found = w.double(), by_groups(weight)
    assert torch.allclose(weight.dequantize().double(), found, rtol=1e-6, atol=0)
    of_group = torch.arange(ins) // layout.group
    scale = weight.tensors["scale"].double().abs()[:, of_group]
    # The scale is rounded to 8 bits, which moves the ends of the range by up to 15 * 2**-9 scales.
    half = scale * (0.5 + 15 * 2**-8)
    # With zero points, the ends of the range move with the zero point's rounding. Without, the end of the other sign is
    # at 7 scales, and a number there may be 8 away.
    outer = torch.where(exact.abs() > 7 * scale, scale * 1.05, half)
    bound = half + scale * 0.5 if layout.offset == "zero" else outer
    assert ((found - exact).abs() <= bound + 1e-43).all()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("ins", "group", "groups"), [(576, 128, 5), (576, 64, 9), (576, 32, 18), (48, 128, 1), (33, 32, 2)]
)
def test_groups_that_do_not_divide_the_columns_end_in_a_smaller_one(ins, group, groups, clip):
    """Q03: 576 columns are four groups of 128 and one of 64."""
    w = drawn(5, ins)
    weight = quantize("w", w, int4(group), clip=clip)
    assert weight.tensors["scale"].shape == (5, groups) and weight.shape == (5, ins)
    last = (groups - 1) * group
    alone = quantize("w", w[:, last:], int4(group), clip=clip)
    assert torch.equal(weight.dequantize()[:, last:], alone.dequantize())


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("offset", ["none", "zero"])
def test_zeros_stay_zeros_and_odd_rows_stay_within_bounds(offset, clip):
    """Q01, of groups: a row of zeros, a column of them, a group of them, tiny numbers, one outlier."""
    w = drawn(6, 130)
    w[1] = 0
    w[:, 7] = 0
    w[2] *= 1e-6
    w[3, 50] = 1e4
    w[4, 64:128] = 0
    found = quantize("w", w, int4(64, offset), clip=clip).dequantize()
    assert found.isfinite().all()
    assert not found[1].any() and not found[:, 7].any() and not found[4, 64:128].any()
    assert (found[2] - w[2]).norm() < 0.15 * w[2].norm() and (found[2] != 0).sum() > 60
    assert abs(found[3, 50] - 1e4) < 50


@pytest.mark.parametrize("sign", [1, -1])
def test_without_zero_points_the_largest_number_is_exact_up_to_its_scale(sign):
    w = torch.full((1, 64), 0.5)
    w[0, 9] = sign * 8.0  # its scale is a power of two
    assert quantize("w", w, int4()).dequantize()[0, 9] == sign * 8.0


def test_numbers_to_one_side_are_nearer_with_zero_points():
    w = drawn(8, 256).abs()
    errors = [(quantize("w", w, int4(64, offset)).dequantize() - w).norm() for offset in ("none", "zero")]
    assert errors[1] < 0.7 * errors[0]


def test_numbers_that_have_a_place_in_the_format_are_kept_bit_for_bit():
    q = torch.randint(-8, 8, (7, 130), generator=torch.Generator().manual_seed(0)).float()
    q[:, ::32] = -8  # every group has its largest
    w = q * 0.0625
    for offset, clip in [("none", False), ("none", True)]:
        assert torch.equal(quantize("w", w, int4(32, offset), clip=clip).dequantize(), w)


@pytest.mark.parametrize("options", [{}, {"clip": True}, {"zero_points": True, "clip": True}])
def test_large_weights_are_quantized_in_pieces_alike(monkeypatch, options):
    w = drawn(50, 33)
    whole = quantizer(**options).quantize("w", dense(w))
    monkeypatch.setattr("intarsia_int4.rounding._CHUNK", 100)
    pieces = quantizer(**options).quantize("w", dense(w))
    assert all(torch.equal(whole.tensors[name], pieces.tensors[name]) for name in whole.tensors)


# --- the part ---------------------------------------------------------------------------------------------------------


def test_it_takes_matrices_and_leaves_head_and_embedding():
    taken = {"layers.0.qkv.weight", "layers.1.experts.0.down.weight"}
    left = {"embed.weight", "positions.weight", "layers.1.router.weight", "head.weight"}
    assert {name for name in taken | left if quantizer().accepts(name, (8, 8))} == taken
    assert quantizer(head=True).accepts("head.weight", (8, 8))
    assert quantizer(embed=True).accepts("embed.weight", (8, 8))
    assert not quantizer(include=("layers.1.*",)).accepts("layers.0.qkv.weight", (8, 8))


@settings(max_examples=25, deadline=None)
@given(layout=formats, outs=st.integers(1, 100), ins=st.integers(1, 300))
def test_products_equal_float64(layout, outs, ins):
    weight = quantize("w", drawn(outs, ins), layout)
    x = drawn(3, ins, seed=1)
    exact = by_groups(weight)
    bound = x.double().abs() @ exact.abs().T * 2**-18 + 1e-9
    assert ((linear(x, weight).double() - x.double() @ exact.T).abs() <= bound).all()


@settings(max_examples=25, deadline=None)
@given(layout=formats, outs=st.integers(1, 100), ins=st.integers(1, 300))
def test_the_cpu_kernels_read_the_format(layout, outs, ins):
    weight = quantize("w", drawn(outs, ins), layout)
    packed = linears.pack(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    # Columns one at a time, so that activations lose nothing: 127 is their largest.
    eye = torch.eye(ins)[:: max(1, ins // 7)]
    found = linears.linear(eye, packed)
    torch.testing.assert_close(found.double(), by_groups(weight).T[:: max(1, ins // 7)], rtol=1e-6, atol=1e-9)


# --- engines ----------------------------------------------------------------------------------------------------------


def test_groups_of_another_size_are_refused(tmp_path):
    path, _ = tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="group"):
        engine_of(path, quantizer={"use": "int4", "group": 48})


def test_int4_layers_run_beside_an_int8_head(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=2, tie=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    chain = [{"use": "int4", "group": 32, "zero_points": True}, {"use": "int8", "include": ["head.*"]}]
    answers = {}
    for kernels in ("torch", "cpu"):
        with engine_of(path, kernels=kernels, quantizer=chain) as engine:
            ops = engine.explain()["ops"]
            used = {op: source for op, source in ops.items() if op.startswith("linear[int")}
            assert "linear[int4_g32_zero]" in used and set(used.values()) == {kernels}
            answers[kernels] = engine.generate([[3, 141, 59, 26]], params)[0]
    assert answers["cpu"].logprobs[0].logprob == pytest.approx(answers["torch"].logprobs[0].logprob, abs=0.05)
