"""The int4 quantizer's GPTQ: columns that make up for the rounding errors of those before them."""

import pytest
import torch

from intarsia.errors import CheckpointError, ConfigError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import dense
from intarsia_int4 import gptq, provide_quantizers, rounding
from intarsia_int4.options import Int4Options

NAME = "layers.0.out.weight"


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows, columns, *, rank=12, seed=0):
    """Inputs that go along with one another, as those of language models do."""
    return drawn(rows, rank, seed=seed) @ drawn(rank, columns, seed=seed + 1) + 0.5 * drawn(
        rows, columns, seed=seed + 2
    )


def seen(x):
    return InputStatistics(x.abs().amax(0), x.square().mean(0), x.bfloat16())


def quantizer(tmp_path, statistics, **options):
    path = tmp_path / "calibration"
    Calibration({"layers.0.out": statistics}, "a model", 100).save(path)
    [provider] = provide_quantizers()
    return provider.build(PartContext(spec=None, options=Int4Options(calibration=str(path), **options)))


def output_error(weight, w, x):
    return (x.double() @ (weight.dequantize().double() - w.double()).T).square().sum().item()


def one_at_a_time(w, statistics, layout, scales, zeros):
    """Round column by column; spread each error by least squares over the columns behind, inverting anew each time."""
    x = statistics.sample.double()
    sizes = statistics.mean_square.double().sqrt()
    correlation = torch.corrcoef(torch.cat((x, -x)).T)  # of means that are 0: uncentred
    moments = (0.7 * correlation + 0.3 * torch.eye(len(sizes))) * sizes * sizes[:, None]
    left, numbers = w.double().clone(), torch.empty(w.shape, dtype=torch.int64)
    for c in range(w.shape[1]):
        scale, zero = scales[:, c // layout.group].double(), zeros[:, c // layout.group].double()
        numbers[:, c] = ((left[:, c] / scale).round() + zero).clamp(0, 15)
        inverse = torch.linalg.inv(moments[c:, c:])
        error = left[:, c] - (numbers[:, c] - zero) * scale
        left[:, c:] -= error[:, None] / inverse[0, 0] * inverse[0]
    return numbers


@pytest.mark.parametrize("offset", ["none", "zero"])
def test_errors_are_spread_as_least_squares_spreads_them(offset):
    w, statistics = drawn(30, 80), seen(correlated(100, 80))
    layout = IntegerFormat(4, 32, offset)
    weight = gptq.quantize("w", w, layout, gptq.feedback(statistics), statistics.mean_square, clip=True)
    scales = weight.tensors["scale"]
    zeros = weight.tensors["zero"] if offset == "zero" else torch.full(scales.shape, 8)
    expected = one_at_a_time(w, statistics, layout, scales, zeros)
    # Float32 turns a tie now and then, and what follows in that row with it.
    alike = (layout.numbers(weight).long() == expected).all(1)
    assert alike.float().mean() > 0.8


def test_inputs_that_go_along_with_none_need_no_feedback():
    x = torch.eye(64).repeat(2, 1) * torch.linspace(0.1, 3, 64)
    assert torch.equal(gptq.feedback(seen(x)), torch.eye(64))
    w, layout, importance = drawn(9, 64), IntegerFormat(4, 32), x.square().mean(0)
    fed = gptq.quantize("w", w, layout, torch.eye(64), importance, clip=True)
    plain = rounding.quantize("w", w, layout, clip=True, importance_C=importance)
    assert all(torch.equal(fed.tensors[key], plain.tensors[key]) for key in plain.tensors)


@pytest.mark.parametrize(
    "options", [{}, {"awq": False}, {"awq": False, "clip": False}, {"zero_points": True}, {"group": 128}]
)
def test_feedback_lowers_the_output_error_of_text_that_calibration_never_saw(tmp_path, options):
    w, x = drawn(64, 200), correlated(600, 200)
    without = {"clip": True} if options.get("clip") is False else {}
    plain = quantizer(tmp_path, seen(x[:300]), **options | without).quantize(NAME, dense(w))
    fed = quantizer(tmp_path, seen(x[:300]), gptq=True, **options).quantize(NAME, dense(w))
    assert output_error(fed, w, x[300:]) < 0.7 * output_error(plain, w, x[300:])


def test_awq_and_feedback_go_together(tmp_path):
    w, x = drawn(64, 200), correlated(300, 200) * torch.linspace(-3, 3, 200).exp()
    nearest = rounding.quantize("w", w, IntegerFormat(4, 64))
    errors = {
        key: output_error(quantizer(tmp_path, seen(x), **options).quantize(NAME, dense(w)), w, x)
        for key, options in {"awq": {}, "gptq": {"awq": False, "gptq": True}, "both": {"gptq": True}}.items()
    }
    assert errors["both"] < 0.7 * errors["awq"] and errors["both"] < errors["gptq"]
    assert errors["both"] < 0.4 * output_error(nearest, w, x)


@pytest.mark.parametrize("columns", [33, 64, 100, 129])
def test_ragged_groups_and_announced_bytes(tmp_path, columns):
    w, x = drawn(9, columns), correlated(100, columns)
    for options in ({"gptq": True}, {"gptq": True, "awq": False, "zero_points": True}):
        q = quantizer(tmp_path, seen(x), **options)
        weight = q.quantize(NAME, dense(w))
        assert weight.shape == (9, columns) and all(tensor.is_contiguous() for tensor in weight.tensors.values())
        assert weight.num_bytes == q.num_bytes(NAME, w.shape)
        assert output_error(weight, w, x) < output_error(rounding.quantize("w", w, IntegerFormat(4, 64)), w, x)


def test_columns_and_linears_that_calibration_never_reached_are_rounded_as_without(tmp_path):
    w, x = drawn(9, 96), correlated(100, 96)
    x[:, 40:50] = 0
    weight = quantizer(tmp_path, seen(x), gptq=True).quantize(NAME, dense(w))
    assert weight.dequantize().isfinite().all() and output_error(weight, w, x) < 0.02 * (x @ w.T).square().sum()
    nothing = InputStatistics(torch.zeros(96), torch.zeros(96), torch.zeros(0, 96).bfloat16())
    weight = quantizer(tmp_path, nothing, gptq=True).quantize(NAME, dense(w))
    assert torch.equal(weight.dequantize(), rounding.quantize("w", w, IntegerFormat(4, 64), clip=True).dequantize())


def test_zero_rows_and_groups_stay_zeros_where_no_error_comes_in(tmp_path):
    w = drawn(6, 128)
    w[1] = 0
    w[3, :64] = 0
    weight = quantizer(tmp_path, seen(correlated(100, 128)), gptq=True).quantize(NAME, dense(w)).dequantize()
    assert not weight[1].any() and not weight[3, :64].any() and weight.isfinite().all()


def test_large_weights_are_quantized_in_pieces_alike(tmp_path, monkeypatch):
    w, q = drawn(50, 96), quantizer(tmp_path, seen(correlated(100, 96)), gptq=True)
    whole = q.quantize(NAME, dense(w)).dequantize()
    monkeypatch.setattr("intarsia_int4.gptq._CHUNK", 960)
    pieces = q.quantize(NAME, dense(w)).dequantize()
    assert (whole == pieces).all(1).float().mean() > 0.8  # products of other sizes may round a tie otherwise


def test_the_weight_and_the_calibration_that_are_given_are_left_as_they_were(tmp_path):
    w, statistics = drawn(9, 96), seen(correlated(100, 96))
    before = [t.clone() for t in (w, statistics.largest, statistics.mean_square, statistics.sample)]
    feedback = gptq.feedback(statistics)
    gptq.quantize("w", w, IntegerFormat(4, 32), feedback, statistics.mean_square, clip=True)
    after = (w, statistics.largest, statistics.mean_square, statistics.sample)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_by_name(tmp_path, bad):
    w = drawn(5, 64)
    w[4, 8] = bad
    for awq in (True, False):
        with pytest.raises(CheckpointError, match=r"layers\.0\.out\.weight holds NaN or infinity"):
            quantizer(tmp_path, seen(correlated(100, 64)), gptq=True, awq=awq).quantize(NAME, dense(w))


def test_gptq_without_calibration_is_refused():
    with pytest.raises(ConfigError, match="gptq = true needs the inputs of each layer") as caught:
        Int4Options(gptq=True)
    assert caught.value.field == "quantizer.calibration"
