"""The int8 quantizer: rounding to nearest by rows, what it takes, what it refuses, and engines that run on it."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ConfigError
from intarsia.protocols import PartContext
from intarsia.quantizing.integers import IntegerFormat
from intarsia.testing.quantizers import QuantizerContract
from intarsia.types import dense
from intarsia_int8 import provide_quantizers
from intarsia_int8.options import Int8Options
from intarsia_int8.quantizer import quantize as quantize_as
from models import tiny_llama

ROWS = IntegerFormat(8)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


class Contract(QuantizerContract):
    def provider(self):
        return provide_quantizers()[0]


class TestRotated(Contract):
    """Q01 and Q03 are claims."""


class TestRotatedRowsOfBfloat16(Contract):
    options: ClassVar = {"rotate": True, "group": 0}
    dtype = "bfloat16"


class TestGroups(Contract):
    options: ClassVar = {"group": 32}


class TestRows(Contract):
    options: ClassVar = {"group": 0}


class TestWideGroupsOfBfloat16(Contract):
    options: ClassVar = {"group": 128, "activations": "float"}
    dtype = "bfloat16"


def quantizer(**options):
    [provider] = provide_quantizers()
    return provider.build(PartContext(spec=None, options=Int8Options(**options)))


def quantize(name, w, layout=ROWS):
    return quantize_as(name, w, layout)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(
    outs=st.integers(1, 20),
    ins=st.integers(1, 70),
    power=st.integers(-40, 37),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_number_is_at_most_half_a_scale_off(outs, ins, power, dtype):
    w = (drawn(outs, ins, seed=outs * ins) * 10.0**power).to(getattr(torch, dtype))
    weight = quantize("w", w)
    numbers, scale = weight.tensors["weight"], weight.tensors["scale"].double()
    assert numbers.dtype == torch.int8 and numbers.min() >= -127
    exact = w.double()
    # Below 1e-38 floats have fewer bits, and so have scales.
    assert torch.allclose(scale, exact.abs().amax(1) / 127, rtol=1e-6, atol=1e-45)
    error = (numbers.double() * scale[:, None] - exact).abs()
    assert (error <= (scale * 0.5001 + 1e-43)[:, None] + exact.abs() * 1e-6).all()
    assert torch.equal(weight.dequantize(), numbers.float() * weight.tensors["scale"][:, None])


@settings(max_examples=60, deadline=None)
@given(
    outs=st.integers(1, 12),
    ins=st.integers(1, 150),
    group=st.sampled_from([32, 64, 128]),
    power=st.integers(-36, 37),
    activations=st.sampled_from(["int8", "float"]),
)
def test_every_group_has_a_scale_that_its_largest_number_needs(outs, ins, group, power, activations):
    """Q03: the last group can be smaller."""
    w = drawn(outs, ins, seed=outs * ins) * 10.0**power
    weight = quantize("w", w, IntegerFormat(8, group, activations=activations))
    numbers, scale = weight.tensors["weight"], weight.tensors["scale"]
    assert scale.shape == (outs, -(-ins // group))
    bits = {torch.float16: 11, torch.bfloat16: 8}[scale.dtype]
    for g, part in enumerate(w.double().split(group, dim=1)):
        found, step = numbers[:, g * group : g * group + part.shape[1]].double(), scale[:, g].double()
        need = part.abs().amax(1) / 127
        # Halves below 2**-14 have fewer bits, and from 2**-16 on no fewer than 8.
        assert torch.allclose(step, need, rtol=2.0**-8 if need.min() < 2.0**-14 else 2.0**-bits, atol=1e-40)
        # Below 2**-126 a scale in bfloat16 is up to 2**-134 off.
        assert ((found * step[:, None] - part).abs() <= step[:, None] * 0.5001 + 127 * 2.0**-134).all()


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(1.0, torch.float16), (0.0, torch.float16), (1e-7, torch.bfloat16), (1e7, torch.bfloat16)],
)
def test_scales_are_halves_unless_a_group_is_too_small_or_too_large_for_them(factor, dtype):
    w = drawn(6, 64)
    w[2, :32] *= factor
    assert quantize("w", w, IntegerFormat(8, 32)).tensors["scale"].dtype == dtype


def test_a_group_that_its_format_can_hold_comes_out_bit_for_bit():
    """With scales that float16 holds and 127 in each group, the same numbers come back."""
    numbers = torch.randint(-127, 128, (9, 130), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    numbers[:, ::32] = 127
    scale = (drawn(9, 5).abs() + 0.1).half()
    w = numbers.float() * scale.float().repeat_interleave(32, dim=1)[:, :130]
    found = quantize("w", w, IntegerFormat(8, 32))
    assert torch.equal(found.tensors["weight"], numbers) and torch.equal(found.tensors["scale"], scale)
    assert torch.equal(found.dequantize(), w)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "int8_g32"),
        ({"group": 0}, "int8"),
        ({"group": 64}, "int8_g64"),
        ({"group": 128, "activations": "float"}, "int8_g128_a16"),
        ({"group": 0, "activations": "float"}, "int8_a16"),
    ],
)
def test_options_name_the_format(options, name):
    made = quantizer(**options)
    assert made.format == name
    weight = made.quantize("layers.0.out.weight", dense(drawn(8, 100)))
    assert weight.format.name == name and weight.num_bytes == made.num_bytes("layers.0.out.weight", (8, 100))


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"group": 48}, "quantizer.group", "48"),
        ({"activations": "int4"}, "quantizer.activations", "int4"),
        ({"smooth": 1.5, "calibration": "x"}, "quantizer.smooth", "1.5 is not from 0 to 1"),
        ({"smooth": -0.1, "calibration": "x"}, "quantizer.smooth", "-0.1 is not from 0 to 1"),
        ({"smooth": 0.5}, "quantizer.calibration", "intarsia calibrate MODEL --out FILE"),
        ({"calibration": "x"}, "quantizer.calibration", "quantizer.smooth = 0.5 asks for it"),
        ({"smooth": 0.5, "calibration": "/no/such/file"}, "quantizer.calibration", "/no/such/file"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_stand(tmp_path, options, field, message):
    path, _ = tiny_llama(tmp_path, layers=1)
    with pytest.raises(ConfigError, match=message) as caught:
        engine_of(path, quantizer={"use": "int8", **options})
    assert caught.value.field == field


def test_large_weights_are_quantized_in_pieces_alike(monkeypatch):
    w = drawn(50, 33)
    for layout in (ROWS, IntegerFormat(8, 32)):
        whole = quantize("w", w, layout)
        with monkeypatch.context() as patch:
            patch.setattr("intarsia_int8.quantizer._CHUNK", 100)
            pieces = quantize("w", w, layout)
        assert all(torch.equal(whole.tensors[name], pieces.tensors[name]) for name in whole.tensors)


def fake_quantized(model, *, head):
    """Round the weights of transformers' layers to the same grid, in float64."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ("proj" in name or (head and "lm_head" in name)):
            exact = parameter.detach().double()
            scale = exact.abs().amax(1, keepdim=True) / 127
            parameter.data = ((exact / scale).round() * scale).float()
    return model


@pytest.mark.parametrize("kernels", ["torch", "cpu", "int8"])
@pytest.mark.parametrize(
    ("tie", "options"), [(True, {}), (True, {"head": False}), (True, {"embed": True}), (False, {})]
)
def test_an_engine_computes_what_its_weights_say(tmp_path, kernels, tie, options):
    """Q04: a tied head is the embedding's own numbers; embeddings that are looked up stay unless asked otherwise."""
    path, model = tiny_llama(tmp_path, layers=2, tie=tie, attention_bias=True, mlp_bias=True)
    prompt = [3, 141, 59, 26, 5, 35]
    with engine_of(path, kernels=kernels, quantizer={"use": "int8", "group": 0, **options}) as engine:
        output = engine.generate([prompt], GREEDY)[0]
        assert engine.explain()["ops"]["linear[int8]"] == kernels
    if tie:
        # The embedding and the head part, so that one can be rounded alone.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if options.get("embed"):
        rows = model.model.embed_tokens.weight
        rows.data = quantize("embed", rows.detach()).dequantize()
    fake_quantized(model, head=options.get("head", True))
    ids = prompt + list(output.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    # Every chosen id is the reference's best, or as good within what int8 activations add in `cpu`.
    slack = logits.std() * (0.1 if kernels == "cpu" else 1e-3)
    chosen = logits[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]
    assert (logits.amax(-1) - chosen <= slack).all()


def test_a_head_that_is_quantized_apart_is_counted_beside_its_embedding(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1, tie=True)

    def weight_bytes(**options):
        with engine_of(path, kernels="torch", quantizer={"use": "int8", "group": 0, **options}) as engine:
            return engine.parts.weight_bytes

    shared = weight_bytes(head=False)
    assert weight_bytes() == shared + 257 * 64 + 257 * 4
    # Quantized together they are one weight, a quarter of the one in float32.
    assert weight_bytes(embed=True) == shared - 257 * 64 * 3 + 257 * 4
