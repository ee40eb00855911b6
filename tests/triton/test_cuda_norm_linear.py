"""A norm and the int8 linear behind it, in Triton's interpreter: the bits of the chain, alone and in engines.

Shape legend: T tokens, E embed, N out features.
"""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bfloat16_interpreter import _rounds_to_bfloat16  # noqa: F401
from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.hookspecs import hookimpl
from intarsia.ops import resolve
from intarsia.testing import prompt_logits
from intarsia.types import Provider
from intarsia_cuda import kernels, norms, saved_bytes
from intarsia_cuda.quantized import matmuls
from intarsia_cuda.quantized.norm_linear import norm_linear
from intarsia_cuda.quantized.packing import pack
from integer_weights import integer_weight
from models import tiny_llama

GEMMA = "gemma3_text with a cap and biases"
EPS = 1e-5
several = settings(deadline=None, max_examples=10)


def normal(seed, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chain(x, residual, norm_weight, weight, bias):
    """Norm, quantization and product, a kernel each."""
    if residual is None:
        normed, total = norms.rms_norm(x, norm_weight, EPS), x
    else:
        normed, total = norms.add_rms_norm(x, residual, norm_weight, EPS)
    return matmuls.linear(normed, weight, bias), total


# --- bits -------------------------------------------------------------------------------------------------------------


@several
@given(
    rows=st.integers(0, 20),
    width=st.one_of(st.integers(1, 300), st.sampled_from([576, 4112])),
    outs=st.integers(1, 140),
    adds=st.booleans(),
    scaled=st.booleans(),
    has_bias=st.booleans(),
    weight_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_it_is_the_chain_bit_for_bit(rows, width, outs, adds, scaled, has_bias, weight_dtype):
    weight = pack(integer_weight("int8", outs, width, input_scale=scaled))
    x, norm_weight = normal(1, rows, width), normal(2, width, dtype=weight_dtype)
    residual, bias = normal(3, rows, width) if adds else None, normal(4, outs) if has_bias else None
    found, total = norm_linear(x, residual, norm_weight, EPS, weight, bias)
    right, right_total = chain(x, residual, norm_weight, weight, bias)
    assert found.shape == (rows, outs) and torch.equal(found, right) and torch.equal(total, right_total)


@pytest.mark.parametrize("name", ["int8_a16", "int4_g32", "int8"])
@pytest.mark.parametrize("adds", [False, True])
def test_weights_that_take_no_int8_rows_or_are_not_packed_are_read_by_the_chain(name, adds):
    weight = integer_weight(name, 40, 64)
    weight = weight if name == "int8" else pack(weight)
    x, norm_weight, residual = normal(1, 3, 64), normal(2, 64), normal(3, 3, 64) if adds else None
    found, total = norm_linear(x, residual, norm_weight, EPS, weight, None)
    right, right_total = chain(x, residual, norm_weight, weight, None)
    assert torch.equal(found, right) and torch.equal(total, right_total)


@pytest.mark.parametrize("width", [34, 576, 4112])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(width):
    weight, norm_weight = pack(integer_weight("int8", 70, width)), normal(2, width)
    x, residual = normal(1, 40, width), normal(3, 40, width)

    def of(rows):
        return torch.cat(norm_linear(x[rows], residual[rows], norm_weight, EPS, weight, None), dim=1)

    whole = of(slice(None))
    for rows in (slice(0, 1), slice(39, 40), slice(3, 20), slice(7, 40)):
        assert torch.equal(of(rows), whole[rows])


def test_a_row_that_is_not_finite_shows_it_and_harms_no_other():
    weight, norm_weight, x = pack(integer_weight("int8", 40, 64)), normal(2, 64), normal(1, 4, 64)
    right, _ = norm_linear(x, None, norm_weight, EPS, weight, None)
    x[1, 3], x[2] = torch.nan, 0
    found, _ = norm_linear(x, None, norm_weight, EPS, weight, None)
    assert found[1].isnan().all() and not found[2].any()
    assert torch.equal(found[[0, 3]], right[[0, 3]])


# --- what stands for what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "formats"), [("bfloat16", ["int8"]), ("float16", []), ("float32", [])])
def test_it_stands_for_int8_weights_in_bfloat16_alone(dtype, formats, tmp_path):
    path, _ = tiny_llama(tmp_path, hidden=32, heads=2, kv_heads=1, layers=1, ffn=32)
    with engine_of(path) as engine:
        found = kernels.CudaKernels(engine.parts.spec).kernels()
    asked = ["dense", "int8", "int8_a16", "int4_g32"]
    ops = resolve([("cuda", found)], dtype, asked, "cuda")
    assert [name for name in asked if f"norm_linear[{name}]" in ops.choices] == formats
    if formats:
        assert ops.invariance(dtype)["norm_linear[int8]"] == "bitwise"
        assert ops.norm_linear(pack(integer_weight("int8", 4, 16))) is norm_linear
        assert ops.norm_linear(integer_weight("int8_a16", 4, 16)) is None


# --- engines ----------------------------------------------------------------------------------------------------------


def interpreted(*, fuses):
    """A plugin that offers the kernels on a CPU, with norms and linears as one or each for itself."""

    def build(context):
        found = [one for one in kernels.build(context).kernels() if fuses or one.op != "norm_linear"]
        return types.SimpleNamespace(kernels=lambda: found)

    plugin = types.ModuleType("interpreted")
    plugin.provide_kernels = hookimpl(lambda: [Provider(key="interpreted", summary="a fake", build=build)])
    return plugin


def engine_over(path, *, fuses, **sections):
    return engine_of(
        path,
        engine={"max_model_len": 64, "dtype": "bfloat16"},
        plugins=[interpreted(fuses=fuses)],
        kernels="interpreted",
        quantizer={"use": "int8", "group": 0},  # a scale a row, and rows of int8
        runner="eager",
        attention="tiled",
        **sections,
    )


@pytest.fixture
def counted(monkeypatch):
    """What was launched, by the forms' names."""
    names, launch = [], norms.Specialisation.launch

    def record(form, *args):
        names.append(form.name)
        launch(form, *args)

    monkeypatch.setattr(norms.Specialisation, "launch", record)
    return names


#: Norms before blocks, and before and behind them; QK norms, a mixture; none that one linear reads alone.
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in (GEMMA, "mixtral", "olmo2"))]
)
def test_engines_over_int8_weights_have_the_logits_of_the_chain_and_store_no_normed_rows(name, tmp_path, counted):
    saved(next(case for case in CASES if case.name == name), tmp_path)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    with engine_over(tmp_path, fuses=False) as engine:
        expected = prompt_logits(engine, prompt)
        report = engine.explain()
        assert "norm_linear[int8]" not in report["ops"] and "norm_linear[int8]" not in report["fused"]
    with engine_over(tmp_path, fuses=True) as engine:
        counted.clear()
        assert torch.equal(prompt_logits(engine, prompt), expected)
        spec, report = engine.parts.spec, engine.explain()
    # What `explain` says is saved is twice a row in bf16, each time that rows leave a norm as int8.
    saves, is_fused = saved_bytes.norm_linear(spec, 2), [name.startswith("rms_norm_int8") for name in counted]
    assert saves == sum(is_fused) * 2 * spec.embed_dim * 2
    assert report["fused"].get("norm_linear[int8]") == ({"source": "interpreted", "saves": saves} if saves else None)
    assert report["ops"]["norm_linear[int8]"] == "interpreted"


@pytest.mark.slow
def test_answers_are_those_of_the_chain_whatever_runs_beside_them(tmp_path):
    path, _ = tiny_llama(tmp_path, hidden=32, heads=2, kv_heads=1, layers=2, ffn=48, attention_bias=True, mlp_bias=True)
    prompts = [[5, 6, 7], [8, 9], [1]]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, temperature=t, seed=7) for t in (0, 0.9, 1.3)]
    answers = []
    for fuses in (False, True):
        with engine_over(path, fuses=fuses) as engine:
            answers.append([answer.token_ids for answer in engine.generate(prompts, params)])
    assert answers[0] == answers[1]
