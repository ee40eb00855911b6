"""Integer weights in C++ against float64 and int64 of numpy: all formats, shapes, types of scales and paths."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from intarsia.quantizing.rotated import RotatedFormat, rotate
from intarsia.types import dense
from intarsia_cpu import linears
from integer_weights import BY_NAME, ROTATED, VARIED, as_int8, integer_weight, parts_of, values_of

FLOATS = (torch.float32, torch.bfloat16)
SCALES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = st.tuples(st.integers(1, 130), st.integers(1, 300))  # outputs, columns: ragged panels, words and groups
ROWS = st.integers(1, 40)
NAMES = st.sampled_from(sorted((*BY_NAME, *ROTATED)))
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen(x, weight, path):
    """The rows that a kernel multiplies with, in float64."""
    layout = weight.format
    rows = x.float()
    if "input_scale" in weight.tensors:
        rows = rows * weight.tensors["input_scale"]
    if isinstance(layout, RotatedFormat):
        rows, layout = rotate(rows), layout.source
    if layout.activations == "int8":
        return as_int8(rows.numpy(), min(linears.GROUP, layout.group or linears.GROUP))
    if x.dtype == torch.bfloat16 and path == "avx512_bf16":  # elsewhere products of bf16 would be no faster
        rows = rows.bfloat16()
    return rows.double().numpy()


@quick
@given(
    shape=SHAPES,
    rows=ROWS,
    name=NAMES,
    dtype=st.sampled_from(FLOATS),
    scales=st.tuples(st.sampled_from(SCALES), st.sampled_from(SCALES)),
    has_bias=st.booleans(),
    input_scale=st.booleans(),
)
def test_every_format_equals_float64(cpu_path, shape, rows, name, dtype, scales, has_bias, input_scale):
    outs, ins = shape
    weight = integer_weight(name, outs, ins, dtype=scales[0], min_dtype=scales[1], input_scale=input_scale)
    x = drawn(rows, ins, dtype=dtype)
    bias = drawn(outs, seed=2, dtype=dtype) if has_bias else None
    found = linears.linear(x, linears.pack(weight), bias)
    values, magnitudes = values_of(weight)
    read = seen(x, weight, cpu_path)
    right, bound = read @ values.T, np.abs(read) @ magnitudes.T
    if bias is not None:
        right, bound = right + bias.double().numpy(), bound + np.abs(bias.double().numpy())
    rounding = np.abs(right) * 2**-8 if dtype == torch.bfloat16 else 0
    assert found.shape == right.shape and found.dtype == dtype
    assert (np.abs(found.double().numpy() - right) <= bound * 2e-6 + rounding + 1e-30).all()


@quick
@given(shape=SHAPES, rows=ROWS, name=st.sampled_from(sorted(BY_NAME)))
def test_sums_of_whole_numbers_are_exact(cpu_path, shape, rows, name):
    """With scales of 1 and rows whose largest is 127 in each group nothing is rounded, whatever the sums' order."""
    outs, ins = shape
    weight = integer_weight(name, outs, ins, unit=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-127, 128, (rows, ins), generator=generator).float()
    x[:, ::16] = 127
    numbers, _, zero, least = parts_of(weight)
    whole = (numbers - np.asarray(zero).astype(np.int64)) + np.asarray(least).astype(np.int64)
    right = x.numpy().astype(np.int64) @ whole.T
    assert np.array_equal(linears.linear(x, linears.pack(weight)).numpy().astype(np.int64), right)


@pytest.mark.parametrize("shape", [(100, 130), (50, 600)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(cpu_path, shape):
    outs, ins = shape
    for layout in (*VARIED, ROTATED["int8_g64_rotated"]):
        keeps_floats, has_scale = layout.name.endswith("a16"), layout.name.startswith("int4")
        weight = linears.pack(integer_weight(layout.name, outs, ins, input_scale=has_scale))
        for dtype in FLOATS if keeps_floats else FLOATS[:1]:
            x = drawn(130, ins, dtype=dtype)
            whole = linears.linear(x, weight)
            for start, stop in [(0, 1), (129, 130), (3, 5), (3, 12), (0, 100), (50, 130)]:
                assert torch.equal(linears.linear(x[start:stop], weight), whole[start:stop]), (layout.name, start)
            for threads in (1, 3):
                out = torch.full_like(whole, float("nan"))
                target = linears.OutputStruct(out.data_ptr(), outs, linears.is_bf16(out))
                linears.run(linears.struct(weight, dtype=dtype), x, target, threads=threads)
                assert torch.equal(out, whole), layout.name


def test_what_lies_around_rows_is_neither_read_nor_written(cpu_path):
    for outs, ins, rows in ((50, 33, 5), (50, 64, 9)):
        for layout in (*VARIED, ROTATED["int8_g64_rotated"]):
            weight = linears.pack(integer_weight(layout.name, outs, ins))
            around = torch.full((rows + 2, ins + 6), float("nan"))
            x = around[1:-1, 3:-3]
            x.copy_(drawn(rows, ins))
            out = torch.full((rows + 2, outs + 6), 7.0)
            inner = out[1:-1, 3:-3]
            linears.run(linears.struct(weight), x, linears.OutputStruct(inner.data_ptr(), out.stride(0), 0))
            assert torch.equal(inner, linears.linear(x.contiguous(), weight)) and inner.isfinite().all()
            inner.fill_(7.0)
            assert (out == 7).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_a_number_that_is_none_shows_it_and_harms_no_other(cpu_path, bad):
    for layout in (*VARIED, ROTATED["int8_rotated"]):
        weight = linears.pack(integer_weight(layout.name, 50, 130))
        x = drawn(4, 130)
        before = linears.linear(x, weight)
        x[2, 77] = bad
        after = linears.linear(x, weight)
        assert not after[2].isfinite().any(), layout.name
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_rows_of_zeros_give_the_bias_and_tiny_ones_do_no_harm(cpu_path):
    bias = drawn(50, seed=3)
    for layout in VARIED:
        weight = linears.pack(integer_weight(layout.name, 50, 130))
        x = torch.zeros(3, 130)
        x[1] = 1e-38  # its inverse overflows
        found = linears.linear(x, weight, bias)
        assert torch.equal(found[[0, 2]], bias.expand(2, -1))
        assert (found[1] - bias).abs().max() < 1e-30


def test_rows_and_groups_of_scale_zero_give_zeros(cpu_path):
    for layout in VARIED:
        weight = integer_weight(layout.name, 50, 130)
        for name in ("scale", "min"):
            if name in weight.tensors:
                weight.tensors[name][7] = 0
        found = linears.linear(drawn(9, 130), linears.pack(weight))
        assert (found[:, 7] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("values", [(0.0, 2.0**-24, 2.0**-14, 65504.0, -3.0e-6), (float("inf"), float("nan"))])
def test_half_floats_are_read_exactly(cpu_path, values):
    """Subnormal ones too: a scale that is off by an ulp would pass every tolerance."""
    for value in values:
        weight = integer_weight("int4_g32_min_a16", 3, 32)
        weight.tensors["weight"].fill_(0)
        weight.tensors["scale"] = torch.zeros(3, 1)
        weight.tensors["min"] = torch.full((3, 1), value, dtype=torch.float16)
        x = torch.zeros(1, 32)
        x[0, 5] = 1
        found = linears.linear(x, linears.pack(weight))
        assert torch.equal(found, weight.tensors["min"].float().T) or found.isnan().all()


@quick
@given(shape=SHAPES, name=NAMES, dtype=st.sampled_from(SCALES), input_scale=st.booleans())
def test_a_packed_weight_unpacks_to_the_same_bits(shape, name, dtype, input_scale):
    weight = integer_weight(name, *shape, dtype=dtype, input_scale=input_scale)
    packed = linears.pack(weight)
    unpacked = linears.unpack(packed)
    assert packed.format.name == "cpu" and unpacked.format is weight.format
    assert unpacked.tensors.keys() == weight.tensors.keys() and unpacked.shape == weight.shape
    for key, tensor in weight.tensors.items():
        assert unpacked.tensors[key].dtype == tensor.dtype and torch.equal(unpacked.tensors[key], tensor), key
    assert torch.equal(packed.rows(slice(0, 1)).dequantize(), weight.rows(slice(0, 1)).dequantize())


def test_gated_panels_hold_the_same_numbers(cpu_path):
    for layout in VARIED:
        weight = linears.pack(integer_weight(layout.name, 2 * 50, 130, input_scale=True))
        paired = linears.interleave(weight)
        assert paired.tensors["panels"].shape[0] == 4
        x, bias = drawn(11, 130), drawn(100, seed=5)
        plain = linears.linear(x, weight, bias)
        out = torch.empty(11, 50)
        linears.run(linears.struct(paired, bias, gated=True), x, linears.OutputStruct(out.data_ptr(), 50, 0))
        assert torch.equal(out, plain[:, :50] * plain[:, 50:])


def test_packed_weights_are_as_large_as_their_tensors():
    """Scales are not copied for each group of activations, and words are not padded to groups."""
    for layout in VARIED:
        weight = integer_weight(layout.name, 96, 256)
        assert linears.pack(weight).num_bytes == weight.num_bytes == layout.num_bytes((96, 256))


def test_float_rows_of_a16_formats_are_not_rounded_in_float32(cpu_path):
    """Where int8 rows are off by far more than rounding, float rows are not."""
    x = drawn(9, 256)
    for name in ("int8", "int8_g64", "int4_g64", "int4_g32_min"):
        eight, floats = integer_weight(name, 60, 256), integer_weight(f"{name}_a16", 60, 256)
        right = x.double() @ torch.from_numpy(values_of(floats)[0]).T
        errors = [(linears.linear(x, linears.pack(w)).double() - right).abs().max() for w in (eight, floats)]
        assert errors[1] < errors[0] / 100


def test_dense_weights_stand_beside_integers():
    w = drawn(50, 60)
    assert torch.equal(linears.pack(dense(w)).dequantize(), w)
