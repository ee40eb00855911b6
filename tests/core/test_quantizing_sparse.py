"""The 2:4 formats: kept numbers stay bit for bit, masks of more than two of four are refused, parts are parts."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import CheckpointError, CompositionError
from intarsia.ops import linear
from intarsia.quantizing.sparse import SparseFormat, best_two, check_mask, compress
from intarsia.types import Weight

DTYPES = ("float32", "float16", "bfloat16", "int8")
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 70))
quick = settings(max_examples=25, deadline=None)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_mask(outs, ins, seed=0):
    """Of every four columns none, one or two, anywhere."""
    keys = torch.rand(outs, -(-ins // 4), 4, generator=generator(seed))
    counts = torch.randint(0, 3, (*keys.shape[:2], 1), generator=generator(seed + 1))
    return (keys.argsort(-1).argsort(-1) < counts).flatten(1)[:, :ins]


def numbers(outs, ins, dtype, seed=0):
    """Numbers of any size and none of them 0."""
    if dtype == "int8":
        found = torch.randint(1, 128, (outs, ins), generator=generator(seed), dtype=torch.int8)
        return found * torch.where(torch.rand(outs, ins, generator=generator(seed + 1)) < 0.5, 1, -1).to(torch.int8)
    found = torch.randn(outs, ins, generator=generator(seed)) * 2.0 ** torch.randint(-8, 9, (outs, ins))
    found = found.to(getattr(torch, dtype))
    return torch.where(found == 0, torch.ones_like(found), found)


def packed(outs, ins, dtype, seed=0):
    """A weight, and the matrix that it stands for."""
    whole, mask = numbers(outs, ins, dtype, seed), random_mask(outs, ins, seed + 7)
    scale = torch.rand(outs, generator=generator(seed)) if dtype == "int8" else None
    masked = torch.where(mask, whole, 0)
    return compress("w", whole, mask, scale), masked if scale is None else masked.float() * scale[:, None]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def by_hand(weight):
    """The whole numbers of a weight, a number at a time, as the module's table says."""
    outs, ins = weight.shape
    whole = torch.zeros(outs, -(-ins // 4) * 4, dtype=weight.tensors["values"].dtype)
    for row in range(outs):
        for group in range(whole.shape[1] // 4):
            half = int(weight.tensors["indices"][row, group // 2]) >> 4 * (group % 2) & 15
            first, second = half & 3, half >> 2
            assert first < second
            whole[row, 4 * group + first] = weight.tensors["values"][row, 2 * group]
            whole[row, 4 * group + second] = weight.tensors["values"][row, 2 * group + 1]
    assert not whole[:, ins:].any()
    return whole[:, :ins]


@quick
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_what_is_kept_comes_back_bit_for_bit_and_lies_as_documented(shape, dtype):
    weight, masked = packed(*shape, dtype)
    assert weight.format == SparseFormat(dtype) and weight.shape == shape
    assert torch.equal(bits(weight.dequantize()), bits(masked))
    whole = by_hand(weight)
    assert torch.equal(whole if dtype != "int8" else whole.float() * weight.tensors["scale"][:, None], masked)
    groups = -(-shape[1] // 4)
    assert weight.tensors["indices"].shape == (shape[0], -(-groups // 2))
    assert groups % 2 == 0 or (weight.tensors["indices"][:, -1] >> 4 == 4).all()


@quick
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_bytes_are_as_announced(shape, dtype):
    weight, _ = packed(*shape, dtype)
    assert weight.num_bytes == SparseFormat(dtype).num_bytes(shape)


def test_bytes_are_near_half():
    assert SparseFormat("bfloat16").num_bytes((64, 64)) == 64 * 64 * 1.125
    assert SparseFormat("int8").num_bytes((64, 64)) == 64 * 64 * 0.625 + 64 * 4
    assert SparseFormat("float32").num_bytes((64, 64)) == 64 * 64 * 2.125


def test_names_say_whether_values_are_int8():
    assert [SparseFormat(dtype).name for dtype in DTYPES] == ["sparse24", "sparse24", "sparse24", "sparse24_int8"]


def test_numbers_that_are_not_kept_may_be_anything():
    whole = torch.tensor([[1.0, float("nan"), float("inf"), 2.0]])
    weight = compress("w", whole, torch.tensor([[True, False, False, True]]))
    assert weight.dequantize().tolist() == [[1.0, 0.0, 0.0, 2.0]]


@pytest.mark.parametrize("shape", [(30, 36), (7, 34), (64, 64)])
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_masked_matrix(shape, rows, has_bias):
    """W01, columns that are no multiple of four included; groups with three and four zeros are among them."""
    weight, masked = packed(*shape, "float32")
    x = torch.randn(rows, shape[1], generator=generator(3))
    bias = torch.randn(shape[0], generator=generator(4)) if has_bias else None
    found = linear(x, weight, bias)
    right = x.double() @ masked.double().T + (0 if bias is None else bias.double())
    assert found.shape == (rows, shape[0])
    assert (found - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("columns", [(0, 1, 2), (0, 1, 2, 3), (1, 2, 3)])
def test_a_mask_that_keeps_more_than_two_of_four_is_refused_with_its_place(columns):
    mask = random_mask(9, 40)
    mask[5, 12:16] = False
    mask[5, [12 + column for column in columns]] = True
    place = f"layers.0.qkv.weight is not 2:4 sparse: row 5 keeps {len(columns)} of its columns 12 to 15"
    with pytest.raises(CheckpointError, match=re.escape(place)):
        check_mask("layers.0.qkv.weight", mask)
    with pytest.raises(CheckpointError, match=re.escape(place)):
        compress("layers.0.qkv.weight", torch.ones(9, 40), mask)


def test_a_dense_matrix_is_refused_and_not_changed():
    with pytest.raises(CheckpointError, match="w is not 2:4 sparse: row 0 keeps 4 of its columns 0 to 3"):
        compress("w", torch.ones(3, 8))


def test_a_last_group_of_three_keeps_two_at_most():
    check_mask("w", torch.tensor([[True, True, False, False, True, True]]))
    with pytest.raises(CheckpointError, match="row 0 keeps 3 of its columns 4 to 6"):
        check_mask("w", torch.tensor([[True, True, False, False, True, True, True]]))


@quick
@given(shape=SHAPES, seed=st.integers(0, 99), levels=st.sampled_from([2, 5, 1000]))
def test_the_best_two_of_four_are_those_that_a_stable_sort_puts_first(shape, seed, levels):
    scores = torch.randint(0, levels, shape, generator=generator(seed)).float()
    mask = best_two(scores)
    for row in range(shape[0]):
        for start in range(0, shape[1], 4):
            group = scores[row, start : start + 4].tolist()
            right = sorted(range(len(group)), key=lambda i: -group[i])[:2]
            assert mask[row, start : start + 4].nonzero().flatten().tolist() == sorted(right)


def test_scores_of_minus_infinity_still_come_before_columns_that_are_not_there():
    assert best_two(torch.full((2, 6), -torch.inf)).sum(1).tolist() == [4, 4]
    assert best_two(torch.zeros(1, 1)).tolist() == [[True]]


@quick
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), data=st.data())
def test_parts_are_parts(shape, dtype, data):
    weight, masked = packed(*shape, dtype)
    outs, ins = shape
    start = data.draw(st.integers(0, outs))
    stop = data.draw(st.integers(start, outs))
    assert torch.equal(weight.shard(0, start, stop).dequantize(), masked[start:stop])
    index = torch.tensor(data.draw(st.lists(st.integers(0, outs - 1), max_size=5)), dtype=torch.long)
    assert torch.equal(weight.rows(index).dequantize(), masked[index])
    groups = -(-ins // 4)
    first = data.draw(st.integers(0, groups - 1))
    last = data.draw(st.integers(first + 1, groups))
    part = weight.shard(1, 4 * first, min(4 * last, ins))
    # Packed as if it had been compressed alone, whether its first group lay in a low half byte or in a high one.
    alone = compress("w", weight.format.numbers(part), by_mask(part), part.tensors.get("scale"))
    assert torch.equal(part.dequantize(), masked[:, 4 * first : 4 * last])
    assert part.num_bytes == weight.format.num_bytes(part.shape) == alone.num_bytes
    again = part.shard(1, 0, part.shape[1])
    assert torch.equal(again.dequantize(), part.dequantize())


def by_mask(weight: Weight):
    return weight.format.numbers(weight) != 0


@pytest.mark.parametrize(("start", "stop"), [(2, 8), (0, 6), (4, 10), (1, 2)])
def test_columns_that_cut_a_group_are_refused(start, stop):
    weight, _ = packed(3, 34, "float32")
    with pytest.raises(CompositionError, match=f"columns {start} to {stop} of 34 cut a group: sparse24 keeps 2 of"):
        weight.shard(1, start, stop)


def test_tensor_parallel_parts_of_smollm2_add_up():
    """Three ranks of 192 columns each, of 576: a product is the sum of theirs."""
    weight, masked = packed(20, 576, "float32")
    x = torch.randn(5, 576, generator=generator(1)).double()
    parts = [weight.shard(1, start, start + 192) for start in (0, 192, 384)]
    total = sum(x[:, i * 192 : (i + 1) * 192] @ part.dequantize().double().T for i, part in enumerate(parts))
    assert torch.allclose(total, x @ masked.double().T)
