"""What families make of configs: sizes, windows, and values that they refuse by name."""

import json

import pytest

from engines import engine_of
from families import SMALL
from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext
from intarsia.testing import prompt_logits
from intarsia_families import provide_models
from models import edit_json, tiny_llama

FAMILIES = {provider.key: provider for provider in provide_models()}
HEAD = frozenset({"lm_head.weight"})


def spec_of(model_type, names=HEAD, **changes):
    config = {"model_type": model_type, **SMALL, **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    return FAMILIES[model_type].build(ModelContext(config=config)).spec(config, names)


def refusal(model_type, **changes):
    with pytest.raises(CheckpointError) as caught:
        spec_of(model_type, **changes)
    return str(caught.value)


def windows_of(model_type, **changes):
    return tuple(layer.attention.window for layer in spec_of(model_type, **changes).layers)


# --- which checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [
        ("qwen3_next", "qwen3"),
        ("qwen2_moe", "qwen2"),
        ("llama4", "llama"),
        ("gemma3n", "gemma3"),
        ("gemma", "gemma2"),
        ("ministral", "mistral"),
        ("mistral3", "mistral"),
        ("granitemoe", "granite"),
        ("olmo", "olmo2"),
        ("olmo3", "olmo2"),
        ("phi4mm", "phi"),
        ("Qwen2", "qwen2"),
        ("deepseek_v3", "gpt2, granite, llama, mistral"),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_that_are_known(tmp_path, model_type, nearest):
    path, _ = tiny_llama(tmp_path, layers=1)
    edit_json(path / "config.json", model_type=model_type)
    with pytest.raises(CheckpointError) as caught:
        engine_of(path)
    assert repr(model_type) in str(caught.value)
    assert nearest in str(caught.value)


# --- sizes (M01) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite"])
def test_head_dim_null_is_hidden_over_heads_and_given_is_taken(model_type):
    null, given = spec_of(model_type, head_dim=None), spec_of(model_type, head_dim=24, hidden_size=40)
    assert null.layers[0].attention.head_dim == 16
    attention = given.layers[0].attention
    assert attention.head_dim == attention.rope.dim == 24
    assert attention.scale == (1.0 if model_type == "granite" else 24**-0.5)
    sources = FAMILIES[model_type].build(ModelContext(config={})).weight_map(given, HEAD).tensors
    assert sources["layers.3.qkv.weight"].shape == ((4 + 2 + 2) * 24, 40)
    assert sources["layers.3.out.weight"].shape == (40, 4 * 24)


def test_a_tensor_that_would_go_unread_is_an_error(tmp_path):
    """Biases in the file, and a family that has none."""
    path, _ = tiny_llama(tmp_path, layers=1, attention_bias=True)
    edit_json(path / "config.json", model_type="mistral", architectures=["MistralForCausalLM"])
    with pytest.raises(CheckpointError, match=r"would not read: model\.layers\.0\.self_attn\.k_proj\.bias"):
        engine_of(path)


def test_mistral_without_a_window_is_llama_to_the_bit(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=2)
    prompt = list(b"one and the same model")
    with engine_of(path) as engine:
        expected = prompt_logits(engine, prompt)
    edit_json(path / "config.json", model_type="mistral", sliding_window=None)
    assert json.loads((path / "config.json").read_text())["sliding_window"] is None
    with engine_of(path) as engine:
        assert engine.parts.spec.family == "mistral"
        assert prompt_logits(engine, prompt).equal(expected)


def test_norms_of_olmo2_multiply_in_fp32_and_those_of_llama_kin_in_the_models_dtype():
    for model_type, expected in (("olmo2", True), ("qwen3", False)):
        family = FAMILIES[model_type].build(ModelContext(config={}))
        sources = family.weight_map(spec_of(model_type), HEAD).tensors
        norms = {name: source.float32 for name, source in sources.items() if "norm" in name}
        assert len(norms) == 4 * 4 + 1
        assert set(norms.values()) == {expected}
        assert not any(source.float32 for name, source in sources.items() if name not in norms)


# --- windows ----------------------------------------------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = [SLIDING, FULL, SLIDING, FULL]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (4096,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 7}, (7,) * 4),
        ({"sliding_window": 7, "layer_types": [SLIDING] * 4}, (7,) * 4),
        ({"sliding_window": None, "layer_types": [FULL] * 4}, (None,) * 4),
    ],
    ids=str,
)
def test_every_layer_of_mistral_has_the_window_or_none(changes, expected):
    assert windows_of("mistral", **changes) == expected


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 7}, (None,) * 4),
        ({"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 2}, (None,) * 4),
        ({"use_sliding_window": True}, (None,) * 4),  # from layer 28 on
        ({"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, (None, None, 7, 7)),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED}, (7, None, 7, None)),
        ({"layer_types": [FULL] * 4}, (None,) * 4),
    ],
    ids=str,
)
def test_late_layers_of_qwen_have_the_window_or_those_that_layer_types_names(model_type, changes, expected):
    assert windows_of(model_type, **changes) == expected


def test_phi3_has_a_window_where_it_is_given():
    assert windows_of("phi3") == (None,) * 4
    assert windows_of("phi3", sliding_window=2047) == (2047,) * 4


# --- refusals ---------------------------------------------------------------------------------------------------------

USED = {"use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": -4}, "sliding_window is -4"),
        ("mistral", {"sliding_window": True}, "sliding_window is True"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window is '4096'"),
        ("mistral", {"sliding_window": 7, "layer_types": MIXED}, "layer_types"),
        ("mistral", {"sliding_window": None, "layer_types": MIXED}, "layer_types"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
        ("qwen2", {"use_sliding_window": False, "layer_types": MIXED}, "use_sliding_window is False"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": None, "layer_types": MIXED},
            "sliding_window is missing",
        ),
        ("qwen2", USED | {"max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen2", USED | {"max_window_layers": 1.5}, "max_window_layers is 1.5"),
        ("qwen3", USED | {"layer_types": MIXED[:3]}, "layer_types"),
        ("qwen3", USED | {"layer_types": [*MIXED[:3], "linear_attention"]}, "layer_types"),
        ("qwen3", USED | {"layer_types": SLIDING}, "layer_types is 'sliding_attention'"),
        ("qwen3", {"attention_bias": 1}, "attention_bias is 1"),
        ("qwen3", {"num_key_value_heads": ...}, "num_key_value_heads is 32"),
        ("phi3", {"sliding_window": 7, "layer_types": MIXED}, "layer_types"),
        ("phi3", {"sliding_window": []}, "sliding_window is []"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ("olmo2", {"attention_bias": "no"}, "attention_bias is 'no'"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier is 0"),
        ("granite", {"attention_multiplier": float("nan")}, "attention_multiplier is nan"),
        ("granite", {"embedding_multiplier": "12"}, "embedding_multiplier is '12'"),
        ("granite", {"residual_multiplier": -0.22}, "residual_multiplier is -0.22"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("granite", {"logits_scaling": 1e-310}, "logits_scaling is 1e-310"),
        ("granite", {"logits_scaling": 10**400}, "logits_scaling is 1000"),
        ("granite", {"mlp_bias": None, "attention_bias": 0}, "attention_bias is 0"),
        ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
    ids=str,
)
def test_what_a_family_does_not_know_is_refused_by_field_and_value(model_type, changes, named):
    assert named in refusal(model_type, **changes)
