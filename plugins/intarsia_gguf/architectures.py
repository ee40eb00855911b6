"""What a GGUF architecture is called in Hugging Face's world, as tables: one `Architecture` each.

GGUF's names are those of llama.cpp's `gguf-py/gguf/constants.py`, Hugging Face's those of transformers' model files.
What is stored in another order or around another number is what llama.cpp's `convert_hf_to_gguf.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from attrs import Factory, frozen

from intarsia.errors import CheckpointError, did_you_mean

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)\.(weight|bias)")

_DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
#: llama.cpp takes one matrix in place of these three.
_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}

#: What llama.cpp's architectures may have, by metadata keys, and most families have not -> values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.temperature_length": (0,),
    "attn_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0,),
    "embedding_scale": (0.0,),
    "residual_scale": (0.0,),
    "use_parallel_residual": (False,),
}


def _neutral(*known: str, **others: tuple[object, ...]) -> Mapping[str, tuple[object, ...]]:
    """Return what is neutral for a family that knows some of the keys, and has other neutral values for some."""
    return {key: values for key, values in {**_NEUTRAL, **others}.items() if key not in known}


@frozen(kw_only=True)
class Architecture:
    """How one architecture is spelled.

    Attributes:
        name: `general.architecture`, also the prefix of its metadata keys.
        model_type: Hugging Face's name of the family.
        model_class: Hugging Face's name of the model's class.
        mixture: whether it has experts; two tables may have one name if they differ here.
        outer: tensor names outside the layers, without `.weight` or `.bias`: GGUF's -> Hugging Face's.
        layers: what Hugging Face's names of a layer's tensors begin with, before its number.
        layer: tensor names inside a layer, the same way.
        fused: names of tensors that hold those of several names of `layer`, their rows one after another.
        experts: names of tensors that hold a matrix of every expert -> Hugging Face's, where `{}` is the expert's
            number. Several are the parts of that matrix, of equal size.
        permuted: names of `layer` whose rows llama.cpp reorders: it rotates neighbouring pairs of a head's dimensions,
            Hugging Face the dimensions i and i + head_dim / 2.
        shifted: ends of names whose numbers llama.cpp stores 1 above Hugging Face's, as Gemma's norms.
        transposed: names of `layer` whose matrices Hugging Face stores the other way round, as GPT-2's.
        norm: which norm it has, so which epsilon.
        rope: how much of a head is rotated.
        biases: fields of the config that say whether there are biases.
        constants: fields of the config that this architecture fixes.
        renamed: fields of the config that the family calls by another name -> that.
        neutral: metadata keys, without the prefix, that change what the model computes in a way that Hugging Face's
            family does not have -> the values that change nothing. Any other value is refused.
    """

    name: str
    model_type: str
    model_class: str
    mixture: bool = False
    outer: Mapping[str, str] = Factory(lambda: _DECODER)
    layers: str = "model.layers"
    layer: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = Factory(lambda: _FUSED)
    experts: Mapping[str, tuple[str, ...]] = Factory(dict)
    permuted: frozenset[str] = frozenset()
    shifted: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()
    norm: Literal["rms", "layer"] = "rms"
    rope: Literal["whole", "partial", "none"] = "whole"
    biases: tuple[str, ...] = ()
    constants: Mapping[str, object] = Factory(lambda: {"hidden_act": "silu"})
    renamed: Mapping[str, str] = Factory(dict)
    neutral: Mapping[str, tuple[object, ...]] = Factory(_neutral)

    def split(self, name: str) -> tuple[str, str, str]:
        """Return where a tensor is (`blk.` and its layer, or nothing), what it is, and `weight` or `bias`."""
        match = _LAYER.fullmatch(name)
        if match is not None:
            return match[1], match[2], match[3]
        stem, _, kind = name.rpartition(".")
        return "", stem, kind

    def tensor_name(self, name: str) -> str:
        """Return Hugging Face's name of a tensor; a name that the tables do not have stays as it is."""
        index, stem, kind = self.split(name)
        if index and stem in self.layer:
            return f"{self.layers}.{index}.{self.layer[stem]}.{kind}"
        if not index and stem in self.outer and kind in ("weight", "bias"):
            return f"{self.outer[stem]}.{kind}"
        return name


_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA_PERMUTED = frozenset({"attn_q", "attn_k"})


def _experts(gate: str, up: str, down: str) -> Mapping[str, tuple[str, ...]]:
    """Return the names of stacked experts, and of those whose gate and up are one matrix."""
    return {"ffn_gate_exps": (gate,), "ffn_up_exps": (up,), "ffn_down_exps": (down,), "ffn_gate_up_exps": (gate, up)}


_TABLES = (
    # Llama, and Mistral, which llama.cpp does not tell from it.
    Architecture(
        name="llama",
        model_type="llama",
        model_class="LlamaForCausalLM",
        layer=_ATTENTION | _MLP,
        permuted=_LLAMA_PERMUTED,
        biases=("attention_bias", "mlp_bias"),
    ),
    Architecture(
        name="llama",
        model_type="mixtral",
        model_class="MixtralForCausalLM",
        mixture=True,
        layer=_ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_experts(*(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
        permuted=_LLAMA_PERMUTED,
        neutral=_neutral("expert_count"),
    ),
    Architecture(name="qwen2", model_type="qwen2", model_class="Qwen2ForCausalLM", layer=_ATTENTION | _MLP),
    Architecture(
        name="qwen3",
        model_type="qwen3",
        model_class="Qwen3ForCausalLM",
        layer=_ATTENTION | _QK_NORM | _MLP,
        biases=("attention_bias",),
    ),
    Architecture(
        name="qwen3moe",
        model_type="qwen3_moe",
        model_class="Qwen3MoeForCausalLM",
        mixture=True,
        layer=_ATTENTION | _QK_NORM | {"ffn_gate_inp": "mlp.gate"},
        experts=_experts(*(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
        biases=("attention_bias",),
        # llama.cpp has it so, whatever the config said.
        constants={"hidden_act": "silu", "norm_topk_prob": True},
        neutral=_neutral("expert_count"),
    ),
    Architecture(
        name="gemma2",
        model_type="gemma2",
        model_class="Gemma2ForCausalLM",
        layer=_GEMMA,
        shifted=("norm.weight",),
        biases=("attention_bias",),
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        neutral=_neutral("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    Architecture(
        name="gemma3",
        model_type="gemma3_text",
        model_class="Gemma3ForCausalLM",
        layer=_GEMMA | _QK_NORM,
        shifted=("norm.weight",),
        biases=("attention_bias",),
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        neutral=_neutral("attention.sliding_window", "final_logit_softcapping"),
    ),
    Architecture(
        name="phi3",
        model_type="phi3",
        model_class="Phi3ForCausalLM",
        layer={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        fused={},
        rope="partial",
        neutral=_neutral("attention.sliding_window"),
    ),
    Architecture(
        name="olmo2",
        model_type="olmo2",
        model_class="Olmo2ForCausalLM",
        layer={
            **{name: theirs for name, theirs in _ATTENTION.items() if not name.endswith("_norm")},
            **_QK_NORM,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        biases=("attention_bias",),
    ),
    Architecture(
        name="granite",
        model_type="granite",
        model_class="GraniteForCausalLM",
        layer=_ATTENTION | _MLP,
        permuted=_LLAMA_PERMUTED,
        biases=("attention_bias", "mlp_bias"),
        # Here llama.cpp takes a rope that is not finetuned for none at all.
        neutral=_neutral(
            "attention.scale",
            "logit_scale",
            "embedding_scale",
            "residual_scale",
            **{"rope.scaling.finetuned": (True,)},
        ),
    ),
    Architecture(
        name="gpt2",
        model_type="gpt2",
        model_class="GPT2LMHeadModel",
        outer={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        fused={},
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        norm="layer",
        rope="none",
        constants={"activation_function": "gelu_new"},
        renamed={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon",
        },
    ),
    Architecture(
        name="phi2",
        model_type="phi",
        model_class="PhiForCausalLM",
        outer={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        layer={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        norm="layer",
        rope="partial",
        constants={"hidden_act": "gelu_new"},
        neutral=_neutral(use_parallel_residual=(True,)),
    ),
)

#: (`general.architecture`, whether it has experts) -> its table.
ARCHITECTURES: Mapping[tuple[str, bool], Architecture] = {(table.name, table.mixture): table for table in _TABLES}


def find_architecture(path: str, name: str, num_experts: int) -> Architecture:
    """Return the table of an architecture; raise CheckpointError where there is none."""
    found = ARCHITECTURES.get((name, num_experts > 0))
    if found is not None:
        return found
    names = list(dict.fromkeys(table.name for table in _TABLES))
    if name in names:
        raise CheckpointError(
            f"{path}: metadata '{name}.expert_count' is {num_experts}, but models of this architecture have "
            + ("no experts" if num_experts else "experts")
        )
    raise CheckpointError(
        f"{path}: metadata 'general.architecture' is {name[:100]!r}, which is not supported."
        + did_you_mean(name[:100], names)
    )
