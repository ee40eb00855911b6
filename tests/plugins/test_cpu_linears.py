"""Packed linears of dense weights against float64: any shape and number of rows, every path, one set of bits a row."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intarsia.errors import CompositionError
from intarsia.types import Weight, dense
from intarsia_cpu import linears

FLOATS = (torch.float32, torch.bfloat16)
SHAPES = st.tuples(st.integers(1, 130), st.integers(1, 200))  # outputs, columns: ragged panels, steps and groups
ROWS = st.integers(1, 40)
quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found, x, weights, bias, *, rel):
    """Within `rel` of the sum of magnitudes, and within rounding to the output's dtype."""
    right = x.double() @ weights.double().T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weights.double().abs().T + (0 if bias is None else bias.double().abs())
    rounding = right.abs() * 2**-8 if found.dtype == torch.bfloat16 else 0
    assert found.shape == right.shape
    assert ((found.double() - right).abs() <= magnitude * rel + rounding + 1e-30).all()


@quick
@given(shape=SHAPES, rows=ROWS, dtype=st.sampled_from(FLOATS), has_bias=st.booleans())
def test_floats_equal_float64(cpu_path, shape, rows, dtype, has_bias):
    outs, ins = shape
    x, w = drawn(rows, ins, dtype=dtype), drawn(outs, ins, seed=1, dtype=dtype)
    bias = drawn(outs, seed=2, dtype=dtype) if has_bias else None
    check(linears.linear(x, linears.pack(dense(w)), bias), x, w, bias, rel=1e-6)


def every_dtype(outs, ins):
    yield linears.pack(dense(drawn(outs, ins, seed=1)))
    yield linears.pack(dense(drawn(outs, ins, seed=1, dtype=torch.bfloat16)))


@pytest.mark.parametrize("shape", [(100, 130), (100, 576), (7, 33)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(cpu_path, shape):
    outs, ins = shape
    for weight in every_dtype(outs, ins):
        x = drawn(150, ins, dtype=torch.bfloat16 if weight.format.kind == linears.BF16 else torch.float32)
        whole = linears.linear(x, weight)
        for start, stop in [(0, 1), (149, 150), (3, 12), (0, 100), (50, 150)]:
            assert torch.equal(linears.linear(x[start:stop], weight), whole[start:stop])
        for threads in (1, 2, 3, 7):
            out = torch.full_like(whole, float("nan"))
            target = linears.OutputStruct(out.data_ptr(), outs, linears.is_bf16(out))
            linears.run(linears.struct(weight), x, target, threads=threads)
            assert torch.equal(out, whole)


def test_what_lies_around_rows_is_neither_read_nor_written(cpu_path):
    outs, ins, rows = 50, 33, 5
    for weight in every_dtype(outs, ins):
        dtype = torch.bfloat16 if weight.format.kind == linears.BF16 else torch.float32
        around = torch.full((rows + 2, ins + 6), float("nan"), dtype=dtype)
        x = around[1:-1, 3:-3]
        x.copy_(drawn(rows, ins))
        out = torch.full((rows + 2, outs + 6), 7.0, dtype=dtype)
        inner = out[1:-1, 3:-3]
        target = linears.OutputStruct(inner.data_ptr(), out.stride(0), linears.is_bf16(out))
        linears.run(linears.struct(weight), x, target)
        assert torch.equal(inner, linears.linear(x.contiguous(), weight)) and inner.isfinite().all()
        inner.fill_(7.0)
        assert (out == 7).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_number_that_is_none_shows_it_and_harms_no_other(cpu_path, bad):
    for weight in every_dtype(50, 130):
        x = drawn(4, 130, dtype=torch.bfloat16 if weight.format.kind == linears.BF16 else torch.float32)
        before = linears.linear(x, weight)
        x[2, 77] = bad
        after = linears.linear(x, weight)
        assert not after[2].isfinite().any()
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_rows_of_zeros_give_the_bias_and_tiny_ones_do_no_harm(cpu_path):
    bias = drawn(50, seed=3)
    for weight in every_dtype(50, 130):
        x = torch.zeros(3, 130)
        x[1] = 1e-38  # its inverse overflows
        assert torch.equal(linears.linear(x, weight, bias)[[0, 2]], bias.expand(2, -1))
        assert (linears.linear(x, weight, bias)[1] - bias).abs().max() < 1e-30


ACTIVATIONS = {
    0: lambda x: x,
    1: torch.nn.functional.silu,
    # gelu in its form with tanh, without the cancellation of 1 + tanh.
    2: lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("outs", [48, 96, 50, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_fused_equals_float64(cpu_path, activation, outs, gated):
    function, rows, ins = ACTIVATIONS[activation], 11, 70
    x, bias = drawn(rows, ins), drawn(2 * outs if gated else outs, seed=3)
    plain = linears.pack(dense(drawn(len(bias), ins, seed=1) * 0.5))
    weight = linears.interleave(plain) if gated else plain
    product = (x.double() @ plain.dequantize().double().T) + bias.double()
    right = function(product[:, :outs]) * product[:, outs:] if gated else function(product)
    for adds in (False, True):
        out = drawn(rows, outs, seed=4)
        expected = out + 0.25 * right if adds else right
        target = linears.OutputStruct(out.data_ptr(), outs, 0, int(adds), activation, 0.25)
        linears.run(linears.struct(weight, bias, gated=gated), x, target)
        assert torch.allclose(out.double(), expected, rtol=1e-5, atol=2e-5)


@quick
@given(outs=st.integers(1, 120), ins=st.integers(1, 200))
def test_a_packed_weight_unpacks_to_the_same_bits(outs, ins):
    for dtype in FLOATS:
        w = drawn(outs, ins, dtype=dtype)
        packed = linears.pack(dense(w))
        assert packed.format.name == "cpu" and torch.equal(packed.dequantize(), w)


@pytest.mark.parametrize("activation", [1, 2])
def test_activations_hold_over_all_floats(cpu_path, activation):
    magnitudes = torch.logspace(-30, 38, 3000)
    x = torch.cat((magnitudes, -magnitudes, torch.linspace(-120, 120, 4001), torch.zeros(1)))[:, None]
    weight, out = linears.pack(dense(torch.ones(1, 1))), torch.empty_like(x)
    linears.run(linears.struct(weight), x, linears.OutputStruct(out.data_ptr(), 1, 0, 0, activation))
    right = ACTIVATIONS[activation](x.double())
    # Where the result is below what a float holds, it is as good as 0. exp's argument is rounded: 2**-24 of up to 88.
    assert torch.allclose(out.double(), right, rtol=2e-5, atol=1e-36)
    assert (out[x.abs() < 1] - right[x.abs() < 1]).abs().max() < 2e-7


def test_gated_panels_hold_the_same_numbers():
    for weight in every_dtype(2 * 50, 130):
        paired = linears.interleave(weight)
        assert paired.tensors["panels"].shape[0] == 4
        x = drawn(3, 130, dtype=torch.bfloat16 if weight.format.kind == linears.BF16 else torch.float32)
        plain = linears.linear(x, weight)
        out = torch.empty(3, 50)
        linears.run(linears.struct(paired, gated=True), x, linears.OutputStruct(out.data_ptr(), 50, 0))
        right = plain[:, :50].float() * plain[:, 50:].float()
        assert torch.allclose(out, right, rtol=2**-7, atol=1e-6)


def test_formats_that_are_not_read_are_refused_by_name():
    with pytest.raises(CompositionError, match="float64"):
        linears.pack(dense(torch.zeros(4, 4, dtype=torch.float64)))
    with pytest.raises(CompositionError, match="'mystery'"):
        linears.pack(Weight(type("Mystery", (), {"name": "mystery"})(), {}, (4, 4)))
    with pytest.raises(CompositionError, match="before it is packed"):
        linears.pack(dense(torch.zeros(4, 4))).shard(0, 0, 2)
