"""The int8 products through torch: whole numbers against int64, rows apart, and memory that does not grow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.ops import ANY_FORMAT
from intarsia.protocols import PartContext
from intarsia.quantizing.integers import FORMATS
from intarsia.quantizing.rotated import ROTATED, RotatedFormat, rotate
from intarsia.testing.kernels import KernelsContract
from intarsia.types import EngineOptions, Fit, Unfit, Weight
from intarsia_int8 import provide_kernels
from intarsia_int8.kernels import GROUPS, ROWS, dequantizing_linear, linear
from models import tiny_llama


class TestInt8(KernelsContract):
    """Q01 on the side of activations stands below."""

    def provider(self):
        return provide_kernels()[0]


LAYOUTS = {layout.name: layout for layout in (*FORMATS, *ROTATED)}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(name, outs, ins, *, seed=0, input_scale=False):
    """A random weight, -128 among its numbers."""
    made, generator = LAYOUTS[name], torch.Generator().manual_seed(seed)
    layout = made.source if isinstance(made, RotatedFormat) else made
    groups = () if layout.group is None else (-(-ins // layout.group),)
    tensors = {
        "weight": torch.randint(-128, 128, (outs, ins), generator=generator, dtype=torch.int8),
        "scale": torch.rand(outs, *groups, generator=generator) * 0.01,
    }
    if layout.offset == "min":
        tensors["min"] = torch.randn(outs, *groups, generator=generator)
    if input_scale:
        tensors["input_scale"] = torch.rand(ins, generator=generator) + 0.5
    return Weight(made, tensors, (outs, ins))


def exact(x, weight, bias=None):
    """The product in float64, and what its terms come to in magnitude."""
    w, x = weight.dequantize().double().numpy(), x.double().numpy()
    product = x @ w.T
    return product if bias is None else product + bias.double().numpy(), np.abs(x) @ np.abs(w).T


SHAPES = {"tokens": st.integers(0, 19), "outs": st.integers(1, 70), "ins": st.integers(1, 140)}


@settings(max_examples=80, deadline=None)
@given(
    **SHAPES,
    name=st.sampled_from(sorted(ROWS)),
    power=st.integers(-30, 30),
    scaled=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_products_of_any_shape_equal_float64(tokens, outs, ins, name, power, scaled, biased, dtype):
    weight = weight_of(name, outs, ins, seed=outs + ins, input_scale=scaled)
    x = (drawn(tokens, ins, seed=tokens) * 10.0**power).to(getattr(torch, dtype))
    bias = drawn(outs) * 10.0**power if biased else None
    found = linear(x, weight, bias)
    assert found.shape == (tokens, outs) and found.dtype == x.dtype
    wanted, terms = exact(x, weight, bias)
    # An input is half of its row's largest / 32639 off, at most; then come roundings to float32 and to the dtype.
    rows = x.double() * weight.tensors.get("input_scale", torch.ones(ins))
    rows = rotate(rows) if isinstance(weight.format, RotatedFormat) else rows
    largest = rows.abs().amax(1, keepdim=True).numpy()
    stored = weight.tensors["weight"].double() * weight.tensors["scale"].double()[:, None]
    bound = largest * stored.abs().sum(1).numpy() * 0.51 / 32639 + terms * 1e-5
    bound += np.abs(wanted) * (2.0**-8 if dtype == "bfloat16" else 1e-6)
    assert (np.abs(found.double().numpy() - wanted) <= bound + 1e-37).all()


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_whole_numbers_are_multiplied_exactly(tokens, outs, ins):
    """Against int64: inputs up to 32639, which have a scale of 1, at sums below what float32 holds exactly."""
    generator = torch.Generator().manual_seed(tokens * outs * ins)
    x = torch.randint(-3, 4, (tokens, ins), generator=generator)
    x[:, 0] = 32639
    weight = weight_of("int8", outs, ins, seed=ins)
    weight.tensors["weight"].clamp_(-2, 2)
    weight.tensors["scale"].fill_(1)
    assert torch.equal(linear(x.float(), weight).long(), x @ weight.tensors["weight"].long().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype):
    weight, bias = weight_of("int8", 75, 101, input_scale=True), drawn(75)
    x = drawn(600, 101).to(dtype)
    x[3] *= 300
    whole = linear(x, weight, bias)
    for start, stop in [(0, 1), (3, 4), (1, 3), (0, 7), (5, 22), (100, 233), (511, 513)]:
        assert torch.equal(linear(x[start:stop], weight, bias), whole[start:stop]), (start, stop)


def test_rows_of_zeros_give_the_bias_and_rows_with_outliers_keep_their_others():
    """Q01, on the side of activations."""
    weight, bias = weight_of("int8", 20, 64), drawn(20)
    x = drawn(5, 64)
    x[1] = 0
    x[2, 7] = 1e4
    x[3] *= 1e-42
    found = linear(x, weight, bias)
    assert torch.equal(found[1], bias) and torch.equal(found[3], bias)
    wanted, _ = exact(x[2:3], weight, bias)
    # 1 / 65278 of the outlier, times what the weights of a row add up to by chance.
    assert np.abs(found[2].double().numpy() - wanted).max() < 1e4 / 65278 * 0.01 * 128 * 64**0.5 * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_shows_it_and_others_do_not(bad):
    x = drawn(4, 33)
    x[2, 5] = bad
    found = linear(x, weight_of("int8", 9, 33))
    assert found[2].isnan().all() and found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("name", sorted(GROUPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_a_grouped_weight_are_multiplied_alike(monkeypatch, name, dtype):
    weight, bias = weight_of(name, 45, 150, input_scale=True), drawn(45)
    x = drawn(6, 150).to(dtype)
    monkeypatch.setattr("intarsia_int8.kernels._CHUNK", 150 * 8)
    found = dequantizing_linear(x, weight, bias.to(dtype))
    wanted, terms = exact(x, weight, bias.to(dtype))
    error = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    assert (np.abs(found.double().numpy() - wanted) <= terms * error + 1e-6).all()
    assert torch.equal(dequantizing_linear(x.float(), weight)[:1], dequantizing_linear(x[:1].float(), weight))


@pytest.mark.parametrize(("name", "call"), [("int8_a16", linear), ("int8_g32", dequantizing_linear)])
def test_a_large_weight_is_never_whole_in_floats(name, call):
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                largest = max(largest, result.numel())
            return result

    weight = weight_of(name, 20_000, 1024)
    with Watch():
        call(drawn(2, 1024), weight)
    assert 0 < largest <= 1 << 22


def part(device="cpu"):
    [provider] = provide_kernels()
    context = PartContext(spec=None, engine=EngineOptions(device=device, dtype="float32"))
    return provider, provider.fit(context), context


def test_it_is_for_cpus_and_never_the_best():
    provider, fit, context = part()
    assert isinstance(fit, Fit) and fit.rank < 0
    kernels = provider.build(context).kernels()
    assert {name for kernel in kernels for name in kernel.formats} == {
        name for name in LAYOUTS if name.startswith("int8")
    }
    assert not any(ANY_FORMAT in kernel.formats for kernel in kernels)
    _, refused, _ = part("cuda:0")
    assert isinstance(refused, Unfit) and "cuda:0" in refused.reason


@pytest.mark.parametrize(
    "options", [{"group": 0}, {"group": 0, "activations": "float"}, {"group": 0, "rotate": True}, {"group": 64}]
)
def test_engines_run_on_it_bitwise_in_fp32(tmp_path, options):
    path, _ = tiny_llama(tmp_path, layers=2, attention_bias=True, mlp_bias=True)
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[3, 141, 59], [26, 5], [35, 8, 97, 9, 3]]
    with engine_of(
        path,
        engine={"invariance": "bitwise"},
        kernels=["int8", "torch"],
        attention="tiled",
        runner="eager",
        quantizer={"use": "int8", **options},
    ) as engine:
        together = [output.token_ids for output in engine.generate(prompts, greedy)]
        assert together == [engine.generate([prompt], greedy)[0].token_ids for prompt in prompts]
        [read] = {facts["read_by"] for name, facts in engine.explain()["formats"].items() if name != "dense"}
        assert read == "kernels 'int8'"
