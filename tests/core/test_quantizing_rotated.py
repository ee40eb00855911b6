"""Rotated weights: the rotation against numpy, weights read back, rows and columns."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import CompositionError
from intarsia.quantizing.rotated import BLOCK, rotate, rotate_rows, spread
from integer_weights import ROTATED, integer_weight, values_of


def hadamard(order):
    """Sylvester's matrix over its norm, in float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / order**0.5


def rotated(rows):
    """Rows in float64 with their whole blocks multiplied by it."""
    found = rows.copy()
    for start in range(0, rows.shape[1] // BLOCK * BLOCK, BLOCK):
        found[:, start : start + BLOCK] = rows[:, start : start + BLOCK] @ hadamard(BLOCK)
    return found


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 7), columns=st.integers(0, 300), power=st.integers(-30, 30))
def test_rotation_is_the_hadamard_matrix_on_whole_blocks(rows, columns, power):
    numbers = drawn(rows, columns, seed=columns) * 10.0**power
    found, right = rotate(numbers).double().numpy(), rotated(numbers.double().numpy())
    assert (np.abs(found - right) <= 1e-6 * rotated_sizes(numbers)).all()
    assert (np.abs(rotate(numbers.double()).numpy() - right) <= 1e-14 * rotated_sizes(numbers)).all()
    assert np.array_equal(found[:, columns // BLOCK * BLOCK :], right[:, columns // BLOCK * BLOCK :])
    by_product = rotate_rows(numbers).double().numpy()
    assert (np.abs(by_product - right) <= 1e-5 * rotated_sizes(numbers)).all()


def rotated_sizes(numbers):
    return spread(numbers.double().abs()).numpy() + 1e-300


@given(columns=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_spread_bounds_what_is_rotated_and_is_reached(columns):
    numbers = drawn(40, columns, seed=columns).double()
    assert (rotate(numbers).abs() <= spread(numbers.abs()) * (1 + 1e-12)).all()
    ones = torch.ones(columns, dtype=torch.float64)
    assert rotate(ones)[0] == spread(ones)[0] == (8 if columns >= BLOCK else 1)


@pytest.mark.parametrize("name", sorted(ROTATED))
@pytest.mark.parametrize("shape", [(5, 64), (9, 200), (3, 40)])
def test_a_weight_is_its_rotated_numbers_times_its_input_scale(name, shape):
    weight = integer_weight(name, *shape, input_scale=True)
    right = rotated(values_of(weight)[0]) * weight.tensors["input_scale"].double().numpy()
    assert np.allclose(weight.dequantize().double().numpy(), right, rtol=1e-5, atol=1e-6)


def test_rows_and_columns_are_those_of_the_whole():
    weight = integer_weight("int8_g128_rotated", 11, 300, input_scale=True)
    whole = weight.dequantize()
    assert weight.format.column_step == 128
    assert torch.equal(weight.rows(slice(2, 7)).dequantize(), whole[2:7])
    assert torch.equal(weight.rows(torch.tensor([9, 0])).dequantize(), whole[[9, 0]])
    for start, stop in ((0, 128), (128, 300), (256, 300)):
        assert torch.equal(weight.shard(1, start, stop).dequantize(), whole[:, start:stop])
    assert torch.equal(weight.shard(0, 3, 5).dequantize(), whole[3:5])


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 128), (0, 100)])
def test_columns_are_not_cut_within_a_block(start, stop):
    weight = integer_weight("int8_rotated", 4, 200)
    with pytest.raises(
        CompositionError, match=rf"columns {start} to {stop} of 200 cut a block: int8_rotated rotates each 64"
    ):
        weight.shard(1, start, stop)
