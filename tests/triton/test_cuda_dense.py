"""Linear layers over floats in Triton's interpreter, against float64; their bits in batches of all sizes; engines."""

import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import CompositionError
from intarsia.explain import explain
from intarsia.hookspecs import hookimpl
from intarsia.plugins import Registry
from intarsia.testing import prompt_logits
from intarsia.types import EngineOptions, PluginsOptions, Provider, dense
from intarsia_cuda import kernels
from intarsia_cuda.dense import linear, specialisations
from intarsia_cuda.quantized import matmuls
from intarsia_flash.attention import FlashAttention
from integer_weights import integer_weight
from interpreting import placeless_products, true_bf16  # noqa: F401
from models import tiny_llama

pytestmark = pytest.mark.usefixtures("true_bf16")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 300))  # outputs, columns: ragged tiles and pieces
quick = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def split(monkeypatch):
    """Has a device so wide that each split of a sum gets a program, or so narrow that none does."""

    def choose(is_split):
        monkeypatch.setattr(matmuls, "_multiprocessors", lambda _: 1 << 20 if is_split else 0)

    return choose


@pytest.fixture
def poisoned(monkeypatch):
    """What is made and not written is NaN."""

    def filled(*size, dtype=None, device=None, **_):
        return torch.full(
            size[0] if len(size) == 1 and not isinstance(size[0], int) else size, torch.nan, dtype=dtype, device=device
        )

    monkeypatch.setattr(torch, "empty", filled)


def drawn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def among_poison(matrix, right=16):
    """The same numbers within a matrix whose others are NaN."""
    rows, columns = matrix.shape
    wide = torch.full((rows + 3, columns + right), torch.nan, dtype=matrix.dtype)
    wide[:rows, :columns] = matrix
    return wide[:rows, :columns]


def check(outs, ins, rows, dtype, *, has_bias, right=16):
    x, weight = drawn(rows, ins, dtype=dtype), drawn(outs, ins, seed=1, dtype=dtype)
    bias = drawn(outs, seed=2, dtype=dtype) if has_bias else None
    found = linear(among_poison(x, right), dense(among_poison(weight, right)), bias)
    assert found.shape == (rows, outs) and found.dtype == dtype
    expected = x.double() @ weight.double().T
    bound = (x.double().abs() @ weight.double().abs().T) * 2**-20
    if bias is not None:
        expected, bound = expected + bias.double(), bound + bias.double().abs() * 2**-20
    assert bool(((found.double() - expected).abs() <= bound + expected.abs() * UNIT[dtype] + 1e-7).all())


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned")
@quick
@given(shape=SHAPES, rows=st.integers(1, 40), dtype=st.sampled_from(DTYPES), has_bias=st.booleans())
def test_products_equal_float64_and_read_nothing_beside_their_operands(shape, rows, dtype, has_bias):
    check(*shape, rows, dtype, has_bias=has_bias)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_several_splits_and_rows_of_several_tiles_are_right(dtype, split):
    for is_split in (True, False):
        split(is_split)
        check(70, 2100, 5, dtype, has_bias=True)
        check(40, 1168, 140, dtype, has_bias=False, right=3)


def test_no_rows_make_no_rows():
    assert linear(torch.zeros(0, 48).bfloat16(), dense(drawn(20, 48))).shape == (0, 20)


def test_operands_that_do_not_lie_in_rows_are_read_as_they_are():
    x, weight = drawn(48, 3).t(), drawn(48, 20, seed=1).t()
    assert torch.equal(linear(x, dense(weight)), linear(x.contiguous(), dense(weight.contiguous())))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_formats_that_no_kernel_reads_are_made_floats(dtype):
    weight, x = integer_weight("int4_g16", 40, 96), drawn(3, 96, dtype=dtype)
    assert torch.equal(linear(x, weight), linear(x, dense(weight.dequantize().to(dtype))))


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("placeless_products", "poisoned")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_among_one_to_forty_rows_and_in_the_last_place(dtype, split):
    x, weight, bias = drawn(40, 1030, dtype=dtype), dense(drawn(24, 1030, seed=1, dtype=dtype)), drawn(24, dtype=dtype)
    split(is_split=False)
    together = linear(x, weight, bias)
    for rows in range(1, 41):
        split(is_split=rows % 2 == 0)
        assert torch.equal(linear(x[:rows], weight, bias), together[:rows]), rows
        if rows in (1, 16, 17):
            assert torch.equal(linear(x[40 - rows :], weight, bias), together[40 - rows :]), rows


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_run_along_the_columns_in_one_order(dtype, split):
    """Rows lose bits from piece to piece: the first piece is large, and the last takes it off."""
    ins, piece = 1536, 32 if dtype == torch.float32 else 64
    x, weight = drawn(70, ins, dtype=dtype), drawn(20, ins, seed=1, dtype=dtype)
    x[:, :piece] *= 2**9
    x[:, -piece:], weight[:, -piece:] = -x[:, :piece], weight[:, :piece]

    def in_order(span):
        total = np.zeros((70, 20), np.float32)
        for first in range(0, ins, span):
            part = np.zeros_like(total)
            for start in range(first, min(first + span, ins), piece):
                one, other = (t[:, start : start + piece].double().numpy() for t in (x, weight))
                part = (one @ other.T + part).astype(np.float32)
            total = total + part
        return torch.from_numpy(total).to(dtype)

    expected = in_order(1024)
    assert not torch.equal(expected, in_order(ins)), "the rows do not show an order"
    for is_split in (True, False):
        split(is_split)
        for start, stop in [(69, 70), (3, 19), (0, 70)]:
            assert torch.equal(linear(x[start:stop], dense(weight)), expected[start:stop]), (is_split, start, stop)


def test_both_forms_of_a_dtype_multiply_as_many_columns_at_a_time():
    for dtype in ("bfloat16", "float16", "float32"):
        columns = {form.constants["BLOCK_C"] for form in specialisations() if f"[{dtype}," in form.name}
        assert len(columns) == 1, dtype


#: Compiles the forms of 16 bits and says which instructions of tensor cores each has: all but the rows of a product.
INSTRUCTIONS = """
import json, re
import triton
from intarsia_cuda import dense
from intarsia import gpu_kernels
kept, compile_triton = [], triton.compile
def keep(*args, **kwargs):
    kept.append(compile_triton(*args, **kwargs))
    return kept[-1]
triton.compile = keep
found = []
for form in dense.specialisations():
    for capability in form.capabilities:
        gpu_kernels.compile_for(form, capability)
        text = kept[-1].asm["ptx"]
        names = re.findall(r"wgmma\\.mma_async[\\w.]*|mma\\.sync[\\w.]*|tcgen05\\.mma[\\w.:]*", text)
        kinds = sorted({re.sub(r"m64n[0-9]+k", "m64k", name) for name in names})
        found.append([form.name.partition(",")[0], capability, kinds])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_both_forms_of_a_dtype_multiply_with_the_same_instructions_on_every_architecture():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", INSTRUCTIONS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    found = {}
    for name, capability, kinds in json.loads(run.stdout):
        assert len(kinds) == (0 if "float32" in name else 1), "fp32 is no matter of tensor cores"
        found.setdefault((name, capability), []).append(kinds)
    assert {capability for _, capability in found} == {80, 90, 100}
    assert all(few == many for few, many in found.values())


# --- composing --------------------------------------------------------------------------------------------------------

HOPPER = types.SimpleNamespace(
    name="a GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=228 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
)


@pytest.fixture
def gpu(monkeypatch):
    """Torch's facts of a GPU, without one."""
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (80 << 30, 80 << 30),
        "get_device_capability": (9, 0),
        "get_device_properties": HOPPER,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2, tie=True)[0]


def report_of(model, invariance, dtype="bfloat16", **sections):
    engine = {"device": "cuda", "dtype": dtype, "invariance": invariance}
    config = load_config({"model": str(model), "cache": {"memory": "16MiB"}, "engine": engine, **sections})
    return explain(config, compose(config, Registry.discover(PluginsOptions())))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_composes_bitwise_where_that_is_asked_for_and_explain_says_by_whom(model, dtype):
    report = report_of(model, "bitwise", dtype)
    assert report["invariance"]["level"] == "bitwise"
    assert report["ops"]["linear[dense]"] == "cuda" and report["parts"]["attention"]["key"] == "flash"
    assert "engine.invariance = 'bitwise'" in report["parts"]["kernels"]["reason"]
    assert report_of(model, "neighbours", dtype)["invariance"]["level"] == "neighbours", "rows that decode are split"


@pytest.mark.usefixtures("gpu")
def test_left_alone_it_multiplies_by_cublas_and_explain_names_that_as_the_weakest_part(model):
    report = report_of(model, "numeric")
    by_part = report["invariance"]["by_part"]
    assert report["invariance"]["level"] == "numeric" and report["ops"]["linear[dense]"] == "torch"
    assert {name for name, level in by_part.items() if level == "numeric"} == {"linear[dense]"}
    assert "invariance" not in report["parts"]["kernels"]["reason"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantizer", ["int8", {"use": "int8", "group": 0}, "int4", "sparse24"])
def test_quantized_weights_compose_bitwise_too(model, quantizer, dtype):
    report = report_of(model, "bitwise", dtype, quantizer=quantizer)
    assert report["invariance"]["level"] == "bitwise"


@pytest.mark.usefixtures("gpu")
def test_torchs_products_are_refused_by_name_where_bitwise_is_asked_for(model):
    with pytest.raises(CompositionError, match=r"linear\[dense\] of kernels 'torch' keeps 'numeric'"):
        report_of(model, "bitwise", kernels="torch")


# --- engines ----------------------------------------------------------------------------------------------------------


def interpreted():
    """A plugin that offers kernels and attention as a GPU has them, on a CPU."""

    def flash(context):
        layers = tuple(dict.fromkeys(layer.attention for layer in context.spec.layers))
        return FlashAttention(context.engine.dtype, layers, splits=context.engine.invariance != "bitwise", roomy=False)

    def offer(build):
        return hookimpl(lambda: [Provider(key="interpreted", summary="a fake", build=build)])

    plugin = types.ModuleType("interpreted")
    plugin.provide_kernels, plugin.provide_attention_backends = offer(kernels.build), offer(flash)
    return plugin


def engine_over(model, key, dtype):
    engine = {"max_model_len": 64, "dtype": dtype, "invariance": "bitwise" if key == "interpreted" else "numeric"}
    parts = {"kernels": key, "attention": "tiled" if key == "torch" else key, "runner": "eager"}
    return engine_of(model, engine=engine, plugins=[interpreted()], **parts)


@pytest.mark.slow
@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_a_row_the_same_bits_whatever_its_chunks_and_neighbours(model, dtype):
    prompt, others = [3, 1, 4, 1, 5, 9, 2, 6], [[7, 8, 9], [2] * 11]
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    with engine_over(model, "torch", "float32") as engine:
        expected = prompt_logits(engine, prompt)
    with engine_over(model, "interpreted", dtype) as engine:
        assert engine.explain()["invariance"]["level"] == "bitwise"
        found = prompt_logits(engine, prompt)
        assert torch.equal(prompt_logits(engine, prompt, chunk=3), found), "chunks do not show"
        (alone,) = engine.generate([prompt], greedy)
        beside = engine.generate([*others, prompt], greedy)[-1]
    assert (beside.token_ids, beside.choices[0].logprobs) == (alone.token_ids, alone.choices[0].logprobs)
    limit = 1e-4 if dtype == "float32" else 0.1 * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= limit


def test_the_levels_that_cublas_keeps_take_cublas():
    found = {level: kernels._asks(EngineOptions(invariance=level)) for level in ("numeric", "neighbours", "bitwise")}
    assert found == {"numeric": False, "neighbours": True, "bitwise": True}
