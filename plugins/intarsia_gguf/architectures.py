"""What a GGUF architecture is called in Hugging Face's world, as tables: one `Architecture` each.

GGUF's names are those of llama.cpp's `gguf-py/gguf/constants.py`, Hugging Face's those of transformers' model files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import Factory, frozen

from intarsia.errors import CheckpointError, did_you_mean

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)\.(weight|bias)")


@frozen(kw_only=True)
class Architecture:
    """How one architecture is spelled.

    Attributes:
        name: `general.architecture`, also the prefix of its metadata keys.
        model_type: Hugging Face's name of the family.
        model_class: Hugging Face's name of the model's class.
        outer: tensor names outside the layers, without `.weight` or `.bias`: GGUF's -> Hugging Face's.
        layer: tensor names inside a layer, the same way.
        permuted: names of `layer` whose rows llama.cpp reorders: it rotates neighbouring pairs of a head's dimensions,
            Hugging Face the dimensions i and i + head_dim / 2.
        neutral: metadata keys, without the prefix, that change what the model computes in a way that Hugging Face's
            family does not have -> the value that changes nothing. Any other value is refused.
    """

    name: str
    model_type: str
    model_class: str
    outer: Mapping[str, str]
    layer: Mapping[str, str]
    permuted: frozenset[str] = frozenset()
    neutral: Mapping[str, object] = Factory(dict)

    def tensor_name(self, name: str) -> str:
        """Return Hugging Face's name of a tensor; a name that the tables do not have stays as it is."""
        match = _LAYER.fullmatch(name)
        if match is not None and match[2] in self.layer:
            return f"model.layers.{match[1]}.{self.layer[match[2]]}.{match[3]}"
        stem, _, kind = name.rpartition(".")
        if stem in self.outer and kind in ("weight", "bias"):
            return f"{self.outer[stem]}.{kind}"
        return name

    def is_permuted(self, name: str) -> bool:
        """Whether the rows of the tensor of this GGUF name are reordered."""
        match = _LAYER.fullmatch(name)
        return match is not None and match[2] in self.permuted


_DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DECODER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: `general.architecture` -> its table.
ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            model_type="llama",
            model_class="LlamaForCausalLM",
            outer=_DECODER,
            layer=_DECODER_LAYER,
            permuted=frozenset({"attn_q", "attn_k"}),
            # llama.cpp builds Mixtral, Granite and others from the same architecture by these keys.
            neutral={
                "expert_count": 0,
                "attention.causal": True,
                "attention.sliding_window": 0,
                "attention.clamp_kqv": 0.0,
                "attention.max_alibi_bias": 0.0,
                "attention.scale": 0.0,
                "attn_logit_softcapping": 0.0,
                "final_logit_softcapping": 0.0,
                "logit_scale": 0.0,
                "embedding_scale": 0.0,
                "residual_scale": 0.0,
                "use_parallel_residual": False,
            },
        ),
    )
}


def find_architecture(name: str, path: str) -> Architecture:
    """Return the table of an architecture; raise CheckpointError where there is none."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise CheckpointError(
            f"{path}: metadata 'general.architecture' is {name[:100]!r}, which is not supported."
            + did_you_mean(name[:100], ARCHITECTURES)
        )
    return found
