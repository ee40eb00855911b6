"""OLMo 2: norms on what blocks give, and of queries and keys over all heads together (OLMo Team 2024)."""

from __future__ import annotations

from intarsia.families import Family, Fields, Names, attention, decoder, head_dim, mlp, num_layers, read_rope
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' Olmo2Config.
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    layer = LayerSpec(
        attention=attention(fields, rope, qkv_bias=bias, out_bias=bias, qk_norm="all"),
        mlp=mlp(fields),
        norms="post",
    )
    return decoder("olmo2", fields, tensor_names, [layer] * num_layers(fields))


FAMILY = Family(
    _read,
    Names(
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        norm_float32=True,  # they multiply in fp32
    ),
)
