"""The config from metadata: Hugging Face's spelling, rope scaling, and refusals that name the key."""

import numpy as np
import pytest
import torch

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from tools import gguf_bytes as gb

HEAD_DIM = 64


def open_with(tmp_path, metadata=None, tensors=()):
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file(metadata, [*gb.tiny_tensors(), *tensors]))
    return GgufLoader(path).open()


def config(tmp_path, metadata=None, tensors=()):
    return open_with(tmp_path, metadata, tensors).config


def refusal(tmp_path, metadata=None, tensors=()):
    with pytest.raises(CheckpointError) as caught:
        open_with(tmp_path, metadata, tensors)
    assert str(tmp_path) in str(caught.value)
    return str(caught.value)


def test_a_config_has_hugging_faces_names(tmp_path):
    assert config(tmp_path) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 6,
        "hidden_size": 8,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5, rel=1e-6),
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def test_an_output_tensor_unties_the_head(tmp_path):
    output = ("output.weight", (6, 8), gb.T_F32, bytes(192))
    checkpoint = open_with(tmp_path, None, [output])
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.tensors


def test_key_value_heads_and_rope_base_have_llama_cpps_defaults(tmp_path):
    found = config(tmp_path, {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None})
    assert found["num_key_value_heads"] == 2
    assert found["rope_parameters"]["rope_theta"] == 10000.0


def test_counts_for_each_layer_are_taken_where_they_agree(tmp_path):
    assert config(tmp_path, {"llama.attention.head_count": (gb.ARRAY, (gb.U32, [2, 2]))})["num_attention_heads"] == 2
    assert "head_count" in refusal(tmp_path, {"llama.attention.head_count": (gb.ARRAY, (gb.U32, [2, 4]))})


def test_an_unknown_architecture_is_refused_with_the_near_ones(tmp_path):
    assert "Did you mean 'llama'?" in refusal(tmp_path, {"general.architecture": (gb.STRING, "lama")})
    assert "Known: gemma2, gemma3, gpt2, granite, llama" in refusal(
        tmp_path, {"general.architecture": (gb.STRING, "rwkv7")}
    )


@pytest.mark.parametrize(
    "key, value",
    [
        ("expert_shared_count", (gb.U32, 1)),
        ("attention.sliding_window", (gb.U32, 4096)),
        ("attention.causal", (gb.BOOL, False)),
        ("logit_scale", (gb.F32, 0.5)),
        ("rope.dimension_count", (gb.U32, 2)),
        ("attention.value_length", (gb.U32, 8)),
    ],
)
def test_what_the_family_cannot_express_is_refused_by_name(key, value, tmp_path):
    assert f"llama.{key}" in refusal(tmp_path, {f"llama.{key}": value})


@pytest.mark.parametrize("key, value", [("expert_count", (gb.U32, 0)), ("attention.causal", (gb.BOOL, True))])
def test_neutral_values_are_taken(key, value, tmp_path):
    assert config(tmp_path, {f"llama.{key}": value}) == config(tmp_path)


# --- rope -------------------------------------------------------------------------------------------------------------


def scaling(**values):
    kinds = {str: gb.STRING, float: gb.F32, int: gb.U32, bool: gb.BOOL}
    return {f"llama.rope.scaling.{name}": (kinds[type(value)], value) for name, value in values.items()}


def rope(tmp_path, metadata, tensors=()):
    return config(tmp_path, metadata, tensors)["rope_parameters"]


def test_no_scaling_and_a_factor_of_one_are_default(tmp_path):
    for values in ({"type": "none"}, {"type": "linear", "factor": 1.0}, {"type": "none", "factor": 4.0}):
        assert rope(tmp_path, scaling(**values))["rope_type"] == "default"


def test_linear_scaling_is_taken_in_each_spelling(tmp_path):
    expected = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert rope(tmp_path, scaling(type="linear", factor=4.0)) == expected
    assert rope(tmp_path, scaling(factor=4.0)) == expected
    assert rope(tmp_path, {"llama.rope.scale_linear": (gb.F32, 4.0)}) == expected


def test_yarn_is_spelled_as_transformers_does(tmp_path):
    found = rope(tmp_path, scaling(type="yarn", factor=16.0, original_context_length=4096))
    assert found == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
    }


@pytest.mark.parametrize(
    "values, named",
    [
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "yarn", "factor": 2.0}, "original_context_length"),
        ({"type": "yarn", "factor": 2.0, "original_context_length": 8, "attn_factor": 1.5}, "attn_factor"),
        ({"type": "linear", "factor": -2.0}, "factor"),
        ({"type": "linear", "factor": float("nan")}, "factor"),
        ({"type": "linear", "alpha": 3.0}, "alpha"),
    ],
)
def test_a_scaling_that_cannot_be_expressed_is_refused_by_name(values, named, tmp_path):
    assert named in refusal(tmp_path, scaling(**values))


def wide(base=500000.0):
    """Metadata of heads of 64 dimensions; the projections' shapes are checked by who reads them."""
    return {
        "llama.attention.key_length": (gb.U32, HEAD_DIM),
        "llama.attention.value_length": (gb.U32, HEAD_DIM),
        "llama.rope.freq_base": (gb.F32, base),
    }


def open_wide(tmp_path, divisors, metadata=None):
    path = tmp_path / "wide.gguf"
    tensors = [tensor for tensor in gb.tiny_tensors() if ".attn_q." not in tensor[0] and ".attn_k." not in tensor[0]]
    raw = np.asarray(divisors, dtype="<f4")
    tensors.append(("rope_freqs.weight", raw.shape, gb.T_F32, raw.tobytes()))
    path.write_bytes(gb.tiny_file({**wide(), **(metadata or {})}, tensors))
    return GgufLoader(path).open()


def transformers_divisors(base, parameters):
    """What transformers' llama3 scaling divides the default frequencies by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": base, "rope_type": "llama3", **parameters},
    )
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    default = 1.0 / base ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    return (default / inverse.double()).numpy()


@pytest.mark.parametrize(
    "factor, low, high, original",
    [
        (8.0, 1.0, 4.0, 8192),
        (32.0, 1.0, 4.0, 8192),
        (4.0, 1.0, 8.0, 4096),
        (16.0, 1.0, 4.0, 2048),
        (2.5, 1.0, 3.0, 1000),
    ],
)
def test_llama3_scaling_is_recovered_from_its_tensor(factor, low, high, original, tmp_path):
    parameters = {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    checkpoint = open_wide(tmp_path, transformers_divisors(500000.0, parameters))
    found = checkpoint.config["rope_parameters"]
    assert found["rope_type"] == "llama3" and found["rope_theta"] == 500000.0
    assert {name: found[name] for name in parameters} == pytest.approx(parameters, rel=1e-6)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_a_tensor_of_ones_is_the_default(tmp_path):
    assert open_wide(tmp_path, np.ones(HEAD_DIM // 2)).config["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    "divisors",
    [
        np.linspace(1, 8, HEAD_DIM // 2),
        np.full(HEAD_DIM // 2, np.nan),
        np.full(HEAD_DIM // 2, np.inf),
        np.zeros(HEAD_DIM // 2),
        -np.ones(HEAD_DIM // 2),
        np.full(HEAD_DIM // 2, 0.5),
        np.ones(HEAD_DIM) * 8,
        np.ones(3) * 8,
    ],
)
def test_a_tensor_that_is_no_llama3_scaling_is_refused(divisors, tmp_path):
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_wide(tmp_path, divisors)


def test_a_tensor_beside_another_scaling_is_refused(tmp_path):
    divisors = np.full(HEAD_DIM // 2, 8.0)
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type"):
        open_wide(tmp_path, divisors, scaling(type="linear", factor=2.0))
