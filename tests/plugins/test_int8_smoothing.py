"""SmoothQuant: equation 4 in float64, columns that say nothing, and products that stay what they were."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import CheckpointError, ConfigError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.types import dense
from intarsia_int8 import provide_quantizers
from intarsia_int8.options import Int8Options
from intarsia_int8.smoothing import column_size, smoothing_scale
from models import tiny_llama


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(sample):
    return InputStatistics(sample.abs().amax(0), sample.pow(2).mean(0), sample.bfloat16())


def calibration(tmp_path, inputs):
    path = tmp_path / "calibration.safetensors"
    Calibration({name: inputs_of(sample) for name, sample in inputs.items()}, "tiny", 100).save(path)
    return str(path)


def quantizer(path, **options):
    [provider] = provide_quantizers()
    options = {"smooth": 0.5, "calibration": path} | options
    return provider.build(PartContext(spec=None, options=Int8Options(**options)))


@settings(max_examples=60, deadline=None)
@given(columns=st.integers(1, 50), exponent=st.floats(0, 1), power=st.integers(-30, 30))
def test_it_is_equation_4_of_root_mean_squares_with_a_geometric_mean_of_1(columns, exponent, power):
    x, w = drawn(columns, seed=1).abs() + 0.1, (drawn(columns, seed=2).abs() + 0.1) * 10.0**power
    found = smoothing_scale(x, w, exponent).double().numpy()
    wanted = x.double().numpy() ** exponent / w.double().numpy() ** (1 - exponent)
    assert np.allclose(found / wanted, found[0] / wanted[0], rtol=1e-5)
    assert np.isclose(np.log(found).mean(), 0, atol=1e-5)


def test_columns_that_say_nothing_are_left_alone_and_no_scale_runs_away():
    x, w = torch.tensor([1.0, 0, 2, 1e30, 1e-30, 3]), torch.tensor([0.5, 1, 0, 1, 1, 0.1])
    found = smoothing_scale(x, w, 0.5)
    assert found[1] == 1 and found[2] == 1
    assert found.isfinite().all() and found.max() <= 1e4 and found.min() >= 1e-4
    assert torch.equal(smoothing_scale(torch.zeros(4), torch.ones(4), 0.5), torch.ones(4))


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("exponent", [0.3, 0.5, 1.0])
def test_products_stay_what_they_were(tmp_path, group, exponent):
    sample, w = drawn(40, 70), drawn(20, 70, seed=1)
    sample[:, 9] *= 200
    sample[:, 13] = 0
    w[:, 17] = 0
    made = quantizer(calibration(tmp_path, {"layers.0.qkv": sample}), group=group, smooth=exponent)
    weight = made.quantize("layers.0.qkv.weight", dense(w))
    scale = weight.tensors["input_scale"]
    assert scale.dtype == torch.float32 and scale.shape == (70,) and (scale[[13, 17]] == 1).all()
    assert weight.num_bytes == made.num_bytes("layers.0.qkv.weight", (20, 70))
    # Half a scale of the smoothed weight, undone; scales of groups are up to 1/128 more.
    width = group or 70
    parts = (w / scale).abs().split(width, dim=1)
    half = torch.cat([part.amax(1, keepdim=True).expand(part.shape) for part in parts], dim=1) / 254
    assert ((weight.dequantize() - w).abs() <= half * scale * (1.01 if group else 1.0001)).all()


def test_the_size_of_a_column_is_the_same_in_pieces_and_of_the_largest_floats():
    w = drawn(50, 7) * 1e38
    found = column_size(w, 8)
    assert np.allclose(found.numpy(), np.sqrt((w.double().numpy() ** 2).mean(0)), rtol=1e-12)


def rounded(x, width):
    """Activations as kernels round them: a scale a token and so many columns."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % width)).view(len(x), -1, width)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp(min=1e-30)).round() * scale).view(len(x), -1)[:, : x.shape[1]]


def test_outliers_in_a_few_columns_cost_less_than_without(tmp_path):
    sample, w = drawn(64, 128), drawn(96, 128, seed=1) * 0.05
    sample[:, [3, 70]] *= 100
    exact = sample.double() @ w.double().t()

    def error(made):
        weight = made.quantize("head.weight", dense(w))
        scale = weight.tensors.get("input_scale", torch.ones(128))
        found = rounded(sample * scale, 32).double() @ (weight.dequantize() / scale).double().t()
        return float((found - exact).pow(2).mean())

    path = calibration(tmp_path, {"head": sample})
    assert error(quantizer(path)) < error(quantizer("", smooth=0.0)) / 4


def test_a_calibration_of_another_model_is_refused_by_name(tmp_path):
    made = quantizer(calibration(tmp_path, {"layers.0.qkv": drawn(9, 64)}))
    with pytest.raises(ConfigError, match=r"has nothing of 'layers\.1\.qkv\.weight'") as caught:
        made.quantize("layers.1.qkv.weight", dense(drawn(8, 64)))
    assert caught.value.field == "quantizer.calibration"
    with pytest.raises(ConfigError, match="has 32 inputs, and 64 in the calibration"):
        made.quantize("layers.0.qkv.weight", dense(drawn(8, 32)))
    w = drawn(8, 64)
    w[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv\.weight holds NaN or infinity"):
        made.quantize("layers.0.qkv.weight", dense(w))


def test_an_embedding_has_no_inputs_to_smooth(tmp_path):
    made = quantizer(calibration(tmp_path, {"layers.0.qkv": drawn(9, 64)}), embed=True)
    weight = made.quantize("embed.weight", dense(drawn(11, 64)))
    assert "input_scale" not in weight.tensors
    assert weight.num_bytes == made.num_bytes("embed.weight", (11, 64))


@pytest.mark.parametrize("kernels", ["torch", "int8", "cpu"])
@pytest.mark.parametrize("group", [0, 32])
def test_an_engine_with_smoothed_weights_says_what_the_dense_one_does(tmp_path, kernels, group):
    path, model = tiny_llama(tmp_path, layers=2, attention_bias=True, mlp_bias=True)
    shape = model.config
    widths = {"qkv": shape.hidden_size, "out": shape.hidden_size, "gate_up": shape.hidden_size}
    inputs = {f"layers.{i}.{name}": drawn(8, width, seed=i) for i in range(2) for name, width in widths.items()}
    inputs |= {f"layers.{i}.down": drawn(8, shape.intermediate_size, seed=i) for i in range(2)}
    options = {"smooth": 0.5, "calibration": calibration(tmp_path, inputs | {"head": drawn(8, shape.hidden_size)})}
    prompt = [3, 141, 59, 26, 5, 35]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with engine_of(path, kernels=kernels, quantizer={"use": "int8", "group": group, **options}) as engine:
        output = engine.generate([prompt], greedy)[0]
    ids = prompt + list(output.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(8), torch.tensor(output.token_ids)]
    assert (logits.amax(-1) - chosen <= logits.std() * 0.15).all()
