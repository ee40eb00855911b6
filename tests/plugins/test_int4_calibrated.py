"""The int4 quantizer's searches: scales of least squared error, and AWQ from what calibration has seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import CheckpointError, ConfigError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import dense
from intarsia_int4 import provide_quantizers
from intarsia_int4.options import Int4Options
from intarsia_int4.rounding import quantize
from models import tiny_llama

NAME = "layers.0.out.weight"
formats = st.builds(IntegerFormat, st.just(4), st.sampled_from([32, 64, 128]), st.sampled_from(["none", "zero"]))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(columns, *, num_outliers=4, rows=200, seed=0):
    """Inputs of which a few columns are far larger than the others, as those of language models are."""
    sizes = torch.ones(columns)
    sizes[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:num_outliers]] = 30.0
    return drawn(rows, columns, seed=seed) * sizes


def seen(x):
    """What a calibration says of inputs (M, C)."""
    return InputStatistics(x.abs().amax(0), x.square().mean(0), x.bfloat16())


def saved(tmp_path, inputs, name="calibration"):
    path = tmp_path / name
    Calibration(inputs, "a model", 100).save(path)
    return str(path)


def quantizer(**options):
    [provider] = provide_quantizers()
    return provider.build(PartContext(spec=None, options=Int4Options(**options)))


def group_errors(weight, w, importance):
    """Weighed squared error of each group, in float64."""
    error = (weight.dequantize().double() - w.double()).square() * importance.double()
    pad = -w.shape[1] % weight.format.group
    return torch.nn.functional.pad(error, (0, pad)).view(len(w), -1, weight.format.group).sum(-1)


def output_error(weight, w, x):
    return (x.double() @ (weight.dequantize().double() - w.double()).T).square().sum()


# --- scales -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    layout=formats,
    outs=st.integers(1, 6),
    ins=st.integers(1, 300),
    power=st.integers(-30, 30),
    weighed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_search_lowers_the_error_of_every_group_or_leaves_it(layout, outs, ins, power, weighed, seed):
    w = drawn(outs, ins, seed=seed) * 10.0**power
    importance = drawn(ins, seed=seed + 1).square() ** 3 if weighed else torch.ones(ins)
    plain = group_errors(quantize("w", w, layout), w, importance)
    found = quantize("w", w, layout, clip=True, importance_C=importance if weighed else None)
    assert (group_errors(found, w, importance) <= plain * (1 + 1e-5)).all()


def test_a_search_finds_much():
    w, importance = drawn(64, 512), inputs_of(512).square().mean(0)
    for layout, weights, part in [
        (IntegerFormat(4, 64), torch.ones(512), 0.92),
        (IntegerFormat(4, 64), importance, 0.5),
        (IntegerFormat(4, 64, "zero"), torch.ones(512), 0.95),
        (IntegerFormat(4, 64, "zero"), importance, 0.5),
    ]:
        found = quantize("w", w, layout, clip=True, importance_C=weights)
        plain = group_errors(quantize("w", w, layout), w, weights).sum()
        assert group_errors(found, w, weights).sum() < part * plain


def test_a_search_comes_near_the_best_of_a_thousand_scales():
    w = drawn(20, 64)
    found = group_errors(quantize("w", w, IntegerFormat(4, 64), clip=True), w, torch.ones(64))[:, 0]
    first = quantize("w", w, IntegerFormat(4, 64)).tensors["scale"].double()
    scales = first * torch.linspace(0.4, 1.3, 1000, dtype=torch.float64)
    x = w.double()[:, None]
    rounded = (x / scales[..., None]).round().clamp(-8, 7) * scales[..., None]
    best = (rounded - x).square().sum(-1).amin(1)
    assert (found <= best * 1.12).all() and found.sum() <= best.sum() * 1.04


@pytest.mark.parametrize("offset", ["none", "zero"])
def test_columns_without_importance_change_nothing_that_matters(offset):
    """A group that calibration never saw is searched as if all of its columns mattered alike."""
    w, layout = drawn(5, 128), IntegerFormat(4, 64, offset)
    importance = torch.ones(128)
    importance[64:] = 0
    found = quantize("w", w, layout, clip=True, importance_C=importance)
    assert torch.equal(found.dequantize(), quantize("w", w, layout, clip=True).dequantize())


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20, 1e34])
def test_importances_of_any_size_are_used(size):
    w, importance = drawn(5, 128), inputs_of(128).square().mean(0)
    found = quantize("w", w, IntegerFormat(4, 64), clip=True, importance_C=importance * size)
    expected = quantize("w", w, IntegerFormat(4, 64), clip=True, importance_C=importance)
    agree = (found.tensors["scale"] == expected.tensors["scale"]).float().mean()
    assert agree > 0.8  # a product's rounding can turn a near tie


# --- AWQ --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"clip": False}, {}, {"zero_points": True}, {"group": 128}])
def test_awq_lowers_the_output_error_on_the_sample(tmp_path, options):
    w, x = drawn(96, 320), inputs_of(320)
    file = saved(tmp_path, {"layers.0.out": seen(x)})
    plain = {key: value for key, value in options.items() if key != "clip"}
    nearest = output_error(quantizer(**plain).quantize(NAME, dense(w)), w, x)
    scaled = output_error(quantizer(calibration=file, **options).quantize(NAME, dense(w)), w, x)
    assert scaled < 0.4 * nearest


@settings(max_examples=15, deadline=None)
@given(outs=st.integers(1, 40), ins=st.integers(1, 150), seed=st.integers(0, 99), outliers=st.integers(0, 5))
def test_awq_never_does_worse_on_the_sample_than_without(tmp_path_factory, outs, ins, seed, outliers):
    w, x = drawn(outs, ins, seed=seed), inputs_of(ins, num_outliers=outliers, rows=50, seed=seed).bfloat16().float()
    file = saved(tmp_path_factory.mktemp("awq"), {"layers.0.out": seen(x)})
    without = output_error(quantizer(calibration=file, awq=False).quantize(NAME, dense(w)), w, x)
    scaled = output_error(quantizer(calibration=file).quantize(NAME, dense(w)), w, x)
    assert scaled <= without * (1 + 1e-4) + 1e-9


def test_the_input_scale_undoes_that_of_the_columns(tmp_path):
    w, x = drawn(64, 128), inputs_of(128)
    file = saved(tmp_path, {"layers.0.out": seen(x)})
    weight = quantizer(calibration=file).quantize(NAME, dense(w))
    scale = weight.tensors["input_scale"]
    assert scale.dtype == torch.float32 and scale.shape == (128,) and scale.std() > 0.1
    # Inputs that are large are made smaller.
    assert torch.corrcoef(torch.stack((scale.log(), x.square().mean(0).log())))[0, 1] < -0.99
    bare = {key: tensor for key, tensor in weight.tensors.items() if key != "input_scale"}
    stored = type(weight)(weight.format, bare, weight.shape).dequantize()
    assert torch.allclose(stored * scale, weight.dequantize(), rtol=1e-6)
    assert (weight.dequantize() - w).norm() < 0.2 * w.norm()


@pytest.mark.parametrize("rows", [0, 30])
def test_a_linear_that_calibration_never_reached_is_rounded_as_without(tmp_path, rows):
    w = drawn(20, 96)
    file = saved(tmp_path, {"layers.0.out": seen(torch.zeros(max(rows, 1), 96))})
    if rows == 0:
        nothing = InputStatistics(torch.zeros(96), torch.zeros(96), torch.zeros(0, 96).bfloat16())
        file = saved(tmp_path, {"layers.0.out": nothing})
    weight = quantizer(calibration=file).quantize(NAME, dense(w))
    assert torch.equal(weight.dequantize(), quantizer(clip=True).quantize(NAME, dense(w)).dequantize())


def test_inputs_that_are_always_zero_harm_nothing(tmp_path):
    w, x = drawn(20, 96), inputs_of(96)
    x[:, 10:20] = 0
    weight = quantizer(calibration=saved(tmp_path, {"layers.0.out": seen(x)})).quantize(NAME, dense(w))
    assert weight.dequantize().isfinite().all() and weight.tensors["input_scale"].isfinite().all()
    assert output_error(weight, w, x) < output_error(quantizer().quantize(NAME, dense(w)), w, x)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_inputs_of_any_size_give_numbers(tmp_path, size):
    w, x = drawn(20, 96), inputs_of(96)
    file = saved(tmp_path, {"layers.0.out": seen(x * size)})
    error = output_error(quantizer(calibration=file).quantize(NAME, dense(w)), w, x)
    assert error < output_error(quantizer().quantize(NAME, dense(w)), w, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_by_name(tmp_path, bad):
    w = drawn(5, 64)
    w[4, 8] = bad
    file = saved(tmp_path, {"layers.0.out": seen(inputs_of(64))})
    for awq in (True, False):
        with pytest.raises(CheckpointError, match=r"layers\.0\.out\.weight holds NaN or infinity"):
            quantizer(calibration=file, awq=awq).quantize(NAME, dense(w))


def test_bytes_are_as_announced_with_the_input_scale_and_without(tmp_path):
    w, file = drawn(9, 96), saved(tmp_path, {"layers.0.out": seen(inputs_of(96))})
    for options, extra in [({}, 4 * 96), ({"awq": False}, 0)]:
        q = quantizer(calibration=file, **options)
        found = q.quantize(NAME, dense(w)).num_bytes
        assert found == q.num_bytes(NAME, w.shape) == 9 * (48 + 2 * 2) + extra


def test_an_embedding_needs_no_calibration(tmp_path):
    """Its rows are looked up: there are no inputs to speak of."""
    q = quantizer(embed=True, calibration=saved(tmp_path, {"layers.0.out": seen(inputs_of(96))}))
    weight = q.quantize("embed.weight", dense(drawn(9, 96)))
    assert "input_scale" not in weight.tensors and weight.num_bytes == q.num_bytes("embed.weight", (9, 96))


# --- options ----------------------------------------------------------------------------------------------------------


def refused(path, **options):
    with pytest.raises(ConfigError) as caught:
        engine_of(path, quantizer={"use": "int4", **options})
    assert caught.value.field == "quantizer.calibration"
    return str(caught.value)


def test_options_that_do_not_go_together_are_refused_before_weights_load(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    other = saved(tmp_path, {"layers.0.qkv": seen(inputs_of(96))}, "other")
    assert "awq = true needs the inputs of each layer; `intarsia calibrate" in refused(path, awq=True)
    assert "all are false" in refused(path, calibration=other, awq=False, clip=False)
    assert "cannot be read" in refused(path, calibration=str(tmp_path / "nowhere"))
    message = refused(path, calibration=other)
    assert "64 inputs, and 96 in the calibration of 'a model'" in message
    empty = saved(tmp_path, {"layers.7.qkv": seen(inputs_of(64))}, "empty")
    assert "nothing of 'layers.0.qkv.weight'" in refused(path, calibration=empty)


def test_a_calibrated_engine_runs_alike_on_both_kernels(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    columns = {"layers.0.qkv": 64, "layers.0.out": 64, "layers.0.gate_up": 64, "layers.0.down": 128}
    file = saved(tmp_path, {name: seen(inputs_of(ins)) for name, ins in columns.items()})
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    answers = {}
    for kernels in ("torch", "cpu"):
        section = {"use": "int4", "calibration": file, "activations": "float"}
        with engine_of(path, kernels=kernels, quantizer=section) as engine:
            assert engine.explain()["ops"]["linear[int4_g64_a16]"] == kernels
            answers[kernels] = engine.generate([[3, 141, 59, 26]], params)[0]
    torch.testing.assert_close(
        [entry.logprob for entry in answers["cpu"].logprobs],
        [entry.logprob for entry in answers["torch"].logprobs],
        atol=1e-3,
        rtol=0,
    )
