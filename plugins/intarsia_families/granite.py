"""Granite 3: llama with scales on embeddings, attention, residuals and logits (Granite Team 2024)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, mlp, num_layers, read_rope
from intarsia.types import DecoderSpec, LayerSpec


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    scale = fields.number("attention_multiplier", 1.0)  # not D ** -0.5
    layer = LayerSpec(
        attention=attention(fields, rope, qkv_bias=bias, out_bias=bias, scale=scale),
        mlp=mlp(fields, bias=fields.flag("mlp_bias")),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    return decoder(
        "granite",
        fields,
        tensor_names,
        [layer] * num_layers(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


FAMILY = Family(_read)
