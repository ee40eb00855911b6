"""GGUF files of every family against transformers: tiny random models, written as llama.cpp's converter does."""

import random
import re

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
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engines import engine_of
from families import CAPS, EXPERTS, GPT2, GRANITE, LONGROPE, ORIGINAL, QWEN3_MOE, SMALL, Case, saved
from intarsia.errors import CheckpointError
from intarsia.testing import prompt_logits
from intarsia_gguf.checkpoint import GgufLoader
from intarsia_gguf.config import _fraction
from intarsia_gguf.fields import FIELDS
from intarsia_gguf.header import read_header
from intarsia_gguf.metadata import Metadata
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

#: What transformers' own loader of GGUF files can read.
LOADED = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "gpt2")


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


def test_our_files_mean_the_same_to_the_loader_of_transformers(tiny, tmp_path):
    """So how the tests write them is not only our reading of llama.cpp's converter."""
    if tiny.written.edit or tiny.model.config.model_type not in LOADED:
        pytest.skip("transformers does not load it")
    tiny.write(tmp_path / "model.gguf")
    expected = tiny.model.state_dict()
    found = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=tiny.model)["tensors"]
    assert len(found) >= len(expected) - tiny.model.config.tie_word_embeddings
    for name, values in found.items():
        # The norms of Gemma come back from around 1.
        assert torch.allclose(values, expected[name], rtol=0, atol=1e-6), name


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a case -> the folder that it is saved in, when it is asked for."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("refused")
            saved(next(one.case for one in CASES if one.case.name == name), made[name])
        return made[name]

    return folder


@pytest.mark.parametrize(
    "name, metadata, said",
    [
        ("qwen2", {"expert_count": 4}, "qwen2.expert_count' is 4, but models of this architecture have no experts"),
        ("qwen3moe", {"expert_count": 0}, "qwen3moe.expert_count' is 0, but models of this architecture have experts"),
        ("mixtral", {"expert_count": 5000}, "llama.expert_count' is 5000"),
        ("mixtral", {"expert_used_count": None}, "llama.expert_used_count"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "only 0.0 or 1.0 is supported"),
        ("qwen3moe", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func"),
        ("qwen2", {"attention.sliding_window": 8}, "qwen2.attention.sliding_window"),
        ("olmo2", {"attention.sliding_window": 8}, "olmo2.attention.sliding_window"),
        ("qwen3", {"attention.scale": 0.5}, "qwen3.attention.scale"),
        ("qwen3", {"rope.dimension_count": 8}, "qwen3.rope.dimension_count"),
        ("granite", {"logit_scale": None}, "granite.logit_scale"),
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned"),
        ("phi2", {"use_parallel_residual": False}, "phi2.use_parallel_residual"),
        ("phi2", {"rope.dimension_count": 5}, "phi2.rope.dimension_count' is 5, an odd number"),
        ("phi2", {"rope.dimension_count": 18}, "phi2.rope.dimension_count"),
        ("gemma2", {"rope.freq_base_swa": 5e5}, "gemma2.rope.freq_base_swa"),
        ("gemma2", {"attention.sliding_window_pattern": [True, False]}, "has 2 items, but there are 7 layers"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping"),
        ("phi3 with longrope", {"rope.scaling.attn_factor": None}, "phi3.rope.scaling.attn_factor"),
        ("phi3 with longrope", {"rope.scaling.original_context_length": None}, "original_context_length"),
        ("phi3 with longrope", {"rope.scaling.type": "yarn"}, "beside longrope's tensors"),
        ("phi3 with longrope", {"rope.scaling.factor": 4.0}, "phi3.rope.scaling.factor"),
        ("phi3 with longrope", {"rope.dimension_count": 8}, "has the shape (6,); longrope needs (4,)"),
        ("phi3", {"rope.scaling.attn_factor": 1.2}, "phi3.rope.scaling.attn_factor"),
        ("gpt2", {"attention.layer_norm_epsilon": None}, "gpt2.attention.layer_norm_epsilon"),
    ],
)
def test_metadata_that_the_family_cannot_express_is_refused_by_name(name, metadata, said, folders, tmp_path):
    write_gguf(folders(name), tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        GgufLoader(tmp_path / "model.gguf").open()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda tensors: tensors | {"rope_freqs.weight": np.full(6, 2.0)}, "'rope_freqs.weight' is there beside"),
        (
            lambda tensors: {name: values for name, values in tensors.items() if "short" not in name},
            "'rope_factors_short.weight' is missing",
        ),
    ],
)
def test_half_of_longrope_is_refused(edit, said, folders, tmp_path):
    write_gguf(folders("phi3 with longrope"), tmp_path / "model.gguf", edit=edit)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        GgufLoader(tmp_path / "model.gguf").open()


# --- what files leave out ---------------------------------------------------------------------------------------------


def config_of(folder, path, metadata=None):
    write_gguf(folder, path, metadata=metadata)
    return GgufLoader(path).open().config


def test_keys_that_are_absent_have_llama_cpps_defaults(folders, tmp_path):
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention.sliding_window": None}
    gemma2 = config_of(folders("gemma2"), tmp_path / "gemma2.gguf", caps)
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"]) == (50.0, 30.0)
    assert gemma2["sliding_window"] == 4096
    zero = config_of(folders("gemma2"), tmp_path / "zero.gguf", {"attn_logit_softcapping": 0.0})
    assert zero["attn_logit_softcapping"] is None
    scales = {"attention.scale": None, "embedding_scale": 0.0, "residual_scale": None}
    granite = config_of(folders("granite"), tmp_path / "granite.gguf", scales)
    assert granite["attention_multiplier"] == 16**-0.5
    assert (granite["embedding_multiplier"], granite["residual_multiplier"]) == (1.0, 1.0)
    experts = config_of(folders("qwen3moe"), tmp_path / "experts.gguf", {"expert_feed_forward_length": None})
    assert experts["moe_intermediate_size"] == 96 // 3
    phi3 = config_of(folders("phi3"), tmp_path / "phi3.gguf", {"rope.scaling.original_context_length": None})
    assert phi3["original_max_position_embeddings"] == phi3["max_position_embeddings"] == 128
    bases = {"rope.freq_base": None, "rope.freq_base_swa": None}
    for keys, expected in ((bases, 10_000.0), ({"rope.freq_base_swa": 5000.0}, 5000.0)):
        gemma3 = config_of(folders("gemma3"), tmp_path / f"gemma3-{expected}.gguf", keys)
        assert gemma3["rope_parameters"]["sliding_attention"]["rope_theta"] == expected


def test_damaged_headers_give_a_checkpoint_error_or_a_model(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    tiny.write(path)
    raw, generator = path.read_bytes(), random.Random(tiny.written.case.name)
    first = min(info.offset for info in read_header(path).tensors)
    outcomes = set()
    for _ in range(100):
        damaged = bytearray(raw)
        for _ in range(generator.choice((1, 2, 4))):
            damaged[generator.randrange(24, first)] = generator.choice((0, 1, 255, generator.randrange(256)))
        path.write_bytes(damaged)
        try:
            outcomes.add(GgufLoader(path).open().config["model_type"])
        except CheckpointError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
    assert len(outcomes) > 1


def test_a_pattern_may_be_a_period_or_a_list(folders, tmp_path):
    types = {True: "sliding_attention", False: "full_attention"}
    listed = [True, False, False, True, True, False, True]
    for number, (pattern, slides) in enumerate(
        [(0, [True] * 7), (1, [False] * 7), (3, [True, True, False] * 2 + [True]), (listed, listed)]
    ):
        keys = {"attention.sliding_window_pattern": pattern}
        config = config_of(folders("gemma3"), tmp_path / f"{number}.gguf", keys)
        assert config["layer_types"] == [types[one] for one in slides]


@pytest.mark.parametrize("model_type, largest", [("gemma2", 46), ("gemma3_text", 62)])
def test_the_27bs_of_gemma_divide_scores_by_their_own_width(model_type, largest):
    """Published configs: 4608 / 32 = 144 and 5376 / 32 = 168, where heads have 128 dimensions; the others 256."""
    common = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "rope_parameters": {"rope_theta": 1e4}}
    for layers, expected in ((largest, 168), (largest - 1, 128)):
        found = FIELDS[model_type](Metadata("", {}), model_type, common | {"num_hidden_layers": layers})
        assert found["query_pre_attn_scalar"] == expected


def test_a_part_of_a_head_survives_being_a_fraction():
    """int(44 * (30 / 44)) is 29 in binary; every even part of heads up to 256 comes back."""
    for head_dim in range(2, 258, 2):
        for dim in range(2, head_dim + 2, 2):
            assert int(head_dim * _fraction(dim, head_dim)) == dim
