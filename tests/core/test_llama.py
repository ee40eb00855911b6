"""The llama family: config -> spec against transformers, and which tensors it reads."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from intarsia.defaults import provide_models
from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext
from intarsia.rope import inverse_frequencies
from intarsia.types import Fit, Unfit
from models import edit_json, tiny_llama

CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
HEAD = frozenset({"lm_head.weight"})
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


(LLAMA,) = provide_models()


def family():
    return LLAMA.build(ModelContext(config=CONFIG))


def spec_of(names=HEAD, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return family().spec(config, frozenset(names))


def refusal(names=HEAD, **changes):
    with pytest.raises(CheckpointError) as caught:
        spec_of(names, **changes)
    return str(caught.value)


# --- which checkpoints ------------------------------------------------------------------------------------------------


def test_it_fits_llama_and_names_what_else_it_was_offered():
    assert LLAMA.fit(ModelContext(config=CONFIG)) == Fit(50, "model_type is llama")
    other = LLAMA.fit(ModelContext(config={"model_type": "qwen3"}))
    assert isinstance(other, Unfit)
    assert "'qwen3'" in other.reason


def test_importing_family_and_loader_loads_no_torch():
    code = (
        "import sys, intarsia.defaults.llama, intarsia.defaults.safetensors, intarsia.references;"
        "assert not {'torch', 'numpy', 'tokenizers', 'huggingface_hub'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


# --- sizes and biases (M01) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"heads": 4, "kv_heads": 4},
        {"heads": 4, "kv_heads": 2},
        {"heads": 4, "kv_heads": 1},
        {"hidden": 40, "heads": 4, "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie": True},
    ],
    ids=str,
)
def test_the_weight_map_covers_exactly_the_tensors_that_transformers_saves(tmp_path, asked):
    path, model = tiny_llama(tmp_path, layers=2, **asked)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    spec = family().spec(json.loads((path / "config.json").read_text()), frozenset(stored))
    weight_map = family().weight_map(spec, frozenset())
    read = {
        name: shape
        for source in weight_map.tensors.values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    assert read == stored
    assert spec.tied == asked.get("tie", False)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads) == (asked.get("heads", 4), asked.get("kv_heads", 2))
    assert attention.scale == model.model.layers[0].self_attn.scaling == 16**-0.5


def test_queries_keys_and_values_are_stacked_in_that_order():
    tensors = family().weight_map(spec_of(attention_bias=True), frozenset()).tensors
    prefix = "model.layers.2.self_attn"
    assert tensors["layers.2.qkv.weight"].names == tuple(f"{prefix}.{part}_proj.weight" for part in "qkv")
    assert tensors["layers.2.qkv.weight"].shape == ((4 + 2 * 2) * 16, 64)
    assert tensors["layers.2.qkv.bias"].shape == (128,)
    assert tensors["layers.2.gate_up.weight"].names == (
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    )
    assert list(tensors)[:2] == ["embed.weight", "layers.0.attention_norm.weight"]
    assert list(tensors)[-2:] == ["norm.weight", "head.weight"]


def test_head_dim_null_or_absent_falls_back_to_hidden_over_heads():
    assert spec_of(head_dim=None).layers[0].attention.head_dim == 16
    assert spec_of(head_dim=24).layers[0].attention.head_dim == 24
    assert spec_of(num_key_value_heads=None).layers[0].attention.num_kv_heads == 4


def test_stored_rotary_frequencies_may_stay_unread_and_nothing_else_may():
    weight_map = family().weight_map(spec_of(), frozenset())
    assert weight_map.ignores("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not weight_map.ignores("model.layers.0.self_attn.q_norm.weight")
    assert not weight_map.ignores("lm_head.weight")


# --- the head ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False, ...], ids=["true", "false", "absent"])
@pytest.mark.parametrize("head", ["another", "equal"])
def test_a_head_in_the_file_is_used_whatever_the_flag_says_as_in_transformers(tmp_path, flag, head):
    path, _ = tiny_llama(tmp_path, layers=1, tie=True)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head == "equal" else torch.randn_like(embedding)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", tie_word_embeddings=flag)
    spec = family().spec(json.loads((path / "config.json").read_text()), frozenset(tensors))
    assert not spec.tied
    assert "head.weight" in family().weight_map(spec, frozenset()).tensors
    reference = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(reference.lm_head.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("flag", [True, None, ...])
def test_without_a_head_the_embedding_is_it(flag):
    spec = spec_of(names=(), tie_word_embeddings=flag)
    assert spec.tied
    assert "head.weight" not in family().weight_map(spec, frozenset()).tensors


def test_a_head_that_is_missing_though_untied_is_refused():
    message = refusal(names=(), tie_word_embeddings=False)
    assert "lm_head.weight" in message
    assert "tie_word_embeddings" in message


# --- rotary embedding (the rest in test_families_rope.py) -------------------------------------------------------------


def test_a_theta_in_rope_parameters_alone_is_used():
    rope = spec_of(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).layers[0].attention.rope
    assert rope is not None
    assert inverse_frequencies(rope, 100)[1].item() == pytest.approx(500_000 ** (-2 / 16), rel=1e-6)


def test_a_rope_that_stretches_lets_sequences_be_longer():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert spec_of(rope_scaling={"type": "linear", "factor": 2.5}).max_len == 10_240
    assert spec_of(rope_scaling=yarn).max_len == 8192
    assert spec_of(rope_scaling=LLAMA3 | {"rope_type": "llama3"}).max_len == 4096


def test_whole_heads_are_rotated_whatever_partial_rotary_factor_says_as_in_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"partial_rotary_factor": 0.5}))
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    rope = spec_of(partial_rotary_factor=0.5).layers[0].attention.rope
    assert rope is not None
    assert expected.shape == (8,)
    torch.testing.assert_close(inverse_frequencies(rope, 100), expected, rtol=1e-6, atol=0)
    # Beside another kind transformers cannot run it.
    message = refusal(partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0})
    assert "partial_rotary_factor is 0.5, not 1; this family rotates whole heads" in message


# --- values that are wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "64", [64], {}, 2**62, float("nan")], ids=str)
def test_a_size_that_is_none_is_refused_by_field_and_value(field, value):
    message = refusal(**{field: value})
    assert f"config: {field} is {value!r}" in message


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_missing_size_is_refused_by_name(field):
    assert f"{field} is missing" in refusal(**{field: ...})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"hidden_size": 66}, "hidden_size is 66"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_act": 1}, "hidden_act is 1"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"mlp_bias": "true"}, "mlp_bias is 'true'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ],
    ids=str,
)
def test_what_this_family_does_not_know_is_refused_by_name(changes, named):
    assert named in refusal(**changes)


def test_unknown_fields_that_change_nothing_are_fine():
    plain = spec_of()
    assert plain == spec_of(
        architectures=["LlamaForCausalLM"],
        pretraining_tp=1,
        sliding_window=None,
        attention_dropout=0.1,
        transformers_version="5.24.0",
        something_else={"a": 1},
    )
    assert (plain.max_len, plain.norm.eps) == (4096, 1e-6)
