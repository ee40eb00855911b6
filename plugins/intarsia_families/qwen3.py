"""Qwen 3: llama with an RMS norm of each head's queries and keys (Qwen Team 2025)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, mlp, num_layers, read_rope
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' Qwen3Config.
_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    layer = LayerSpec(
        attention=attention(fields, rope, qkv_bias=bias, out_bias=bias, qk_norm="head"),
        mlp=mlp(fields),
    )
    return decoder("qwen3", fields, tensor_names, [layer] * num_layers(fields))


FAMILY = Family(_read)
