"""Engines whose every linear is in an integer format with input scales: the fused step against the ops in torch."""

import random
import types

import attrs
import pytest
import torch

from engines import engine_of
from intarsia.hookspecs import hookimpl
from intarsia.quantizing.integers import pack_nibbles
from intarsia.testing import poison_cache, prompt_logits
from intarsia.types import Provider, Weight
from intarsia_cpu import build
from integer_weights import BY_NAME
from models import tiny_llama

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="there is no C++ compiler")

NAMES = (
    *("int8_a16", "int8_g32_min_a16", "int4_g64_a16", "int4_g32_zero_a16", "int4_g16_min_a16"),
    *("int8", "int8_g32", "int8_g64_min", "int4_g64", "int4_g128_zero", "int4_g32_min"),
)


def rounded(weight_NC, layout, input_scale_C):
    """Round to nearest over each group's range, with an input scale taken out of the columns."""
    w = weight_NC.float() / input_scale_C
    outs, ins = w.shape
    group = layout.group or ins
    groups = torch.nn.functional.pad(w, (0, -ins % group)).view(outs, -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    most = groups.abs().amax(-1)
    tensors = {"input_scale": input_scale_C}
    if layout.offset == "none":
        scale, shift = most / (7 if layout.bits == 4 else 127), torch.zeros_like(most)
        offset = 8 if layout.bits == 4 else 0
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale, offset = (high - low) / (15 if layout.bits == 4 else 127), 0
        shift = low
        if layout.offset == "min":
            tensors["min"] = low.bfloat16()
            shift = tensors["min"].float()
    scale = scale if layout.group is None else scale.bfloat16().float()
    if layout.offset == "zero":
        tensors["zero"] = (-low / scale).round().clamp(0, 15).to(torch.uint8)
        shift = -tensors["zero"].float() * scale
    numbers = ((groups - shift[..., None]) / scale[..., None]).round() + offset
    limits = (0, 15) if layout.bits == 4 else (-128, 127)
    numbers = numbers.clamp(*limits).flatten(1)[:, :ins]
    tensors["weight"] = pack_nibbles(numbers) if layout.bits == 4 else numbers.to(torch.int8)
    tensors["scale"] = scale.flatten() if layout.group is None else scale.bfloat16()
    return Weight(layout, tensors, (outs, ins))


@attrs.frozen
class Rounding:
    """Quantizes every linear, the head too, with an input scale of its own."""

    layout: object

    @property
    def format(self):
        return self.layout.name

    def accepts(self, name, shape):
        return name.startswith("layers.") or name == "head.weight"

    def num_bytes(self, name, shape):
        return self.layout.num_bytes(shape) + 4 * shape[1]

    def quantize(self, name, weight):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        input_scale = torch.rand(weight.shape[1], generator=generator) + 0.5
        return rounded(weight.dequantize(), self.layout, input_scale)


def logits(path, name, dtype, runner, kernels, *, threads=1, chunks=(None,)):
    provider = Provider(key="rounding", summary="", build=lambda _: Rounding(BY_NAME[name]))
    plugin = types.SimpleNamespace(provide_quantizers=hookimpl(lambda: [provider], specname="provide_quantizers"))
    sections = {"quantizer": "rounding", "runner": runner, "kernels": kernels}
    sections["cache"] = {"use": "paged", "memory": "64MiB"}
    rng = random.Random(1)
    prompt = [rng.randrange(256) for _ in range(70)]
    with engine_of(path, plugins=[plugin], engine={"dtype": dtype, "threads": threads}, **sections) as engine:
        found = []
        for chunk in chunks:
            poison_cache(engine)
            found.append(prompt_logits(engine, prompt, chunk=chunk))
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("integers")
    return tiny_llama(folder, hidden=72, heads=4, kv_heads=2, ffn=150, head_dim=20, attention_bias=True)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_of_the_fused_step_reads_its_format_and_input_scale(path, name):
    right = logits(path, name, "float32", "eager", "torch")
    found = logits(path, name, "float32", "cpu_fused", "cpu", threads=2, chunks=(None, 7, 1))
    error = (found - right).abs()
    if BY_NAME[name].activations == "float":
        assert float(error.max()) <= 1e-4 * max(1.0, float(right.abs().max()))
    else:
        # Activations are rounded in steps of 1/127 of the largest of their group.
        assert float(error.mean()) <= 0.02 * float(right.abs().max())
        by_ops = logits(path, name, "float32", "eager", "cpu")
        assert float((found - by_ops).abs().mean()) <= 0.003 * float(right.abs().max())


@pytest.mark.parametrize("name", ["int8_a16", "int4_g32_zero_a16", "int8_g32"])
def test_bfloat16_engines_give_what_torch_does_up_to_rounding(path, name):
    right = logits(path, name, "bfloat16", "eager", "torch")
    found = logits(path, name, "bfloat16", "cpu_fused", "cpu", threads=2, chunks=(None, 7))
    assert float((found - right).abs().mean()) <= 0.02 * float(right.abs().max())


def test_input_scales_that_are_left_out_would_show(path, monkeypatch):
    """The bound above is no guess: without them logits are others."""
    right = logits(path, "int8_a16", "float32", "eager", "torch")
    quantize = Rounding.quantize

    def without(self, name, weight):
        found = quantize(self, name, weight)
        tensors = {key: tensor for key, tensor in found.tensors.items() if key != "input_scale"}
        return Weight(found.format, tensors, found.shape)

    monkeypatch.setattr(Rounding, "quantize", without)
    assert float((logits(path, "int8_a16", "float32", "cpu_fused", "cpu") - right).abs().mean()) > 0.03 * float(
        right.abs().max()
    )
