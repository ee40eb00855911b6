"""Whole models that keep a GGUF file's bits: logits against transformers and against dense weights, memory, report."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.numpy import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from intarsia import Engine
from intarsia.models.weights import load_weights
from intarsia.testing import prompt_logits
from intarsia.types import Weight
from models import tiny_llama
from tools import gguf_blocks
from tools import gguf_bytes as gb
from tools.gguf_models import write_gguf

PROMPT = [5, 7, 200, 11, 11, 3, 90, 41, 250, 0, 17]
#: Type -> (scale, minimum) of random blocks whose numbers have a deviation of about 0.06.
_SIZES = {
    Kind.Q2_K: (5e-3, 7e-3),
    Kind.Q3_K: (1.5e-3, 0),
    Kind.Q4_K: (3e-4, 2e-3),
    Kind.Q5_K: (1.5e-4, 2e-3),
    Kind.Q6_K: (4e-5, 0),
}


def mixed(name):
    """The types of llama.cpp's Q4_K_M: values and `down` have more bits."""
    return Kind.Q6_K if "v_proj" in name or "down_proj" in name or "lm_head" in name else Kind.Q4_K


def matrix(kind, shape, seed):
    if kind in _SIZES:
        scale, minimum = _SIZES[kind]
        raw = gguf_blocks.random_blocks(kind, shape, scale=scale, minimum=minimum)
        return np.ascontiguousarray(np.random.default_rng(seed).permutation(raw))
    return quantize(np.random.default_rng(seed).standard_normal(shape).astype("<f4") * 0.06, kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "layers": 2}
    return tiny_llama(tmp_path_factory.mktemp("model"), **sizes)


def written(folder, path, type_of):
    """Write the model with its matrices quantized; return what the file means, by transformers' names."""
    named = [(name, value) for name, value in folder[1].named_parameters() if value.ndim == 2]
    stored = {
        name: (type_of(name), matrix(type_of(name), tuple(value.shape), seed))
        for seed, (name, value) in enumerate(named)
    }
    return write_gguf(folder[0], path, stored=stored)


def transformers_logits(folder, means):
    model = folder[1]
    model.load_state_dict({name: torch.from_numpy(values) for name, values in means.items()})
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def opened(path, weights, *, kernels="torch", runner="eager", dtype="float32"):
    return Engine.from_config(
        {
            "model": {"use": str(path), "weights": weights},
            "engine": {"dtype": dtype, "threads": 1, "max_model_len": 64},
            "cache": {"memory": "8MiB"},
            "kernels": kernels,
            "attention": "sdpa" if kernels == "torch" else "auto",
            "runner": runner,
        }
    )


def off(logits, expected):
    """How far logits are off, of their deviation, at the root of the mean of squares."""
    return (logits - expected).pow(2).mean().sqrt() / expected.std()


def loaded(engine):
    context = engine.parts.executor.context
    dtype = getattr(torch, context.engine.dtype)
    return load_weights(
        context.checkpoint, context.weight_map, dtype=dtype, device=torch.device("cpu"),
        quantizers=context.quantizers, ops=context.ops, progress=lambda *_: None,
    )  # fmt: skip


def bytes_of(weights):
    return sum(w.num_bytes if isinstance(w, Weight) else w.numel() * w.element_size() for w in weights.values())


@pytest.mark.parametrize("kind", gguf_blocks.FORMATS, ids=lambda kind: kind.name)
def test_a_model_that_keeps_its_bits_gives_the_logits_of_its_dequantized_weights(kind, folder, tmp_path):
    path = tmp_path / "model.gguf"
    expected = transformers_logits(folder, written(folder, path, lambda _: kind))
    with opened(path, "stored") as engine:
        formats = {source.kept.name for source in engine.parts.weight_map.tensors.values() if source.kept}
        assert formats == {gguf_blocks.FORMATS[kind]}
        logits = prompt_logits(engine, PROMPT)
    # What K types add is float16's rounding of scales, and numbers that are the small difference of two large ones.
    assert expected.std() > 0.1
    assert off(logits, expected) < (1e-5 if kind not in _SIZES else 4e-3)


def test_a_file_of_several_types_gives_the_logits_of_its_dequantized_weights(folder, tmp_path):
    path = tmp_path / "model.gguf"
    expected = transformers_logits(folder, written(folder, path, mixed))
    with opened(path, "stored") as engine:
        kept = {name: source.kept.name for name, source in engine.parts.weight_map.tensors.items() if source.kept}
        assert kept["layers.0.qkv.weight"] == "int8_g16_min", "the least that holds Q4_K and Q6_K"
        assert kept["layers.0.gate_up.weight"] == kept["layers.1.out.weight"] == "int4_g32_min"
        assert kept["layers.1.down.weight"] == kept["head.weight"] == "int8_g16"
        logits = prompt_logits(engine, PROMPT)
        assert bytes_of(loaded(engine)) == engine.parts.weight_bytes
    assert off(logits, expected) < 4e-3


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_best_kernels_that_are_there_stay_near_the_dequantized_weights(kind, dtype, folder, tmp_path):
    path = tmp_path / "model.gguf"
    expected = transformers_logits(folder, written(folder, path, lambda _: kind))
    with opened(path, "stored", kernels="auto", runner="auto", dtype=dtype) as engine:
        logits = prompt_logits(engine, PROMPT)
    # Activations rounded to 8 bits, and to bfloat16: thousandths of each product, 9 of them one behind another.
    assert off(logits, expected) < 0.03


@pytest.mark.parametrize("kind", gguf_blocks.FORMATS, ids=lambda kind: kind.name)
def test_the_plan_has_the_bytes_that_are_held(kind, folder, tmp_path):
    path = tmp_path / "model.gguf"
    written(folder, path, lambda _: kind)
    with opened(path, "stored") as engine:
        assert bytes_of(loaded(engine)) == engine.parts.weight_bytes == engine.explain()["memory"]["weights"]
        kept = engine.parts.weight_bytes
    with opened(path, "dense") as engine:
        assert kept < 0.33 * engine.parts.weight_bytes, "of float32"


def test_weights_are_plain_numbers_unless_a_config_asks(folder, tmp_path):
    path = tmp_path / "model.gguf"
    written(folder, path, lambda _: Kind.Q8_0)
    with opened(path, "auto") as auto, opened(path, "dense") as dense:
        for engine in (auto, dense):
            assert not any(source.kept for source in engine.parts.weight_map.tensors.values())
        assert torch.equal(prompt_logits(auto, PROMPT), prompt_logits(dense, PROMPT))


def test_a_report_says_which_kernels_read_the_kept_formats(folder, tmp_path):
    path = tmp_path / "model.gguf"
    written(folder, path, mixed)
    with opened(path, "stored") as engine:
        ops = engine.explain()["ops"]
    for weight_format in ("int4_g32_min", "int8_g16", "int8_g16_min"):
        assert ops[f"linear[{weight_format}]"] == "torch"


def test_routers_are_plain_numbers_whatever_a_file_has(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    saved = next(name for name in state if name.endswith("gate.weight"))
    path = tmp_path / "model.gguf"
    raw = quantize(state[saved], Kind.Q8_0)
    write_gguf(tmp_path / "hf", path, q8_0=True, stored={saved: (Kind.Q8_0, raw)})
    with opened(path, "stored") as engine:
        tensors = engine.parts.weight_map.tensors
        assert tensors["layers.0.router.weight"].kept is None
        assert tensors["layers.0.experts.3.gate_up.weight"].kept is not None
        assert prompt_logits(engine, [1, 2, 3]).isfinite().all()


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------

TEXT = [504, 3575, 282, 4649, 314, 7042, 28, 284, 260, 3575, 282, 4806, 314]


def test_smollm2_keeps_its_bits_and_its_logits():
    path = gb.smollm2_path()
    with opened(path, "dense") as engine:
        expected, dense_bytes = prompt_logits(engine, TEXT), engine.parts.weight_bytes
    with opened(path, "stored") as engine:
        logits, kept_bytes = prompt_logits(engine, TEXT), engine.parts.weight_bytes
        assert bytes_of(loaded(engine)) == kept_bytes
    # The same numbers, multiplied by the same kernel.
    assert torch.equal(logits, expected)
    # Of 91 MB in the file, norms apart, nothing is added.
    assert kept_bytes < 0.18 * dense_bytes and kept_bytes < 1.01 * path.stat().st_size


def test_smollm2_on_the_best_kernels_agrees_with_its_dequantized_weights():
    path = gb.smollm2_path()
    with opened(path, "dense") as engine:
        expected = prompt_logits(engine, TEXT).log_softmax(-1)
    with opened(path, "stored", kernels="auto", runner="auto", dtype="bfloat16") as engine:
        logits = prompt_logits(engine, TEXT).log_softmax(-1)
    divergence = (expected.exp() * (expected - logits)).sum(-1)
    assert divergence.mean() < 0.02 and divergence.max() < 0.1
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8
