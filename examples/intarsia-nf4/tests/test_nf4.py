"""The quantizer `nf4`: the contract of quantizers, and what is its own: the levels, the scales, the layout."""

from statistics import NormalDist
from typing import ClassVar

import numpy as np
import pytest
import torch

from intarsia.errors import CheckpointError, CompositionError
from intarsia.ops import embedding, linear
from intarsia.testing.quantizers import QuantizerContract
from intarsia.types import dense
from intarsia_nf4 import provide_quantizers
from intarsia_nf4.layout import LEVELS, Nf4Format, scales
from intarsia_nf4.options import Nf4Options
from intarsia_nf4.quantizer import Nf4Quantizer, quantize

BOTH = [Nf4Format(64), Nf4Format(32, double_quant=True)]
#: Half the widest gap between levels.
HALF_GAP = (LEVELS[1] - LEVELS[0]) / 2


class TestContract(QuantizerContract):
    def provider(self):
        return provide_quantizers()[0]


class TestContractOfDoubleQuantization(QuantizerContract):
    options: ClassVar = {"double_quant": True, "group": 32}

    def provider(self):
        return provide_quantizers()[0]


def weights(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


# --- levels -----------------------------------------------------------------------------------------------------------


def test_the_levels_are_the_quantiles_that_the_paper_says():
    """Eight evenly spaced quantiles of one half and nine of the other, which share 0; the ends are given half steps."""
    quantile, offset = NormalDist().inv_cdf, (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    expected = sorted([*above, 0.0, *below])
    assert np.allclose(LEVELS, np.array(expected) / max(expected), atol=2e-6)


def test_each_number_becomes_the_nearest_level_times_its_groups_largest_magnitude():
    numbers = weights(7, 150)
    made = quantize("w", numbers, Nf4Format(64)).dequantize().numpy()
    for row in range(7):
        for start in (0, 64, 128):
            group = numbers[row, start : start + 64].double().numpy()
            points = np.abs(group).max() * np.array(LEVELS)
            nearest = points[np.abs(group[:, None] - points).argmin(1)]
            assert np.allclose(made[row, start : start + 64], nearest, rtol=1e-6, atol=0)


def test_zeros_and_the_largest_of_each_group_are_exact():
    numbers = weights(5, 128)
    numbers[:, ::3] = 0
    made = quantize("w", numbers, Nf4Format(64)).dequantize()
    assert bool((made[:, ::3] == 0).all())
    for groups, found in zip(numbers.view(5, 2, 64).flatten(0, 1), made.view(5, 2, 64).flatten(0, 1), strict=True):
        assert found[groups.abs().argmax()] == groups[groups.abs().argmax()]


def test_normal_numbers_lose_less_than_in_sixteen_even_steps():
    numbers = weights(64, 512)
    groups = numbers.view(64, -1, 64)
    step = groups.abs().amax(-1, keepdim=True) / 8
    even = ((groups / step).round().clamp(-8, 7) * step).view_as(numbers)
    made = quantize("w", numbers, Nf4Format(64)).dequantize()
    assert (made - numbers).square().mean() < 0.9 * (even - numbers).square().mean()


# --- double quantization ----------------------------------------------------------------------------------------------


def test_scales_of_a_byte_are_off_by_half_a_step_of_their_rows_logarithms():
    numbers = weights(9, 640) * torch.logspace(-3, 2, 640)
    exact = numbers.view(9, -1, 32).abs().amax(-1).double()
    weight = quantize("w", numbers, Nf4Format(32, double_quant=True))
    half = torch.log2(exact.amax(-1) / exact.amin(-1)) / 255 / 2
    assert bool(((scales(weight).double() / exact).log2().abs() <= half[:, None] * 1.001 + 1e-6).all())


def test_scales_of_a_byte_cost_little_precision():
    numbers = weights(64, 1024)
    plain = (quantize("w", numbers, Nf4Format(64)).dequantize() - numbers).square().mean()
    twice = (quantize("w", numbers, Nf4Format(64, double_quant=True)).dequantize() - numbers).square().mean()
    assert twice < 1.01 * plain


@pytest.mark.parametrize("row", [torch.zeros(96), torch.full((96,), 0.3), torch.tensor([0.0] * 95 + [1e-40])])
def test_rows_without_a_spread_keep_their_scale(row):
    made = quantize("w", row[None], Nf4Format(32, double_quant=True)).dequantize()
    assert torch.allclose(made[0], row, rtol=1e-6, atol=0)


def test_a_group_that_is_far_smaller_than_its_neighbour_is_not_drowned():
    numbers = weights(4, 64)
    numbers[:, :32] *= 1e6
    made = quantize("w", numbers, Nf4Format(32, double_quant=True)).dequantize()
    off = (made - numbers).abs().view(4, 2, 32)
    assert bool((off <= 1.1 * HALF_GAP * numbers.abs().view(4, 2, 32).amax(-1, keepdim=True)).all())


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", BOTH)
def test_the_tensors_are_those_that_the_module_describes(layout):
    weight = quantize("w", weights(6, 97), layout)
    groups = -(-97 // layout.group)
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in weight.tensors.items()}
    if layout.double_quant:
        rows = {"low": ((6,), torch.float32), "step": ((6,), torch.float32)}
        assert shapes == {"weight": ((6, 49), torch.uint8), "scale": ((6, groups), torch.uint8), **rows}
    else:
        assert shapes == {"weight": ((6, 49), torch.uint8), "scale": ((6, groups), torch.float32)}
    assert weight.num_bytes == layout.num_bytes((6, 97))


@pytest.mark.parametrize("layout", BOTH)
def test_rows_and_columns_are_cut_at_groups_alone(layout):
    weight = quantize("w", weights(8, 200), layout)
    whole = weight.dequantize()
    assert torch.equal(weight.shard(0, 2, 5).dequantize(), whole[2:5])
    assert torch.equal(weight.shard(1, 64, 200).dequantize(), whole[:, 64:])
    assert torch.equal(weight.rows(torch.tensor([7, 0, 7])).dequantize(), whole[[7, 0, 7]])
    with pytest.raises(CompositionError, match=f"{layout.name} has a scale for each {layout.group}"):
        weight.shard(1, 0, 40)


@pytest.mark.parametrize("layout", BOTH)
def test_the_references_of_the_ops_read_it(layout):
    weight, x = quantize("w", weights(12, 70), layout), weights(3, 70, seed=1)
    exact = x.double() @ weight.dequantize().double().T
    assert torch.allclose(linear(x, weight).double(), exact, atol=1e-6)
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(embedding(ids, weight, torch.float32), weight.dequantize()[ids])


def test_a_weight_of_many_rows_is_made_in_pieces_without_a_seam(monkeypatch):
    numbers = weights(50, 64)
    whole = quantize("w", numbers, BOTH[1])
    monkeypatch.setattr("intarsia_nf4.quantizer._CHUNK", 7 * 64)
    pieces = quantize("w", numbers, BOTH[1])
    assert all(torch.equal(whole.tensors[key], pieces.tensors[key]) for key in whole.tensors)


def test_what_is_not_finite_is_refused_by_name():
    numbers = weights(4, 64)
    numbers[2, 3] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.out\.weight holds NaN or infinity, .*nf4_g64"):
        Nf4Quantizer(Nf4Options()).quantize("layers.0.out.weight", dense(numbers))
