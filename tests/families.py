"""One line a model: what `tests/plugins/test_families.py` holds against transformers.

A case is a tiny config of transformers; its model gets random weights. Windows are short, so that they show.
"""

import copy
import json
from pathlib import Path

import torch
from attrs import frozen
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from models import TOKENIZER_SIZE, tiny_tokenizer

#: Of nearly every config; what differs is said in the case. The epsilon is large enough to show.
SMALL = {
    "vocab_size": TOKENIZER_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "bos_token_id": None,
    "eos_token_id": TOKENIZER_SIZE - 1,
    "pad_token_id": None,
}


@frozen
class Case:
    """One model to hold against transformers.

    Attributes:
        name: of the test; begins with the family's.
        config: of the tiny model.
        max_model_len: of the engine. LongRoPE and dynamic NTK depend on it.
        lengths: of the prompts, in tokens. LongRoPE in transformers depends on them.
    """

    name: str
    config: PreTrainedConfig
    max_model_len: int = 128
    lengths: tuple[int, ...] = (40, 9, 17, 32)


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}

GEMMA = SMALL | {"num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 30, "sliding_window": 8}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
TINY_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GPT2 = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 128,
    "vocab_size": TOKENIZER_SIZE,
    "layer_norm_epsilon": 1e-3,
}
EXPERTS = SMALL | {"num_local_experts": 6, "num_experts_per_tok": 2}
QWEN3_MOE = SMALL | {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ORIGINAL = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
}

CASES = (
    Case("llama with biases", LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    Case("mistral", MistralConfig(**SMALL, sliding_window=8)),
    Case("mistral without a window", MistralConfig(**SMALL, sliding_window=None, head_dim=24)),
    Case("qwen2", Qwen2Config(**SMALL)),
    Case("qwen2 with windows", Qwen2Config(**SMALL, **WINDOWS, tie_word_embeddings=True)),
    Case("qwen3", Qwen3Config(**SMALL, head_dim=16)),
    Case("qwen3 with heads wider than the model", Qwen3Config(**SMALL | {"hidden_size": 40}, head_dim=16)),
    Case("qwen3 with windows and biases", Qwen3Config(**SMALL, **WINDOWS, head_dim=24, attention_bias=True)),
    Case("phi3", Phi3Config(**SMALL, sliding_window=8)),
    Case("phi3 beyond longrope's length", Phi3Config(**SMALL, rope_parameters=LONGROPE, **{ORIGINAL: 8})),
    Case(
        "phi3 below longrope's length",
        Phi3Config(**SMALL, rope_parameters=LONGROPE, **{ORIGINAL: 64}),
        max_model_len=64,
    ),
    Case("olmo2", Olmo2Config(**SMALL)),
    Case("olmo2 with biases", Olmo2Config(**SMALL, attention_bias=True)),
    Case("granite", GraniteConfig(**SMALL, **GRANITE, attention_bias=True, mlp_bias=True)),
    Case("gemma2", Gemma2Config(**GEMMA, **CAPS)),
    Case("gemma2 without caps", Gemma2Config(**GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None)),
    Case("gemma3_text", Gemma3TextConfig(**GEMMA)),
    Case(
        "gemma3_text with a cap and biases", Gemma3TextConfig(**GEMMA, final_logit_softcapping=5.0, attention_bias=True)
    ),
    Case("gemma3", Gemma3Config(text_config=GEMMA, vision_config=TINY_VISION, mm_tokens_per_image=4)),
    Case("gpt2", GPT2Config(**GPT2)),
    Case("gpt2 scaled by layer", GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=80)),
    Case("phi", PhiConfig(**SMALL, layer_norm_eps=1e-3)),
    Case("phi tied", PhiConfig(**SMALL, partial_rotary_factor=0.4, tie_word_embeddings=True)),
    Case("mixtral", MixtralConfig(**EXPERTS)),
    Case("mixtral with windows", MixtralConfig(**EXPERTS, sliding_window=8, head_dim=24)),
    Case("qwen3_moe", Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)),
    Case("qwen3_moe in every second layer", Qwen3MoeConfig(**QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[3])),
)


def saved(case: Case, path: Path) -> PreTrainedModel:
    """Make a case's model with random weights, in fp32, and save it with a tokenizer; return it.

    Weights are large enough for logits to differ clearly, norms are random around what a new model has, and biases
    are not zero.
    """
    torch.manual_seed(0)
    config = copy.deepcopy(case.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.2 * noise)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model


def config_of(path: Path) -> dict[str, object]:
    """Return the config.json of a saved model."""
    return json.loads((path / "config.json").read_text())


def as_version_4(config: dict[str, object]) -> dict[str, object]:
    """Return a config as transformers 4 wrote it: `rope_theta` and `rope_scaling` in place of `rope_parameters`."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "full_attention" in rope:  # Gemma 3 had a theta of its own for the layers with a window
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config
