"""SmolLM2 pruned to 2:4, end to end: what transformers computes with weights that are pruned by hand."""

import math
import pydoc_data.topics

import pytest
import torch

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ModelNotFoundError
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.references import find_model
from intarsia.testing import prompt_logits
from intarsia_cpu.build import unavailable
from smollm import smollm_transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason="there is no C++ compiler"),
]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LINEARS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "out", "down_proj": "down"}
LINEARS |= {"gate_proj": "gate_up", "up_proj": "gate_up"}


@pytest.fixture(scope="module", autouse=True)
def smollm2():
    try:
        return find_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def engine(dtype, **quantizer):
    options = {"dtype": dtype, "threads": 2, "max_model_len": 1024, "invariance": "bitwise"}
    cache = {"use": "paged", "memory": "256MiB"}
    return engine_of(
        "smollm2", engine=options, cache=cache, runner="cpu_fused", quantizer={"use": "sparse24", **quantizer}
    )


@pytest.fixture(scope="module")
def text():
    """Two pieces of the same text: what is seen, and what is scored."""
    whole = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    with engine("float32") as ours:
        ids = ours.parts.tokenizer.encode(whole[:12_000])
    assert len(ids) > 2048
    return ids[:1024], ids[1024:2048]


def linear_name(name):
    """`model.layers.3.self_attn.q_proj` -> `layers.3.qkv`."""
    parts = name.split(".")
    return f"layers.{parts[2]}.{LINEARS[parts[4]]}"


def linears(model):
    return {name: module for name, module in model.named_modules() if name.split(".")[-1] in LINEARS}


@pytest.fixture(scope="module")
def inputs(text):
    """Mean squares of what transformers gives its linear layers, by our names."""
    model, sums = smollm_transformers(torch.float32), {}

    def watch(name):
        def hook(module, args):
            sums[name] = args[0][0].double().pow(2).mean(0)

        return hook

    for name, module in linears(model).items():
        module.register_forward_pre_hook(watch(linear_name(name)))
    with torch.no_grad():
        model(torch.tensor([text[0]]))
    assert len(sums) == 4 * 30
    return sums


@pytest.fixture(scope="module")
def calibration(inputs, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "smollm2.safetensors"
    named = {
        name: InputStatistics(mean.sqrt().float(), mean.float(), torch.zeros(1, len(mean)).bfloat16())
        for name, mean in inputs.items()
    }
    Calibration(named, "smollm2", 1024).save(path)
    return str(path)


def pruned(dtype, *, inputs=None, to_int8=False):
    """transformers' model with all but the two best of four numbers gone, by sorting."""
    model = smollm_transformers(dtype)
    for name, module in linears(model).items():
        w = module.weight.detach()
        scores = w.double().abs() * (inputs[linear_name(name)].float().double().sqrt() if inputs else 1)
        order = scores.view(len(w), -1, 4).argsort(dim=-1, descending=True, stable=True)
        mask = torch.zeros(order.shape, dtype=torch.bool).scatter_(2, order[..., :2], value=True)
        kept = torch.where(mask.flatten(1), w, 0)
        if to_int8:
            scale = kept.double().abs().amax(1, keepdim=True) / 127
            kept = ((kept.double() / scale).round() * scale).to(dtype)
        module.weight.data = kept
    return model


@torch.no_grad()
def theirs(model, ids):
    return model(torch.tensor([ids])).logits[0].float()


def perplexity(logits, ids):
    scores = torch.log_softmax(logits.double(), dim=-1)[:-1]
    return math.exp(-scores.gather(1, torch.tensor(ids[1:])[:, None]).mean())


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_logits_and_greedy_ids_in_fp32_are_those_of_weights_pruned_by_hand(method, text, inputs, request):
    options, by = {"method": method}, None
    if method == "wanda":
        options["calibration"], by = request.getfixturevalue("calibration"), inputs
    model, prompt = pruned(torch.float32, inputs=by), text[1][:100]
    with engine("float32", **options) as ours:
        found = prompt_logits(ours, prompt)
        output = ours.generate([prompt], GREEDY)[0].token_ids
    assert float((found - theirs(model, prompt)).abs().max()) <= 1e-3 * float(found.abs().max())
    logits = theirs(model, [*prompt, *output])[len(prompt) - 1 : -1]
    assert float((logits.amax(-1) - logits[torch.arange(len(output)), torch.tensor(output)]).max()) <= 1e-3


def test_values_in_int8_cost_little_beside_pruning_and_take_the_fewest_bytes(text, inputs, calibration):
    """Of what transformers computes with the same weights; activations in int8 are what differs."""
    ids = text[1]
    options = {"method": "wanda", "calibration": calibration}
    right = perplexity(theirs(pruned(torch.float32, inputs=inputs, to_int8=True), ids), ids)
    with engine("bfloat16", values="int8", **options) as ours:
        found, int8_bytes = perplexity(prompt_logits(ours, ids), ids), ours.parts.weight_bytes
    with engine("bfloat16", **options) as ours:
        assert int8_bytes < ours.parts.weight_bytes
    assert found == pytest.approx(right, rel=0.03)


def test_wanda_is_far_better_than_magnitude(text, calibration):
    """Measured on 8,000 tokens: a perplexity of 86 beside 3,562, and 11.8 of the dense model."""
    ids = text[1]
    with engine("bfloat16", method="wanda", calibration=calibration) as ours:
        wanda = perplexity(prompt_logits(ours, ids), ids)
    with engine("bfloat16") as ours:
        magnitude = perplexity(prompt_logits(ours, ids), ids)
    assert wanda < magnitude / 10
