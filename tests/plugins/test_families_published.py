"""Configs as they were published, and checkpoints as the hub has them: what transformers no longer writes itself."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engines import engine_of
from families import CASES, config_of, saved
from intarsia.errors import CheckpointError
from intarsia.models.weights import num_parameters
from intarsia.protocols import ModelContext
from intarsia.testing import prompt_logits
from intarsia.types import MoeSpec
from intarsia_families import provide_models
from models import edit_json

FAMILIES = {provider.key: provider for provider in provide_models()}

#: What their config.json says of the model; what has no bearing on logits is left out.
PUBLISHED = {
    "openai-community/gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "microsoft/phi-2": {
        "model_type": "phi",
        "architectures": ["PhiForCausalLM"],
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
    "google/gemma-2-2b": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "google/gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
published = pytest.mark.parametrize("name", PUBLISHED)


def family_of(config):
    return FAMILIES[config["model_type"]].build(ModelContext(config=config))


def names_of(config):
    """Return as many tensor names as a mixture asks for, with a head where the config unties it."""
    head = {"lm_head.weight"} if config.get("tie_word_embeddings") is False else set()
    return frozenset(head | {str(index) for index in range(10_000)})


def spec_of(config):
    return family_of(config).spec(config, names_of(config))


@published
def test_a_published_config_means_what_transformers_makes_of_it(name):
    config = PUBLISHED[name]
    facts = {key: value for key, value in json.loads(json.dumps(config)).items() if key != "model_type"}
    normal = AutoConfig.for_model(config["model_type"], **facts).to_dict()
    assert "rope_theta" not in normal
    assert spec_of(normal) == spec_of(config)


@published
def test_the_weights_of_a_published_model_count_as_many_parameters_as_in_transformers(name):
    config = json.loads(json.dumps(PUBLISHED[name]))
    kind = config.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    model.tie_weights()
    whole = getattr(getattr(model, "model", None), "language_model", model)
    expected = sum(parameter.numel() for parameter in whole.parameters())
    weight_map = family_of(PUBLISHED[name]).weight_map(spec_of(PUBLISHED[name]), names_of(PUBLISHED[name]))
    assert num_parameters(weight_map) == expected > 1e8


def test_gemma_3_has_five_windows_and_short_waves_to_each_layer_that_sees_all():
    layers = [layer.attention for layer in spec_of(PUBLISHED["google/gemma-3-4b-it"]).layers]
    assert len(layers) == 34
    for index, heads in enumerate(layers):
        rope = heads.rope
        if index % 6 == 5:
            assert (heads.window, rope.kind, rope.base, rope.factor) == (None, "linear", 1e6, 8.0)
        else:
            assert (heads.window, rope.kind, rope.base) == (1024, "default", 1e4)
        assert (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.scale) == (8, 4, 256, 256**-0.5)
    short = spec_of(PUBLISHED["google/gemma-3-1b-it"] | {"sliding_window_pattern": 2}).layers
    assert [layer.attention.window for layer in short] == [512, None] * 13


# --- checkpoints as the hub has them ----------------------------------------------------------------------------------


def rename(path, change, **more):
    """Rename a checkpoint's tensors; None leaves one out."""
    file = path / "model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name is not None} | more, file)


def made(tmp_path, name):
    case = next(case for case in CASES if case.name == name)
    return saved(case, tmp_path / "model"), tmp_path / "model"


@torch.no_grad()
def check(model, path):
    """Logits through an engine equal those of the model in memory."""
    prompt = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = model(torch.tensor([prompt])).logits[0]
    with engine_of(path, engine={"max_model_len": 64}) as engine:
        assert float((prompt_logits(engine, prompt) - expected).abs().max()) <= 1e-4


def test_gpt2_loads_as_first_published_without_prefix_and_with_its_masks(tmp_path):
    model, path = made(tmp_path, "gpt2")
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(4)}
    masks |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(4)}
    rename(path, lambda name: name.removeprefix("transformer."), **masks)
    check(model, path)


def test_gpt2_loads_with_its_prefix_and_its_masks(tmp_path):
    model, path = made(tmp_path, "gpt2")
    rename(path, str, **{f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(4)})
    check(model, path)


def test_gpt2_uses_a_head_of_its_own(tmp_path):
    model, path = made(tmp_path, "gpt2")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    rename(path, str, **{"lm_head.weight": model.lm_head.weight.detach()})
    check(model, path)


def test_gemma_3_loads_by_the_names_that_its_modules_have(tmp_path):
    model, path = made(tmp_path, "gemma3")
    assert "language_model.model.norm.weight" in load_file(path / "model.safetensors")
    rename(path, lambda name: f"model.{name.replace('language_model.model', 'language_model')}")
    check(model, path)


@pytest.mark.parametrize("head", ["language_model.lm_head.weight", "lm_head.weight"])
def test_gemma_3_uses_a_head_of_its_own_under_either_name(tmp_path, head):
    model, path = made(tmp_path, "gemma3")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    loaded = head == "lm_head.weight"

    def change(name):
        return f"model.{name.replace('language_model.model', 'language_model')}" if loaded else name

    rename(path, change, **{head: model.lm_head.weight.detach()})
    check(model, path)


def test_gemma_3_loads_without_its_image_encoder(tmp_path):
    model, path = made(tmp_path, "gemma3")
    rename(path, lambda name: name if name.startswith("language_model.") else None)
    check(model, path)


def test_gemma_3_refuses_a_text_tensor_that_it_would_not_read(tmp_path):
    _, path = made(tmp_path, "gemma3")
    rename(path, str, **{"language_model.model.layers.0.self_attn.sinks": torch.ones(4)})
    with pytest.raises(CheckpointError, match=r"would not read: language_model\.model\.layers\.0\.self_attn\.sinks"):
        engine_of(path, engine={"max_model_len": 64})


@pytest.mark.parametrize("version", [4, 5])
def test_gemma_3_refuses_to_be_without_the_head_that_its_config_asks_for(tmp_path, version):
    _, path = made(tmp_path, "gemma3")
    text = config_of(path)["text_config"] | {"tie_word_embeddings": False}
    changes = {"tie_word_embeddings": False} if version == 5 else {"tie_word_embeddings": ..., "text_config": text}
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"no language_model\.lm_head\.weight, .* the head is missing"):
        engine_of(path, engine={"max_model_len": 64})


def test_qwen3_moe_takes_either_name_of_the_number_of_experts(tmp_path):
    model, path = made(tmp_path, "qwen3_moe")
    edit_json(path / "config.json", num_local_experts=..., num_experts=config_of(path)["num_local_experts"])
    check(model, path)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("openai-community/gpt2", {"add_cross_attention": True}, r"add_cross_attention is True, not False"),
        ("openai-community/gpt2", {"n_head": 7}, r"n_embd is 768, not a multiple of n_head \(7\)"),
        ("openai-community/gpt2", {"activation_function": "relu"}, r"activation_function is 'relu', not one of"),
        ("openai-community/gpt2", {"n_layer": 10**9}, r"n_layer is 1000000000, not a whole number from 1 to 4096"),
        ("openai-community/gpt2", {"architectures": ["GPT2Model"]}, r"ends in 'LMHeadModel'"),
        ("microsoft/phi-2", {"qk_layernorm": True}, r"qk_layernorm is True, not False"),
        ("microsoft/phi-2", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5, not"),
        ("google/gemma-2-2b", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
        ("google/gemma-2-2b", {"layer_types": ["full_attention"]}, r"layer_types is .* not a list of 26 out of"),
        ("google/gemma-2-2b", {"layer_types": ["chunked_attention"] * 26}, r"layer_types is .* not a list of 26"),
        ("google/gemma-2-2b", {"sliding_window": None}, r"sliding_window is missing"),
        ("google/gemma-2-2b", {"attn_logit_softcapping": 0}, r"attn_logit_softcapping is 0, not a"),
        ("google/gemma-2-2b", {"query_pre_attn_scalar": -1}, r"query_pre_attn_scalar is -1, not a"),
        ("google/gemma-2-2b", {"hidden_activation": "gelu"}, r"hidden_activation is 'gelu', not one of"),
        ("google/gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0, not None"),
        ("google/gemma-3-1b-it", {"sliding_window_pattern": 0}, r"sliding_window_pattern is 0, not a whole number"),
        ("google/gemma-3-4b-it", {"text_config": []}, r"text_config is \[\], not an object"),
        ("google/gemma-3-4b-it", {"text_config": {"head_dim": 7}}, r"head_dim is 7, not even"),
        ("google/gemma-3-4b-it", {"text_config": {"num_hidden_layers": 0}}, r"text_config\.num_hidden_layers is 0"),
        ("mistralai/Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, not at most"),
        ("mistralai/Mixtral-8x7B-v0.1", {"num_local_experts": 0}, r"num_local_experts is 0, not a whole number"),
        ("mistralai/Mixtral-8x7B-v0.1", {"num_local_experts": None}, r"num_local_experts is missing"),
        ("Qwen/Qwen3-30B-A3B", {"num_experts_per_tok": 129}, r"num_experts_per_tok is 129, not at most num_experts"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": 3}, r"mlp_only_layers is 3, not a list of layers' numbers"),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\], not a list"),
        ("Qwen/Qwen3-30B-A3B", {"decoder_sparse_step": 0}, r"decoder_sparse_step is 0, not a whole number"),
        ("Qwen/Qwen3-30B-A3B", {"norm_topk_prob": 1}, r"norm_topk_prob is 1, not true or false"),
    ],
)
def test_a_value_that_a_family_does_not_know_is_refused_by_its_name(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        spec_of(PUBLISHED[name] | changes)


def test_a_config_that_asks_for_billions_of_experts_is_refused_before_they_have_names():
    config = PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"num_experts": 65_536, "num_hidden_layers": 4096}
    with pytest.raises(CheckpointError, match="268435456 experts together; the checkpoint has 10001 tensors"):
        family_of(config).weight_map(spec_of(config), names_of(config))


def test_qwen3_moe_can_have_no_mixture_at_all():
    config = PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"mlp_only_layers": list(range(48)), "num_experts": None}
    assert not any(isinstance(layer.mlp, MoeSpec) for layer in spec_of(config).layers)
