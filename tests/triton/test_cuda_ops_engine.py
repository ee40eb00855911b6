"""The kernels `cuda` as a part: where they fit, what they stand for, what they save; and engines over them.

Engines run them in Triton's interpreter, on the CPU.
"""

import types
from functools import partial

import pytest
import torch

from bfloat16_interpreter import _rounds_to_bfloat16  # noqa: F401
from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.errors import CompositionError
from intarsia.hookspecs import hookimpl
from intarsia.ops import BY_FORMAT, FUSED, NAMES, OPS, resolve
from intarsia.protocols import PartContext
from intarsia.testing import prompt_logits
from intarsia.types import (
    AttentionSpec,
    DecoderSpec,
    EngineOptions,
    Fit,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Provider,
    RopeSpec,
)
from intarsia_cuda import graphs, kernels, saved_bytes, vmm

ROPE = RopeSpec(kind="default", base=1e4, dim=128)


def spec_of(*, head_dim=128, layers=2, norm="rms", norms="pre", parallel=False, mlp=None, **attention):
    """4096 wide, 32 heads over 8, of 128."""
    facts = {"scale": 1.0, "rope": ROPE} | attention
    layer = LayerSpec(AttentionSpec(32, 8, head_dim, **facts), mlp or MlpSpec(14336, "silu"), norms, parallel)
    return DecoderSpec("llama", 1000, 4096, 512, NormSpec(norm), False, (layer,) * layers)


def context_of(device="cpu", dtype="bfloat16"):
    return PartContext(spec=spec_of(), engine=EngineOptions(device=device, dtype=dtype))


# --- where it fits ----------------------------------------------------------------------------------------------------


def test_on_a_cpu_it_says_in_one_line_what_it_is_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built_for, why in (("13.0", "torch sees no GPU, nor a driver"), (None, "the torch that is installed is built")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        for part, what in ((kernels, "its kernels run on"), (vmm, "it maps"), (graphs, "it captures")):
            reason = part.fit(context_of()).reason
            assert reason.startswith(what) and f"NVIDIA GPUs, and the engine runs on cpu: {why}" in reason
            assert ". " not in reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.fit(context_of()).reason == "its kernels run on NVIDIA GPUs, and the engine runs on cpu"


def test_an_engine_that_asks_for_it_without_a_gpu_is_refused_with_that_line(tmp_path):
    path = saved_model("llama with biases", tmp_path)
    with pytest.raises(CompositionError, match=r"kernels: 'cuda' cannot be used here: its kernels run on NVIDIA GPUs"):
        engine_of(path, engine={"device": "cpu"}, kernels="cuda")


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True)])
def test_on_a_gpu_the_compute_capability_decides(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = kernels.fit(context_of("cuda:1"))
    assert isinstance(found, Fit) == fits
    if not fits:
        assert found.reason == "its kernels need compute capability 8.0, and cuda:1 has 7.5"


def test_without_triton_and_on_another_makers_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD's" in kernels.fit(context_of("cuda")).reason
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: None)
    assert "triton is not installed" in kernels.fit(context_of("cuda")).reason


# --- what it stands for -----------------------------------------------------------------------------------------------

OURS = set(NAMES) - {"linear", "norm_linear", "embedding", "all_reduce", "all_gather"}
#: Between ranks; on one device some are ours by another name.
BETWEEN = {"gather_tokens", "gather_rows", "own_tokens", "look_up", "rms_norm_over_ranks"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_op_but_products_and_look_ups_is_ours_and_bitwise(dtype):
    ops = resolve([("cuda", kernels.CudaKernels(spec_of()).kernels())], dtype, ["dense"], "cuda")
    for op in OURS - BETWEEN:
        choice = ops.choices[op]
        assert (choice.source, choice.kernel.invariance[dtype]) == ("cuda", "bitwise"), op
    assert ops.choices["linear[dense]"].source == ops.choices["embedding[dense]"].source == "torch"
    assert all(op in ops.choices for op in FUSED if op not in BY_FORMAT)
    assert ops.orders() == OPS["cache_write"].orders


def test_heads_wider_than_what_there_are_forms_for_are_the_references():
    ops = resolve([("cuda", kernels.CudaKernels(spec_of(head_dim=257)).kernels())], "bfloat16", ["dense"], "cuda")
    assert {ops.choices[op].source for op in ("rope", "cache_write")} == {"torch"} and ops.attention_inputs is None
    assert ops.choices["rms_norm"].source == "cuda"


def test_every_form_has_a_name_of_its_own():
    names = [form.name for form in kernels.specialisations()]
    assert len(names) == len(set(names))


# --- what it saves ----------------------------------------------------------------------------------------------------


def test_a_token_saves_what_the_formulas_say():
    spec = spec_of()
    # Two layers have four norms before blocks; all but the first follow a sum.
    assert saved_bytes.add_rms_norm(spec, 2) == 3 * 4096 * 2
    assert saved_bytes.gated("silu", spec, 2) == 2 * 2 * 14336 * 2
    # Rotation reads and writes 40 heads, of which the kernel reads and writes the keys once less, and queries no more.
    assert saved_bytes.attention_inputs(spec, 2) == 2 * (2 * 40 + 4 * 8 - 2 * (32 + 16)) * 128 * 2 == 2 * 16 * 128 * 2
    # Of four norms each one's rows are neither written nor read again; of a mixture many read them.
    assert saved_bytes.norm_linear(spec, 2) == 4 * 2 * 4096 * 2
    mixture = MoeSpec(num_experts=8, top_k=2, ffn_dim=64, activation="silu")
    assert saved_bytes.norm_linear(spec_of(mlp=mixture), 2) == 2 * 2 * 4096 * 2
    normed = spec_of(qk_norm="head")
    assert saved_bytes.attention_inputs(normed, 2) == 2 * (16 + 4 * 40) * 128 * 2


def test_where_the_chain_is_not_there_or_runs_as_it_is_nothing_is_saved():
    assert saved_bytes.add_rms_norm(spec_of(norm="layer"), 2) == 0
    assert saved_bytes.add_rms_norm(spec_of(norms="post"), 2) == 0
    assert saved_bytes.add_rms_norm(spec_of(parallel=True), 2) == 1 * 4096 * 2
    assert saved_bytes.gated("gelu_tanh", spec_of(mlp=MlpSpec(64, "gelu_tanh", gated=False)), 2) == 0
    assert saved_bytes.gated("gelu_tanh", spec_of(), 2) == 0, "the model does not call it"
    assert saved_bytes.attention_inputs(spec_of(qk_norm="all"), 2) == 0
    assert saved_bytes.attention_inputs(spec_of(rope=None), 2) == 0
    assert saved_bytes.norm_linear(spec_of(norm="layer"), 2) == 0
    assert saved_bytes.norm_linear(spec_of(norms="post"), 2) == 0
    assert saved_bytes.norm_linear(spec_of(parallel=True), 2) == 0


# --- engines ----------------------------------------------------------------------------------------------------------


def saved_model(name, path):
    saved(next(case for case in CASES if case.name == name), path)
    return path


def interpreted():
    """A plugin that offers the kernels on a CPU. Products of whole numbers are not these tests' business."""

    def build(context):
        found = [kernel for kernel in kernels.build(context).kernels() if kernel.op != "linear"]
        return types.SimpleNamespace(kernels=lambda: found)

    plugin = types.ModuleType("interpreted")
    plugin.provide_kernels = hookimpl(lambda: [Provider(key="interpreted", summary="a fake", build=build)])
    return plugin


def engine_over(path, key, dtype, **sections):
    plugins = [interpreted()] if key == "interpreted" else []
    made = {"max_model_len": 64, "dtype": dtype}
    attention = "tiled" if dtype == "float32" else "eager"  # the one keeps a row's bits through chunks, in fp32
    return engine_of(path, engine=made, kernels=key, plugins=plugins, runner="eager", attention=attention, **sections)


#: Norms before and behind blocks, of heads and over all heads, layer norms; whole and partial rotation and none; gates.
NAMED = ["llama with biases", "qwen3", "gemma3_text with a cap and biases", "olmo2", "gpt2", "phi tied", "mixtral"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", "bfloat16"),
        ("gemma3_text with a cap and biases", "float32"),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in NAMED if "gemma3" not in name),
        pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_logits_over_them_are_those_over_the_references(name, dtype, tmp_path):
    path, prompt = saved_model(name, tmp_path), [3, 1, 4, 1, 5, 9, 2, 6]
    with engine_over(path, "torch", dtype) as engine:
        expected = prompt_logits(engine, prompt)
    with engine_over(path, "interpreted", dtype) as engine:
        found = prompt_logits(engine, prompt)
        again = prompt_logits(engine, prompt, chunk=3)
        spec = engine.parts.spec
        turned = any(x.attention.rope is not None and x.attention.qk_norm != "all" for x in spec.layers)
        assert ("attention_inputs" in engine.explain()["fused"]) == turned
    if dtype == "float32":
        assert float((found - expected).abs().max()) <= 1e-4
        assert torch.equal(again, found), "chunks do not show"
    else:
        # In bf16 a rounding here and there is amplified by the layers behind it.
        assert float((found - expected).abs().max()) <= 0.1 * float(expected.abs().max())


def test_answers_over_them_greedy_and_drawn_are_those_over_the_references(tmp_path):
    path = saved_model("qwen3", tmp_path)
    sampled = partial(SamplingParams, max_tokens=4, ignore_eos=True)
    params = [
        sampled(temperature=0),
        sampled(temperature=0.9, top_p=0.8, seed=1),
        sampled(temperature=1.2, top_k=20, min_p=0.02, seed=2),
    ]
    answers = []
    for key in ("torch", "interpreted"):
        with engine_over(path, key, "float32") as engine:
            answers.append([c.token_ids for c in engine.generate([[5, 6, 7], [8, 9], [1]], params)])
            names = {"attention_inputs", "sample_rows"}
            assert (names <= set(engine.parts.ops.choices)) == (key == "interpreted")
    assert answers[0] == answers[1]


def test_an_int8_cache_is_written_as_by_the_reference(tmp_path):
    path, prompt = saved_model("llama with biases", tmp_path), [3, 1, 4, 1, 5, 9]
    cache = {"memory": "16MiB", "format": "int8"}
    with engine_over(path, "torch", "float32", cache=cache) as engine:
        expected = prompt_logits(engine, prompt)
    with engine_over(path, "interpreted", "float32", cache=cache) as engine:
        assert engine.parts.layout.format == "int8"
        assert float((prompt_logits(engine, prompt) - expected).abs().max()) <= 2e-2
