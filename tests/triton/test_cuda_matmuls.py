"""Linear layers over whole numbers in Triton's interpreter, against float64 and int64: formats, shapes, bits."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton import language as tl
from triton.runtime import interpreter

from intarsia.errors import CompositionError
from intarsia.ops import int8_entries
from intarsia.quantizing.integers import pack_nibbles
from intarsia.types import Weight, dense
from intarsia_cuda.quantized import matmuls
from intarsia_cuda.quantized.packing import Packed, pack, reads, unpack
from integer_weights import BY_NAME, integer_weight, parts_of, values_of

NAMES = sorted(matmuls.FORMATS)
GROUPED = [name for name in NAMES if BY_NAME[name].group]
HALF = [name for name in GROUPED if BY_NAME[name].bits == 4]
#: One of each way that a kernel goes.
VARIED = ["int8", "int8_a16", "int8_g32", "int8_g128_min_a16", "int4_g32", "int4_g64_zero", "int4_g128_min_a16"]
SCALES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 300))  # outputs, columns: ragged tiles, steps and groups
ROWS = st.integers(1, 40)
quick = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def _rounded(values):
    """bfloat16 bits of numbers, to nearest, ties to even."""
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _widened(handle):
    bits = np.ascontiguousarray(handle.data).view(np.int16)
    values = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    return interpreter.TensorHandle(values, tl.float32)


@pytest.fixture(autouse=True)
def _brain_floats(monkeypatch):
    """Triton's interpreter computes with bits of bfloat16 as whole numbers, and rounds to it by cutting bits off."""
    builder = interpreter.interpreter_builder
    cast, dot, binary = builder.cast_impl, builder.create_dot, builder.binary_op

    def is_brain(handle):
        return handle.dtype.scalar == tl.bfloat16

    def rounding_cast(source, target):
        if target.scalar == tl.bfloat16 and not is_brain(source):
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(_widened(source) if is_brain(source) else source, target)

    def widening_dot(a, b, *rest):
        return dot(*(_widened(side) if is_brain(side) else side for side in (a, b)), *rest)

    def widening_op(a, b, op):
        if is_brain(a) and op in (np.add, np.subtract, np.multiply):
            return interpreter.TensorHandle(_rounded(op(_widened(a).data, _widened(b).data)), tl.bfloat16)
        return binary(a, b, op)

    monkeypatch.setattr(builder, "cast_impl", rounding_cast)
    monkeypatch.setattr(builder, "create_dot", widening_dot)
    monkeypatch.setattr(builder, "binary_op", widening_op)


@pytest.fixture
def split(monkeypatch):
    """Has a device so wide that each split of a sum gets a program, or so narrow that none does."""

    def choose(is_split):
        monkeypatch.setattr(matmuls, "_multiprocessors", lambda _: 1 << 20 if is_split else 0)

    return choose


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- packing ----------------------------------------------------------------------------------------------------------


@quick
@given(shape=SHAPES, name=st.sampled_from(NAMES), scale=SCALES, least=SCALES, input_scale=st.booleans())
def test_a_packed_weight_is_unpacked_bit_for_bit(shape, name, scale, least, input_scale):
    weight = integer_weight(name, *shape, dtype=scale, min_dtype=least, input_scale=input_scale)
    packed = pack(weight)
    assert packed.format.name == "cuda" and packed.shape == weight.shape
    again = unpack(packed)
    assert again.format == weight.format and again.tensors.keys() == weight.tensors.keys()
    for key, tensor in weight.tensors.items():
        assert again.tensors[key].dtype == tensor.dtype and torch.equal(again.tensors[key], tensor), key
    assert torch.equal(packed.dequantize(), weight.dequantize())


@pytest.mark.parametrize("name", VARIED)
def test_rows_are_taken_of_a_packed_weight_alone(name):
    weight = integer_weight(name, 150, 77)
    ids = torch.tensor([149, 0, 64, 64, 63])
    for index in (ids, slice(3, 90)):
        rows = pack(weight).rows(index)
        assert rows.format == weight.format
        assert torch.equal(rows.dequantize(), weight.rows(index).dequantize())


def test_a_packed_weight_is_about_as_large_as_before():
    for name in VARIED:
        weight = integer_weight(name, 256, 1024, dtype=torch.float16)
        # Of float16 scales and minima, those of formats with minima become float32.
        wider = 4 * weight.tensors["scale"].numel() if "min" in weight.tensors else 0
        assert pack(weight).num_bytes <= weight.num_bytes * 1.001 + 64 + wider


def test_scales_that_float16_does_not_have_are_kept():
    weight = integer_weight("int4_g64_zero", 20, 100, dtype=torch.bfloat16)
    weight.tensors["scale"][3, 1] = 1e-30
    packed = pack(weight)
    assert packed.format.wide and not pack(integer_weight("int4_g64_zero", 20, 100)).format.wide
    assert torch.equal(packed.dequantize(), weight.dequantize())
    x = drawn(3, 100)
    right = x.double() @ weight.dequantize().double().t()
    torch.testing.assert_close(matmuls.linear(x, packed).double(), right, rtol=2**-7, atol=0.02)


def test_what_the_kernels_do_not_read_is_refused_by_name():
    with pytest.raises(CompositionError, match="int4_g16"):
        pack(integer_weight("int4_g16", 4, 32))
    with pytest.raises(CompositionError, match="dense"):
        pack(dense(torch.zeros(4, 4)))
    long = Weight(BY_NAME["int8"], {"weight": torch.zeros(1, 140000, dtype=torch.int8)}, (1, 140000))
    with pytest.raises(CompositionError, match="140000 columns"):
        pack(long)
    with pytest.raises(CompositionError, match="sharded before"):
        pack(integer_weight("int8", 4, 32)).shard(0, 0, 2)


def test_every_format_with_a_scale_a_row_or_32_columns_or_more_is_read():
    assert {name for name, layout in BY_NAME.items() if layout.group != 16} == set(NAMES)
    assert all(reads(BY_NAME[name]) for name in NAMES)


# --- rows of int8 -----------------------------------------------------------------------------------------------------


@quick
@given(rows=ROWS, ins=st.integers(1, 300), input_scale=st.booleans())
def test_rows_are_quantized_as_entries_of_the_cache_are(rows, ins, input_scale):
    x = drawn(rows, ins)
    factors = torch.rand(ins, generator=torch.Generator().manual_seed(1)) + 0.5 if input_scale else None
    numbers, scales = matmuls.quantize_rows(x, factors)
    right, right_scales = int8_entries(x.float() if factors is None else x.float() * factors)
    assert torch.equal(numbers[:, :ins], right) and torch.equal(scales, right_scales)
    assert numbers.shape[1] % 16 == 0 and not numbers[:, ins:].any()


def test_long_rows_and_rows_that_are_nothing_or_none_are_quantized_too():
    x = drawn(5, 9000)
    x[1] = 0
    x[2] = 1e-38
    x[3, 8999] = torch.inf
    x[4, 17] = torch.nan
    numbers, scales = matmuls.quantize_rows(x)
    right, right_scales = int8_entries(x)
    assert torch.equal(numbers[:, :9000], right)
    assert torch.equal(scales[:3], right_scales[:3]) and scales[3:].isnan().all()


# --- products ---------------------------------------------------------------------------------------------------------


def read_by(weight, x):
    """The rows that a kernel multiplies, in float64."""
    rows, scale = x, weight.tensors.get("input_scale")
    if weight.format.name == "int8":
        numbers, scales = matmuls.quantize_rows(x, scale)
        return numbers[:, : x.shape[1]].double().numpy() * scales.double().numpy()[:, None]
    if scale is not None:
        rows = (x.float() * scale).to(x.dtype)
    return rows.double().numpy()


def check(name, shape, rows, dtype, scales, has_bias, input_scale):
    outs, ins = shape
    weight = integer_weight(name, outs, ins, dtype=scales[0], min_dtype=scales[1], input_scale=input_scale)
    x = drawn(rows, ins, dtype=dtype)
    bias = drawn(outs, seed=2, dtype=dtype) if has_bias else None
    found = matmuls.linear(x, pack(weight), bias)
    assert found.shape == (rows, outs) and found.dtype == dtype
    values, magnitudes = values_of(weight)
    read = read_by(weight, x)
    unit = 2**-8 if dtype == torch.bfloat16 else 2**-11
    # A weight is rounded, and the scale before it where it has more bits.
    rounding = np.abs(read) @ (np.abs(values) * unit * 2).T if weight.format.group else 0.0
    exact = torch.bfloat16 if scales[0] == torch.bfloat16 else torch.float16
    if weight.format.group and weight.format.offset != "min" and exact == dtype == scales[0]:
        values, rounding = torch.from_numpy(values).float().to(dtype).double().numpy(), 0.0  # rounded once
    right, bound = read @ values.T, np.abs(read) @ magnitudes.T * 2**-16
    if bias is not None:
        right = right + bias.double().numpy()
    assert (np.abs(found.double().numpy() - right) <= bound + rounding + np.abs(right) * unit + 1e-12).all()


@quick
@given(
    shape=SHAPES,
    rows=ROWS,
    name=st.sampled_from(NAMES),
    scales=st.tuples(SCALES, SCALES),
    has_bias=st.booleans(),
    input_scale=st.booleans(),
)
def test_every_format_equals_float64_in_bfloat16(shape, rows, name, scales, has_bias, input_scale):
    check(name, shape, rows, torch.bfloat16, scales, has_bias, input_scale)


@quick
@given(shape=SHAPES, rows=ROWS, name=st.sampled_from(HALF), scales=st.tuples(SCALES, SCALES), has_bias=st.booleans())
def test_formats_of_4_bits_equal_float64_in_float16(shape, rows, name, scales, has_bias):
    check(name, shape, rows, torch.float16, scales, has_bias, input_scale=False)


@pytest.mark.parametrize("name", VARIED)
def test_columns_that_are_no_multiple_of_a_group_and_sums_of_several_splits_are_right(name, split):
    for is_split in (True, False):
        split(is_split)
        check(name, (70, 576), 5, torch.bfloat16, (torch.float16, torch.float16), has_bias=True, input_scale=True)
        check(name, (40, 1160), 3, torch.bfloat16, (torch.bfloat16, torch.bfloat16), has_bias=True, input_scale=False)


@quick
@given(shape=SHAPES, rows=ROWS, name=st.sampled_from(NAMES))
def test_sums_of_whole_numbers_are_exact(shape, rows, name):
    """With scales of 1, and rows of which the largest is 127, nothing is rounded but the result."""
    outs, ins = shape
    weight = integer_weight(name, outs, ins, unit=True)
    x = torch.randint(-127, 128, (rows, ins), generator=torch.Generator().manual_seed(3))
    x[:, 0] = 127
    numbers, _, zero, least = parts_of(weight)
    whole = (numbers - np.asarray(zero).astype(np.int64)) + np.asarray(least).astype(np.int64)
    right = torch.from_numpy(x.numpy() @ whole.T)
    assert torch.equal(matmuls.linear(x.bfloat16(), pack(weight)), right.float().bfloat16())


@quick
@given(shape=SHAPES, rows=ROWS, has_bias=st.booleans())
def test_int8_rows_are_multiplied_exactly_and_scaled_in_float32(shape, rows, has_bias):
    outs, ins = shape
    weight = integer_weight("int8", outs, ins)
    bias = drawn(outs, seed=2) if has_bias else None
    numbers, scales = matmuls.quantize_rows(drawn(rows, ins))
    found = matmuls.linear_int8(numbers, scales, pack(weight), bias)
    sums = numbers[:, :ins].numpy().astype(np.int64) @ weight.tensors["weight"].numpy().astype(np.int64).T
    right = sums.astype(np.float32) * weight.tensors["scale"].numpy() * scales.numpy()[:, None]
    right = right if bias is None else right + bias.float().numpy()
    assert torch.equal(found, torch.from_numpy(right).bfloat16())


# --- bits -------------------------------------------------------------------------------------------------------------


def awkward(ins, rows, seed=0):
    """Rows whose sums within a step are exact and lose bits from step to step: the first is large, and taken off last.

    With weights that are the same in the first and the last step, what remains shows every bit that was lost.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, ins), generator=generator).float()
    x *= 2.0 ** (torch.arange(ins) // 128 % 3 * 2 - 3)
    x[:, :128] *= 2**20
    x[:, -128:] = -x[:, :128]
    return x.bfloat16()


def awkward_weight(name, outs, ins):
    weight = integer_weight(name, outs, ins, unit=True)
    half = 64 if weight.format.bits == 4 else 128
    weight.tensors["weight"][:, -half:] = weight.tensors["weight"][:, :half]
    for key in ("zero", "min"):
        if key in weight.tensors:
            weight.tensors[key][:] = weight.tensors[key][:, :1]
    return weight


def in_order(x, weight, pieces, splits=True):
    """The sums in float32, as `kernels` says: piece by piece from zero in each split, then split by split."""
    numbers, _, zero, least = parts_of(weight)
    values = (numbers - zero + least).astype(np.float32)
    rows, ins = x.float().numpy(), x.shape[1]
    total = np.zeros((len(rows), len(values)), np.float32)
    for first in range(0, ins, 1024 if splits else ins):
        part = np.zeros_like(total)
        for start in range(first, min(first + (1024 if splits else ins), ins), pieces):
            part = part + rows[:, start : start + pieces] @ values[:, start : start + pieces].T  # this product is exact
        total = total + part
    return torch.from_numpy(total).bfloat16()


#: Formats whose order of sums is walked through: two of them are enough for each run.
WALKED = [
    name if i < 2 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(VARIED) if name != "int8"
]


@pytest.mark.parametrize("name", WALKED)
def test_sums_run_along_the_columns_in_one_order_whatever_the_rows_and_programs(name, split):
    outs, ins = 20, 1536
    weight = awkward_weight(name, outs, ins)
    packed, x = pack(weight), awkward(ins, 70)
    right = in_order(x, weight, 64)
    assert not torch.equal(right, in_order(x, weight, 64, splits=False)), "the rows do not show an order"
    for is_split in (True, False):
        split(is_split)
        for start, stop in [(69, 70), (3, 19), (0, 40), (0, 70)]:
            assert torch.equal(matmuls.linear(x[start:stop], packed), right[start:stop]), (is_split, start, stop)


def test_a_row_has_the_same_bits_alone_and_among_others(split):
    x = drawn(140, 330)
    for name in VARIED:
        packed = pack(integer_weight(name, 70, 330))
        split(is_split=False)
        few = matmuls.linear(x[:16], packed)
        for start, stop in [(0, 1), (3, 5), (9, 16)]:
            assert torch.equal(matmuls.linear(x[start:stop], packed), few[start:stop]), name
        if name == "int8":
            assert torch.equal(matmuls.linear(x, packed)[:16], few)


def test_every_split_is_waited_for_and_locks_are_left_as_they_were(split):
    split(is_split=True)
    for name in VARIED:
        packed = pack(integer_weight(name, 70, 1160))
        x = drawn(3, 1160)
        first = matmuls.linear(x, packed)
        assert not packed.tensors["locks"].any()
        assert torch.equal(matmuls.linear(x, packed), first)


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch):
    """Makes what is allocated and never written show."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poison)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_split", [True, False])
def test_what_lies_around_rows_and_in_new_memory_is_not_read(split, is_split):
    split(is_split)
    for name in VARIED[::2]:
        for ins, rows in ((1100, 18), (33, 2)):
            packed = pack(integer_weight(name, 50, ins, input_scale=rows == 2))
            around = torch.full((rows + 2, ins + 6), torch.nan).bfloat16()
            x = around[1:-1, 3:-3]
            x.copy_(drawn(rows, ins))
            found = matmuls.linear(x, packed)
            assert found.isfinite().all() and torch.equal(found, matmuls.linear(x.clone(), packed)), name


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_number_that_is_none_shows_it_and_harms_no_other(bad):
    for name in VARIED:
        packed = pack(integer_weight(name, 50, 130))
        x = drawn(4, 130)
        before = matmuls.linear(x, packed)
        x[2, 77] = bad
        with np.errstate(invalid="ignore"):
            after = matmuls.linear(x, packed)
        assert after[2].isfinite().sum() <= (5 if bad == torch.inf else 0), name  # infinity times a weight of 0 is NaN
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_rows_of_zeros_give_the_bias_and_tiny_ones_do_no_harm():
    bias = drawn(50, seed=3)
    for name in VARIED:
        x = torch.zeros(3, 130).bfloat16()
        x[1] = 1e-38
        found = matmuls.linear(x, pack(integer_weight(name, 50, 130)), bias)
        assert torch.equal(found[[0, 2]], bias.expand(2, -1))
        assert torch.equal(found[1], bias)


def test_outputs_and_groups_of_scale_zero_give_zeros_and_tiny_and_large_scales_do_no_harm():
    for name in VARIED:
        weight = integer_weight(name, 50, 130)
        for key in ("scale", "min"):
            if key in weight.tensors:
                weight.tensors[key][7] = 0
        if name == "int8":  # in float32: half floats have no such scale
            weight.tensors["scale"][8:10] = torch.tensor([1e-6 / 127, 1e4 / 127])
        x = drawn(9, 130)
        found = matmuls.linear(x, pack(weight))
        assert not found[:, 7].any() and found.isfinite().all()
        if name == "int8":
            right = x.double() @ weight.dequantize().double().t()
            assert ((found - right).abs() <= right.abs().amax(0) * 0.05)[:, 8:10].all() and found[:, 8].any()


def test_an_input_column_of_zeros_changes_nothing():
    for name in VARIED:
        weight, x = integer_weight(name, 50, 130), drawn(3, 130)
        x[:, 5] = 0
        found = matmuls.linear(x, pack(weight))
        numbers = weight.format.numbers(weight).clone()
        numbers[:, 5] = 3
        weight.tensors["weight"] = pack_nibbles(numbers) if weight.format.bits == 4 else numbers
        assert torch.equal(matmuls.linear(x, pack(weight)), found)


def test_no_rows_give_no_rows():
    for name in VARIED:
        assert matmuls.linear(torch.empty(0, 64).bfloat16(), pack(integer_weight(name, 50, 64))).shape == (0, 50)


def test_weights_that_are_not_packed_are_read_as_they_are():
    weight, x = integer_weight("int4_g32", 50, 64), drawn(3, 64, dtype=torch.float32)
    torch.testing.assert_close(matmuls.linear(x, weight), x @ weight.dequantize().t())


# --- what the plugin says of them -------------------------------------------------------------------------------------


def test_every_kernel_reads_what_it_says():
    first, second = matmuls.linear_kernels()
    assert (first.formats, first.dtypes) == (matmuls.FORMATS, {"bfloat16"})
    assert (second.formats, second.dtypes) == (set(HALF), {"float16"})
    for kernel in (first, second):
        (dtype,) = kernel.dtypes
        x = drawn(2, 40, dtype=getattr(torch, dtype))
        for name in sorted(kernel.formats):
            packed = kernel.pack(integer_weight(name, 20, 40))
            assert packed.format.name == kernel.packed and isinstance(packed.format, Packed)
            assert kernel.call(x, packed).dtype == x.dtype


def test_every_form_is_launched(monkeypatch, split):
    split(is_split=False)
    launched = set()
    launch = matmuls.Specialisation.launch

    def record(form, *args):
        launched.add(form.name)
        launch(form, *args)

    monkeypatch.setattr(matmuls.Specialisation, "launch", record)
    for name in VARIED:
        for rows in (1, 20, 70):
            for dtype in (torch.bfloat16, torch.float16) if name in HALF else (torch.bfloat16,):
                matmuls.linear(drawn(rows, 40, dtype=dtype), pack(integer_weight(name, 20, 40)))
    assert launched == {form.name for form in matmuls.specialisations()}
