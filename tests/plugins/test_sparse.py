"""The sparse24 quantizer: what is pruned and what is kept, by magnitude and by Wanda, and engines that run on it."""

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ConfigError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.sparse import check_mask
from intarsia.testing.quantizers import QuantizerContract
from intarsia.types import EngineOptions, dense
from intarsia_sparse import provide_quantizers
from intarsia_sparse.options import SparseOptions
from intarsia_sparse.quantizer import prune
from models import tiny_llama

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 70))
quick = settings(max_examples=25, deadline=None)


class Contract(QuantizerContract):
    def provider(self):
        return provide_quantizers()[0]


class TestPruned(Contract):
    """What is kept stays as it is."""


class TestPrunedInBfloat16(Contract):
    dtype = "bfloat16"


class TestPrunedToInt8(Contract):
    options: ClassVar = {"values": "int8"}


def quantizer(dtype="float32", **options):
    [provider] = provide_quantizers()
    context = PartContext(engine=EngineOptions(device="cpu", dtype=dtype), spec=None, options=SparseOptions(**options))
    return provider.build(context)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def statistics(mean_square):
    return InputStatistics(mean_square.sqrt() * 3, mean_square, torch.zeros(1, len(mean_square)).bfloat16())


def calibrated(tmp_path, **inputs):
    """Write a calibration with these mean squares of inputs; return its path."""
    path = tmp_path / "calibration.safetensors"
    named = {name: statistics(mean_square) for name, mean_square in inputs.items()}
    Calibration(named, "tiny", 100).save(path)
    return str(path)


def pruned_by_hand(weight, importance):
    """Keep the two highest scores of four, the first of equal ones; in float64, a row at a time."""
    masked = torch.zeros_like(weight)
    scores = weight.double().abs() * importance.double()
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 4):
            columns = range(start, min(start + 4, weight.shape[1]))
            for column in sorted(columns, key=lambda c: -float(scores[row, c]))[:2]:
                masked[row, column] = weight[row, column]
    return masked


@quick
@given(shape=SHAPES, power=st.integers(-30, 30), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_the_two_largest_of_four_stay_as_they_are(shape, power, dtype):
    power = max(-3, min(3, power)) if dtype == "float16" else power
    w = (drawn(*shape) * 10.0**power).to(getattr(torch, dtype))
    weight = quantizer(dtype).quantize("layers.0.out.weight", dense(w))
    assert weight.format.name == "sparse24"
    assert torch.equal(weight.dequantize(), pruned_by_hand(w, torch.ones(shape[1])))
    assert weight.num_bytes == quantizer(dtype).num_bytes("layers.0.out.weight", shape)


@quick
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_wanda_keeps_the_two_highest_products_of_magnitude_and_input(shape, seed):
    w, importance = drawn(*shape, seed=seed), torch.rand(shape[1], generator=torch.Generator().manual_seed(seed))
    assert torch.equal(prune("w", w, importance.double()).dequantize(), pruned_by_hand(w, importance))


@quick
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_values_in_int8_are_at_most_half_a_scale_off_what_is_kept(shape, seed):
    w = drawn(*shape, seed=seed)
    weight = quantizer(values="int8").quantize("w", dense(w))
    kept = pruned_by_hand(w, torch.ones(shape[1]))
    scale = kept.double().abs().amax(1) / 127
    assert weight.format.name == "sparse24_int8" and weight.tensors["values"].dtype == torch.int8
    assert torch.allclose(weight.tensors["scale"].double(), scale, rtol=1e-6)
    assert ((weight.dequantize() - kept).abs() <= scale[:, None] * 0.5001).all()
    assert not weight.dequantize()[kept == 0].any()


def sparse_matrix(outs, ins):
    """A matrix that is 2:4 sparse, some of whose groups keep one number or none."""
    w = pruned_by_hand(drawn(outs, ins), torch.ones(ins))
    w[:, ::5] = 0
    return w


@pytest.mark.parametrize("importance", [None, "dead", "random"])
def test_a_matrix_that_is_sparse_keeps_its_numbers_whatever_its_inputs(importance):
    """Inputs that were always 0 make scores of 0: what is kept of them still comes before what is not there."""
    w = sparse_matrix(30, 50)
    inputs = {"dead": torch.zeros(50), "random": torch.rand(50)}.get(importance)
    assert torch.equal(prune("w", w, inputs).dequantize(), w)


def test_tiny_weights_of_tiny_inputs_are_still_told_apart():
    w = torch.tensor([[1e-38, 2e-38, 3e-38, 4e-38]])
    assert prune("w", w, torch.full((4,), 1e-30).double()).dequantize().tolist() == [[0, 0, w[0, 2], w[0, 3]]]


@pytest.mark.parametrize("to_int8", [False, True])
def test_large_weights_are_pruned_in_pieces_alike(monkeypatch, to_int8):
    w = drawn(50, 33)
    whole = prune("w", w, to_int8=to_int8)
    monkeypatch.setattr("intarsia_sparse.quantizer._CHUNK", 100)
    pieces = prune("w", w, to_int8=to_int8)
    assert all(torch.equal(whole.tensors[name], pieces.tensors[name]) for name in whole.tensors)


def test_wanda_loses_less_of_the_outputs_than_magnitude_where_inputs_differ():
    """Inputs of which a few are large, as in language models: what it measures is what it is for."""
    ins = 256
    sizes = torch.rand(ins, generator=torch.Generator().manual_seed(5)) + torch.where(torch.arange(ins) % 17 == 0, 9, 0)
    x, w = drawn(400, ins, seed=1) * sizes, drawn(96, ins, seed=2)
    right = x @ w.T

    def error(importance):
        return float((x @ prune("w", w, importance).dequantize().T - right).pow(2).mean() / right.pow(2).mean())

    magnitude, wanda = error(None), error(x.double().pow(2).mean(0).sqrt())
    assert wanda < 0.7 * magnitude


# --- options ----------------------------------------------------------------------------------------------------------


def test_it_takes_matrices_of_the_layers_and_leaves_head_and_embedding():
    shape = (8, 8)
    taken = {"layers.0.qkv.weight", "layers.0.down.weight", "layers.1.experts.0.down.weight"}
    left = {"embed.weight", "head.weight", "positions.weight", "layers.1.router.weight"}
    assert {name for name in taken | left if quantizer().accepts(name, shape)} == taken
    assert quantizer(head=True).accepts("head.weight", shape)
    assert quantizer(embed=True).accepts("embed.weight", shape)
    few = quantizer(exclude=("layers.0.*",))
    assert {name for name in taken if few.accepts(name, shape)} == {"layers.1.experts.0.down.weight"}


def test_a_calibration_is_asked_for_and_refused_where_it_is_not_read(tmp_path):
    with pytest.raises(ConfigError, match=r"the method 'wanda' needs .* `intarsia calibrate MODEL --out FILE` writes"):
        quantizer(method="wanda")
    with pytest.raises(ConfigError, match=r"not for 'magnitude'; quantizer\.method = 'wanda' asks for it"):
        quantizer(calibration=calibrated(tmp_path, a=torch.ones(4)))
    with pytest.raises(ConfigError, match=r"quantizer\.calibration: .* cannot be read"):
        quantizer(method="wanda", calibration=str(tmp_path / "none"))


def test_what_the_calibration_has_not_seen_is_refused_before_weights_load(tmp_path):
    path = calibrated(tmp_path, **{"layers.0.qkv": torch.ones(8)})
    wanda = quantizer(method="wanda", calibration=path)
    assert wanda.num_bytes("layers.0.qkv.weight", (4, 8)) == 4 * (4 * 4 + 1)
    with pytest.raises(ConfigError, match=r"has nothing of 'layers\.1\.qkv\.weight'"):
        wanda.num_bytes("layers.1.qkv.weight", (4, 8))
    with pytest.raises(ConfigError, match="has 12 inputs, and 8 in the calibration"):
        wanda.num_bytes("layers.0.qkv.weight", (4, 12))


@pytest.mark.parametrize("wrong", [{"method": "sparsegpt"}, {"values": "int4"}])
def test_unknown_values_of_options_are_refused(tmp_path, wrong):
    path, _ = tiny_llama(tmp_path, layers=1)
    with pytest.raises(ConfigError, match=next(iter(wrong.values()))):
        engine_of(path, quantizer={"use": "sparse24", **wrong})


# --- engines ----------------------------------------------------------------------------------------------------------


def linears(model, *, head=False):
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and ("proj" in name or (head and "lm_head" in name))
    }


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def is_greedy(logits, prompt, output, slack):
    logits = logits[len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    return bool((logits.amax(-1) - chosen <= slack).all())


@pytest.mark.parametrize("values", ["dense", "int8"])
@pytest.mark.parametrize("head", [False, True])
def test_an_engine_computes_what_its_pruned_weights_say(tmp_path, values, head):
    path, model = tiny_llama(tmp_path, layers=2, tie=True, attention_bias=True, mlp_bias=True)
    prompt, options = [3, 141, 59, 26, 5, 35], {"values": values, "head": head}
    with engine_of(path, kernels="torch", runner="eager", quantizer={"use": "sparse24", **options}) as engine:
        output = list(engine.generate([prompt], GREEDY)[0].token_ids)
        weights = engine.parts.weight_bytes
    with engine_of(path, kernels="torch", runner="eager") as engine:
        assert weights < engine.parts.weight_bytes or head  # a head that is pruned apart comes beside its embedding
    if head:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for parameter in linears(model, head=head).values():
        parameter.data = prune("w", parameter.detach(), to_int8=values == "int8").dequantize()
    logits = logits_of(model, prompt + output)
    assert is_greedy(logits, prompt, output, float(logits.std()) * 1e-3)


def test_an_engine_prunes_by_its_calibration(tmp_path):
    path, model = tiny_llama(tmp_path, layers=1)
    sizes = {"qkv": 64, "out": 64, "gate_up": 64, "down": 128}
    inputs = {f"layers.0.{name}": torch.rand(size).pow(4) for name, size in sizes.items()}
    options = {"use": "sparse24", "method": "wanda", "calibration": calibrated(tmp_path, **inputs)}
    prompt = [3, 141, 59, 26, 5, 35]
    with engine_of(path, kernels="torch", runner="eager", quantizer=options) as engine:
        output = list(engine.generate([prompt], GREEDY)[0].token_ids)
    where = {"o_proj": "out", "down_proj": "down", "gate_proj": "gate_up", "up_proj": "gate_up"}
    for name, parameter in linears(model).items():
        importance = inputs[f"layers.0.{where.get(name.split('.')[-2], 'qkv')}"].double().sqrt()
        parameter.data = pruned_by_hand(parameter.detach(), importance)
    logits = logits_of(model, prompt + output)
    assert is_greedy(logits, prompt, output, float(logits.std()) * 1e-3)


def test_a_sparse_checkpoint_gives_the_same_tokens_in_fewer_bytes(tmp_path):
    path, model = tiny_llama(tmp_path, layers=2)
    for parameter in linears(model).values():
        parameter.data = sparse_matrix(*parameter.shape)
        check_mask("w", parameter != 0)
    model.save_pretrained(path)
    prompt = [3, 141, 59, 26, 5, 35]
    with engine_of(path, kernels="torch", runner="eager") as engine:
        right, dense_bytes = engine.generate([prompt], GREEDY)[0].token_ids, engine.parts.weight_bytes
    with engine_of(path, kernels="torch", runner="eager", quantizer="sparse24") as engine:
        assert engine.generate([prompt], GREEDY)[0].token_ids == right
        assert engine.parts.weight_bytes < dense_bytes


def test_an_embedding_is_pruned_where_it_is_asked_for(tmp_path):
    path, model = tiny_llama(tmp_path, layers=1, tie=True)
    prompt = [3, 141, 59]
    with engine_of(path, kernels="torch", runner="eager", quantizer={"use": "sparse24", "embed": True}) as engine:
        output = list(engine.generate([prompt], GREEDY)[0].token_ids)
    for parameter in (*linears(model).values(), model.model.embed_tokens.weight):
        parameter.data = prune("w", parameter.detach()).dequantize()
    logits = logits_of(model, prompt + output)
    assert is_greedy(logits, prompt, output, float(logits.std()) * 1e-3)
