"""Ops that stand for a chain of others: when a kernel is taken for one, who calls it, and what `explain` says.

Shape legend: T tokens, H heads, K kv heads, N = H + 2 K heads, D head dim.
"""

import types

import pytest
import torch
from attrs import evolve

from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.errors import PluginError
from intarsia.hookspecs import hookimpl
from intarsia.ops import FUSED, NAMES, OPS, rebound, resolve
from intarsia.protocols import Kernel
from intarsia.sampling import draw
from intarsia.sampling.settings import Settings
from intarsia.testing import prompt_logits
from intarsia.types import Provider, dense
from models import tiny_llama

ORDERS, FORMATS = OPS["cache_write"].orders, OPS["cache_write"].formats


def fused(op="attention_inputs", call=lambda *_: None, **facts):
    writes = {"orders": ORDERS, "formats": FORMATS} if op == "attention_inputs" else {}
    return Kernel(op=op, call=call, **(writes | facts))


def source(sets, op="attention_inputs", dtype="float32"):
    choice = resolve(sets, dtype, ["dense"]).choices.get(op)
    return None if choice is None else choice.source


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_without_a_kernel_nothing_stands_for_a_chain():
    ops = resolve([], "float32", ["dense"])
    assert not set(FUSED) & set(ops.choices)
    assert (ops.attention_inputs, ops.sample_rows, ops.norm_linear(dense(torch.zeros(2, 2)))) == (None, None, None)
    assert set(NAMES) == set(OPS) | set(FUSED)
    assert all(part in OPS for chain in FUSED.values() for part in chain)


def test_the_first_kernel_for_a_chain_is_taken():
    one, other = fused(), fused()
    ops = resolve([("a", [one]), ("b", [other])], "float32", ["dense"])
    assert ops.choices["attention_inputs"].source == "a" and ops.attention_inputs is one.call


@pytest.mark.parametrize("part", FUSED["attention_inputs"])
def test_a_set_before_it_that_has_a_part_of_the_chain_keeps_the_chain(part):
    assert source([("torch", [OPS[part]]), ("b", [fused()])]) is None
    assert source([("torch", [OPS["silu_mul"]]), ("b", [fused()])]) == "b"
    assert source([("b", [fused()]), ("torch", [OPS[part]])]) == "b"
    narrow = evolve(OPS[part], dtypes=frozenset({"float16"}))
    assert source([("torch", [narrow]), ("b", [fused()])]) == "b"


def test_one_that_lacks_the_dtype_is_passed_over():
    half = fused(dtypes=frozenset({"bfloat16"}))
    assert source([("a", [half])], dtype="float32") is None
    assert source([("a", [half])], dtype="bfloat16") == "a"


def test_one_that_writes_fewer_caches_than_the_chosen_cache_write_is_passed_over():
    assert source([("a", [fused(orders=frozenset({"PSKD"}))])]) is None
    assert source([("a", [fused(formats=frozenset({"int8"}))])]) is None
    writer = evolve(OPS["cache_write"], formats=frozenset({"int8"}))
    assert source([("a", [writer, fused(formats=frozenset({"int8"}))])]) == "a"
    # What does not write is not asked for it.
    assert source([("a", [fused("sample_rows")])], op="sample_rows") == "a"


def test_a_misspelt_chain_is_refused_with_the_nearest_names():
    with pytest.raises(PluginError, match="'attention_inputs'"):
        resolve([("a", [fused("attention_input")])], "float32", ["dense"])


# --- who calls it -----------------------------------------------------------------------------------------------------


def plugin_of(*kernels):
    """A plugin whose kernels are these, under the key `fusing`."""
    plugin = types.ModuleType("fusing")
    part = types.SimpleNamespace(kernels=lambda: kernels)
    plugin.provide_kernels = hookimpl(lambda: [Provider(key="fusing", summary="a fake", build=lambda _: part)])
    return plugin


def by_the_ops(seen, qkv_TND, num_heads, norms, eps, angles, cache, slots_T, order):
    """The chain, by the references, that notes what it was given."""
    seen.append((tuple(qkv_TND.shape), num_heads, norms is None, angles is None, eps, order))
    last_key = (num_heads + qkv_TND.shape[1]) // 2
    qk, values = qkv_TND[:, :last_key], qkv_TND[:, last_key:]
    if angles is not None:
        qk = OPS["rope"].call(qk, *angles)
    OPS["cache_write"].call(qk[:, num_heads:], values, cache, slots_T, order)
    return qk[:, :num_heads]


def fused_engine(path, kernel, **sections):
    return engine_of(path, plugins=[plugin_of(kernel)], kernels="fusing", runner="eager", attention="tiled", **sections)


def test_eager_calls_it_in_the_place_of_the_chain_once_a_layer(tmp_path):
    path, _ = tiny_llama(tmp_path)
    prompt, seen = list(range(9)), []
    kernel = fused(call=lambda *args: by_the_ops(seen, *args))
    with engine_of(path, kernels="torch", runner="eager", attention="tiled") as engine:
        expected = prompt_logits(engine, prompt)
    with fused_engine(path, kernel) as engine:
        assert engine.parts.ops.choices["attention_inputs"].source == "fusing"
        seen.clear()
        assert torch.equal(prompt_logits(engine, prompt), expected)
        order = engine.parts.layout.order
    assert seen == [((9, 8, 16), 4, True, False, seen[0][4], order)] * 4


# --- a norm and the linear behind it ---------------------------------------------------------------------------------


def normed(formats=("dense",), call=lambda *_: None, **facts):
    return Kernel(op="norm_linear", call=call, formats=frozenset(formats), **facts)


def linear(formats=("dense",), **facts):
    return Kernel(op="linear", call=lambda *_: None, formats=frozenset(formats), **facts)


def normed_by(sets, formats=("dense", "whole")):
    """Format -> the set whose kernel stands for the norm and the linear."""
    choices = resolve(sets, "float32", formats).choices
    return {name: choices[f"norm_linear[{name}]"].source for name in formats if f"norm_linear[{name}]" in choices}


def test_a_norm_and_its_linear_are_chosen_by_weight_format():
    assert normed_by([("a", [normed()])]) == {"dense": "a"}
    assert normed_by([("a", [normed(["whole"])]), ("b", [normed(["*"])])]) == {"whole": "a", "dense": "b"}
    assert normed_by([("a", [normed(dtypes=frozenset({"bfloat16"}))])]) == {}


def test_a_set_before_it_that_reads_the_format_or_norms_keeps_the_chain_of_a_norm_and_its_linear():
    assert normed_by([("a", [linear(["whole"])]), ("b", [normed(["dense", "whole"])])]) == {"dense": "b"}
    assert normed_by([("a", [OPS["add_rms_norm"]]), ("b", [normed()])]) == {}
    assert normed_by([("a", [OPS["layer_norm"]]), ("b", [normed()])]) == {"dense": "b"}


def test_weights_that_another_set_packs_are_not_its_to_read():
    packing = linear(pack=lambda weight: weight, packed="tiles")
    assert normed_by([("a", [normed()]), ("b", [packing])]) == {}
    assert normed_by([("a", [normed(), packing])]) == {"dense": "a"}
    kernel = normed()
    tiles = types.SimpleNamespace(format=types.SimpleNamespace(name="tiles"))
    assert resolve([("a", [kernel, packing])], "float32", ["dense"]).norm_linear(tiles) is kernel.call
    assert resolve([("a", [packing])], "float32", ["dense"]).norm_linear(tiles) is None


def test_ranks_that_gather_tokens_between_the_norm_and_the_linear_run_the_chain():
    ops = resolve([("a", [normed(), fused()])], "float32", ["dense"])
    weight = dense(torch.zeros(2, 2))
    assert rebound(ops, {"all_reduce": lambda x: x}, "ranks").norm_linear(weight) is not None
    gathering = rebound(ops, {"gather_tokens": lambda x, _: x}, "ranks")
    assert gathering.norm_linear(weight) is None and gathering.attention_inputs is not None


def by_the_references(seen, x_TE, residual_TE, norm_weight_E, eps, weight, bias_N):
    """The chain of a norm and a linear, that notes what it was given."""
    seen.append((residual_TE is None, weight.shape, bias_N is not None))
    total_TE = x_TE if residual_TE is None else residual_TE + x_TE
    return OPS["linear"].call(OPS["rms_norm"].call(total_TE, norm_weight_E, eps), weight, bias_N), total_TE


def test_eager_calls_it_before_attention_and_the_feed_forward_of_each_layer(tmp_path):
    path, _ = tiny_llama(tmp_path, attention_bias=True)
    prompt, seen = list(range(9)), []
    kernel = normed(call=lambda *args: by_the_references(seen, *args))
    with engine_of(path, kernels="torch", runner="eager", attention="tiled") as engine:
        expected = prompt_logits(engine, prompt)
    with fused_engine(path, kernel) as engine:
        seen.clear()
        assert torch.equal(prompt_logits(engine, prompt), expected)
    qkv, up = (128, 64), (256, 64)
    layers = [(False, qkv, True), (False, up, False)] * 4
    assert seen == [(True, qkv, True), *layers[1:]]


@pytest.mark.parametrize(
    ("name", "places"),
    [("gpt2", 0), ("olmo2", 0), ("phi tied", 0), ("mixtral", 1), ("gemma3_text with a cap and biases", 2)],
)
def test_where_no_norm_is_read_by_one_linear_alone_the_chain_runs(name, places, tmp_path):
    saved(next(case for case in CASES if case.name == name), tmp_path)
    prompt, seen = [3, 1, 4, 1, 5, 9], []
    kernel = normed(call=lambda *args: by_the_references(seen, *args))
    with engine_of(tmp_path, kernels="torch", runner="eager", attention="tiled") as engine:
        expected = prompt_logits(engine, prompt)
    with fused_engine(tmp_path, kernel) as engine:
        seen.clear()
        assert torch.equal(prompt_logits(engine, prompt), expected)
        assert len(seen) == places * engine.parts.spec.num_layers


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_names_what_is_fused_and_the_bytes_that_it_saves_a_token(tmp_path):
    path, _ = tiny_llama(tmp_path)
    asked = []

    def saves(spec, size):
        asked.append((spec.num_layers, size))
        return 10 * size

    with fused_engine(path, fused(call=lambda *args: by_the_ops([], *args), saves=saves)) as engine:
        report = engine.explain()
        assert report["fused"] == {"attention_inputs": {"source": "fusing", "saves": 40}}
        assert report["ops"]["attention_inputs"] == "fusing"
    assert set(asked) == {(4, 4)}
    with fused_engine(path, fused(call=lambda *args: by_the_ops([], *args), saves=lambda *_: 0)) as engine:
        assert engine.explain()["fused"] == {}
    with engine_of(path) as engine:
        assert engine.explain()["fused"] == {}


# --- sampling ---------------------------------------------------------------------------------------------------------


def drawing(seen):
    """`sample_rows` by the sampler's own code, that notes how many rows it was given."""

    def sample_rows(logits_LV, temperatures_L, top_ks_L, top_ps_L, min_ps_L, uniforms_L):
        assert [x.dtype for x in (top_ks_L, top_ps_L, uniforms_L)] == [torch.int32, torch.float64, torch.float64]
        seen.append(len(logits_LV))
        columns = (x.tolist() for x in (temperatures_L, top_ks_L, top_ps_L, min_ps_L))
        names = ("temperature", "top_k", "top_p", "min_p")
        plain = {"typical_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        settings = [Settings(**dict(zip(names, row, strict=True)), **plain) for row in zip(*columns, strict=True)]
        return torch.tensor(draw(logits_LV, settings, uniforms_L.numpy()))

    return sample_rows


def test_requests_that_are_drawn_are_drawn_by_it_and_others_are_not(tmp_path):
    path, _ = tiny_llama(tmp_path)
    sampled = [
        SamplingParams(temperature=0.9, top_p=0.8, seed=1, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=1.3, top_k=9, min_p=0.01, seed=2, max_tokens=5, ignore_eos=True),
    ]
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    typical = SamplingParams(temperature=0.9, typical_p=0.5, seed=3, max_tokens=5, ignore_eos=True)
    prompts, params, seen = [[5, 6, 7]] * 4, [*sampled, greedy, typical], []
    with engine_of(path) as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, params)]
    with fused_engine(path, fused("sample_rows", drawing(seen))) as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
        assert sum(seen) == 10
        seen.clear()
        engine.generate(prompts[2:], params[2:])
        assert seen == []
