"""Norms and activations of the kernels `cuda`, in Triton's interpreter: against float64 and the references.

Shape legend: T tokens, E embed, H heads, D head dim, F ffn.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bfloat16_interpreter import _rounds_to_bfloat16  # noqa: F401
from intarsia.ops import OPS, int8_entries
from intarsia_cuda import activations, norms

#: Half a unit in the last place, relative: the error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: The step of a format's smallest numbers, halved.
SUBNORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}
#: (activations, norm weights)
PAIRS = [*((d, d) for d in ROUNDING), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
#: The widest are held in more than one block.
WIDTHS = [1, 3, 16, 100, 576, 4095, 4097, 9000]
dtypes = st.sampled_from(list(ROUNDING))
pairs = st.sampled_from(PAIRS)
rows = st.integers(1, 5)
widths = st.one_of(st.integers(1, 300), st.sampled_from([4096, 4097, 8200]))
sizes = st.sampled_from([1e-3, 1.0, 100.0])
seeds = st.integers(0, 2**31)
several = settings(deadline=None, max_examples=15)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside(tensor):
    """The same numbers as a part of a wider tensor, amid NaN: what lies beside them is not theirs."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.nan, dtype=tensor.dtype)
    wide[..., 2:-3] = tensor
    return wide[..., 2:-3]


def exact(tensor):
    return tensor.double().numpy()


def near(actual, expected, dtype, size=None, roundings=1, relative=1e-6):
    """Within fp32's error of the size (of the expected number where none is given), and the format's roundings."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    bound = relative * np.abs(expected if size is None else size) + 1e-30
    bound = bound + 1.01 * roundings * np.abs(expected) * ROUNDING[dtype] + roundings * SUBNORMAL[dtype]
    error = np.abs(exact(actual) - expected)
    assert (error <= bound).all(), float((error - bound).max())


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Every new tensor is full of numbers that no kernel may leave there."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

    for module in (norms, activations):
        monkeypatch.setattr(module.torch, "empty", poisoned)


# --- norms ------------------------------------------------------------------------------------------------------------


def rms_normed(x, w, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


@several
@given(pairs, rows, widths, sizes, st.sampled_from([1e-6, 0.1]), seeds)
def test_rms_norm_divides_by_the_root_mean_square(pair, num_rows, width, size, eps, seed):
    dtype, weight_dtype = pair
    x, w = inside(normal(seed, num_rows, width) * size).to(dtype), normal(seed + 1, width, dtype=weight_dtype)
    # Before the weight it is rounded to the weight's format.
    narrow = 2 if weight_dtype == dtype else 1
    right = rms_normed(exact(x), exact(w), eps)
    tiny = SUBNORMAL[dtype] * np.abs(exact(w)) / 1e-6
    near(norms.rms_norm(x, w, eps), right, dtype, size=np.abs(right) + tiny, roundings=narrow)


@several
@given(pairs, st.integers(1, 4), widths, seeds)
def test_a_norm_is_the_references_but_for_the_last_bits_of_fp32(pair, num_rows, width, seed):
    """Where both round to the format at the same points they are equal, but where a number is at the edge of two."""
    dtype, weight_dtype = pair
    x, w = normal(seed, num_rows, width, dtype=dtype), normal(seed + 1, width, dtype=weight_dtype)
    found, right = norms.rms_norm(x, w, 1e-5), OPS["rms_norm"].call(x, w, 1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-30)
    else:
        assert (found != right).float().mean() < 0.01 + 1.5 / found.numel()
        torch.testing.assert_close(found, right, rtol=4 * ROUNDING[dtype], atol=2 * SUBNORMAL[dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [20, 5000])
def test_a_norm_of_zeros_is_zero_or_the_bias(dtype, width):
    zeros, ones = torch.zeros(2, width, dtype=dtype), torch.ones(width, dtype=dtype)
    assert torch.equal(norms.rms_norm(zeros, ones, 1e-5), zeros)
    assert torch.equal(norms.layer_norm(zeros, ones, 3 * ones, 1e-5), zeros + 3)
    assert torch.equal(norms.layer_norm(zeros, ones, None, 1e-5), zeros)


def test_the_squares_of_large_halves_do_not_overflow():
    x, ones = torch.full((1, 64), 6e4, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert torch.equal(norms.rms_norm(x, ones, 1e-5), torch.ones(1, 64, dtype=torch.float16))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [1, 33, 576, 4100])
def test_add_rms_norm_returns_the_norm_of_the_rounded_sum_and_the_sum(dtype, width):
    x, residual = inside(normal(1, 4, width, dtype=dtype)), inside(normal(2, 4, width, dtype=dtype))
    w, before = normal(3, width, dtype=dtype), (x.clone(), residual.clone())
    out, total = norms.add_rms_norm(x, residual, w, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(out, norms.rms_norm(total, w, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_heads_of_tokens_are_normed_each_for_itself(dtype):
    wide = normal(1, 5, 9, 20, dtype=dtype)
    heads, w = wide[:, 2:6], normal(2, 20, dtype=dtype)
    out = norms.rms_norm(heads, w, 1e-6)
    assert out.shape == heads.shape
    for t, h in np.ndindex(5, 4):
        assert torch.equal(out[t, h], norms.rms_norm(heads[t, h].unsqueeze(0), w, 1e-6)[0])


@several
@given(dtypes, rows, widths, st.floats(-20, 20), st.sampled_from([1e-5, 0.1]), st.booleans(), seeds)
def test_layer_norm_takes_the_mean_off_and_divides_by_the_deviation(dtype, num_rows, width, mean, eps, with_bias, seed):
    x, w = inside((normal(seed, num_rows, width) + mean).to(dtype)), normal(seed + 1, width, dtype=dtype)
    bias = normal(seed + 2, width, dtype=dtype) if with_bias else None
    centred = exact(x) - exact(x).mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    right = centred / deviation * exact(w) + (exact(bias) if with_bias else 0)
    # The mean errs by roundings of numbers of its own size.
    off = (
        (np.abs(exact(x)).max(-1, keepdims=True) + 1) / deviation * (np.abs(centred / deviation) + 1) * np.abs(exact(w))
    )
    near(norms.layer_norm(x, w, bias, eps), right, dtype, size=off + np.abs(right), relative=2e-6)


def test_a_layer_norm_with_weights_in_another_dtype_goes_the_references_way():
    x, w = normal(1, 3, 40, dtype=torch.bfloat16), normal(2, 40)
    assert torch.equal(norms.layer_norm(x, w, w, 1e-5), OPS["layer_norm"].call(x, w, w, 1e-5))


def test_no_rows_are_normed_to_no_rows():
    nothing, w = torch.zeros(0, 8), torch.ones(8)
    assert norms.rms_norm(nothing, w, 1e-5).shape == (0, 8)
    assert norms.layer_norm(nothing, w, None, 1e-5).shape == (0, 8)
    assert [x.shape for x in norms.add_rms_norm(nothing, nothing, w, 1e-5)] == [(0, 8)] * 2


# --- norms whose output is int8 ---------------------------------------------------------------------------------------


def quantized(y):
    """int8 rows and their scales, by the format's own definition: a row is an entry of one head."""
    numbers, scales = int8_entries(y.float().unsqueeze(1))
    return numbers[:, 0], scales[:, 0]


@several
@given(rows, widths, st.booleans(), st.booleans(), st.sampled_from([torch.bfloat16, torch.float32]), seeds)
def test_int8_rows_are_those_of_the_norm(num_rows, width, adds, scaled, weight_dtype, seed):
    x, w = inside(normal(seed, num_rows, width, dtype=torch.bfloat16)), normal(seed + 1, width, dtype=weight_dtype)
    residual = normal(seed + 2, num_rows, width, dtype=torch.bfloat16) if adds else None
    input_scale = normal(seed + 3, width).abs() + 0.1 if scaled else None
    numbers, scales, total = norms.rms_norm_int8(x, w, 1e-5, input_scale, residual)
    if adds:
        normed, summed = norms.add_rms_norm(x, residual, w, 1e-5)
        assert torch.equal(total, summed)
    else:
        normed = norms.rms_norm(x, w, 1e-5)
        assert total is x
    right = quantized(normed.float() * (1 if input_scale is None else input_scale))
    assert numbers.dtype == torch.int8 and torch.equal(numbers, right[0]) and torch.equal(scales, right[1])


@pytest.mark.parametrize("width", [40, 5000])
def test_int8_rows_of_zeros_are_zeros_and_what_is_not_finite_shows_in_the_scale(width):
    x = normal(1, 4, width, dtype=torch.bfloat16)
    x[1] = 0
    x[2, 7], x[3, 3] = torch.inf, torch.nan
    numbers, scales, _ = norms.rms_norm_int8(x, torch.ones(width, dtype=torch.bfloat16), 1e-5)
    assert scales[1] == 0 and scales[2:].isnan().all() and scales[0] > 0
    assert not numbers[1:].any() and numbers[0].abs().max() == 127


# --- activations ------------------------------------------------------------------------------------------------------


def gelu(x):
    """The tanh form, in float64."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@several
@given(dtypes, rows, st.sampled_from([1, 5, 64, 1023, 1025, 2100]), st.sampled_from([1e-3, 1.0, 5.0, 30.0]), seeds)
def test_activations_equal_float64(dtype, num_rows, width, size, seed):
    x = inside((normal(seed, num_rows, 2 * width) * size).to(dtype))
    gate, up = np.split(exact(x), 2, -1)
    tiny = 2 * SUBNORMAL[dtype] * (np.abs(up) + 1) / 1e-6  # a rounded gelu or silu below the format's normal numbers
    silu = gate / (1 + np.exp(-gate)) * up
    near(activations.silu_mul(x), silu, dtype, size=np.abs(silu) + tiny, roundings=2)
    # Far below zero the exponent's own rounding shows: it is of its size.
    off = 60 * np.abs(gelu(gate) * up) + 1e-3 * np.abs(gate * up) * (gate < -4)
    near(activations.gelu_tanh_mul(x), gelu(gate) * up, dtype, size=off + tiny, roundings=2)
    off = 60 * np.abs(gelu(exact(x))) + 1e-3 * np.abs(exact(x)) * (exact(x) < -4)
    near(activations.gelu_tanh(x), gelu(exact(x)), dtype, size=off)


@several
@given(dtypes, st.sampled_from([0.5, 30.0, 50.0]), st.sampled_from([1e-4, 1.0, 30.0, 1e4]), seeds)
def test_soft_caps_equal_float64_from_the_smallest_numbers_on(dtype, cap, size, seed):
    x = inside((normal(seed, 3, 1100) * size).to(dtype))
    out = activations.soft_cap(x, cap)
    right = cap * np.tanh(exact(x) / cap)
    near(out, right, dtype, size=np.abs(right) + 3 * SUBNORMAL[dtype] * cap / 1e-6, roundings=3.5)
    assert float(out.abs().max()) <= cap


def test_activations_of_endless_numbers_are_their_limits_and_nan_stays():
    x = torch.tensor([[torch.inf, -torch.inf, 3e38, -3e38, 0.0, torch.nan]])
    assert activations.soft_cap(x, 30.0)[0, :5].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0]
    silu = activations.silu_mul(torch.cat([x, torch.ones_like(x)], 1))[0]
    assert silu[[0, 2, 4]].tolist() == [torch.inf, x[0, 2], 0] and silu[3] == 0
    plain = activations.gelu_tanh(x)[0]
    assert plain[[0, 2, 4]].tolist() == [torch.inf, x[0, 2], 0] and plain[3] == 0
    for out in (activations.soft_cap(x, 30.0)[0, 5], silu[5], plain[5]):
        assert out.isnan()


def test_columns_that_lie_apart_are_read_as_they_are():
    x = normal(1, 40, 6).t()
    assert torch.equal(activations.silu_mul(x), activations.silu_mul(x.contiguous()))
    assert torch.equal(norms.rms_norm(x, torch.ones(40), 1e-5), norms.rms_norm(x.contiguous(), torch.ones(40), 1e-5))


# --- what a row's bits depend on --------------------------------------------------------------------------------------

VECTOR = normal(5, 9000)
ROW_OPS = {
    "rms_norm": lambda x, w: norms.rms_norm(x, w, 1e-5),
    "rms_norm_int8": lambda x, w: norms.rms_norm_int8(x.bfloat16(), w.bfloat16(), 1e-5)[0],
    "layer_norm": lambda x, w: norms.layer_norm(x, w, w, 1e-5),
    "add_rms_norm": lambda x, w: torch.cat(norms.add_rms_norm(x, x.flip(1), w, 1e-5), 1),
    "silu_mul": lambda x, w: activations.silu_mul(x),
    "gelu_tanh_mul": lambda x, w: activations.gelu_tanh_mul(x),
    "gelu_tanh": lambda x, w: activations.gelu_tanh(x),
    "soft_cap": lambda x, w: activations.soft_cap(x, 2.0),
}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("width", [2, 34, 576, 5000])
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(op, dtype, width):
    x, w = normal(3, 7, width, dtype=dtype), VECTOR[:width].to(dtype)
    alone = torch.cat([ROW_OPS[op](row.unsqueeze(0), w) for row in x])
    for size in (2, 7):
        assert torch.equal(ROW_OPS[op](x[:size], w), alone[:size]), size
        assert torch.equal(ROW_OPS[op](x[-size:], w), alone[-size:]), size
