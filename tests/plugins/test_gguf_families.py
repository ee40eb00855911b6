"""GGUF files of every family against transformers: tiny random models, written as llama.cpp's converter does."""

import random

import attrs
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engines import engine_of
from families import CAPS, EXPERTS, GPT2, GRANITE, LONGROPE, ORIGINAL, QWEN3_MOE, SMALL, Case, saved
from intarsia.testing import prompt_logits
from tools.gguf_models import save_as, write_gguf

GEMMA = SMALL | {"num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, ORIGINAL: 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 32,
}
LAYERED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@attrs.frozen
class Written:
    """A case, and what its file has that the converter would not write by itself."""

    case: Case
    metadata: dict = attrs.field(factory=dict)
    edit: object = None


def fused(tensors):
    """The tensors with queries, keys and values as one, and gates and ups of experts: llama.cpp takes both."""
    made = {}
    for name, values in tensors.items():
        if ".attn_q." in name:
            made[name.replace("attn_q", "attn_qkv")] = np.concatenate(
                [tensors[name.replace("attn_q", f"attn_{one}")] for one in "qkv"]
            )
        elif "ffn_gate_exps" in name:
            up = tensors[name.replace("gate", "up")]
            made[name.replace("ffn_gate", "ffn_gate_up")] = np.concatenate([values, up], axis=1)
        elif not any(one in name for one in (".attn_k.", ".attn_v.", "ffn_up_exps")):
            made[name] = values
    return made


CASES = (
    Written(Case("llama with biases", LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True))),
    Written(Case("llama fused", LlamaConfig(**SMALL, attention_bias=True)), edit=fused),
    Written(Case("mistral", MistralConfig(**SMALL, sliding_window=None, head_dim=24))),
    Written(Case("mixtral", MixtralConfig(**EXPERTS, head_dim=24))),
    Written(Case("qwen2", Qwen2Config(**SMALL, tie_word_embeddings=True))),
    Written(Case("qwen2 with yarn", Qwen2Config(**SMALL, rope_parameters=YARN))),
    Written(Case("qwen3", Qwen3Config(**SMALL | {"hidden_size": 96}, head_dim=16))),
    Written(Case("qwen3moe", Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True))),
    Written(Case("qwen3moe fused", Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)), edit=fused),
    Written(Case("gemma2", Gemma2Config(**GEMMA, **CAPS))),
    Written(Case("gemma3", Gemma3TextConfig(**GEMMA, rope_parameters=LAYERED, final_logit_softcapping=5.0))),
    Written(
        Case(
            "gemma3 with a pattern",
            Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]),
        ),
        metadata={"attention.sliding_window_pattern": 2},
    ),
    Written(
        Case("gemma3 without windows", Gemma3TextConfig(**GEMMA, layer_types=["full_attention"] * 7)),
        metadata={"attention.sliding_window": None},
    ),
    Written(Case("phi3", Phi3Config(**SMALL, sliding_window=8))),
    Written(Case("phi3 without a window", Phi3Config(**SMALL, sliding_window=None))),
    Written(Case("phi3 with longrope", Phi3Config(**SMALL, rope_parameters=LONGROPE, **{ORIGINAL: 8}))),
    Written(Case("olmo2", Olmo2Config(**SMALL))),
    Written(Case("granite", GraniteConfig(**SMALL, **GRANITE, attention_bias=True, mlp_bias=True))),
    Written(Case("gpt2", GPT2Config(**GPT2))),
    Written(Case("phi2", PhiConfig(**SMALL, layer_norm_eps=1e-3, partial_rotary_factor=0.4))),
    Written(Case("phi2 fused", PhiConfig(**SMALL, layer_norm_eps=1e-3)), edit=fused),
)


@attrs.frozen
class Tiny:
    written: Written
    folder: object
    model: object

    def write(self, path, **changes):
        return write_gguf(
            self.folder, path, **{"metadata": self.written.metadata, "edit": self.written.edit, **changes}
        )


@pytest.fixture(scope="module", params=CASES, ids=lambda one: one.case.name)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    return Tiny(request.param, folder, saved(request.param.case, folder))


PROMPT = random.Random(7).sample(range(256), 40)


@torch.no_grad()
def reference(model):
    return model(torch.tensor([PROMPT])).logits[0].float()


def logits_of(path):
    with engine_of(path, engine={"max_model_len": 128}) as engine:
        return prompt_logits(engine, PROMPT, chunk=17)


def test_logits_of_a_file_equal_those_of_the_model_that_it_was_made_from(tiny, tmp_path):
    tiny.write(tmp_path / "model.gguf")
    difference = (logits_of(tmp_path / "model.gguf") - reference(tiny.model)).abs().max()
    assert float(difference) <= 1e-4


def test_logits_of_a_quantized_file_equal_those_of_its_dequantized_weights(tiny, tmp_path):
    means = tiny.write(tmp_path / "model.gguf", q8_0=True)
    model = AutoModelForCausalLM.from_pretrained(
        save_as(tiny.folder, means, tmp_path / "dequantized"), attn_implementation="eager"
    ).eval()
    expected = reference(model)
    assert float((logits_of(tmp_path / "model.gguf") - expected).abs().max()) <= 1e-4
    assert float((reference(tiny.model) - expected).abs().max()) > 1e-3
