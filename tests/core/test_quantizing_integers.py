"""Weight formats of whole numbers: numbers, parts, rows and joins, bit for bit, against a plain reading in float64."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import CompositionError
from intarsia.ops import embedding, linear
from intarsia.quantizing.integers import FORMATS, GROUPS, IntegerFormat, common, join, pack_nibbles, widen
from intarsia.types import Weight

quick = settings(max_examples=60, deadline=None)
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 300))
HALVES = (torch.bfloat16, torch.float16)
SCALES = st.sampled_from([*HALVES, torch.float32])
every_format = st.sampled_from(FORMATS)


def made(layout, shape, *, scales=torch.bfloat16, scaled=False, seed=0):
    """A random weight that uses every whole number its format has; some groups have scale 0."""
    outs, ins = shape
    generator = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if layout.bits == 8 else (0, 16)
    q = torch.randint(low, high, shape, generator=generator)
    tensors = {"weight": q.to(torch.int8) if layout.bits == 8 else pack_nibbles(q)}
    sizes = (outs,) if layout.group is None else (outs, -(-ins // layout.group))
    scale = torch.randn(sizes, generator=generator) * 10.0 ** torch.randint(-3, 2, sizes, generator=generator)
    scale[torch.rand(sizes, generator=generator) < 0.1] = 0
    tensors["scale"] = scale if layout.group is None else scale.to(scales)
    if layout.offset == "zero":
        tensors["zero"] = torch.randint(0, 16, sizes, generator=generator, dtype=torch.uint8)
    if layout.offset == "min":
        tensors["min"] = torch.randn(sizes, generator=generator).to(scales)
    if scaled:
        tensors["input_scale"] = torch.rand(ins, generator=generator) + 0.5
    return Weight(layout, tensors, shape), q


def plainly(weight, q):
    """Read a weight number by number, as the module's table says, in float64."""
    layout, (outs, ins) = weight.format, weight.shape
    facts = {key: tensor.double().tolist() for key, tensor in weight.tensors.items() if key != "weight"}

    def value(n, c):
        def at(key):
            return facts[key][n] if layout.group is None else facts[key][n][c // layout.group]

        zero = at("zero") if layout.offset == "zero" else 8 if layout.bits == 4 and layout.offset == "none" else 0
        number = (q[n, c].item() - zero) * at("scale") + (at("min") if layout.offset == "min" else 0)
        return number * facts["input_scale"][c] if "input_scale" in facts else number

    return torch.tensor([[value(n, c) for c in range(ins)] for n in range(outs)], dtype=torch.float64)


# --- names and numbers ------------------------------------------------------------------------------------------------


def test_names_are_unique_and_say_what_a_format_is():
    names = [layout.name for layout in FORMATS]
    assert len(set(names)) == len(names) == 2 * (1 + 4 * 2 + 4 * 3)
    assert {"int8", "int8_a16", "int8_g32", "int8_g16_min", "int4_g64", "int4_g128_zero", "int4_g32_min_a16"} < set(
        names
    )


@pytest.mark.parametrize(
    ("bits", "group", "offset"), [(4, None, "none"), (8, None, "min"), (8, 32, "zero"), (4, 48, "none"), (8, 0, "none")]
)
def test_formats_that_no_kernel_could_know_cannot_be_made(bits, group, offset):
    with pytest.raises(AssertionError):
        IntegerFormat(bits, group, offset)


@quick
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_nibbles_are_packed_two_a_byte_and_read_back(shape, seed):
    q = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed))
    packed = pack_nibbles(q)
    assert packed.dtype == torch.uint8 and packed.shape == (shape[0], math.ceil(shape[1] / 2))
    for n, c in [(0, 0), (shape[0] - 1, shape[1] - 1), (0, shape[1] // 2)]:
        assert (packed[n, c // 2].item() >> (4 * (c % 2))) & 15 == q[n, c]
    assert shape[1] % 2 == 0 or (packed[:, -1] >> 4 == 8).all()
    assert torch.equal(IntegerFormat(4, 32).numbers(Weight(IntegerFormat(4, 32), {"weight": packed}, shape)), q)


@quick
@given(layout=every_format, shape=SHAPES, scales=SCALES, scaled=st.booleans(), seed=st.integers(0, 99))
def test_a_weight_is_what_the_table_says(layout, shape, scales, scaled, seed):
    weight, q = made(layout, shape, scales=scales, scaled=scaled, seed=seed)
    assert torch.equal(layout.numbers(weight).long(), q)
    found, expected = weight.dequantize(), plainly(weight, q)
    assert found.dtype == torch.float32 and found.shape == shape
    # Each of up to three steps rounds to float32; of `q * scale + min` the sum can be far smaller than its parts.
    parts = expected.abs().amax() if layout.offset == "min" else expected.abs()
    assert ((found.double() - expected).abs() <= parts * 2**-21).all()


@quick
@given(layout=every_format, shape=SHAPES, seed=st.integers(0, 99))
def test_bytes_are_as_announced(layout, shape, seed):
    weight, _ = made(layout, shape, seed=seed)
    assert weight.num_bytes == layout.num_bytes(shape)


@pytest.mark.parametrize(("columns", "groups"), [(576, 5), (128, 1), (129, 2), (48, 1), (1, 1)])
def test_the_last_group_may_be_smaller(columns, groups):
    """Q03: 576 columns are four groups of 128 and one of 64."""
    weight, q = made(IntegerFormat(4, 128), (3, columns))
    assert weight.tensors["scale"].shape == (3, groups)
    torch.testing.assert_close(weight.dequantize().double(), plainly(weight, q), rtol=0, atol=0)


# --- products ---------------------------------------------------------------------------------------------------------


@quick
@given(layout=every_format, shape=SHAPES, rows=st.integers(1, 17), scaled=st.booleans(), has_bias=st.booleans())
def test_a_product_equals_float64(layout, shape, rows, scaled, has_bias):
    weight, q = made(layout, shape, scaled=scaled)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1))
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)) if has_bias else None
    exact = plainly(weight, q)
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    # Of each output, the sum of its terms' magnitudes is what rounding goes by.
    bound = (x.double().abs() @ exact.abs().T + 1) * 2**-19
    if layout.offset == "min":
        bound = bound + x.double().abs().sum(1, keepdim=True) * exact.abs().amax() * 2**-19
    assert ((linear(x, weight, bias).double() - expected).abs() <= bound).all()


@quick
@given(layout=every_format, shape=SHAPES)
def test_an_input_scale_multiplies_activations(layout, shape):
    weight, _ = made(layout, shape, scaled=True)
    bare = Weight(layout, {key: tensor for key, tensor in weight.tensors.items() if key != "input_scale"}, shape)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1)).double()
    by_input = (x * weight.tensors["input_scale"].double()) @ bare.dequantize().double().T
    by_weight = x @ weight.dequantize().double().T
    assert ((by_input - by_weight).abs() <= (x.abs() @ weight.dequantize().double().abs().T) * 2**-22).all()


# --- parts ------------------------------------------------------------------------------------------------------------


@quick
@given(layout=every_format, shape=SHAPES, scaled=st.booleans(), data=st.data())
def test_parts_have_the_bits_of_the_whole(layout, shape, scaled, data):
    weight, _ = made(layout, shape, scaled=scaled)
    whole, (outs, ins) = weight.dequantize(), shape
    start = data.draw(st.integers(0, outs - 1))
    stop = data.draw(st.integers(start + 1, outs))
    part = weight.shard(0, start, stop)
    assert part.format == layout and part.shape == (stop - start, ins)
    assert torch.equal(part.dequantize(), whole[start:stop])
    step = layout.group or 1
    start = step * data.draw(st.integers(0, (ins - 1) // step))
    stop = min(ins, start + step * data.draw(st.integers(1, 9)))
    part = weight.shard(1, start, stop)
    assert part.format == layout and part.shape == (outs, stop - start)
    assert torch.equal(part.dequantize(), whole[:, start:stop])
    assert part.num_bytes == layout.num_bytes(part.shape) + (4 * (stop - start) if scaled else 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 48), (16, 64), (32, 175), (1, 176)])
def test_a_group_is_not_cut(start, stop):
    weight, _ = made(IntegerFormat(4, 32, "zero"), (2, 176))
    with pytest.raises(CompositionError, match=f"columns {start} to {stop} of 176 cut a group: int4_g32_zero has"):
        weight.shard(1, start, stop)


@quick
@given(layout=every_format, shape=SHAPES, scaled=st.booleans(), data=st.data())
def test_rows_are_looked_up_in_any_order(layout, shape, scaled, data):
    weight, _ = made(layout, shape, scaled=scaled)
    index = torch.tensor(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=7)), dtype=torch.int64)
    rows = weight.rows(index)
    assert rows.shape == (len(index), shape[1])
    assert torch.equal(rows.dequantize(), weight.dequantize()[index])
    assert torch.equal(embedding(index, weight, torch.float32), weight.dequantize()[index])


# --- formats that meet ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("int4_g32", "int4_g32"), "int4_g32"),
        (("int4_g32", "int4_g32_min"), "int4_g32_min"),
        (("int4_g32_min", "int8_g32"), "int8_g32_min"),
        (("int4_g32", "int8_g32"), "int8_g32"),
        (("int4_g128", "int4_g32", "int8_g64"), "int8_g32"),
        (("int8_g16", "int4_g32_min"), "int8_g16_min"),
        (("int4_g32_a16", "int4_g32_min_a16"), "int4_g32_min_a16"),
        (("int4_g32_zero", "int4_g32_zero"), "int4_g32_zero"),
        (("int4_g32_zero", "int4_g32"), None),
        (("int4_g32_zero", "int4_g64_zero"), None),
        (("int8", "int8_g32"), None),
        (("int4_g32", "int4_g32_a16"), None),
        (("int8", "int8"), "int8"),
    ],
)
def test_formats_have_the_narrowest_one_in_common(names, expected):
    by_name = {layout.name: layout for layout in FORMATS}
    found = common([by_name[name] for name in names])
    assert (None if found is None else found.name) == expected
    assert common([by_name[name] for name in reversed(names)]) == found


@settings(max_examples=150, deadline=None)
@given(first=every_format, second=every_format, shape=SHAPES, scales=st.sampled_from(HALVES), scaled=st.booleans())
def test_widening_keeps_every_bit(first, second, shape, scales, scaled):
    target = common([first, second])
    if target is None:
        return
    weight, _ = made(first, shape, scales=scales, scaled=scaled)
    wide = widen(weight, target)
    assert wide.format == target and wide.shape == shape
    assert torch.equal(wide.dequantize(), weight.dequantize())
    assert set(wide.tensors) == {"weight", "scale"} | ({"min"} if target.offset == "min" else set()) | (
        {"zero"} if target.offset == "zero" else set()
    ) | ({"input_scale"} if scaled else set())
    assert wide.num_bytes == target.num_bytes(shape) + (4 * shape[1] if scaled else 0)


@pytest.mark.parametrize("size", [65504.0, -9000.0, 6e-8])
def test_the_largest_and_smallest_half_float_scales_are_widened_exactly(size):
    weight, q = made(IntegerFormat(4, 32), (2, 64), scales=torch.float16)
    weight.tensors["scale"][:] = size
    wide = widen(weight, IntegerFormat(4, 32, "min"))
    assert torch.equal(wide.dequantize(), weight.dequantize())
    assert torch.equal(wide.dequantize().double(), plainly(weight, q))


@pytest.mark.parametrize("other", ["none", "min"])
def test_scales_of_32_bits_are_widened_up_to_their_rounding(other):
    weight, q = made(IntegerFormat(4, 64), (3, 130), scales=torch.float32)
    wide = widen(weight, IntegerFormat(4, 32, other))
    bound = plainly(weight, torch.full_like(q, 16)).abs() * 2**-23
    assert ((wide.dequantize().double() - plainly(weight, q)).abs() <= bound).all()


@quick
@given(
    layouts=st.lists(every_format, min_size=1, max_size=4),
    ins=st.integers(1, 300),
    scales=st.lists(st.sampled_from(HALVES), min_size=4, max_size=4),
    scaled=st.booleans(),
)
def test_weights_laid_end_to_end_keep_every_bit(layouts, ins, scales, scaled):
    """Scales of two 16-bit dtypes meet in 32 bits."""
    if common(layouts) is None:
        layouts = [layouts[0]] * len(layouts)
    parts = [made(layout, (n + 1, ins), scales=scales[n], scaled=False, seed=n)[0] for n, layout in enumerate(layouts)]
    if scaled:
        for part in parts:
            part.tensors["input_scale"] = torch.linspace(0.5, 2, ins)
    whole = join(parts)
    assert whole.format == common(layouts) and whole.shape == (sum(part.shape[0] for part in parts), ins)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_weights_whose_inputs_are_scaled_otherwise_are_not_laid_end_to_end():
    layout = IntegerFormat(4, 32)
    parts = [made(layout, (2, 40), scaled=scaled)[0] for scaled in (True, False)]
    with pytest.raises(AssertionError):
        join(parts)


def test_every_group_divides_the_larger_ones():
    assert all(b % a == 0 for a, b in pairwise(GROUPS))
