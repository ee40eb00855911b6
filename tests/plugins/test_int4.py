"""The int4 quantizer: groups of columns, ragged ones too, with zero points and without, and engines that run on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import CheckpointError, CompositionError, ConfigError
from intarsia.protocols import PartContext
from intarsia.types import dense
from intarsia_cpu import linears
from intarsia_int4 import provide_quantizers
from intarsia_int4.options import Int4Options
from intarsia_int4.quantizer import Int4Format, quantize
from models import tiny_llama

FORMATS = st.builds(Int4Format, st.sampled_from([32, 64, 128]), st.booleans())


def quantizer(**options):
    [provider] = provide_quantizers()
    return provider.build(PartContext(spec=None, options=Int4Options(**options)))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_groups(weight):
    """Read a weight number by number, as the format's page says, in float64."""
    form, (outs, ins) = weight.format, weight.shape
    pairs, scale = weight.tensors["weight"].tolist(), weight.tensors["scale"].double().tolist()
    zero = weight.tensors["zero"].tolist() if form.has_zeros else [[8] * len(row) for row in scale]
    values = [
        [
            (((pairs[n][c // 2] >> (4 * (c % 2))) & 15) - zero[n][c // form.group]) * scale[n][c // form.group]
            for c in range(ins)
        ]
        for n in range(outs)
    ]
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMATS, outs=st.integers(1, 6), ins=st.integers(1, 300), power=st.integers(-30, 30), shift=st.floats(-2, 2)
)
def test_every_number_is_within_its_groups_bound(form, outs, ins, power, shift):
    w = (drawn(outs, ins, seed=ins) + shift) * 10.0**power
    weight = quantize("w", w, form)
    exact, found = w.double(), by_groups(weight)
    assert torch.allclose(weight.dequantize().double(), found, rtol=1e-6, atol=0)
    of_group = torch.arange(ins) // form.group
    scale = weight.tensors["scale"].double().abs()[:, of_group]
    # The scale is rounded to 8 bits, which moves the ends of the range by up to 15 * 2**-9 scales.
    half = scale * (0.5 + 15 * 2**-8)
    # With zero points, the ends of the range move with the zero point's rounding. Without, the end of the other sign is
    # at 7 scales, and a number there may be 8 away.
    outer = torch.where(exact.abs() > 7 * scale, scale * 1.05, half)
    bound = half + scale * 0.5 if form.has_zeros else outer
    assert ((found - exact).abs() <= bound + 1e-43).all()


@pytest.mark.parametrize(
    ("ins", "group", "groups"), [(576, 128, 5), (576, 64, 9), (576, 32, 18), (48, 128, 1), (33, 32, 2)]
)
def test_groups_that_do_not_divide_the_columns_end_in_a_smaller_one(ins, group, groups):
    """Q03: 576 columns are four groups of 128 and one of 64."""
    w = drawn(5, ins)
    weight = quantize("w", w, Int4Format(group))
    assert weight.tensors["scale"].shape == (5, groups) and weight.shape == (5, ins)
    last = (groups - 1) * group
    alone = quantize("w", w[:, last:], Int4Format(group))
    assert torch.equal(weight.dequantize()[:, last:], alone.dequantize())


@pytest.mark.parametrize("has_zeros", [False, True])
def test_zeros_stay_zeros_and_odd_rows_stay_within_bounds(has_zeros):
    w = drawn(6, 130)
    w[1] = 0
    w[:, 7] = 0
    w[2] *= 1e-6
    w[3, 50] = 1e4
    w[4, 64:128] = 0
    found = quantize("w", w, Int4Format(64, has_zeros)).dequantize()
    assert found.isfinite().all()
    assert not found[1].any() and not found[:, 7].any() and not found[4, 64:128].any()
    assert ((found[2] - w[2]).abs() <= w[2].abs().max() / 7).all() and (found[2] != 0).sum() > 60
    assert abs(found[3, 50] - 1e4) < 50


@pytest.mark.parametrize("sign", [1, -1])
def test_without_zero_points_the_largest_number_is_exact_up_to_its_scale(sign):
    w = torch.full((1, 64), 0.5)
    w[0, 9] = sign * 8.0  # its scale is a power of two
    assert quantize("w", w, Int4Format(64)).dequantize()[0, 9] == sign * 8.0


def test_numbers_to_one_side_are_nearer_with_zero_points():
    w = drawn(8, 256).abs()
    errors = [(quantize("w", w, Int4Format(64, has)).dequantize() - w).norm() for has in (False, True)]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_by_name(bad):
    w = drawn(5, 9)
    w[4, 8] = bad
    with pytest.raises(CheckpointError, match=r"layers\.3\.out\.weight holds NaN or infinity"):
        quantizer().quantize("layers.3.out.weight", dense(w))


def test_it_takes_matrices_and_leaves_head_and_embedding():
    taken = {"layers.0.qkv.weight", "layers.1.experts.0.down.weight"}
    left = {"embed.weight", "positions.weight", "layers.1.router.weight", "head.weight"}
    assert {name for name in taken | left if quantizer().accepts(name, (8, 8))} == taken
    assert quantizer(head=True).accepts("head.weight", (8, 8))
    assert quantizer(embed=True).accepts("embed.weight", (8, 8))
    assert not quantizer(include=("layers.1.*",)).accepts("layers.0.qkv.weight", (8, 8))


@settings(max_examples=20, deadline=None)
@given(form=FORMATS, outs=st.integers(1, 9), ins=st.integers(1, 300))
def test_bytes_are_as_announced(form, outs, ins):
    q = quantizer(group=form.group, zero_points=form.has_zeros)
    assert q.format == form.name and form.name in linears.INT4_GROUPS
    assert q.quantize("w", dense(drawn(outs, ins))).num_bytes == q.num_bytes("w", (outs, ins))


def test_parts_are_parts_and_groups_are_not_cut():
    weight = quantize("w", drawn(9, 176), Int4Format(32, has_zeros=True))
    for dim, start, stop in [(0, 2, 7), (1, 32, 96), (1, 96, 176), (1, 0, 176)]:
        part = weight.shard(dim, start, stop)
        assert torch.equal(part.dequantize(), weight.dequantize().narrow(dim, start, stop - start))
    for start, stop in [(0, 48), (16, 64)]:
        with pytest.raises(CompositionError, match=f"columns {start} to {stop} of 176 cut a group: int4_g32_zero"):
            weight.shard(1, start, stop)


def test_large_weights_are_quantized_in_pieces_alike(monkeypatch):
    w = drawn(50, 33)
    whole = quantize("w", w, Int4Format(32, has_zeros=True))
    monkeypatch.setattr("intarsia_int4.quantizer._CHUNK", 100)
    pieces = quantize("w", w, Int4Format(32, has_zeros=True))
    assert all(torch.equal(whole.tensors[name], pieces.tensors[name]) for name in whole.tensors)


@settings(max_examples=25, deadline=None)
@given(form=FORMATS, outs=st.integers(1, 100), ins=st.integers(1, 300))
def test_the_cpu_kernels_read_the_format(form, outs, ins):
    weight = quantize("w", drawn(outs, ins), form)
    packed = linears.pack(weight)
    assert torch.equal(packed.dequantize(), weight.dequantize())
    # Columns one at a time, so that activations lose nothing: 127 is their largest.
    eye = torch.eye(ins)[:: max(1, ins // 7)]
    found = linears.linear(eye, packed)
    torch.testing.assert_close(found.double(), by_groups(weight).T[:: max(1, ins // 7)], rtol=1e-6, atol=1e-9)


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
            assert {ops[f"linear[{name}]"] for name in ("int8", "int4_g32_zero")} == {kernels}
            answers[kernels] = engine.generate([[3, 141, 59, 26]], params)[0]
    assert answers["cpu"].logprobs[0].logprob == pytest.approx(answers["torch"].logprobs[0].logprob, abs=0.05)
